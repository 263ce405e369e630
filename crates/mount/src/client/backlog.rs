//! The backlog of background replies waiting to be verified. The connection is still read meanwhile; otherwise they
//! would look like a queue in the link, and delay foreground replies behind them. The scheduler bounds the backlog: it
//! counts its contents as requested.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use drover_device::remote::Chunks;
use parking_lot::{Condvar, Mutex};

use crate::protocol::Coding;

/// A reply with chunks, as received.
pub struct ChunksTask {
    /// The first chunk.
    pub first: u64,
    /// Number of chunks.
    pub count: u32,
    /// Bitmap of the zero chunks.
    pub zeros: Vec<u8>,
    /// Encoding of the body.
    pub coding: Coding,
    /// Digests and bytes.
    pub body: Bytes,
    /// These chunks have arrived with a wrong digest before.
    pub again: bool,
}

#[derive(Default)]
struct Backlog {
    state: Mutex<BacklogState>,
    more: Condvar,
}

#[derive(Default)]
struct BacklogState {
    tasks: VecDeque<ChunksTask>,
    /// All adders have been dropped.
    closed: bool,
}

/// The sending end.
#[derive(Default)]
pub struct Adder(Arc<Backlog>);

/// The receiving end; each task goes to one receiver.
#[derive(Clone)]
pub struct Taker(Arc<Backlog>);

impl Adder {
    /// A receiving end of this queue.
    pub fn taker(&self) -> Taker {
        Taker(self.0.clone())
    }

    /// Adds a reply.
    pub fn add(&self, task: ChunksTask) {
        self.0.state.lock().tasks.push_back(task);
        self.0.more.notify_one();
    }

    /// Removes and returns the replies with chunks of this run: they are urgent now.
    pub fn hurry(&self, run: Chunks) -> Vec<ChunksTask> {
        let mut state = self.0.state.lock();
        let has_some = |task: &ChunksTask| {
            task.first < run.end() && run.first < task.first + u64::from(task.count)
        };
        if !state.tasks.iter().any(has_some) {
            return Vec::new();
        }
        let tasks = std::mem::take(&mut state.tasks);
        let (urgent, rest): (Vec<_>, Vec<_>) = tasks.into_iter().partition(has_some);
        state.tasks = rest.into();
        urgent
    }
}

impl Drop for Adder {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.more.notify_all();
    }
}

impl Taker {
    /// Waits for the next task; `None` once all adders have been dropped.
    pub fn next(&self) -> Option<ChunksTask> {
        let mut state = self.0.state.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            if state.closed {
                return None;
            }
            self.0.more.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(first: u64, count: u32) -> ChunksTask {
        ChunksTask {
            first,
            count,
            zeros: Vec::new(),
            coding: Coding::Plain,
            body: Bytes::new(),
            again: false,
        }
    }

    #[test]
    fn urgent_replies_are_taken_out_and_the_rest_stays_in_order() {
        let adder = Adder::default();
        let taker = adder.taker();
        for first in [0, 4, 8] {
            adder.add(task(first, 4));
        }
        assert!(
            adder
                .hurry(Chunks {
                    first: 12,
                    count: 9
                })
                .is_empty()
        );
        let urgent = adder.hurry(Chunks { first: 7, count: 1 });
        assert_eq!(urgent.iter().map(|t| t.first).collect::<Vec<_>>(), [4]);
        assert_eq!(taker.next().map(|t| t.first), Some(0));
        // Tasks added earlier are still delivered.
        drop(adder);
        assert_eq!(taker.next().map(|t| t.first), Some(8));
        assert!(taker.next().is_none());
    }
}
