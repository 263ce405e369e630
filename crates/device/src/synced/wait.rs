//! Requests waiting for chunks: all requests for a chunk share one fetch.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use drover_core::DeviceError;
use parking_lot::{Condvar, Mutex};

use crate::remote::Content;

const SHARDS: usize = 32;

/// How a fetch ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The chunk was stored (and may be evicted by now); with its contents at that time, unless it had been overwritten
    /// completely.
    Here(Option<Content>),
    /// The chunk arrived but did not fit in the cache: a reader can use the contents once.
    Handed(Content, DeviceError),
    /// The fetch failed.
    Failed(DeviceError),
}

/// The result of one fetch, shared by those who waited for that fetch. Later waiters get a new one: this result may be
/// older than subsequent writes.
type Answer = Arc<OnceLock<Outcome>>;

/// The waiters of one fetch.
#[derive(Default)]
pub struct Waiting {
    waiters: u32,
    /// Requested on behalf of a waiter, not only in the background.
    demanded: bool,
    answer: Answer,
}

/// A registered waiter; must be passed to [`Waits::wait`] or [`Waits::leave`].
#[must_use]
pub struct Ticket {
    pub index: u64,
    answer: Answer,
}

#[derive(Default)]
struct Shard {
    waiting: Mutex<HashMap<u64, Waiting>>,
    changed: Condvar,
}

/// Waiters by chunk. Bounded by the front ends' requests in flight.
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

    /// Registers the caller as a waiter; call before checking whether the chunk is in flight, so that no answer is
    /// missed.
    pub fn join(&self, index: u64) -> Ticket {
        let mut waiting = self.shard(index).waiting.lock();
        let entry = waiting.entry(index).or_default();
        entry.waiters += 1;
        Ticket {
            index,
            answer: Arc::clone(&entry.answer),
        }
    }

    /// Marks the chunk as demanded; true for the first caller, who must send the request.
    pub fn demand(&self, index: u64) -> bool {
        let mut waiting = self.shard(index).waiting.lock();
        match waiting.get_mut(&index) {
            Some(entry) => !std::mem::replace(&mut entry.demanded, true),
            None => false,
        }
    }

    /// Unregisters a waiter.
    pub fn leave(&self, ticket: Ticket) {
        leave(&mut self.shard(ticket.index).waiting.lock(), &ticket);
    }

    /// Waits for the result. None on timeout.
    pub fn wait(&self, ticket: Ticket, deadline: Instant) -> Option<Outcome> {
        let shard = self.shard(ticket.index);
        let mut waiting = shard.waiting.lock();
        loop {
            if let Some(outcome) = ticket.answer.get() {
                return Some(outcome.clone());
            }
            if shard.changed.wait_until(&mut waiting, deadline).timed_out() {
                leave(&mut waiting, &ticket);
                return ticket.answer.get().cloned();
            }
        }
    }

    /// Whether the chunk has waiters.
    pub fn any(&self, index: u64) -> bool {
        self.shard(index).waiting.lock().contains_key(&index)
    }

    /// Whether a chunk that was requested only in the background has waiters.
    pub fn must_demand(&self, index: u64) -> bool {
        let waiting = self.shard(index).waiting.lock();
        waiting.get(&index).is_some_and(|w| !w.demanded)
    }

    /// Takes the current waiters of a chunk; they must be answered with [`Waits::tell_those`].
    pub fn take(&self, index: u64) -> Waiting {
        let taken = self.shard(index).waiting.lock().remove(&index);
        taken.unwrap_or_default()
    }

    /// Answers the waiters that were taken; those who joined later check again.
    pub fn tell_those(&self, index: u64, those: Waiting, outcome: Outcome) {
        let shard = self.shard(index);
        let mut waiting = shard.waiting.lock();
        let _ = those.answer.set(outcome);
        let since = waiting.remove(&index);
        if let Some(since) = &since {
            let _ = since.answer.set(Outcome::Here(None));
        }
        if those.waiters > 0 || since.is_some() {
            shard.changed.notify_all();
        }
    }

    /// Answers the current waiters of a chunk.
    pub fn tell(&self, index: u64, outcome: Outcome) {
        let shard = self.shard(index);
        if let Some(waiting) = shard.waiting.lock().remove(&index) {
            // Set once: whoever sets it has removed the entry first.
            let _ = waiting.answer.set(outcome);
            shard.changed.notify_all();
        }
    }

    /// Fails all waiters of all chunks.
    pub fn tell_all(&self, error: &DeviceError) {
        for shard in &self.shards {
            for (_, waiting) in shard.waiting.lock().drain() {
                let _ = waiting.answer.set(Outcome::Failed(error.clone()));
            }
            shard.changed.notify_all();
        }
    }
}

fn leave(waiting: &mut HashMap<u64, Waiting>, ticket: &Ticket) {
    let Some(entry) = waiting.get_mut(&ticket.index) else {
        return;
    };
    // After an answer the entry, if there is one, belongs to later waiters.
    if !Arc::ptr_eq(&entry.answer, &ticket.answer) {
        return;
    }
    entry.waiters -= 1;
    if entry.waiters == 0 {
        waiting.remove(&ticket.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_for_those_who_waited_when_it_came() {
        let waits = Waits::new();
        let first = waits.join(7);
        assert!(waits.demand(7) && !waits.demand(7));
        waits.tell(7, Outcome::Here(Some(Content::Zero)));
        // The first waiter has not looked yet; the chunk may have been written, pushed and evicted since.
        let second = waits.join(7);
        assert!(waits.must_demand(7), "nothing was asked for the second");
        assert!(waits.wait(second, Instant::now()).is_none());
        assert!(!waits.any(7));
        let answer = waits.wait(first, Instant::now());
        assert!(matches!(answer, Some(Outcome::Here(Some(Content::Zero)))));
    }

    #[test]
    fn who_comes_after_the_taking_down_looks_again() {
        let waits = Waits::new();
        let first = waits.join(7);
        let taken = waits.take(7);
        let second = waits.join(7);
        waits.tell_those(7, taken, Outcome::Here(Some(Content::Zero)));
        let answer = waits.wait(first, Instant::now());
        assert!(matches!(answer, Some(Outcome::Here(Some(Content::Zero)))));
        let answer = waits.wait(second, Instant::now());
        assert!(matches!(answer, Some(Outcome::Here(None))));
        assert!(!waits.any(7));
    }
}
