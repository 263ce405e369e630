//! Making the cache durable: first bytes and digests, then the map of chunk states. Concurrent callers share one run.
//!
//! Pulled chunks are entered in the map long before they are durable: that costs two small writes and preserves them
//! when the process is killed; after a power loss the digests reveal incomplete chunks.

use std::sync::atomic::Ordering;
use std::time::Duration;

use drover_core::{DeviceError, Digest};

use super::shared::Shared;
use super::state::{ChunkState, Mask};

mod turn;

pub use turn::Saver;
use turn::{Depth, PULLED, PULLED_EARLY};

/// Interval at which pulled chunks are made durable.
const EVERY: Duration = Duration::from_secs(5);
/// Interval at which pulled chunks are entered in the map, so that they survive a killed process.
const EARLY: Duration = Duration::from_millis(250);
/// Pause between two chunks that the background thread verifies after a crash.
const REST: Duration = Duration::from_millis(1);

/// What one run saves.
struct Batch {
    chunks: Vec<(u64, ChunkState, Mask)>,
    digests: Vec<(u64, Option<Digest>)>,
}

impl Shared {
    /// Makes everything written before the call durable; with `all`, pulled chunks too.
    pub(super) fn save(&self, all: bool) -> Result<(), DeviceError> {
        let saver = &self.saver;
        let mut turn = saver.turn.lock();
        turn.all |= all;
        let wanted = turn.started + 1;
        while turn.running && turn.finished < wanted {
            saver.changed.wait(&mut turn);
        }
        if turn.finished >= wanted {
            return turn.error.clone().map_or(Ok(()), Err);
        }
        turn.running = true;
        turn.started += 1;
        let depth = match std::mem::take(&mut turn.all) {
            true => Depth::All { early: turn.early },
            false => Depth::Written,
        };
        drop(turn);
        let result = self.save_now(depth);
        let mut turn = saver.turn.lock();
        if matches!(depth, Depth::All { .. }) && result.is_ok() {
            turn.early = false;
        }
        turn.running = false;
        turn.finished = turn.started;
        turn.error = result.clone().err();
        saver.changed.notify_all();
        result
    }

    pub(super) fn save_all(&self) -> Result<(), DeviceError> {
        self.save(true)
    }

    /// Enters pulled chunks in the map, unless a fuller save is running.
    fn save_early(&self) -> Result<(), DeviceError> {
        let saver = &self.saver;
        {
            let mut turn = saver.turn.lock();
            if turn.running {
                return Ok(());
            }
            turn.running = true;
            turn.early = true;
        }
        let result = self.save_now(Depth::Early);
        saver.turn.lock().running = false;
        saver.changed.notify_all();
        result
    }

    fn save_now(&self, depth: Depth) -> Result<(), DeviceError> {
        self.saver.sound()?;
        let batch = self.batch(depth);
        if batch.chunks.is_empty() && depth != (Depth::All { early: true }) {
            return Ok(());
        }
        let result = match depth {
            Depth::Early => self.save_batch(&batch, depth),
            _ => self.with_room(|| self.save_batch(&batch, depth)),
        };
        match &result {
            Ok(()) if matches!(depth, Depth::All { .. }) => {
                let log = self.saver.log.lock();
                let mut table = self.table.lock();
                table.guarded.retain(|index| log.needs_push(*index));
            }
            Ok(()) => {}
            Err(_) => {
                let mut table = self.table.lock();
                for (index, state, _) in &batch.chunks {
                    if state.needs_push() {
                        table.unlogged_dirty.insert(*index);
                    }
                }
                for (index, digest) in &batch.digests {
                    if !table.unlogged_dirty.contains(index) {
                        table.unlogged.entry(*index).or_insert(*digest);
                    }
                }
            }
        }
        result
    }

    /// Collects the changes the map lacks, as of this moment: their bytes are in the file, not yet durable.
    fn batch(&self, depth: Depth) -> Batch {
        let mut table = self.table.lock();
        let dirty = match depth {
            Depth::Early => Default::default(),
            _ => std::mem::take(&mut table.unlogged_dirty),
        };
        let digests: Vec<_> = match depth {
            Depth::Written => Vec::new(),
            _ => std::mem::take(&mut table.unlogged).into_iter().collect(),
        };
        let touched = dirty.iter().copied().chain(digests.iter().map(|d| d.0));
        let mut chunks: Vec<_> = touched
            .map(|index| {
                let state = self.states.get(index);
                (index, state, table.mask(index, state))
            })
            .collect();
        chunks.sort_unstable_by_key(|c| c.0);
        if depth != Depth::Written {
            self.saver.fresh.store(0, Ordering::Relaxed);
        }
        if matches!(depth, Depth::All { .. }) {
            self.saver.pulled.store(0, Ordering::Relaxed);
        }
        Batch { chunks, digests }
    }

    fn save_batch(&self, batch: &Batch, depth: Depth) -> Result<(), DeviceError> {
        let digests: Vec<(u64, Digest)> = batch
            .digests
            .iter()
            .filter_map(|(index, digest)| Some((*index, (*digest)?)))
            .collect();
        // A full disk here loses nothing and may be temporary.
        self.cache.write_digests(&digests)?;
        if depth == Depth::Early {
            return self.saver.log.lock().save(&batch.chunks, false);
        }
        let early = depth == Depth::All { early: true };
        let synced = self
            .cache
            .sync_data()
            .and_then(|()| match digests.is_empty() && !early {
                true => Ok(()),
                false => self.cache.sync_digests(),
            });
        if let Err(error) = synced {
            tracing::error!(%error, "the cache cannot be made durable");
            *self.saver.broken.lock() = Some(error.clone());
            return Err(error);
        }
        self.saver.log.lock().save(&batch.chunks, true)
    }

    /// The saver's thread: saves pulled chunks, and after a crash verifies chunks against their digests.
    pub(super) fn keep_saved(&self) {
        let mut next = 0;
        let mut last = std::time::Instant::now();
        let mut last_early = last;
        let many = || {
            self.saver.pulled.load(Ordering::Relaxed) >= PULLED
                || self.saver.fresh.load(Ordering::Relaxed) >= PULLED_EARLY
        };
        while !self.is_closed() {
            let fresh = self.saver.fresh.load(Ordering::Relaxed) > 0;
            let rest = match self.unverified.load(Ordering::Acquire) {
                0 if fresh => EARLY,
                0 => EVERY,
                _ => REST,
            };
            {
                let mut turn = self.saver.turn.lock();
                if !self.is_closed() && !many() {
                    self.saver.changed.wait_for(&mut turn, rest);
                }
            }
            if self.is_closed() {
                return;
            }
            if let Some(index) = self.next_unverified(&mut next)
                && let Err(error) = self.verify(&[index])
            {
                tracing::warn!(index, %error, "a chunk of the cache cannot be read");
            }
            let pulled = self.saver.pulled.load(Ordering::Relaxed);
            if last.elapsed() >= EVERY || pulled >= PULLED {
                last = std::time::Instant::now();
                self.pull_on();
                if let Err(error) = self.save(true) {
                    tracing::warn!(%error, "pulled chunks are not saved");
                    // Do not retry immediately.
                    self.saver.pulled.store(0, Ordering::Relaxed);
                }
            }
            if self.saver.fresh.load(Ordering::Relaxed) > 0
                && (last_early.elapsed() >= EARLY || many())
            {
                last_early = std::time::Instant::now();
                if let Err(error) = self.save_early() {
                    tracing::debug!(%error, "pulled chunks are not written down yet");
                }
                self.saver.fresh.store(0, Ordering::Relaxed);
            }
        }
    }

    fn next_unverified(&self, next: &mut u64) -> Option<u64> {
        if self.unverified.load(Ordering::Acquire) == 0 {
            return None;
        }
        let found =
            (*next..self.states.count()).find(|i| self.states.get(*i) == ChunkState::Unverified);
        *next = found.map_or(0, |index| index + 1);
        found
    }
}
