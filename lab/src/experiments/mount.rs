//! Disks that are elsewhere: how soon they can be read, how fast, and what a read costs beside all else; by drover and by
//! what else there is, with the same client over the same link.

mod client;

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::client::Client;
use super::Lab;
use super::lines::{Line, Net};
use super::pictures::values;
use super::shows::{By, Far, NAME, Near, Shown};
use crate::bench::{
    About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject, Verdict,
};

const MIB: f64 = (1u64 << 20) as f64;

/// Bytes of the disk: noise, so that nothing is gained by compressing.
const SIZE: u64 = 512 << 20;
const SMALL_SIZE: u64 = 32 << 20;

/// A request of the sequential reader: what a kernel asks for when it reads ahead.
const REQUEST: usize = 128 << 10;

/// The longest that one sequential read goes on.
const READ_FOR: Duration = Duration::from_secs(12);

/// Random reads in a run, and the pause between two.
const RANDOM_READS: usize = 200;
const PAUSE: Duration = Duration::from_millis(10);

/// What is written, and how many times a small write is flushed.
const WRITTEN: u64 = 64 << 20;
const FLUSHES: usize = 20;

/// How long a disk may take to be there, and a request to be answered.
const PATIENCE: Duration = Duration::from_secs(60);

/// The experiment.
pub struct Mount;

static ABOUT: About = About {
    name: "mount",
    title: "Disks that are elsewhere",
    text: "A disk of 512 MiB of noise at the far end of a link, shown on a Unix socket by NBD at the near end, and read there \
by one client with one request at a time, the same for everybody. The clock of *first* starts at the command that shows it, \
process and handshakes included, and ends when the first 4 KiB are here. *Sequential* reads go on in requests of 128 KiB for 12 \
seconds or to the end, right after that; every byte is compared. *Random* is the wait for 200 single blocks of 4 KiB from the \
last three quarters, 10 ms apart, in another run, while a second connection reads sequentially (and drover pulls). *Write* is \
64 MiB in requests of 128 KiB, with one flush at the end, to another new start; *flush* is one block written and flushed, 20 times. The \
share is of the link's rate without headers (1448 of 1500 bytes). Rivals: `qemu-storage-daemon` with a qcow2 overlay, \
copy-on-read, and `qemu-nbd` at the far end; `nbdkit nbd` with the cache and readahead filters, the same far end; their \
writes stay on this side, so only drover's are measured. The least that *first* can be is four round trips for drover (TCP, TLS, \
what is wanted, the read) and three or more for the others.",
    columns: &[
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure("first_ms", "first 4 KiB, ms", 1),
        Column::figure("read_mib_s", "sequential, MiB/s", 1),
        Column::figure("share_percent", "of the link, %", 1),
        Column::figure("random_p50_ms", "random p50, ms", 2),
        Column::figure("random_p99_ms", "random p99, ms", 2),
        Column::optional("write_mib_s", "write, MiB/s", 1),
        Column::optional("write_flushed_mib_s", "with its flush, MiB/s", 1),
        Column::optional("flush_ms", "flush p50, ms", 2),
    ],
};

const ALL: [By; 5] = [
    By::Managed,
    By::ManagedRemote,
    By::Direct,
    By::Qsd,
    By::Nbdkit,
];

/// The lines on which disks are shown: the round trips at 1 Gbit/s, and two for scale.
fn lines() -> Vec<Line> {
    let line = |rate_mbit, rtt_ms| Line {
        rate_mbit,
        rtt_ms,
        loss_percent: 0.0,
    };
    let mut all = vec![line(1000.0, 40.0)];
    all.extend([0.0, 1.0, 5.0, 10.0, 20.0].map(|rtt| line(1000.0, rtt)));
    all.extend([line(400.0, 40.0), line(400.0, 10.0), line(100.0, 40.0)]);
    all
}

impl Experiment for Mount {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for (number, line) in lines().into_iter().enumerate() {
            for by in ALL {
                if lab.small && (number > 0 || !by.is_drover()) {
                    continue;
                }
                cases.push(Case {
                    id: id(line, by),
                    what: format!("a disk over {}, by {}", line.describe(), by.name()),
                    seconds: if lab.small { 15.0 } else { 45.0 },
                    rank: u8::from(number > 0) + u8::from(by == By::ManagedRemote),
                    subject: match by.is_drover() {
                        true => Subject::Drover,
                        false => Subject::Rival(format!(
                            "{} {}",
                            by.slug(),
                            by.version().unwrap_or_default()
                        )),
                    },
                    needs: &[Need::Link],
                });
            }
        }
        Ok(cases)
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let Some((line, by)) = lines()
            .into_iter()
            .flat_map(|line| ALL.map(|by| (line, by)))
            .find(|(line, by)| id(*line, *by) == case.id)
        else {
            bail!("no case {}", case.id);
        };
        let mut row = Row::new([
            ("link", line.describe()),
            ("by", by.name().to_owned()),
            ("rtt", line.rtt_ms.to_string()),
            ("rate", line.rate_mbit.to_string()),
        ]);
        if let Some(why) = by.missing() {
            row.verdict = Verdict::Skipped(why);
            return Ok(vec![row]);
        }
        if let Err(error) = measure(lab, line, by, &mut row) {
            row.verdict = Verdict::Failed(format!("{error:#}"));
        }
        Ok(vec![row])
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let plot = |name: &str, title: &str, figure: &str, axis: Axis| {
            by_rtt(rows, name, title, figure, axis)
        };
        [
            plot(
                "mount-first",
                "Until the first 4 KiB of a far disk are here, 1 Gbit/s",
                "first_ms",
                Axis::log("ms from the command"),
            ),
            plot(
                "mount-read",
                "Reading a far disk in order, 1 Gbit/s",
                "read_mib_s",
                Axis::linear("MiB a second"),
            ),
            plot(
                "mount-random",
                "A random 4 KiB beside a sequential reader, 99th percentile, 1 Gbit/s",
                "random_p99_ms",
                Axis::log("ms"),
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

fn id(line: Line, by: By) -> String {
    format!("{}-{}", line.slug(), by.slug())
}

/// A figure over the round trip at 1 Gbit/s, a line for each who shows.
fn by_rtt(rows: &[Row], name: &str, title: &str, figure: &str, y: Axis) -> Option<Plot> {
    let good: Vec<&Row> = rows
        .iter()
        .filter(|row| row.verdict == Verdict::Good && row.label("rate") == "1000")
        .collect();
    let series: Vec<(String, Vec<Point>)> = values(&good, "by")
        .into_iter()
        .map(|by| {
            let mut points: Vec<Point> = good
                .iter()
                .filter(|row| row.label("by") == by)
                .filter_map(|row| {
                    let figure = row.figures.get(figure)?;
                    Some(Point {
                        x: row.label("rtt").parse().ok()?,
                        y: figure.spread.median,
                        range: (figure.runs > 1).then_some((figure.spread.min, figure.spread.max)),
                    })
                })
                .collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            (by, points)
        })
        .collect();
    (!series.is_empty()).then(|| Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        x: Axis::linear("round trip, ms"),
        y,
        kind: Kind::Lines(series),
    })
}

/// What was measured, a value a run.
#[derive(Default)]
struct Figures {
    first_ms: Vec<f64>,
    read_mib_s: Vec<f64>,
    random_p50_ms: Vec<f64>,
    random_p99_ms: Vec<f64>,
    write_mib_s: Vec<f64>,
    write_flushed_mib_s: Vec<f64>,
    flush_ms: Vec<f64>,
}

fn measure(lab: &Lab, line: Line, by: By, row: &mut Row) -> Result<()> {
    let work = lab.work("mount")?;
    let image = work.join("noise.raw");
    make_noise(&image, if lab.small { SMALL_SIZE } else { SIZE })?;
    let net = Net::like(Some(line), 1)?;
    let drover = lab.binary()?;
    let far = Far::start(&net, &drover, &work.join("far"), &image, by)?;
    let mut figures = Figures::default();
    for _ in 0..lab.repeat.max(1) {
        let (first, rate) = read_in_order(&far.near(by)?, &image)?;
        figures.first_ms.push(first * 1e3);
        figures.read_mib_s.push(rate);
        let (p50, p99) = read_at_random(&far.near(by)?, &image)?;
        figures.random_p50_ms.push(p50);
        figures.random_p99_ms.push(p99);
    }
    // Last, since they change the far disk.
    for _ in 0..lab.repeat.max(1) {
        if by.is_drover() {
            let written = write(&far.near(by)?)?;
            figures.write_mib_s.push(written.rate);
            figures.write_flushed_mib_s.push(written.flushed_rate);
            figures.flush_ms.push(written.flush_ms);
        }
    }
    let share = |rate: &f64| 100.0 * rate * MIB / (line.rate() * 1448.0 / 1500.0);
    let shares: Vec<f64> = figures.read_mib_s.iter().map(share).collect();
    row.set_all("first_ms", &figures.first_ms);
    row.set_all("read_mib_s", &figures.read_mib_s);
    row.set_all("share_percent", &shares);
    row.set_all("random_p50_ms", &figures.random_p50_ms);
    row.set_all("random_p99_ms", &figures.random_p99_ms);
    row.set_all("write_mib_s", &figures.write_mib_s);
    row.set_all("write_flushed_mib_s", &figures.write_flushed_mib_s);
    row.set_all("flush_ms", &figures.flush_ms);
    Ok(())
}

/// A file of noise, the same each time.
fn make_noise(path: &Path, size: u64) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut noise = blake3::Hasher::new().update(b"noise").finalize_xof();
    let mut piece = vec![0; 1 << 20];
    let mut left = size;
    while left > 0 {
        noise.fill(&mut piece);
        let take = left.min(piece.len() as u64);
        file.write_all(&piece[..take as usize])?;
        left -= take;
    }
    file.into_inner()
        .map_err(|e| e.into_error())?
        .sync_all()
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Seconds until the first block is here, and MiB a second from there on.
fn read_in_order(near: &Near<'_>, image: &Path) -> Result<(f64, f64)> {
    let mut original = File::open(image)?;
    let mut expected = vec![0; REQUEST];
    let mut buffer = vec![0; REQUEST];
    let started = Instant::now();
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    client.read(0, &mut buffer[..4096])?;
    let first = started.elapsed();
    let reading = Instant::now();
    let mut at = 0;
    while at < client.size() && reading.elapsed() < READ_FOR {
        let take = (client.size() - at).min(REQUEST as u64) as usize;
        client.read(at, &mut buffer[..take])?;
        original.read_exact(&mut expected[..take])?;
        if buffer[..take] != expected[..take] {
            bail!("what was read at {at} is not what the image has");
        }
        at += take as u64;
    }
    let rate = at as f64 / MIB / reading.elapsed().as_secs_f64();
    shown.check()?;
    Ok((first.as_secs_f64(), rate))
}

/// A client of what is shown, as soon as it can be read.
pub(super) fn connect(shown: &mut Shown) -> Result<Client> {
    match Client::connect(shown.socket(), NAME, PATIENCE) {
        Ok(client) => Ok(client),
        Err(e) => {
            // Its own words say more, where it has some.
            shown.check()?;
            Err(e)
        }
    }
}

/// The wait for single blocks, p50 and p99 in ms, while somebody else reads in order.
fn read_at_random(near: &Near<'_>, image: &Path) -> Result<(f64, f64)> {
    let original = File::open(image)?;
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    let mut other = connect(&mut shown)?;
    let size = client.size();
    let stop = AtomicBool::new(false);
    let waits = std::thread::scope(|scope| -> Result<Vec<f64>> {
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
        std::thread::sleep(Duration::from_millis(300));
        let mut random = fastrand::Rng::with_seed(7);
        let waits = (0..RANDOM_READS)
            .map(|_| {
                let block = random.u64(size / 4096 / 4..size / 4096);
                let wait = one_wait(&mut client, &original, block * 4096);
                std::thread::sleep(PAUSE);
                wait
            })
            .collect::<Result<Vec<f64>>>();
        stop.store(true, Ordering::Relaxed);
        reader
            .join()
            .map_err(|_| anyhow::anyhow!("the sequential reader panicked"))??;
        waits
    })?;
    shown.check()?;
    let mut sorted = waits;
    sorted.sort_by(f64::total_cmp);
    Ok((sorted[sorted.len() / 2], sorted[sorted.len() * 99 / 100]))
}

fn one_wait(client: &mut Client, original: &File, at: u64) -> Result<f64> {
    use std::os::unix::fs::FileExt;
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

struct Written {
    rate: f64,
    flushed_rate: f64,
    flush_ms: f64,
}

/// How fast it takes writes, and how long a flush of one block is.
fn write(near: &Near<'_>) -> Result<Written> {
    // Nothing of the last run must be in the way: the near home is new, and so is its right to write.
    let mut shown = near.start()?;
    let mut client = connect(&mut shown)?;
    let mut data = vec![0; REQUEST];
    let mut random = fastrand::Rng::with_seed(11);
    let total = WRITTEN.min(client.size());
    let started = Instant::now();
    let mut at = 0;
    while at + REQUEST as u64 <= total {
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
    waits.sort_by(f64::total_cmp);
    Ok(Written {
        rate: at as f64 / MIB / taken,
        flushed_rate: at as f64 / MIB / flushed,
        flush_ms: waits[waits.len() / 2],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn cases_have_names_of_their_own() {
        let mut ids: Vec<String> = lines()
            .into_iter()
            .flat_map(|line| ALL.map(|by| id(line, by)))
            .collect();
        ids.sort();
        let all = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), all);
        assert!(ids.contains(&"1000mbit-40ms-managed".to_owned()));
    }

    #[test]
    fn noise_is_the_same_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = ["a", "b"].iter().map(|n| dir.path().join(n)).collect();
        for path in &paths {
            make_noise(path, (1 << 20) + 4096).unwrap();
        }
        let [a, b] = [0, 1].map(|i| std::fs::read(&paths[i]).unwrap());
        assert!(a == b && a.len() == (1 << 20) + 4096);
    }
}
