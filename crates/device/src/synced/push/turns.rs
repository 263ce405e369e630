//! State that the pusher shares with flushes and writers.

use std::time::{Duration, Instant};

use drover_core::DeviceError;
use parking_lot::{Condvar, Mutex};

use crate::remote::Epoch;

/// How long after a refused push the next one is tried without anybody asking.
const AFTER_REFUSAL: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Idle,
    Freezing,
    /// An epoch waits for the pusher, or is on its way.
    Frozen,
}

pub(super) struct Turns {
    pub(super) phase: Phase,
    /// Tickets: who wants all that was written before pushed takes one; an epoch covers those taken before its freeze.
    pub(super) wanted: u64,
    pub(super) covered: u64,
    pub(super) done: u64,
    pub(super) refused: Option<(u64, DeviceError)>,
    /// Of a push that nobody waited for: the next flush reports it.
    pub(super) unreported: Option<DeviceError>,
    pub(super) last_freeze: Instant,
    pub(super) not_before: Option<Instant>,
    /// Somebody needs room.
    pub(super) requested: bool,
    /// The number of the last epoch that was begun.
    pub(super) last: Epoch,
    /// The number of the epoch under way, once its first part was about to be sent.
    pub(super) epoch: Option<Epoch>,
    /// That of the table when it was frozen.
    pub(super) generation: u64,
    /// The link on which the far side said last what it has staged.
    pub(super) asked_on: u64,
    /// How often pushes failed since one succeeded, and why the last did.
    pub(super) failures: u64,
    pub(super) why: Option<DeviceError>,
}

/// What the pusher, flushes and writers tell each other.
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

    /// Asks for a push at once.
    pub fn request(&self) {
        self.state.lock().requested = true;
        self.changed.notify_all();
    }

    pub fn wait_a_while(&self, time: Duration) {
        let mut state = self.state.lock();
        self.changed.wait_for(&mut state, time);
    }

    /// How often pushes failed since one succeeded, and why the last did.
    pub fn failures(&self) -> (u64, Option<DeviceError>) {
        let state = self.state.lock();
        (state.failures, state.why.clone())
    }

    /// Why the last push was refused, if it was and none has succeeded since.
    pub fn trouble(&self) -> Option<DeviceError> {
        self.state.lock().refused.clone().map(|r| r.1)
    }
}

impl Turns {
    pub(super) fn failed(&mut self, error: &DeviceError) {
        self.failures += 1;
        self.why = Some(error.clone());
    }

    /// Those who took a ticket up to this one are told.
    pub(super) fn refuse(&mut self, upto: u64, error: DeviceError) {
        self.refused = Some((upto, error.clone()));
        self.unreported = Some(error);
        self.not_before = Some(Instant::now() + AFTER_REFUSAL);
    }
}
