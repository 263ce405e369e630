//! The library sent in order to an empty site: bytes and time of drover, of its rivals, and of the limit
//! (`teleportation` §3.5 and §3.9, figures 15 and 16; `vmflock` §4.2 and §4.4).

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::lines::{self, FAST, Line, Net, REFERENCE};
use super::mover::{self, By, Carried, Mover, key};
use super::pictures::{Words, bars, cumulated, only, ranking, shown_link, values};
use super::weights::{Scales, weight};
use super::{Lab, images};
use crate::bench::{About, Axis, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};
use crate::limit::Limit;
use crate::link;
use crate::rivals::Weight;

/// The row about all images.
const ALL: &str = "all";
/// Who is measured beside drover on the small set: what every machine has.
const SMALL_RIVALS: [&str; 2] = ["zstd", "rsync-delta"];
/// A rival that takes less than this is part of every run, of most runs, or comes last.
const CHEAP_SECONDS: f64 = 270.0;
const DEAR_SECONDS: f64 = 600.0;

static ABOUT: About = About {
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
};

/// The library in order.
pub struct Library;

/// What a case measures.
struct Job {
    line: Option<Line>,
    /// None is the limit.
    by: Option<By>,
}

impl Experiment for Library {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        Ok(plan(lab)?.into_iter().map(|(case, _)| case).collect())
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let (_, job) = plan(lab)?
            .into_iter()
            .find(|(planned, _)| planned.id == case.id)
            .with_context(|| format!("no case {}", case.id))?;
        let images = in_order(lab)?;
        let limits = Scales::new(&lab.common.out).limits(&[], &images)?;
        match job.by {
            None => Ok(limit_rows(&images, &limits, job.line)),
            Some(by) => send_all(lab, job.line, by, &images, &limits),
        }
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        plots(rows)
    }

    fn is_headline(&self, row: &Row) -> bool {
        row.label("image") == ALL || row.label("link") == REFERENCE.describe()
    }

    fn images(&self, lab: &Lab, _case: &Case) -> Option<Vec<PathBuf>> {
        in_order(lab).ok()
    }
}

/// The images in the order in which they are sent.
fn in_order(lab: &Lab) -> Result<Vec<PathBuf>> {
    let set = if lab.small {
        images::Set::Small
    } else {
        images::Set::Full
    };
    let of_set = images::images(&lab.common.dir, set)?;
    let fits = |entry: &images::catalog::Entry| {
        if lab.small {
            entry.kind == "host"
        } else {
            entry.in_order
        }
    };
    let built: Vec<PathBuf> = of_set
        .into_iter()
        .filter(|entry| fits(entry) && entry.built)
        .map(|entry| entry.path)
        .collect();
    if built.is_empty() {
        bail!("no image in {}: lab library", lab.common.dir.display());
    }
    Ok(built)
}

/// Every case with what it measures.
fn plan(lab: &Lab) -> Result<Vec<(Case, Job)>> {
    let images = in_order(lab)?;
    let weights = Scales::new(&lab.common.out).guess(&[], &images)?;
    let mut plan = Vec::new();
    if lab.small {
        // A machine without namespaces still has something to say about drover.
        let line = link::available().is_ok().then_some(FAST);
        plan.push(limit_case(line, 0));
        plan.push(case(&weights, line, By::Drover, true));
        for by in mover::rivals().filter(|by| SMALL_RIVALS.contains(&by.name())) {
            plan.push(case(&weights, Some(FAST), by, true));
        }
        return Ok(plan);
    }
    for line in lines::matrix() {
        let main = line == REFERENCE;
        plan.push(limit_case(Some(line), if main { 0 } else { 2 }));
        plan.push(case(&weights, Some(line), By::Drover, main));
        plan.extend(mover::rivals().map(|by| case(&weights, Some(line), by, main)));
    }
    // Most important first.
    plan.sort_by_key(|(case, _)| case.rank);
    Ok(plan)
}

fn limit_case(line: Option<Line>, rank: u8) -> (Case, Job) {
    let case = Case {
        id: format!("{}-limit", lines::slug(line)),
        what: format!("the limit of the library at {}", lines::describe(line)),
        seconds: 1.0,
        rank,
        subject: Subject::Images,
        needs: &[Need::Library],
    };
    (case, Job { line, by: None })
}

fn case(weights: &[Weight], line: Option<Line>, by: By, main: bool) -> (Case, Job) {
    let seconds: f64 = weights.iter().map(|w| by.seconds(w, line)).sum();
    let rank = match by {
        By::Drover if main => 0,
        By::Drover => 2,
        By::Rival(_) if !main => 3,
        By::Rival(_) if seconds < CHEAP_SECONDS => 0,
        By::Rival(_) if seconds < DEAR_SECONDS => 1,
        By::Rival(_) => 2,
    };
    let case = Case {
        id: format!("{}-{}", lines::slug(line), by.name()),
        what: format!("the library by {} at {}", by.name(), lines::describe(line)),
        seconds: 2.0 + seconds,
        rank,
        subject: by.subject(),
        needs: if line.is_some() {
            &[Need::Library, Need::Link]
        } else {
            &[Need::Library]
        },
    };
    let job = Job { line, by: Some(by) };
    (case, job)
}

fn row(image: &str, line: Option<Line>, by: &str) -> Row {
    Row::new([
        ("image", image.to_owned()),
        ("link", lines::describe(line)),
        ("by", by.to_owned()),
    ])
}

fn limit_rows(images: &[PathBuf], limits: &[Limit], line: Option<Line>) -> Vec<Row> {
    let mut rows: Vec<Row> = images
        .iter()
        .zip(limits)
        .map(|(image, limit)| {
            mover::fill_limit(row(&mover::label(image), line, "limit"), limit, line)
        })
        .collect();
    let all = mover::total_limit(limits);
    rows.push(mover::fill_limit(row(ALL, line, "limit"), &all, line));
    rows
}

/// Sends everything. An image that fails has a row that says so, and the others go on.
fn send_all(
    lab: &Lab,
    line: Option<Line>,
    by: By,
    images: &[PathBuf],
    limits: &[Limit],
) -> Result<Vec<Row>> {
    if let Some(why) = by.missing() {
        let mut skipped = row(ALL, line, by.name());
        skipped.verdict = Verdict::Skipped(why);
        return Ok(vec![skipped]);
    }
    let drover = lab.binary()?;
    let scales = Scales::new(&lab.common.out);
    let net = Net::like(line, 1)?;
    let work = lab.work("library")?;
    let mut mover = Mover::start(by, &drover, &net, &work.join(by.name()))?;
    let mut rows = Vec::new();
    let mut there: Vec<PathBuf> = Vec::new();
    let mut carried: Vec<Carried> = Vec::new();
    for (image, limit) in images.iter().zip(limits) {
        let name = mover::label(image);
        let here = row(&name, line, by.name());
        let deadline = mover::deadline(&weight(limit), line);
        let basis = match by {
            By::Rival(_) => scales.most_similar(image, &there)?.cloned(),
            By::Drover => None,
        };
        match mover.carry(&net, image, basis.as_deref(), deadline) {
            Ok(one) => {
                eprintln!("  {name}: {:.1} s", one.seconds);
                rows.push(mover::fill(here, std::slice::from_ref(&one), limit, line));
                if one.same {
                    there.push(image.clone());
                }
                carried.push(one);
            }
            Err(error) => {
                let mut here = here;
                here.verdict = Verdict::Failed(mover::reason(&error));
                rows.push(here);
            }
        }
    }
    let mut all = row(ALL, line, by.name());
    let bad = images.len() - there.len();
    if bad == 0 {
        let (carried, limit) = (Carried::total(&carried), mover::total_limit(limits));
        all = mover::fill(all, &[carried], &limit, line);
    } else {
        all.verdict = Verdict::Failed(format!("{bad} of {} images", images.len()));
    }
    rows.push(all);
    Ok(rows)
}

fn plots(rows: &[Row]) -> Vec<Plot> {
    let all: Vec<&Row> = rows.iter().collect();
    let links = values(&all, "link");
    let Some(link) = shown_link(&links) else {
        return Vec::new();
    };
    let here = only(&all, "link", link);
    let (totals, singles): (Vec<&Row>, Vec<&Row>) = here
        .iter()
        .copied()
        .partition(|row| row.label("image") == ALL);
    let order = values(&singles, "image");
    // Who sends more than the data would dwarf everybody else; the table and the times have it.
    let (singles, dwarfing): (Vec<&Row>, Vec<&Row>) = singles
        .into_iter()
        .partition(|row| row.value(key::TELEPORTED).is_some_and(|share| share >= 0.0));
    let more = match values(&dwarfing, "by") {
        names if names.is_empty() => String::new(),
        names => format!("; not shown, as it sends zeros: {}", names.join(", ")),
    };
    let total: Vec<&Row> = all
        .iter()
        .copied()
        .filter(|row| row.label("image") == ALL)
        .collect();
    let words = |name, title: String, y| Words { name, title, y };
    [
        bars(
            &singles,
            "image",
            "by",
            key::BYTES,
            words(
                "bytes",
                format!("Bytes of each image at {link}{more}"),
                Axis::linear("MB on the link"),
            ),
        ),
        cumulated(
            &singles,
            ("image", &order),
            "by",
            key::BYTES,
            Axis::linear("images sent"),
            words(
                "cumulated",
                format!("Bytes of all images so far at {link}{more}"),
                Axis::linear("MB on the link"),
            ),
        ),
        ranking(
            &totals,
            "by",
            |row| row.value(key::SECONDS),
            words(
                "time",
                format!("Time of the whole library at {link}"),
                Axis::linear("seconds"),
            ),
        ),
        bars(
            &singles,
            "image",
            "by",
            key::TELEPORTED,
            words(
                "teleported",
                format!("Share of the data that did not cross the link at {link}{more}"),
                Axis::linear("percent"),
            ),
        ),
        ranking(
            &totals,
            "by",
            |row| row.value(key::TIMES_COPY),
            words(
                "speedup",
                format!("The whole library, times as fast as a plain copy of its data at {link}"),
                Axis::linear("times"),
            ),
        ),
        (links.len() > 1)
            .then(|| {
                bars(
                    &total,
                    "link",
                    "by",
                    key::SECONDS,
                    words(
                        "links",
                        "Time of the whole library over each link".to_owned(),
                        Axis::log("seconds"),
                    ),
                )
            })
            .flatten(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests;
