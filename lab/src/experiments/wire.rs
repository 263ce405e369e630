//! Figure 1: the library sent in order to an empty site; bytes on the wire against the limit.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::Table;
use drover_core::BLOCK_SIZE_U64;
use serde::Serialize;

use super::{Common, Net, all_identical, file_name, yes_no};
use crate::limit::{Known, Limit};
use crate::link::LinkArgs;
use crate::report::{self, Report, mb, mib};
use crate::same::identical;
use crate::site::{Outcome, Sender, Sent, Site};
use crate::watch::Cost;

/// Which images, and over what.
#[derive(Args)]
pub struct WireArgs {
    /// Images in the order in which they are sent, as files or by name [default: the whole library].
    images: Vec<PathBuf>,
    /// Over loopback instead of a link (a fast link lets drover choose a lower compression).
    #[arg(long)]
    loopback: bool,
    #[command(flatten)]
    link: LinkArgs,
    #[command(flatten)]
    common: Common,
}

/// One image on its way.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What drover says.
    pub sent: Sent,
    /// What the limit says.
    pub limit: Limit,
    /// Bytes on the wire, by drover's count, over the limit.
    pub wire_over_limit: f64,
    /// Of the matches of exact deduplication, the share that drover found.
    pub share_of_exact_matches: f64,
    /// IP bytes on the link, both ways, with every header; none over loopback.
    pub link_bytes: Option<u64>,
    /// From start to exit.
    pub seconds: f64,
    /// Bytes towards the site over the link's rate, in seconds; none without a rate.
    pub ideal_seconds: Option<f64>,
    /// What the sender cost.
    pub sender: Cost,
    /// What the site has cost from its start on.
    pub site: Cost,
    /// Whether the delivered file is the original.
    pub identical: bool,
}

/// Runs the experiment.
///
/// # Errors
/// When it cannot be set up, a send fails, or a delivered file is not the original.
pub fn run(args: &WireArgs) -> Result<()> {
    let images = args.common.images(&args.images)?;
    let net = if args.loopback {
        Net::loopback()
    } else {
        Net::over(&args.link)?
    };
    let drover = args.common.binary()?;
    let work = args.common.work("wire")?;
    let site = Site::start(&drover, &work.join("site"), net.place())?;
    let sender = Sender::pair(&drover, &work.join("sender"), net.place(), &site)?;
    let mut known = Known::default();
    let mut rows: Vec<Row> = Vec::new();
    let mut failed = None;
    for image in &images {
        // Before the send, so that it reads from memory and the disk is not what is measured.
        let limit = known.add(image)?;
        let before = net.bytes();
        let outcome = match sender.send(image, &[]) {
            Ok(outcome) => outcome,
            Err(error) => {
                failed = Some(error);
                break;
            }
        };
        let name = file_name(image);
        let link = net
            .bytes()
            .zip(before)
            .map(|(now, was)| (now.0 - was.0, now.1 - was.1));
        let same = identical(image, &site.image(&name))?;
        eprintln!(
            "{name}: {:.1} s, {}",
            outcome.seconds,
            if same { "identical" } else { "DIFFERENT" }
        );
        rows.push(row(outcome, limit, link, rate_of(args), site.cost(), same)?);
    }
    let setting = format!(
        "{} image(s) in order to an empty site, {}",
        images.len(),
        net.describe()
    );
    let report = Report::new("wire", setting, rows);
    report.publish(&table(&report.rows), args.common.json, &args.common.out)?;
    if let Some(error) = failed {
        return Err(error);
    }
    let wrong: Vec<String> = report
        .rows
        .iter()
        .filter(|r| !r.identical)
        .map(|r| r.sent.name.clone())
        .collect();
    all_identical(&wrong)
}

fn rate_of(args: &WireArgs) -> Option<f64> {
    (!args.loopback && args.link.rate_mbit > 0.0).then_some(args.link.rate_mbit * 125_000.0)
}

/// Puts together what was seen of one image.
pub fn row(
    outcome: Outcome,
    limit: Limit,
    link: Option<(u64, u64)>,
    rate: Option<f64>,
    site: Cost,
    identical: bool,
) -> Result<Row> {
    let sent = outcome
        .images
        .into_iter()
        .next()
        .context("nothing was sent")?;
    let exact = limit.matched_blocks + limit.repeated_blocks;
    Ok(Row {
        wire_over_limit: sent.wire_bytes() as f64 / limit.limit_bytes.max(1) as f64,
        share_of_exact_matches: sent.matched_blocks as f64 / exact.max(1) as f64,
        link_bytes: link.map(|(near, far)| near + far),
        seconds: outcome.seconds,
        ideal_seconds: rate.map(|rate| sent.wire_sent_bytes as f64 / rate),
        sender: outcome.cost,
        site,
        identical,
        sent,
        limit,
    })
}

/// The rows for people.
pub fn table(rows: &[Row]) -> Table {
    let mut table = report::table(&[
        "image",
        "data MiB",
        "sent MB",
        "received MB",
        "limit MB",
        "wire / limit",
        "link MB",
        "matched",
        "of exact %",
        "seconds",
        "s / ideal",
        "sender MiB",
        "site MiB",
        "identical",
    ]);
    let (mut wire, mut limit) = (0, 0);
    for row in rows {
        wire += row.sent.wire_bytes();
        limit += row.limit.limit_bytes;
        table.add_row(vec![
            row.sent.name.clone(),
            mib(row.limit.data_blocks * BLOCK_SIZE_U64),
            mb(row.sent.wire_sent_bytes),
            mb(row.sent.wire_received_bytes),
            mb(row.limit.limit_bytes),
            format!("{:.2}", row.wire_over_limit),
            row.link_bytes.map(mb).unwrap_or_default(),
            row.sent.matched_blocks.to_string(),
            format!("{:.1}", 100.0 * row.share_of_exact_matches),
            format!("{:.2}", row.seconds),
            row.ideal_seconds
                .map(|s| format!("{:.2}", row.seconds / s))
                .unwrap_or_default(),
            mib(row.sender.peak_rss_bytes),
            mib(row.site.peak_rss_bytes),
            yes_no(row.identical),
        ]);
    }
    let mut total = vec![String::new(); 14];
    total[0] = "all".to_owned();
    total[2] = mb(rows.iter().map(|r| r.sent.wire_sent_bytes).sum());
    total[3] = mb(rows.iter().map(|r| r.sent.wire_received_bytes).sum());
    total[4] = mb(limit);
    total[5] = format!("{:.2}", wire as f64 / limit.max(1) as f64);
    total[9] = format!("{:.2}", rows.iter().map(|r| r.seconds).sum::<f64>());
    table.add_row(total);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_what_they_say() {
        let limit = Limit {
            name: "a".into(),
            size_bytes: 1 << 20,
            data_blocks: 100,
            matched_blocks: 40,
            repeated_blocks: 10,
            unique_blocks: 50,
            limit_bytes: 1000,
        };
        let sent = Sent {
            name: "a".into(),
            wire_sent_bytes: 1000,
            wire_received_bytes: 100,
            matched_blocks: 49,
            ..Sent::default()
        };
        let outcome = Outcome {
            images: vec![sent],
            seconds: 3.0,
            cost: Cost::default(),
        };
        let row = row(
            outcome,
            limit,
            Some((1050, 110)),
            Some(500.0),
            Cost::default(),
            true,
        )
        .unwrap();
        assert_eq!(
            (row.wire_over_limit, row.share_of_exact_matches),
            (1.1, 0.98)
        );
        assert_eq!((row.link_bytes, row.ideal_seconds), (Some(1160), Some(2.0)));
        let shown = table(&[row]).to_string();
        assert!(
            shown.contains("1.10") && shown.contains("98.0") && shown.contains("1.50"),
            "{shown}"
        );
    }
}
