//! Log lines about connections of unknown keys: one a minute for each network, with a count of the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use drover_net::network_of;

use crate::audit::{Event, Record};
use crate::text::count;

/// How long lines about a network are only counted after one was written.
pub const PERIOD: Duration = Duration::from_secs(60);

/// Upper bound on the networks that have lines of their own; the others are counted together.
const MAX_NETWORKS: usize = 256;

/// Decides which lines are written.
#[derive(Debug, Default)]
pub struct StrangerLog(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    by_network: HashMap<IpAddr, Counted>,
    elsewhere: u64,
}

#[derive(Debug)]
struct Counted {
    written: Instant,
    more: u64,
}

impl StrangerLog {
    /// Whether to write a line about a connection from `address`; otherwise it is counted.
    pub fn is_first(&self, address: IpAddr) -> bool {
        self.is_first_at(address, Instant::now())
    }

    fn is_first_at(&self, address: IpAddr, now: Instant) -> bool {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let network = network_of(address);
        if let Some(counted) = counts.by_network.get_mut(&network) {
            counted.more += 1;
            return false;
        }
        if counts.by_network.len() >= MAX_NETWORKS {
            counts.elsewhere += 1;
            return false;
        }
        let counted = Counted {
            written: now,
            more: 0,
        };
        counts.by_network.insert(network, counted);
        true
    }

    /// Writes a line for each network whose lines were counted for long enough; returns the same for the audit log. To be
    /// called now and then.
    pub fn write_counts(&self) -> Vec<Record> {
        written(self.take_counts(Some(Instant::now())))
    }

    /// The same for all, when the site stops.
    pub fn write_all_counts(&self) -> Vec<Record> {
        written(self.take_counts(None))
    }

    /// The networks whose lines were counted for long enough, or all without a time, and how many; `None` for those that
    /// have no line of their own. Forgets those with none.
    fn take_counts(&self, now: Option<Instant>) -> Vec<(Option<IpAddr>, u64)> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = Vec::new();
        counts.by_network.retain(|network, counted| {
            if let Some(now) = now {
                if now.saturating_duration_since(counted.written) < PERIOD {
                    return true;
                }
                counted.written = now;
            }
            let more = std::mem::take(&mut counted.more);
            if more > 0 {
                due.push((Some(*network), more));
            }
            more > 0
        });
        if counts.elsewhere > 0 && (now.is_none() || counts.by_network.len() < MAX_NETWORKS) {
            due.push((None, std::mem::take(&mut counts.elsewhere)));
        }
        due
    }
}

fn written(counts: Vec<(Option<IpAddr>, u64)>) -> Vec<Record> {
    for (network, more) in &counts {
        let more = count(
            usize::try_from(*more).unwrap_or(usize::MAX),
            "more connection",
        );
        match network {
            Some(network) => {
                tracing::warn!(from = %network, "{more} without a trusted key since the last line");
            }
            None => {
                tracing::warn!(
                    "{more} without a trusted key, from more than {MAX_NETWORKS} networks"
                );
            }
        }
    }
    let record = |(network, more): (Option<IpAddr>, u64)| {
        let refused = Record::new(Event::Refused).by_stranger(None);
        Record {
            address: network.map(|network| network.to_string()),
            more: Some(more),
            ..refused
        }
    };
    counts.into_iter().map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_minute_for_each_network() {
        let (log, start) = (StrangerLog::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let (one, other) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        assert!(log.is_first_at(one, start) && log.is_first_at(other, start));
        for second in 0..1499 {
            assert!(!log.is_first_at(one, at(second % 60)));
        }
        assert_eq!(log.take_counts(Some(at(59))), []);
        assert_eq!(log.take_counts(Some(at(60))), [(Some(one), 1499)]);
        assert!(log.is_first_at(other, at(61)), "it had stopped");
        assert!(!log.is_first_at(one, at(61)));
        assert_eq!(log.take_counts(Some(at(120))), [(Some(one), 1)]);
        assert_eq!(log.take_counts(Some(at(1000))), []);
        assert!(log.0.lock().unwrap().by_network.is_empty());
        assert!(log.is_first_at(one, at(1001)) && !log.is_first_at(one, at(1002)));
        assert_eq!(log.take_counts(None), [(Some(one), 1)], "the site stops");
    }

    #[test]
    fn many_networks_are_counted_together() {
        let (log, now) = (StrangerLog::default(), Instant::now());
        let from = |n: usize| IpAddr::from([10, 1, (n >> 8) as u8, n as u8]);
        let lines = (0..1000).filter(|n| log.is_first_at(from(*n), now)).count();
        assert_eq!(lines, MAX_NETWORKS);
        let more = 1000 - MAX_NETWORKS as u64;
        assert_eq!(log.take_counts(Some(now + PERIOD)), [(None, more)]);
    }
}
