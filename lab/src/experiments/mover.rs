//! Who carries an image from here to there, drover or a rival, and what it cost: what the experiments over a link
//! have in common.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::file_name;
use super::lines::{Line, Net};
use super::weights::{drover_seconds, rival_seconds};
use crate::bench::{Row, Subject, Verdict};
use crate::limit::Limit;
use crate::report::Spread;
use crate::rivals::{Carrier, Rival, Weight};
use crate::same::identical;
use crate::site::{Sender, Site};
use crate::watch::Cost;

/// Names of figures.
pub mod key {
    /// Bytes of the image that are not zero blocks, in MB.
    pub const DATA: &str = "data_mb";
    /// IP bytes on the link both ways, in MB; over loopback, the tool's own count.
    pub const BYTES: &str = "link_mb";
    /// Bytes both ways by drover's own count, in MB.
    pub const WIRE: &str = "wire_mb";
    /// Bytes over those of the limit.
    pub const OVER_LIMIT: &str = "over_limit";
    /// From start to exit.
    pub const SECONDS: &str = "seconds";
    /// Seconds over those that the bytes of the busier direction need at the link's rate.
    pub const OVER_IDEAL: &str = "over_ideal";
    /// Percent of the data's bytes that did not cross the link.
    pub const TELEPORTED: &str = "teleported_percent";
    /// Times as fast as the data's bytes would cross the link.
    pub const TIMES_COPY: &str = "times_copy";
    /// Peak memory of the sender.
    pub const SENDER_MIB: &str = "sender_mib";
    /// Peak memory of the receiving site so far.
    pub const SITE_MIB: &str = "site_mib";
    /// Processor time of the sender.
    pub const SENDER_CPU: &str = "sender_cpu_s";
    /// Processor time of the receiving site.
    pub const SITE_CPU: &str = "site_cpu_s";
}

/// Who carries.
#[derive(Clone, Copy)]
pub enum By {
    /// The drover under test.
    Drover,
    /// Another tool.
    Rival(&'static dyn Rival),
}

impl By {
    /// Its name, for labels and identifiers.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Drover => "drover",
            Self::Rival(rival) => rival.name(),
        }
    }

    /// Why it cannot carry here, in words.
    pub fn missing(&self) -> Option<String> {
        match self {
            Self::Drover => None,
            Self::Rival(rival) => rival.version().err(),
        }
    }

    /// What it takes about for an image over `line`, comparing included.
    pub fn seconds(&self, weight: &Weight, line: Option<Line>) -> f64 {
        match self {
            Self::Drover => drover_seconds(weight, line),
            Self::Rival(rival) => rival_seconds(weight, rival.expected_bytes(weight), line),
        }
    }

    /// Whose result it is.
    pub fn subject(&self) -> Subject {
        match self {
            Self::Drover => Subject::Drover,
            Self::Rival(rival) => {
                let version = rival.version().unwrap_or_else(|_| "absent".to_owned());
                Subject::Rival(format!("{} {version}", rival.name()))
            }
        }
    }
}

/// Every rival, in the order of the document.
pub fn rivals() -> impl Iterator<Item = By> {
    crate::rivals::ALL.iter().map(|rival| By::Rival(*rival))
}

/// Somebody who is set up at both ends.
pub enum Mover<'a> {
    /// A site and a sender paired with it.
    Drover {
        /// The far end.
        site: Site,
        /// The near end.
        sender: Sender<'a>,
    },
    /// Another tool.
    Rival(Box<dyn Carrier + 'a>),
}

/// What carrying one image cost.
#[derive(Clone, Debug)]
pub struct Carried {
    /// From start to exit.
    pub seconds: f64,
    /// IP bytes on the link from the near end and from the far one; none over loopback.
    pub link: Option<(u64, u64)>,
    /// Bytes both ways by the tool's own count.
    pub wire: Option<u64>,
    /// What the sender cost.
    pub sender: Option<Cost>,
    /// What the site cost: its peak so far, and processor time of this image.
    pub site: Option<Cost>,
    /// Whether the delivered file is the original.
    pub same: bool,
}

impl<'a> Mover<'a> {
    /// Sets both ends up below `dir`; what was carried with the same `dir` before is there.
    ///
    /// # Errors
    /// When an end does not come up.
    pub fn start(by: By, drover: &Path, net: &'a Net, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let place = net.place();
        Ok(match by {
            By::Drover => {
                let site = Site::start(drover, &dir.join("site"), place)?;
                let sender = Sender::pair(drover, &dir.join("sender"), place, &site)?;
                Self::Drover { site, sender }
            }
            By::Rival(rival) => Self::Rival(rival.start(place, dir)?),
        })
    }

    /// Carries `image`, and compares what arrived with it. `deadline` is drover's; rivals have their own.
    ///
    /// # Errors
    /// When it does not come to its end.
    pub fn carry(
        &mut self,
        net: &Net,
        image: &Path,
        basis: Option<&Path>,
        deadline: Duration,
    ) -> Result<Carried> {
        // A library of symbolic links is one, too; rsync would not follow them.
        let image = &canonical(image)?;
        let basis = basis.map(canonical).transpose()?;
        let basis = basis.as_deref();
        // Everyone reads the image from memory, and nobody pays for what another wrote.
        identical(image, image)?;
        rustix::fs::sync();
        let before = net.bytes()?;
        match self {
            Self::Drover { site, sender } => {
                let cost_before = site.cost();
                let outcome = sender.begin(image, &[])?.finish(deadline)?;
                let link = net.since(before)?;
                let mut cost = site.cost();
                cost.cpu_seconds -= cost_before.cpu_seconds;
                let sent = outcome.images.first().context("nothing was sent")?;
                Ok(Carried {
                    seconds: outcome.seconds,
                    link,
                    wire: Some(sent.wire_bytes()),
                    sender: Some(outcome.cost),
                    site: Some(cost),
                    same: arrived(image, &site.image(&file_name(image)))?,
                })
            }
            Self::Rival(carrier) => {
                let seconds = carrier.carry(image, basis)?;
                Ok(Carried {
                    seconds,
                    link: net.since(before)?,
                    wire: None,
                    sender: None,
                    site: None,
                    same: arrived(image, &carrier.delivered(image))?,
                })
            }
        }
    }
}

fn canonical(image: &Path) -> Result<PathBuf> {
    let path = image.canonicalize();
    path.with_context(|| format!("no image {}", image.display()))
}

/// Whether the delivered file is the original; one that is not there is not.
fn arrived(image: &Path, delivered: &Path) -> Result<bool> {
    Ok(delivered.is_file() && identical(image, delivered)?)
}

/// How long drover may take for an image: far more than it should, so that only what hangs is ended.
pub fn deadline(weight: &Weight, line: Option<Line>) -> Duration {
    Duration::from_secs_f64(120.0 + 10.0 * drover_seconds(weight, line))
}

fn median(values: &[f64]) -> Option<f64> {
    Some(Spread::of(values)?.median)
}

/// Nothing is a multiple of a limit of nothing.
fn over_limit(bytes: Option<f64>, limit: &Limit) -> Option<f64> {
    (limit.unique_blocks > 0).then_some(bytes? / limit.limit_bytes as f64)
}

fn teleported(bytes: Option<f64>, data: f64) -> Option<f64> {
    (data > 0.0).then_some(100.0 * (1.0 - bytes? / data))
}

/// A row of what was carried, once or repeatedly.
pub fn fill(mut row: Row, carried: &[Carried], limit: &Limit, line: Option<Line>) -> Row {
    let data = limit.data_blocks as f64 * 4096.0;
    row.set(key::DATA, data / 1e6);
    // What varies is shown with its spread, what follows from it is not.
    let spread = |of: &dyn Fn(&Carried) -> Option<f64>| -> Vec<f64> {
        carried.iter().filter_map(of).collect()
    };
    let ideal = |c: &Carried| {
        let (near, far) = c.link?;
        let most = near.max(far) as f64;
        (most > 0.0).then_some(most / line?.rate())
    };
    row.set_all(key::BYTES, &spread(&|c| Some(c.bytes()? / 1e6)));
    row.set_all(key::SECONDS, &spread(&|c| Some(c.seconds)));
    row.set_all(key::OVER_IDEAL, &spread(&|c| Some(c.seconds / ideal(c)?)));
    let greatest = |of: &dyn Fn(&Carried) -> Option<f64>| {
        let values = spread(of);
        values.into_iter().reduce(f64::max)
    };
    let mib = |cost: Option<Cost>| Some(cost?.peak_rss_bytes as f64 / f64::from(1 << 20));
    let cpu = |cost: Option<Cost>| Some(cost?.cpu_seconds);
    let bytes = median(&spread(&Carried::bytes));
    let seconds = median(&spread(&|c| Some(c.seconds)));
    let some = [
        (key::WIRE, median(&spread(&|c| Some(c.wire? as f64 / 1e6)))),
        (key::OVER_LIMIT, over_limit(bytes, limit)),
        (key::TELEPORTED, teleported(bytes, data)),
        (
            key::TIMES_COPY,
            line.and_then(|line| Some(data / line.rate() / seconds?)),
        ),
        (key::SENDER_MIB, greatest(&|c| mib(c.sender))),
        (key::SITE_MIB, greatest(&|c| mib(c.site))),
        (key::SENDER_CPU, greatest(&|c| cpu(c.sender))),
        (key::SITE_CPU, greatest(&|c| cpu(c.site))),
    ];
    for (key, value) in some {
        if let Some(value) = value {
            row.set(key, value);
        }
    }
    if carried.iter().any(|c| !c.same) {
        row.verdict = Verdict::Wrong("the delivered file is not its original".to_owned());
    }
    row
}

impl Carried {
    /// Bytes that crossed: on the link, or, without one, by the tool's own count.
    pub fn bytes(&self) -> Option<f64> {
        let bytes = self.link.map(|(near, far)| near + far).or(self.wire)?;
        Some(bytes as f64)
    }

    /// Several images as one; what one of them did not tell is not told of all.
    pub fn total(all: &[Self]) -> Self {
        let sum = |cost: &dyn Fn(&Self) -> Option<Cost>| {
            all.iter().map(cost).try_fold(Cost::default(), |sum, cost| {
                let cost = cost?;
                Some(Cost {
                    peak_rss_bytes: sum.peak_rss_bytes.max(cost.peak_rss_bytes),
                    cpu_seconds: sum.cpu_seconds + cost.cpu_seconds,
                })
            })
        };
        Self {
            seconds: all.iter().map(|c| c.seconds).sum(),
            link: all.iter().try_fold((0, 0), |sum: (u64, u64), c| {
                let link = c.link?;
                Some((sum.0 + link.0, sum.1 + link.1))
            }),
            wire: all.iter().map(|c| c.wire).sum(),
            sender: sum(&|c| c.sender),
            site: sum(&|c| c.site),
            same: all.iter().all(|c| c.same),
        }
    }
}

/// Several limits as one.
pub fn total_limit(limits: &[Limit]) -> Limit {
    let sum = |of: &dyn Fn(&Limit) -> u64| limits.iter().map(of).sum();
    Limit {
        name: "all".to_owned(),
        size_bytes: sum(&|l| l.size_bytes),
        data_blocks: sum(&|l| l.data_blocks),
        matched_blocks: sum(&|l| l.matched_blocks),
        repeated_blocks: sum(&|l| l.repeated_blocks),
        unique_blocks: sum(&|l| l.unique_blocks),
        limit_bytes: sum(&|l| l.limit_bytes),
    }
}

/// A row of the limit: its bytes, and the time that they need at the line's rate.
pub fn fill_limit(mut row: Row, limit: &Limit, line: Option<Line>) -> Row {
    let data = limit.data_blocks as f64 * 4096.0;
    // The frame around nothing is not counted.
    let bytes = match limit.unique_blocks {
        0 => 0.0,
        _ => limit.limit_bytes as f64,
    };
    let some = [
        (key::OVER_LIMIT, over_limit(Some(bytes), limit)),
        (key::TELEPORTED, teleported(Some(bytes), data)),
        (key::OVER_IDEAL, line.filter(|_| bytes > 0.0).map(|_| 1.0)),
        (
            key::TIMES_COPY,
            line.filter(|_| bytes > 0.0).map(|_| data / bytes),
        ),
    ];
    for (key, value) in some {
        if let Some(value) = value {
            row.set(key, value);
        }
    }
    row.set(key::DATA, data / 1e6);
    row.set(key::BYTES, bytes / 1e6);
    // Without a line nothing is known of its time but that it is not less than this.
    row.set(key::SECONDS, line.map_or(0.0, |line| bytes / line.rate()));
    row
}

/// What an image is called in rows: its file's name without `.raw`.
pub fn label(image: &Path) -> String {
    let name = file_name(image);
    name.strip_suffix(".raw").unwrap_or(&name).to_owned()
}

/// An error as a row says it: one line, not a page.
pub fn reason(error: &anyhow::Error) -> String {
    const LONGEST: usize = 400;
    let text = format!("{error:#}").replace('\n', " | ");
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
