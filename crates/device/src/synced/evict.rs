//! Room in a cache of limited size: clean chunks go, those unused longest first (CLOCK); dirty ones never do.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;

use super::Shared;
use super::state::State;

/// How long a writer waits at a time for the pusher to make chunks clean.
const WAIT: Duration = Duration::from_millis(50);

/// How long it waits for one that is being refused.
const PATIENCE: Duration = Duration::from_millis(300);

fn full(what: &str) -> DeviceError {
    DeviceError::NoSpace(format!(
        "the cache is full of {what}; mount with a larger --cache-size"
    ))
}

impl Shared {
    /// Whether `more` chunks would not find room without eviction.
    pub(super) fn is_full(&self, more: u64) -> bool {
        self.cache_limit
            .is_some_and(|limit| self.states.stored() + more > limit)
    }

    /// Makes room without waiting for the far side.
    pub(super) fn evict_for(&self, chunks: u64, keep: &Range<u64>) -> Result<(), DeviceError> {
        let Some(limit) = self.cache_limit else {
            return Ok(());
        };
        for _ in 0..2 {
            let over = (self.states.stored() + chunks).saturating_sub(limit);
            if over == 0 || self.evict(over, keep) >= over {
                return Ok(());
            }
            // Chunks that were pushed a moment ago can go once the map calls them clean.
            if self.table.lock().guarded.is_empty() {
                break;
            }
            self.save(true)?;
        }
        Err(full("what was not pushed yet"))
    }

    /// Makes room for a write; waits for the pusher when all that is left is dirty.
    pub(super) fn reserve(&self, chunks: u64, keep: &Range<u64>) -> Result<(), DeviceError> {
        if chunks == 0 || !self.is_full(chunks) {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            let error = match self.evict_for(chunks, keep) {
                Ok(()) => return Ok(()),
                Err(error @ DeviceError::NoSpace(_)) => error,
                Err(error) => return Err(error),
            };
            self.alive()?;
            if !self.is_up() || began.elapsed() >= self.give_up_after {
                return Err(error);
            }
            if began.elapsed() >= PATIENCE
                && let Some(why) = self.push.trouble()
            {
                return Err(full(&format!("what cannot be pushed ({why})")));
            }
            self.push.request();
            self.push.wait_a_while(WAIT);
        }
    }

    /// Has dirty chunks made clean, for a request that cannot go on otherwise.
    /// `long`: it has been waited for before.
    pub(super) fn wait_for_room(
        &self,
        deadline: Option<Instant>,
        long: bool,
    ) -> Result<(), DeviceError> {
        self.alive()?;
        if let Some(why) = self.push.trouble().filter(|_| long) {
            return Err(full(&format!("what cannot be pushed ({why})")));
        }
        if !self.is_up() || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(full("what was not pushed yet"));
        }
        self.push.request();
        self.push.wait_a_while(WAIT);
        Ok(())
    }

    /// Lets up to `count` clean chunks go, but none of `keep`, and says how many went.
    pub(super) fn evict(&self, count: u64, keep: &Range<u64>) -> u64 {
        let chunks = self.states.count();
        let mut gone = 0;
        // Twice around: the first time may only find marks to clear.
        for _ in 0..chunks * 2 {
            if gone >= count {
                break;
            }
            let index = self.hand.fetch_add(1, Ordering::Relaxed) % chunks;
            if !matches!(self.states.get(index), State::Clean | State::Unverified)
                || self.states.pass(index)
                || self.states.in_flight(index)
                || keep.contains(&index)
            {
                continue;
            }
            if self.evict_chunk(index) {
                gone += 1;
            }
        }
        gone
    }

    fn evict_chunk(&self, index: u64) -> bool {
        let _stripe = self.states.write(index);
        let state = self.states.get(index);
        let mut table = self.table.lock();
        // After a close the map says what is here, and nobody would correct it.
        let can = !self.is_closed()
            && matches!(state, State::Clean | State::Unverified)
            && !self.states.in_flight(index)
            && !table.guarded.contains(&index);
        if !can {
            return false;
        }
        if state == State::Unverified {
            self.unverified.fetch_sub(1, Ordering::AcqRel);
        }
        table.settled(index, None);
        self.states.set(index, State::Absent);
        drop(table);
        self.spoil_presence(index);
        // Should it fail, the space is not given back, which the next write of it makes good.
        if let Err(error) = self
            .cache
            .punch(self.geometry.start(index), self.geometry.length(index))
        {
            tracing::debug!(index, %error, "the space of an evicted chunk is not given back");
        }
        true
    }
}
