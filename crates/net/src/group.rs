//! Groups of connections: several connections to one peer used as one link, with flow control and two priorities.
//!
//! # Participants
//! The **requesting** side opens the connections ([`Group`]); the **replying** side counts the bytes sent on each
//! ([`Flow`]).
//!
//! # Goals
//! - A foreground request takes little more than one round trip, even while background replies fill the link.
//! - Background replies fill the link without building a queue in it: the requesting side grants credit in bytes on the
//!   link for all connections together, the replying side sends no background reply beyond that, and what waits there
//!   can be overtaken.
//! - The same for the bodies that the requesting side sends, which would delay its own requests.
//!
//! # Non-goals
//! The meaning of requests and replies; establishing connections ([`crate::connect_any`], [`crate::Backoff`]).
//!
//! Nothing here does I/O or reads a clock: the caller passes times in, and sends what is returned. The rationale is in
//! `docs/decisions/0013-background-flow-by-credit.md`, and its limits in `0027-groups-of-connections.md`.

use std::collections::VecDeque;
use std::time::Duration;

mod accounts;
mod clocks;
mod flow;
mod queue;
mod recent;
mod sending;
mod trial;
mod turns;
mod window;

pub use accounts::Accounts;
pub use flow::{Flow, MAX_UNREPORTED};
pub use queue::Queue;
pub use sending::{MAX_PART, MAX_UNANSWERED, NotSent, Sending};
pub use trial::{ConnectionTrials, TrialSample};
pub use turns::Turns;
pub use window::{MAX_WINDOW, Mark, SampleContext, Window};

use sending::Bodies;

/// If the window is less than this many replies, each of which occupies the link for at least the time below,
/// background requests use one connection.
const NARROW: u64 = 16;
const NARROW_SECONDS: f64 = 0.001;

/// Maximum credit marks not yet matched by a reply; the oldest are dropped.
const MAX_MARKS: usize = 4096;

/// The limits of a group.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Number of connections.
    pub connections: usize,
    /// Unanswered requests on each.
    pub requests: usize,
}

/// The credit granted to the replying side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Bytes of all replies received on it since it was opened.
    pub received: u64,
    /// Bytes that may be in flight on all connections before background replies are held back.
    pub window: u64,
}

/// What a reply reveals about the link.
#[derive(Clone, Copy, Debug)]
pub struct ReplySample {
    /// Its bytes on the link.
    pub bytes: u64,
    /// The `received` of the last credit on its connection when it was sent.
    pub echo: u64,
    /// Nothing else was waiting to be sent.
    pub last: bool,
    /// The mark of its request; none if that was before the connection was open.
    pub asked: Option<Mark>,
}

#[derive(Debug)]
struct Connection<R> {
    role: R,
    /// Total weight of its requests.
    weight: u64,
    requests: usize,
    bodies: Bodies,
    /// Bytes received on it, and how many of them were reported in credits.
    received: u64,
    reported: u64,
    /// Credits granted, each with the mark of that time.
    marks: VecDeque<(u64, Mark)>,
}

/// The requesting side of a group: connections to a peer, each with a role `R` that determines what it may carry. The
/// caller numbers them from 0; calls about a connection that is not open are ignored.
#[derive(Debug)]
pub struct Group<R> {
    connections: Vec<Option<Connection<R>>>,
    limits: Limits,
    /// Minimum length of a background reply, in bytes before compression.
    answer: u64,
    window: Window,
    sending: Sending,
}

impl<R: Copy> Group<R> {
    /// A group without connections. The window in bytes on the link is determined automatically if none is given;
    /// `answer` is the minimum length of a background reply, in bytes.
    #[must_use]
    pub fn new(window: Option<u64>, answer: u64, limits: Limits) -> Self {
        Self {
            connections: Vec::new(),
            limits,
            answer,
            window: Window::receiving(window, answer),
            sending: Sending::new(),
        }
    }

    /// The flow-control window for background data received.
    #[must_use]
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// The limit for data sent.
    #[must_use]
    pub fn sending(&self) -> &Sending {
        &self.sending
    }

    /// A connection was opened. Returns the first credit to send on it.
    pub fn open(&mut self, number: usize, role: R) -> Credit {
        if self.connections.len() <= number {
            self.connections.resize_with(number + 1, || None);
        }
        self.connections[number] = Some(Connection {
            role,
            weight: 0,
            requests: 0,
            bodies: Bodies::default(),
            received: 0,
            reported: 0,
            marks: VecDeque::new(),
        });
        Credit {
            received: 0,
            window: self.window.size(),
        }
    }

    /// All connections were lost; what was known about the link may be outdated.
    pub fn close(&mut self) {
        self.connections.clear();
        self.window.reset();
        self.sending.close();
    }

    /// The roles of the open connections.
    pub fn roles(&self) -> impl Iterator<Item = R> {
        self.connections.iter().flatten().map(|open| open.role)
    }

    /// The connection for a request: the least loaded of those with a suitable role. On a narrow link, background
    /// requests use the one that has carried most so far: TCP paces a single connection by its acknowledgements;
    /// several overflow a short queue with their bursts.
    pub fn choose(&self, background: bool, fits: impl Fn(R) -> bool) -> Option<usize> {
        let candidates = self
            .connections
            .iter()
            .enumerate()
            .filter_map(|(n, open)| Some((n, open.as_ref()?)))
            .filter(|(_, open)| fits(open.role) && open.requests < self.limits.requests);
        let chosen = match background && self.is_narrow() {
            true => candidates.max_by_key(|(n, open)| (open.received, *n)),
            false => candidates.min_by_key(|(n, open)| (open.weight, *n)),
        };
        chosen.map(|(n, _)| n)
    }

    fn is_narrow(&self) -> bool {
        self.window.has_started()
            && !self.window.is_degraded()
            && self.window.size() < self.answer * NARROW
            && self.window.rate() < self.answer as f64 / NARROW_SECONDS
    }

    /// A request of this weight is sent on a connection; false if it is not open.
    pub fn request(&mut self, number: usize, weight: u64) -> bool {
        let open = self.connections.get_mut(number).and_then(Option::as_mut);
        open.is_some_and(|open| {
            open.weight += weight;
            open.requests += 1;
            true
        })
    }

    /// A request of this weight was answered, or will not be.
    pub fn end_request(&mut self, number: usize, weight: u64) {
        if let Some(Some(open)) = self.connections.get_mut(number) {
            open.weight -= weight;
            open.requests -= 1;
        }
    }

    /// The body of a request is sent on a connection; `last`: no other is waiting. Returns the byte count at which the
    /// peer has received all of it, for [`Group::arrived`].
    pub fn send_body(
        &mut self,
        number: usize,
        bytes: u64,
        last: bool,
        now: Duration,
    ) -> Option<u64> {
        let open = self.connections.get_mut(number)?.as_mut()?;
        Some(self.sending.sent(&mut open.bodies, bytes, last, now))
    }

    /// The request of a body was answered, or will not be.
    pub fn end_body(&mut self, bytes: u64) {
        self.sending.answered(bytes);
    }

    /// The peer has received this many body bytes on a connection; with `at`, the last at that many microseconds of its
    /// clock.
    ///
    /// # Errors
    /// [`NotSent`] if that is more than was sent.
    pub fn arrived(
        &mut self,
        number: usize,
        bytes: u64,
        at: Option<u64>,
        now: Duration,
    ) -> Result<(), NotSent> {
        match self.connections.get_mut(number) {
            Some(Some(open)) => {
                let at = at.map(|at| (at, self.window.queue()));
                let bodies = &mut open.bodies;
                self.sending.arrived(bodies, bytes, at, number, now)
            }
            _ => Ok(()),
        }
    }

    /// Bytes of a reply arrived on a connection.
    pub fn received(&mut self, number: usize, bytes: u64) {
        self.window.arrived(bytes);
        if let Some(Some(open)) = self.connections.get_mut(number) {
            open.received += bytes;
        }
    }

    /// The credits to send: for each connection on which enough has arrived since the last one. All are checked,
    /// because a smaller window lowers the threshold.
    pub fn credits(&mut self, now: Duration) -> Vec<(usize, Credit)> {
        let window = self.window.size();
        let most = MAX_UNREPORTED / self.limits.connections as u64;
        let step = (window / 64).clamp(1 << 10, most);
        let mark = self.window.mark(now);
        let mut credits = Vec::new();
        for (n, open) in self.connections.iter_mut().enumerate() {
            let Some(open) = open else { continue };
            if open.received - open.reported < step {
                continue;
            }
            let received = open.received;
            open.reported = received;
            if open.marks.len() >= MAX_MARKS {
                open.marks.pop_front();
            }
            open.marks.push_back((received, mark));
            credits.push((n, Credit { received, window }));
        }
        credits
    }

    /// A reply sent under credit arrived on a connection, and was counted.
    pub fn sample(&mut self, number: usize, answer: ReplySample, now: Duration) {
        let Some(Some(open)) = self.connections.get_mut(number) else {
            return;
        };
        let shown = |credit: &&(u64, Mark)| credit.0 <= answer.echo;
        while open.marks.get(1).as_ref().is_some_and(shown) {
            open.marks.pop_front();
        }
        let credit = open.marks.front().filter(shown).map(|(_, mark)| *mark);
        // A reply is sent when it has been requested and there is credit, whichever is later.
        let mark = match (credit, answer.asked) {
            (Some(a), Some(b)) if a.at() > b.at() => a,
            (a, b) => match b.or(a) {
                Some(mark) => mark,
                None => return,
            },
        };
        let seen = SampleContext {
            limited: answer.last,
            other: self.sending.before(),
        };
        self.window.sample(now, mark, number, answer.bytes, seen);
    }
}
