//! Compression levels: drover's adaptive choice compared with each fixed level, over links, with rate limits, and with
//! one core busy.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use super::lines::{self, Line, Net, line};
use super::mover::key;
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::files::identical;
use crate::setup::{Lab, file_name, must_be_same};
use crate::site::{Sender, Site};

const TIMES_BEST: &str = "times_best";
const AUTO: &str = "auto";
const LEVELS: &[&str] = &[AUTO, "none", "lz4", "1", "2", "3", "6", "9"];
/// For slow links, where the other levels cannot win and would take minutes.
const SLOW_LEVELS: &[&str] = &[AUTO, "3", "6", "9", "12"];
const SMALL_LEVELS: &[&str] = &[AUTO, "none", "1"];

pub const EXPERIMENT: Experiment = Experiment {
    name: "compress",
    title: "How hard to compress",
    text: "An image is sent to an empty site, with drover's own choice (*auto*) and with fixed levels, over links and over loopback with a \
limit. With *one core taken*, a thread that does nothing but count runs beside both ends. *Times the best* is against the fastest fixed level of the same row of circumstances; \
auto should not be above 1.1.",
    columns: &[
        Column::label("where", "over"),
        Column::label("beside", "beside"),
        Column::label("level", "level"),
        Column::figure(key::SECONDS, "seconds", 2),
        Column::figure(key::WIRE, "MB by own count", 2),
        Column::optional(TIMES_BEST, "times the best", 2),
    ],
    cases: |lab| Ok(settings(lab).iter().map(|(case, _)| case.clone()).collect()),
    run,
};

/// The link, and competing load.
#[derive(Clone, Copy)]
struct Setting {
    line: Option<Line>,
    limit: Option<&'static str>,
    /// Whether another process occupies a core.
    taken: bool,
}

impl Setting {
    fn place(&self) -> String {
        self.limit.map_or_else(
            || lines::describe(self.line),
            |limit| format!("--limit {limit}"),
        )
    }

    fn beside(&self) -> &'static str {
        if self.taken {
            "one core taken"
        } else {
            "nothing"
        }
    }
}

fn settings(lab: &Lab) -> Vec<(Case, Setting)> {
    let mut all = vec![(None, None)];
    if !lab.small {
        all.extend(["20M", "100M", "200M"].map(|limit| (None, Some(limit))));
        all.extend([100.0, 400.0, 1000.0, 20.0].map(|rate| (Some(line(rate, 10.0, 0.0)), None)));
    }
    let taken: &[bool] = lab.either(&[false, true], &[false]);
    let setting = |(taken, (line, limit))| {
        let setting = Setting { line, limit, taken };
        let place = limit.map_or_else(|| lines::slug(line), |limit| format!("limit-{limit}"));
        let id = format!("{place}{}", if taken { "-taken" } else { "" });
        let what = format!(
            "auto and fixed levels over {}, beside {}",
            setting.place(),
            setting.beside()
        );
        let needs: &[Need] = if line.is_some() {
            &[Need::Library, Need::Link]
        } else {
            &[Need::Library]
        };
        (Case::new(id, what, 1, needs), setting)
    };
    taken
        .iter()
        .flat_map(|taken| all.iter().map(|one| (*taken, *one)))
        .map(setting)
        .collect()
}

/// One row per level; a failed one has its error, and the others still run.
fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let setting = settings(lab)
        .into_iter()
        .find(|(known, _)| known.id == case.id);
    let (_, setting) = setting.context("no such case")?;
    let image = lab.image(lab.either("bookworm-plain", "small-two"))?;
    // Read it into the page cache, so that the first level does not read from disk.
    identical(&image, &image)?;
    let levels = match setting.line {
        _ if lab.small => SMALL_LEVELS,
        Some(line) if line.rate_mbit <= 20.0 => SLOW_LEVELS,
        _ => LEVELS,
    };
    let stop = AtomicBool::new(false);
    let mut rows = std::thread::scope(|scope| {
        if setting.taken {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let rows: Vec<Row> = levels
            .iter()
            .map(|level| measure(lab, &setting, &image, level))
            .collect();
        stop.store(true, Ordering::Relaxed);
        rows
    });
    let fixed = rows.iter().filter(|row| row.label("level") != AUTO);
    let best = fixed
        .filter_map(|row| row.value(key::SECONDS))
        .min_by(f64::total_cmp);
    for row in &mut rows {
        if let Some((seconds, best)) = row.value(key::SECONDS).zip(best) {
            row.set(TIMES_BEST, seconds / best);
        }
    }
    Ok(rows)
}

fn measure(lab: &Lab, setting: &Setting, image: &Path, level: &str) -> Row {
    let mut row = Row::new([
        ("where", setting.place()),
        ("beside", setting.beside().to_owned()),
        ("level", level.to_owned()),
    ]);
    let runs = (0..lab.repeat.max(1)).map(|run| send(lab, setting, image, level, run as u64));
    match runs.collect::<Result<Vec<_>>>() {
        Ok(mut runs) => {
            runs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (seconds, bytes) = runs[runs.len() / 2];
            eprintln!("  {level}: {seconds:.2} s");
            row.set(key::SECONDS, seconds);
            row.set(key::WIRE, bytes as f64 / 1e6);
        }
        Err(error) => row.verdict = Verdict::failed(&error),
    }
    row
}

/// Sends the image to an empty site; returns seconds, and bytes on the wire.
fn send(lab: &Lab, setting: &Setting, image: &Path, level: &str, run: u64) -> Result<(f64, u64)> {
    let (drover, work) = (lab.binary()?, lab.work("compress")?);
    let net = Net::like(setting.line, run)?;
    let site = Site::start(&drover, &work.join("site"), net.place())?;
    let sender = Sender::pair(&drover, &work.join("sender"), net.place(), &site)?;
    let mut options = vec!["--compress", level];
    options.extend(setting.limit.iter().flat_map(|limit| ["--limit", limit]));
    let sent = sender.send(image, &options)?;
    must_be_same(image, &site.image(&file_name(image)))?;
    let bytes = sent.images.iter().map(|image| image.wire_bytes()).sum();
    Ok((sent.seconds, bytes))
}
