//! Figure 3: over loopback, without a limit: a first send against `rsync --whole-file`, and a second send of
//! the same image. Repetitions are alternated, so that what the machine does meanwhile hits all alike.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::Table;
use serde::Serialize;

use super::{Common, all_identical, file_name, yes_no};
use crate::report::{self, Report, Spread, mib};
use crate::rivals::{Carrier, Mode, Rsync};
use crate::same::identical;
use crate::site::{Outcome, Sender, Site, Where};
use crate::watch::Cost;

/// Which image and how often.
#[derive(Args)]
pub struct LocalArgs {
    /// The image to send, as a file or by name.
    #[arg(default_value = "bookworm-app")]
    image: PathBuf,
    /// Repetitions of each.
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    #[command(flatten)]
    common: Common,
}

/// One way to send the image.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// drover or rsync, and which send.
    pub by: String,
    /// From start to exit.
    pub seconds: Spread,
    /// Times as fast as `rsync --whole-file`, by the medians.
    pub times_rsync: f64,
    /// Bytes on the wire of the last repetition, by drover's count.
    pub wire_bytes: Option<u64>,
    /// Greatest cost of the sender; none where it was not watched.
    pub sender: Option<Cost>,
    /// Greatest cost of the site.
    pub site: Option<Cost>,
    /// Whether each delivered file was the original.
    pub identical: bool,
}

/// What has been measured of one way so far.
#[derive(Default)]
struct Series {
    seconds: Vec<f64>,
    wire_bytes: Option<u64>,
    sender: Option<Cost>,
    site: Option<Cost>,
    different: bool,
}

impl Series {
    fn drover(&mut self, outcome: &Outcome, site: Cost, same: bool) {
        self.seconds.push(outcome.seconds);
        self.wire_bytes = outcome.images.first().map(|sent| sent.wire_bytes());
        self.sender = Some(greater(self.sender, outcome.cost));
        self.site = Some(greater(self.site, site));
        self.different |= !same;
    }
}

fn greater(so_far: Option<Cost>, now: Cost) -> Cost {
    let so_far = so_far.unwrap_or_default();
    Cost {
        peak_rss_bytes: so_far.peak_rss_bytes.max(now.peak_rss_bytes),
        cpu_seconds: so_far.cpu_seconds.max(now.cpu_seconds),
    }
}

/// Runs the experiment.
///
/// # Errors
/// When it cannot be set up, something fails, or a delivered file is not the original.
pub fn run(args: &LocalArgs) -> Result<()> {
    let common = &args.common;
    let image = common.image(&args.image)?;
    let drover = common.binary()?;
    let work = common.work("local")?;
    let mut whole = Series::default();
    let mut synced = Series::default();
    let mut first = Series::default();
    let mut second = Series::default();
    // Once for nothing: everyone reads the image from memory.
    identical(&image, &image)?;
    for round in 0..args.repeat.max(1) {
        // Another begins each time: what one leaves to the disk is not always paid by the same next one.
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => by_rsync(Mode::Whole, &image, &work.join("rsync"), &mut whole)?,
                1 => by_rsync(Mode::WholeSynced, &image, &work.join("rsync"), &mut synced)?,
                _ => by_drover(
                    &drover,
                    &image,
                    &work.join("drover"),
                    &mut first,
                    &mut second,
                )?,
            }
        }
        eprintln!(
            "round {}: rsync {:.2} s, with fsync {:.2} s, drover first {:.2} s, second {:.2} s",
            round + 1,
            last(&whole),
            last(&synced),
            last(&first),
            last(&second)
        );
    }
    let rsync = Spread::of(&whole.seconds).context("no round")?;
    let rows = [
        ("rsync --whole-file", whole),
        ("rsync --whole-file --fsync", synced),
        ("drover, first send", first),
        ("drover, second send", second),
    ]
    .into_iter()
    .map(|(by, series)| row(by, series, rsync))
    .collect::<Result<Vec<_>>>()?;
    let setting = format!(
        "{} over loopback, {} rounds",
        file_name(&image),
        args.repeat.max(1)
    );
    let report = Report::new("local", setting, rows);
    report.publish(&table(&report.rows), common.json, &common.out)?;
    let wrong: Vec<String> = report
        .rows
        .iter()
        .filter(|r| !r.identical)
        .map(|r| r.by.clone())
        .collect();
    all_identical(&wrong)
}

fn last(series: &Series) -> f64 {
    series.seconds.last().copied().unwrap_or_default()
}

fn row(by: &str, series: Series, rsync: Spread) -> Result<Row> {
    let seconds = Spread::of(&series.seconds).context("nothing was measured")?;
    Ok(Row {
        by: by.to_owned(),
        times_rsync: rsync.median / seconds.median,
        seconds,
        wire_bytes: series.wire_bytes,
        sender: series.sender,
        site: series.site,
        identical: !series.different,
    })
}

fn by_rsync(mode: Mode, image: &Path, dir: &Path, series: &mut Series) -> Result<()> {
    settle();
    let mut rsync = Rsync::start(mode, dir, Where::Loopback)?;
    series.seconds.push(rsync.carry(image, None)?);
    series.different |= !identical(image, &rsync.delivered(image))?;
    drop(rsync);
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

fn by_drover(
    drover: &Path,
    image: &Path,
    dir: &Path,
    first: &mut Series,
    second: &mut Series,
) -> Result<()> {
    let site = Site::start(drover, &dir.join("site"), Where::Loopback)?;
    let sender = Sender::pair(drover, &dir.join("sender"), Where::Loopback, &site)?;
    for series in [first, second] {
        settle();
        let outcome = sender.send(image, &[])?;
        let same = identical(image, &site.image(&file_name(image)))?;
        series.drover(&outcome, site.cost(), same);
    }
    drop(site);
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// Writes out what others left in memory: nobody pays for what another wrote.
fn settle() {
    rustix::fs::sync();
}

fn table(rows: &[Row]) -> Table {
    let mut table = report::table(&[
        "by",
        "seconds, median (least to greatest)",
        "times rsync",
        "wire MiB",
        "sender CPU s",
        "sender MiB",
        "site CPU s",
        "site MiB",
        "identical",
    ]);
    let cpu = |cost: Option<Cost>| {
        cost.map(|c| format!("{:.2}", c.cpu_seconds))
            .unwrap_or_default()
    };
    let memory = |cost: Option<Cost>| cost.map(|c| mib(c.peak_rss_bytes)).unwrap_or_default();
    for row in rows {
        table.add_row(vec![
            row.by.clone(),
            row.seconds.to_string(),
            format!("{:.2}", row.times_rsync),
            row.wire_bytes.map(mib).unwrap_or_default(),
            cpu(row.sender),
            memory(row.sender),
            cpu(row.site),
            memory(row.site),
            yes_no(row.identical),
        ]);
    }
    table
}
