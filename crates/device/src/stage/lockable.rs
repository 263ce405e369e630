//! A stage that can be locked: requests wait while it is, and those in flight are drained first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError};
use parking_lot::{Condvar, Mutex};

use super::MAX_TIMEOUT;
use super::gated::{Entry, Gate, Gated, Operation, Request};

/// A device that can be locked: then no request is under way and none begins until it is unlocked.
pub type Lockable<D> = Gated<D, Latch>;

impl<D: BlockDevice> Lockable<D> {
    /// An unlocked device, and the handle that locks it. A request that is held back fails as
    /// [`DeviceError::Unavailable`] after `timeout`, of at most a day; [`LockHandle::lock`] has the same.
    pub fn new(inner: D, timeout: Duration) -> (Self, LockHandle) {
        let shared = Arc::new(Shared {
            timeout: timeout.min(MAX_TIMEOUT),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let handle = LockHandle {
            shared: Arc::clone(&shared),
        };
        (Self::with_gate(inner, Latch { shared }), handle)
    }
}

/// The gate of [`Lockable`].
#[derive(Debug)]
pub struct Latch {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    timeout: Duration,
    state: Mutex<State>,
    /// Told when somebody may go on: at an unlock, a close, and when a locked device has drained.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Requests that are under way.
    in_flight: usize,
    /// Requests that are held back.
    held: usize,
    /// Somebody holds the lock, or waits for what is in flight to get it.
    locked: bool,
    closed: bool,
}

/// Locks and closes a [`Lockable`].
#[derive(Clone, Debug)]
pub struct LockHandle {
    shared: Arc<Shared>,
}

/// Keeps a device locked until dropped.
#[derive(Debug)]
#[must_use = "the device is unlocked when this is dropped"]
pub struct LockGuard {
    shared: Arc<Shared>,
}

impl LockHandle {
    /// Locks the device: holds new requests back, and returns when all that were under way are answered. Waits for at
    /// most the timeout that the device was made with. Does not flush.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when that takes too long, or somebody else holds the lock for so long; the device
    /// is then as if this had not been called. [`DeviceError::Closed`].
    pub fn lock(&self) -> Result<LockGuard, DeviceError> {
        self.lock_until(Instant::now() + self.shared.timeout)
    }

    /// As [`LockHandle::lock`], until `deadline`.
    ///
    /// # Errors
    /// As [`LockHandle::lock`].
    pub fn lock_until(&self, deadline: Instant) -> Result<LockGuard, DeviceError> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        while state.locked && !state.closed {
            if shared.changed.wait_until(&mut state, deadline).timed_out() && state.locked {
                return Err(DeviceError::Unavailable(
                    "another holder has kept the device locked for too long".into(),
                ));
            }
        }
        if state.closed {
            return Err(DeviceError::Closed);
        }
        state.locked = true;
        // From here on, whatever way this ends, the guard unlocks; it must not hold the state then.
        let guard = LockGuard {
            shared: Arc::clone(shared),
        };
        while state.in_flight > 0 {
            let late = shared.changed.wait_until(&mut state, deadline).timed_out();
            if late && state.in_flight > 0 {
                let count = state.in_flight;
                drop(state);
                drop(guard);
                return Err(DeviceError::Unavailable(format!(
                    "{count} requests are still in flight"
                )));
            }
        }
        if state.closed {
            drop(state);
            drop(guard);
            return Err(DeviceError::Closed);
        }
        drop(state);
        Ok(guard)
    }

    /// Closes the device for good: new requests and those that are held back fail as [`DeviceError::Closed`]. Does not
    /// wait for what is under way; [`LockGuard::close`] has nothing under way.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Whether the device was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.state.lock().closed
    }

    /// Requests that are under way, and requests that are held back.
    #[must_use]
    pub fn requests(&self) -> (usize, usize) {
        let state = self.shared.state.lock();
        (state.in_flight, state.held)
    }
}

impl LockGuard {
    /// Closes the locked device for good: no request gets in between.
    pub fn close(self) {
        self.shared.close();
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        self.shared.state.lock().locked = false;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

/// One request under way.
#[derive(Debug)]
pub struct UnderWay<'a>(&'a Shared);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_flight -= 1;
        if state.in_flight == 0 && state.locked {
            self.0.changed.notify_all();
        }
    }
}

impl Gate for Latch {
    type Pass<'a> = UnderWay<'a>;

    fn enter(&self, request: &Request) -> Result<Entry<UnderWay<'_>>, DeviceError> {
        let shared = self.shared.as_ref();
        let mut state = shared.state.lock();
        if state.locked && !state.closed {
            if request.operation == Operation::Prefetch {
                // Nobody waits for advice.
                return Ok(Entry::Ignore);
            }
            let deadline = Instant::now() + shared.timeout;
            state.held += 1;
            let mut late = false;
            while state.locked && !state.closed && !late {
                late = shared.changed.wait_until(&mut state, deadline).timed_out();
            }
            state.held -= 1;
            if state.locked && !state.closed {
                return Err(DeviceError::Unavailable(format!(
                    "the device has been locked for {:?}",
                    shared.timeout
                )));
            }
        }
        if state.closed {
            return Err(DeviceError::Closed);
        }
        state.in_flight += 1;
        Ok(Entry::Pass(UnderWay(shared)))
    }

    fn leave(&self, pass: UnderWay<'_>) -> Result<(), DeviceError> {
        drop(pass);
        Ok(())
    }

    fn cost(&self, inner: Cost) -> Cost {
        match self.shared.state.lock().locked {
            true => Cost::Network,
            false => inner,
        }
    }
}

#[cfg(test)]
mod tests;
