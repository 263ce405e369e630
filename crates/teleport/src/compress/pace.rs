//! Chooses the compression level: a model of a connection's pipeline, fitted at run time.
//!
//! One thread reads and compresses blocks, they cross the link, and another thread decompresses them. The slowest of
//! the three stages limits throughput, so the best level is the one that maximizes it: `min(1 / (read + pack), link /
//! share, receiver)` in bytes of blocks per second, where `share` is the compressed fraction. Cost and share of the
//! current level are measured; those of the other levels follow from built-in figures, corrected after each change of
//! level. The link's rate is measured while frames wait for it.

use std::time::Duration;

use super::Effort;

/// The levels that automatic selection chooses from, fastest first.
pub(super) const EFFORTS: [Effort; N] = [
    Effort::None,
    Effort::Lz4,
    Effort::Zstd(1),
    Effort::Zstd(2),
    Effort::Zstd(3),
    Effort::Zstd(6),
    Effort::Zstd(9),
    Effort::Zstd(12),
];

const N: usize = 8;

/// Built-in seconds per byte of compression at each level, as measured (`examples/pack.rs`) with a Debian system and
/// the additional data of a second one with compilers. From zstd 3 on with a long window.
const COSTS: [f64; N] = [
    0.06e-9, 1.29e-9, 1.74e-9, 2.09e-9, 3.93e-9, 9.25e-9, 17.7e-9, 37.0e-9,
];

/// Compressed fraction of the same data.
const SHARES: [f64; N] = [1.0, 0.471, 0.352, 0.334, 0.3115, 0.296, 0.288, 0.285];

/// Initial level on a link of unknown rate.
const FAR: usize = 3;

/// Links with a shorter round trip start uncompressed: a link within a building is rarely slow, and on one machine
/// both ends compete for the same cores.
const NEAR_ROUND_TRIP: Duration = Duration::from_micros(1500);

/// Minimum duration of a measurement in seconds; a minimum number of frames applies too.
const LOOK_TIME: f64 = 0.15;
const LOOK_FRAMES: u32 = 4;

/// The link counts as saturated when frames wait for it for this fraction of the time.
const FULL: f64 = 0.08;

/// Frames also wait while the threads that forward them wait for a core. That time is estimated as a multiple of the
/// time for which compression waited for a core: where both ends may share the cores, and where they are apart.
const CROWD: f64 = 2.0;
const FAR_CROWD: f64 = 0.5;

/// A receiver that is busy for this fraction of the time counts as the bottleneck.
const RECEIVER_FULL: f64 = 0.85;

/// Assumed ratio of the link's rate to its current use while nothing waits for it.
const UNKNOWN: f64 = 4.0;

/// Growth per measurement of the assumed rate of a link that was saturated before.
const DRIFT: f64 = 1.02;

/// Decay, per measurement without compression, of the learned corrections of its cost.
const FORGET: f64 = 0.96;

/// Weight of what a change of level shows: the data changes too.
const TRUST: f64 = 0.3;

/// Receiver's cost per byte with decompression, relative to digesting and writing alone.
const UNPACKING: f64 = 1.6;

/// Predicted speedup required to change the level.
const GAIN: f64 = 1.04;

/// Speedup required to enable compression on a link faster than most disks; a smaller one must be predicted this many
/// times in a row. The peer may share the cores, and a brief wait there does not mean a saturated link.
const FAST_GAIN: f64 = 1.4;
const FAST: f64 = 250e6;
const PATIENCE: u32 = 10;

/// Fraction of a thread's time that compression gets.
const SPARE: f64 = 0.94;

/// Times of one frame in the pipeline.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passed {
    /// Waiting for blocks to be requested.
    pub idle: Duration,
    /// Reading them.
    pub read: Duration,
    /// Compressing them.
    pub pack: Duration,
    /// Part of `pack` spent waiting for a core.
    pub stolen: Duration,
    /// Waiting for the link.
    pub waited: Duration,
    /// Bytes of blocks.
    pub bytes: usize,
    /// Compressed bytes.
    pub packed: usize,
}

/// Sums since the last measurement.
#[derive(Debug, Clone, Copy, Default)]
struct Look {
    frames: u32,
    idle: f64,
    read: f64,
    pack: f64,
    stolen: f64,
    waited: f64,
    bytes: f64,
    packed: f64,
}

impl Look {
    fn add(&mut self, frame: &Passed) {
        self.frames += 1;
        self.idle += frame.idle.as_secs_f64();
        self.read += frame.read.as_secs_f64();
        self.pack += frame.pack.as_secs_f64();
        self.stolen += frame.stolen.as_secs_f64();
        self.waited += frame.waited.as_secs_f64();
        self.bytes += frame.bytes as f64;
        self.packed += frame.packed as f64;
    }

    fn seconds(&self) -> f64 {
        self.idle + self.read + self.pack + self.waited
    }
}

/// Chooses the compression level from where time is spent. Pure: the caller passes times in.
#[derive(Debug)]
pub struct Pace {
    fixed: Option<Effort>,
    step: usize,
    look: Look,
    /// Cost per byte and compressed fraction at each level; only their ratios matter.
    costs: [f64; N],
    shares: [f64; N],
    /// This machine and data relative to those figures: factors for the cost and for the savings.
    slow: f64,
    saved: f64,
    /// Link rate in bytes per second, once frames have waited for it, and its current use.
    link: Option<f64>,
    used: f64,
    /// Rate limit of the link.
    limit: f64,
    /// [`CROWD`] or [`FAR_CROWD`].
    crowd: f64,
    /// Consecutive measurements that predicted a speedup.
    promised: u32,
    /// Level, cost and savings of the previous measurement, if at another level.
    before: Option<(usize, f64, f64)>,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            fixed: None,
            step: FAR,
            look: Look::default(),
            costs: COSTS,
            shares: SHARES,
            slow: 1.0,
            saved: 1.0,
            link: None,
            used: 0.0,
            limit: f64::INFINITY,
            crowd: CROWD,
            promised: 0,
            before: None,
        }
    }
}

#[cfg(any(fuzzing, feature = "testing"))]
impl Pace {
    /// Number of automatic levels.
    pub const STEPS: usize = N;

    /// Fixed at one of the automatic levels by number, fastest first; for benchmarks.
    #[must_use]
    pub fn step(step: usize) -> Self {
        Self::fixed(EFFORTS[step.min(N - 1)])
    }
}

impl Pace {
    /// Fixed at a level.
    #[must_use]
    pub fn fixed(effort: Effort) -> Self {
        Pace {
            fixed: Some(effort),
            ..Self::default()
        }
    }

    /// Initial state for a connection with this round-trip time and an optional rate limit in bytes per second.
    #[must_use]
    pub fn of_link(round_trip: Duration, limit: Option<u64>) -> Self {
        let mut pace = Self::default();
        if round_trip >= NEAR_ROUND_TRIP {
            pace.crowd = FAR_CROWD;
        }
        if let Some(limit) = limit {
            pace.limit = limit as f64;
            pace.link = Some(pace.limit);
            pace.step = pace.best(&Ends {
                read: 0.0,
                supply: f64::INFINITY,
                receiver: f64::INFINITY,
            });
        } else if round_trip < NEAR_ROUND_TRIP {
            pace.step = 0;
        }
        pace
    }

    /// The current level.
    #[must_use]
    pub fn effort(&self) -> Effort {
        self.fixed.unwrap_or(EFFORTS[self.step])
    }

    /// Records a frame, and the fraction of time for which the receiver was last known to be busy.
    pub fn note(&mut self, frame: &Passed, receiver_busy: f64) {
        self.look.add(frame);
        let seconds = self.look.seconds();
        if self.fixed.is_some() || self.look.frames < LOOK_FRAMES || seconds < LOOK_TIME {
            return;
        }
        let look = std::mem::take(&mut self.look);
        if look.bytes == 0.0 {
            return;
        }
        self.learn(&look);
        self.learn_link(&look, receiver_busy);
        let supply = if look.idle > 0.15 * seconds {
            1.05
        } else {
            f64::INFINITY
        };
        let rate = look.bytes / seconds;
        let ends = Ends {
            read: look.read / look.bytes,
            supply: rate * supply,
            receiver: rate / receiver_busy.max(0.01) * effort_of_unpacking(self.step),
        };
        let best = self.best(&ends);
        let (now, then) = (self.rate(self.step, &ends), self.rate(best, &ends));
        if best == self.step || then <= now * GAIN {
            self.promised = 0;
        } else {
            self.promised += 1;
        }
        let fast = self.step == 0 && self.link.is_none_or(|link| link > FAST);
        let sure = !fast || then > now * FAST_GAIN || self.promised >= PATIENCE;
        if self.promised > 0 && sure {
            self.promised = 0;
            self.before = Some((
                self.step,
                look.pack / look.bytes,
                1.0 - look.packed / look.bytes,
            ));
            self.step = best;
        } else {
            self.before = None;
        }
    }

    /// Updates cost and share of the current level, and with them those of the other levels.
    fn learn(&mut self, look: &Look) {
        let (cost, saving) = (look.pack / look.bytes, 1.0 - look.packed / look.bytes);
        if self.step == 0 {
            // Without compression its cost cannot be measured, so let old estimates decay.
            self.slow = self.slow.min(1.0 + FORGET * (self.slow - 1.0));
            self.saved = self.saved.max(1.0 + FORGET * (self.saved - 1.0));
            return;
        }
        let step = self.step;
        // Machine and data are assumed unchanged since the last measurement: the difference is due to the level.
        if let Some((from, cost_before, saving_before)) = self.before.filter(|b| b.0 > 0) {
            let blend = |known: f64, seen: f64| known * (seen / known).clamp(0.4, 2.5).powf(TRUST);
            let seen = blend(self.costs[step], self.costs[from] * cost / cost_before);
            // A higher level never costs less.
            let least = 1.1 * self.costs[step - 1];
            let most = self.costs.get(step + 1).map_or(f64::INFINITY, |c| c / 1.1);
            self.costs[step] = seen.min(most).max(least);
            if saving_before > 0.05 && saving > 0.05 {
                let known = (1.0 - self.shares[from]) * saving / saving_before;
                let saved = blend(1.0 - self.shares[step], known).min(0.98);
                self.shares[step] = 1.0 - saved;
            }
        }
        let slow = cost / self.costs[step];
        let saved = saving.max(0.0) / (1.0 - self.shares[step]);
        self.slow += 0.6 * (slow - self.slow);
        self.saved += 0.6 * (saved - self.saved);
    }

    fn learn_link(&mut self, look: &Look, receiver_busy: f64) {
        let seconds = look.seconds();
        let used = look.packed / seconds;
        let busy_cores = self.crowd * look.stolen;
        let waited = look.waited > FULL * seconds + busy_cores && look.idle < FULL * seconds;
        let full = waited && receiver_busy < RECEIVER_FULL;
        self.link = match self.link {
            Some(link) if full => Some(link + 0.6 * (used - link)),
            None if full => Some(used),
            Some(link) => Some((link * DRIFT).max(used)),
            None => None,
        };
        self.link = self.link.map(|link| link.min(self.limit));
        self.used = used;
    }

    /// Predicted compressed fraction at a level.
    fn share(&self, step: usize) -> f64 {
        (1.0 - self.saved * (1.0 - self.shares[step])).clamp(0.01, 1.0)
    }

    /// Predicted bytes of blocks per second at a level.
    fn rate(&self, step: usize, ends: &Ends) -> f64 {
        let pack = SPARE / (ends.read + self.slow * self.costs[step]).max(1e-12);
        let link = self.link.unwrap_or(UNKNOWN * self.used) / self.share(step);
        let receiver = ends.receiver / effort_of_unpacking(step);
        pack.min(link).min(ends.supply).min(receiver)
    }

    /// The lowest of the best levels.
    fn best(&self, ends: &Ends) -> usize {
        let mut best = 0;
        for step in 1..N {
            if self.rate(step, ends) > 1.01 * self.rate(best, ends) {
                best = step;
            }
        }
        best
    }
}

/// The stages before and after compression and the link.
struct Ends {
    /// Seconds per byte of reading.
    read: f64,
    /// Bytes per second that are requested, and that the receiver handles uncompressed.
    supply: f64,
    receiver: f64,
}

/// Receiver's relative cost per byte at a level: it digests and writes, and possibly decompresses first.
fn effort_of_unpacking(step: usize) -> f64 {
    if step == 0 { 1.0 } else { UNPACKING }
}

#[cfg(test)]
mod tests;
