//! The state that all threads of a managed device share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use drover_core::{DeviceError, check_range};
use parking_lot::{Condvar, Mutex, RwLock};

use super::cache::Cache;
use super::copy_before_write::CopyBeforeWrite;
use super::options::{Hooks, Sync};
use super::order;
use super::pull::Pull;
use super::push::Push;
use super::save::Saver;
use super::state::{Geometry, States};
use super::table::Table;
use super::wait::Waits;
use crate::remote::{Chunks, Link, Local, Remote, Shape};

/// What all threads of a device share.
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
    /// Whether the far side has told of its link. Held while the link is looked at or noted, so that what was seen before
    /// is not noted after what was told since; with no other lock held.
    pub(super) link_told: Mutex<bool>,
    pub(super) sync: Sync,
    /// Chunks.
    pub(super) cache_limit: Option<u64>,
    pub(super) push_interval: Duration,
    pub(super) high_water: u64,
    pub(super) give_up_after: Duration,
    pub(super) hooks: Hooks,
    pub(super) recorder: Option<order::Recorder>,
    pub(super) unverified: AtomicU64,
    pub(super) closed: AtomicBool,
    /// Why the device does nothing any more.
    pub(super) failed: Mutex<Option<DeviceError>>,
    pub(super) hand: AtomicU64,
    /// What came last did not fit on the cache's disk.
    pub(super) no_room: AtomicBool,
}

/// How long a close waits for the far side to be told.
const FAREWELL: Duration = Duration::from_secs(10);

/// How often a close on a full disk tries to write the map down, with more room each time.
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

    /// The last thing before the cache is let go of.
    pub(super) fn write_all_down(&self) -> Result<(), DeviceError> {
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
        tracing::warn!(%error, "the cache was not closed cleanly; everything that was written is at the remote side");
        if self.saver.is_dirty() {
            // It would be pushed again, perhaps over what others wrote since.
            if let Err(error) = self.cache.forget() {
                tracing::warn!(%error, "the cache cannot be removed");
            }
        }
        Ok(())
    }

    pub(super) fn close_remote(&self) {
        let (tell, told) = std::sync::mpsc::channel();
        self.remote.close(Box::new(move |_| {
            let _ = tell.send(());
        }));
        let _ = told.recv_timeout(FAREWELL);
    }

    /// The device can go on.
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

    /// What changed before the far side knew whom to tell was not told.
    pub(super) fn look_at_link(&self) {
        let told = self.link_told.lock();
        if !*told {
            self.note_link(self.remote.link());
        }
    }

    /// The link has changed.
    pub(super) fn note_link(&self, link: Link) {
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
        let mut told = self.link_told.lock();
        *told = true;
        self.note_link(link);
    }
}

impl Shared {
    pub(super) fn shape(&self) -> Shape {
        self.geometry.shape
    }
}
