//! The work table: the images of a flock that several nodes of a site send, and the rules by which nodes take them. No database,
//! no clock.

use std::time::Duration;

/// Upper bound on jobs that wait, or are under way, at a site.
pub const MAX_JOBS: usize = 64;

/// Upper bound on the units of a job.
pub const MAX_UNITS: usize = 256;

/// Upper bound on the bytes that are kept of a job and of each of its units.
pub const MAX_ORDER_BYTES: usize = 1 << 20;

/// Upper bound on the bytes that a node tells of a unit.
pub const MAX_SAID_BYTES: usize = 16 << 10;

/// How long a job goes on after the process that waits for it has last asked.
pub const JOB_TERM: Duration = Duration::from_secs(60);

/// How a unit of work stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitState {
    /// Any node may take it.
    Waiting,
    /// A node has it.
    Taken,
    /// It was done.
    Done,
    /// It cannot be done.
    Failed,
}

impl UnitState {
    const ALL: [UnitState; 4] = [
        UnitState::Waiting,
        UnitState::Taken,
        UnitState::Done,
        UnitState::Failed,
    ];

    /// As it is stored.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            UnitState::Waiting => "waiting",
            UnitState::Taken => "taken",
            UnitState::Done => "done",
            UnitState::Failed => "failed",
        }
    }

    /// Reads [`UnitState::as_str`].
    #[must_use]
    pub fn of(text: &str) -> Option<UnitState> {
        let mut all = UnitState::ALL.into_iter();
        all.find(|state| state.as_str() == text)
    }

    /// Whether nothing more happens to it.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, UnitState::Done | UnitState::Failed)
    }
}

/// A unit of work, as far as the rules need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// The job that it belongs to.
    pub job: String,
    /// Its place in the job.
    pub nth: i64,
    /// How it stands.
    pub state: UnitState,
    /// The token of the node that has taken it, or had.
    pub token: String,
}

impl Unit {
    /// Whether the node with this token may take it, which does the units `doing`, if the node that has it `is_in`.
    #[must_use]
    pub fn is_free(&self, token: &str, doing: &[(String, i64)], is_in: bool) -> bool {
        match self.state {
            UnitState::Waiting => true,
            // Its node was taken for dead, has ended, or does not know that it has it.
            UnitState::Taken if self.token == token => !doing
                .iter()
                .any(|(job, nth)| (job, *nth) == (&self.job, self.nth)),
            UnitState::Taken => !is_in,
            UnitState::Done | UnitState::Failed => false,
        }
    }

    /// The node with this token takes it.
    pub fn take(&mut self, token: &str) {
        self.state = UnitState::Taken;
        self.token = token.into();
    }

    /// The node with this token says how it stands: that it is still being done, is over, or waits again. False if another node
    /// has it by now, or it is over.
    pub fn say(&mut self, token: &str, state: UnitState) -> bool {
        let has = self.state == UnitState::Taken && self.token == token;
        if has {
            self.state = state;
        }
        has
    }
}

/// A unit that a node has taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenUnit {
    /// The job that it belongs to.
    pub job: String,
    /// What is known of the job.
    pub order: Vec<u8>,
    /// Its place in the job.
    pub nth: i64,
    /// What is to be done.
    pub item: Vec<u8>,
    /// Nodes that serve now, and which of them this one is, in the order of their names.
    pub nodes: (usize, usize),
}

/// How a unit stands, for the process that waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitInfo {
    /// Its place in the job.
    pub nth: i64,
    /// How it stands.
    pub state: UnitState,
    /// The name of the node that has taken it, or had; else empty.
    pub node: String,
    /// What that node has said of it last.
    pub said: Vec<u8>,
}

/// A job, for the process that waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobInfo {
    /// Its units.
    pub units: Vec<UnitInfo>,
    /// Nodes that are running, and whose terms are not over.
    pub nodes: usize,
}
