//! Sends groups of images that belong together: to an empty site, and to one with a similar image (`vmflock` §4.2, figures 2 and
//! 3, and §4.4, figure 6).

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::lines::{self, FAST, Line, Net, line};
use super::mover::{self, By, Carried, Mover, key};
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::limit::Limit;
use crate::link;
use crate::rivals;
use crate::setup::Lab;

/// The link between the paper's sites.
const PAPER: Line = line(16.0, 41.0, 0.0);
/// The same with more bandwidth.
const WIDE: Line = line(100.0, 41.0, 0.0);

/// Rivals that know nothing of flocks.
const SINGLE: &[&str] = &["zstd", "rsync-delta"];

/// Bytes on the link as a share of the data.
const RATE: &str = "rate_percent";

pub const EXPERIMENT: Experiment = Experiment {
    name: "flock",
    title: "Images that belong together",
    text: "Groups of images are sent as one job (`--flock`), to a site that has nothing and to one that has been sent an image like them, which is not measured. *app* are the three machines of an application (web server, database, file server), *same-os* four of one release with \
different packages, *diff-os* four of three releases. The *rate* is bytes on the link, both ways with all headers, as a share of the data, which is what is not zero; the lower the better. The *limit* is exact deduplication of the whole group and of what the site has, in 4 KiB blocks, through \
`zstd -3 --long=27`. The rivals are the paper's: *gzip-all* (one tar file), *gzip-separate* and *dedup-separate* (blocks of 4 KiB, zlib each, found within the image and in what the site had, not in the others of the group), which send all images at once; and zstd and rsync, \
one image after the other. Time runs until every image is on the far disk. The link is the paper's, 41 ms and 16 Mbit/s, and one with 100 Mbit/s. Each run begins with a site of its own.",
    columns: &[
        Column::label("workload", "workload"),
        Column::label("there", "there is"),
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure(key::DATA, "data MB", 1),
        Column::figure(key::BYTES, "MB on the link", 2),
        Column::optional(RATE, "rate %", 2),
        Column::optional(key::OVER_LIMIT, "times the limit", 3),
        Column::figure(key::SECONDS, "seconds", 2),
        Column::optional(key::OVER_IDEAL, "over ideal", 3),
        Column::optional(key::TIMES_COPY, "times a copy", 2),
        Column::optional(key::SENDER_MIB, "sender MiB", 1),
        Column::optional(key::SITE_MIB, "site MiB", 1),
        Column::optional(key::SENDER_CPU, "sender CPU s", 2),
        Column::optional(key::SITE_CPU, "site CPU s", 2),
    ],
    cases: |lab| Ok(plan(lab).into_iter().map(|job| job.case).collect()),
    run,
};

/// A name, the images, and the image that the site has in the second case.
type Workload = (&'static str, &'static [&'static str], &'static str);

const FULL: &[Workload] = &[
    (
        "app",
        &["bookworm-web", "bookworm-db", "bookworm-nfs"],
        "bookworm-plain",
    ),
    (
        "same-os",
        &[
            "bookworm-dev",
            "bookworm-app",
            "bookworm-pg",
            "bookworm-web",
        ],
        "bookworm-plain",
    ),
    (
        "diff-os",
        &[
            "bookworm-dev",
            "bookworm-nfs",
            "trixie-plain",
            "bullseye-plain",
        ],
        "bookworm-plain",
    ),
];

const SMALL: &[Workload] = &[("app", &["small-one", "small-two"], "small-one")];

/// What a case measures.
struct Job {
    case: Case,
    line: Option<Line>,
    by: By,
    workload: &'static Workload,
    /// Whether the site has the similar image.
    similar: bool,
}

fn everyone() -> impl Iterator<Item = By> {
    let of_flocks = rivals::OF_FLOCKS.iter().map(|rival| By::Rival(*rival));
    [By::Limit, By::Drover]
        .into_iter()
        .chain(of_flocks)
        .chain(By::rivals(SINGLE))
}

fn plan(lab: &Lab) -> Vec<Job> {
    let mut plan = Vec::new();
    let mut add = |line: Option<Line>, workload: &'static Workload, similar: bool| {
        for by in everyone() {
            // Without network namespaces, drover is measured over loopback.
            let line = match by {
                By::Rival(_) if lab.small => Some(FAST),
                _ => line,
            };
            let (name, ..) = workload;
            let there = if similar { "similar" } else { "empty" };
            let id = format!("{}-{name}-{there}-{}", lines::slug(line), by.name());
            let what = format!(
                "{name} to a site that {}, by {} at {}",
                if similar {
                    "has a similar image"
                } else {
                    "has nothing"
                },
                by.name(),
                lines::describe(line)
            );
            let rank = u8::from(!matches!(by, By::Limit | By::Drover));
            plan.push(Job {
                case: by.case(id, what, rank, line),
                line,
                by,
                workload,
                similar,
            });
        }
    };
    if lab.small {
        let line = link::available().is_ok().then_some(FAST);
        add(line, &SMALL[0], false);
        add(line, &SMALL[0], true);
        return plan;
    }
    // Over the paper's link last: at 16 Mbit/s each takes many minutes.
    for line in [WIDE, PAPER] {
        for workload in FULL {
            add(Some(line), workload, false);
            add(Some(line), workload, true);
        }
    }
    plan
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let job = plan(lab).into_iter().find(|job| job.case.id == case.id);
    Ok(vec![measure(lab, &job.context("no such case")?)])
}

/// The row of a case, whether it succeeds or fails.
fn measure(lab: &Lab, job: &Job) -> Row {
    let (name, images, similar) = job.workload;
    let there = if job.similar { similar } else { &"nothing" };
    let row = Row::new([
        ("workload", (*name).to_owned()),
        ("there", (*there).to_owned()),
        ("link", lines::describe(job.line)),
        ("by", job.by.name().to_owned()),
    ]);
    let found = || -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
        let images = images
            .iter()
            .map(|name| lab.image(name))
            .collect::<Result<_>>()?;
        let with = match job.similar {
            true => vec![lab.image(similar)?],
            false => Vec::new(),
        };
        Ok((images, with))
    };
    let (images, with) = match (job.by.missing(), found()) {
        (None, Ok(found)) => found,
        (Some(why), _) => return row.but(Verdict::Skipped(why)),
        (_, Err(error)) => return row.but(Verdict::Skipped(format!("{error:#}"))),
    };
    let measured = || -> Result<Row> {
        let limit = Limit::total(&mover::limits(lab, &with, &images)?);
        // Rivals are slow, so they run once.
        let runs = match job.by {
            By::Limit => return Ok(rate(mover::fill_limit(row.clone(), &limit, job.line))),
            By::Drover => lab.repeat.max(1),
            By::Rival(_) => 1,
        };
        let carried = (0..runs)
            .map(|run| once(lab, job, &with, &images, run as u64))
            .collect::<Result<Vec<_>>>()?;
        Ok(rate(mover::fill(row.clone(), &carried, &limit, job.line)))
    };
    measured().unwrap_or_else(|error| row.clone().but(Verdict::failed(&error)))
}

/// Adds the compression rate.
fn rate(mut row: Row) -> Row {
    if let (Some(bytes), Some(data)) = (row.value(key::BYTES), row.value(key::DATA))
        && data > 0.0
    {
        row.set(RATE, 100.0 * bytes / data);
    }
    row
}

/// Prepares a site over loopback, which is fast, and then sends the images to it over the line.
fn once(lab: &Lab, job: &Job, with: &[PathBuf], images: &[PathBuf], run: u64) -> Result<Carried> {
    let (drover, work) = (lab.binary()?, lab.work("flock")?);
    let ends = work.join(job.by.name());
    if !with.is_empty() {
        let nowhere = Net::like(None, 0)?;
        let mut ready = Mover::start(job.by, &drover, &nowhere, &ends)?;
        for there in with {
            let carried = ready
                .carry(&nowhere, there, None)
                .with_context(|| format!("preparing with {}", mover::label(there)))?;
            ensure!(carried.same, "{} arrived wrong", mover::label(there));
        }
    }
    let net = Net::like(job.line, 1 + run)?;
    let mut ready = Mover::start(job.by, &drover, &net, &ends)?;
    let carried = ready.carry_flock(&net, images, with)?;
    let name = job.workload.0;
    eprintln!("  {name}, run {}: {:.2} s", run + 1, carried.seconds);
    Ok(carried)
}
