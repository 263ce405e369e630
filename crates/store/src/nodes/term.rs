//! A node's own view of its term. No clock: the caller says what time it is, by one that nobody sets.

use std::time::Duration;

/// How long a term lasts after the database has granted or prolonged it, unless the node wants another length.
pub const DEFAULT_TERM: Duration = Duration::from_secs(30);

/// The shortest and the longest term that a node may want.
pub const MIN_TERM: Duration = Duration::from_secs(4);
/// See [`MIN_TERM`].
pub const MAX_TERM: Duration = Duration::from_secs(600);

/// How often a node asks for its term to be prolonged.
#[must_use]
pub fn renew_every(term: Duration) -> Duration {
    term / 8
}

/// The term of a node, as it sees it: it counts from when it *asked*, which is before the database granted it, and ends a quarter
/// earlier than the database says. So clocks may run at rates that differ, and what is under way has time to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    length: Duration,
    /// When it last asked with success, by the caller's clock.
    asked: Option<Duration>,
    lost: bool,
}

impl Term {
    /// None yet; each will be so long.
    #[must_use]
    pub fn new(length: Duration) -> Term {
        Term {
            length,
            asked: None,
            lost: false,
        }
    }

    /// The database has granted or prolonged it, as asked for at `asked`.
    pub fn granted(&mut self, asked: Duration) {
        self.asked = self.asked.max(Some(asked));
    }

    /// The database knows of no such term: it is over for good.
    pub fn lose(&mut self) {
        self.lost = true;
    }

    /// Whether it is over for good.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// Whether the node may change what nodes share.
    #[must_use]
    pub fn holds(&self, now: Duration) -> bool {
        let ends = self.asked.map(|asked| asked + self.length * 3 / 4);
        !self.lost && ends.is_some_and(|ends| now < ends)
    }
}
