//! Growth: images of 1 to 64 GiB, sent once to an empty site. Memory should be the same for all of them, and time in
//! proportion to their data.

mod content;
mod statistics;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use self::statistics::{LIBRARY, Statistics};
use super::{Lab, file_name};
use crate::bench::{
    About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject, Verdict,
};
use crate::library::{self, Set};
use crate::same::identical;
use crate::site::{Sender, Site, Where};

const MIB: u64 = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;
/// The case that says what images are made of.
const CONTENT: &str = "content";
/// Sizes in MiB, and how readily they are left out.
const SIZES: &[(u64, u8)] = &[
    (1 << 10, 0),
    (2 << 10, 0),
    (4 << 10, 0),
    (8 << 10, 0),
    (16 << 10, 1),
    (32 << 10, 2),
    (64 << 10, 2),
];
/// The same for the smoke run.
const SMALL: &[(u64, u8)] = &[(96, 0), (192, 0), (384, 0)];
/// Greater ones are sent once only.
const REPEATED_MIB: u64 = 8 << 10;
/// Bytes that stay free on the disk: others use it, too.
const RESERVE: u64 = 2 << 30;
/// The size in which made content is described.
const DESCRIBED: u64 = 2 << 30;

/// The experiment.
pub struct Growth;

static ABOUT: About = About {
    name: "growth",
    title: "Growth: image size against time and memory",
    text: "A first send of one image over loopback to an empty site, image after image twice as large. The images are \
        sparse files made from a seed; what they are made of (zeros, repeats, heads, how well it compresses, how long \
        the runs between holes are) is measured on the image library, as the rows of `growth/content` show. An eighth \
        of each is data, less than real systems have, so that the largest fits on an ordinary disk together with its \
        copy. Memory is the greatest resident set of each end. Time should be in proportion to the data and memory \
        the same for every size: the plots say by how much they are not. What a shared disk takes varies; processor time \
        does not, and the seconds in which the site wrote and synced tell the rest.",
    columns: &[
        Column::label("image", "image"),
        Column::optional("size_gib", "size, GiB", 2),
        Column::optional("data_gib", "data, GiB", 2),
        Column::optional("seconds", "seconds", 2),
        Column::optional("seconds_per_gib", "seconds per GiB of data", 2),
        Column::optional("cpu_per_gib", "CPU s per GiB of data", 2),
        Column::optional("disk_seconds", "site writes and syncs, s", 2),
        Column::optional("sender_mib", "sender, peak MiB", 1),
        Column::optional("site_mib", "site, peak MiB", 1),
        Column::optional("cores", "cores used", 2),
        Column::optional("index_mib", "index, MiB", 1),
        Column::optional("data_percent", "data, %", 1),
        Column::optional("run_kib", "between holes, KiB", 0),
        Column::optional("zero_percent", "zeros outside holes, %", 2),
        Column::optional("repeat_percent", "repeats, %", 2),
        Column::optional("strong_percent", "strong heads, %", 2),
        Column::optional("weak_percent", "weak heads, %", 2),
        Column::optional("dense_percent", "incompressible, %", 1),
        Column::optional("shrinks_times", "the rest by zstd -3, times", 2),
    ],
};

/// Figures that a row of a send has.
const SENT: &[&str] = &[
    "size_gib",
    "data_gib",
    "seconds",
    "seconds_per_gib",
    "sender_mib",
    "site_mib",
];

impl Experiment for Growth {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let sizes = if lab.small { SMALL } else { SIZES };
        let mut cases: Vec<Case> = sizes
            .iter()
            .map(|&(mib, rank)| Case {
                id: id_of(mib),
                what: format!("an image of {} sent to an empty site", name_of(mib)),
                // Made, sent and compared.
                seconds: 2.0 + repeats(lab, mib) as f64 * (mib as f64 / 1024.0) * 1.5,
                rank,
                subject: Subject::Drover,
                needs: &[],
            })
            .collect();
        cases.push(Case {
            id: CONTENT.to_owned(),
            what: "what images are made of, real and made".to_owned(),
            seconds: if lab.small { 5.0 } else { 150.0 },
            rank: 1,
            subject: Subject::Images,
            needs: &[Need::Library],
        });
        Ok(cases)
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        if case.id == CONTENT {
            return contents(lab);
        }
        let mib = SIZES
            .iter()
            .chain(SMALL)
            .map(|(mib, _)| *mib)
            .find(|mib| id_of(*mib) == case.id)
            .context("no such size")?;
        Ok(vec![size(lab, mib)?])
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let mut sent: Vec<&Row> = rows
            .iter()
            .filter(|row| row.verdict == Verdict::Good)
            .filter(|row| SENT.iter().all(|key| row.value(key).is_some()))
            .collect();
        sent.sort_by(|a, b| {
            a.value("size_gib")
                .partial_cmp(&b.value("size_gib"))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        if sent.len() < 2 {
            return Vec::new();
        }
        vec![time(&sent), memory(&sent)]
    }

    fn images(&self, lab: &Lab, case: &Case) -> Option<Vec<PathBuf>> {
        // What is made needs room of its own, which is looked for when it is made.
        (case.id == CONTENT)
            .then(|| built(lab).unwrap_or_default())
            .or(Some(Vec::new()))
    }
}

fn id_of(mib: u64) -> String {
    match mib {
        mib if mib < 1024 => format!("{mib}-mib"),
        mib => format!("{}-gib", mib / 1024),
    }
}

fn name_of(mib: u64) -> String {
    match mib {
        mib if mib < 1024 => format!("{mib} MiB"),
        mib => format!("{} GiB", mib / 1024),
    }
}

fn repeats(lab: &Lab, mib: u64) -> usize {
    if mib > REPEATED_MIB {
        1
    } else {
        lab.repeat.max(1)
    }
}

/// Makes an image and sends it to one empty site after the other.
fn size(lab: &Lab, mib: u64) -> Result<Row> {
    let mut row = Row::new([("image", name_of(mib))]);
    let work = lab.work("growth")?;
    let bytes = mib * MIB;
    if let Some(why) = no_room(&lab.common.out, bytes)? {
        eprintln!("SKIP growth/{}: {why}", id_of(mib));
        row.verdict = Verdict::Skipped(why);
        return Ok(row);
    }
    let image = work.join("growth.raw");
    let data = content::write(&image, bytes, mib, &LIBRARY)? as f64 / GIB;
    let drover = lab.binary()?;
    let mut seen = Seen::default();
    for round in 0..repeats(lab, mib) {
        // The image is read from memory as far as it fits there, and nobody pays for what another wrote.
        identical(&image, &image)?;
        rustix::fs::sync();
        let dir = work.join(&format!("round-{round}"));
        if !once(&drover, &image, &dir, &mut seen)? {
            row.verdict = Verdict::Wrong(format!("{}: not as it was", name_of(mib)));
        }
        std::fs::remove_dir_all(&dir)?;
    }
    row.set("size_gib", bytes as f64 / GIB);
    row.set("data_gib", data);
    row.set_all("seconds", &seen.seconds);
    let per_gib: Vec<f64> = seen.seconds.iter().map(|s| s / data).collect();
    row.set_all("seconds_per_gib", &per_gib);
    let cpu: Vec<f64> = seen.cpu.iter().map(|s| s / data).collect();
    row.set_all("cpu_per_gib", &cpu);
    row.set_all("disk_seconds", &seen.disk);
    row.set_all("sender_mib", &seen.sender);
    row.set_all("site_mib", &seen.site);
    let cores: Vec<f64> = seen
        .cpu
        .iter()
        .zip(&seen.seconds)
        .map(|(c, s)| c / s)
        .collect();
    row.set_all("cores", &cores);
    row.set_all("index_mib", &seen.index);
    Ok(row)
}

/// What was seen of each send.
#[derive(Default)]
struct Seen {
    seconds: Vec<f64>,
    sender: Vec<f64>,
    site: Vec<f64>,
    cpu: Vec<f64>,
    disk: Vec<f64>,
    index: Vec<f64>,
}

/// Sends the image to an empty site; whether it arrived as it was.
fn once(drover: &Path, image: &Path, dir: &Path, seen: &mut Seen) -> Result<bool> {
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let site = Site::start(drover, &dir.join("site"), Where::Loopback)?;
    let sender = Sender::pair(drover, &dir.join("sender"), Where::Loopback, &site)?;
    let before = site.cost();
    let outcome = sender.send(image, &[])?;
    let after = site.cost();
    seen.seconds.push(outcome.seconds);
    seen.sender.push(mib(outcome.cost.peak_rss_bytes));
    seen.site.push(mib(after.peak_rss_bytes));
    let cpu = outcome.cost.cpu_seconds + after.cpu_seconds - before.cpu_seconds;
    seen.cpu.push(cpu);
    let there = outcome
        .images
        .first()
        .and_then(|sent| sent.stages.get("destination"));
    if let Some(stages) = there {
        let busy = |stage: &str| stages.get(stage).map_or(0.0, |s| s.busy_seconds);
        seen.disk.push(busy("write") + busy("sync"));
    }
    seen.index.push(mib(site.index_bytes()));
    identical(image, &site.image(&file_name(image)))
}

/// Why an image of that size and its copy do not fit.
fn no_room(out: &Path, bytes: u64) -> Result<Option<String>> {
    let stat = rustix::fs::statvfs(out)?;
    let free = stat.f_bavail * stat.f_frsize;
    let data = bytes as f64 * LIBRARY.data_share / (1.0 - LIBRARY.zero_share);
    let needed = (2.2 * data) as u64 + RESERVE;
    Ok((free < needed).then(|| {
        let (free, needed) = (free / MIB, needed / MIB);
        format!("{free} MiB free on the disk, and {needed} needed")
    }))
}

fn built(lab: &Lab) -> Result<Vec<PathBuf>> {
    let set = if lab.small { Set::Small } else { Set::Full };
    Ok(library::images(&lab.common.dir, set)?
        .into_iter()
        .filter(|entry| entry.built && (entry.in_order || lab.small && entry.kind == "host"))
        .map(|entry| entry.path)
        .collect())
}

/// What the library's images are made of, their means, and what an image that is made is made of.
fn contents(lab: &Lab) -> Result<Vec<Row>> {
    let mut all = Vec::new();
    let mut rows = Vec::new();
    for image in built(lab)? {
        let statistics = Statistics::of(&image)?;
        rows.push(described(&file_name(&image), &statistics));
        all.push(statistics);
    }
    if all.is_empty() {
        let mut row = Row::new([("image", "library".to_owned())]);
        row.verdict = Verdict::Skipped("no image is built: lab library".to_owned());
        return Ok(vec![row]);
    }
    rows.push(described("mean", &Statistics::mean(&all)));
    let work = lab.work("growth-content")?;
    let made = work.join("made.raw");
    let size = if lab.small { DESCRIBED / 16 } else { DESCRIBED };
    content::write(&made, size, 1, &LIBRARY)?;
    rows.push(described("made", &Statistics::of(&made)?));
    Ok(rows)
}

fn described(image: &str, of: &Statistics) -> Row {
    Row::new([("image", image.to_owned())])
        .with("data_percent", of.data_share * 100.0)
        .with("run_kib", of.run_blocks * 4.0)
        .with("zero_percent", of.zero_share * 100.0)
        .with("repeat_percent", of.repeat_share * 100.0)
        .with("strong_percent", of.strong_share * 100.0)
        .with("weak_percent", of.weak_share * 100.0)
        .with("dense_percent", of.dense_share * 100.0)
        .with("shrinks_times", of.shrinks_times)
}

/// A straight line through points, by least squares.
struct Line {
    at_zero: f64,
    slope: f64,
}

impl Line {
    fn through(points: &[(f64, f64)]) -> Self {
        let n = points.len() as f64;
        let mean = |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
        let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
        let spread = mean(&|p| (p.0 - x) * (p.0 - x));
        let slope = match spread {
            spread if spread > 0.0 => mean(&|p| (p.0 - x) * (p.1 - y)) / spread,
            _ => 0.0,
        };
        Self {
            at_zero: y - slope * x,
            slope,
        }
    }

    fn at(&self, x: f64) -> f64 {
        self.at_zero + self.slope * x
    }
}

fn points(rows: &[&Row], x: &str, y: &str) -> Vec<(f64, f64)> {
    rows.iter()
        .filter_map(|row| Some((row.value(x)?, row.value(y)?)))
        .collect()
}

fn series(rows: &[&Row], key: &str) -> Vec<Point> {
    rows.iter()
        .filter_map(|row| {
            let spread = row.figures.get(key)?.spread;
            Some(Point {
                x: row.value("size_gib")?,
                y: spread.median,
                range: Some((spread.min, spread.max)),
            })
        })
        .collect()
}

fn time(rows: &[&Row]) -> Plot {
    let seconds = points(rows, "size_gib", "seconds");
    let line = Line::through(&seconds);
    let off = seconds
        .iter()
        .map(|(x, y)| (y / line.at(*x) - 1.0).abs())
        .fold(0.0, f64::max);
    let fit = seconds.iter().map(|(x, _)| Point {
        x: *x,
        y: line.at(*x),
        range: None,
    });
    let name = format!(
        "{:.2} s + {:.2} s per GiB, off by {:.0} % at most",
        line.at_zero,
        line.slope,
        off * 100.0
    );
    Plot {
        name: "time".to_owned(),
        title: "A first send, image size against time".to_owned(),
        x: Axis::log("image, GiB (an eighth is data)"),
        y: Axis::log("seconds"),
        kind: Kind::Lines(vec![
            ("drover".to_owned(), series(rows, "seconds")),
            (name, fit.collect()),
        ]),
    }
}

fn memory(rows: &[&Row]) -> Plot {
    let grows = |key: &str| Line::through(&points(rows, "size_gib", key)).slope;
    let name = |end: &str, key: &str| format!("{end}, {:+.2} MiB per GiB of image", grows(key));
    Plot {
        name: "memory".to_owned(),
        title: "A first send, image size against peak memory".to_owned(),
        x: Axis::log("image, GiB (an eighth is data)"),
        y: Axis::linear("peak resident MiB"),
        kind: Kind::Lines(vec![
            (name("sender", "sender_mib"), series(rows, "sender_mib")),
            (name("site", "site_mib"), series(rows, "site_mib")),
        ]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::stand_in;
    use super::*;

    fn row(gib: f64, seconds: f64) -> Row {
        Row::new([("image", format!("{gib} GiB"))])
            .with("size_gib", gib)
            .with("data_gib", gib / 8.0)
            .with("seconds", seconds)
            .with("seconds_per_gib", seconds / gib * 8.0)
            .with("sender_mib", 40.0)
            .with("site_mib", 50.0 + 2.0 * gib)
    }

    #[test]
    fn a_line_goes_through_its_points() {
        let line = Line::through(&[(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)]);
        assert!((line.at_zero - 1.0).abs() < 1e-9 && (line.slope - 2.0).abs() < 1e-9);
        assert_eq!(Line::through(&[(1.0, 3.0)]).at(7.0), 3.0);
    }

    #[test]
    fn plots_say_how_far_from_a_line_and_how_much_memory_grows() {
        let mut failed = row(16.0, 1.0);
        failed.verdict = Verdict::Failed("disk full".to_owned());
        let rows = [row(2.0, 5.0), row(1.0, 3.0), row(4.0, 9.0), failed];
        let plots = Growth.plots(&rows);
        let names = |plot: &Plot| match &plot.kind {
            Kind::Lines(lines) => lines.iter().map(|l| l.0.clone()).collect::<Vec<_>>(),
            Kind::Bars { .. } => Vec::new(),
        };
        assert_eq!(
            names(&plots[0])[1],
            "1.00 s + 2.00 s per GiB, off by 0 % at most"
        );
        assert!(names(&plots[1])[0].contains("+0.00"));
        assert!(names(&plots[1])[1].contains("+2.00"));
        let Kind::Lines(lines) = &plots[0].kind else {
            panic!("{plots:?}")
        };
        let x: Vec<f64> = lines[0].1.iter().map(|p| p.x).collect();
        assert_eq!(x, [1.0, 2.0, 4.0]);
        assert!(Growth.plots(&rows[..1]).is_empty());
    }

    #[test]
    fn a_made_image_is_sent_and_a_wrong_copy_is_noticed() {
        let run = |damage: &str| {
            let dir = tempfile::tempdir().unwrap();
            let mut lab = stand_in::lab(dir.path(), damage);
            lab.small = true;
            std::fs::create_dir(dir.path().join("out")).unwrap();
            let case = Growth.cases(&lab).unwrap().remove(0);
            let row = Growth.run(&lab, &case).unwrap().remove(0);
            // Neither the image nor its copy stays.
            assert_eq!(
                std::fs::read_dir(dir.path().join("out")).unwrap().count(),
                0
            );
            row
        };
        let good = run("");
        assert_eq!(good.verdict, Verdict::Good);
        assert_eq!(good.figures["seconds"].runs, 2);
        assert!(good.value("size_gib").unwrap() > good.value("data_gib").unwrap() * 4.0);
        let wrong = run(r#"printf x | dd of="$to" bs=1 seek=70000 conv=notrunc 2>/dev/null"#);
        assert!(matches!(wrong.verdict, Verdict::Wrong(_)), "{wrong:?}");
    }

    #[test]
    fn an_image_that_does_not_fit_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let why = no_room(dir.path(), 1 << 60).unwrap().unwrap();
        assert!(why.contains("MiB free"), "{why}");
    }
}
