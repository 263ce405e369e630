//! The request scheduler of a mount: decides which request goes next, on which connection, and tracks those in flight.
//! No I/O and no clock: the caller passes times in and sends what is returned.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use drover_device::remote::{Chunks, Shape};
use drover_net::group::{
    Credit, Group, Limits, MAX_PART, MAX_UNANSWERED, Mark, NotSent, ReplySample, Window,
};
use drover_net::{Code, Refusal};

use crate::protocol::{
    ConnectionKind, MAX_ASKED, MAX_ASKED_BYTES, MAX_CONNECTIONS, MAX_DIRECT, MAX_READ, Request,
};

mod ahead;
mod ended;
mod job;
mod runs;
mod unflushed;

use ahead::{MAX_AHEAD, ReadAhead};
pub use job::{ChunksReply, Job};
use job::{changed, with_id};
pub use runs::split;
use runs::{bytes, cut_out, has_arrived};
use unflushed::Unflushed;

const _: () = assert!(MAX_UNANSWERED < MAX_ASKED_BYTES as u64);
const _: () = assert!(MAX_PART <= MAX_DIRECT as usize);

/// Maximum requests queued.
pub const MAX_WAITING: usize = 1 << 16;

/// The shortest background request, in bytes of chunks.
const MIN_REQUEST: u64 = 16 << 10;

/// Target transfer time of a background request, in seconds.
const REQUEST_SECONDS: f64 = 0.001;

/// A request that ended, and the runs of a read that have not arrived.
pub type EndedJob<T> = (Job<T>, Vec<Chunks>);

/// The scheduler's view of the chunks of a reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken {
    /// They have arrived with a wrong digest before.
    pub again: bool,
}

#[derive(Debug)]
struct InFlight<T> {
    job: Job<T>,
    connection: usize,
    /// Bitmap of the read's chunks that have arrived.
    arrived: [u64; 4],
    left: u32,
    /// The link's state when it was sent; none if it was sent before the link was up.
    mark: Option<Mark>,
    /// For a request with a body: total body bytes of its connection up to and including it.
    pushed: Option<u64>,
}

/// The request scheduler of a mount.
#[derive(Debug)]
pub struct Scheduler<T> {
    shape: Shape,
    next_id: u64,
    front: VecDeque<Job<T>>,
    back: VecDeque<Job<T>>,
    in_flight: HashMap<u64, InFlight<T>>,
    group: Group<ConnectionKind>,
    /// Bytes of chunks of outstanding background requests, sent or not.
    ahead: u64,
    /// Bytes of chunks of outstanding foreground requests.
    waited: u64,
    /// How much background work to have outstanding.
    plan: ReadAhead,
    /// Bytes of chunks that arrived.
    came: u64,
    /// Runs that arrived and are being verified: neither in flight nor to be requested. For each, whether it was
    /// background work.
    verifying: VecDeque<(Chunks, bool)>,
    /// Total bytes of those runs.
    unverified: u64,
    /// Direct changes that were answered.
    unflushed: Unflushed,
    /// How long a change that is repeated may remain without a reply, and others wait without progress.
    patience: Duration,
    /// Until when background reads wait at least, since chunks have arrived: on a slow link many are outstanding, one behind the other.
    went_on: Duration,
}

impl<T> Scheduler<T> {
    /// A scheduler without requests, for a device of this shape; `window` in bytes on the link, or determined
    /// automatically.
    pub fn new(shape: Shape, window: Option<u64>) -> Self {
        let limits = Limits {
            connections: MAX_CONNECTIONS,
            requests: MAX_ASKED,
        };
        Self {
            shape,
            next_id: 1,
            front: VecDeque::new(),
            back: VecDeque::new(),
            in_flight: HashMap::new(),
            group: Group::new(window, u64::from(shape.chunk), limits),
            ahead: 0,
            waited: 0,
            plan: ReadAhead::new(),
            came: 0,
            verifying: VecDeque::new(),
            unverified: 0,
            unflushed: Unflushed::default(),
            patience: Duration::MAX,
            went_on: Duration::ZERO,
        }
    }

    /// With a limit of the time in which a change that is repeated has to be answered.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The current window.
    pub fn window(&self) -> &Window {
        self.group.window()
    }

    /// Limit of pushed bytes in flight.
    pub fn push_window(&self) -> u64 {
        self.group.sending().window()
    }

    /// The length of the parts into which pushes are split.
    pub fn push_part(&self) -> usize {
        self.group.sending().part()
    }

    /// Requested bytes of chunks that have not arrived.
    pub fn in_flight(&self) -> u64 {
        self.ahead + self.waited
    }

    /// Bytes of chunks that arrived.
    pub fn came(&self) -> u64 {
        self.came
    }

    /// Queues a request.
    ///
    /// # Errors
    /// The job itself when the queue is full.
    pub fn enqueue(&mut self, mut job: Job<T>) -> Result<(), Job<T>> {
        if self.front.len() + self.back.len() >= MAX_WAITING {
            return Err(job);
        }
        if let Request::DirectFlush { .. } = job.request {
            job.covers = self.unflushed.mark();
        }
        if let Some(chunks) = job.chunks() {
            let bytes = bytes(self.shape, chunks.count);
            *self.counter(job.is_background()) += bytes;
        }
        if job.is_background() {
            self.back.push_back(job);
        } else {
            self.front.push_back(job);
        }
        Ok(())
    }

    fn counter(&mut self, background: bool) -> &mut u64 {
        if background {
            &mut self.ahead
        } else {
            &mut self.waited
        }
    }

    /// Turns background reads of these chunks into foreground ones. Returns the [`Request::Hurry`] to send, each with
    /// its connection, and the runs not covered by any request.
    pub fn hurry(
        &mut self,
        chunks: Chunks,
        deadline: Duration,
    ) -> (Vec<(usize, Request)>, Vec<Chunks>) {
        let mut missing = vec![chunks];
        let mut requests = Vec::new();
        for (run, _) in &self.verifying {
            cut_out(&mut missing, Some(*run), |_| true);
        }
        // Foreground requests stay as they are, including neighbouring chunks promoted with them.
        if self.waited > 0 {
            for job in &self.front {
                cut_out(&mut missing, job.chunks(), |_| true);
            }
            for asked in self.in_flight.values().filter(|a| !a.job.is_background()) {
                let run = asked.job.chunks();
                let first = run.map_or(0, |run| run.first);
                cut_out(&mut missing, run, |index| {
                    !has_arrived(&asked.arrived, index - first)
                });
            }
        }
        if self.ahead > 0 {
            let mut moved = Vec::new();
            for n in (0..self.back.len()).rev() {
                if cut_out(&mut missing, self.back[n].chunks(), |_| true) {
                    moved.extend(self.back.remove(n));
                }
            }
            for mut job in moved.into_iter().rev() {
                job.deadline = deadline;
                self.wait_for(&mut job);
                self.front.push_back(job);
            }
            let mut urgent = Vec::new();
            for (id, asked) in &self.in_flight {
                let run = asked.job.chunks();
                let first = run.map_or(0, |run| run.first);
                let outstanding = |index: u64| !has_arrived(&asked.arrived, index - first);
                if asked.job.is_background() && cut_out(&mut missing, run, outstanding) {
                    urgent.push(*id);
                }
            }
            for id in urgent {
                if let Some(asked) = self.in_flight.get_mut(&id) {
                    asked.job.deadline = deadline;
                    let left = bytes(self.shape, asked.left);
                    if let Request::Read { background, .. } = &mut asked.job.request {
                        *background = false;
                    }
                    requests.push((asked.connection, Request::Hurry { id }));
                    self.ahead -= left;
                    self.waited += left;
                }
            }
        }
        let most = (MAX_READ / self.shape.chunk).max(1);
        let split = missing.into_iter().flat_map(|run| split(run, most));
        (requests, split.collect())
    }

    fn wait_for(&mut self, job: &mut Job<T>) {
        if let Request::Read {
            background, count, ..
        } = &mut job.request
        {
            *background = false;
            let bytes = bytes(self.shape, *count);
            self.ahead -= bytes;
            self.waited += bytes;
        }
    }

    /// How many bytes of chunks to request in the background now, if any.
    pub fn room(&self) -> Option<u64> {
        if self.group.roles().next().is_none() || !self.back.is_empty() {
            return None;
        }
        let window = self.group.window();
        let rate = window.rate();
        // Chunks awaiting verification reduce what may be requested, but only once they exceed a threshold.
        let most = self.plan.most(window.size(), rate);
        if self.ahead >= most || self.ahead + self.unverified >= MAX_AHEAD {
            return None;
        }
        let request = self.plan.chunks(rate * REQUEST_SECONDS) as u64;
        Some(request.clamp(MIN_REQUEST, u64::from(MAX_READ)))
    }

    /// The next request to send, and its connection.
    pub fn select(&mut self, now: Duration) -> Option<(usize, Request, Bytes)>
    where
        T: Default,
    {
        if self.unflushed.is_repeating() {
            return self.select_repeated(now);
        }
        let job = match self
            .front
            .iter()
            .position(|job| self.connection_for(job, now).is_some())
        {
            // Those before it wait for a connection of another kind, or for room on it.
            Some(at) => self.front.remove(at)?,
            None => {
                self.connection_for(self.back.front()?, now)?;
                self.back.pop_front()?
            }
        };
        let connection = self.connection_for(&job, now)?;
        let id = self.next_id;
        let request = with_id(&job.request, id);
        let body = job.body.clone();
        let mark = Some(self.group.window().mark(now));
        self.sent(connection, id, job, mark)?;
        Some((connection, request, body))
    }

    /// The next change to repeat, once those that overlap it are answered: a site may take up two at once.
    fn select_repeated(&mut self, now: Duration) -> Option<(usize, Request, Bytes)>
    where
        T: Default,
    {
        let (request, body) = self.unflushed.next()?;
        if self.overlaps_repeated(request) {
            return None;
        }
        let (request, body) = (request.clone(), body.clone());
        let deadline = now.saturating_add(self.patience);
        let job = Job {
            repeats: true,
            ..Job::new(request, body.clone(), deadline, T::default())
        };
        let connection = self.connection_for(&job, now)?;
        let id = self.next_id;
        let request = with_id(&job.request, id);
        let mark = Some(self.group.window().mark(now));
        self.sent(connection, id, job, mark)?;
        self.unflushed.sent();
        Some((connection, request, body))
    }

    fn overlaps_repeated(&self, request: &Request) -> bool {
        let repeated = self.in_flight.values().filter(|asked| asked.job.repeats);
        let Some(range) = changed(request) else {
            return false;
        };
        repeated
            .filter_map(|asked| changed(&asked.job.request))
            .any(|other| other.start < range.end && range.start < other.end)
    }

    /// Whether this link is still to repeat changes.
    pub fn is_repeating(&self) -> bool {
        self.unflushed.is_repeating()
    }

    /// The site has done what a job asked for.
    pub fn done(&mut self, job: &Job<T>, now: Duration) {
        if job.repeats {
            let farther = self.unflushed.repeated();
            self.goes_on(now.saturating_add(self.patience), farther);
        } else if changed(&job.request).is_some() {
            self.unflushed.made(&job.request, &job.body);
        } else if let Request::DirectFlush { .. } = job.request {
            self.unflushed.flushed(job.covers);
        }
    }

    /// Bytes of memory of the direct changes that were answered and not flushed.
    pub fn unflushed(&self) -> u64 {
        self.unflushed.bytes()
    }

    /// When to call `select` again even if nothing happens before.
    pub fn select_at(&self) -> Option<Duration> {
        let body = match self.unflushed.is_repeating() {
            true => {
                let (request, body) = self.unflushed.next()?;
                self.route(ConnectionKind::Front, false)?;
                (!body.is_empty() && !self.overlaps_repeated(request)).then_some(body)?
            }
            false => {
                let job = self.front.iter().find(|job| !job.body.is_empty())?;
                self.route(job.connection(), false)?;
                &job.body
            }
        };
        let sending = self.group.sending();
        let allowed = sending.allows(body.len() as u64);
        allowed.then(|| sending.ready_at())
    }

    /// A request was sent with the open of its connection, which is up now. It yields no round-trip sample.
    pub fn sent_with_open(&mut self, connection: usize, id: u64, job: Job<T>) {
        if let Some(chunks) = job.chunks() {
            let bytes = bytes(self.shape, chunks.count);
            *self.counter(job.is_background()) += bytes;
        }
        self.sent(connection, id, job, None);
    }

    /// IDs up to this one are taken.
    pub fn used(&mut self, id: u64) {
        self.next_id = self.next_id.max(id + 1);
    }

    /// Records a sent request; `None` for a connection that is not up.
    fn sent(&mut self, connection: usize, id: u64, job: Job<T>, mark: Option<Mark>) -> Option<()> {
        self.used(id);
        if !self.group.request(connection, job.weight(self.shape)) {
            return None;
        }
        let left = job.chunks().map_or(0, |chunks| chunks.count);
        if job.is_background()
            && let Some(mark) = mark
        {
            self.plan.sent(id, mark.at());
        }
        let pushed = mark.filter(|_| !job.body.is_empty()).and_then(|mark| {
            let last = self.front.iter().all(|job| job.body.is_empty());
            let bytes = job.body.len() as u64;
            self.group.send_body(connection, bytes, last, mark.at())
        });
        let arrived = [0; 4];
        self.in_flight.insert(
            id,
            InFlight {
                job,
                connection,
                arrived,
                left,
                mark,
                pushed,
            },
        );
        Some(())
    }

    /// The connection that a request may use now.
    fn connection_for(&self, job: &Job<T>, now: Duration) -> Option<usize> {
        let sending = self.group.sending();
        if !job.body.is_empty()
            && (!sending.allows(job.body.len() as u64) || sending.ready_at() > now)
        {
            return None;
        }
        self.route(job.connection(), job.is_background())
    }

    /// The connection of a request of this kind, if one is up and has room for a request.
    fn route(&self, wanted: ConnectionKind, background: bool) -> Option<usize> {
        let has_push = || self.group.roles().any(|kind| kind == ConnectionKind::Push);
        let wanted = match wanted {
            ConnectionKind::Push if !has_push() => ConnectionKind::Front,
            wanted => wanted,
        };
        self.group.choose(background, |kind| match wanted {
            ConnectionKind::Back => kind != ConnectionKind::Push,
            wanted => kind == wanted,
        })
    }

    /// Bytes of a reply arrived on a connection.
    pub fn received(&mut self, connection: usize, bytes: u64) {
        self.group.received(connection, bytes);
    }

    /// The site has received this many body bytes on a connection, the last at `at` microseconds of its clock.
    ///
    /// # Errors
    /// [`Code::Protocol`] if that is more than was sent.
    pub fn arrived(
        &mut self,
        connection: usize,
        bytes: u64,
        at: u64,
        now: Duration,
    ) -> Result<(), Refusal> {
        let arrived = self.group.arrived(connection, bytes, Some(at), now);
        arrived.map_err(not_sent)
    }

    /// The credits to send.
    pub fn credits(&mut self, now: Duration) -> Vec<(usize, Credit)> {
        self.group.credits(now)
    }

    /// Whether request `id` is a background one.
    pub fn is_background(&self, id: u64) -> bool {
        self.in_flight
            .get(&id)
            .is_some_and(|asked| asked.job.is_background())
    }

    /// Chunks arrived for request `id`.
    ///
    /// # Errors
    /// [`Code::Protocol`] for chunks that were not requested, or arrived before.
    pub fn chunks(
        &mut self,
        connection: usize,
        reply: &ChunksReply,
        now: Duration,
    ) -> Result<Option<Taken>, Refusal> {
        let bad = |text: &str| Err(Refusal::new(Code::Protocol, text));
        let answered = ReplySample {
            bytes: reply.wire,
            echo: reply.echo,
            last: reply.last,
            asked: self.in_flight.get(&reply.id).and_then(|asked| asked.mark),
        };
        self.group.sample(connection, answered, now);
        let Some(asked) = self.in_flight.get_mut(&reply.id) else {
            return self.stray(reply.id);
        };
        let Some(run) = asked
            .job
            .chunks()
            .filter(|_| asked.connection == connection)
        else {
            return bad("chunks that belong to no read of this connection");
        };
        let end = reply.first.checked_add(u64::from(reply.count));
        if reply.first < run.first || end.is_none_or(|end| end > run.end()) {
            return bad("chunks that were not requested");
        }
        for index in reply.first..reply.first + u64::from(reply.count) {
            let at = (index - run.first) as usize;
            if has_arrived(&asked.arrived, at as u64) {
                return bad("a chunk that has arrived already");
            }
            asked.arrived[at / 64] |= 1 << (at % 64);
        }
        asked.left -= reply.count;
        let background = asked.job.is_background();
        let taken = Taken {
            again: asked.job.again,
        };
        let bytes = bytes(self.shape, reply.count);
        if asked.left == 0 {
            self.remove(reply.id);
        }
        *self.counter(background) -= bytes;
        self.came += bytes;
        self.went_on = self.went_on.max(now.saturating_add(self.patience));
        let run = Chunks {
            first: reply.first,
            count: reply.count,
        };
        self.verifying.push_back((run, background));
        if background {
            self.unverified += bytes;
        }
        self.plan.came(bytes, reply.wire);
        let window = self.group.window();
        if window.has_started() {
            let trip = window.round_trip().unwrap_or_default();
            let asked = &self.in_flight;
            self.plan.look(now, trip, |id| asked.contains_key(&id));
        }
        Ok(Some(taken))
    }

    /// A run was verified, and is delivered or requested again.
    pub fn verified(&mut self, run: Chunks) {
        let at = self.verifying.iter().position(|(other, _)| *other == run);
        if let Some((run, true)) = at.and_then(|at| self.verifying.remove(at)) {
            self.unverified -= bytes(self.shape, run.count);
        }
    }

    /// A reply without a request: to an abandoned one, or with an invented ID.
    fn stray<R>(&self, id: u64) -> Result<Option<R>, Refusal> {
        if id == 0 || id >= self.next_id {
            return Err(Refusal::new(
                Code::Protocol,
                "a reply to a request that was not sent",
            ));
        }
        Ok(None)
    }

    /// The request completed by a reply, with the chunks of a read that arrived; none for an abandoned one.
    ///
    /// # Errors
    /// [`Code::Protocol`] for a reply to no request.
    pub fn end(
        &mut self,
        connection: usize,
        id: u64,
        now: Duration,
    ) -> Result<Option<EndedJob<T>>, Refusal> {
        match self.in_flight.get(&id) {
            None => self.stray(id),
            Some(asked) if asked.connection != connection => Err(Refusal::new(
                Code::Protocol,
                "a reply on another connection",
            )),
            Some(asked) => {
                if let Some(bytes) = asked.pushed {
                    let arrived = self.group.arrived(connection, bytes, None, now);
                    arrived.map_err(not_sent)?;
                }
                Ok(self.remove(id).map(|asked| self.give_up(asked)))
            }
        }
    }

    /// Removes a request from the counts of its connection.
    fn remove(&mut self, id: u64) -> Option<InFlight<T>> {
        let asked = self.in_flight.remove(&id)?;
        if asked.pushed.is_some() {
            self.group.end_body(asked.job.body.len() as u64);
        }
        let weight = asked.job.weight(self.shape);
        self.group.end_request(asked.connection, weight);
        Some(asked)
    }

    /// A connection is open. Returns the initial credit to send to the site.
    pub fn connection_up(&mut self, connection: usize, kind: ConnectionKind) -> Credit {
        self.group.open(connection, kind)
    }
}

fn not_sent(error: NotSent) -> Refusal {
    Refusal::new(Code::Protocol, error.to_string())
}

impl From<Credit> for Request {
    fn from(credit: Credit) -> Self {
        let Credit { received, window } = credit;
        Self::Credit { received, window }
    }
}

#[cfg(test)]
mod tests;
