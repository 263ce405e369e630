//! The push from the mount to the site: parts of epochs, as the managed device hands them out.

use std::time::Duration;

use bytes::Bytes;

use super::{ASK, Event, PUSH, World};
use crate::client::scheduler::Job;
use crate::protocol::{Coding, MAX_DIRECT, Request};
use crate::server::unit::{Effect, Unit};

/// Minimum bytes that the device keeps in flight with the client.
const UNDER_WAY: u64 = 8 << 20;

/// Size of the report that a part arrived, or was written (bytes).
const TOLD: u64 = 40;
const DONE: u64 = 60;

/// The site's clock differs: it started earlier, and is slightly fast.
const CLOCK_AHEAD: f64 = 1e5;
const CLOCK_RUNS: f64 = 1.00005;

static BODY: [u8; MAX_DIRECT as usize] = [1; MAX_DIRECT as usize];

impl World {
    /// Parts of an epoch, as the device hands them out and the client splits them.
    pub(super) fn push_more(&mut self) {
        let Some(writes) = self.set.writes else {
            return;
        };
        let most = UNDER_WAY.max(2 * self.scheduler.push_window());
        while self.pushing.asked < writes.bytes && self.pushing.asked - self.pushing.done < most {
            let part = self.scheduler.push_part();
            self.pushing.asked += part as u64;
            let request = Request::Write {
                id: 0,
                epoch: 1 << 32,
                offset: 0,
                length: part as u32,
                coding: Coding::Plain,
            };
            let job = Job {
                request,
                body: Bytes::from_static(&BODY[..part]),
                deadline: Duration::MAX,
                again: false,
                covers: 0,
                repeats: false,
                to: (),
            };
            assert!(self.scheduler.enqueue(job).is_ok(), "no room for a request");
        }
    }

    /// A part reaches the site.
    pub(super) fn pushed(&mut self, request: Request, body: Bytes) {
        let takes = self.set.writes.map_or(0.0, |writes| writes.takes);
        let chunk = self.set.chunk;
        self.pushing.came += body.len() as u64;
        let (link, came) = (self.link, self.pushing.came);
        let clock = ((self.now * CLOCK_RUNS + CLOCK_AHEAD) * 1e6) as u64;
        self.flow.sent(PUSH as u64, TOLD, self.clock());
        let at = self.cross(1, PUSH, TOLD);
        self.at(at, Event::Told(link, came, clock));
        let queue = &mut self.connections[PUSH].queue;
        assert!(
            queue.admit(request, body, chunk).is_ok(),
            "a part is refused"
        );
        while let Some((unit, front)) = self.connections[PUSH].queue.take(chunk, 1) {
            let weight = Effect::of(&unit, chunk).weight();
            let Unit::Other(request, _) = unit else {
                panic!("only parts go there");
            };
            let id = request.id().expect("an id");
            let queue = &mut self.connections[PUSH].queue;
            queue.worked(weight, front);
            queue.changed();
            queue.made(DONE, front);
            queue.left(DONE, front, id, None);
            let at = self.now + self.random.f64() * takes;
            self.at(at, Event::Written(link, id));
        }
    }

    pub(super) fn written(&mut self, id: u64) {
        let now = self.clock();
        self.flow.sent(PUSH as u64, DONE, now);
        let at = self.cross(1, PUSH, DONE);
        let link = self.link;
        self.at(at, Event::Done(link, id));
    }

    fn push_answer(&mut self, bytes: u64) -> Duration {
        let now = self.clock();
        self.scheduler.received(PUSH, bytes);
        for (connection, credit) in self.scheduler.credits(now) {
            self.send(connection, credit.into());
        }
        now
    }

    pub(super) fn push_told(&mut self, bytes: u64, at: u64) {
        let now = self.push_answer(TOLD);
        let told = self.scheduler.arrived(PUSH, bytes, at, now);
        told.expect("no more than was sent");
        self.issue();
    }

    pub(super) fn push_done(&mut self, id: u64) {
        let now = self.push_answer(DONE);
        let ended = self
            .scheduler
            .end(PUSH, id, now)
            .expect("what was asked for");
        let (job, _) = ended.expect("an answer to what nobody waits for");
        let bytes = job.body.len() as u64;
        self.pushing.done += bytes;
        let tenth = (self.now * 10.0) as usize;
        if self.pushing.tenths.len() <= tenth {
            self.pushing.tenths.resize(tenth + 1, 0);
        }
        self.pushing.tenths[tenth] += bytes + ASK;
        self.pump();
    }
}
