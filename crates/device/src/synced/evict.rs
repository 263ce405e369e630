//! Eviction from a cache of limited size: clean chunks, least recently used first (CLOCK); never dirty ones.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;

use super::shared::Shared;
use super::state::ChunkState;

/// How long a writer waits at a time for the pusher to clean chunks.
const WAIT: Duration = Duration::from_millis(50);

/// How long it waits while pushes are being refused.
const RETRY_LIMIT: Duration = Duration::from_millis(300);

/// Chunks evicted at once when the cache's disk is full.
pub(super) const AT_ONCE: u64 = 16;

/// What an eviction spares besides dirty chunks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sparing {
    /// Nothing else.
    Nothing,
    /// Read-ahead that has not been used yet.
    Ahead,
}

fn full(what: &str) -> DeviceError {
    DeviceError::NoSpace(format!("the cache is full of {what}; use a larger cache"))
}

impl Shared {
    /// Whether `more` chunks would need an eviction.
    pub(super) fn is_full(&self, more: u64) -> bool {
        self.cache_limit
            .is_some_and(|limit| self.states.stored() + more > limit)
    }

    /// Makes room without waiting for the remote.
    pub(super) fn evict_for(&self, chunks: u64, keep: &Range<u64>) -> Result<(), DeviceError> {
        let Some(limit) = self.cache_limit else {
            return Ok(());
        };
        for _ in 0..2 {
            let over = (self.states.stored() + chunks).saturating_sub(limit);
            if over == 0 || self.evict(over, keep, Sparing::Nothing) >= over {
                return Ok(());
            }
            // Chunks pushed just now become evictable once the map records them as clean.
            if self.table.lock().guarded.is_empty() {
                break;
            }
            self.save(true)?;
        }
        Err(full("data that has not been pushed"))
    }

    /// Makes room for a read-ahead chunk, sparing unused read-ahead.
    pub(super) fn evict_for_ahead(&self, index: u64) -> Result<(), DeviceError> {
        let limit = self.cache_limit.unwrap_or(u64::MAX);
        let over = (self.states.stored() + 1).saturating_sub(limit);
        match self.evict(over, &(index..index + 1), Sparing::Ahead) >= over {
            true => Ok(()),
            false => Err(full("what is in use")),
        }
    }

    /// Makes room for a write; waits for the pusher, and for the link it needs, when only dirty chunks are left.
    pub(super) fn reserve(
        &self,
        chunks: u64,
        keep: &Range<u64>,
        deadline: &mut Option<Instant>,
    ) -> Result<(), DeviceError> {
        if chunks == 0 || !self.is_full(chunks) {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            match self.evict_for(chunks, keep) {
                Ok(()) => return Ok(()),
                Err(DeviceError::NoSpace(_)) => {}
                Err(error) => return Err(error),
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.give_up_after);
            self.wait_for_room(deadline, began.elapsed() >= RETRY_LIMIT)?;
        }
    }

    /// Gets dirty chunks cleaned for a request that is blocked on them. `long`: the request has waited before.
    pub(super) fn wait_for_room(&self, deadline: Instant, long: bool) -> Result<(), DeviceError> {
        self.alive()?;
        if let Some(why) = self.push.trouble().filter(|_| long) {
            return Err(full(&format!("data that cannot be pushed ({why})")));
        }
        if Instant::now() >= deadline {
            let link = self.why_down();
            let seconds = self.give_up_after.as_secs();
            return Err(full(&format!(
                "data that was not pushed within {seconds} s{link}"
            )));
        }
        self.push.request();
        self.push.wait_a_while(WAIT);
        Ok(())
    }

    /// Runs an operation that needs space on the cache's disk; if there is none, evicts clean chunks and retries once.
    pub(super) fn with_room<T>(
        &self,
        work: impl Fn() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        match work() {
            Err(DeviceError::NoSpace(_)) if self.evict(AT_ONCE, &(0..0), Sparing::Nothing) > 0 => {
                work()
            }
            result => result,
        }
    }

    /// Evicts up to `count` clean chunks, none of them in `keep`; returns how many.
    pub(super) fn evict(&self, count: u64, keep: &Range<u64>, sparing: Sparing) -> u64 {
        let chunks = self.states.count();
        let mut gone = 0;
        // Two rounds: the first may only clear reference bits. Unused read-ahead is evicted last.
        let rounds = match sparing {
            Sparing::Ahead => 2,
            Sparing::Nothing => 3,
        };
        for step in 0..chunks * rounds {
            if gone >= count || self.states.spare() == 0 {
                break;
            }
            let index = self.hand.fetch_add(1, Ordering::Relaxed) % chunks;
            if !self.states.get(index).spare()
                || self.states.in_flight(index)
                || keep.contains(&index)
                || (self.states.is_ahead(index) && step < chunks * 2)
                || self.states.pass(index)
            {
                continue;
            }
            if self.evict_chunk(index, false) {
                gone += 1;
            }
        }
        gone
    }

    /// Frees disk space of clean chunks during a close: nothing else accesses them, and the map is written afterwards.
    pub(super) fn evict_at_close(&self) -> bool {
        let spare = (0..self.states.count()).filter(|i| self.states.get(*i).spare());
        let gone = spare.filter(|i| self.evict_chunk(*i, true));
        gone.take(AT_ONCE as usize).count() > 0
    }

    fn evict_chunk(&self, index: u64, closing: bool) -> bool {
        let _stripe = self.states.write(index);
        let state = self.states.get(index);
        let mut table = self.table.lock();
        // After a close the map is final and would not be corrected.
        let can = (closing || !self.is_closed())
            && state.spare()
            && !self.states.in_flight(index)
            && !table.guarded.contains(&index);
        if !can {
            return false;
        }
        if state == ChunkState::Unverified {
            self.unverified.fetch_sub(1, Ordering::AcqRel);
        }
        table.settled(index, None);
        self.states.set(index, ChunkState::Absent);
        drop(table);
        self.spoil_presence(index);
        // If this fails the space stays allocated until the chunk is written again.
        if let Err(error) = self
            .cache
            .punch(self.geometry.start(index), self.geometry.length(index))
        {
            tracing::debug!(index, %error, "the space of an evicted chunk is not given back");
        }
        true
    }
}
