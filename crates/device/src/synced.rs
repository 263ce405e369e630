//! The managed device (r3map §1.3.5.3, §1.4.5.3 to §1.4.5.7): a persistent local cache in front of a `Remote`, filled
//! in the background and on demand. Writes go to the cache and are pushed back in epochs.
//!
//! Lock order; none is held while waiting for the remote:
//! 1. the barrier: shared by every change, exclusive for the instant of a freeze;
//! 2. the stripes' locks (`state.rs`): shared by reads, exclusive for changes of a chunk's bytes or state;
//! 3. the table (`table.rs`), then the copy-before-write store.
//!
//! The pusher's and the saver's locks are taken with none of these held; inside them only the table's may be taken. The
//! puller's and the waiters' locks are innermost: nothing is taken inside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::Duration;

use drover_core::DeviceError;
use parking_lot::{Condvar, Mutex, RwLock};

use crate::remote::Link;

mod arrive;
mod cache;
mod copy_before_write;
mod device;
mod error;
mod evict;
mod handles;
mod options;
mod order;
mod pull;
mod push;
mod read;
mod save;
mod shared;
mod state;
mod table;
mod wait;
mod write;

pub use cache::{CacheContents, drop_chunks};
pub use error::SyncedError;
pub use handles::{NoWrites, Progress, PullHandle, PushHandle, Pushing};
pub use options::{Hooks, Sync, SyncedOptions};
pub use order::Order;
pub use state::MAX_CHUNKS;

use cache::Cache;
use pull::Pull;
use push::Push;
use save::Saver;
use shared::Shared;
use state::{ChunkState, Geometry, States};
use table::Table;
use wait::Waits;

/// A managed device. Dropping it without [`Synced::close`] is like killing the process: flushed data is kept.
pub struct Synced {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Whether a close has completed. Held by the closing thread, also while it notifies the remote (`FAREWELL`):
    /// only another close waits for it.
    is_written_down: Mutex<bool>,
}

impl Synced {
    /// Opens or creates the cache, and starts pulling.
    ///
    /// # Errors
    /// [`SyncedError`]; each variant names the way out.
    pub fn open(options: SyncedOptions) -> Result<Arc<Self>, SyncedError> {
        let remote = options.remote;
        let geometry = Geometry::new(remote.shape())?;
        let of = cache::CacheOf {
            identity: &options.identity,
            image: options.image,
            former: options.former,
        };
        let (cache, found) = Cache::open(options.directory, geometry, of)?;
        let states = States::new(geometry);
        let mut table = Table::default();
        let mut log = found.log;
        let link = remote.link();
        if matches!(link, Link::Up(_)) {
            let dirty = log.is_dirty();
            let fresh = log.chunks().next().is_none();
            let theirs = remote.committed();
            let known = log.knows(theirs);
            if !known && dirty {
                return Err(SyncedError::Conflict);
            }
            if !known && !fresh {
                tracing::info!("the image was changed at the remote site: the cache is discarded");
                log.forget()?;
            }
            log.agree(theirs)?;
        }
        let mut unverified = 0;
        for (index, state, mask) in log.chunks() {
            let _stripe = states.write(index);
            match state {
                ChunkState::Clean | ChunkState::Unverified if found.unclean => {
                    unverified += 1;
                    states.set(index, ChunkState::Unverified);
                    continue;
                }
                // Writes after the last flush may or may not have survived, also in subchunks that the map does not
                // name: the whole chunk is pushed, so that both sides agree.
                ChunkState::Dirty | ChunkState::Erased if found.unclean => {
                    table.wrote(geometry, index, geometry.all(index));
                }
                ChunkState::Dirty | ChunkState::Erased => table.wrote(geometry, index, mask),
                ChunkState::Partial => {
                    table.wrote(geometry, index, mask);
                    table.present.insert(index, mask);
                }
                _ => {}
            }
            states.set(index, state);
        }
        if !found.unclean {
            // The map records all of this.
            table.unlogged_dirty.clear();
        }
        log.begin()?;
        let least = 16;
        let shared = Arc::new_cyclic(|myself| Shared {
            myself: myself.clone(),
            geometry,
            states,
            barrier: RwLock::default(),
            table: Mutex::new(table),
            copy_before: Mutex::default(),
            cache,
            saver: Saver::new(log),
            waits: Waits::new(),
            pull: Pull::new(geometry, options.prefetch),
            push: Push::new(),
            read_only: remote.read_only(),
            remote,
            link: Mutex::new(link),
            link_changed: Condvar::new(),
            link_known: Mutex::new(false),
            sync: options.sync,
            cache_limit: options
                .cache_size
                .map(|size| (size / geometry.chunk()).max(least)),
            push_interval: options.push_interval,
            high_water: options.high_water,
            give_up_after: options.give_up_after.min(MAX_TIMEOUT),
            hooks: options.hooks,
            unverified: AtomicU64::new(unverified),
            closed: AtomicBool::new(false),
            writes_refused: AtomicBool::new(false),
            failed: Mutex::default(),
            hand: AtomicU64::new(0),
            no_room: AtomicBool::new(false),
        });
        shared.remote.attach(shared.myself.clone());
        shared.look_at_link();
        let mut threads = vec![spawn("synced-save", &shared, Shared::keep_saved)?];
        if !shared.read_only {
            threads.push(spawn("synced-push", &shared, Shared::keep_pushed)?);
        }
        Ok(Arc::new(Self {
            shared,
            threads: Mutex::new(threads),
            is_written_down: Mutex::new(false),
        }))
    }

    /// The handle that controls pulling.
    #[must_use]
    pub fn puller(&self) -> PullHandle {
        PullHandle::new(Arc::clone(&self.shared))
    }

    /// The handle that controls pushing.
    #[must_use]
    pub fn pusher(&self) -> PushHandle {
        PushHandle::new(Arc::clone(&self.shared))
    }

    /// Progress and status.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.shared.progress()
    }

    /// Closes the device: with `sync` all dirty data is pushed first (if that fails the device stays open), without it
    /// the cache keeps the dirty data for the next open. Then the remote is notified, unless unpushed data remains.
    /// Later requests fail with [`DeviceError::Closed`]. If the cache could not be saved, closing again retries that
    /// once; until it succeeds the cache stays locked for the lifetime of the device.
    ///
    /// # Errors
    /// Of the last push, or of the cache's disk.
    pub fn close(&self, sync: bool) -> Result<(), DeviceError> {
        if !self.shared.is_closed() {
            if let Some(hook) = &self.shared.hooks.before_close {
                hook();
            }
            if sync && !self.shared.read_only {
                self.shared.push_all()?;
            }
            self.shared.stop();
        }
        let mut is_written_down = self.is_written_down.lock();
        if *is_written_down {
            return Ok(());
        }
        self.join();
        // Changes in flight have finished and no new ones begin: the map is about to become final.
        drop(self.shared.barrier.write());
        self.shared.states.drain();
        // Replies still in flight are dropped. A device with unpushed data keeps the right to write: the remote is not
        // notified then.
        if self.shared.unpushed_bytes() == 0 {
            self.shared.close_remote();
        }
        self.shared.write_all_down()?;
        self.shared.cache.unlock();
        *is_written_down = true;
        Ok(())
    }

    fn join(&self) {
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Synced {
    fn drop(&mut self) {
        self.shared.stop();
        self.join();
    }
}

fn spawn(
    name: &str,
    shared: &Arc<Shared>,
    work: fn(&Shared),
) -> Result<JoinHandle<()>, DeviceError> {
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new().name(name.to_owned());
    Ok(thread.spawn(move || work(&shared))?)
}

/// Maximum timeout: effectively infinite, yet safe to add to any instant.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

#[cfg(test)]
mod tests;
