//! State that the pusher shares with flushes and writers.

use std::time::{Duration, Instant};

use drover_core::DeviceError;
use parking_lot::{Condvar, Mutex};

use crate::remote::Epoch;

/// Delay after a refused push before the next automatic attempt.
const AFTER_REFUSAL: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Idle,
    Freezing,
    /// An epoch is frozen: waiting for the pusher, or being sent.
    Frozen,
}

pub(super) struct Turns {
    pub(super) phase: Phase,
    /// Tickets: a caller that wants all earlier writes pushed takes one; an epoch covers those taken before its freeze.
    pub(super) wanted: u64,
    pub(super) covered: u64,
    pub(super) done: u64,
    pub(super) refused: Option<(u64, DeviceError)>,
    /// Error of a push that nobody waited for; the next flush reports it.
    pub(super) unreported: Option<DeviceError>,
    pub(super) last_freeze: Instant,
    pub(super) not_before: Option<Instant>,
    /// A request needs room in the cache.
    pub(super) requested: bool,
    /// The last epoch that was begun.
    pub(super) last: Epoch,
    /// The current epoch, assigned just before its first part is sent.
    pub(super) epoch: Option<Epoch>,
    /// The table's generation at the freeze.
    pub(super) generation: u64,
    /// The link on which the remote last reported what it has staged.
    pub(super) asked_on: u64,
    /// Failed pushes since the last success, and the last error.
    pub(super) failures: u64,
    pub(super) why: Option<DeviceError>,
}

/// Coordination of the pusher, flushes and writers.
pub struct Push {
    pub(super) state: Mutex<Turns>,
    pub(super) changed: Condvar,
}

impl Push {
    pub fn new() -> Self {
        Self {
            state: Mutex::new(Turns {
                phase: Phase::Idle,
                wanted: 0,
                covered: 0,
                done: 0,
                refused: None,
                unreported: None,
                last_freeze: Instant::now(),
                not_before: None,
                requested: false,
                last: Epoch(0),
                epoch: None,
                generation: 0,
                asked_on: 0,
                failures: 0,
                why: None,
            }),
            changed: Condvar::new(),
        }
    }

    pub fn wake(&self) {
        let _state = self.state.lock();
        self.changed.notify_all();
    }

    /// Requests an immediate push.
    pub fn request(&self) {
        self.state.lock().requested = true;
        self.changed.notify_all();
    }

    pub fn wait_a_while(&self, time: Duration) {
        let mut state = self.state.lock();
        self.changed.wait_for(&mut state, time);
    }

    /// Failed pushes since the last success, and the last error.
    pub fn failures(&self) -> (u64, Option<DeviceError>) {
        let state = self.state.lock();
        (state.failures, state.why.clone())
    }

    /// Why the last push was refused, if none has succeeded since.
    pub fn trouble(&self) -> Option<DeviceError> {
        self.state.lock().refused.clone().map(|r| r.1)
    }
}

impl Turns {
    pub(super) fn failed(&mut self, error: &DeviceError) {
        self.failures += 1;
        self.why = Some(error.clone());
    }

    /// Fails the tickets up to this one.
    pub(super) fn refuse(&mut self, upto: u64, error: DeviceError) {
        self.refused = Some((upto, error.clone()));
        self.unreported = Some(error);
        self.not_before = Some(Instant::now() + AFTER_REFUSAL);
    }
}
