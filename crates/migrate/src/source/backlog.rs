//! Whether the copy of a machine's disks keeps up with what the machine writes.

use std::time::Duration;

/// Rounds in a row after which it does not.
const ROUNDS: u32 = 3;

/// What the link carries in so long is no backlog.
const LITTLE: Duration = Duration::from_secs(1);

/// How far it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Since any fixed time.
    pub(super) at: Duration,
    /// Bytes that were carried since then.
    pub(super) carried: u64,
    /// Bytes to be carried yet.
    pub(super) left: u64,
}

/// Watches it. A round is over when as much was carried as was left when it began.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    round: Option<Seen>,
    missed: u32,
}

impl Backlog {
    /// Learns how far it is; whether that will not end.
    pub(super) fn grows(&mut self, seen: Seen) -> bool {
        let begun = *self.round.get_or_insert(seen);
        let carried = seen.carried.saturating_sub(begun.carried);
        let took = seen.at.saturating_sub(begun.at).as_secs_f64();
        if carried < begun.left.max(1) || took <= 0.0 {
            return false;
        }
        self.round = Some(seen);
        let little = carried as f64 / took * LITTLE.as_secs_f64();
        let is_backlog = seen.left as f64 > little;
        match is_backlog && seen.left > begun.left / 20 * 19 {
            true => self.missed += 1,
            false => self.missed = 0,
        }
        self.missed >= ROUNDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that writes so much in a second over a disk of 100 MB, on a link of 10 MB/s; after how many seconds it is behind.
    fn behind_after(writes: u64) -> Option<u64> {
        const MB: u64 = 1_000_000;
        let mut backlog = Backlog::default();
        let (mut left, mut carried) = (100 * MB, 0);
        (1..600).find(|second| {
            let sent = left.min(10 * MB);
            left = (left - sent + writes * MB).min(100 * MB);
            carried += sent;
            let at = Duration::from_secs(*second);
            backlog.grows(Seen { at, carried, left })
        })
    }

    #[test]
    fn only_the_writes_of_who_writes_faster_than_the_link_carries_wait() {
        for writes in [0, 1, 5, 8, 9] {
            assert_eq!(behind_after(writes), None, "{writes} MB/s");
        }
        for writes in [11, 20, 100] {
            assert!(behind_after(writes).is_some(), "{writes} MB/s");
        }
    }

    #[test]
    fn a_link_that_carries_nothing_is_no_fault_of_the_machine() {
        let mut backlog = Backlog::default();
        for second in 0..100 {
            let at = Duration::from_secs(second);
            let seen = Seen {
                at,
                carried: 0,
                left: 5,
            };
            assert!(!backlog.grows(seen));
        }
    }
}
