//! Handles that control a managed device: pulling, pushing, progress.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_core::DeviceError;

use super::options::Sync;
use super::order::Order;
use super::shared::Shared;
use crate::remote::{Chunks, Epoch, Link, Traffic};

/// Progress and status of a managed device.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Chunks in all.
    pub chunks: u64,
    /// Chunks that need no fetch: those here, and those known to be zero.
    pub local: u64,
    /// Bytes of chunks that take room in the cache.
    pub stored_bytes: u64,
    /// Bytes that were written and are not at the far side.
    pub dirty_bytes: u64,
    /// What moves.
    pub traffic: Traffic,
    /// Until all chunks are local, at the present rate; none while nothing moves or when nothing is pulled.
    pub seconds_left: Option<f64>,
    /// Whether the far side can be reached.
    pub link: Link,
    /// The last epoch that counts at the far side.
    pub epoch: Epoch,
    /// Where a flush puts things.
    pub sync: Sync,
    /// What is being pushed.
    pub pushing: Pushing,
    /// Why dirty bytes do not get to the far side, if it refuses them, why the device stands still, or that what came last
    /// did not fit on the cache's disk.
    pub trouble: Option<DeviceError>,
}

/// Progress of the epoch that is being pushed.
#[derive(Clone, Debug, Default)]
pub struct Pushing {
    /// Its bytes; 0 when there is none.
    pub bytes: u64,
    /// Those of them that the far side has staged: they are not sent again.
    pub staged: u64,
    /// How often pushes failed since one succeeded.
    pub failures: u64,
    /// Why the last of them did.
    pub why: Option<DeviceError>,
}

impl Shared {
    fn pushing(&self) -> Pushing {
        // One after the other: the pusher takes the table's lock inside its own.
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
        // Let go of before the pusher's lock is taken, inside which the pusher takes this one.
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

/// Steers what is pulled in the background.
#[derive(Clone)]
pub struct PullHandle {
    shared: Arc<Shared>,
}

impl PullHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Pulls nothing but what is asked for, until [`PullHandle::resume`]. What is under way still comes.
    pub fn pause(&self) {
        self.shared.set_paused(true);
    }

    /// Goes on after [`PullHandle::pause`].
    pub fn resume(&self) {
        self.shared.set_paused(false);
    }

    /// Pulls in another order from now on.
    pub fn set_order(&self, order: &Order) {
        self.shared.set_order(order);
    }

    /// Waits until every chunk is local, for at most `time`; false when some are not.
    ///
    /// # Errors
    /// When the device closes or stands still.
    pub fn wait(&self, time: Duration) -> Result<bool, DeviceError> {
        self.shared.wait_local(time)
    }

    /// In which order chunks were first read, if that is recorded.
    #[must_use]
    pub fn recorded(&self) -> Option<Vec<Chunks>> {
        self.shared
            .recorder
            .as_ref()
            .map(super::order::Recorder::runs)
    }

    /// The same as a file for [`Order::parse`].
    #[must_use]
    pub fn recorded_text(&self) -> Option<String> {
        let runs = self.recorded()?;
        Some(Order::format(&runs, self.shared.shape()))
    }
}

/// Steers what is pushed.
#[derive(Clone)]
pub struct PushHandle {
    shared: Arc<Shared>,
}

impl PushHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Pushes all that was written before the call, and waits until the far side has it, durably.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when it is not there in time; nothing is lost then. What the far side refuses.
    pub fn sync(&self) -> Result<(), DeviceError> {
        self.shared.alive()?;
        self.shared.push_all()
    }

    /// Bytes that are not at the far side.
    #[must_use]
    pub fn pending(&self) -> u64 {
        self.shared.unpushed_bytes()
    }
}
