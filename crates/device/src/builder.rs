//! The builder: every disk that the program opens is assembled here, so that the order of stages is defined in one
//! place.

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
    /// The device below requires a larger alignment than the chunk size.
    #[error("a chunk of {chunk} bytes is smaller than the alignment of the device, {alignment}")]
    ChunkTooSmall {
        /// The requested chunk size in bytes.
        chunk: u32,
        /// Alignment in bytes required by the device.
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

/// Options of a stack, set in any order. [`Stack::build`] stacks the stages, from the front end down: lockable,
/// tracked, chunked, and the device below them:
///
/// - A lock holds back requests of the front end and drains everything below.
/// - Tracking sees the ranges that the front end changed, not the whole chunks rewritten for them.
/// - Arbitrary ranges become whole chunks above the stages that need them.
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

/// A stack and the handles of the stages that were requested.
pub struct Built {
    /// The top of the stack.
    pub device: Arc<dyn BlockDevice>,
    /// Handle of [`Stack::lockable`].
    pub lock: Option<LockHandle>,
    /// Handle of [`Stack::tracked`].
    pub track: Option<TrackHandle>,
    /// Handles of [`Stack::managed`].
    pub managed: Option<Managed>,
}

/// The handles of a managed device.
pub struct Managed {
    /// The device itself, for its progress and to close it: dropping the stack without a close is like killing the
    /// process.
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

    /// A stack over a managed device, with the remote and cache named in `options`. It is opened, and starts pulling,
    /// when the stack is built. It accepts any range without fetching chunks for it, so [`Stack::chunked`] adds nothing
    /// to it.
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

    /// Adds locking; see [`Lockable::new`].
    #[must_use]
    pub fn lockable(mut self, timeout: Duration) -> Self {
        self.lockable = Some(timeout);
        self
    }

    /// Adds change tracking; see [`Tracked::new`].
    #[must_use]
    pub fn tracked(mut self, granularity: u32) -> Self {
        self.tracked = Some(granularity);
        self
    }

    /// Accepts any offset and length; see [`Chunked::new`].
    #[must_use]
    pub fn chunked(mut self, chunk: u32) -> Self {
        self.chunked = Some(chunk);
        self
    }

    /// Builds the stack.
    ///
    /// # Errors
    /// [`BuildError`]; except for [`BuildError::Managed`], before anything is opened or started.
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
