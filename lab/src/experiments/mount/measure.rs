//! The measurements: one client, the same for everybody.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::client::{Client, Nbd};
use crate::experiments::lines::Net;
use crate::experiments::shows::{NAME, Near, Shown};

pub const MIB: f64 = (1u64 << 20) as f64;

/// A request of the sequential reader: what a kernel asks for when it reads ahead.
const REQUEST: usize = 128 << 10;

/// The longest that one sequential read, random reads, and writes go on.
const READ_FOR: Duration = Duration::from_secs(6);
const RANDOM_FOR: Duration = Duration::from_secs(6);
const WRITE_FOR: Duration = Duration::from_secs(4);

/// The pause between two random reads.
const PAUSE: Duration = Duration::from_millis(5);

/// What is written at most, and how many times a small write is flushed.
const WRITTEN: u64 = 64 << 20;
const FLUSHES: usize = 20;

/// How long a disk may take to be there, and a request to be answered.
const PATIENCE: Duration = Duration::from_secs(60);

/// A file of `size` bytes, the same each time: noise, or a quarter each of noise, zeroes and twice what repeats.
pub fn make_disk(path: &Path, size: u64, noise_only: bool) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut noise = blake3::Hasher::new().update(b"noise").finalize_xof();
    let mut piece = vec![0; 1 << 20];
    let mut left = size;
    let mut number = 0u32;
    while left > 0 {
        match number % 4 {
            _ if noise_only => noise.fill(&mut piece),
            0 => noise.fill(&mut piece),
            1 => piece.fill(0),
            _ => {
                let words =
                    format!("line {number} of a log that repeats itself, but for a number\n");
                let words = words.as_bytes();
                for (at, byte) in piece.iter_mut().enumerate() {
                    *byte = words[at % words.len()];
                }
            }
        }
        let take = left.min(piece.len() as u64);
        file.write_all(&piece[..take as usize])?;
        left -= take;
        number += 1;
    }
    file.into_inner()
        .map_err(|e| e.into_error())?
        .sync_all()
        .with_context(|| format!("cannot write {}", path.display()))
}

/// How reading in order went.
pub struct InOrder {
    /// From the command to the first block.
    pub first_ms: f64,
    /// From the first block on.
    pub mib_s: f64,
    /// Over the last two thirds of that time.
    pub steady_mib_s: f64,
    /// What was read, in MiB.
    pub read_mib: f64,
    /// IP bytes that came over the link meanwhile, in MiB.
    pub link_mib: Option<f64>,
    /// What drover says it received, in MiB.
    pub received_mib: Option<f64>,
}

/// Milliseconds from the command to the first block.
pub fn first(near: &Near<'_>, image: &Path) -> Result<f64> {
    let started = Instant::now();
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    let mut block = [0; 4096];
    client.read(0, &mut block)?;
    let first = started.elapsed();
    let mut expected = [0; 4096];
    File::open(image)?.read_exact(&mut expected)?;
    if block != expected {
        bail!("the first block is not the image's");
    }
    Ok(first.as_secs_f64() * 1e3)
}

/// Reads from the start until the end or the time is over.
pub fn read_in_order(net: &Net, near: &Near<'_>, image: &Path) -> Result<InOrder> {
    let mut original = File::open(image)?;
    let mut expected = vec![0; REQUEST];
    let mut buffer = vec![0; REQUEST];
    let before = net.bytes()?;
    let started = Instant::now();
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    client.read(0, &mut buffer[..4096])?;
    let first = started.elapsed();
    let reading = Instant::now();
    let mut at = 0;
    let mut progress = Vec::new();
    while at < client.size() && reading.elapsed() < READ_FOR {
        let take = (client.size() - at).min(REQUEST as u64) as usize;
        client.read(at, &mut buffer[..take])?;
        original.read_exact(&mut expected[..take])?;
        if buffer[..take] != expected[..take] {
            bail!("what was read at {at} is not what the image has");
        }
        at += take as u64;
        progress.push((reading.elapsed().as_secs_f64(), at));
    }
    let link = net.since(before)?.map(|(_, back)| back as f64 / MIB);
    let received = near.received().map(|bytes| bytes as f64 / MIB);
    shown.check()?;
    let (seconds, read) = progress.last().copied().context("nothing was read")?;
    Ok(InOrder {
        first_ms: first.as_secs_f64() * 1e3,
        mib_s: read as f64 / MIB / seconds,
        steady_mib_s: steady(&progress).context("too little was read")?,
        read_mib: read as f64 / MIB,
        link_mib: link,
        received_mib: received,
    })
}

/// MiB a second over the last two thirds of the time; each of `progress` is when, and how many bytes by then.
fn steady(progress: &[(f64, u64)]) -> Option<f64> {
    let &(end, all) = progress.last()?;
    let &(from, before) = progress.iter().find(|(when, _)| *when >= end / 3.0)?;
    (end > from).then(|| (all - before) as f64 / MIB / (end - from))
}

/// A client of what is shown, as soon as it can be read.
pub fn connect(shown: &mut Shown) -> Result<Client> {
    let connected = match shown.file() {
        Some(file) => Client::open(file, PATIENCE),
        None => Nbd::connect(shown.socket(), NAME, PATIENCE).map(Client::Nbd),
    };
    // Its own words say more, where it has some.
    connected.or_else(|e| shown.check().and(Err(e)))
}

/// How single reads went beside a reader in order.
#[derive(Default)]
pub struct AtRandom {
    /// When each began and what it took, in ms, since the reader in order began.
    waits: Vec<(f64, f64)>,
    /// When the last of them ended.
    end: f64,
}

/// What a read takes at least, in ms, that had to wait for the link: what is here already takes a tenth of it.
pub const WAITED_MS: f64 = 1.0;

impl AtRandom {
    /// What each took, in ms.
    pub fn all(&self) -> Vec<f64> {
        self.waits.iter().map(|(_, took)| *took).collect()
    }

    /// The same of those that began in the last two thirds of the time.
    pub fn steady(&self) -> Vec<f64> {
        let late = self.waits.iter().filter(|(at, _)| *at >= self.end / 3.0);
        late.map(|(_, took)| *took).collect()
    }
}

/// How many of these reads had to wait for the link.
pub fn waited(waits: &[f64]) -> usize {
    waits.iter().filter(|took| **took >= WAITED_MS).count()
}

/// The waits for single blocks while somebody else reads in order.
pub fn read_at_random(near: &Near<'_>, image: &Path) -> Result<AtRandom> {
    let original = File::open(image)?;
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    let mut other = connect(&mut shown)?;
    let size = client.size();
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let since = || began.elapsed().as_secs_f64() * 1e3;
    let random = std::thread::scope(|scope| -> Result<AtRandom> {
        let reader = scope.spawn(|| -> Result<()> {
            let mut buffer = vec![0; REQUEST];
            let mut at = 0;
            while at + REQUEST as u64 <= size && !stop.load(Ordering::Relaxed) {
                other.read(at, &mut buffer)?;
                at += REQUEST as u64;
            }
            Ok(())
        });
        // Into the middle of things.
        std::thread::sleep(Duration::from_millis(100));
        let mut random = fastrand::Rng::with_seed(7);
        let started = Instant::now();
        let mut done = AtRandom::default();
        let outcome = loop {
            let block = random.u64(size / 4096 / 4..size / 4096);
            let at = since();
            match one_wait(&mut client, &original, block * 4096) {
                Ok(wait) => done.waits.push((at, wait)),
                Err(error) => break Err(error),
            }
            done.end = since();
            // What comes after the other's end is not beside it.
            if started.elapsed() > RANDOM_FOR || reader.is_finished() {
                break Ok(());
            }
            std::thread::sleep(PAUSE);
        };
        stop.store(true, Ordering::Relaxed);
        reader
            .join()
            .map_err(|_| anyhow::anyhow!("the sequential reader panicked"))??;
        outcome.map(|()| done)
    })?;
    shown.check()?;
    Ok(random)
}

fn one_wait(client: &mut Client, original: &File, at: u64) -> Result<f64> {
    let (mut block, mut expected) = ([0; 4096], [0; 4096]);
    let started = Instant::now();
    client.read(at, &mut block)?;
    let wait = started.elapsed().as_secs_f64() * 1e3;
    original.read_exact_at(&mut expected, at)?;
    if block != expected {
        bail!("what was read at {at} is not what the image has");
    }
    Ok(wait)
}

/// How writing went.
pub struct Written {
    /// MiB a second that were taken.
    pub rate: f64,
    /// The same with the flush at the end.
    pub flushed_rate: f64,
    /// The median wait for a flush of one block.
    pub flush_ms: f64,
}

/// How fast it takes writes, and how long a flush of one block is.
pub fn write(near: &Near<'_>) -> Result<Written> {
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    let mut data = vec![0; REQUEST];
    let mut random = fastrand::Rng::with_seed(11);
    let total = WRITTEN.min(client.size());
    let started = Instant::now();
    let mut at = 0;
    while at + REQUEST as u64 <= total && started.elapsed() < WRITE_FOR {
        random.fill(&mut data);
        client.write(at, &data)?;
        at += REQUEST as u64;
    }
    let taken = started.elapsed().as_secs_f64();
    client.flush()?;
    let flushed = started.elapsed().as_secs_f64();
    let mut waits = Vec::new();
    for _ in 0..FLUSHES {
        random.fill(&mut data[..4096]);
        client.write(random.u64(0..total / 4096) * 4096, &data[..4096])?;
        let started = Instant::now();
        client.flush()?;
        waits.push(started.elapsed().as_secs_f64() * 1e3);
    }
    shown.check()?;
    Ok(Written {
        rate: at as f64 / MIB / taken,
        flushed_rate: at as f64 / MIB / flushed,
        flush_ms: percentile(&mut waits, 50).unwrap_or_default(),
    })
}

/// The value below which so many in a hundred are; sorts them.
pub fn percentile(values: &mut [f64], percent: usize) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values
        .get((values.len() * percent / 100).min(values.len().saturating_sub(1)))
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn a_disk_is_the_same_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = ["a", "b"].iter().map(|n| dir.path().join(n)).collect();
        for noise_only in [true, false] {
            for path in &paths {
                make_disk(path, (3 << 20) + 4096, noise_only).unwrap();
            }
            let [a, b] = [0, 1].map(|i| std::fs::read(&paths[i]).unwrap());
            assert!(a == b && a.len() == (3 << 20) + 4096);
            assert_eq!(a[1 << 20..2 << 20].iter().all(|b| *b == 0), !noise_only);
        }
    }

    #[test]
    fn a_slow_start_is_no_part_of_the_steady_rate() {
        let mib = 1 << 20;
        let progress = [(1.0, mib), (2.0, 2 * mib), (3.0, 12 * mib), (6.0, 42 * mib)];
        assert_eq!(steady(&progress), Some(10.0));
        assert_eq!(steady(&progress[..1]), None);
        assert_eq!(steady(&[]), None);
    }

    #[test]
    fn reads_of_the_ramp_are_not_among_those_of_a_full_pull() {
        let random = AtRandom {
            waits: vec![(0.0, 90.0), (900.0, 80.0), (1000.0, 0.1), (2900.0, 41.0)],
            end: 3000.0,
        };
        assert_eq!(random.all().len(), 4);
        assert_eq!(random.steady(), [0.1, 41.0]);
        assert_eq!(waited(&random.steady()), 1);
    }

    #[test]
    fn percentiles_are_of_the_sorted() {
        let mut values: Vec<f64> = (0..200).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut values, 99), Some(198.0));
        assert_eq!(percentile(&mut values[..1], 99), Some(0.0));
        assert_eq!(percentile(&mut [], 50), None);
    }
}
