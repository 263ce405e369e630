//! Eviction from a cache of limited size: clean chunks, least recently used first (CLOCK); never dirty ones.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;

use super::shared::Shared;
use super::state::ChunkState;

/// How long a writer waits at a time for the pusher to make chunks clean.
const WAIT: Duration = Duration::from_millis(50);

/// How long it waits for one that is being refused.
const RETRY_LIMIT: Duration = Duration::from_millis(300);

/// Chunks that are evicted when the cache's disk is full.
pub(super) const AT_ONCE: u64 = 16;

/// What an eviction leaves alone beside what is dirty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sparing {
    /// Nothing else.
    Nothing,
    /// What came ahead of a reader who has not used it.
    Ahead,
}

fn full(what: &str) -> DeviceError {
    DeviceError::NoSpace(format!("the cache is full of {what}; use a larger cache"))
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
            if over == 0 || self.evict(over, keep, Sparing::Nothing) >= over {
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

    /// Makes room for a chunk that comes ahead of a reader: of what no reader is to come for.
    pub(super) fn evict_for_ahead(&self, index: u64) -> Result<(), DeviceError> {
        let limit = self.cache_limit.unwrap_or(u64::MAX);
        let over = (self.states.stored() + 1).saturating_sub(limit);
        match self.evict(over, &(index..index + 1), Sparing::Ahead) >= over {
            true => Ok(()),
            false => Err(full("what is in use")),
        }
    }

    /// Makes room for a write; waits for the pusher, and for the link that it needs, when all that is left is dirty.
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

    /// Has dirty chunks made clean, for a request that cannot go on otherwise.
    /// `long`: it has been waited for before.
    pub(super) fn wait_for_room(&self, deadline: Instant, long: bool) -> Result<(), DeviceError> {
        self.alive()?;
        if let Some(why) = self.push.trouble().filter(|_| long) {
            return Err(full(&format!("what cannot be pushed ({why})")));
        }
        if Instant::now() >= deadline {
            let link = self.why_down();
            let seconds = self.give_up_after.as_secs();
            return Err(full(&format!("what was not pushed in {seconds} s{link}")));
        }
        self.push.request();
        self.push.wait_a_while(WAIT);
        Ok(())
    }

    /// Does something that needs room on the cache's disk; when there is none, again with what clean chunks took.
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

    /// Lets up to `count` clean chunks go, but none of `keep`, and says how many went.
    pub(super) fn evict(&self, count: u64, keep: &Range<u64>, sparing: Sparing) -> u64 {
        let chunks = self.states.count();
        let mut gone = 0;
        // Twice around: the first time may only find marks to clear. What no reader has come for goes last.
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

    /// Gives some of the disk back that clean chunks take, while the device closes: nobody else is at them any more, and the
    /// map is written after this.
    pub(super) fn evict_at_close(&self) -> bool {
        let spare = (0..self.states.count()).filter(|i| self.states.get(*i).spare());
        let gone = spare.filter(|i| self.evict_chunk(*i, true));
        gone.take(AT_ONCE as usize).count() > 0
    }

    fn evict_chunk(&self, index: u64, closing: bool) -> bool {
        let _stripe = self.states.write(index);
        let state = self.states.get(index);
        let mut table = self.table.lock();
        // After a close the map says what is here, and nobody would correct it.
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
