//! How much of what an exact deduplicator would match does the matcher find on a library of raw
//! images, and what does it cost?
//!
//! ```text
//! cargo run --release -p drover-index --example match_library -- IMAGE.raw...
//! ```
//!
//! Images are taken in the order given, each after the ones before it are at the destination. They
//! are read once, holes skipped, in batches of 8 MiB; then every configuration is run on them.
//! Counted are blocks that are not zero, repeats inside an image included. Options: `--only NAME`
//! runs one configuration, `--dir DIR` keeps the index there instead of in a temporary directory,
//! `--keep N` deletes all but the newest N images from the destination after each (what the sequence
//! cache is for; the exact deduplicator forgets nothing).

use std::error::Error;
use std::fs::File;
use std::io::Error as IoError;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drover_core::{BLOCK_SIZE, Digest, Head};
use drover_index::testing::{Destination, ExactDedup};
use drover_index::{
    AnchorPolicy, DirStorage, ImageId, Matcher, MatcherConfig, MatcherStats, Scanner, digest_blocks,
};

const BATCH: usize = 8 << 20;

/// One image as the matcher is told of it.
struct Image {
    name: String,
    digests: Vec<Digest>,
    heads: Vec<Head>,
    /// Where each batch of 8 MiB begins.
    batches: Vec<usize>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut paths = Vec::new();
    let (mut only, mut dir, mut keep) = (None, None, usize::MAX);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--only" => only = args.next(),
            "--keep" => keep = args.next().ok_or("--keep N")?.parse()?,
            "--dir" => dir = args.next().map(PathBuf::from),
            _ => paths.push(PathBuf::from(arg)),
        }
    }
    if paths.is_empty() {
        return Err(
            "usage: match_library [--only NAME] [--dir DIR] [--keep N] IMAGE.raw...".into(),
        );
    }
    let temporary = tempfile::tempdir()?;
    let dir = dir.unwrap_or_else(|| temporary.path().to_owned());
    let images = paths
        .iter()
        .map(|p| read(p))
        .collect::<Result<Vec<_>, _>>()?;
    let mut exact = ExactDedup::new();
    let best: Vec<u64> = images
        .iter()
        .map(|i| i.digests.iter().filter(|d| exact.seen(d)).count() as u64)
        .collect();
    for (name, config) in configurations() {
        if only.as_deref().is_none_or(|o| o == name) {
            run(name, config, &images, &best, keep, &dir.join(name))?;
        }
    }
    Ok(())
}

fn configurations() -> Vec<(&'static str, MatcherConfig)> {
    let default = MatcherConfig::default();
    let cold = |cold_after, cold_shift| MatcherConfig {
        anchors: AnchorPolicy::FreeSlots {
            stop_percent: 90,
            cold_after,
            cold_shift,
        },
        ..default
    };
    let quarter = |c: MatcherConfig| MatcherConfig {
        c0_bytes: c.c0_bytes / 32,
        c1_bytes: c.c1_bytes / 32,
        c2_bytes: c.c2_bytes / 32,
        ..c
    };
    vec![
        ("default", default),
        ("ask-for-all", cold(u32::MAX, 0)),
        ("ask-for-half", cold(64, 1)),
        ("ask-for-an-eighth", cold(16, 3)),
        (
            "no-aligned",
            MatcherConfig {
                aligned: false,
                ..default
            },
        ),
        (
            "no-backward",
            MatcherConfig {
                backward: false,
                ..default
            },
        ),
        (
            "no-anchors",
            MatcherConfig {
                anchors: AnchorPolicy::Off,
                ..default
            },
        ),
        ("paper", MatcherConfig::paper()),
        ("default-1MiB", quarter(default)),
        ("paper-1MiB", quarter(MatcherConfig::paper())),
    ]
}

/// Reads an image's data, digests and looks at it.
fn read(path: &Path) -> Result<Image, Box<dyn Error>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut image = Image {
        name: path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        digests: Vec::new(),
        heads: Vec::new(),
        batches: vec![0],
    };
    let mut scanner = Scanner::new();
    let (mut at, mut bytes, mut digests) = (0, Vec::new(), Vec::new());
    let mut busy = Duration::ZERO;
    let mut read = 0;
    while at < len {
        let Some(data) = next_data(&file, at)? else {
            break;
        };
        if data / BATCH as u64 > at / BATCH as u64 || data > at {
            scanner.skip_zeros();
        }
        at = data / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        let end = ((at / BATCH as u64 + 1) * BATCH as u64).min(len);
        bytes.resize((end - at).next_multiple_of(BLOCK_SIZE as u64) as usize, 0);
        let (have, padding) = bytes.split_at_mut((end - at) as usize);
        file.read_exact_at(have, at)?;
        padding.fill(0);
        read += bytes.len();
        let start = Instant::now();
        let scan = scanner.scan(&bytes);
        digests.clear();
        digest_blocks(&bytes, &mut digests);
        busy += start.elapsed();
        let kept = digests.iter().zip(scan.zero.iter()).filter(|(_, z)| !z);
        image.digests.extend(kept.map(|(d, _)| *d));
        image.heads.extend(scan.heads);
        image.batches.push(image.digests.len());
        at = end;
    }
    image.batches.dedup();
    eprintln!(
        "{}: {} MiB read, scanned and digested at {:.0} MB/s",
        image.name,
        read >> 20,
        read as f64 / 1e6 / busy.as_secs_f64()
    );
    Ok(image)
}

/// The first byte at or after `at` that is not in a hole.
fn next_data(file: &File, at: u64) -> Result<Option<u64>, IoError> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn run(
    name: &str,
    config: MatcherConfig,
    images: &[Image],
    best: &[u64],
    keep: usize,
    dir: &Path,
) -> Result<(), Box<dyn Error>> {
    let (mut m, _) = Matcher::open(DirStorage::new(dir)?, config)?;
    let mut destination = Destination::new();
    println!("\n{name}");
    println!(
        "{:<24} {:>8} {:>8} {:>8} {:>7} {:>6} {:>7} {:>7} {:>6} {:>8}",
        "image", "blocks", "exact", "ours", "share", "heads", "length", "read %", "Mb/s", "C0 %"
    );
    let mut before = m.stats();
    let (mut all_best, mut busy) = (0, Duration::ZERO);
    for (id, (image, &best)) in images.iter().zip(best).enumerate() {
        let mut cursor = m.begin(ImageId(id as u64))?;
        let mut spent = Duration::ZERO;
        for w in image.batches.windows(2) {
            let (d, h) = (&image.digests[w[0]..w[1]], &image.heads[w[0]..w[1]]);
            let start = cpu_time();
            let plan = m.batch(&mut cursor, d, h)?;
            spent += cpu_time() - start;
            let applied = destination.apply(ImageId(id as u64), d, &plan)?;
            assert_eq!(applied.refetched, 0, "a wrong plan");
        }
        let start = cpu_time();
        m.finish(cursor)?;
        spent += cpu_time() - start;
        if let Some(old) = id.checked_sub(keep) {
            m.forget(ImageId(old as u64))?;
            destination.delete(ImageId(old as u64));
        }
        let after = m.stats();
        line(&image.name, &before, &after, best, spent);
        before = after;
        all_best += best;
        busy += spent;
    }
    let s = m.stats();
    line("all", &MatcherStats::default(), &s, all_best, busy);
    println!("  {s:?}");
    let bytes = s.blocks as f64 * BLOCK_SIZE as f64;
    let looked_up = s.c2.lookups as f64;
    let falsely = s.c0.false_matches + s.c1.false_matches + s.c2.false_matches;
    println!(
        "  found {:.2} % of exact; write amplification {:.2} %; looked up {:.1} % of blocks; false matches {:.2} % of lookups, {:.2} % of blocks; memory {:.1} MiB; sequences {} of {:.1} blocks, {:.1} % of blocks copied",
        100.0 * s.matched as f64 / all_best as f64,
        100.0 * s.bytes_written as f64 / bytes,
        100.0 * looked_up / s.blocks as f64,
        100.0 * falsely as f64 / looked_up,
        100.0 * falsely as f64 / s.blocks as f64,
        s.memory as f64 / (1 << 20) as f64,
        s.sequences_stored,
        s.sequence_blocks_stored as f64 / s.sequences_stored.max(1) as f64,
        100.0 * s.sequence_blocks_stored as f64 / s.blocks as f64,
    );
    let start = Instant::now();
    m.persist()?;
    let persisted = start.elapsed();
    drop(m);
    let start = Instant::now();
    let (m, report) = Matcher::open(DirStorage::new(dir)?, config)?;
    assert!(
        report.from_snapshot && report.repairs.is_empty(),
        "{report:?}"
    );
    let opened = start.elapsed();
    drop(m);
    std::fs::remove_file(dir.join("caches.snap"))?;
    let start = Instant::now();
    let (m, _) = Matcher::open(DirStorage::new(dir)?, config)?;
    println!(
        "  snapshot written in {persisted:.2?}, read in {opened:.2?}; rebuilt without it in {:.2?} ({} entries)",
        start.elapsed(),
        m.stats().c0.entries + m.stats().c1.entries + m.stats().c2.entries,
    );
    Ok(())
}

/// Time this process has spent on a processor, in the kernel too: what other programs do at the
/// same time does not count.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn line(name: &str, a: &MatcherStats, b: &MatcherStats, best: u64, busy: Duration) {
    let blocks = b.blocks - a.blocks;
    let matched = b.matched - a.matched;
    let percent = |n: u64, of: u64| 100.0 * n as f64 / of.max(1) as f64;
    println!(
        "{name:<24} {blocks:>8} {best:>8} {matched:>8} {:>6.2}% {:>5.1}% {:>7.1} {:>6.2}% {:>6.2} {:>7.1}%",
        percent(matched, best),
        percent(b.heads - a.heads, blocks),
        matched as f64 / (b.runs - a.runs).max(1) as f64,
        percent(b.pages_read - a.pages_read, blocks),
        blocks as f64 / 1e6 / busy.as_secs_f64(),
        percent(b.c0.entries, b.c0.capacity),
    );
}
