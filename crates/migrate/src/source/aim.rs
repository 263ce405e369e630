//! The pause that the hypervisor is asked for at the end of a migration: short first, longer as long as its memory does not
//! get there.
//!
//! QEMU pauses the machine as soon as what remains of its memory could be sent within `downtime-limit`, so it uses up what it
//! is given, also for a machine that writes little and would soon have less. Here it is given little, and the double each
//! time that was not enough, up to what the user allows. What that costs a machine that writes much is a few passes over
//! its memory that take no longer than the longest pause: a longer pass would not have been the last one anyway.

use std::time::Duration;

/// The pause that is aimed at first.
pub(super) const FIRST: Duration = Duration::from_millis(30);

/// The longest that is aimed at where none is given.
pub(super) const DEFAULT_PAUSE: Duration = Duration::from_millis(300);

/// Passes over the memory after which a pause was too short.
const PASSES: u64 = 2;

/// How long nothing may become less until it was.
const STUCK: Duration = Duration::from_secs(3);

/// The pause that the hypervisor is told: what it has sent, and waits on the way for so long, it does not count. It is told a quarter at
/// least, so that it ends on the slowest link.
pub(super) fn for_hypervisor(pause: Duration, behind: Duration) -> Duration {
    pause.saturating_sub(behind).max(pause / 4)
}

/// How far the memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// Since any fixed time.
    pub(super) at: Duration,
    /// How often the hypervisor has looked what was written.
    pub(super) passes: u64,
    /// Bytes to be sent yet.
    pub(super) remaining: u64,
}

/// The pause that is aimed at now.
#[derive(Debug)]
pub(super) struct Aim {
    pause: Duration,
    longest: Duration,
    /// The passes when this pause was given.
    given_at: Option<u64>,
    /// The least of the pass that was seen last.
    least: Option<Seen>,
}

impl Aim {
    /// Begins with a short pause, and never has a longer one than this.
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            pause: FIRST.min(longest),
            longest,
            given_at: None,
            least: None,
        }
    }

    /// The pause that the hypervisor is to be given now.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// Learns how far the memory is; whether the hypervisor is to be given another pause.
    pub(super) fn note(&mut self, seen: Seen) -> bool {
        let given_at = *self.given_at.get_or_insert(seen.passes);
        let least = self.least.get_or_insert(seen);
        if seen.passes != least.passes || seen.remaining < least.remaining {
            *least = seen;
        }
        let is_stuck = seen.at.saturating_sub(least.at) >= STUCK;
        let is_missed = seen.passes.saturating_sub(given_at) >= PASSES;
        if self.pause >= self.longest || !is_stuck && !is_missed {
            return false;
        }
        self.pause = self.pause.saturating_mul(2).min(self.longest);
        self.given_at = Some(seen.passes);
        self.least = Some(seen);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_millis(300);

    fn seen(at_ms: u64, passes: u64, remaining: u64) -> Seen {
        let at = Duration::from_millis(at_ms);
        Seen {
            at,
            passes,
            remaining,
        }
    }

    /// The pauses in milliseconds after each of these.
    fn pauses(aim: &mut Aim, all: impl IntoIterator<Item = Seen>) -> Vec<u128> {
        let pause = |one| {
            let before = aim.pause();
            assert_eq!(aim.note(one), aim.pause() != before);
            aim.pause().as_millis()
        };
        all.into_iter().map(pause).collect()
    }

    #[test]
    fn what_the_hypervisor_does_not_count_is_taken_off() {
        let told = |behind| for_hypervisor(LONGEST, Duration::from_millis(behind)).as_millis();
        assert_eq!([0, 50, 250, 9000].map(told), [300, 250, 75, 75]);
    }

    #[test]
    fn a_pass_that_gets_on_is_waited_for_however_long() {
        let mut aim = Aim::new(LONGEST);
        assert_eq!(aim.pause(), FIRST);
        let hours = (0..7200).map(|s| seen(1000 * s, 1, (1 << 40) - s));
        assert_eq!(pauses(&mut aim, hours), vec![30; 7200]);
    }

    #[test]
    fn each_two_passes_double_it() {
        let mut aim = Aim::new(LONGEST);
        let passes = (5..17).map(|pass| seen(100 * pass, pass, 1 << 20));
        let expected = [30, 30, 60, 60, 120, 120, 240, 240, 300, 300, 300, 300];
        assert_eq!(pauses(&mut aim, passes), expected);
        // However many there were in between.
        let mut aim = Aim::new(LONGEST);
        let passes = [1, 90, 91, 99].map(|pass| seen(100 * pass, pass, 1 << 20));
        assert_eq!(pauses(&mut aim, passes), [30, 60, 60, 120]);
    }

    #[test]
    fn it_grows_when_nothing_happens() {
        let mut aim = Aim::new(LONGEST);
        let still = [0, 2999, 3000, 5999, 6000].map(|at| seen(at, 1, 70));
        assert_eq!(pauses(&mut aim, still), [30, 30, 60, 60, 120]);
        // What becomes less, and another pass, begin the time anew.
        let moving = [
            seen(8000, 1, 69),
            seen(10_999, 2, 90),
            seen(13_998, 2, 90),
            seen(13_999, 2, 95),
        ];
        assert_eq!(pauses(&mut aim, moving), [120, 120, 120, 240]);
    }

    #[test]
    fn a_shorter_one_that_is_allowed_is_kept() {
        let mut aim = Aim::new(Duration::from_millis(20));
        let passes = (0..9).map(|pass| seen(10_000 * pass, pass, 5));
        assert_eq!(pauses(&mut aim, passes), vec![20; 9]);
    }

    #[test]
    fn whatever_is_seen_it_never_falls_and_reaches_what_is_allowed() {
        for seed in 0..2000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let longest = Duration::from_millis(rng.u64(1..5000));
            let mut aim = Aim::new(longest);
            let (mut at, mut passes) = (0, 0);
            let mut all = Vec::new();
            for _ in 0..rng.usize(1..80) {
                at += rng.u64(0..2000);
                passes += rng.u64(0..2);
                all.push(seen(at, passes, rng.u64(0..100)));
            }
            // A guest whose memory never gets there.
            all.extend((0..40).map(|pass| seen(at, passes + pass, 100)));
            let mut before = aim.pause();
            for one in all {
                aim.note(one);
                let pause = aim.pause();
                assert!(before <= pause && pause <= longest, "seed {seed}");
                assert!(pause <= before * 2, "seed {seed}");
                before = pause;
            }
            assert_eq!(before, longest, "seed {seed}");
        }
    }
}
