//! Scenarios of the simulation.

use super::near::Disk;
use super::writes::Writes;

/// One front, two back and, if there is a push, one push connection.
pub(super) const CONNECTIONS: usize = 4;

/// A simulated case: a link, a device, readers and writers.
#[derive(Clone, Copy)]
pub(super) struct Scenario {
    /// Bytes per second, in each direction.
    pub(super) rate: f64,
    pub(super) round_trip: f64,
    pub(super) chunk: u32,
    pub(super) chunks: u64,
    /// Whether the link breaks occasionally, and some chunks arrive with a wrong digest.
    pub(super) faults: bool,
    /// Foreground reads per second.
    pub(super) reads: f64,
    /// Maximum delay until a host processes received data, in seconds.
    pub(super) turn: f64,
    /// Fixed window in bytes; else it is measured.
    pub(super) window: Option<u64>,
    /// The mount's disk.
    pub(super) disk: Disk,
    /// How well the image compresses.
    pub(super) left: Compressed,
    /// The push; with one, nothing is pulled in the background unless it says so.
    pub(super) writes: Option<Writes>,
}

/// How well an image compresses.
#[derive(Clone, Copy)]
pub(super) enum Compressed {
    All,
    /// Each chunk to this share.
    Share(f32),
    /// So many chunks to nothing, the rest not at all.
    After(u64),
    /// Runs of up to 12 MiB, each between zeros and noise.
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

    /// Connections to open.
    pub(super) fn connections(&self) -> usize {
        CONNECTIONS - usize::from(self.writes.is_none())
    }

    /// Bytes per second, up and down.
    pub(super) fn rates(&self) -> [f64; 2] {
        [self.writes.map_or(self.rate, |writes| writes.up), self.rate]
    }
}

/// Compressed size of each chunk.
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
