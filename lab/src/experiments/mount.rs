//! Disks that are elsewhere: how soon they can be read, how fast, and what a read costs beside all else; by drover and by
//! what else there is, with the same client over the same link.

mod client;
mod measure;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, bail};

use self::measure::MIB;
pub(super) use self::measure::{connect, make_disk};
use super::lines::{Line, Net};
use super::pictures::values;
use super::shows::{By, Far};
use super::{Lab, Work};
use crate::bench::{
    About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject, Verdict,
};
use crate::watch;

/// Bytes of the disk: noise, so that nothing is gained by compressing.
const SIZE: u64 = 512 << 20;
const SMALL_SIZE: u64 = 32 << 20;

/// Starts of a run for the first block, one of them with all that follows.
const FIRSTS: usize = 3;

/// The experiment.
pub struct Mount;

static ABOUT: About = About {
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
*first* can be is four round trips for drover (TCP, TLS, what is wanted, the read) and three or more for the others. *Load* is the machine's load average \
before and after.",
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
        Column::figure("load", "load", 1),
    ],
};

const ALL: [By; 6] = [
    By::Managed,
    By::File,
    By::ManagedRemote,
    By::Direct,
    By::Qsd,
    By::Nbdkit,
];

/// What a case measures.
#[derive(Clone, Copy)]
struct Setting {
    line: Line,
    by: By,
    /// A disk with files on it, and not noise.
    real: bool,
}

impl Setting {
    fn id(&self) -> String {
        let real = if self.real { "real-" } else { "" };
        format!("{}-{real}{}", self.line.slug(), self.by.slug())
    }
}

/// The lines on which disks are shown, those that every run should have first: the round trips at 1 Gbit/s, and
/// others for scale.
fn lines() -> Vec<Line> {
    [
        (1000.0, 40.0),
        (1000.0, 0.0),
        (400.0, 40.0),
        (1000.0, 1.0),
        (1000.0, 5.0),
        (1000.0, 10.0),
        (1000.0, 20.0),
        (400.0, 10.0),
        (100.0, 40.0),
    ]
    .map(|(rate_mbit, rtt_ms)| Line {
        rate_mbit,
        rtt_ms,
        loss_percent: 0.0,
    })
    .to_vec()
}

/// Every setting with its rank.
fn settings() -> Vec<(Setting, u8)> {
    let mut all = Vec::new();
    for (number, line) in lines().into_iter().enumerate() {
        for by in ALL {
            // The file is beside NBD once; on other lines it differs by the same.
            let rank = u8::from(number > 2 || (by == By::File && number > 0));
            let real = false;
            all.push((Setting { line, by, real }, rank));
        }
    }
    for by in [By::Managed, By::Qsd, By::Nbdkit] {
        let line = lines()[2];
        let real = true;
        all.push((Setting { line, by, real }, u8::from(by != By::Managed)));
    }
    all
}

impl Experiment for Mount {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let first = lines()[0];
        let mut cases = Vec::new();
        for (setting, rank) in settings() {
            let Setting { line, by, real } = setting;
            if lab.small && !real && line != first {
                continue;
            }
            let disk = if real { "a real disk" } else { "a disk" };
            cases.push(Case {
                id: setting.id(),
                what: format!("{disk} over {}, by {}", line.describe(), by.name()),
                seconds: if lab.small {
                    15.0
                } else {
                    24.0 * lab.repeat.max(1) as f64
                },
                rank,
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
        Ok(cases)
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let setting = settings().into_iter().find(|(s, _)| s.id() == case.id);
        let Some((setting, _)) = setting else {
            bail!("no case {}", case.id);
        };
        let Setting { line, by, real } = setting;
        let disk = match (real, real && lab.image(real_name(lab)).is_ok()) {
            (false, _) => "noise",
            (true, true) => real_name(lab),
            (true, false) => "made, half of it repeats",
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
            return Ok(vec![row]);
        }
        if let Err(error) = measure(lab, &setting, &mut row) {
            row.verdict = Verdict::Failed(format!("{error:#}"));
        }
        Ok(vec![row])
    }

    fn images(&self, lab: &Lab, case: &Case) -> Option<Vec<PathBuf>> {
        let real = case.id.contains("-real-");
        Some(
            real.then(|| lab.image(real_name(lab)).ok())
                .flatten()
                .into_iter()
                .collect(),
        )
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

/// A figure over the round trip at 1 Gbit/s, a line for each who shows.
fn by_rtt(rows: &[Row], name: &str, title: &str, figure: &str, y: Axis) -> Option<Plot> {
    let good: Vec<&Row> = rows
        .iter()
        .filter(|row| row.verdict == Verdict::Good && row.label("rate") == "1000")
        .filter(|row| row.label("disk") == "noise")
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
struct Figures(BTreeMap<&'static str, Vec<f64>>);

impl Figures {
    fn add(&mut self, key: &'static str, value: impl Into<Option<f64>>) {
        self.0.entry(key).or_default().extend(value.into());
    }
}

fn measure(lab: &Lab, case: &Setting, row: &mut Row) -> Result<()> {
    let Setting { line, by, real } = *case;
    let work = lab.work("mount")?;
    let image = disk(lab, &work, real)?;
    let net = Net::like(Some(line), 1)?;
    let drover = lab.binary()?;
    let far = Far::start(&net, &drover, &work.join("far"), &image, by)?;
    let cap = cap_mib_s(line);
    let mut figures = Figures::default();
    figures.add("cap_mib_s", cap);
    figures.add("load", watch::load());
    let (mut waits, mut steady) = (Vec::new(), Vec::new());
    for _ in 0..lab.repeat.max(1) {
        for _ in 1..FIRSTS {
            figures.add("first_ms", measure::first(&far.near(by)?, &image)?);
        }
        let read = measure::read_in_order(&net, &far.near(by)?, &image)?;
        figures.add("first_ms", read.first_ms);
        figures.add("read_mib_s", read.mib_s);
        figures.add("share_percent", 100.0 * read.mib_s / cap);
        figures.add("steady_mib_s", read.steady_mib_s);
        figures.add("steady_percent", 100.0 * read.steady_mib_s / cap);
        figures.add("read_mib", read.read_mib);
        figures.add("link_mib", read.link_mib);
        figures.add("received_mib", read.received_mib);
        let random = measure::read_at_random(&far.near(by)?, &image)?;
        let mut own = random.all();
        figures.add("random_p50_ms", measure::percentile(&mut own, 50));
        waits.extend(own);
        steady.extend(random.steady());
    }
    // Of all runs together, since there are few of a hundred in one.
    figures.add("random_reads", waits.len() as f64);
    figures.add("random_p99_ms", measure::percentile(&mut waits, 99));
    figures.add("random_steady_reads", steady.len() as f64);
    figures.add("random_steady_waited", measure::waited(&steady) as f64);
    figures.add("random_steady_p99_ms", measure::percentile(&mut steady, 99));
    // Last, since they change the far disk.
    for _ in 0..lab.repeat.max(1) {
        if by.is_drover() {
            let written = measure::write(&far.near(by)?)?;
            figures.add("write_mib_s", written.rate);
            figures.add("write_flushed_mib_s", written.flushed_rate);
            figures.add("flush_ms", written.flush_ms);
        }
    }
    figures.add("load", watch::load());
    for (key, values) in &figures.0 {
        row.set_all(key, values);
    }
    Ok(())
}

/// MiB a second of content that fit through a line: its rate without headers.
fn cap_mib_s(line: Line) -> f64 {
    line.rate() * 1448.0 / 1500.0 / MIB
}

/// The disk of a case: noise, or a real one, or what is like one where the library is not.
pub(super) fn disk(lab: &Lab, work: &Work, real: bool) -> Result<PathBuf> {
    if real && let Ok(image) = lab.image(real_name(lab)) {
        return Ok(image);
    }
    let image = work.join("made.raw");
    measure::make_disk(&image, if lab.small { SMALL_SIZE } else { SIZE }, !real)?;
    Ok(image)
}

/// The real disk, by its name in the library.
pub(super) fn real_name(lab: &Lab) -> &'static str {
    if lab.small {
        "small-one"
    } else {
        "bookworm-plain"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_names_of_their_own() {
        let mut ids: Vec<String> = settings().iter().map(|(s, _)| s.id()).collect();
        ids.sort();
        let all = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), all);
        assert!(ids.contains(&"1000mbit-40ms-managed".to_owned()));
        assert!(ids.contains(&"400mbit-40ms-real-managed".to_owned()));
    }

    #[test]
    fn what_every_run_should_have_fits_in_seven_minutes() {
        let first = settings().iter().filter(|(_, rank)| *rank == 0).count();
        assert_eq!(first, 17, "five on three lines, a file, and a real disk");
        assert!(first as f64 * 24.0 < 7.0 * 60.0);
    }

    #[test]
    fn the_cap_is_what_fits_without_headers() {
        assert!((cap_mib_s(lines()[0]) - 115.08).abs() < 0.01);
    }
}
