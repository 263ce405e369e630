//! Control handles of a managed device: pulling, pushing, progress.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use drover_core::DeviceError;

use super::options::Sync;
use super::order::Order;
use super::shared::Shared;
use crate::remote::{Epoch, Link, Traffic};

/// Progress and status of a managed device.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Total number of chunks.
    pub chunks: u64,
    /// Chunks that need no fetch: those in the cache and those known to be zero.
    pub local: u64,
    /// Bytes of chunks that occupy space in the cache.
    pub stored_bytes: u64,
    /// Bytes written locally and not yet committed at the remote.
    pub dirty_bytes: u64,
    /// Transfer rates and totals of the remote.
    pub traffic: Traffic,
    /// Estimated time until all chunks are local, at the current rate; none while nothing is transferred or pulled.
    pub seconds_left: Option<f64>,
    /// Whether the remote is reachable.
    pub link: Link,
    /// The last epoch committed at the remote.
    pub epoch: Epoch,
    /// Where a flush makes data durable.
    pub sync: Sync,
    /// The epoch being pushed.
    pub pushing: Pushing,
    /// Why dirty bytes do not reach the remote (a refusal), why the device has stopped, or that the last arrivals did
    /// not fit on the cache's disk.
    pub trouble: Option<DeviceError>,
}

/// Progress of the epoch that is being pushed.
#[derive(Clone, Debug, Default)]
pub struct Pushing {
    /// Size of the epoch in bytes; 0 when there is none.
    pub bytes: u64,
    /// Bytes of it that the remote has staged already; they are not sent again.
    pub staged: u64,
    /// Failed pushes since the last success.
    pub failures: u64,
    /// Error of the last failed push.
    pub why: Option<DeviceError>,
}

impl Shared {
    fn pushing(&self) -> Pushing {
        // Not nested: the pusher takes the table's lock inside its own.
        let (failures, why) = self.push.failures();
        let table = self.table.lock();
        Pushing {
            bytes: table.frozen_bytes,
            staged: table.there_bytes,
            failures,
            why,
        }
    }

    fn trouble(&self) -> Option<DeviceError> {
        let failed = self.failed.lock().clone();
        let no_room = || {
            let what =
                "the cache's disk is full: what does not fit is fetched each time it is read";
            let now = self.no_room.load(Relaxed);
            now.then(|| DeviceError::NoSpace(what.into()))
        };
        failed.or_else(|| self.push.trouble()).or_else(no_room)
    }

    pub(super) fn progress(&self) -> Progress {
        // Released before the pusher's lock is taken: the pusher takes this one inside its own.
        let link = self.link.lock().clone();
        let (chunks, local) = (self.states.count(), self.states.local());
        let traffic = self.remote.traffic();
        let left = (chunks - local.min(chunks)) * self.geometry.chunk();
        let moving = traffic.rate > 0.0;
        Progress {
            chunks,
            local,
            stored_bytes: self.states.stored() * self.geometry.chunk(),
            dirty_bytes: self.unpushed_bytes(),
            seconds_left: match left {
                0 => Some(0.0),
                _ => moving.then(|| left as f64 / traffic.rate),
            },
            traffic,
            link,
            epoch: self.epoch(),
            sync: self.sync,
            pushing: self.pushing(),
            trouble: self.trouble(),
        }
    }
}

/// Controls background pulling.
#[derive(Clone)]
pub struct PullHandle {
    shared: Arc<Shared>,
}

impl PullHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Stops background pulling until [`PullHandle::resume`]. Fetches in flight still complete; demand fetches
    /// continue.
    pub fn pause(&self) {
        self.shared.set_paused(true);
    }

    /// Resumes after [`PullHandle::pause`].
    pub fn resume(&self) {
        self.shared.set_paused(false);
    }

    /// Changes the pull order.
    pub fn set_order(&self, order: &Order) {
        self.shared.set_order(order);
    }

    /// Waits up to `time` until every chunk is local; returns false if some are not.
    ///
    /// # Errors
    /// When the device closes or has failed.
    pub fn wait(&self, time: Duration) -> Result<bool, DeviceError> {
        self.shared.wait_local(time)
    }
}

/// Controls pushing.
#[derive(Clone)]
pub struct PushHandle {
    shared: Arc<Shared>,
}

impl PushHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Pushes everything written before the call and waits until it is durable at the remote.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] on timeout; nothing is lost then. Otherwise the remote's refusal.
    pub fn sync(&self) -> Result<(), DeviceError> {
        self.shared.alive()?;
        self.shared.push_all()
    }

    /// Bytes not yet committed at the remote.
    #[must_use]
    pub fn pending(&self) -> u64 {
        self.shared.unpushed_bytes()
    }
    /// Refuses writes, and waits for those under way: what is pending afterwards becomes no more.
    pub fn hold_writes(&self) -> NoWrites {
        self.shared.writes_refused.store(true, Release);
        drop(self.shared.barrier.write());
        NoWrites {
            shared: Arc::clone(&self.shared),
            is_for_good: false,
        }
    }
}

/// A managed device refuses writes until this is dropped.
#[must_use = "the device can be written again when this is dropped"]
pub struct NoWrites {
    shared: Arc<Shared>,
    is_for_good: bool,
}

impl NoWrites {
    /// It is never written again.
    pub fn for_good(mut self) {
        self.is_for_good = true;
    }
}

impl Drop for NoWrites {
    fn drop(&mut self) {
        self.shared.writes_refused.store(self.is_for_good, Release);
    }
}

impl Shared {
    /// Fails while writes are refused.
    pub(super) fn may_write(&self) -> Result<(), DeviceError> {
        match self.writes_refused.load(Acquire) {
            true => Err(DeviceError::Unavailable(
                "its write lease is being handed over".into(),
            )),
            false => Ok(()),
        }
    }
}
