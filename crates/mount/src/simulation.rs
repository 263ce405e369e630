//! Simulates both ends over a link of a given rate and delay, in virtual time and from a seed: the mount's scheduler
//! and window, the site's queues and flow. Not simulated: threads, disks, and TCP's slow start.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use drover_device::remote::{Chunks, Shape};
use drover_net::group::{self, Flow};

use crate::client::scheduler::{ChunksReply, Job, Scheduler, split};
use crate::protocol::{ConnectionKind, MAX_READ, MAX_UNIT, Request};
use crate::server::queue::Queue;
use crate::server::unit::Unit;

mod near;
mod push;
mod scenario;
#[cfg(test)]
mod tests;
mod writes;

use near::Near;
use scenario::{CONNECTIONS, Scenario, shares};
use writes::Pushing;

/// The push connection.
const PUSH: usize = 3;

/// Bytes of a request or a credit on the link.
const ASK: u64 = 40;

/// Maximum replies ready at a site on a connection: both halves of its queue, each over its limit by one unit.
const MAX_READY: u64 = 2 * ((4 << 20) + (MAX_UNIT as u64) * 2);

enum Event {
    /// A request reaches the site on a link.
    Asked(u64, usize, Request),
    /// A part of an epoch, of so many bytes, reaches the site on a link.
    Pushed(u64, Request, Bytes),
    /// The report of how many bytes arrived, and when by the site's clock, reaches the mount.
    Told(u64, u64, u64),
    /// The mount learns that the site has written the part with this id.
    Written(u64, u64),
    Done(u64, u64),
    /// A reply reaches the mount on a link.
    Answered(u64, usize, ChunksReply),
    /// The mount may send what its pacing held back.
    Paced,
    /// A write to the mount's disk is complete.
    Stored,
    /// A program reads a chunk.
    Wanted,
    Cut,
    Up,
}

#[derive(Default)]
struct SiteConnection {
    queue: Queue,
    out: group::Queue<(u64, u64, u32)>,
    ready: u64,
}

impl SiteConnection {
    /// Mirrors the site's connection.
    fn hurry(&mut self, id: u64, wire: impl Fn(&(u64, u64, u32)) -> u64) {
        self.queue.hurry(id);
        let queue = &mut self.queue;
        let promote = |made: &(u64, u64, u32)| queue.promote(wire(made));
        self.out.hurry(|made| made.0 == id, promote);
    }
}

struct World {
    set: Scenario,
    random: fastrand::Rng,
    now: f64,
    order: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    what: HashMap<u64, Event>,
    /// When each direction of the link is idle again: up and down.
    free: [f64; 2],
    /// When the last message of each connection was processed, in each direction.
    looked: [[f64; CONNECTIONS]; 2],
    link: u64,
    up: bool,
    scheduler: Scheduler<()>,
    near: Near,
    pushing: Pushing,
    paced: bool,
    connections: Vec<SiteConnection>,
    flow: Flow,
    cursor: u64,
    shares: Vec<f32>,
    /// How often each chunk arrived and was verified.
    came: Vec<u8>,
    missing: u64,
    corrupted: HashSet<u64>,
    wanted: HashMap<u64, f64>,
    waits: Vec<(f64, f64)>,
    /// Queue in the link ahead of foreground replies when they leave the site.
    found: Vec<(f64, f64)>,
    /// Bytes on the link per 100 ms.
    tenths: Vec<u64>,
    done_at: f64,
}

impl World {
    fn new(set: Scenario, seed: u64) -> Self {
        let shape = Shape {
            size: set.chunks * u64::from(set.chunk),
            chunk: set.chunk,
        };
        let mut random = fastrand::Rng::with_seed(seed);
        let shares = shares(&set, &mut random);
        let mut world = Self {
            set,
            random,
            now: 0.0,
            order: 0,
            events: BinaryHeap::new(),
            what: HashMap::new(),
            free: [0.0; 2],
            looked: [[0.0; CONNECTIONS]; 2],
            link: 0,
            up: false,
            scheduler: Scheduler::new(shape, set.window),
            near: Near::new(set.disk),
            pushing: Pushing::default(),
            paced: false,
            connections: Vec::new(),
            flow: Flow::default(),
            cursor: 0,
            shares,
            came: vec![0; set.chunks as usize],
            missing: set.chunks,
            corrupted: HashSet::new(),
            wanted: HashMap::new(),
            waits: Vec::new(),
            found: Vec::new(),
            tenths: Vec::new(),
            done_at: 0.0,
        };
        world.at(0.0, Event::Up);
        if set.reads > 0.0 {
            world.at(0.001, Event::Wanted);
        }
        world
    }

    fn at(&mut self, time: f64, event: Event) {
        self.order += 1;
        let key = ((time * 1e9) as u64, self.order);
        self.events.push(Reverse(key));
        self.what.insert(self.order, event);
    }

    /// Bytes of a reply on the link.
    fn wire(&self, first: u64, count: u32) -> u64 {
        let end = first + u64::from(count);
        let shares = &self.shares[first as usize..end as usize];
        let chunk = f64::from(self.set.chunk);
        let of = |share: &f32| match *share {
            0.0 => 0,
            share => (f64::from(share) * chunk) as u64 + 32,
        };
        shares.iter().map(of).sum::<u64>() + 64
    }

    fn clock(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    /// When bytes that leave now on a connection will be processed.
    fn cross(&mut self, way: usize, connection: usize, bytes: u64) -> f64 {
        let free = self.free[way].max(self.now) + bytes as f64 / self.set.rates()[way];
        self.free[way] = free;
        let turn = match self.set.turn {
            0.0 => 0.0,
            most => self.random.f64() * most,
        };
        let at = free + self.set.round_trip / 2.0 + turn;
        let at = at.max(self.looked[way][connection]);
        self.looked[way][connection] = at;
        at
    }

    fn run(&mut self) {
        let mut steps = 0u64;
        while !self.is_done() {
            steps += 1;
            assert!(steps < 5_000_000, "it does not end");
            let Reverse((time, order)) = self.events.pop().expect("it stands still");
            self.now = time as f64 / 1e9;
            let event = self.what.remove(&order).expect("an event");
            self.step(event);
            let most = (64 << 20) + 2 * u64::from(MAX_READ) + self.wanted.len() as u64 * (4 << 20);
            assert!(
                self.scheduler.in_flight() <= most,
                "more was asked for than fits"
            );
        }
        self.done_at = self.now;
        assert!(self.set.writes.is_some() || self.came.iter().all(|&n| n == 1));
    }

    fn is_done(&self) -> bool {
        match self.set.writes {
            // Measure both only while both are active.
            Some(writes) => self.pushing.is_done(&writes) || (writes.pulls && self.missing == 0),
            None => self.missing == 0 && self.wanted.is_empty(),
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Asked(link, connection, request) if link == self.link && self.up => {
                self.asked(connection, request)
            }
            Event::Answered(link, connection, reply) if link == self.link && self.up => {
                self.answered(connection, reply);
            }
            Event::Pushed(link, request, body) if link == self.link && self.up => {
                self.pushed(request, body);
            }
            Event::Told(link, bytes, at) if link == self.link && self.up => {
                self.push_told(bytes, at);
            }
            Event::Written(link, id) if link == self.link && self.up => self.written(id),
            Event::Done(link, id) if link == self.link && self.up => self.push_done(id),
            Event::Asked(..)
            | Event::Answered(..)
            | Event::Pushed(..)
            | Event::Told(..)
            | Event::Written(..)
            | Event::Done(..) => {}
            Event::Paced => {
                self.paced = false;
                self.issue();
            }
            Event::Stored => {
                let reply = self.near.stored();
                self.stored(reply);
                self.store();
            }
            Event::Wanted => self.want(),
            Event::Cut => {
                self.up = false;
                assert!(
                    self.scheduler.link_down().is_empty(),
                    "reads survive a link"
                );
                let pause = self.random.f64() * 0.05;
                self.at(self.now + pause, Event::Up);
            }
            Event::Up => {
                self.link += 1;
                self.up = true;
                self.free = [self.now; 2];
                self.looked = [[self.now; CONNECTIONS]; 2];
                self.flow = Flow::default();
                let connections = self.set.connections();
                self.connections = (0..connections)
                    .map(|_| SiteConnection::default())
                    .collect();
                for connection in 0..connections {
                    let kind = match connection {
                        0 => ConnectionKind::Front,
                        PUSH => ConnectionKind::Push,
                        _ => ConnectionKind::Back,
                    };
                    let credit = self.scheduler.connection_up(connection, kind);
                    self.send(connection, credit.into());
                }
                if self.set.faults && self.link < 6 {
                    let until = self.random.f64() * 0.3;
                    self.at(self.now + until, Event::Cut);
                }
                self.pump();
            }
        }
    }

    fn want(&mut self) {
        let index = self.random.u64(0..self.set.chunks);
        if self.came[index as usize] == 0 && !self.wanted.contains_key(&index) {
            self.wanted.insert(index, self.now);
            let deadline = Duration::MAX;
            let run = Chunks {
                first: index,
                count: 1,
            };
            let (hurried, missing) = self.scheduler.hurry(run, deadline);
            self.near.hurry(run);
            for (connection, request) in hurried {
                self.send(connection, request);
            }
            for run in missing {
                self.put(run, false, false);
            }
            self.pump();
        }
        let pause = (0.2 + 1.6 * self.random.f64()) / self.set.reads;
        self.at(self.now + pause, Event::Wanted);
    }

    fn put(&mut self, run: Chunks, background: bool, again: bool) {
        let job = Job {
            again,
            ..Job::read(run, background, Duration::MAX)
        };
        assert!(self.scheduler.enqueue(job).is_ok(), "no room for a request");
    }

    fn send(&mut self, connection: usize, request: Request) {
        let at = self.cross(0, connection, ASK);
        let link = self.link;
        self.at(at, Event::Asked(link, connection, request));
    }

    fn issue(&mut self) {
        while let Some((connection, request, body)) = self.scheduler.select(self.clock()) {
            if body.is_empty() {
                self.send(connection, request);
                continue;
            }
            assert_eq!(connection, PUSH);
            let at = self.cross(0, connection, ASK + body.len() as u64);
            let link = self.link;
            self.at(at, Event::Pushed(link, request, body));
        }
        if let Some(at) = self.scheduler.select_at()
            && !self.paced
        {
            self.paced = true;
            self.at(at.as_secs_f64().max(self.now) + 1e-6, Event::Paced);
        }
    }

    fn pump(&mut self) {
        self.push_more();
        self.issue();
        if self.set.writes.is_some_and(|writes| !writes.pulls) {
            return;
        }
        while let Some(most) = self.scheduler.room() {
            let taken = |at: u64, world: &Self| {
                world.came[at as usize] > 0 || world.wanted.contains_key(&at)
            };
            while self.cursor < self.set.chunks && taken(self.cursor, self) {
                self.cursor += 1;
            }
            let most = (most / u64::from(self.set.chunk)).max(1);
            let mut end = self.cursor;
            while end < self.set.chunks && end - self.cursor < most && !taken(end, self) {
                end += 1;
            }
            if end == self.cursor {
                return;
            }
            let run = Chunks {
                first: self.cursor,
                count: (end - self.cursor) as u32,
            };
            self.cursor = end;
            for run in split(run, (MAX_READ / self.set.chunk).max(1)) {
                self.put(run, true, false);
            }
            self.issue();
        }
    }

    fn asked(&mut self, connection: usize, request: Request) {
        match request {
            Request::Credit { received, window } => {
                self.flow
                    .credit(connection as u64, received, window, self.clock());
            }
            Request::Hurry { id } => {
                let mut site = std::mem::take(&mut self.connections[connection]);
                site.hurry(id, |made| self.wire(made.1, made.2));
                self.connections[connection] = site;
            }
            request => {
                let admitted =
                    self.connections[connection]
                        .queue
                        .admit(request, Bytes::new(), self.set.chunk);
                assert!(
                    admitted.is_ok(),
                    "a mount that keeps to the rules is refused"
                );
            }
        }
        // The first connection to wake takes the credit.
        let connections = self.connections.len();
        let first = self.random.usize(0..connections);
        for n in 0..connections {
            self.serve((first + n) % connections);
        }
    }

    /// The site's threads, and the connection's writer.
    fn serve(&mut self, number: usize) {
        let unit = (self.flow.window() / 16).clamp(16 << 10, u64::from(MAX_UNIT));
        let chunk = self.set.chunk;
        loop {
            while let Some((unit, front)) = self.connections[number].queue.take(chunk, unit) {
                let Unit::Read { id, first, count } = unit else {
                    panic!("only reads were asked for");
                };
                let bytes = self.wire(first, count);
                let connection = &mut self.connections[number];
                connection
                    .queue
                    .worked(u64::from(count) * u64::from(chunk), front);
                connection.queue.made(bytes, front);
                connection.ready += bytes;
                connection.out.push((id, first, count), front);
            }
            let connection = &self.connections[number];
            assert!(
                connection.ready <= MAX_READY + u64::from(chunk) * 2,
                "too much is ready"
            );
            let mut out = std::mem::take(&mut self.connections[number].out);
            let next = out.pop(|made| self.flow.allows(self.wire(made.1, made.2)));
            self.connections[number].out = out;
            let Some(((id, first, count), front)) = next else {
                return;
            };
            let wire = self.wire(first, count);
            let connection = &mut self.connections[number];
            connection.ready -= wire;
            connection.queue.left(wire, front, id, Some(count));
            let last = connection.out.is_empty();
            let echo = self.flow.echo(number as u64);
            self.flow.sent(number as u64, wire, self.clock());
            if front {
                let queue = (self.free[1] - self.now).max(0.0);
                self.found.push((self.now, queue));
            }
            let reply = ChunksReply {
                id,
                first,
                count,
                wire,
                echo,
                last,
            };
            let at = self.cross(1, number, wire);
            let link = self.link;
            self.at(at, Event::Answered(link, number, reply));
        }
    }

    /// The mount's threads.
    fn store(&mut self) {
        while let Some(at) = self.near.store(self.now, self.set.chunk) {
            if at > self.now {
                self.at(at, Event::Stored);
                return;
            }
            let reply = self.near.stored();
            self.stored(reply);
        }
    }

    fn answered(&mut self, connection: usize, reply: ChunksReply) {
        let now = self.clock();
        let background = self.scheduler.is_background(reply.id);
        self.scheduler.received(connection, reply.wire);
        let tenth = (self.now * 10.0) as usize;
        if self.tenths.len() <= tenth {
            self.tenths.resize(tenth + 1, 0);
        }
        self.tenths[tenth] += reply.wire;
        let taken = self
            .scheduler
            .chunks(connection, &reply, now)
            .expect("what was asked for");
        for (connection, credit) in self.scheduler.credits(now) {
            self.send(connection, credit.into());
        }
        assert!(taken.is_some(), "an answer to what nobody waits for");
        self.near.queue(reply, background);
        self.pump();
        self.store();
    }

    /// Chunks were verified and written to the mount's disk.
    fn stored(&mut self, reply: ChunksReply) {
        let run = Chunks {
            first: reply.first,
            count: reply.count,
        };
        for index in run.first..run.end() {
            if self.set.faults && self.random.u8(0..20) == 0 && self.corrupted.insert(index) {
                self.put(
                    Chunks {
                        first: index,
                        count: 1,
                    },
                    false,
                    true,
                );
                continue;
            }
            self.came[index as usize] += 1;
            assert_eq!(self.came[index as usize], 1, "chunk {index} came twice");
            self.missing -= 1;
            if let Some(since) = self.wanted.remove(&index) {
                self.waits.push((since, self.now - since));
            }
        }
        self.scheduler.verified(run);
        self.pump();
    }

    /// Utilization of the link from `from` seconds until shortly before the end.
    fn used(&self, from: f64) -> f64 {
        let (first, last) = ((from * 10.0) as usize, self.tenths.len().saturating_sub(2));
        assert!(
            last > first + 3,
            "the run is too short: {:.1} s",
            self.done_at
        );
        let bytes: u64 = self.tenths[first..last].iter().sum();
        bytes as f64 / (0.1 * (last - first) as f64 * self.set.rate)
    }

    /// The first 100 ms in which 90 % of the link was used.
    fn full_at(&self) -> f64 {
        let enough = |&bytes: &u64| bytes as f64 >= 0.09 * self.set.rate;
        let first = self.tenths.iter().position(enough);
        first.map_or(f64::MAX, |n| n as f64 / 10.0)
    }

    /// The p99 of the waits that began after `from`.
    fn p99(&self, from: f64) -> f64 {
        part(&self.waits, from, 99)
    }
}

/// The given percentile of the values recorded after `from`.
fn part(noted: &[(f64, f64)], from: f64, percent: usize) -> f64 {
    let late = noted.iter().filter(|n| n.0 > from);
    let mut late: Vec<f64> = late.map(|n| n.1).collect();
    late.sort_by(f64::total_cmp);
    assert!(late.len() >= 50, "{} of them say little", late.len());
    late[late.len() * percent / 100]
}
