//! Sends an image to a site that has a similar one: a similar system, the same image, an earlier state of it, or the
//! same system in another container or on another file system (`vmflock` §4.4; `teleportation` §3.5).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::lines::{self, FAST, Line, Net, REFERENCE};
use super::mover::{self, Alike, By, Carried, Mover, key};
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::link;
use crate::setup::Lab;

/// Rivals that can use data already at the far end.
const WITH_BASIS: &[&str] = &["rsync-delta", "casync", "desync", "restic", "borg"];
const SMALL_RIVALS: &[&str] = &["rsync-delta"];

pub const EXPERIMENT: Experiment = Experiment {
    name: "similar",
    title: "One image to a site that has something like it",
    text: "The site has been sent some images before, which is not measured; then one more is sent over the link. What is \
there: *similar* systems of the same release; the same image (*again*); the system some months earlier (*aged*, \
*aged-db*: packages upgraded and added, files rewritten, moved and deleted, a database that ran); the same disk in \
another container (*qcow2*, *vmdk*, *vhdx*); the same files on another file system (*btrfs*). Rivals are those that can \
use what the far end has. Each run begins with a site of its own. The columns are those of the library; the limit knows \
every 4 KiB block that the site has.",
    columns: &[
        Column::label("scenario", "there is"),
        Column::label("what", "sent"),
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure(key::DATA, "data MB", 1),
        Column::figure(key::BYTES, "MB on the link", 2),
        Column::optional(key::WIRE, "MB by own count", 2),
        Column::optional(key::OVER_LIMIT, "times the limit", 2),
        Column::figure(key::SECONDS, "seconds", 2),
        Column::optional(key::OVER_IDEAL, "over ideal", 2),
        Column::optional(key::TIMES_COPY, "times a copy", 2),
        Column::optional(key::SENDER_MIB, "sender MiB", 1),
        Column::optional(key::SITE_MIB, "site MiB", 1),
        Column::optional(key::SENDER_CPU, "sender CPU s", 2),
        Column::optional(key::SITE_CPU, "site CPU s", 2),
    ],
    cases: |lab| Ok(plan(lab).into_iter().map(|job| job.case).collect()),
    run,
};

/// A name, the image to send, and the images that the site has.
type Scenario = (&'static str, &'static str, &'static [&'static str]);

/// The first one is measured over every line.
const FULL: &[Scenario] = &[
    (
        "similar",
        "bookworm-db",
        &["bookworm-plain", "bookworm-app"],
    ),
    ("again", "bookworm-db", &["bookworm-db"]),
    ("aged", "bookworm-plain-aged", &["bookworm-plain"]),
    ("aged-db", "bookworm-db-aged", &["bookworm-db-release"]),
    ("qcow2", "bookworm-db.qcow2", &["bookworm-db"]),
    ("vmdk", "bookworm-db.vmdk", &["bookworm-db"]),
    ("vhdx", "bookworm-db.vhdx", &["bookworm-db"]),
    ("btrfs", "bookworm-db-btrfs", &["bookworm-db"]),
];

const SMALL: &[Scenario] = &[
    ("similar", "small-two", &["small-one"]),
    ("again", "small-two", &["small-two"]),
    ("aged", "small-two-aged", &["small-two"]),
];

/// What a case measures.
struct Job {
    case: Case,
    line: Option<Line>,
    by: By,
    scenarios: &'static [Scenario],
}

fn plan(lab: &Lab) -> Vec<Job> {
    let job = |line: Option<Line>, by: By, scenarios: &'static [Scenario], rank| {
        let (names, slug) = match scenarios {
            [(name, ..)] => ((*name).to_owned(), format!("-{name}")),
            several => (format!("{} scenarios", several.len()), String::new()),
        };
        let id = format!("{}-{}{slug}", lines::slug(line), by.name());
        let what = format!("{names}, by {} at {}", by.name(), lines::describe(line));
        Job {
            case: by.case(id, what, rank, line),
            line,
            by,
            scenarios,
        }
    };
    if lab.small {
        // Without network namespaces, drover is measured over loopback.
        let line = link::available().is_ok().then_some(FAST);
        let own = [By::Limit, By::Drover].map(|by| job(line, by, SMALL, 0));
        let rivals = By::rivals(SMALL_RIVALS).map(|by| job(Some(FAST), by, SMALL, 1));
        return own.into_iter().chain(rivals).collect();
    }
    let mut plan = vec![job(Some(REFERENCE), By::Limit, FULL, 0)];
    for one in FULL.chunks(1) {
        plan.push(job(Some(REFERENCE), By::Drover, one, 0));
        plan.extend(By::rivals(WITH_BASIS).map(|by| job(Some(REFERENCE), by, one, 1)));
    }
    for line in lines::matrix()
        .into_iter()
        .filter(|line| *line != REFERENCE)
    {
        plan.push(job(Some(line), By::Limit, FULL, 1));
        let all = [By::Drover].into_iter().chain(By::rivals(WITH_BASIS));
        plan.extend(all.map(|by| job(Some(line), by, &FULL[..1], 1)));
    }
    plan
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let job = plan(lab).into_iter().find(|job| job.case.id == case.id);
    let job = job.context("no such case")?;
    Ok(job
        .scenarios
        .iter()
        .map(|scenario| measure(lab, &job, scenario))
        .collect())
}

/// The row of a scenario, whether it succeeds or fails.
fn measure(lab: &Lab, job: &Job, (slug, image, with): &Scenario) -> Row {
    let row = Row::new([
        ("scenario", (*slug).to_owned()),
        (
            "what",
            format!("{image} to a site with {}", with.join(", ")),
        ),
        ("link", lines::describe(job.line)),
        ("by", job.by.name().to_owned()),
    ]);
    let images = || {
        anyhow::Ok((
            lab.image(image)?,
            with.iter()
                .map(|name| lab.image(name))
                .collect::<Result<Vec<_>>>()?,
        ))
    };
    let (image, with) = match (job.by.missing(), images()) {
        (None, Ok(images)) => images,
        (Some(why), _) => return row.but(Verdict::Skipped(why)),
        (_, Err(error)) => return row.but(Verdict::Skipped(format!("{error:#}"))),
    };
    let measured = || -> Result<Row> {
        let limit = mover::limits(lab, &with, std::slice::from_ref(&image))?.remove(0);
        // Rivals are slow, so they run once.
        let runs = match job.by {
            By::Limit => return Ok(mover::fill_limit(row.clone(), &limit, job.line)),
            By::Drover => lab.repeat.max(1),
            By::Rival(_) => 1,
        };
        let carried = (0..runs)
            .map(|run| once(lab, job, &with, &image, run as u64))
            .collect::<Result<Vec<_>>>()?;
        Ok(mover::fill(row.clone(), &carried, &limit, job.line))
    };
    measured().unwrap_or_else(|error| row.clone().but(Verdict::failed(&error)))
}

/// Prepares a site over loopback, which is fast, and then sends the image to it over the line.
fn once(lab: &Lab, job: &Job, with: &[PathBuf], image: &Path, run: u64) -> Result<Carried> {
    let (drover, work) = (lab.binary()?, lab.work("similar")?);
    let ends = work.join(job.by.name());
    let nowhere = Net::like(None, 0)?;
    let mut alike = Alike::default();
    let mut ready = Mover::start(job.by, &drover, &nowhere, &ends)?;
    for (at, there) in with.iter().enumerate() {
        let basis = alike.most_similar(there, &with[..at])?;
        let carried = ready
            .carry(&nowhere, there, basis)
            .with_context(|| format!("preparing with {}", mover::label(there)))?;
        ensure!(
            carried.same,
            "preparing with {}: it arrived wrong",
            mover::label(there)
        );
    }
    drop(ready);
    let net = Net::like(job.line, 1 + run)?;
    let mut ready = Mover::start(job.by, &drover, &net, &ends)?;
    let carried = ready.carry(&net, image, alike.most_similar(image, with)?)?;
    eprintln!(
        "  {}, run {}: {:.2} s",
        mover::label(image),
        run + 1,
        carried.seconds
    );
    Ok(carried)
}
