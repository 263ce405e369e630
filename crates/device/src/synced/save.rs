//! Making the cache durable: bytes and digests first, then the map that says so. Callers at the same time share one run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use drover_core::{DeviceError, Digest};
use parking_lot::{Condvar, Mutex};

use super::Shared;
use super::cache::Log;
use super::state::{Mask, State};
use crate::remote::{Epoch, Remote};

/// How often pulled chunks are written down.
const EVERY: Duration = Duration::from_secs(5);
/// Pulled bytes after which they are written down at once.
const PULLED: u64 = 256 << 20;
/// How long the thread rests between two chunks that it compares with their digests after a crash.
const REST: Duration = Duration::from_millis(1);

#[derive(Default)]
struct Turn {
    started: u64,
    finished: u64,
    running: bool,
    /// The next run takes pulled chunks along.
    all: bool,
    error: Option<DeviceError>,
}

pub struct Saver {
    log: Mutex<Log>,
    turn: Mutex<Turn>,
    changed: Condvar,
    pulled: AtomicU64,
    /// A sync of the data failed: what it covered may be gone although it can be read.
    broken: Mutex<Option<DeviceError>>,
}

impl Saver {
    pub fn new(log: Log) -> Self {
        Self {
            log: Mutex::new(log),
            turn: Mutex::default(),
            changed: Condvar::new(),
            pulled: AtomicU64::new(0),
            broken: Mutex::default(),
        }
    }

    /// Counts bytes that were pulled.
    pub fn pulled(&self, bytes: u64) {
        let before = self.pulled.fetch_add(bytes, Ordering::Relaxed);
        if before < PULLED && before + bytes >= PULLED {
            self.wake();
        }
    }

    pub fn wake(&self) {
        let _turn = self.turn.lock();
        self.changed.notify_all();
    }

    /// Compares the far side's epoch with the one that the cache agrees with.
    pub fn meet(&self, remote: &dyn Remote) -> Result<(), DeviceError> {
        let mut log = self.log.lock();
        // Asked under the lock: the pusher may be writing down a commit.
        let theirs = remote.committed();
        match log.knows(theirs) {
            // A commit whose answer was lost: it must not be asked for an epoch of ours once there is a later one.
            true if log.committed != Some(theirs) => log.agree(theirs),
            true => Ok(()),
            false => Err(DeviceError::Corrupt(
                "the image was changed elsewhere while the link was down; unmount, and mount anew"
                    .into(),
            )),
        }
    }

    pub fn intend(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.log.lock().intend(epoch)
    }

    pub fn agree(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.log.lock().agree(epoch)
    }

    pub fn close(&self) -> Result<(), DeviceError> {
        self.log.lock().close()
    }

    fn sound(&self) -> Result<(), DeviceError> {
        match &*self.broken.lock() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

/// What a run writes down.
struct Batch {
    chunks: Vec<(u64, State, Mask)>,
    digests: Vec<(u64, Option<Digest>)>,
}

impl Shared {
    /// Makes durable what was written, and with `all` what was pulled, before the call.
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
        let all = std::mem::take(&mut turn.all);
        drop(turn);
        let result = self.save_now(all);
        let mut turn = saver.turn.lock();
        turn.running = false;
        turn.finished = turn.started;
        turn.error = result.clone().err();
        saver.changed.notify_all();
        result
    }

    pub(super) fn save_all(&self) -> Result<(), DeviceError> {
        self.save(true)
    }

    fn save_now(&self, all: bool) -> Result<(), DeviceError> {
        self.saver.sound()?;
        let batch = self.batch(all);
        if batch.chunks.is_empty() {
            return Ok(());
        }
        let result = self.save_batch(&batch);
        let mut table = self.table.lock();
        match &result {
            Ok(()) => {
                for (index, ..) in batch.chunks.iter().filter(|c| !needs_push(c.1)) {
                    table.guarded.remove(index);
                }
            }
            Err(_) => {
                for (index, state, _) in &batch.chunks {
                    if needs_push(*state) {
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

    /// Takes what the map does not know, as it is at this moment: its bytes are in the file, not yet durable.
    fn batch(&self, all: bool) -> Batch {
        let mut table = self.table.lock();
        let dirty = std::mem::take(&mut table.unlogged_dirty);
        let digests: Vec<_> = match all {
            true => std::mem::take(&mut table.unlogged).into_iter().collect(),
            false => Vec::new(),
        };
        let touched = dirty.iter().copied().chain(digests.iter().map(|d| d.0));
        let mut chunks: Vec<_> = touched
            .map(|index| {
                let state = self.states.get(index);
                (index, state, table.mask(index, state))
            })
            .collect();
        chunks.sort_unstable_by_key(|c| c.0);
        if all {
            self.saver.pulled.store(0, Ordering::Relaxed);
        }
        Batch { chunks, digests }
    }

    fn save_batch(&self, batch: &Batch) -> Result<(), DeviceError> {
        let digests: Vec<(u64, Digest)> = batch
            .digests
            .iter()
            .filter_map(|(index, digest)| Some((*index, (*digest)?)))
            .collect();
        // A full disk here loses nothing and can pass.
        self.cache.write_digests(&digests)?;
        let synced = self
            .cache
            .sync_data()
            .and_then(|()| match digests.is_empty() {
                true => Ok(()),
                false => self.cache.sync_digests(),
            });
        if let Err(error) = synced {
            tracing::error!(%error, "the cache cannot be made durable");
            *self.saver.broken.lock() = Some(error.clone());
            return Err(error);
        }
        self.saver.log.lock().save(&batch.chunks)
    }

    /// The saver's thread: writes down what was pulled, and after a crash compares what is there with its digests.
    pub(super) fn keep_saved(&self) {
        let mut next = 0;
        let mut last = std::time::Instant::now();
        while !self.is_closed() {
            let rest = match self.unverified.load(Ordering::Acquire) {
                0 => EVERY,
                _ => REST,
            };
            {
                let mut turn = self.saver.turn.lock();
                if !self.is_closed() && self.saver.pulled.load(Ordering::Relaxed) < PULLED {
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
                    // Not again at once.
                    self.saver.pulled.store(0, Ordering::Relaxed);
                }
            }
        }
    }

    fn next_unverified(&self, next: &mut u64) -> Option<u64> {
        if self.unverified.load(Ordering::Acquire) == 0 {
            return None;
        }
        let found = (*next..self.states.count()).find(|i| self.states.get(*i) == State::Unverified);
        *next = found.map_or(0, |index| index + 1);
        found
    }
}

fn needs_push(state: State) -> bool {
    matches!(state, State::Dirty | State::Partial | State::Erased)
}
