//! How many lines a peer may cause: some a minute for each kind of event, and then a line that says how many more there
//! were.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use drover_net::PeerKey;

use super::record::{By, Event, Record};

/// The period for which lines are counted.
pub const PERIOD: Duration = Duration::from_secs(60);

/// Lines about one kind of event by one peer, or by all strangers together, in a period.
pub const MAX_LINES: u32 = 10;

/// Upper bound on the peers and events that are counted separately.
const MAX_COUNTED: usize = 1024;

/// A peer, or all strangers, or all beyond [`MAX_COUNTED`]; and an event.
type Key = (Option<PeerKey>, Event);

#[derive(Debug)]
struct Counted {
    since: Instant,
    lines: u32,
    more: u64,
    /// The last that has no line.
    last: Option<Record>,
}

/// What was written and counted.
#[derive(Debug, Default)]
pub struct Limits(HashMap<Key, Counted>);

impl Limits {
    /// The lines to write for an event: itself, unless it is only counted, after how many of the last period were.
    pub fn admit(&mut self, record: Record, now: Instant) -> Vec<Record> {
        let peer = record.key.filter(|_| record.by != By::Stranger);
        let mut key = (peer, record.event);
        if self.0.len() >= MAX_COUNTED && !self.0.contains_key(&key) {
            key.0 = None;
        }
        let counted = self.0.entry(key).or_insert(Counted {
            since: now,
            lines: 0,
            more: 0,
            last: None,
        });
        let mut due = Vec::new();
        if now.saturating_duration_since(counted.since) >= PERIOD {
            due.extend(counted.line());
            (counted.since, counted.lines) = (now, 0);
        }
        if counted.lines < MAX_LINES {
            counted.lines += 1;
            due.push(record);
        } else {
            counted.more += 1;
            counted.last = Some(record);
        }
        due
    }

    /// The lines about events that were only counted, of periods that are over at `now`, or of all. Forgets those without
    /// any.
    pub fn take(&mut self, now: Option<Instant>) -> Vec<Record> {
        let is_over = |counted: &Counted| {
            now.is_none_or(|now| now.saturating_duration_since(counted.since) >= PERIOD)
        };
        let mut due = Vec::new();
        self.0.retain(|_, counted| {
            if !is_over(counted) {
                return true;
            }
            due.extend(counted.line());
            false
        });
        due
    }
}

impl Counted {
    /// The line about what was only counted.
    fn line(&mut self) -> Option<Record> {
        let more = std::mem::take(&mut self.more);
        let last = self.last.take()?;
        Some(Record {
            more: Some(more),
            ..last
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(peer: Option<u8>) -> Record {
        let record = Record::new(Event::Refused);
        match peer {
            Some(n) => record.by_peer("a peer", PeerKey([n; 32])),
            None => record.by_stranger(Some(PeerKey([9; 32]))),
        }
    }

    #[test]
    fn a_flood_is_a_few_lines_a_minute_and_a_count() {
        let (mut limits, start) = (Limits::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lines = |peer, times: u32, seconds| {
            let admit = |_| limits.admit(refused(peer), at(seconds)).len() as u32;
            (0..times).map(admit).sum::<u32>()
        };
        assert_eq!(lines(Some(1), 500, 0), MAX_LINES);
        assert_eq!(lines(Some(2), 3, 1), 3, "another peer");
        assert_eq!(lines(None, 500, 1), MAX_LINES, "all strangers");
        assert_eq!(lines(Some(1), 5, 59), 0);
        let resumed = limits.admit(refused(Some(1)), at(60));
        let more = resumed.iter().map(|record| record.more);
        assert_eq!(Vec::from_iter(more), [Some(495), None]);
        // Those that stopped are counted by the sweep.
        let due = limits.take(Some(at(61)));
        let more = due.iter().map(|record| (record.by, record.more));
        assert_eq!(Vec::from_iter(more), [(By::Stranger, Some(490))]);
        assert_eq!(limits.take(Some(at(1000))), []);
        assert!(limits.0.is_empty());
    }

    #[test]
    fn many_peers_are_counted_together() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        let mut key = [0; 32];
        let mut lines = 0;
        for n in 0..3000u32 {
            key[..4].copy_from_slice(&n.to_le_bytes());
            let record = Record::new(Event::Connected).by_peer("one", PeerKey(key));
            lines += limits.admit(record, now).len();
        }
        assert!(limits.0.len() <= MAX_COUNTED + 1);
        assert_eq!(lines, MAX_COUNTED + MAX_LINES as usize);
        let more: u64 = limits.take(None).iter().filter_map(|r| r.more).sum();
        assert_eq!(more + lines as u64, 3000);
    }
}
