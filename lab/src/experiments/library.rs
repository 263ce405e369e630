//! Sends the library in order to an empty site: bytes and time of drover, its rivals, and the limit (`teleportation`
//! §3.5 and §3.9, figures 15 and 16; `vmflock` §4.2 and §4.4).

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::lines::{self, FAST, Line, Net, REFERENCE};
use super::mover::{self, Alike, By, Carried, Mover, key};
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::library::{self, Set};
use crate::limit::Limit;
use crate::link;
use crate::setup::Lab;

/// The row for all images together.
const ALL: &str = "all";
/// Rivals measured on the small set: those that every machine has.
const SMALL_RIVALS: &[&str] = &["zstd", "rsync-delta"];
/// Slow rivals, which are not part of every run.
const SLOW_RIVALS: [&str; 4] = ["rsync-whole", "qemu-nbd", "restic", "casync"];

pub const EXPERIMENT: Experiment = Experiment {
    name: "library",
    title: "The image library, sent in order to an empty site",
    text: "Every image of the library is sent, one after the other, over a link to a site that has nothing at first. \
What arrived earlier is what later images can be found in. Time runs from the start of the command until it says that \
the image is there, and every delivered file is compared with its original. *MB on the link* are IP bytes both ways, \
with every header and what TCP sent again. The *limit* is the unique non-zero blocks through `zstd -3 --long=27`, and \
their time at the link's rate, without a handshake. *Over ideal* is the time over that which the bytes of the busier \
direction need at the link's rate. *Teleported* is the share of the data's bytes that did not cross the link; *times a \
copy* says how much longer a copy of the data would take that fills the link and skips what is zero; rsync without its \
delta sends the zeros, too.",
    columns: &[
        Column::label("image", "image"),
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure(key::DATA, "data MB", 1),
        Column::figure(key::BYTES, "MB on the link", 2),
        Column::optional(key::WIRE, "MB by own count", 2),
        Column::optional(key::OVER_LIMIT, "times the limit", 2),
        Column::figure(key::SECONDS, "seconds", 2),
        Column::optional(key::OVER_IDEAL, "over ideal", 2),
        Column::optional(key::TELEPORTED, "teleported %", 1),
        Column::optional(key::TIMES_COPY, "times a copy", 2),
        Column::optional(key::SENDER_MIB, "sender MiB", 1),
        Column::optional(key::SITE_MIB, "site MiB", 1),
        Column::optional(key::SENDER_CPU, "sender CPU s", 2),
        Column::optional(key::SITE_CPU, "site CPU s", 2),
    ],
    cases: |lab| Ok(plan(lab).into_iter().map(|(case, ..)| case).collect()),
    run,
};

/// The images in sending order.
fn in_order(lab: &Lab) -> Result<Vec<PathBuf>> {
    let all = library::images(&lab.common.dir, lab.either(Set::Full, Set::Small))?;
    let fits = all
        .into_iter()
        .filter(|image| image.built && image.in_order);
    let built: Vec<PathBuf> = fits.map(|image| image.path).collect();
    if built.is_empty() {
        bail!("no image in {}: lab library", lab.common.dir.display());
    }
    Ok(built)
}

/// Every case with what it measures.
fn plan(lab: &Lab) -> Vec<(Case, Option<Line>, By)> {
    let case = |line: Option<Line>, by: By, rank| {
        let what = format!("the library by {} at {}", by.name(), lines::describe(line));
        let id = format!("{}-{}", lines::slug(line), by.name());
        (by.case(id, what, rank, line), line, by)
    };
    if lab.small {
        // Without network namespaces, drover is measured over loopback.
        let line = link::available().is_ok().then_some(FAST);
        let own = [By::Limit, By::Drover].map(|by| case(line, by, 0));
        let rivals = By::rivals(SMALL_RIVALS).map(|by| case(Some(FAST), by, 1));
        return own.into_iter().chain(rivals).collect();
    }
    let mut plan = Vec::new();
    for line in lines::matrix() {
        let rank = |by: &By| u8::from(line != REFERENCE || SLOW_RIVALS.contains(&by.name()));
        let all = [By::Limit, By::Drover].into_iter().chain(By::rivals(&[]));
        plan.extend(all.map(|by| case(Some(line), by, rank(&by))));
    }
    plan
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let job = plan(lab)
        .into_iter()
        .find(|(planned, ..)| planned.id == case.id);
    let (_, line, by) = job.context("no such case")?;
    let images = in_order(lab)?;
    let limits = mover::limits(lab, &[], &images)?;
    let row = |image: &str| {
        let by = ("by", by.name().to_owned());
        Row::new([
            ("image", image.to_owned()),
            ("link", lines::describe(line)),
            by,
        ])
    };
    if let By::Limit = by {
        let labels = images.iter().map(|image| mover::label(image));
        let each = labels
            .zip(&limits)
            .map(|(name, limit)| mover::fill_limit(row(&name), limit, line));
        let all = mover::fill_limit(row(ALL), &Limit::total(&limits), line);
        return Ok(each.chain([all]).collect());
    }
    if let Some(why) = by.missing() {
        return Ok(vec![row(ALL).but(Verdict::Skipped(why))]);
    }
    send_all(lab, (line, by), &images, &limits, &row)
}

/// Sends all images. One that fails gets a row with the error; the others are still sent.
fn send_all(
    lab: &Lab,
    (line, by): (Option<Line>, By),
    images: &[PathBuf],
    limits: &[Limit],
    row: &dyn Fn(&str) -> Row,
) -> Result<Vec<Row>> {
    let net = Net::like(line, 1)?;
    let work = lab.work("library")?;
    let mut mover = Mover::start(by, &lab.binary()?, &net, &work.join(by.name()))?;
    let (mut rows, mut there, mut carried) = (Vec::new(), Vec::new(), Vec::new());
    let mut alike = Alike::default();
    for (image, limit) in images.iter().zip(limits) {
        let name = mover::label(image);
        let basis = match by {
            By::Rival(_) => alike.most_similar(image, &there)?,
            _ => None,
        };
        match mover.carry(&net, image, basis) {
            Ok(one) => {
                eprintln!("  {name}: {:.1} s", one.seconds);
                rows.push(mover::fill(
                    row(&name),
                    std::slice::from_ref(&one),
                    limit,
                    line,
                ));
                if one.same {
                    there.push(image.clone());
                }
                carried.push(one);
            }
            Err(error) => rows.push(row(&name).but(Verdict::failed(&error))),
        }
    }
    rows.push(match images.len() - there.len() {
        0 => mover::fill(
            row(ALL),
            &[Carried::total(&carried)],
            &Limit::total(limits),
            line,
        ),
        bad => row(ALL).but(Verdict::Failed(format!("{bad} of {} images", images.len()))),
    });
    Ok(rows)
}
