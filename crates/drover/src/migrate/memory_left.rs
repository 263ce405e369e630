//! How long the memory of a machine will take yet, from how fast what is left of it became less.

use std::collections::VecDeque;
use std::time::Duration;

use drover_hypervisor::machine::RamInfo;

/// What is looked back at, so that one slow moment changes little.
const LOOK_BACK: Duration = Duration::from_secs(5);

/// The least that is looked back at: what is seen in less says nothing.
const LEAST: Duration = Duration::from_secs(1);

/// How far the memory was at a time.
struct Seen {
    at: Duration,
    pass: u64,
    remaining: u64,
}

/// Estimates the time that is left of a memory's copy.
#[derive(Default)]
pub struct MemoryLeft {
    seen: VecDeque<Seen>,
    /// The pass that was seen last, and when it was first.
    pass: Option<(u64, Duration)>,
}

impl MemoryLeft {
    /// Learns how far the memory is at a time since any fixed one, and says how long it will take yet; `None` as long as
    /// that cannot be told, or when the machine writes faster than its memory is sent.
    pub fn note(&mut self, at: Duration, ram: &RamInfo) -> Option<Duration> {
        let pass = ram.dirty_sync_count;
        let (_, pass_begun) = *self.pass.insert(match self.pass {
            Some((last, begun)) if last == pass => (last, begun),
            _ => (pass, at),
        });
        self.seen.push_back(Seen {
            at,
            pass,
            remaining: ram.remaining,
        });
        while (self.seen.front()).is_some_and(|first| at.saturating_sub(first.at) > LOOK_BACK) {
            self.seen.pop_front();
        }
        // Within one pass only: with the next one all that was written meanwhile is added at once.
        let (mut sent, mut time) = (0, Duration::ZERO);
        for (one, next) in self.seen.iter().zip(self.seen.iter().skip(1)) {
            if one.pass == next.pass && next.remaining <= one.remaining {
                sent += one.remaining - next.remaining;
                time += next.at.saturating_sub(one.at);
            }
        }
        if time < LEAST {
            return None;
        }
        let dirty = ram.dirty_rate() as f64;
        let net = sent as f64 / time.as_secs_f64() - dirty;
        // What was written since the pass began is not in `remaining` yet.
        let written = dirty * at.saturating_sub(pass_begun).as_secs_f64();
        let seconds = (ram.remaining as f64 + written) / net;
        // More than a day is as good as never.
        (net > 0.0 && seconds < 86_400.0).then(|| Duration::from_secs_f64(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A machine whose memory is sent at `rate` and that writes `dirty`, in MiB a second: what is said at each half
    /// second, and when it is over, both in seconds. Passes as QEMU makes them.
    fn play(memory: u64, rate: u64, dirty: u64) -> (Vec<(f64, Option<f64>)>, f64) {
        let (mut left, mut said) = (MemoryLeft::default(), Vec::new());
        let (mut remaining, mut pass, mut written) = (memory as f64, 1, 0.0);
        for tick in 0u32..10_000 {
            let at = Duration::from_millis(100) * tick;
            if tick % 5 == 0 {
                let ram = RamInfo {
                    remaining: (remaining * MIB as f64) as u64,
                    dirty_pages_rate: if pass > 1 { dirty * MIB / 4096 } else { 0 },
                    page_size: 4096,
                    dirty_sync_count: pass,
                    ..RamInfo::default()
                };
                let time = left.note(at, &ram).map(|time| time.as_secs_f64());
                said.push((at.as_secs_f64(), time));
            }
            remaining -= rate as f64 / 10.0;
            written += dirty as f64 / 10.0;
            if remaining <= 0.0 {
                if written <= 5.0 {
                    return (said, at.as_secs_f64());
                }
                (remaining, written, pass) = (written, 0.0, pass + 1);
            }
        }
        (said, f64::INFINITY)
    }

    #[test]
    fn a_time_that_is_said_comes_true() {
        let (said, end) = play(1024, 50, 0);
        assert!(said.len() > 30 && said.iter().filter(|s| s.1.is_some()).count() > 30);
        for (at, time) in said.iter().filter_map(|(at, time)| Some((at, (*time)?))) {
            assert!(
                (at + time - end).abs() < 1.0,
                "{at}: {time}, not {}",
                end - at
            );
        }
    }

    #[test]
    fn what_a_machine_writes_meanwhile_takes_time_too() {
        let (said, end) = play(1024, 50, 25);
        // From the second pass on it is known how much that is.
        let late: Vec<_> = said.iter().filter(|s| s.0 > 30.0).collect();
        assert!(late.iter().any(|s| s.1.is_some()), "{said:?}");
        for (at, time) in late.iter().filter_map(|(at, time)| Some((at, (*time)?))) {
            assert!(
                (at + time - end).abs() < 12.0,
                "{at}: {time}, not {}",
                end - at
            );
        }
    }

    #[test]
    fn no_time_is_said_where_there_is_none() {
        let (said, end) = play(256, 50, 60);
        assert!(end.is_infinite());
        assert!(said.iter().filter(|s| s.0 > 11.0).all(|s| s.1.is_none()));
        let mut left = MemoryLeft::default();
        let ram = RamInfo {
            remaining: MIB,
            ..RamInfo::default()
        };
        // Nothing moves at all.
        for second in 0..100 {
            assert_eq!(left.note(Duration::from_secs(second), &ram), None);
        }
        assert!(left.seen.len() < 10);
    }
}
