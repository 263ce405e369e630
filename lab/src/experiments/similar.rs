//! One image to a site that has something like it: similar systems, the image itself, what it was some months ago, the
//! same system in another container or on another file system (`vmflock` §4.4; `teleportation` §3.5).

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::Lab;
use super::lines::{self, FAST, Line, Net, REFERENCE};
use super::mover::{self, By, Carried, Mover, key};
use super::pictures::{Words, bars, only, shown_link, values};
use super::weights::{Scales, weight};
use crate::bench::{
    About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject, Verdict,
};
use crate::limit::Limit;
use crate::link;
use crate::rivals::Weight;

/// The rivals that can use what the far end has.
const WITH_BASIS: [&str; 5] = ["rsync-delta", "casync", "desync", "restic", "borg"];
const SMALL_RIVALS: [&str; 1] = ["rsync-delta"];
/// How many scenarios rivals are measured on in most runs.
const RIVALS_FIRST: usize = 3;
/// Figures of a row that say what its link is like, for plots.
const RTT: &str = "rtt_ms";

static ABOUT: About = About {
    name: "similar",
    title: "One image to a site that has something like it",
    text: "The site has been sent some images before, which is not measured; then one more is sent over the link. What is \
there: *similar* systems of the same release; the same image (*again*); the system some months earlier (*aged*, \
*aged-db*: packages upgraded and added, files rewritten, moved and deleted, a database that ran); the same disk in \
another container (*qcow2*, *vmdk*, *vhdx*); the same files on another file system (*btrfs*). Rivals are those that can \
use what the far end has. Each run begins with a site of its own; of several runs the median is shown, and the least and \
the greatest where the table has room for them. The columns are those of the library; the limit knows every 4 KiB \
block that the site has.",
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
};

/// One image and what the site has.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    slug: &'static str,
    image: &'static str,
    with: &'static [&'static str],
}

const fn scenario(
    slug: &'static str,
    image: &'static str,
    with: &'static [&'static str],
) -> Scenario {
    Scenario { slug, image, with }
}

/// The first is measured over every line.
const FULL: &[Scenario] = &[
    scenario(
        "similar",
        "bookworm-db",
        &["bookworm-plain", "bookworm-app"],
    ),
    scenario("again", "bookworm-db", &["bookworm-db"]),
    scenario("aged", "bookworm-plain-aged", &["bookworm-plain"]),
    scenario("aged-db", "bookworm-db-aged", &["bookworm-db-release"]),
    scenario("qcow2", "bookworm-db.qcow2", &["bookworm-db"]),
    scenario("vmdk", "bookworm-db.vmdk", &["bookworm-db"]),
    scenario("vhdx", "bookworm-db.vhdx", &["bookworm-db"]),
    scenario("btrfs", "bookworm-db-btrfs", &["bookworm-db"]),
];

const SMALL: &[Scenario] = &[
    scenario("similar", "small-two", &["small-one"]),
    scenario("again", "small-two", &["small-two"]),
    scenario("aged", "small-two-aged", &["small-two"]),
];

/// One image to a site that has something like it.
pub struct Similar;

/// What a case measures.
struct Job {
    line: Option<Line>,
    /// None is the limit.
    by: Option<By>,
    scenarios: Vec<Scenario>,
}

impl Experiment for Similar {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        Ok(plan(lab).into_iter().map(|(case, _)| case).collect())
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let job = job(lab, case).with_context(|| format!("no case {}", case.id))?;
        Ok(job
            .scenarios
            .iter()
            .map(|scenario| measure(lab, &job, scenario))
            .collect())
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        plots(rows)
    }

    fn is_headline(&self, row: &Row) -> bool {
        row.label("link") == REFERENCE.describe()
    }

    fn images(&self, lab: &Lab, case: &Case) -> Option<Vec<PathBuf>> {
        let mut images: Vec<PathBuf> = job(lab, case)?
            .scenarios
            .iter()
            .flat_map(|scenario| scenario.with.iter().chain([&scenario.image]))
            .filter_map(|name| lab.image(name).ok())
            .collect();
        images.sort();
        images.dedup();
        Some(images)
    }
}

fn job(lab: &Lab, case: &Case) -> Option<Job> {
    let (_, job) = plan(lab)
        .into_iter()
        .find(|(planned, _)| planned.id == case.id)?;
    Some(job)
}

impl Scenario {
    /// The images that the site has, and the one that is sent.
    fn images(&self, lab: &Lab) -> Result<(Vec<PathBuf>, PathBuf)> {
        let with = self.with.iter().map(|name| lab.image(name));
        Ok((with.collect::<Result<_>>()?, lab.image(self.image)?))
    }

    fn describe(&self) -> String {
        format!("{} to a site with {}", self.image, self.with.join(", "))
    }

    /// What it takes about; nothing when an image is not there, since then a row says so at once.
    fn seconds(&self, lab: &Lab, line: Option<Line>, by: By) -> f64 {
        let scales = Scales::new(&lab.common.out);
        let weigh = || -> Result<f64> {
            let (with, image) = self.images(lab)?;
            let before: Vec<Weight> = scales.guess(&[], &with)?;
            let weights = scales.guess(&with, &[image])?;
            let prepare: f64 = before.iter().map(|w| by.seconds(w, None)).sum();
            let send: f64 = weights.iter().map(|w| by.seconds(w, line)).sum();
            Ok(2.0 + prepare + send)
        };
        weigh().unwrap_or(0.1)
    }
}

/// Every case with what it measures.
fn plan(lab: &Lab) -> Vec<(Case, Job)> {
    let mut plan = Vec::new();
    if lab.small {
        // A machine without namespaces still has something to say about drover.
        let line = link::available().is_ok().then_some(FAST);
        plan.push(limit_case(line, SMALL, 0));
        plan.push(case(lab, line, SMALL, By::Drover, 0, ""));
        for by in mover::rivals().filter(|by| SMALL_RIVALS.contains(&by.name())) {
            plan.push(case(lab, Some(FAST), SMALL, by, 0, ""));
        }
        return plan;
    }
    let rivals = || mover::rivals().filter(|by| WITH_BASIS.contains(&by.name()));
    let (first, others) = FULL.split_at(1);
    let here = Some(REFERENCE);
    plan.push(limit_case(here, FULL, 0));
    for one in FULL.chunks(1) {
        plan.push(case(lab, here, one, By::Drover, 0, one[0].slug));
    }
    for (at, one) in FULL.chunks(1).enumerate() {
        let rank = if at < RIVALS_FIRST { 1 } else { 2 };
        plan.extend(rivals().map(|by| case(lab, here, one, by, rank, one[0].slug)));
    }
    let lines = lines::matrix();
    for line in lines.iter().copied().filter(|line| *line != REFERENCE) {
        let line = Some(line);
        plan.push(limit_case(line, FULL, 1));
        plan.push(case(lab, line, first, By::Drover, 1, first[0].slug));
        plan.push(case(lab, line, others, By::Drover, 3, "others"));
        plan.extend(rivals().map(|by| case(lab, line, first, by, 3, first[0].slug)));
    }
    plan.sort_by_key(|(case, _)| case.rank);
    plan
}

fn limit_case(line: Option<Line>, scenarios: &[Scenario], rank: u8) -> (Case, Job) {
    let case = Case {
        id: format!("{}-limit", lines::slug(line)),
        what: format!("the limit at {}", lines::describe(line)),
        seconds: 2.0,
        rank,
        subject: Subject::Images,
        needs: &[Need::Library],
    };
    let job = Job {
        line,
        by: None,
        scenarios: scenarios.to_vec(),
    };
    (case, job)
}

fn case(
    lab: &Lab,
    line: Option<Line>,
    scenarios: &[Scenario],
    by: By,
    rank: u8,
    name: &str,
) -> (Case, Job) {
    let once: f64 = scenarios.iter().map(|s| s.seconds(lab, line, by)).sum();
    let what = match scenarios {
        [one] => one.describe(),
        several => format!("{} scenarios", several.len()),
    };
    let mut id = format!("{}-{}", lines::slug(line), by.name());
    if !name.is_empty() {
        id += &format!("-{name}");
    }
    let case = Case {
        id,
        what: format!("{what}, by {} at {}", by.name(), lines::describe(line)),
        seconds: once * runs(lab, by) as f64,
        rank,
        subject: by.subject(),
        needs: if line.is_some() {
            &[Need::Library, Need::Link]
        } else {
            &[Need::Library]
        },
    };
    let job = Job {
        line,
        by: Some(by),
        scenarios: scenarios.to_vec(),
    };
    (case, job)
}

/// How often somebody is measured: rivals, who take longer, once.
fn runs(lab: &Lab, by: By) -> usize {
    match by {
        By::Drover => lab.repeat.max(1),
        By::Rival(_) => 1,
    }
}

/// The row of a scenario, whatever happens.
fn measure(lab: &Lab, job: &Job, scenario: &Scenario) -> Row {
    let mut row = Row::new([
        ("scenario", scenario.slug.to_owned()),
        ("what", scenario.describe()),
        ("link", lines::describe(job.line)),
        ("by", job.by.map_or("limit", |by| by.name()).to_owned()),
    ]);
    if let Some(line) = job.line {
        row.set(RTT, line.rtt_ms);
    }
    if let Some(why) = job.by.and_then(|by| by.missing()) {
        row.verdict = Verdict::Skipped(why);
        return row;
    }
    let (with, image) = match scenario.images(lab) {
        Ok(images) => images,
        Err(error) => {
            row.verdict = Verdict::Skipped(mover::reason(&error));
            return row;
        }
    };
    let measured = weigh(lab, &with, &image).and_then(|limit| {
        let Some(by) = job.by else {
            return Ok(mover::fill_limit(row.clone(), &limit, job.line));
        };
        let carried: Vec<Carried> = (0..runs(lab, by))
            .map(|run| once(lab, job.line, by, (&with, &image), &limit, run as u64))
            .collect::<Result<_>>()?;
        Ok(mover::fill(row.clone(), &carried, &limit, job.line))
    });
    measured.unwrap_or_else(|error| {
        row.verdict = Verdict::Failed(mover::reason(&error));
        row
    })
}

fn weigh(lab: &Lab, with: &[PathBuf], image: &PathBuf) -> Result<Limit> {
    let limits = Scales::new(&lab.common.out).limits(with, std::slice::from_ref(image))?;
    limits.into_iter().next().context("nothing was weighed")
}

/// Prepares a site over loopback, where that takes no time, and then sends the image to it over the line.
fn once(
    lab: &Lab,
    line: Option<Line>,
    by: By,
    (with, image): (&[PathBuf], &PathBuf),
    limit: &Limit,
    run: u64,
) -> Result<Carried> {
    let drover = lab.binary()?;
    let scales = Scales::new(&lab.common.out);
    let work = lab.work("similar")?;
    let ends = work.join(by.name());
    let nowhere = Net::loopback();
    let mut mover = Mover::start(by, &drover, &nowhere, &ends)?;
    for (at, there) in with.iter().enumerate() {
        let basis = scales.most_similar(there, &with[..at])?;
        let deadline = mover::deadline(&weight(limit), None);
        let carried = mover
            .carry(&nowhere, there, basis.map(PathBuf::as_path), deadline)
            .with_context(|| format!("preparing with {}", mover::label(there)))?;
        anyhow::ensure!(
            carried.same,
            "preparing with {}: it arrived wrong",
            mover::label(there)
        );
    }
    drop(mover);
    let net = Net::like(line, 1 + run)?;
    let mut mover = Mover::start(by, &drover, &net, &ends)?;
    let basis = scales.most_similar(image, with)?.map(PathBuf::as_path);
    let deadline = mover::deadline(&weight(limit), line);
    let carried = mover.carry(&net, image, basis, deadline)?;
    eprintln!(
        "  {}, run {}: {:.2} s",
        mover::label(image),
        run + 1,
        carried.seconds
    );
    Ok(carried)
}

fn plots(rows: &[Row]) -> Vec<Plot> {
    let all: Vec<&Row> = rows.iter().collect();
    let links = values(&all, "link");
    let Some(link) = shown_link(&links) else {
        return Vec::new();
    };
    let here = only(&all, "link", link);
    let drover = only(&all, "by", "drover");
    let first = only(&drover, "scenario", FULL[0].slug);
    let words = |name, title: String, y| Words { name, title, y };
    [
        bars(
            &here,
            "scenario",
            "by",
            key::BYTES,
            words(
                "bytes",
                format!("Bytes of one image, by what the site has, at {link}"),
                Axis::linear("MB on the link"),
            ),
        ),
        bars(
            &here,
            "scenario",
            "by",
            key::SECONDS,
            words(
                "seconds",
                format!("Time of one image, by what the site has, at {link}"),
                Axis::linear("seconds"),
            ),
        ),
        (links.len() > 1).then(|| over_ideal(&first)).flatten(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Time over ideal against the round-trip time, a line for each rate and loss.
fn over_ideal(rows: &[&Row]) -> Option<Plot> {
    let mut lines: Vec<(String, Vec<Point>)> = Vec::new();
    for row in rows {
        let (Some(rtt), Some(figure)) = (row.value(RTT), row.figures.get(key::OVER_IDEAL)) else {
            continue;
        };
        // `100 Mbit/s, 40 ms, 0.1 % loss` without the round-trip time.
        let name: Vec<&str> = row
            .label("link")
            .split(", ")
            .filter(|part| !part.ends_with(" ms"))
            .collect();
        let name = name.join(", ");
        let spread = figure.spread;
        let point = Point {
            x: rtt,
            y: spread.median,
            range: (figure.runs > 1).then_some((spread.min, spread.max)),
        };
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    (!lines.is_empty()).then(|| Plot {
        name: "over-ideal".to_owned(),
        title: "A similar image by drover: time over that of its bytes at the link's rate"
            .to_owned(),
        x: Axis::linear("round-trip time, ms"),
        y: Axis::linear("times"),
        kind: Kind::Lines(lines),
    })
}

#[cfg(test)]
mod tests;
