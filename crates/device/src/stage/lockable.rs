//! A stage that can be locked: in-flight requests are drained, and new ones wait until the unlock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::MAX_TIMEOUT;
use super::gated::{Entry, Gate, Gated, Operation, Request};

/// How often it is asked whether a lock is still wanted.
const GIVE_UP_POLL: Duration = Duration::from_millis(20);

/// A device that can be locked: while locked, no request is in flight and none starts.
pub type Lockable<D> = Gated<D, Latch>;

impl<D: BlockDevice> Lockable<D> {
    /// Returns an unlocked device and the handle that locks it. A request held back longer than `timeout` (at most a
    /// day) fails with [`DeviceError::Unavailable`]; [`LockHandle::lock`] has the same timeout.
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
    state: Mutex<LockState>,
    /// Notified at an unlock, a close, and when a locked device has drained.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LockState {
    /// Requests in flight.
    in_flight: usize,
    /// Requests held back.
    held: usize,
    /// The lock is held, or its owner is waiting for requests in flight.
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
    /// Locks the device: holds new requests back, and returns when all requests in flight have completed. Waits at most
    /// the timeout given at creation. Does not flush.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] on timeout, also while another owner holds the lock; the device is then unlocked by
    /// this call. [`DeviceError::Closed`].
    pub fn lock(&self) -> Result<LockGuard, DeviceError> {
        self.lock_until(Instant::now() + self.shared.timeout)
    }

    /// As [`LockHandle::lock`], with an explicit `deadline`.
    ///
    /// # Errors
    /// As [`LockHandle::lock`].
    pub fn lock_until(&self, deadline: Instant) -> Result<LockGuard, DeviceError> {
        self.lock_unless(deadline, &|| false)
    }

    /// As [`LockHandle::lock_until`], unless it `is_given_up`, which is asked now and then.
    ///
    /// # Errors
    /// As [`LockHandle::lock`]; [`DeviceError::Unavailable`] also when it was given up.
    pub fn lock_unless(
        &self,
        deadline: Instant,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<LockGuard, DeviceError> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let wait = |state: &mut MutexGuard<'_, LockState>| {
            let until = deadline.min(Instant::now() + GIVE_UP_POLL);
            shared.changed.wait_until(state, until);
            match is_given_up() {
                true => Some("it was given up"),
                false => (Instant::now() >= deadline).then_some("it takes too long"),
            }
        };
        while state.locked && !state.closed {
            if let Some(why) = wait(&mut state)
                && state.locked
            {
                let text = format!("another holder keeps the device locked: {why}");
                return Err(DeviceError::Unavailable(text));
            }
        }
        if state.closed {
            return Err(DeviceError::Closed);
        }
        state.locked = true;
        // From here on the guard unlocks on every path; the state must not be locked when it drops.
        let guard = LockGuard {
            shared: Arc::clone(shared),
        };
        while state.in_flight > 0 {
            if let Some(why) = wait(&mut state)
                && state.in_flight > 0
            {
                let count = state.in_flight;
                drop(state);
                drop(guard);
                return Err(DeviceError::Unavailable(format!(
                    "{count} requests are still in flight: {why}"
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

    /// Closes the device permanently: new and held-back requests fail with [`DeviceError::Closed`]. Does not wait for
    /// requests in flight; with [`LockGuard::close`] there are none.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Whether the device was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.state.lock().closed
    }

    /// Numbers of requests in flight and held back.
    #[must_use]
    pub fn requests(&self) -> (usize, usize) {
        let state = self.shared.state.lock();
        (state.in_flight, state.held)
    }
}

impl LockGuard {
    /// Closes the locked device permanently: no request gets in between.
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

/// One request in flight.
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
                // A hint is dropped rather than delayed.
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
