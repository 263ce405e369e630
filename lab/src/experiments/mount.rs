//! Remote disks: time to the first read, throughput, and latency under load, for drover and its rivals with the same
//! client over the same link.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use super::client::{Client, connect};
use super::lines::{Line, Net, line};
use super::shows::{By, Far, Near};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::setup::{Lab, Work};
use crate::watch;

const MIB: f64 = (1u64 << 20) as f64;
/// Size of the disk: random data, so that compression gains nothing.
const SIZE: u64 = 512 << 20;
const SMALL_SIZE: u64 = 32 << 20;
/// Number of starts to measure the first block; one of them continues with the sequential read.
const FIRSTS: usize = 3;
/// Request size of the sequential reader: that of kernel readahead.
const REQUEST: usize = 128 << 10;
/// Time limit of one sequential read, of the random reads, and of the writes.
const READ_FOR: Duration = Duration::from_secs(6);
const WRITE_FOR: Duration = Duration::from_secs(4);
/// Pause between two random reads.
const PAUSE: Duration = Duration::from_millis(5);
/// Latency in ms from which a read counts as having waited for the link: cached reads take a tenth of it.
const WAITED_MS: f64 = 1.0;
/// Upper bound on bytes written, and the number of small writes that are flushed.
const WRITTEN: u64 = 64 << 20;
const FLUSHES: usize = 20;

pub const EXPERIMENT: Experiment = Experiment {
    name: "mount",
    title: "Disks that are elsewhere",
    text: "A disk of 512 MiB of noise (or a real one: the image that the row names) at the far end of a link, shown on a Unix socket by NBD at the near \
end, or as a file by FUSE, and read there by one client with one request at a time, the same for everybody. The clock of *first* starts at the command that \
shows it, process and handshakes included, and ends when the first 4 KiB are here; three starts a run. *Sequential* reads go on in requests of 128 KiB for \
6 seconds or to the end, right after that; every byte is compared. *Steady* is over the last two thirds of that time. The *cap* is the link's rate without headers (1448 of 1500 \
bytes). *Over the link* are IP bytes from the far end until the reader ends, *received* what drover's mount says by then; what is pulled beyond the reader is in both. \
*Random* is the wait for single blocks of 4 KiB from the last three quarters, 5 ms apart, in another run, while a second connection reads \
sequentially (and drover pulls), for 6 seconds at most and only until that ends; *steady random* are those of them that began in the last two thirds of that time, when the \
pull runs full (the others are of its start, too), with all that were here already; *waited* took 1 ms or more, as what is here does not. *Write* is up to 64 MiB or 4 seconds of requests of 128 KiB, with one flush at the end, to another new start; \
*flush* is one block written and flushed, 20 times. Rivals: `qemu-storage-daemon` with a qcow2 overlay, copy-on-read, and `qemu-nbd` at the far end; \
`nbdkit nbd` with the cache and readahead filters, the same far end; their writes stay on this side, so only drover's are measured. The least that \
*first* can be is four round trips for drover (TCP, TLS, what is wanted, the read) and three or more for the others.",
    columns: &[
        Column::label("link", "link"),
        Column::label("disk", "disk"),
        Column::label("by", "by"),
        Column::figure("first_ms", "first 4 KiB, ms", 1),
        Column::figure("read_mib_s", "sequential, MiB/s", 1),
        Column::figure("steady_mib_s", "steady, MiB/s", 1),
        Column::figure("cap_mib_s", "cap, MiB/s", 1),
        Column::figure("share_percent", "of the cap, %", 1),
        Column::figure("steady_percent", "steady, %", 1),
        Column::figure("read_mib", "read, MiB", 0),
        Column::figure("link_mib", "over the link, MiB", 0),
        Column::optional("received_mib", "received, MiB", 0),
        Column::figure("random_p50_ms", "random p50, ms", 2),
        Column::figure("random_p99_ms", "random p99, ms", 2),
        Column::figure("random_reads", "random reads", 0),
        Column::optional("random_steady_p99_ms", "steady random p99, ms", 2),
        Column::optional("random_steady_reads", "steady random reads", 0),
        Column::optional("random_steady_waited", "of them waited", 0),
        Column::optional("write_mib_s", "write, MiB/s", 1),
        Column::optional("write_flushed_mib_s", "with its flush, MiB/s", 1),
        Column::optional("flush_ms", "flush p50, ms", 2),
    ],
    cases,
    run,
};

/// What a case measures: the line, the server, and whether the disk has real files rather than random data.
type Setting = (Line, By, bool);

/// Rates in Mbit/s and round-trip times, in order of priority.
const LINES: [(f64, f64); 9] = [
    (1000.0, 40.0),
    (1000.0, 0.0),
    (400.0, 40.0),
    (1000.0, 1.0),
    (1000.0, 5.0),
    (1000.0, 10.0),
    (1000.0, 20.0),
    (400.0, 10.0),
    (100.0, 40.0),
];

fn settings() -> Vec<(Setting, u8)> {
    let mut all = Vec::new();
    for (number, (rate, rtt)) in LINES.into_iter().enumerate() {
        // The file is compared with NBD once; on other lines the difference is the same.
        let rank = |by| u8::from(number > 2 || (by == By::File && number > 0));
        all.extend(By::ALL.map(|by| ((line(rate, rtt, 0.0), by, false), rank(by))));
    }
    let real = [By::Managed, By::Qsd, By::Nbdkit];
    all.extend(real.map(|by| {
        (
            (line(400.0, 40.0, 0.0), by, true),
            u8::from(by != By::Managed),
        )
    }));
    all
}

fn id((line, by, real): Setting) -> String {
    format!(
        "{}-{}{}",
        line.slug(),
        if real { "real-" } else { "" },
        by.slug()
    )
}

fn cases(lab: &Lab) -> Result<Vec<Case>> {
    let all = settings()
        .into_iter()
        .filter(|((line, ..), _)| !lab.small || line.rtt_ms == 40.0);
    let case = |(setting, rank): (Setting, u8)| {
        let (line, by, real) = setting;
        let disk = if real { "a real disk" } else { "a disk" };
        let what = format!("{disk} over {}, by {}", line.describe(), by.name());
        Case {
            rival: by.version(),
            ..Case::new(id(setting), what, rank, &[Need::Link])
        }
    };
    Ok(all.map(case).collect())
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let setting = settings()
        .into_iter()
        .find(|(setting, _)| id(*setting) == case.id);
    let ((line, by, real), _) = setting.context("no such case")?;
    let disk = match (real, lab.image(real_name(lab))) {
        (false, _) => "noise",
        (true, Ok(_)) => real_name(lab),
        (true, Err(_)) => "made, half of it repeats",
    };
    let mut row = Row::new([
        ("link", line.describe()),
        ("disk", disk.to_owned()),
        ("by", by.name().to_owned()),
        ("rtt", line.rtt_ms.to_string()),
        ("rate", line.rate_mbit.to_string()),
    ]);
    if let Some(why) = by.missing() {
        row.verdict = Verdict::Skipped(why);
    } else if let Err(error) = measure(lab, (line, by, real), &mut row) {
        row.verdict = Verdict::failed(&error);
    }
    Ok(vec![row])
}

fn measure(lab: &Lab, (line, by, real): Setting, row: &mut Row) -> Result<()> {
    let work = lab.work("mount")?;
    let image = disk(lab, &work, real)?;
    let net = Net::like(Some(line), 1)?;
    let far = Far::start(&net, &lab.binary()?, &work.join("far"), &image, by)?;
    // Upper bound on throughput: the line's rate without headers.
    let cap = line.rate() * 1448.0 / 1500.0 / MIB;
    let mut figures: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut add = |key, value: Option<f64>| figures.entry(key).or_default().extend(value);
    let (mut waits, mut steady) = (Vec::new(), Vec::new());
    for _ in 0..lab.repeat.max(1) {
        for _ in 1..FIRSTS {
            add("first_ms", Some(first(&far.near(by)?, &image)?));
        }
        let read = read_in_order(&net, &far.near(by)?, &image)?;
        add("first_ms", Some(read.first_ms));
        add("read_mib_s", Some(read.mib_s));
        add("share_percent", Some(100.0 * read.mib_s / cap));
        add("steady_mib_s", Some(read.steady_mib_s));
        add("steady_percent", Some(100.0 * read.steady_mib_s / cap));
        add("read_mib", Some(read.read_mib));
        add("link_mib", read.link_mib);
        add("received_mib", read.received_mib);
        let random = read_at_random(&far.near(by)?, &image)?;
        let mut own: Vec<f64> = random.iter().map(|(_, took)| *took).collect();
        add("random_p50_ms", percentile(&mut own, 50));
        waits.extend(own);
        let end = random.last().map_or(0.0, |(at, took)| at + took);
        let late = random.iter().filter(|(at, _)| *at >= end / 3.0);
        steady.extend(late.map(|(_, took)| *took));
    }
    // Over all runs together, since a single one has too few values for a percentile.
    add("cap_mib_s", Some(cap));
    add("random_reads", Some(waits.len() as f64));
    add("random_p99_ms", percentile(&mut waits, 99));
    add("random_steady_reads", Some(steady.len() as f64));
    let waited = steady.iter().filter(|took| **took >= WAITED_MS).count();
    add("random_steady_waited", Some(waited as f64));
    add("random_steady_p99_ms", percentile(&mut steady, 99));
    // Last, since writes change the remote disk.
    for _ in 0..if by.is_drover() { lab.repeat.max(1) } else { 0 } {
        let [rate, flushed_rate, flush_ms] = write(&far.near(by)?)?;
        add("write_mib_s", Some(rate));
        add("write_flushed_mib_s", Some(flushed_rate));
        add("flush_ms", Some(flush_ms));
    }
    for (key, values) in &figures {
        row.set_all(key, values);
    }
    eprintln!("  load {:.1} at the end", watch::load().unwrap_or(0.0));
    Ok(())
}

/// The disk of a case: random data, or a real disk, or a synthetic one without the library.
pub fn disk(lab: &Lab, work: &Work, real: bool) -> Result<PathBuf> {
    if real && let Ok(image) = lab.image(real_name(lab)) {
        return Ok(image);
    }
    let image = work.join("made.raw");
    make_disk(&image, lab.either(SIZE, SMALL_SIZE), !real)?;
    Ok(image)
}

/// The name of the real disk in the library.
pub fn real_name(lab: &Lab) -> &'static str {
    lab.either("bookworm-plain", "small-one")
}

/// Creates a deterministic file of `size` bytes: random data, or one quarter random data, one quarter zeros and half
/// repetitive data.
pub fn make_disk(path: &Path, size: u64, noise_only: bool) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut noise = blake3::Hasher::new().update(b"noise").finalize_xof();
    let mut piece = vec![0; 1 << 20];
    for number in 0..size.div_ceil(1 << 20) {
        match number % 4 {
            1 if !noise_only => piece.fill(0),
            2 | 3 if !noise_only => {
                let words =
                    format!("line {number} of a log that repeats itself, but for a number\n");
                piece = words.bytes().cycle().take(1 << 20).collect();
            }
            _ => noise.fill(&mut piece),
        }
        let left = size - (number << 20);
        file.write_all(&piece[..left.min(1 << 20) as usize])?;
    }
    let file = file
        .into_inner()
        .map_err(std::io::IntoInnerError::into_error)?;
    file.sync_all()
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Results of a sequential read.
struct InOrder {
    /// From the command to the first block.
    first_ms: f64,
    /// From the first block on, and over the last two thirds of the time.
    mib_s: f64,
    steady_mib_s: f64,
    read_mib: f64,
    /// IP bytes received over the link meanwhile, and what drover reports as received, in MiB.
    link_mib: Option<f64>,
    received_mib: Option<f64>,
}

/// Milliseconds from the command to the first block.
fn first(near: &Near<'_>, image: &Path) -> Result<f64> {
    let started = Instant::now();
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    compared_wait(&mut client, &File::open(image)?, 0)?;
    Ok(started.elapsed().as_secs_f64() * 1e3)
}

/// Reads sequentially from the start until the end of the disk or the time limit.
fn read_in_order(net: &Net, near: &Near<'_>, image: &Path) -> Result<InOrder> {
    let mut original = File::open(image)?;
    let (mut expected, mut buffer) = (vec![0; REQUEST], vec![0; REQUEST]);
    let before = net.bytes();
    let started = Instant::now();
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    client.read(0, &mut buffer[..4096])?;
    let first = started.elapsed();
    let reading = Instant::now();
    let (mut at, mut progress) = (0, Vec::new());
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
    let link_mib = net.since(before).map(|(_, back)| back as f64 / MIB);
    let received_mib = near.received().map(|bytes| bytes as f64 / MIB);
    shown.check()?;
    let (seconds, read) = progress.last().copied().context("nothing was read")?;
    Ok(InOrder {
        first_ms: first.as_secs_f64() * 1e3,
        mib_s: read as f64 / MIB / seconds,
        steady_mib_s: steady_rate(&progress).context("too little was read")?,
        read_mib: read as f64 / MIB,
        link_mib,
        received_mib,
    })
}

/// MiB per second over the last two thirds of the time; `progress` has times and bytes read by then.
pub fn steady_rate(progress: &[(f64, u64)]) -> Option<f64> {
    let &(end, all) = progress.last()?;
    let &(from, before) = progress.iter().find(|(when, _)| *when >= end / 3.0)?;
    (end > from).then(|| (all - before) as f64 / MIB / (end - from))
}

/// Start times and latencies of random reads, in ms, during a sequential read.
fn read_at_random(near: &Near<'_>, image: &Path) -> Result<Vec<(f64, f64)>> {
    let original = File::open(image)?;
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    let mut other = connect(&mut shown)?;
    let size = client.size();
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let waits = std::thread::scope(|scope| {
        let reader = scope.spawn(|| -> Result<()> {
            let mut buffer = vec![0; REQUEST];
            let mut at = 0;
            while at + REQUEST as u64 <= size && !stop.load(Ordering::Relaxed) {
                other.read(at, &mut buffer)?;
                at += REQUEST as u64;
            }
            Ok(())
        });
        // Skip the start of the sequential read.
        std::thread::sleep(Duration::from_millis(100));
        let mut random = fastrand::Rng::with_seed(7);
        let (started, mut waits) = (Instant::now(), Vec::new());
        let outcome = loop {
            let block = random.u64(size / 4096 / 4..size / 4096);
            let at = began.elapsed().as_secs_f64() * 1e3;
            match compared_wait(&mut client, &original, block * 4096) {
                Ok(wait) => waits.push((at, wait)),
                Err(error) => break Err(error),
            }
            // Reads after the end of the sequential read do not count.
            if started.elapsed() > READ_FOR || reader.is_finished() {
                break Ok(waits);
            }
            std::thread::sleep(PAUSE);
        };
        stop.store(true, Ordering::Relaxed);
        reader
            .join()
            .map_err(|_| anyhow!("the sequential reader panicked"))??;
        outcome
    })?;
    shown.check()?;
    Ok(waits)
}

/// Latency in ms of reading one block, which is verified.
fn compared_wait(client: &mut Client, original: &File, at: u64) -> Result<f64> {
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

/// Write throughput in MiB per second, the same including the final flush, and the median latency in ms of flushing one
/// block.
fn write(near: &Near<'_>) -> Result<[f64; 3]> {
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
    let written = at as f64 / MIB;
    Ok([
        written / taken,
        written / flushed,
        percentile(&mut waits, 50).unwrap_or_default(),
    ])
}

/// A percentile; sorts the values.
pub fn percentile(values: &mut [f64], percent: usize) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let at = (values.len() * percent / 100).min(values.len().saturating_sub(1));
    values.get(at).copied()
}
