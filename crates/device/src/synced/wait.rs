//! Requests that wait for chunks to arrive: all that want a chunk share one fetch.

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
    /// The chunk is here, or was; with what it held then, unless it had been written to whole.
    Here(Option<Content>),
    /// The chunk came, but there was no room for it: a reader can use it once.
    Handed(Content, DeviceError),
    /// It will not come.
    Failed(DeviceError),
}

/// What one fetch brought, for all who waited for that one. Whoever joins later gets an answer of its own: this one
/// may be older than what has been written since.
type Answer = Arc<OnceLock<Outcome>>;

/// Those who wait for one fetch.
#[derive(Default)]
pub struct Waiting {
    waiters: u32,
    /// Asked for because of them.
    demanded: bool,
    answer: Answer,
}

/// Says that somebody waits, until it is given to [`Waits::wait`] or [`Waits::leave`].
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
    pub fn join(&self, index: u64) -> Ticket {
        let mut waiting = self.shard(index).waiting.lock();
        let entry = waiting.entry(index).or_default();
        entry.waiters += 1;
        Ticket {
            index,
            answer: Arc::clone(&entry.answer),
        }
    }

    /// Says that the chunk is asked for because somebody waits: true for the first, who must ask.
    pub fn demand(&self, index: u64) -> bool {
        let mut waiting = self.shard(index).waiting.lock();
        match waiting.get_mut(&index) {
            Some(entry) => !std::mem::replace(&mut entry.demanded, true),
            None => false,
        }
    }

    /// Waits no more.
    pub fn leave(&self, ticket: Ticket) {
        leave(&mut self.shard(ticket.index).waiting.lock(), &ticket);
    }

    /// Waits for the answer. None at the deadline.
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

    /// Whether somebody waits.
    pub fn any(&self, index: u64) -> bool {
        self.shard(index).waiting.lock().contains_key(&index)
    }

    /// Whether somebody waits for a chunk that was only asked for in the background.
    pub fn must_demand(&self, index: u64) -> bool {
        let waiting = self.shard(index).waiting.lock();
        waiting.get(&index).is_some_and(|w| !w.demanded)
    }

    /// Takes down who waits by now; they are owed a [`Waits::tell_those`].
    pub fn take(&self, index: u64) -> Waiting {
        let taken = self.shard(index).waiting.lock().remove(&index);
        taken.unwrap_or_default()
    }

    /// Tells those who were taken down; whoever began to wait since looks again.
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

    /// Tells those who wait.
    pub fn tell(&self, index: u64, outcome: Outcome) {
        let shard = self.shard(index);
        if let Some(waiting) = shard.waiting.lock().remove(&index) {
            // Whoever sets it takes the entry out first.
            let _ = waiting.answer.set(outcome);
            shard.changed.notify_all();
        }
    }

    /// Tells all who wait, for whatever chunk.
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
    // After an answer the entry, if there is one, is that of others.
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
        // The first has not looked yet; the chunk may have been written, pushed and evicted since.
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
