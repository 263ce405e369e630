//! The mount's threads that verify, and its disk.

use drover_device::remote::Chunks;
use drover_net::group;

use crate::client::scheduler::ChunksReply;

/// What the mount writes to.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Bytes a second.
    pub rate: f64,
    /// How often it takes nothing for how long, in seconds.
    pub every: f64,
    pub pause: f64,
}

impl Default for Disk {
    /// One that takes no time.
    fn default() -> Self {
        Self {
            rate: f64::INFINITY,
            every: 1.0,
            pause: 0.0,
        }
    }
}

pub struct Near {
    disk: Disk,
    came: group::Queue<ChunksReply>,
    storing: Option<ChunksReply>,
}

impl Near {
    pub fn new(disk: Disk) -> Self {
        Self {
            disk,
            came: group::Queue::default(),
            storing: None,
        }
    }

    pub fn queue(&mut self, reply: ChunksReply, background: bool) {
        self.came.push(reply, !background);
    }

    /// Somebody waits for a run.
    pub fn hurry(&mut self, run: Chunks) {
        let has_some = |reply: &ChunksReply| {
            reply.first < run.end() && run.first < reply.first + u64::from(reply.count)
        };
        self.came.hurry(has_some, |_| {});
    }

    /// When the next of what was queued will be on the disk, if the disk is free.
    pub fn store(&mut self, now: f64, chunk: u32) -> Option<f64> {
        if self.storing.is_some() {
            return None;
        }
        let (reply, _) = self.came.pop(|_| true)?;
        let bytes = f64::from(reply.count) * f64::from(chunk);
        self.storing = Some(reply);
        let done = now + bytes / self.disk.rate;
        // A pause comes at the end of each period.
        let into = done % self.disk.every;
        let left = self.disk.every - into;
        Some(match into > self.disk.every - self.disk.pause {
            true => done + left,
            false => done,
        })
    }

    pub fn stored(&mut self) -> ChunksReply {
        self.storing.take().expect("something was stored")
    }
}
