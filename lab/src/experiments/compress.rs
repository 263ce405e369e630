//! How hard to compress: drover's own choice against each level that stays, over links, with limits, with one core taken.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};

use super::lines::{self, Line, Net};
use super::mover::{self, key};
use super::weights::{Scales, drover_seconds};
use super::{Lab, file_name};
use crate::bench::{About, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};
use crate::same::identical;
use crate::site::{Sender, Site};

const TIMES_BEST: &str = "times_best";

static ABOUT: About = About {
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
};

const AUTO: &str = "auto";
const LEVELS: [&str; 8] = [AUTO, "none", "lz4", "1", "2", "3", "6", "9"];
/// Where a link is so slow that none of the others can be the best, and all of them take minutes.
const SLOW_LEVELS: [&str; 5] = [AUTO, "3", "6", "9", "12"];
const SMALL_LEVELS: [&str; 3] = [AUTO, "none", "1"];

/// The experiment.
pub struct Compress;

/// Over what, and beside what.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setting {
    line: Option<Line>,
    limit: Option<&'static str>,
    /// Something else takes a core.
    taken: bool,
}

impl Setting {
    fn place(&self) -> String {
        match self.limit {
            Some(limit) => format!("--limit {limit}"),
            None => lines::describe(self.line),
        }
    }

    fn beside(&self) -> &'static str {
        if self.taken {
            "one core taken"
        } else {
            "nothing"
        }
    }

    fn slug(&self) -> String {
        let place = match self.limit {
            Some(limit) => format!("limit-{limit}"),
            None => lines::slug(self.line),
        };
        format!("{place}{}", if self.taken { "-taken" } else { "" })
    }

    /// Bytes a second, about.
    fn rate_line(&self) -> Option<Line> {
        let megabytes = self.limit?.trim_end_matches('M').parse::<f64>().ok()?;
        Some(Line {
            rate_mbit: 8.0 * megabytes,
            rtt_ms: 1.0,
            loss_percent: 0.0,
        })
    }
}

fn settings(lab: &Lab) -> Vec<Setting> {
    let setting = |line, limit| Setting {
        line,
        limit,
        taken: false,
    };
    let mut all = vec![setting(None, None)];
    if !lab.small {
        all.extend(["20M", "100M", "200M"].map(|limit| setting(None, Some(limit))));
        all.extend([100.0, 400.0, 1000.0, 20.0].map(|rate_mbit| {
            let line = Line {
                rate_mbit,
                rtt_ms: 10.0,
                loss_percent: 0.0,
            };
            setting(Some(line), None)
        }));
        let taken: Vec<Setting> = all.iter().map(|s| Setting { taken: true, ..*s }).collect();
        all.extend(taken);
    }
    all
}

impl Experiment for Compress {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let once = |setting: &Setting| -> f64 {
            let weigh = || -> Result<f64> {
                let weights = Scales::new(&lab.common.out).guess(&[], &[image(lab)?])?;
                let line = setting.line.or(setting.rate_line());
                Ok(weights.iter().map(|w| drover_seconds(w, line)).sum())
            };
            weigh().unwrap_or(0.1)
        };
        let case = |setting: &Setting| Case {
            id: setting.slug(),
            what: format!(
                "auto and fixed levels over {}, beside {}",
                setting.place(),
                setting.beside()
            ),
            // The least level takes about three times as long.
            seconds: 2.0 * once(setting) * (levels(lab, setting).len() * lab.repeat.max(1)) as f64,
            rank: match (setting.taken, setting.line) {
                (false, None) => 1,
                (false, Some(line)) if line.rate_mbit > 20.0 => 2,
                _ => 3,
            },
            subject: Subject::Drover,
            needs: match setting.line {
                Some(_) => &[Need::Library, Need::Link],
                None => &[Need::Library],
            },
        };
        Ok(settings(lab).iter().map(case).collect())
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let all = settings(lab);
        let setting = all.iter().find(|setting| setting.slug() == case.id);
        measure(
            lab,
            setting.with_context(|| format!("no case {}", case.id))?,
        )
    }

    fn plots(&self, _: &[Row]) -> Vec<Plot> {
        Vec::new()
    }

    fn images(&self, lab: &Lab, _: &Case) -> Option<Vec<PathBuf>> {
        Some(vec![image(lab).ok()?])
    }
}

fn image(lab: &Lab) -> Result<PathBuf> {
    lab.image(if lab.small {
        "small-two"
    } else {
        "bookworm-plain"
    })
}

fn levels(lab: &Lab, setting: &Setting) -> &'static [&'static str] {
    match setting.line {
        _ if lab.small => &SMALL_LEVELS,
        Some(line) if line.rate_mbit <= 20.0 => &SLOW_LEVELS,
        _ => &LEVELS,
    }
}

/// A row for each level; those that fail say why, and the others go on.
fn measure(lab: &Lab, setting: &Setting) -> Result<Vec<Row>> {
    let image = image(lab)?;
    // Into the page cache, so that the first level does not read it from a disk.
    identical(&image, &image)?;
    let taken = setting.taken.then(Taken::start);
    let mut rows = Vec::new();
    for level in levels(lab, setting) {
        let mut row = Row::new([
            ("where", setting.place()),
            ("beside", setting.beside().to_owned()),
            ("level", (*level).to_owned()),
        ]);
        let runs = (0..lab.repeat.max(1)).map(|run| send(lab, setting, &image, level, run as u64));
        match runs.collect::<Result<Vec<_>>>() {
            Ok(mut runs) => {
                runs.sort_by(|a, b| a.0.total_cmp(&b.0));
                let (seconds, bytes) = runs[runs.len() / 2];
                eprintln!("  {level}: {seconds:.2} s");
                row.set(key::SECONDS, seconds);
                row.set(key::WIRE, bytes as f64 / 1e6);
            }
            Err(error) => row.verdict = Verdict::Failed(mover::reason(&error)),
        }
        rows.push(row);
    }
    drop(taken);
    compare(&mut rows);
    Ok(rows)
}

/// Tells each row how it is against the best level that stayed.
fn compare(rows: &mut [Row]) {
    let fixed = rows.iter().filter(|row| row.label("level") != AUTO);
    let best = fixed
        .filter_map(|row| row.value(key::SECONDS))
        .min_by(f64::total_cmp);
    for row in rows {
        if let Some((seconds, best)) = row.value(key::SECONDS).zip(best) {
            row.set(TIMES_BEST, seconds / best);
        }
    }
}

/// Sends the image to an empty site: seconds, and bytes on the wire.
fn send(lab: &Lab, setting: &Setting, image: &Path, level: &str, run: u64) -> Result<(f64, u64)> {
    let drover = lab.binary()?;
    let work = lab.work("compress")?;
    let net = Net::like(setting.line, run)?;
    let site = Site::start(&drover, &work.join("site"), net.place())?;
    let sender = Sender::pair(&drover, &work.join("sender"), net.place(), &site)?;
    let mut options = vec!["--compress", level];
    options.extend(setting.limit.iter().flat_map(|limit| ["--limit", limit]));
    let sent = sender.send(image, &options)?;
    if !identical(image, &site.image(&file_name(image)))? {
        bail!("the delivered file is not its original");
    }
    let bytes = sent.images.iter().map(|image| image.wire_bytes()).sum();
    Ok((sent.seconds, bytes))
}

/// A core that something else has.
struct Taken {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Taken {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Taken {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::stand_in;

    #[test]
    fn every_level_is_a_row_beside_the_best() {
        let dir = tempfile::tempdir().unwrap();
        let mut lab = stand_in::lab(dir.path(), "");
        (lab.small, lab.repeat) = (true, 1);
        let images = dir.path().join("cache/images");
        std::fs::create_dir_all(&images).unwrap();
        std::fs::create_dir_all(dir.path().join("out")).unwrap();
        std::fs::write(images.join("small-two.raw"), vec![7; 8192]).unwrap();
        let cases = Compress.cases(&lab).unwrap();
        let rows = Compress.run(&lab, &cases[0]).unwrap();
        assert_eq!(rows.len(), SMALL_LEVELS.len());
        for row in &rows {
            assert_eq!(row.verdict, Verdict::Good, "{row:?}");
            assert!(row.value(TIMES_BEST).unwrap() > 0.0);
        }
        let best = rows[1..].iter().filter_map(|r| r.value(TIMES_BEST));
        assert_eq!(best.min_by(f64::total_cmp), Some(1.0));
    }

    #[test]
    fn there_is_a_case_for_each_circumstance() {
        let dir = tempfile::tempdir().unwrap();
        let lab = stand_in::lab(dir.path(), "");
        let mut ids: Vec<String> = settings(&lab).iter().map(Setting::slug).collect();
        assert_eq!(ids.len(), 16);
        ids.dedup();
        assert_eq!(ids.len(), 16);
        assert!(ids.contains(&"limit-100M-taken".to_owned()));
        assert!(ids.contains(&"400mbit-10ms".to_owned()));
    }
}
