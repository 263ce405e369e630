//! The mount's verifying threads, and its disk.

use drover_device::remote::Chunks;
use drover_net::group;

use crate::client::scheduler::ChunksReply;

/// The mount's disk.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Bytes per second.
    pub rate: f64,
    /// Period and length of its pauses, in seconds.
    pub every: f64,
    pub pause: f64,
}

impl Default for Disk {
    /// An infinitely fast disk.
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

    /// A foreground read waits for a run.
    pub fn hurry(&mut self, run: Chunks) {
        let has_some = |reply: &ChunksReply| {
            reply.first < run.end() && run.first < reply.first + u64::from(reply.count)
        };
        self.came.hurry(has_some, |_| {});
    }

    /// When the next queued write will be complete, if the disk is idle.
    pub fn store(&mut self, now: f64, chunk: u32) -> Option<f64> {
        if self.storing.is_some() {
            return None;
        }
        let (reply, _) = self.came.pop(|_| true)?;
        let bytes = f64::from(reply.count) * f64::from(chunk);
        self.storing = Some(reply);
        let done = now + bytes / self.disk.rate;
        // Each period ends with a pause.
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
