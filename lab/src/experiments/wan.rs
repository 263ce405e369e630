//! Figure 2: one image over a link to a site that has similar ones; time until it is complete, against
//! bytes over bandwidth, and rivals in the same place.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::Table;
use serde::Serialize;

use super::{Common, Net, all_identical, file_name, yes_no};
use crate::limit::Known;
use crate::link::LinkArgs;
use crate::report::{self, Report, mb, mib};
use crate::rivals::{Carrier, Mode, Rsync};
use crate::same::identical;
use crate::site::{Sender, Site};

/// Which image, to a site with which, and over what.
#[derive(Args)]
pub struct WanArgs {
    /// The image to send, as a file or by name.
    #[arg(default_value = "bookworm-db")]
    image: PathBuf,
    /// Images that the site has; the last one is the rivals' basis.
    #[arg(long, value_name = "IMAGE", num_args = 1.., default_values = ["bookworm-plain", "bookworm-app"])]
    with: Vec<PathBuf>,
    /// Measure rsync in the same place, too: delta with the last of --with as its basis, and compressed.
    #[arg(long)]
    rivals: bool,
    #[command(flatten)]
    link: LinkArgs,
    #[command(flatten)]
    common: Common,
}

/// One way to send the image.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// drover or a rival, with settings.
    pub by: String,
    /// From start to exit.
    pub seconds: f64,
    /// IP bytes on the link, both ways, with every header.
    pub link_bytes: u64,
    /// Bytes towards the site: drover's own count where there is one, else the link's.
    pub sent_bytes: u64,
    /// Those over the link's rate, in seconds.
    pub ideal_seconds: f64,
    /// The greatest peak memory of the sender; none where it was not watched.
    pub sender_peak_bytes: Option<u64>,
    /// That of the site.
    pub site_peak_bytes: Option<u64>,
    /// Whether the delivered file is the original; none when it failed.
    pub identical: Option<bool>,
    /// Why it failed.
    pub error: Option<String>,
}

/// Runs the experiment.
///
/// # Errors
/// When it cannot be set up or drover fails; a rival that fails has its row say so.
pub fn run(args: &WanArgs) -> Result<()> {
    let common = &args.common;
    let image = common.image(&args.image)?;
    let with: Vec<PathBuf> = args
        .with
        .iter()
        .map(|p| common.image(p))
        .collect::<Result<_>>()?;
    let rate = args.link.rate_mbit * 125_000.0;
    anyhow::ensure!(rate > 0.0, "a link without a rate has no ideal time");
    let mut known = Known::default();
    for path in &with {
        known.add(path)?;
    }
    let limit = known.add(&image)?;
    let net = Net::over(&args.link)?;
    let work = common.work("wan")?;
    let drover = common.binary()?;

    let mut rows = vec![by_drover(
        &drover,
        &image,
        &with,
        &net,
        &work.join("drover"),
        rate,
    )?];
    if args.rivals {
        for mode in [Mode::Delta, Mode::Compressed] {
            rows.push(by_rival(
                mode,
                &image,
                with.last(),
                &net,
                &work.join("rival"),
                rate,
            ));
        }
    }
    let names: Vec<String> = with.iter().map(|p| file_name(p)).collect();
    let setting = format!(
        "{} to a site with {}; limit {} MB = {:.2} s; {}",
        file_name(&image),
        names.join(", "),
        mb(limit.limit_bytes),
        limit.limit_bytes as f64 / rate,
        net.describe()
    );
    let report = Report::new("wan", setting, rows);
    report.publish(&table(&report.rows), common.json, &common.out)?;
    let wrong: Vec<String> = report
        .rows
        .iter()
        .filter(|r| r.identical == Some(false))
        .map(|r| r.by.clone())
        .collect();
    all_identical(&wrong)
}

fn by_drover(
    drover: &Path,
    image: &Path,
    with: &[PathBuf],
    net: &Net,
    dir: &Path,
    rate: f64,
) -> Result<Row> {
    let site = Site::start(drover, &dir.join("site"), net.place())?;
    let sender = Sender::pair(drover, &dir.join("sender"), net.place(), &site)?;
    for path in with {
        let outcome = sender.send(path, &[])?;
        eprintln!("before: {} in {:.1} s", file_name(path), outcome.seconds);
    }
    let before = net.bytes().context("no link")?;
    let outcome = sender.send(image, &[])?;
    let after = net.bytes().context("no link")?;
    let sent = outcome.images.first().context("nothing was sent")?;
    Ok(Row {
        by: "drover".to_owned(),
        seconds: outcome.seconds,
        link_bytes: after.0 - before.0 + after.1 - before.1,
        sent_bytes: sent.wire_sent_bytes,
        ideal_seconds: sent.wire_sent_bytes as f64 / rate,
        sender_peak_bytes: Some(outcome.cost.peak_rss_bytes),
        site_peak_bytes: Some(site.cost().peak_rss_bytes),
        identical: Some(identical(image, &site.image(&file_name(image)))?),
        error: None,
    })
}

fn by_rival(
    mode: Mode,
    image: &Path,
    basis: Option<&PathBuf>,
    net: &Net,
    dir: &Path,
    rate: f64,
) -> Row {
    let mut row = Row {
        by: format!("rsync {mode:?}"),
        seconds: 0.0,
        link_bytes: 0,
        sent_bytes: 0,
        ideal_seconds: 0.0,
        sender_peak_bytes: None,
        site_peak_bytes: None,
        identical: None,
        error: None,
    };
    let mut carry = || -> Result<()> {
        let mut rsync = Rsync::start(mode, dir, net.place())?;
        row.by = rsync.name();
        let before = net.bytes().context("no link")?;
        row.seconds = rsync.carry(image, basis.map(PathBuf::as_path))?;
        let after = net.bytes().context("no link")?;
        row.sent_bytes = after.0 - before.0;
        row.link_bytes = row.sent_bytes + after.1 - before.1;
        row.ideal_seconds = row.sent_bytes as f64 / rate;
        row.identical = Some(identical(image, &rsync.delivered(image))?);
        Ok(())
    };
    if let Err(error) = carry() {
        row.error = Some(format!("{error:#}"));
    }
    row
}

fn table(rows: &[Row]) -> Table {
    let mut table = report::table(&[
        "by",
        "seconds",
        "sent MB",
        "link MB",
        "bytes / bandwidth s",
        "ratio",
        "sender MiB",
        "site MiB",
        "identical",
    ]);
    for row in rows {
        if let Some(error) = &row.error {
            table.add_row(vec![format!("{}: FAILED: {error}", row.by)]);
            continue;
        }
        table.add_row(vec![
            row.by.clone(),
            format!("{:.2}", row.seconds),
            mb(row.sent_bytes),
            mb(row.link_bytes),
            format!("{:.2}", row.ideal_seconds),
            format!("{:.2}", row.seconds / row.ideal_seconds),
            row.sender_peak_bytes.map(mib).unwrap_or_default(),
            row.site_peak_bytes.map(mib).unwrap_or_default(),
            row.identical.map(yes_no).unwrap_or_default(),
        ]);
    }
    table
}
