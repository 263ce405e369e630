//! Several connections to one peer, used as one link: which of them a message goes on, and how much may be under way.
//!
//! # Participants
//! The side that **asks** opens the connections ([`Group`]); the side that **answers** counts what leaves on each ([`Flow`]).
//!
//! # Goals
//! - What somebody waits for costs a round trip and little more, also while background answers fill the link.
//! - Background answers fill the link without a queue in it: the asking side gives credit in bytes of the link for all
//!   connections together, the answering side sends no background answer beyond that, and what waits there can be
//!   overtaken.
//! - The same for what the asking side sends itself, which stands before its own requests.
//!
//! # Non-goals
//! What is asked for and what an answer means; making connections ([`crate::connect_any`], [`crate::Backoff`]).
//!
//! Nothing here does I/O or looks at a clock: times are told, and what is returned is to be sent. Why it is so is in
//! `docs/decisions/0013-background-flow-by-credit.md`, where it ends in `0027-groups-of-connections.md`.

use std::collections::VecDeque;
use std::time::Duration;

mod clocks;
mod flow;
mod queue;
mod recent;
mod sending;
mod trial;
mod turns;
mod window;

pub use flow::{Flow, MAX_UNREPORTED};
pub use queue::Queue;
pub use sending::{MAX_PART, MAX_UNANSWERED, NotSent, Sending};
pub use trial::{ConnectionTrials, TrialSample};
pub use turns::Turns;
pub use window::{MAX_WINDOW, Mark, SampleContext, Window};

use sending::Bodies;

/// With a window of less than so many answers, each of which takes the link longer than this, background requests go on one
/// connection.
const NARROW: u64 = 16;
const NARROW_SECONDS: f64 = 0.001;

/// Marks of credits that no answer has shown yet, at most; the oldest are forgotten.
const MAX_MARKS: usize = 4096;

/// What a group may have.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections.
    pub connections: usize,
    /// Requests without an answer on each.
    pub requests: usize,
}

/// What the answering side is told about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Bytes of all answers that arrived on it since it was opened.
    pub received: u64,
    /// Bytes that may be under way on all connections before a background answer is held back.
    pub window: u64,
}

/// What an answer says about the link.
#[derive(Clone, Copy, Debug)]
pub struct ReplySample {
    /// Its bytes on the link.
    pub bytes: u64,
    /// What the answering side had been told to have arrived on the connection when it left.
    pub echo: u64,
    /// Nothing else waited to leave.
    pub last: bool,
    /// What was known when it was asked for; none when that was before the connection was open.
    pub asked: Option<Mark>,
}

#[derive(Debug)]
struct Connection<R> {
    role: R,
    /// What its requests weigh.
    weight: u64,
    requests: usize,
    bodies: Bodies,
    /// Bytes that came on it, and how many of them the peer was told of.
    received: u64,
    reported: u64,
    /// Credits given, each with what was known then.
    marks: VecDeque<(u64, Mark)>,
}

/// The connections to a peer that is asked, each with a role `R` that says what it may carry. Connections have small numbers,
/// chosen by whoever opens them; what is said about one that is not open is ignored.
#[derive(Debug)]
pub struct Group<R> {
    connections: Vec<Option<Connection<R>>>,
    limits: Limits,
    /// Bytes of the shortest background answer before it is packed.
    answer: u64,
    window: Window,
    sending: Sending,
}

impl<R: Copy> Group<R> {
    /// One without connections. The window in bytes of the link is found out when none is given; `answer` is the length of a
    /// background answer, in bytes, at least.
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

    /// How much of what is received in the background may be under way.
    #[must_use]
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// How much of what is sent may be under way.
    #[must_use]
    pub fn sending(&self) -> &Sending {
        &self.sending
    }

    /// A connection is open. Returned is what the peer is told before anything came.
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

    /// All connections are gone; what was known of the link may no longer be so.
    pub fn close(&mut self) {
        self.connections.clear();
        self.window.reset();
        self.sending.close();
    }

    /// The roles of the connections that are open.
    pub fn roles(&self) -> impl Iterator<Item = R> {
        self.connections.iter().flatten().map(|open| open.role)
    }

    /// The connection for a request: the one that has least to do of those whose role fits. One for a background answer goes on
    /// the one that brought most so far when the link is narrow: one connection paces itself by what it is acknowledged;
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

    /// A request that weighs so much is sent on a connection; false when that is not open.
    pub fn request(&mut self, number: usize, weight: u64) -> bool {
        let open = self.connections.get_mut(number).and_then(Option::as_mut);
        open.is_some_and(|open| {
            open.weight += weight;
            open.requests += 1;
            true
        })
    }

    /// A request that weighs so much was answered, or will not be.
    pub fn end_request(&mut self, number: usize, weight: u64) {
        if let Some(Some(open)) = self.connections.get_mut(number) {
            open.weight -= weight;
            open.requests -= 1;
        }
    }

    /// The body of a request is sent on a connection; `last`: no other waits. Returned is what the peer has when it has all of
    /// it, for [`Group::arrived`].
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

    /// The peer has had so many bytes of bodies on a connection; with `at`, the last at so many microseconds of its clock.
    ///
    /// # Errors
    /// [`NotSent`] for more than was sent.
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

    /// Bytes of an answer came on a connection.
    pub fn received(&mut self, number: usize, bytes: u64) {
        self.window.arrived(bytes);
        if let Some(Some(open)) = self.connections.get_mut(number) {
            open.received += bytes;
        }
    }

    /// What to tell the peer about the connections of which there is enough to tell. All of them are looked at: a smaller
    /// window makes less be enough.
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

    /// An answer came on a connection that left by credit, and was counted.
    pub fn sample(&mut self, number: usize, answer: ReplySample, now: Duration) {
        let Some(Some(open)) = self.connections.get_mut(number) else {
            return;
        };
        let shown = |credit: &&(u64, Mark)| credit.0 <= answer.echo;
        while open.marks.get(1).as_ref().is_some_and(shown) {
            open.marks.pop_front();
        }
        let credit = open.marks.front().filter(shown).map(|(_, mark)| *mark);
        // An answer leaves when it is asked for and there is credit, whichever is later.
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
