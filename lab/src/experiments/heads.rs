//! Head recognition: how many blocks are heads, what that saves in memory, and what it costs in matches
//! (teleportation §2.3, §3.3).

use anyhow::Result;
use drover_index::{AnchorPolicy, MatcherConfig};
use drover_storage::HostDirectory;

use super::Lab;
use super::matching::{self, Sending, Sent, percent};
use crate::bench::{About, Axis, Case, Column, Experiment, Kind, Plot, Row};

/// The experiment.
pub struct Heads;

static ABOUT: About = About {
    name: "heads",
    title: "Head recognition",
    text: "\
The images of the library, in order, through drover's matcher in this process. *Exact* deduplication with \
unbounded memory remembers every block; the paper's matcher remembers and looks up only those that \
seem to begin a file: *strong* heads by their magic number, *weak* ones because the block before ends in five zero \
bytes. What is not remembered costs no memory (*saved*); what is then not found is *lost*, in percent of what exact deduplication matches. \
The paper reports 9.6 % heads, 90.4 % saved and 5 % lost. Repeats inside an image count, zero blocks do not.

*drover* extends matches backwards too, searches the page in memory after a mismatch, and while its caches have room \
also remembers blocks that are no heads (*entries* counts all that there are after the image, against the different blocks that exact deduplication has to \
remember by then). The last rows leave these out one by one.",
    columns: &[
        Column::label("image", "image"),
        Column::label("mode", "matcher"),
        Column::figure("blocks", "blocks", 0),
        Column::figure("strong_percent", "strong %", 1),
        Column::figure("weak_percent", "weak %", 1),
        Column::figure("saved_percent", "saved %", 1),
        Column::figure("exact_blocks", "exact", 0),
        Column::figure("matched_blocks", "matched", 0),
        Column::figure("lost_percent", "lost %", 2),
        Column::figure("looked_up_percent", "looked up %", 1),
        Column::figure("entries_percent", "entries %", 1),
        Column::figure("blocks_per_second", "blocks/s", 0),
    ],
};

/// What all images together are called.
const ALL: &str = "all";

/// The matchers that are compared. Of the first two, every image is a row.
pub(super) fn modes() -> Vec<(&'static str, MatcherConfig)> {
    let default = MatcherConfig::default();
    vec![
        ("drover", default),
        ("paper", MatcherConfig::paper()),
        (
            "drover, heads only",
            MatcherConfig {
                anchors: AnchorPolicy::Off,
                ..default
            },
        ),
        (
            "drover, forwards only",
            MatcherConfig {
                backward: false,
                ..default
            },
        ),
        (
            "drover, no page search",
            MatcherConfig {
                aligned: false,
                ..default
            },
        ),
        (
            "drover, asks for every block",
            MatcherConfig {
                anchors: AnchorPolicy::FreeSlots {
                    stop_percent: 90,
                    cold_after: u32::MAX,
                    cold_shift: 0,
                },
                ..default
            },
        ),
    ]
}

impl Experiment for Heads {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        Ok(vec![matching::whole_library(lab, modes().len(), 2.0)?])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        let images = matching::load_all(&matching::images(lab)?)?;
        let exact = matching::exact(&images);
        let work = lab.work(ABOUT.name)?;
        let mut rows = Vec::new();
        for (number, (mode, config)) in modes().into_iter().enumerate() {
            let storage = HostDirectory::open_or_create(&work.join(&number.to_string()))?;
            let mut sending = Sending::open(storage, config)?;
            let mut all: Option<(Sent, u64)> = None;
            for (image, &exact) in images.iter().zip(&exact) {
                let sent = sending.send(image, |_| {})?;
                let so_far = match all {
                    Some((before, best)) => (before.through(&sent), best + exact),
                    None => (sent, exact),
                };
                all = Some(so_far);
                if number < 2 {
                    rows.push(row(
                        &image.name,
                        mode,
                        (&sent, exact),
                        (&so_far.0, so_far.1),
                    ));
                }
            }
            rows.extend(all.map(|(sent, exact)| row(ALL, mode, (&sent, exact), (&sent, exact))));
        }
        Ok(rows)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let images: Vec<String> = rows
            .iter()
            .filter(|row| row.label("mode") == "paper")
            .map(|row| row.label("image").to_owned())
            .collect();
        let of = |mode: &str, image: &str, key: &str| {
            rows.iter()
                .find(|row| row.label("mode") == mode && row.label("image") == image)
                .and_then(|row| row.value(key))
        };
        let bars = |mode: &str, key: &str| images.iter().map(|i| of(mode, i, key)).collect();
        let modes: Vec<String> = rows
            .iter()
            .filter(|row| row.label("image") == ALL)
            .map(|row| row.label("mode").to_owned())
            .collect();
        vec![
            Plot {
                name: "share".to_owned(),
                title: "Blocks that are heads".to_owned(),
                x: Axis::linear("image"),
                y: Axis::linear("% of blocks"),
                kind: Kind::Bars {
                    groups: images.clone(),
                    series: vec![
                        ("strong".to_owned(), bars("paper", "strong_percent")),
                        ("weak".to_owned(), bars("paper", "weak_percent")),
                    ],
                    stacked: true,
                },
            },
            Plot {
                name: "lost".to_owned(),
                title: "Matches lost against exact deduplication".to_owned(),
                x: Axis::linear("image"),
                y: Axis::linear("% of exact matches"),
                kind: Kind::Bars {
                    groups: images.clone(),
                    series: ["paper", "drover"]
                        .map(|mode| (mode.to_owned(), bars(mode, "lost_percent")))
                        .into(),
                    stacked: false,
                },
            },
            Plot {
                name: "modes".to_owned(),
                title: "What each part of the matcher finds: matches lost over all images"
                    .to_owned(),
                x: Axis::linear("matcher"),
                y: Axis::linear("% of exact matches"),
                kind: Kind::Bars {
                    series: vec![(
                        "lost".to_owned(),
                        modes
                            .iter()
                            .map(|mode| of(mode, ALL, "lost_percent"))
                            .collect(),
                    )],
                    groups: modes,
                    stacked: false,
                },
            },
        ]
    }
}

/// What sending an image came to and what exact deduplication matches of it, and the same of all images so far.
fn row(image: &str, mode: &str, (sent, exact): (&Sent, u64), so_far: (&Sent, u64)) -> Row {
    let blocks = sent.grew(|s| s.blocks);
    let heads = sent.grew(|s| s.heads);
    let strong = sent.grew(|s| s.strong_heads);
    let matched = sent.grew(|s| s.matched);
    let exact = exact as f64;
    let entries = so_far
        .0
        .grew(|s| s.c0.entries + s.c1.entries + s.c2.entries);
    let different = so_far.0.grew(|s| s.blocks) - so_far.1 as f64;
    Row::new([("image", image.to_owned()), ("mode", mode.to_owned())])
        .with("blocks", blocks)
        .with("strong_percent", percent(strong, blocks))
        .with("weak_percent", percent(heads - strong, blocks))
        .with("saved_percent", percent(blocks - heads, blocks))
        .with("exact_blocks", exact)
        .with("matched_blocks", matched)
        .with("lost_percent", percent(exact - matched, exact))
        .with(
            "looked_up_percent",
            percent(sent.grew(|s| s.c2.lookups), blocks),
        )
        .with("entries_percent", percent(entries, different))
        .with("blocks_per_second", blocks / sent.seconds.max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_heads_cost_matches() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let case = &Heads.cases(&lab).unwrap()[0];
        let rows = Heads.run(&lab, case).unwrap();
        // Two images and all for the first two matchers, all for the others.
        assert_eq!(rows.len(), 6 + 4);
        for row in &rows {
            let share = |key| row.value(key).unwrap();
            let all = share("strong_percent") + share("weak_percent") + share("saved_percent");
            assert!((all - 100.0).abs() < 1e-6, "{row:?}");
            assert!(share("matched_blocks") <= share("exact_blocks"));
        }
        let of = |mode: &str, key| {
            let all = |row: &&Row| row.label("image") == ALL && row.label("mode") == mode;
            rows.iter().find(all).unwrap().value(key).unwrap()
        };
        assert!(of("drover", "matched_blocks") >= of("paper", "matched_blocks"));
        assert!(of("drover", "matched_blocks") > 300.0);
        assert!(of("drover", "entries_percent") > of("paper", "entries_percent"));
        assert_eq!(Heads.plots(&rows).len(), 3);
    }
}
