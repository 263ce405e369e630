//! How hard to compress: a model of a connection's pipeline, learned by use.
//!
//! Blocks are read and packed by one thread, go over the link, and are unpacked by another. The slowest
//! of the three sets the pace, so the best effort is the one at which the slowest is fastest:
//! `min(1 / (read + pack), link / share, receiver)` in bytes of blocks a second, `share` what packing
//! leaves of them. What the present effort costs and leaves is measured; the others follow from what
//! is known of them beforehand, corrected whenever one is changed for another. The link's rate shows
//! while frames wait for it.

use std::time::Duration;

use super::Effort;

/// What auto chooses from, from the fastest.
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

/// Seconds that packing a byte costs, as measured (`examples/pack.rs`): a Debian system, and what a
/// second one with compilers adds. From zstd 3 on with a long window.
const COSTS: [f64; N] = [
    0.06e-9, 1.29e-9, 1.74e-9, 2.09e-9, 3.93e-9, 9.25e-9, 17.7e-9, 37.0e-9,
];

/// What packing leaves of the same data.
const SHARES: [f64; N] = [1.0, 0.471, 0.352, 0.334, 0.3115, 0.296, 0.288, 0.285];

/// Where a connection begins on a link of unknown rate.
const FAR: usize = 3;

/// A link within a building is rarely slow, and on one machine both ends want the same cores.
const NEAR_ROUND_TRIP: Duration = Duration::from_micros(1500);

/// A look at the pipeline takes at least so long and so many frames.
const LOOK_TIME: f64 = 0.15;
const LOOK_FRAMES: u32 = 4;

/// A link is full when frames wait for it this share of the time.
const FULL: f64 = 0.08;

/// Frames also wait while those who pass them on wait for a core: so many times as long as packing did, where
/// both ends may be on the same cores, and where they are apart.
const CROWD: f64 = 2.0;
const FAR_CROWD: f64 = 0.5;

/// A receiver that is busy this share of the time is what frames wait for.
const RECEIVER_FULL: f64 = 0.85;

/// How many times faster than it is used the link may be while nothing waits for it.
const UNKNOWN: f64 = 4.0;

/// How much faster a link that was full once may have become, a look.
const DRIFT: f64 = 1.02;

/// What remains, after a look without compression, of what was learned of its cost.
const FORGET: f64 = 0.96;

/// How much of what a change of effort shows is believed: the data changes, too.
const TRUST: f64 = 0.3;

/// What unpacking, digesting and writing a byte costs against digesting and writing it.
const UNPACKING: f64 = 1.6;

/// What another effort must promise to be worth a change.
const GAIN: f64 = 1.04;

/// The same for the first compression at all on a link faster than most disks, or for so many looks
/// in a row: its other end may be on the same cores, and a moment's wait there is not a full link.
const FAST_GAIN: f64 = 1.4;
const FAST: f64 = 250e6;
const PATIENCE: u32 = 10;

/// Packing does not get all of a thread's time.
const SPARE: f64 = 0.94;

/// One frame's way through the pipeline.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passed {
    /// Waiting for blocks to be asked for.
    pub idle: Duration,
    /// Reading them.
    pub read: Duration,
    /// Packing them.
    pub pack: Duration,
    /// Of that, without a core: others had it.
    pub stolen: Duration,
    /// Waiting for the link.
    pub waited: Duration,
    /// Bytes of blocks.
    pub bytes: usize,
    /// Bytes they were packed to.
    pub packed: usize,
}

/// Sums since the last look.
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

/// Chooses how hard to compress, from where the time goes. Pure: it is told times.
#[derive(Debug)]
pub struct Pace {
    fixed: Option<Effort>,
    step: usize,
    look: Look,
    /// What packing a byte costs and leaves, by effort; only how these compare counts.
    costs: [f64; N],
    shares: [f64; N],
    /// This machine and this data against those: times the cost, and times what is saved.
    slow: f64,
    saved: f64,
    /// Bytes a second on the wire, once frames have waited for it, and as it is used.
    link: Option<f64>,
    used: f64,
    /// What it may carry.
    limit: f64,
    /// [`CROWD`] or [`FAR_CROWD`].
    crowd: f64,
    /// Looks in a row that promised a gain.
    promised: u32,
    /// Cost and saving of the look before, at another effort.
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
    /// How many efforts auto chooses from.
    pub const STEPS: usize = N;

    /// At one of auto's efforts by number, from the fastest; for measurements.
    #[must_use]
    pub fn step(step: usize) -> Self {
        Self::fixed(EFFORTS[step.min(N - 1)])
    }
}

impl Pace {
    /// At an effort that stays.
    #[must_use]
    pub fn fixed(effort: Effort) -> Self {
        Pace {
            fixed: Some(effort),
            ..Self::default()
        }
    }

    /// Where to begin on a connection with this round-trip time, that may carry so many bytes a
    /// second.
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

    /// The present effort.
    #[must_use]
    pub fn effort(&self) -> Effort {
        self.fixed.unwrap_or(EFFORTS[self.step])
    }

    /// Tells of a frame, and which share of its time the receiver was last known to be busy.
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

    /// What the present effort costs and leaves, and with it what others would.
    fn learn(&mut self, look: &Look) {
        let (cost, saving) = (look.pack / look.bytes, 1.0 - look.packed / look.bytes);
        if self.step == 0 {
            // What was dear then may have become cheap: nothing here would show it.
            self.slow = self.slow.min(1.0 + FORGET * (self.slow - 1.0));
            self.saved = self.saved.max(1.0 + FORGET * (self.saved - 1.0));
            return;
        }
        let step = self.step;
        // The machine and the data are what they were a moment ago: what differs is the effort.
        if let Some((from, cost_before, saving_before)) = self.before.filter(|b| b.0 > 0) {
            let blend = |known: f64, seen: f64| known * (seen / known).clamp(0.4, 2.5).powf(TRUST);
            let seen = blend(self.costs[step], self.costs[from] * cost / cost_before);
            // More effort is never less work.
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

    /// What packing at an effort leaves.
    fn share(&self, step: usize) -> f64 {
        (1.0 - self.saved * (1.0 - self.shares[step])).clamp(0.01, 1.0)
    }

    /// Bytes of blocks a second at an effort.
    fn rate(&self, step: usize, ends: &Ends) -> f64 {
        let pack = SPARE / (ends.read + self.slow * self.costs[step]).max(1e-12);
        let link = self.link.unwrap_or(UNKNOWN * self.used) / self.share(step);
        let receiver = ends.receiver / effort_of_unpacking(step);
        pack.min(link).min(ends.supply).min(receiver)
    }

    /// The least effort of those that are best.
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

/// What is before and after packing and the link.
struct Ends {
    /// Seconds that reading a byte takes.
    read: f64,
    /// Bytes a second that are asked for, and that the receiver takes when they are not packed.
    supply: f64,
    receiver: f64,
}

/// What a byte costs the receiver: it is digested and written, and perhaps unpacked before.
fn effort_of_unpacking(step: usize) -> f64 {
    if step == 0 { 1.0 } else { UNPACKING }
}

#[cfg(test)]
mod tests;
