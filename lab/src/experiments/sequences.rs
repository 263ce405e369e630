//! Sequences: how long matched runs and stored sequences are, and what reading and writing the index costs
//! (teleportation §2.6, §2.14, §3.7).

use anyhow::{Result, anyhow};
use drover_core::BLOCK_SIZE;
use drover_index::{Matcher, MatcherConfig, Origin, Plan};
use drover_storage::HostDirectory;

use super::Lab;
use super::matching::{self, Sending, Sent, percent};
use crate::bench::{About, Axis, Case, Column, Experiment, Kind, Plot, Row};

/// The experiment.
pub struct Sequences;

static ABOUT: About = About {
    name: "sequences",
    title: "Sequences and disk I/O",
    text: "\
The images of the library, in order, through the matcher in this process. A *run* is blocks in a row that have one place in a row \
at the destination; a stored *sequence* is a piece of one that was copied to the sequence cache, where it never crosses a segment of 340 \
blocks. The paper reports runs of 86 blocks. *Read* and *write*: pages read from the index for each block asked about, and bytes written to it \
against bytes of image; a hash page read costs as much as a block. The paper reports 0.3 % (nothing matches) to 1.16 % (everything does) and 0.78 %. \
*All again* sends the first image a second time, when all of it is matched; *two kept* deletes all images at the destination but the newest two after each, \
so that what older ones had comes from the sequence cache.

The caches are saved and loaded again afterwards, and rebuilt from the hash files without what was saved (*saved*, *opened*, *rebuilt*).",
    columns: &[
        Column::label("image", "image"),
        Column::label("mode", "matcher"),
        Column::figure("blocks", "blocks", 0),
        Column::figure("share_percent", "of exact %", 2),
        Column::figure("runs", "runs", 0),
        Column::figure("run_blocks", "blocks/run", 1),
        Column::figure("stored", "stored", 0),
        Column::figure("stored_blocks", "blocks/sequence", 1),
        Column::figure("copied_percent", "copied %", 1),
        Column::figure("read_percent", "read %", 2),
        Column::figure("write_percent", "write %", 2),
        Column::optional("saved_s", "saved s", 3),
        Column::optional("opened_s", "opened s", 3),
        Column::optional("rebuilt_s", "rebuilt s", 3),
    ],
};

const ALL: &str = "all";
const AGAIN: &str = "all again";

/// How the matcher is set up, and how many images stay at the destination.
fn modes() -> [(&'static str, MatcherConfig, u64); 3] {
    [
        ("drover", MatcherConfig::default(), u64::MAX),
        ("drover, two kept", MatcherConfig::default(), 2),
        ("paper", MatcherConfig::paper(), u64::MAX),
    ]
}

/// Upper bounds of the histogram's classes; what is longer is in the last one.
const CLASSES: [u64; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 512, u64::MAX];

/// How many runs, and blocks in runs, of each length there are.
#[derive(Clone, Default)]
struct Lengths {
    count: u64,
    blocks: [u64; CLASSES.len()],
}

impl Lengths {
    fn add(&mut self, length: u64) {
        let class = CLASSES.partition_point(|&most| most < length);
        self.count += 1;
        self.blocks[class] += length;
    }

    fn all(&self) -> f64 {
        self.blocks.iter().sum::<u64>() as f64
    }

    fn mean(&self) -> f64 {
        self.all() / self.count.max(1) as f64
    }

    fn append(&mut self, other: &Lengths) {
        self.count += other.count;
        for (to, from) in self.blocks.iter_mut().zip(other.blocks) {
            *to += from;
        }
    }

    /// The share of blocks in each class, as figures.
    fn put(&self, row: &mut Row, what: &str) {
        for (class, &blocks) in self.blocks.iter().enumerate() {
            row.set(&key(what, class), percent(blocks as f64, self.all()));
        }
    }
}

fn key(what: &str, class: usize) -> String {
    format!("{what}_{class}_percent")
}

/// The runs and stored sequences of an image, put together from its plans.
#[derive(Default)]
struct Seen {
    runs: Lengths,
    stored: Lengths,
    /// The run in progress: where it goes on, and its length so far.
    open: Option<(Origin, u64)>,
}

impl Seen {
    fn plan(&mut self, plan: &Plan) {
        for run in &plan.runs {
            let count = u64::from(run.count);
            let next = match run.origin {
                Origin::Literal => None,
                Origin::Image { image, first } => Some(Origin::Image {
                    image,
                    first: first + count,
                }),
                Origin::Sequence { first } => Some(Origin::Sequence {
                    first: first + count,
                }),
            };
            // A run that a batch's end cut goes on.
            let before = match self.open {
                Some((at, length)) if at == run.origin => length,
                _ => {
                    self.close();
                    0
                }
            };
            self.open = next.map(|next| (next, before + count));
        }
        for store in &plan.stores {
            self.stored.add(u64::from(store.count));
        }
    }

    fn close(&mut self) {
        if let Some((_, length)) = self.open.take() {
            self.runs.add(length);
        }
    }
}

impl Experiment for Sequences {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        Ok(vec![matching::whole_library(lab, modes().len(), 1.5)?])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        let images = matching::load_all(&matching::images(lab)?)?;
        let exact = matching::exact(&images);
        let work = lab.work(ABOUT.name)?;
        let mut rows = Vec::new();
        for (number, (mode, config, keep)) in modes().into_iter().enumerate() {
            let dir = work.join(&number.to_string());
            let mut sending = Sending::open(HostDirectory::open_or_create(&dir)?, config)?;
            let mut all: Option<(Sent, Seen, u64)> = None;
            for (image, &exact) in images.iter().zip(&exact) {
                let mut seen = Seen::default();
                let sent = sending.send(image, |plan| seen.plan(plan))?;
                seen.close();
                sending.keep_newest(keep)?;
                rows.push(row(&image.name, mode, &sent, &seen, exact));
                all = Some(match all {
                    None => (sent, seen, exact),
                    Some((before, mut so_far, best)) => {
                        so_far.runs.append(&seen.runs);
                        so_far.stored.append(&seen.stored);
                        (before.through(&sent), so_far, best + exact)
                    }
                });
            }
            let (sent, seen, exact) = all.ok_or_else(|| anyhow!("no image"))?;
            let mut total = row(ALL, mode, &sent, &seen, exact);
            seen.runs.put(&mut total, "run");
            seen.stored.put(&mut total, "stored");
            if keep == u64::MAX {
                let mut again = Seen::default();
                let sent = sending.send(&images[0], |plan| again.plan(plan))?;
                again.close();
                let exact = images[0].digests.len() as u64;
                rows.push(row(AGAIN, mode, &sent, &again, exact));
            }
            reopen(sending.matcher, &dir, config, &mut total)?;
            rows.push(total);
        }
        Ok(rows)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let total = |mode: &str| {
            rows.iter()
                .find(|r| r.label("image") == ALL && r.label("mode") == mode)
        };
        let series = |mode: &str, what: &str, name: &str| {
            let value = |class| total(mode).and_then(|row| row.value(&key(what, class)));
            (name.to_owned(), (0..CLASSES.len()).map(value).collect())
        };
        let drover: Vec<&Row> = rows
            .iter()
            .filter(|r| r.label("mode") == "drover")
            .collect();
        let bars = |name: &str, key: &str| {
            (
                name.to_owned(),
                drover.iter().map(|r| r.value(key)).collect(),
            )
        };
        vec![
            Plot {
                name: "lengths".to_owned(),
                title: "Lengths of matched runs and of stored sequences".to_owned(),
                x: Axis::linear("blocks in a run, at most"),
                y: Axis::linear("% of blocks in runs"),
                kind: Kind::Bars {
                    groups: CLASSES
                        .iter()
                        .map(|&most| {
                            if most == u64::MAX {
                                "more".to_owned()
                            } else {
                                most.to_string()
                            }
                        })
                        .collect(),
                    series: vec![
                        series("drover", "run", "runs, drover"),
                        series("drover", "stored", "sequences, drover"),
                        series("paper", "run", "runs, paper's matcher"),
                    ],
                    stacked: false,
                },
            },
            Plot {
                name: "io".to_owned(),
                title: "Disk I/O of the index (paper: 0.3 to 1.16 % read, 0.78 % written)"
                    .to_owned(),
                x: Axis::linear("image"),
                y: Axis::linear("% of the image"),
                kind: Kind::Bars {
                    groups: drover.iter().map(|r| r.label("image").to_owned()).collect(),
                    series: vec![
                        bars("read", "read_percent"),
                        bars("written", "write_percent"),
                    ],
                    stacked: false,
                },
            },
        ]
    }
}

fn row(image: &str, mode: &str, sent: &Sent, seen: &Seen, exact: u64) -> Row {
    let blocks = sent.grew(|s| s.blocks);
    let mut row = Row::new([("image", image.to_owned()), ("mode", mode.to_owned())])
        .with("blocks", blocks)
        .with(
            "share_percent",
            percent(sent.grew(|s| s.matched), exact as f64),
        )
        .with("runs", seen.runs.count as f64)
        .with("run_blocks", seen.runs.mean())
        .with("stored", seen.stored.count as f64)
        .with("stored_blocks", seen.stored.mean());
    row.set("copied_percent", percent(seen.stored.all(), blocks));
    row.set("read_percent", percent(sent.grew(|s| s.pages_read), blocks));
    let written = sent.grew(|s| s.bytes_written);
    row.set(
        "write_percent",
        percent(written, blocks * BLOCK_SIZE as f64),
    );
    row
}

/// Saves the caches, opens the index with what was saved, and again without it.
fn reopen(
    mut matcher: Matcher,
    dir: &std::path::Path,
    config: MatcherConfig,
    row: &mut Row,
) -> Result<()> {
    let start = std::time::Instant::now();
    matcher.persist()?;
    row.set("saved_s", start.elapsed().as_secs_f64());
    drop(matcher);
    for key in ["opened_s", "rebuilt_s"] {
        let start = std::time::Instant::now();
        let (_, report) = Matcher::open(HostDirectory::open(dir)?, config)?;
        row.set(key, start.elapsed().as_secs_f64());
        if report.from_snapshot != (key == "opened_s") {
            return Err(anyhow!(
                "the index was not opened as it was saved: {report:?}"
            ));
        }
        let saved = dir.join("caches.snap");
        if saved.exists() {
            std::fs::remove_file(saved)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_index::{ImageId, PlanRun, SequenceStore, Via};

    #[test]
    fn runs_go_on_over_batches_and_end_where_their_place_does() {
        let run = |count, origin| PlanRun {
            count,
            origin,
            via: Via::C1,
        };
        let image = |first| Origin::Image {
            image: ImageId(1),
            first,
        };
        let plans = [
            vec![run(3, Origin::Literal), run(5, image(10))],
            vec![
                run(2, image(15)),
                run(1, image(40)),
                run(4, Origin::Literal),
            ],
            vec![run(7, Origin::Sequence { first: 0 })],
        ];
        let mut seen = Seen::default();
        for runs in plans {
            seen.plan(&Plan {
                runs,
                stores: vec![SequenceStore {
                    first: 0,
                    from: 0,
                    count: 9,
                }],
            });
        }
        seen.close();
        assert_eq!((seen.runs.count, seen.runs.all()), (3, 15.0));
        assert_eq!(seen.runs.blocks[..4], [1, 0, 0, 14]);
        assert_eq!((seen.stored.count, seen.stored.mean()), (3, 9.0));
    }

    #[test]
    fn everything_is_matched_the_second_time() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let rows = Sequences
            .run(&lab, &Sequences.cases(&lab).unwrap()[0])
            .unwrap();
        let again: Vec<&Row> = rows.iter().filter(|r| r.label("image") == AGAIN).collect();
        assert_eq!(again.len(), 2);
        assert!(
            again
                .iter()
                .all(|r| r.value("share_percent") == Some(100.0))
        );
        let all: Vec<&Row> = rows.iter().filter(|r| r.label("image") == ALL).collect();
        assert_eq!(all.len(), 3);
        for row in all {
            let of = |what| (0..CLASSES.len()).map(move |c| row.value(&key(what, c)).unwrap());
            assert!((of("run").sum::<f64>() - 100.0).abs() < 1e-6);
            // Digests alone are 12 bytes for each 4096.
            assert!(row.value("write_percent").unwrap() > 0.29);
            assert!(row.value("rebuilt_s").is_some());
        }
        assert_eq!(Sequences.plots(&rows).len(), 2);
    }
}
