//! The managed device (r3map §1.3.5.3, §1.4.5.3 to §1.4.5.7): a persistent local cache in front of a [`Remote`], filled
//! in the background and on demand, written to at once and pushed back in epochs.
//!
//! Locks, in the order in which they are taken; none is held while the far side is waited for:
//! 1. the barrier: shared by every change, exclusive for the instant of a freeze;
//! 2. the stripes' locks (`state.rs`): shared by reads, exclusive for changes of a chunk's bytes or state;
//! 3. the table (`table.rs`), then the spill.
//!
//! The pusher's and the saver's locks are taken with none of these held, the table's too, and only the table's inside them. The puller's
//! and the waiters' come last: nothing is taken inside them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use drover_core::{DeviceError, Digest, check_range};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::remote::{Chunks, Link, Local, Remote, Shape};
use drover_storage::Directory;

mod arrive;
mod cache;
mod device;
mod error;
mod evict;
mod handles;
mod order;
mod pull;
mod push;
mod read;
mod save;
mod spill;
mod state;
mod table;
mod wait;
mod write;

pub use cache::Left;
pub use error::SyncedError;
pub use handles::{Progress, PullHandle, PushHandle, Pushing};
pub use order::{Order, OrderError};
pub use state::MOST_CHUNKS;

use cache::Cache;
use pull::Pull;
use push::Push;
use save::Saver;
use spill::Spill;
use state::{Geometry, State, States};
use table::Table;
use wait::Waits;

/// Where a flush puts what was written before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sync {
    /// At the far side, durably: a flush takes a round trip, and waits while the link is down.
    #[default]
    Remote,
    /// In the local cache, durably; it reaches the far side a little later.
    Local,
}

/// What to call when something happens (r3map §1.4.5.7). From threads of the device, with no lock held.
#[derive(Clone, Default)]
pub struct Hooks {
    /// Before dirty data is frozen for a push that [`PushHandle::sync`] or [`Synced::close`] asks for: the place to flush
    /// what lies above. Not before the device's own pushes, which take a state as it was at some flush.
    pub before_sync: Option<Arc<dyn Fn() + Send + std::marker::Sync>>,
    /// Before the device closes, while it still takes requests.
    pub before_close: Option<Arc<dyn Fn() + Send + std::marker::Sync>>,
    /// A chunk has become local: its index.
    pub chunk_is_local: Option<Arc<dyn Fn(u64) + Send + std::marker::Sync>>,
}

/// How a managed device is set up.
pub struct SyncedOptions {
    /// Where the cache lives; made when it is empty. One device at a time.
    pub directory: Arc<dyn Directory>,
    /// The far side.
    pub remote: Arc<dyn Remote>,
    /// What names the far side's image; a cache of another identity is refused.
    pub identity: Vec<u8>,
    /// The image's digest, from the far side; a cache of another is refused, also one of the same name and size.
    pub image: Digest,
    /// The digest that a cache of version 1, which does not say it itself, is known to be of: with it such a cache is taken
    /// over, without it refused.
    pub former: Option<Digest>,
    /// Where a flush puts things.
    pub sync: Sync,
    /// Most bytes of chunks that the cache keeps, at least 16 chunks; none: no limit.
    pub cache_size: Option<u64>,
    /// What is pulled in the background, and in which order.
    pub prefetch: Order,
    /// How often dirty data is pushed.
    pub push_interval: Duration,
    /// Dirty bytes at which a push begins at once.
    pub high_water: u64,
    /// How long a request that needs the far side waits for it: a read of what is not here, a flush to there, a write that
    /// finds the cache full of what was not pushed yet.
    pub give_up_after: Duration,
    /// What to call.
    pub hooks: Hooks,
    /// Remember in which order chunks are first used ([`PullHandle::recorded`]).
    pub record_order: bool,
}

impl SyncedOptions {
    /// The usual ones: flushes go to the far side, everything is pulled, a push every 5 s or 256 MiB, ten minutes of
    /// patience.
    #[must_use]
    pub fn new(directory: Arc<dyn Directory>, remote: Arc<dyn Remote>, identity: &[u8]) -> Self {
        Self {
            directory,
            remote,
            identity: identity.to_vec(),
            image: Digest::default(),
            former: None,
            sync: Sync::default(),
            cache_size: None,
            prefetch: Order::Sequential,
            push_interval: Duration::from_secs(5),
            high_water: 256 << 20,
            give_up_after: Duration::from_secs(600),
            hooks: Hooks::default(),
            record_order: false,
        }
    }
}

/// What all threads of a device share.
pub(crate) struct Shared {
    myself: Weak<Shared>,
    geometry: Geometry,
    states: States,
    barrier: RwLock<()>,
    table: Mutex<Table>,
    spill: Mutex<Spill>,
    cache: Cache,
    saver: Saver,
    waits: Waits,
    pull: Pull,
    push: Push,
    remote: Arc<dyn Remote>,
    read_only: bool,
    link: Mutex<Link>,
    link_changed: Condvar,
    /// Whether the far side has told of its link. Held while the link is looked at or noted, so that what was seen before
    /// is not noted after what was told since; with no other lock held.
    link_told: Mutex<bool>,
    sync: Sync,
    /// Chunks.
    cache_limit: Option<u64>,
    push_interval: Duration,
    high_water: u64,
    give_up_after: Duration,
    hooks: Hooks,
    recorder: Option<order::Recorder>,
    unverified: AtomicU64,
    closed: AtomicBool,
    /// Why the device does nothing any more.
    failed: Mutex<Option<DeviceError>>,
    hand: AtomicU64,
    /// What came last did not fit on the cache's disk.
    no_room: AtomicBool,
}

/// A managed device. Dropped without [`Synced::close`], it stops like a process that was killed: what was flushed is
/// kept.
pub struct Synced {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// A close has done all that it does. Held by who closes, also while the far side is told ([`FAREWELL`]): only another
    /// close waits for it.
    is_written_down: Mutex<bool>,
}

impl Synced {
    /// Opens the cache, or makes it, and begins to pull.
    ///
    /// # Errors
    /// [`SyncedError`]; each says the way out.
    pub fn open(options: SyncedOptions) -> Result<Arc<Self>, SyncedError> {
        let remote = options.remote;
        let geometry = Geometry::new(remote.shape())?;
        let of = cache::Of {
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
            let dirty = log
                .chunks()
                .any(|c| matches!(c.1, State::Dirty | State::Partial | State::Erased));
            let fresh = log.chunks().next().is_none();
            let theirs = remote.committed();
            let known = log.knows(theirs);
            if !known && dirty {
                return Err(SyncedError::Conflict);
            }
            if !known && !fresh {
                tracing::info!("the image was changed elsewhere: the cache begins anew");
                log.forget()?;
            }
            log.agree(theirs)?;
        }
        let mut unverified = 0;
        for (index, state, mask) in log.chunks() {
            let _stripe = states.write(index);
            match state {
                State::Clean | State::Unverified if found.unclean => {
                    unverified += 1;
                    states.set(index, State::Unverified);
                    continue;
                }
                // What was written after the last flush may be there or not, in granules that the map does not name
                // as well: all of it goes to the far side, so that both agree.
                State::Dirty | State::Erased if found.unclean => {
                    table.wrote(geometry, index, geometry.all(index));
                }
                State::Dirty | State::Erased => table.wrote(geometry, index, mask),
                State::Partial => {
                    table.wrote(geometry, index, mask);
                    table.present.insert(index, mask);
                }
                _ => {}
            }
            states.set(index, state);
        }
        if !found.unclean {
            // The map knows all this.
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
            spill: Mutex::default(),
            cache,
            saver: Saver::new(log),
            waits: Waits::new(),
            pull: Pull::new(geometry, options.prefetch),
            push: Push::new(),
            read_only: remote.read_only(),
            remote,
            link: Mutex::new(link),
            link_changed: Condvar::new(),
            link_told: Mutex::new(false),
            sync: options.sync,
            cache_limit: options
                .cache_size
                .map(|size| (size / geometry.chunk()).max(least)),
            push_interval: options.push_interval,
            high_water: options.high_water,
            give_up_after: options.give_up_after.min(LONGEST_PATIENCE),
            hooks: options.hooks,
            recorder: options.record_order.then(|| order::Recorder::new(geometry)),
            unverified: AtomicU64::new(unverified),
            closed: AtomicBool::new(false),
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

    /// To steer what is pulled.
    #[must_use]
    pub fn puller(&self) -> PullHandle {
        PullHandle::new(Arc::clone(&self.shared))
    }

    /// To steer what is pushed.
    #[must_use]
    pub fn pusher(&self) -> PushHandle {
        PushHandle::new(Arc::clone(&self.shared))
    }

    /// How far things are.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.shared.progress()
    }

    /// Closes the device: with `sync` all that is dirty is pushed first (and the device stays open when that fails),
    /// without it the cache keeps what is dirty for the next time. Then the far side is told, unless something is kept for it. Requests get
    /// [`DeviceError::Closed`] from then on. Closed again, a device whose cache could not be written down tries that once
    /// more; until it succeeds the cache stays locked, as long as the device is there.
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
        // Changes that were under way are done, and none begins: the map is about to say what is here.
        drop(self.shared.barrier.write());
        self.shared.states.drain();
        // What still comes from there is not taken any more. Whoever still has something to push stays the one who may
        // write: the far side is not told then.
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

/// The longest wait for the far side: so long that nobody sees the end, and short enough to be added to any time.
const LONGEST_PATIENCE: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long a close waits for the far side to be told.
const FAREWELL: Duration = Duration::from_secs(10);

/// How often a close on a full disk tries to write the map down, with more room each time.
const CLOSE_TRIES: u32 = 4;

impl Shared {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn stop(&self) {
        self.closed.store(true, Ordering::Release);
        self.waits.tell_all(&DeviceError::Closed);
        self.push.wake();
        self.saver.wake();
        self.link_changed.notify_all();
        self.pull.wake();
    }

    /// The last thing before the cache is let go of.
    fn write_all_down(&self) -> Result<(), DeviceError> {
        let mut tries = 0;
        let result = loop {
            tries += 1;
            let result = self.save_all().and_then(|()| {
                // Chunks that were never compared since a crash are to be compared the next time.
                match self.unverified.load(Ordering::Acquire) {
                    0 => self.saver.close(),
                    _ => Ok(()),
                }
            });
            match result {
                Err(DeviceError::NoSpace(_)) if tries < CLOSE_TRIES && self.evict_at_close() => {}
                result => break result,
            }
        };
        let Err(error) = result else { return Ok(()) };
        if self.unpushed_bytes() > 0 {
            return Err(error);
        }
        // The far side has everything, and what the map says is as after a crash: chunks are compared before they are used.
        tracing::warn!(%error, "the cache was not closed as it should be; all that was written is at the far side");
        if self.saver.is_dirty() {
            // It would be pushed again, perhaps over what others wrote since.
            if let Err(error) = self.cache.forget() {
                tracing::warn!(%error, "the cache cannot be taken away");
            }
        }
        Ok(())
    }

    fn close_remote(&self) {
        let (tell, told) = std::sync::mpsc::channel();
        self.remote.close(Box::new(move |_| {
            let _ = tell.send(());
        }));
        let _ = told.recv_timeout(FAREWELL);
    }

    /// The device can go on.
    fn alive(&self) -> Result<(), DeviceError> {
        if self.is_closed() {
            return Err(DeviceError::Closed);
        }
        match &*self.failed.lock() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn changeable(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.geometry.shape.size)?;
        self.alive()?;
        match self.read_only {
            true => Err(DeviceError::ReadOnly),
            false => Ok(()),
        }
    }

    fn is_up(&self) -> bool {
        matches!(*self.link.lock(), Link::Up(_))
    }

    fn tell_local(&self, index: u64) {
        if let Some(hook) = &self.hooks.chunk_is_local {
            hook(index);
        }
    }

    /// What changed before the far side knew whom to tell was not told.
    fn look_at_link(&self) {
        let told = self.link_told.lock();
        if !*told {
            self.note_link(self.remote.link());
        }
    }

    /// The link has changed.
    fn note_link(&self, link: Link) {
        let up = matches!(link, Link::Up(_));
        if let Link::Gone(error) = &link {
            self.fail(error.clone());
        }
        // Before anybody pushes by the new link.
        if up && let Err(error) = self.saver.meet(self.remote.as_ref()) {
            self.fail(error);
        }
        *self.link.lock() = link;
        self.link_changed.notify_all();
        self.push.wake();
        if up {
            self.ask_presence();
            self.remote.kick();
        }
    }

    /// Nothing that needs the far side goes on; what is here could be stale.
    fn fail(&self, error: DeviceError) {
        match error {
            DeviceError::Closed => tracing::debug!("a managed device is closed"),
            _ => tracing::warn!(%error, "a managed device stops"),
        }
        self.failed.lock().get_or_insert(error.clone());
        self.waits.tell_all(&error);
        self.push.wake();
    }
}

impl Local for Shared {
    fn arrived(&self, chunks: Vec<crate::remote::Fetched>) {
        self.take_in(chunks);
    }

    fn failed(&self, chunks: Chunks, error: DeviceError) {
        self.not_coming(chunks, &error);
    }

    fn next(&self, most: u64) -> Option<Chunks> {
        self.next_pull(most)
    }

    fn link(&self, link: Link) {
        let mut told = self.link_told.lock();
        *told = true;
        self.note_link(link);
    }
}

impl Shared {
    fn shape(&self) -> Shape {
        self.geometry.shape
    }
}

#[cfg(test)]
mod tests;
