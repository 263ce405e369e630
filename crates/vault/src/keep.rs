//! Which snapshots of a machine are kept.

use std::collections::BTreeSet;

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// How many snapshots are kept. Of a day, week (from Monday) or month (all UTC), it is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Keep {
    /// The newest ones.
    pub last: u32,
    /// Days that have snapshots.
    pub daily: u32,
    /// Weeks that have snapshots.
    pub weekly: u32,
    /// Months that have snapshots.
    pub monthly: u32,
}

impl Keep {
    /// Whether it keeps nothing of anything.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Keep::default()
    }

    /// Which of the snapshots with these times (in seconds since 1970, any order) are kept.
    #[must_use]
    pub fn decide(&self, times: &[i64]) -> Vec<bool> {
        let mut order: Vec<usize> = (0..times.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse((times[i], i)));
        let mut kept = vec![false; times.len()];
        order
            .iter()
            .take(self.last as usize)
            .for_each(|&i| kept[i] = true);
        for (count, period) in [
            (self.daily, day as fn(i64) -> i64),
            (self.weekly, week),
            (self.monthly, month),
        ] {
            let mut seen = BTreeSet::new();
            for &i in &order {
                if seen.len() == count as usize {
                    break;
                }
                if seen.insert(period(times[i])) {
                    kept[i] = true;
                }
            }
        }
        kept
    }
}

fn day(time: i64) -> i64 {
    time.div_euclid(86_400)
}

fn week(time: i64) -> i64 {
    // 1970 began on a Thursday.
    (day(time) + 3).div_euclid(7)
}

fn month(time: i64) -> i64 {
    let date = Timestamp::from_second(time)
        .unwrap_or(Timestamp::UNIX_EPOCH)
        .to_zoned(TimeZone::UTC)
        .date();
    i64::from(date.year()) * 12 + i64::from(date.month())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_each_period_is_kept() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap().as_second();
        let times: Vec<i64> = [
            "2026-10-31T10:00:00Z",
            "2026-11-15T10:00:00Z", // a Sunday
            "2026-11-16T10:00:00Z", // a Monday
            "2026-11-16T23:00:00Z",
            "2026-11-17T00:00:00Z",
        ]
        .map(at)
        .to_vec();
        let kept = |keep: Keep| {
            let kept = keep.decide(&times);
            (0..5).filter(|&i| kept[i]).collect::<Vec<_>>()
        };
        assert_eq!(
            kept(Keep {
                last: 2,
                ..Keep::default()
            }),
            [3, 4]
        );
        assert_eq!(
            kept(Keep {
                daily: 2,
                ..Keep::default()
            }),
            [3, 4]
        );
        assert_eq!(
            kept(Keep {
                daily: 3,
                ..Keep::default()
            }),
            [1, 3, 4]
        );
        assert_eq!(
            kept(Keep {
                weekly: 2,
                ..Keep::default()
            }),
            [1, 4]
        );
        assert_eq!(
            kept(Keep {
                monthly: 9,
                ..Keep::default()
            }),
            [0, 4]
        );
        assert_eq!(kept(Keep::default()), Vec::<usize>::new());
    }
}
