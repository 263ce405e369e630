//! Cache sizes: from a sixteenth of the default to four times it, against what exact deduplication matches
//! (teleportation §2.10, §3.8).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use drover_index::{ImageId, Matcher, MatcherConfig, MatcherStats};
use drover_storage::HostDirectory;

use super::Lab;
use super::matching::{self, Image, cpu_time, percent};
use super::synthetic::{self, Model, Regrown, Statistics, UNIT};
use crate::bench::{About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject};

/// The experiment.
pub struct Caches;

static ABOUT: About = About {
    name: "caches",
    title: "Cache sizes",
    text: "\
The share of exact deduplication's matches that is found with caches of a sixteenth of the default size (32 MiB: 12 for \
C0, 4 for C1, 16 for C2) to four times it, by drover's matcher and by the paper's. *library*: the images of the library in order, \
which do not fill the default caches. *pressed*: the same images with synthetic ones between them, 32 images in all, as many \
as cache entries can tell apart, so large that their new heads would fill C0 and C1 of half the default size exactly once. The synthetic \
images are digests drawn, with a fixed seed, from the library's statistics: the lengths of shared and of new stretches, how often a shared one \
begins with a head, and how heads lie; what they share they share with any earlier part of any synthetic image. \
*C0*, *C1*, *C2*: the share of cache hits in each; a hit in C0 may be an anchor, a block that is no head.",
    columns: &[
        Column::label("volume", "images"),
        Column::label("mode", "matcher"),
        Column::label("size", "size"),
        Column::figure("factor", "times default", 4),
        Column::figure("cache_mib", "caches MiB", 1),
        Column::figure("data_gib", "data GiB", 1),
        Column::figure("share_percent", "of exact %", 2),
        Column::figure("library_percent", "in the library %", 2),
        Column::figure("c0_percent", "C0 %", 1),
        Column::figure("c1_percent", "C1 %", 1),
        Column::figure("c2_percent", "C2 %", 1),
        Column::figure("evictions", "evictions", 0),
        Column::figure("read_percent", "read ampl. %", 2),
        Column::figure("blocks_per_second", "blocks/s", 0),
    ],
};

/// Times the default, as it is called and in sixteenths.
const SIZES: [(&str, usize); 7] = [
    ("1/16", 1),
    ("1/8", 2),
    ("1/4", 4),
    ("1/2", 8),
    ("1", 16),
    ("2", 32),
    ("4", 64),
];

/// Images that cache entries can tell apart.
const IMAGES: usize = 32;
const SEED: u64 = 0x5eed_cac4;
/// The small run is so much smaller, volume and caches alike.
const SMALL: usize = 512;
/// What a pressed run takes about.
const PRESSED_SECONDS: f64 = 8.0;

impl Experiment for Caches {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let load = matching::seconds_to_load(&matching::images(lab)?);
        let case = |id: &str, what: &str, walks: f64, rank| Case {
            id: id.to_owned(),
            what: what.to_owned(),
            seconds: load + if lab.small { 1.0 } else { walks },
            rank,
            subject: Subject::Drover,
            needs: &[Need::Library],
        };
        let walks = SIZES.len() as f64;
        Ok(vec![
            case(
                "library",
                "the library through seven sizes of cache",
                walks,
                0,
            ),
            case(
                "pressed-drover",
                "the library among synthetic images, seven sizes of cache, drover's matcher",
                walks * PRESSED_SECONDS,
                0,
            ),
            case(
                "pressed-paper",
                "the same, the paper's matcher",
                walks * PRESSED_SECONDS,
                1,
            ),
        ])
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let images = matching::load_all(&matching::images(lab)?)?;
        let settings: &[(&str, &str)] = match case.id.as_str() {
            "library" => &[("library", "drover"), ("library", "paper")],
            "pressed-drover" => &[("pressed", "drover")],
            "pressed-paper" => &[("pressed", "paper")],
            other => bail!("no such case: {other}"),
        };
        let mut rows = Vec::new();
        for &(volume, mode) in settings {
            for (at, (size, sixteenths)) in SIZES.into_iter().enumerate() {
                // Two sizes tell that it works.
                if !lab.small || at % 3 == 1 {
                    let row = Row::new([
                        ("volume", volume.to_owned()),
                        ("mode", mode.to_owned()),
                        ("size", size.to_owned()),
                    ]);
                    rows.push(walk(lab, &images, row, sixteenths)?);
                }
            }
        }
        Ok(rows)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let mut lines: BTreeMap<String, Vec<Point>> = BTreeMap::new();
        for row in rows {
            let points = lines
                .entry(format!("{}, {}", row.label("volume"), row.label("mode")))
                .or_default();
            if let (Some(x), Some(y)) = (row.value("factor"), row.value("share_percent")) {
                points.push(Point { x, y, range: None });
            }
        }
        for points in lines.values_mut() {
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
        }
        let shown: Vec<&Row> = rows
            .iter()
            .filter(|r| r.label("volume") == "pressed" && r.label("mode") == "drover")
            .collect();
        let hits = |name: &str, key: &str| {
            (
                name.to_owned(),
                shown.iter().map(|r| r.value(key)).collect(),
            )
        };
        vec![
            Plot {
                name: "matches".to_owned(),
                title: "Matches found against cache size".to_owned(),
                x: Axis::log("times the default size (32 MiB)"),
                y: Axis::linear("% of exact matches"),
                kind: Kind::Lines(lines.into_iter().collect()),
            },
            Plot {
                name: "hits".to_owned(),
                title: "Which cache finds them: pressed, drover".to_owned(),
                x: Axis::linear("times the default size"),
                y: Axis::linear("% of cache hits"),
                kind: Kind::Bars {
                    groups: shown.iter().map(|r| r.label("size").to_owned()).collect(),
                    series: vec![
                        hits("C0", "c0_percent"),
                        hits("C1", "c1_percent"),
                        hits("C2", "c2_percent"),
                    ],
                    stacked: true,
                },
            },
        ]
    }
}

/// Units of an image, so that the new heads of so many images fill C0 and C1 of half the size.
fn units_to_fill(statistics: &Statistics, config: &MatcherConfig, images: usize) -> u64 {
    let entries = (config.c0_bytes + config.c1_bytes) as f64 / 4.0 / 2.0;
    let new_heads = statistics.heads() * (1.0 - statistics.copies());
    let blocks = entries / new_heads / images.max(1) as f64;
    (blocks / f64::from(UNIT)).ceil() as u64
}

/// Sends all images of a row's volume through its matcher, with caches of so many sixteenths of the default.
fn walk(lab: &Lab, images: &[Arc<Image>], mut row: Row, sixteenths: usize) -> Result<Row> {
    let base = match row.label("mode") {
        "paper" => MatcherConfig::paper(),
        _ => MatcherConfig::default(),
    };
    let scale = if lab.small { SMALL } else { 1 };
    let times = |bytes: usize| bytes * sixteenths / 16 / scale;
    let config = MatcherConfig {
        c0_bytes: times(base.c0_bytes),
        c1_bytes: times(base.c1_bytes),
        c2_bytes: times(base.c2_bytes),
        ..base
    };
    let statistics = Statistics::of(images)?;
    let synthetic = match row.label("volume") {
        "pressed" => IMAGES.saturating_sub(images.len()),
        _ => 0,
    };
    let units = units_to_fill(&statistics, &base, synthetic) / scale as u64;
    let model = Arc::new(Model::new(statistics, SEED, units.max(1)));
    let work = lab.work(ABOUT.name)?;
    let storage = Regrown::new(
        HostDirectory::open_or_create(&work.join("index"))?,
        Arc::clone(&model),
    );
    let (mut matcher, _) = Matcher::open(storage, config)?;
    let (mut exact, mut in_library, mut exact_in_library) = (0, 0, 0);
    let (mut spent, mut sent) = (Duration::ZERO, 0);
    for (at, (image, best)) in images.iter().zip(matching::exact(images)).enumerate() {
        let before = matcher.stats().matched;
        spent += send(&mut matcher, at as u64, image)?;
        in_library += matcher.stats().matched - before;
        exact_in_library += best;
        // So many between each two, and after the last one.
        while sent < (synthetic * (at + 1) / images.len()) as u64 {
            let walked = synthetic::send(&mut matcher, &model, sent)?;
            exact += walked.copies;
            spent += walked.spent;
            sent += 1;
        }
    }
    exact += exact_in_library;
    let stats = matcher.stats();
    row.set("factor", sixteenths as f64 / 16.0);
    row.set("share_percent", percent(stats.matched as f64, exact as f64));
    row.set(
        "library_percent",
        percent(in_library as f64, exact_in_library as f64),
    );
    Ok(figures(row, &stats, spent.as_secs_f64()))
}

/// Sends an image without a destination; returns the processor time in the matcher.
fn send(matcher: &mut Matcher, number: u64, image: &Image) -> Result<Duration> {
    let mut cursor = matcher.begin(ImageId(number))?;
    let mut spent = Duration::ZERO;
    for (digests, heads) in image.batches() {
        let start = cpu_time();
        matcher.batch(&mut cursor, digests, heads)?;
        spent += cpu_time() - start;
    }
    matcher.finish(cursor)?;
    Ok(spent)
}

fn figures(row: Row, stats: &MatcherStats, seconds: f64) -> Row {
    let hits = (stats.c0.hits + stats.c1.hits + stats.c2.hits) as f64;
    let blocks = stats.blocks as f64;
    row.with("data_gib", blocks / f64::from(1 << 18))
        .with(
            "cache_mib",
            (stats.c0.bytes + stats.c1.bytes + stats.c2.bytes) as f64 / f64::from(1 << 20),
        )
        .with("c0_percent", percent(stats.c0.hits as f64, hits))
        .with("c1_percent", percent(stats.c1.hits as f64, hits))
        .with("c2_percent", percent(stats.c2.hits as f64, hits))
        .with(
            "evictions",
            (stats.c0.evictions + stats.c2.evictions) as f64,
        )
        .with("read_percent", percent(stats.pages_read as f64, blocks))
        .with("blocks_per_second", blocks / seconds.max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_caches_find_more_where_they_are_pressed() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let cases = Caches.cases(&lab).unwrap();
        let rows: Vec<Row> = cases
            .iter()
            .filter(|case| case.id != "pressed-paper")
            .flat_map(|case| Caches.run(&lab, case).unwrap())
            .collect();
        assert_eq!(rows.len(), 6);
        let of = |volume: &str, size: &str, key: &str| {
            let row = rows
                .iter()
                .filter(|r| r.label("mode") == "drover")
                .find(|r| r.label("volume") == volume && r.label("size") == size);
            row.unwrap().value(key).unwrap()
        };
        let share = |volume: &str, size: &str| of(volume, size, "share_percent");
        assert!(share("library", "1/8") > 95.0);
        assert!(share("pressed", "1/8") < share("pressed", "1"));
        assert!(share("pressed", "1") <= 100.0);
        assert!(of("pressed", "1/8", "evictions") > of("pressed", "1", "evictions"));
        assert_eq!(Caches.plots(&rows).len(), 2);
    }
}
