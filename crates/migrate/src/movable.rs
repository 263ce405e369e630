//! A device that can move to another site while programs use it.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::FileDevice;
use drover_device::stage::{
    Dirty, Held, HoldHandle, Holding, LockGuard, LockHandle, Lockable, TrackHandle, Tracked,
};

/// Unit in which writes are recorded, in bytes: what file systems write at least.
const GRANULARITY: u32 = 4096;

/// How long requests are held back at most: until the other site has decided.
const HELD_AT_MOST: Duration = Duration::from_secs(24 * 3600);

/// How long requests in flight may take when the device is to be frozen.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// The handle of a device that can move. Costs nothing until it does.
pub struct Movable {
    below: Arc<dyn BlockDevice>,
    lock: LockHandle,
    track: TrackHandle,
    hold: HoldHandle<Arc<dyn BlockDevice>>,
    /// Of what is recorded: grows whenever it begins anew, or ends.
    series: AtomicU64,
}

/// A device as of one moment.
type State = Held<Arc<dyn BlockDevice>>;

/// What is recorded of a device without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Series(u64);

/// Makes a device movable: programs use the one that is returned from now on.
///
/// ```
/// use std::sync::Arc;
/// use drover_core::BlockDevice;
/// use drover_device::backend::MemoryDevice;
///
/// let disk = Arc::new(MemoryDevice::from_bytes(&[0; 1 << 20]));
/// let (device, movable) = drover_migrate::track(disk);
/// device.write(4096, b"what a program writes")?;
/// assert_eq!(movable.size(), 1 << 20);
/// # Ok::<(), drover_core::DeviceError>(())
/// ```
#[must_use]
pub fn track(device: Arc<dyn BlockDevice>) -> (Arc<dyn BlockDevice>, Movable) {
    let (holding, hold) = Holding::new(Arc::clone(&device));
    let (tracked, track) = Tracked::new(holding, GRANULARITY);
    track.stop();
    let (lockable, lock) = Lockable::new(tracked, HELD_AT_MOST);
    let movable = Movable {
        below: device,
        lock,
        track,
        hold,
        series: AtomicU64::new(0),
    };
    (Arc::new(lockable), movable)
}

impl Movable {
    /// Size of the device in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.below.size()
    }

    /// Closes the device for good, also while it is frozen: whoever waits for it gets an error.
    pub fn close(&self) {
        self.lock.close();
    }

    /// Whether it was closed: it has moved, or may have. What had been written before is durable.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lock.is_closed()
    }

    /// The device, also while it is frozen; for reading.
    pub(crate) fn below(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.below)
    }

    /// Holds the state of now, and records what is written from now on. What is overwritten goes to a file in `scratch`
    /// that has no name. Fails soon once it `is_given_up`.
    pub(crate) fn begin(
        &self,
        scratch: &Path,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<State, DeviceError> {
        self.end();
        let aside = nameless(scratch, self.size())?;
        let aside = FileDevice::new(aside, false)?;
        let locked = self.drained(is_given_up)?;
        self.below.flush()?;
        self.track.start(&locked);
        Ok(self.hold.hold(&locked, Arc::new(aside)))
    }

    /// Holds the state of now, and records on. What was written since the state before of the same series; none if that is
    /// over, and another one has begun.
    pub(crate) fn hold_again(
        &self,
        scratch: &Path,
        since: Option<Series>,
    ) -> Result<(State, Option<Dirty>, Series), DeviceError> {
        let aside = nameless(scratch, self.size())?;
        let aside = FileDevice::new(aside, false)?;
        self.hold.release();
        let locked = self.lock.lock_until(Instant::now() + DRAIN_LIMIT)?;
        self.below.flush()?;
        let now = Series(self.series.load(Ordering::Acquire));
        let (written, series) = match since == Some(now) {
            true => (Some(self.track.take()), now),
            false => {
                self.track.start(&locked);
                (None, self.next_series())
            }
        };
        Ok((self.hold.hold(&locked, Arc::new(aside)), written, series))
    }

    fn next_series(&self) -> Series {
        Series(self.series.fetch_add(1, Ordering::AcqRel) + 1)
    }

    fn is_now(&self, series: Series) -> bool {
        self.series.load(Ordering::Acquire) == series.0
    }

    /// Releases the state that is held, if it is of this series.
    pub(crate) fn release_of(&self, series: Series) {
        if self.is_now(series) {
            self.release();
        }
    }

    /// Ends a series, if it has not ended.
    pub(crate) fn end_of(&self, series: Series) {
        if self.is_now(series) {
            self.end();
        }
    }

    /// Releases the state that is held.
    pub(crate) fn release(&self) {
        self.hold.release();
    }

    /// What was written since this was asked last.
    pub(crate) fn written(&self) -> Dirty {
        self.track.take()
    }

    /// Ends what [`Movable::begin`] began.
    pub(crate) fn end(&self) {
        self.next_series();
        self.hold.release();
        self.track.stop();
    }

    /// Freezes the device: requests are held back, and what was written is durable. Fails soon once it `is_given_up`.
    pub(crate) fn freeze(&self, is_given_up: &dyn Fn() -> bool) -> Result<Frozen, DeviceError> {
        let guard = self.drained(is_given_up)?;
        self.below.flush()?;
        Ok(Frozen(Some(guard)))
    }

    /// Holds requests back, and waits for those in flight.
    fn drained(&self, is_given_up: &dyn Fn() -> bool) -> Result<LockGuard, DeviceError> {
        self.lock
            .lock_unless(Instant::now() + DRAIN_LIMIT, is_given_up)
    }
}

/// A frozen device. Unless it is thawed, it is closed for good when this is dropped: another site may have it.
pub(crate) struct Frozen(Option<LockGuard>);

impl Frozen {
    /// Lets the requests through that were held back.
    pub(crate) fn thaw(mut self) {
        self.0 = None;
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            guard.close();
        }
    }
}

/// A file without a name, that is gone with its last user.
fn nameless(directory: &Path, size: u64) -> io::Result<File> {
    std::fs::create_dir_all(directory)?;
    let path = directory.join(format!(
        ".move-{}",
        u128::from_le_bytes(drover_net::random_id())
    ));
    let file = drover_storage::create_private(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(size)?;
    Ok(file)
}
