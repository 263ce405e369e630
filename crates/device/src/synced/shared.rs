//! The state shared by all threads of a managed device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use drover_core::{DeviceError, check_range};
use parking_lot::{Condvar, Mutex, RwLock};

use super::cache::Cache;
use super::copy_before_write::CopyBeforeWrite;
use super::options::{Hooks, Sync};
use super::pull::Pull;
use super::push::Push;
use super::save::Saver;
use super::state::{Geometry, States};
use super::table::Table;
use super::wait::Waits;
use crate::remote::{Chunks, Link, Local, Remote, Shape};

/// The state shared by all threads of a device.
pub(crate) struct Shared {
    pub(super) myself: Weak<Shared>,
    pub(super) geometry: Geometry,
    pub(super) states: States,
    pub(super) barrier: RwLock<()>,
    pub(super) table: Mutex<Table>,
    pub(super) copy_before: Mutex<CopyBeforeWrite>,
    pub(super) cache: Cache,
    pub(super) saver: Saver,
    pub(super) waits: Waits,
    pub(super) pull: Pull,
    pub(super) push: Push,
    pub(super) remote: Arc<dyn Remote>,
    pub(super) read_only: bool,
    pub(super) link: Mutex<Link>,
    pub(super) link_changed: Condvar,
    /// Whether the remote has reported its link state. Held while the link is queried or recorded, so that an older
    /// observation does not overwrite a newer report; no other lock is held.
    pub(super) link_known: Mutex<bool>,
    pub(super) sync: Sync,
    /// In chunks.
    pub(super) cache_limit: Option<u64>,
    pub(super) push_interval: Duration,
    pub(super) high_water: u64,
    pub(super) give_up_after: Duration,
    pub(super) hooks: Hooks,
    pub(super) unverified: AtomicU64,
    pub(super) closed: AtomicBool,
    /// See [`NoWrites`](super::NoWrites); checked with the barrier held.
    pub(super) writes_refused: AtomicBool,
    /// Why the device has stopped.
    pub(super) failed: Mutex<Option<DeviceError>>,
    pub(super) hand: AtomicU64,
    /// The last arrivals did not fit on the cache's disk.
    pub(super) no_room: AtomicBool,
}

/// How long a close waits to notify the remote.
const FAREWELL: Duration = Duration::from_secs(10);

/// How often a close on a full disk tries to write the map, evicting more each time.
const CLOSE_TRIES: u32 = 4;

impl Shared {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn stop(&self) {
        self.closed.store(true, Ordering::Release);
        self.waits.tell_all(&DeviceError::Closed);
        self.push.wake();
        self.saver.wake();
        self.link_changed.notify_all();
        self.pull.wake();
    }

    /// The final save, before the cache is unlocked.
    pub(super) fn write_all_down(&self) -> Result<(), DeviceError> {
        let mut tries = 0;
        let result = loop {
            tries += 1;
            let result = self.save_all().and_then(|()| {
                // Chunks not verified since a crash must be verified by the next open.
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
        // The remote has everything, and the map is as after a crash: chunks are verified before use.
        tracing::warn!(%error, "the cache was not closed cleanly; everything that was written is at the remote site");
        if self.saver.is_dirty() {
            // It would be pushed again, perhaps over later writes of others.
            if let Err(error) = self.cache.forget() {
                tracing::warn!(%error, "the cache cannot be removed");
            }
        }
        Ok(())
    }

    pub(super) fn close_remote(&self) {
        let (sender, closed) = std::sync::mpsc::channel();
        self.remote.close(Box::new(move |_| {
            let _ = sender.send(());
        }));
        let _ = closed.recv_timeout(FAREWELL);
    }

    /// Fails if the device has stopped.
    pub(super) fn alive(&self) -> Result<(), DeviceError> {
        if self.is_closed() {
            return Err(DeviceError::Closed);
        }
        match &*self.failed.lock() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub(super) fn changeable(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.geometry.shape.size)?;
        self.alive()?;
        match self.read_only {
            true => Err(DeviceError::ReadOnly),
            false => Ok(()),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(*self.link.lock(), Link::Up(_))
    }

    pub(super) fn tell_local(&self, index: u64) {
        if let Some(hook) = &self.hooks.chunk_is_local {
            hook(index);
        }
    }

    /// Link changes before the remote knew our callback were not reported.
    pub(super) fn look_at_link(&self) {
        let known = self.link_known.lock();
        if !*known {
            self.note_link(self.remote.link());
        }
    }

    /// Records a change of the link.
    pub(super) fn note_link(&self, link: Link) {
        let up = matches!(link, Link::Up(_));
        if let Link::Gone(error) = &link {
            self.fail(error.clone());
        }
        // Before anything is pushed over the new link.
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

    /// Stops all operations that need the remote; the cached data could be stale.
    pub(super) fn fail(&self, error: DeviceError) {
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
        let mut known = self.link_known.lock();
        *known = true;
        self.note_link(link);
    }
}

impl Shared {
    pub(super) fn shape(&self) -> Shape {
        self.geometry.shape
    }
}
