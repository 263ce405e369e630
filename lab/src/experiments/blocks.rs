//! Block size: bytes that would be sent and memory that an index takes, for blocks of 512 bytes to 256 KiB
//! and for content-defined chunks (vmflock §4.2.2, Figure 5).

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Head, is_zero};
use fastcdc::v2020::StreamCDC;

use super::Lab;
use super::matching::{self, percent};
use crate::bench::{About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject};
use crate::limit::{compressor, each_piece, key_of};

/// The experiment.
pub struct Blocks;

static ABOUT: About = About {
    name: "blocks",
    title: "Block size",
    text: "\
What sending an image would take if it were cut differently: blocks of a fixed size, or chunks whose ends the content decides (FastCDC \
2020, minimum a quarter and maximum four times the average; what restic, borg and casync do in their ways). Sent is what is neither zero nor in an \
image at the destination nor earlier in the same image, through `zstd -3 --long=27` in one stream (*payload*), and a digest for each block or \
chunk that is not zero: *sent* with drover's 12 bytes and a proof of 32 bytes for each 64 blocks, *sent, 32 B* with whole digests. *at the destination* is nothing, or a \
similar image; *the library* sends all images in order. *found* is the share of bytes that are not sent because they are there already.

*Exact index* is the memory that a conventional LRU index takes for a terabyte of different blocks, at the paper's 60 bytes an entry; *drover* is 4 bytes for each head \
(teleportation §3.8), measured at the size for which heads are defined.",
    columns: &[
        Column::label("image", "image"),
        Column::label("cut", "cut into"),
        Column::label("there", "at the destination"),
        Column::figure("mean_kib", "mean KiB", 2),
        Column::figure("data_mb", "data MB", 1),
        Column::figure("found_percent", "found %", 2),
        Column::figure("payload_mb", "payload MB", 2),
        Column::figure("digests_mb", "digests MB", 2),
        Column::figure("sent_mb", "sent MB", 2),
        Column::figure("sent_32_mb", "sent, 32 B MB", 2),
        Column::figure("sent_percent", "sent %", 2),
        Column::figure("exact_mib_per_tb", "exact index MiB/TB", 0),
        Column::optional("drover_mib_per_tb", "drover MiB/TB", 0),
    ],
};

const NOTHING: &str = "nothing";
const SIMILAR: &str = "a similar image";
/// What all images in order are called.
const LIBRARY: &str = "the library";

/// Bytes of an entry in a conventional LRU index (teleportation §3.8), and in drover's caches.
const EXACT_ENTRY: f64 = 60.0;
const DROVER_ENTRY: f64 = 4.0;

/// How an image is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// Aligned blocks of so many bytes.
    Fixed(usize),
    /// Chunks of so many bytes on average, or as the algorithm understands it.
    Content(usize),
}

impl Cut {
    const ALL: [Cut; 13] = [
        Cut::Fixed(4 << 10),
        Cut::Fixed(1 << 10),
        Cut::Fixed(128 << 10),
        Cut::Content(16 << 10),
        Cut::Fixed(512),
        Cut::Fixed(2 << 10),
        Cut::Fixed(8 << 10),
        Cut::Fixed(16 << 10),
        Cut::Fixed(32 << 10),
        Cut::Fixed(64 << 10),
        Cut::Fixed(256 << 10),
        Cut::Content(4 << 10),
        Cut::Content(64 << 10),
    ];

    fn id(self) -> String {
        match self {
            Cut::Fixed(bytes) => format!("fixed-{bytes}"),
            Cut::Content(bytes) => format!("content-{bytes}"),
        }
    }

    fn describe(self) -> String {
        let size = |bytes: usize| match bytes {
            ..1024 => format!("{bytes} B"),
            _ => format!("{} KiB", bytes >> 10),
        };
        match self {
            Cut::Fixed(bytes) => size(bytes),
            Cut::Content(bytes) => format!("{} chunks", size(bytes)),
        }
    }

    fn of(name: &str) -> Option<Cut> {
        Cut::ALL.into_iter().find(|cut| cut.describe() == name)
    }

    /// Calls `f` for every piece of an image that is not zero, in order.
    fn each(self, path: &Path, mut f: impl FnMut(&[u8]) -> io::Result<()>) -> Result<()> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let read = || format!("cannot read {}", path.display());
        match self {
            Cut::Fixed(bytes) => {
                let size = file.metadata()?.len();
                each_piece(&file, size, bytes, f).with_context(read)
            }
            Cut::Content(average) => {
                for chunk in StreamCDC::new(file, average / 4, average, average * 4) {
                    let chunk = chunk.map_err(io::Error::from).with_context(read)?;
                    if !is_zero(&chunk.data) {
                        f(&chunk.data).with_context(read)?;
                    }
                }
                Ok(())
            }
        }
    }
}

/// What cutting some images came to.
#[derive(Default)]
struct Tally {
    data_bytes: u64,
    pieces: u64,
    found_bytes: u64,
    payload_bytes: u64,
}

impl Tally {
    fn row(&self, image: &str, cut: Cut, there: &str) -> Row {
        let data = self.data_bytes as f64;
        let pieces = self.pieces as f64;
        let payload = self.payload_bytes as f64;
        let digests = 12.0 * pieces + 32.0 * (pieces / 64.0).ceil();
        let whole = 32.0 * pieces;
        let mean = data / pieces.max(1.0);
        let per_tb = |bytes: f64| bytes * 1e12 / mean.max(1.0) / f64::from(1 << 20);
        Row::new([
            ("image", image.to_owned()),
            ("cut", cut.describe()),
            ("there", there.to_owned()),
        ])
        .with("mean_kib", mean / 1024.0)
        .with("data_mb", data / 1e6)
        .with("found_percent", percent(self.found_bytes as f64, data))
        .with("payload_mb", payload / 1e6)
        .with("digests_mb", digests / 1e6)
        .with("sent_mb", (payload + digests) / 1e6)
        .with("sent_32_mb", (payload + whole) / 1e6)
        .with("sent_percent", percent(payload + digests, data))
        .with("exact_mib_per_tb", per_tb(EXACT_ENTRY))
    }
}

/// The image that is cut, and the one that is at the destination.
fn pair(lab: &Lab) -> Result<(PathBuf, PathBuf)> {
    let [image, similar] = match lab.small {
        true => ["small-two", "small-one"],
        false => ["bookworm-app", "bookworm-plain"],
    };
    Ok((lab.image(image)?, lab.image(similar)?))
}

impl Experiment for Blocks {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let case = |set: &str, cut: Cut, seconds: f64, rank: u8| Case {
            id: format!("{set}-{}", cut.id()),
            what: match set {
                "pair" => format!("an image beside a similar one, cut into {}", cut.describe()),
                _ => format!("the library, cut into {}", cut.describe()),
            },
            seconds,
            rank,
            subject: match cut {
                Cut::Fixed(BLOCK_SIZE) => Subject::Drover,
                _ => Subject::Images,
            },
            needs: &[Need::Library],
        };
        if lab.small {
            return Ok([
                Cut::Fixed(4 << 10),
                Cut::Fixed(128 << 10),
                Cut::Content(16 << 10),
            ]
            .map(|cut| case("pair", cut, 2.0, 0))
            .into());
        }
        let (image, similar) = pair(lab)?;
        let pair = matching::seconds_to_load(&[image, similar]);
        let library = matching::seconds_to_load(&matching::images(lab)?);
        let mut cases: Vec<Case> = Cut::ALL
            .into_iter()
            .enumerate()
            .map(|(at, cut)| case("pair", cut, 2.0 * pair, u8::from(at > 6)))
            .collect();
        for (cut, rank) in [
            (Cut::Fixed(4 << 10), 1),
            (Cut::Content(16 << 10), 1),
            (Cut::Content(4 << 10), 2),
            (Cut::Content(64 << 10), 2),
        ] {
            cases.push(case("library", cut, 2.0 * library, rank));
        }
        Ok(cases)
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let (set, id) = case.id.split_once('-').context("no such case")?;
        let cut = Cut::ALL.into_iter().find(|cut| cut.id() == id);
        let cut = cut.context("no such case")?;
        let mut rows = match set {
            "pair" => {
                let (image, similar) = pair(lab)?;
                beside(&image, &similar, cut)?
            }
            _ => vec![in_order(&matching::images(lab)?, cut)?],
        };
        if cut == Cut::Fixed(BLOCK_SIZE) {
            for row in &mut rows {
                let images = match row.label("image") {
                    LIBRARY => matching::images(lab)?,
                    _ => vec![pair(lab)?.0],
                };
                row.set("drover_mib_per_tb", heads_per_tb(&images)?);
            }
        }
        Ok(rows)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let lines = |key: &str, content: bool, there: &str| -> Vec<Point> {
            let mut points: Vec<Point> = rows
                .iter()
                .filter(|row| row.label("there") == there && row.label("image") != LIBRARY)
                .filter(|row| matches!(Cut::of(row.label("cut")), Some(Cut::Content(_))) == content)
                .filter_map(|row| {
                    Some(Point {
                        x: row.value("mean_kib")?,
                        y: row.value(key)?,
                        range: None,
                    })
                })
                .collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            points
        };
        let all: Vec<&Row> = rows
            .iter()
            .filter(|r| r.label("image") == LIBRARY)
            .collect();
        let bars =
            |name: &str, key: &str| (name.to_owned(), all.iter().map(|r| r.value(key)).collect());
        vec![
            Plot {
                name: "sent".to_owned(),
                title: "Bytes that are sent against block size (vmflock, Figure 5)".to_owned(),
                x: Axis::log("mean block or chunk, KiB"),
                y: Axis::linear("sent, % of the data"),
                kind: Kind::Lines(vec![
                    (
                        "blocks, nothing there".to_owned(),
                        lines("sent_percent", false, NOTHING),
                    ),
                    (
                        "blocks, similar image".to_owned(),
                        lines("sent_percent", false, SIMILAR),
                    ),
                    (
                        "chunks, nothing there".to_owned(),
                        lines("sent_percent", true, NOTHING),
                    ),
                    (
                        "chunks, similar image".to_owned(),
                        lines("sent_percent", true, SIMILAR),
                    ),
                ]),
            },
            Plot {
                name: "memory".to_owned(),
                title: "Memory of the index against block size".to_owned(),
                x: Axis::log("block, KiB"),
                y: Axis::log("MiB for a terabyte of different blocks"),
                kind: Kind::Lines(vec![
                    (
                        "exact, 60 bytes an entry".to_owned(),
                        lines("exact_mib_per_tb", false, NOTHING),
                    ),
                    (
                        "drover, 4 bytes a head".to_owned(),
                        lines("drover_mib_per_tb", false, NOTHING),
                    ),
                ]),
            },
            Plot {
                name: "library".to_owned(),
                title: "The library in order: blocks against content-defined chunks".to_owned(),
                x: Axis::linear("cut into"),
                y: Axis::linear("MB sent"),
                kind: Kind::Bars {
                    groups: all.iter().map(|r| r.label("cut").to_owned()).collect(),
                    series: vec![bars("payload", "payload_mb"), bars("digests", "digests_mb")],
                    stacked: true,
                },
            },
        ]
    }
}

/// One image, with nothing at the destination and with a similar one.
fn beside(image: &Path, similar: &Path, cut: Cut) -> Result<Vec<Row>> {
    let mut there = HashSet::new();
    cut.each(similar, |piece| {
        there.insert(key_of(piece));
        Ok(())
    })?;
    let mut seen = HashSet::new();
    let (mut alone, mut with) = (Tally::default(), Tally::default());
    let (mut to_alone, mut to_with) = (compressor()?, compressor()?);
    cut.each(image, |piece| {
        let key = key_of(piece);
        let len = piece.len() as u64;
        let repeated = !seen.insert(key);
        for (tally, to, found) in [
            (&mut alone, &mut to_alone, repeated),
            (&mut with, &mut to_with, repeated || there.contains(&key)),
        ] {
            tally.data_bytes += len;
            tally.pieces += 1;
            if found {
                tally.found_bytes += len;
            } else {
                to.write_all(piece)?;
            }
        }
        Ok(())
    })?;
    alone.payload_bytes = to_alone.finish()?.0;
    with.payload_bytes = to_with.finish()?.0;
    let name = image.file_stem().unwrap_or_default().to_string_lossy();
    Ok(vec![
        alone.row(&name, cut, NOTHING),
        with.row(&name, cut, SIMILAR),
    ])
}

/// All images to an empty destination, each through a stream of its own.
fn in_order(images: &[PathBuf], cut: Cut) -> Result<Row> {
    let mut seen = HashSet::new();
    let mut tally = Tally::default();
    for image in images {
        let mut to = compressor()?;
        cut.each(image, |piece| {
            tally.data_bytes += piece.len() as u64;
            tally.pieces += 1;
            if seen.insert(key_of(piece)) {
                to.write_all(piece)
            } else {
                tally.found_bytes += piece.len() as u64;
                Ok(())
            }
        })?;
        tally.payload_bytes += to.finish()?.0;
    }
    Ok(tally.row(LIBRARY, cut, NOTHING))
}

/// MiB of cache entries for the heads of a terabyte of such images.
fn heads_per_tb(images: &[PathBuf]) -> Result<f64> {
    let (mut blocks, mut heads) = (0, 0);
    for image in matching::load_all(images)? {
        blocks += image.heads.len();
        heads += image.heads.iter().filter(|h| **h != Head::No).count();
    }
    let share = heads as f64 / blocks.max(1) as f64;
    Ok(share * DROVER_ENTRY * 1e12 / BLOCK_SIZE_U64 as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_similar_image_saves_bytes_and_larger_blocks_save_digests() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let cases = Blocks.cases(&lab).unwrap();
        let rows: Vec<Row> = cases
            .iter()
            .flat_map(|case| Blocks.run(&lab, case).unwrap())
            .collect();
        assert_eq!(rows.len(), 6);
        let of = |cut: Cut, there: &str, key: &str| {
            rows.iter()
                .find(|r| r.label("cut") == cut.describe() && r.label("there") == there)
                .and_then(|r| r.value(key))
                .unwrap()
        };
        let (small, large) = (Cut::Fixed(4 << 10), Cut::Fixed(128 << 10));
        for cut in [small, large, Cut::Content(16 << 10)] {
            assert!(of(cut, SIMILAR, "sent_mb") <= of(cut, NOTHING, "sent_mb"));
            assert!(of(cut, NOTHING, "sent_mb") > of(cut, NOTHING, "payload_mb"));
        }
        // Two thirds of the files are in both, at other places.
        assert!(of(small, SIMILAR, "found_percent") > 50.0);
        assert!(of(Cut::Content(16 << 10), SIMILAR, "found_percent") > 40.0);
        assert!(of(small, SIMILAR, "found_percent") > of(large, SIMILAR, "found_percent"));
        assert!(of(small, NOTHING, "digests_mb") > of(large, NOTHING, "digests_mb"));
        // 60 bytes for each 4 KiB of a terabyte.
        assert!((of(small, NOTHING, "exact_mib_per_tb") - 13970.0).abs() < 1.0);
        assert!(of(small, NOTHING, "drover_mib_per_tb") < 932.0);
        // What is found matches what the limit counts.
        let mut known = crate::limit::Known::default();
        let (image, similar) = pair(&lab).unwrap();
        known.add(&similar).unwrap();
        let limit = known.add(&image).unwrap();
        let payload = of(small, SIMILAR, "payload_mb");
        assert!((payload - limit.limit_bytes as f64 / 1e6).abs() < 1e-9);
        assert_eq!(Blocks.plots(&rows).len(), 3);
    }

    #[test]
    fn the_library_is_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let (image, similar) = pair(&lab).unwrap();
        let cut = Cut::Fixed(4 << 10);
        let row = in_order(&[similar.clone(), image.clone(), image.clone()], cut).unwrap();
        let once = in_order(&[similar, image], cut).unwrap();
        let payload = |row: &Row| row.value("payload_mb").unwrap();
        // Nothing more but the end of an empty stream.
        assert!((payload(&row) - payload(&once)).abs() < 1e-4);
        assert!(row.value("found_percent") > once.value("found_percent"));
    }
}
