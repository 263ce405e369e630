//! Requests that wait for chunks to arrive: all that want a chunk share one fetch.

use std::collections::HashMap;
use std::time::Instant;

use drover_core::DeviceError;
use parking_lot::{Condvar, Mutex};

use crate::remote::Content;

const SHARDS: usize = 32;

/// How a fetch ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The chunk is here, or was; with what it held then, unless it had been written to whole.
    Here(Option<Content>),
    /// The chunk came, but there was no room for it: a reader can use it once.
    Handed(Content, DeviceError),
    /// It will not come.
    Failed(DeviceError),
}

#[derive(Default)]
struct Waiting {
    waiters: u32,
    /// Asked for because of them.
    demanded: bool,
    outcome: Option<Outcome>,
}

#[derive(Default)]
struct Shard {
    waiting: Mutex<HashMap<u64, Waiting>>,
    changed: Condvar,
}

/// By chunk: who waits. Bounded by the requests that front ends have under way.
pub struct Waits {
    shards: Vec<Shard>,
}

impl Waits {
    pub fn new() -> Self {
        let mut shards = Vec::new();
        shards.resize_with(SHARDS, Shard::default);
        Self { shards }
    }

    fn shard(&self, index: u64) -> &Shard {
        &self.shards[index as usize % SHARDS]
    }

    /// Says that the caller will wait; before it looks whether the chunk is in flight, so that no answer is missed.
    pub fn join(&self, index: u64) {
        let mut waiting = self.shard(index).waiting.lock();
        waiting.entry(index).or_default().waiters += 1;
    }

    /// Says that the chunk is asked for again, before it is.
    pub fn demand(&self, index: u64) {
        if let Some(waiting) = self.shard(index).waiting.lock().get_mut(&index) {
            waiting.demanded = true;
            waiting.outcome = None;
        }
    }

    /// Waits no more.
    pub fn leave(&self, index: u64) {
        let mut waiting = self.shard(index).waiting.lock();
        leave(&mut waiting, index);
    }

    /// Waits for the answer, and leaves. None at the deadline.
    pub fn wait(&self, index: u64, deadline: Instant) -> Option<Outcome> {
        let shard = self.shard(index);
        let mut waiting = shard.waiting.lock();
        loop {
            let outcome = waiting.get(&index).and_then(|w| w.outcome.clone());
            let late =
                outcome.is_none() && shard.changed.wait_until(&mut waiting, deadline).timed_out();
            if outcome.is_some() || late {
                leave(&mut waiting, index);
                return outcome;
            }
        }
    }

    /// Whether somebody waits.
    pub fn any(&self, index: u64) -> bool {
        self.shard(index).waiting.lock().contains_key(&index)
    }

    /// Whether somebody waits for a chunk that was only asked for in the background.
    pub fn must_demand(&self, index: u64) -> bool {
        let waiting = self.shard(index).waiting.lock();
        waiting.get(&index).is_some_and(|w| !w.demanded)
    }

    /// Tells those who wait.
    pub fn tell(&self, index: u64, outcome: Outcome) {
        let shard = self.shard(index);
        if let Some(waiting) = shard.waiting.lock().get_mut(&index) {
            waiting.outcome = Some(outcome);
            waiting.demanded = false;
            shard.changed.notify_all();
        }
    }

    /// Tells all who wait, for whatever chunk.
    pub fn tell_all(&self, error: &DeviceError) {
        for shard in &self.shards {
            for waiting in shard.waiting.lock().values_mut() {
                waiting.outcome = Some(Outcome::Failed(error.clone()));
            }
            shard.changed.notify_all();
        }
    }
}

fn leave(waiting: &mut HashMap<u64, Waiting>, index: u64) {
    if let Some(entry) = waiting.get_mut(&index) {
        entry.waiters -= 1;
        if entry.waiters == 0 {
            waiting.remove(&index);
        }
    }
}
