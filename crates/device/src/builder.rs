//! The builder: every disk that the program opens is put together here, so stages are ordered in one place.

use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;

use crate::stage::{Chunked, LockHandle, Lockable, TrackHandle, Tracked};
use crate::synced::{PullHandle, PushHandle, Synced, SyncedError, SyncedOptions};

/// Why a stack could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A chunk size or a granularity is not a power of two.
    #[error("a {1} of {0} bytes: it must be a power of two")]
    NoPowerOfTwo(u32, &'static str),
    /// The device below demands more than chunks would give it.
    #[error("a chunk of {chunk} bytes is smaller than the alignment of the device, {alignment}")]
    ChunkTooSmall {
        /// Bytes of a chunk, as it was asked for.
        chunk: u32,
        /// Bytes that the device's offsets and lengths must be multiples of.
        alignment: u32,
    },
    /// The managed device cannot be opened.
    #[error(transparent)]
    Managed(#[from] SyncedError),
}

enum Bottom {
    Backend(Arc<dyn BlockDevice>),
    Managed(Box<SyncedOptions>),
}

/// Options of a stack, given in any order. [`Stack::build`] stacks the stages, from the front end down, as lockable,
/// tracked, chunked, and the device below them:
///
/// - A lock holds back requests of the front end and drains everything below.
/// - Tracked are the ranges that the front end changed, not whole chunks rewritten for them.
/// - Any offset and length becomes whole chunks before a stage below demands that.
///
/// ```
/// use drover_device::backend::MemoryDevice;
/// use drover_device::builder::Stack;
///
/// let built = Stack::over(MemoryDevice::new(1 << 20))
///     .tracked(4096)
///     .chunked(64 << 10)
///     .build()?;
/// built.device.write(100, b"some bytes").expect("memory does not fail");
/// let track = built.track.expect("it was asked for");
/// assert_eq!(track.take().bytes(), 4096);
/// # Ok::<(), drover_device::builder::BuildError>(())
/// ```
pub struct Stack {
    bottom: Bottom,
    lockable: Option<Duration>,
    tracked: Option<u32>,
    chunked: Option<u32>,
}

/// A stack and the handles of its stages, each if it was asked for.
pub struct Built {
    /// The top.
    pub device: Arc<dyn BlockDevice>,
    /// Of [`Stack::lockable`].
    pub lock: Option<LockHandle>,
    /// Of [`Stack::tracked`].
    pub track: Option<TrackHandle>,
    /// Of [`Stack::managed`].
    pub managed: Option<Managed>,
}

/// The handles of a managed device.
pub struct Managed {
    /// The device itself, for its progress and to close it: dropping a stack stops it like a process that was killed.
    pub synced: Arc<Synced>,
    /// Controls pulling.
    pub pull: PullHandle,
    /// Controls pushing.
    pub push: PushHandle,
}

impl Stack {
    /// A stack over a backend, or over any other device.
    #[must_use]
    pub fn over(backend: impl BlockDevice + 'static) -> Self {
        Self::on(Bottom::Backend(Arc::new(backend)))
    }

    /// A stack over a managed device, whose far side and cache `options` name. Opened, and beginning to pull, when the
    /// stack is built. It takes any range without fetching chunks for it, so [`Stack::chunked`] adds nothing to it.
    #[must_use]
    pub fn managed(options: SyncedOptions) -> Self {
        Self::on(Bottom::Managed(Box::new(options)))
    }

    fn on(bottom: Bottom) -> Self {
        Self {
            bottom,
            lockable: None,
            tracked: None,
            chunked: None,
        }
    }

    /// Can be locked; see [`Lockable::new`].
    #[must_use]
    pub fn lockable(mut self, timeout: Duration) -> Self {
        self.lockable = Some(timeout);
        self
    }

    /// Knows what was changed; see [`Tracked::new`].
    #[must_use]
    pub fn tracked(mut self, granularity: u32) -> Self {
        self.tracked = Some(granularity);
        self
    }

    /// Takes any offset and length; see [`Chunked::new`].
    #[must_use]
    pub fn chunked(mut self, chunk: u32) -> Self {
        self.chunked = Some(chunk);
        self
    }

    /// Stacks what was asked for.
    ///
    /// # Errors
    /// [`BuildError`], before anything is opened or begun, unless it is [`BuildError::Managed`].
    pub fn build(self) -> Result<Built, BuildError> {
        self.check()?;
        let (mut device, managed): (Arc<dyn BlockDevice>, _) = match self.bottom {
            Bottom::Backend(device) => (device, None),
            Bottom::Managed(options) => {
                let synced = Synced::open(*options)?;
                let managed = Managed {
                    pull: synced.puller(),
                    push: synced.pusher(),
                    synced: Arc::clone(&synced),
                };
                (synced, Some(managed))
            }
        };
        if let Some(chunk) = self.chunked.filter(|_| managed.is_none()) {
            device = Arc::new(Chunked::new(device, chunk));
        }
        let track = self.tracked.map(|granularity| {
            let (stage, handle) = Tracked::new(Arc::clone(&device), granularity);
            device = Arc::new(stage);
            handle
        });
        let lock = self.lockable.map(|timeout| {
            let (stage, handle) = Lockable::new(Arc::clone(&device), timeout);
            device = Arc::new(stage);
            handle
        });
        Ok(Built {
            device,
            lock,
            track,
            managed,
        })
    }

    fn check(&self) -> Result<(), BuildError> {
        for (value, what) in [(self.tracked, "granularity"), (self.chunked, "chunk size")] {
            if let Some(value) = value
                && !value.is_power_of_two()
            {
                return Err(BuildError::NoPowerOfTwo(value, what));
            }
        }
        if let (Bottom::Backend(device), Some(chunk)) = (&self.bottom, self.chunked) {
            let alignment = device.capabilities().alignment;
            if alignment > chunk {
                return Err(BuildError::ChunkTooSmall { chunk, alignment });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
