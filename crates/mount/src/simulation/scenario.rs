//! Scenarios of the simulation.

use super::near::Disk;
use super::writes::Writes;

/// Front, two back connections and, where something is pushed, one for that.
pub(super) const CONNECTIONS: usize = 4;

/// What is simulated: a link, a device, who reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Scenario {
    /// Bytes a second, each way.
    pub(super) rate: f64,
    pub(super) round_trip: f64,
    pub(super) chunk: u32,
    pub(super) chunks: u64,
    /// Whether the link is cut now and then, and some chunks come with a wrong digest.
    pub(super) faults: bool,
    /// Foreground reads per second.
    pub(super) reads: f64,
    /// Seconds that a machine takes at most until it does something about what came.
    pub(super) turn: f64,
    /// Bytes in flight, where they are not found out.
    pub(super) window: Option<u64>,
    /// What the mount writes to.
    pub(super) disk: Disk,
    /// How well the image compresses.
    pub(super) left: Compressed,
    /// What is pushed; then nothing is pulled in the background unless it says so.
    pub(super) writes: Option<Writes>,
}

/// How well an image compresses.
#[derive(Clone, Copy)]
pub(super) enum Compressed {
    All,
    /// This share of each chunk.
    Share(f32),
    /// Nothing of so many chunks, all of the rest.
    After(u64),
    /// Runs of up to 12 MiB of what is between zeros and noise.
    Mixed,
}

impl Scenario {
    /// A pull without reads, faults or a slow disk.
    pub(super) fn pull(mbit: f64, round_trip: f64, chunk: u32, seconds: f64) -> Self {
        let rate = mbit * 1e6 / 8.0;
        Self {
            rate,
            round_trip,
            chunk,
            chunks: (rate * seconds) as u64 / u64::from(chunk),
            faults: false,
            reads: 0.0,
            turn: 0.0,
            window: None,
            disk: Disk::default(),
            left: Compressed::All,
            writes: None,
        }
    }

    /// Connections that are opened.
    pub(super) fn connections(&self) -> usize {
        CONNECTIONS - usize::from(self.writes.is_none())
    }

    /// Bytes a second up and down.
    pub(super) fn rates(&self) -> [f64; 2] {
        [self.writes.map_or(self.rate, |writes| writes.up), self.rate]
    }
}

/// How much of each chunk is left on the link.
pub(super) fn shares(set: &Scenario, random: &mut fastrand::Rng) -> Vec<f32> {
    let chunks = set.chunks as usize;
    let mut shares = Vec::new();
    match set.left {
        Compressed::All => shares.resize(chunks, 1.0),
        Compressed::Share(share) => shares.resize(chunks, share),
        Compressed::After(zeros) => {
            shares.resize(zeros as usize, 0.0);
            shares.resize(chunks, 1.0);
        }
        Compressed::Mixed => {
            while shares.len() < chunks {
                let share = [0.0, 0.05, 0.2, 0.4, 0.7, 1.0][random.usize(0..6)];
                let run = random.u64(64 << 10..12 << 20) / u64::from(set.chunk);
                shares.extend(std::iter::repeat_n(share, run.max(1) as usize));
            }
            shares.truncate(chunks);
        }
    }
    shares
}
