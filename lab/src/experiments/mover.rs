//! Transfers of an image by drover or a rival, with their cost: shared by the experiments over a link.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::lines::{Line, Net};
pub use crate::alike::Alike;
use crate::bench::{Case, Need, Row, Verdict};
use crate::files::identical;
use crate::limit::{self, Limit};
use crate::rivals::{Carrier, Rival};
use crate::setup::{Lab, file_name};
use crate::site::{Sender, Sent, Site};
use crate::watch::Cost;

/// Keys of figures.
pub mod key {
    /// Bytes of the image in nonzero blocks, in MB.
    pub const DATA: &str = "data_mb";
    /// IP bytes on the link, both directions, in MB; over loopback, the tool's own count.
    pub const BYTES: &str = "link_mb";
    /// Bytes in both directions by drover's own count, in MB.
    pub const WIRE: &str = "wire_mb";
    /// Ratio of bytes to those of the limit.
    pub const OVER_LIMIT: &str = "over_limit";
    /// From start to exit.
    pub const SECONDS: &str = "seconds";
    /// Ratio of seconds to the time that the bytes of the busier direction need at the link's rate.
    pub const OVER_IDEAL: &str = "over_ideal";
    /// Percentage of the data that did not cross the link.
    pub const TELEPORTED: &str = "teleported_percent";
    /// Speedup over sending all data at the link's rate.
    pub const TIMES_COPY: &str = "times_copy";
    /// Peak memory of the sender, and of the receiving site so far.
    pub const SENDER_MIB: &str = "sender_mib";
    pub const SITE_MIB: &str = "site_mib";
    /// CPU time of the sender, and of the receiving site.
    pub const SENDER_CPU: &str = "sender_cpu_s";
    pub const SITE_CPU: &str = "site_cpu_s";
}

/// The subject of a measurement.
#[derive(Clone, Copy)]
pub enum By {
    /// The theoretical limit.
    Limit,
    /// The drover under test.
    Drover,
    /// Another tool.
    Rival(&'static dyn Rival),
}

impl By {
    /// The rivals of these names, or all if empty, in the order of the document.
    pub fn rivals(names: &'static [&'static str]) -> impl Iterator<Item = Self> {
        let all = crate::rivals::ALL.iter().map(|rival| Self::Rival(*rival));
        all.filter(move |by| names.is_empty() || names.contains(&by.name()))
    }

    /// Its name, for labels and identifiers.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Drover => "drover",
            Self::Rival(rival) => rival.name(),
        }
    }

    /// Why it cannot be used here.
    pub fn missing(&self) -> Option<String> {
        match self {
            Self::Rival(rival) => rival.version().err(),
            _ => None,
        }
    }

    /// A case that measures it alone.
    pub fn case(&self, id: String, what: String, rank: u8, line: Option<Line>) -> Case {
        let needs: &[Need] = match (self, line) {
            (Self::Limit, _) | (_, None) => &[Need::Library],
            _ => &[Need::Library, Need::Link],
        };
        let version = match self {
            Self::Limit => Some("the limit".to_owned()),
            Self::Drover => None,
            Self::Rival(rival) => {
                let version = rival.version().unwrap_or_else(|_| "absent".to_owned());
                Some(format!("{} {version}", rival.name()))
            }
        };
        Case {
            rival: version,
            ..Case::new(id, what, rank, needs)
        }
    }
}

/// A subject that is set up at both ends.
pub enum Mover<'a> {
    /// A site and a sender paired with it.
    Drover(Site, Sender<'a>),
    /// Another tool.
    Rival(Box<dyn Carrier + 'a>),
}

/// The cost of transferring one image.
#[derive(Clone, Debug)]
pub struct Carried {
    /// From start to exit.
    pub seconds: f64,
    /// IP bytes on the link from the near end and from the far one; `None` over loopback.
    pub link: Option<(u64, u64)>,
    /// Bytes in both directions by the tool's own count.
    pub wire: Option<u64>,
    /// Cost of the sender.
    pub sender: Option<Cost>,
    /// Cost of the site: its peak memory so far, and the CPU time of this image.
    pub site: Option<Cost>,
    /// Whether the delivered file equals the original.
    pub same: bool,
}

impl<'a> Mover<'a> {
    /// Sets up both ends below `dir`, which may contain images from an earlier run with the same `dir`.
    ///
    /// # Errors
    /// When an end does not start.
    pub fn start(by: By, drover: &Path, net: &'a Net, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let place = net.place();
        if let By::Rival(rival) = by {
            return Ok(Self::Rival(rival.start(place, dir)?));
        }
        let site = Site::start(drover, &dir.join("site"), place)?;
        let sender = Sender::pair(drover, &dir.join("sender"), place, &site)?;
        Ok(Self::Drover(site, sender))
    }

    /// Transfers `image`, and compares the delivered file. The image is in the page cache, and dirty pages of earlier
    /// transfers are flushed first, so that all subjects start equal.
    ///
    /// # Errors
    /// When the transfer does not complete.
    pub fn carry(&mut self, net: &Net, image: &Path, basis: Option<&Path>) -> Result<Carried> {
        // The library may consist of symbolic links, which rsync would not follow.
        let image = &image
            .canonicalize()
            .with_context(|| format!("no image {}", image.display()))?;
        let basis = basis.map(Path::canonicalize).transpose()?;
        identical(image, image)?;
        rustix::fs::sync();
        let before = net.bytes();
        let arrived =
            |copy: &Path| Ok::<_, anyhow::Error>(copy.is_file() && identical(image, copy)?);
        match self {
            Self::Drover(site, sender) => {
                let cost_before = site.cost();
                let outcome = sender.begin(image, &[])?.finish(deadline(image)?)?;
                let link = net.since(before);
                let mut cost = site.cost();
                cost.cpu_seconds -= cost_before.cpu_seconds;
                let sent = outcome.images.first().context("nothing was sent")?;
                Ok(Carried {
                    seconds: outcome.seconds,
                    link,
                    wire: Some(sent.wire_bytes()),
                    sender: Some(outcome.cost),
                    site: Some(cost),
                    same: arrived(&site.image(&file_name(image)))?,
                })
            }
            Self::Rival(carrier) => Ok(Carried {
                seconds: carrier.carry(image, basis.as_deref())?,
                link: net.since(before),
                wire: None,
                sender: None,
                site: None,
                same: arrived(&carrier.delivered(image))?,
            }),
        }
    }
}

impl Mover<'_> {
    /// Transfers images as one job, and compares the delivered files. The far end has those in `there`.
    ///
    /// # Errors
    /// When the transfer does not complete.
    pub fn carry_flock(
        &mut self,
        net: &Net,
        images: &[PathBuf],
        there: &[PathBuf],
    ) -> Result<Carried> {
        let real = |path: &PathBuf| {
            let real = path.canonicalize();
            real.with_context(|| format!("no image {}", path.display()))
        };
        let images = images.iter().map(real).collect::<Result<Vec<_>>>()?;
        let there = there.iter().map(real).collect::<Result<Vec<_>>>()?;
        let mut time = Duration::ZERO;
        for image in &images {
            identical(image, image)?;
            time += deadline(image)?;
        }
        rustix::fs::sync();
        let before = net.bytes();
        let (seconds, wire, sender, site, copies) = match self {
            Self::Drover(site, sender) => {
                let cost_before = site.cost();
                let outcome = sender.begin_flock(&images)?.finish(time)?;
                let mut cost = site.cost();
                cost.cpu_seconds -= cost_before.cpu_seconds;
                let wire = outcome.images.iter().map(Sent::wire_bytes).sum();
                let copy = |image: &PathBuf| site.image(&file_name(image));
                let copies: Vec<PathBuf> = images.iter().map(copy).collect();
                (
                    outcome.seconds,
                    Some(wire),
                    Some(outcome.cost),
                    Some(cost),
                    copies,
                )
            }
            Self::Rival(carrier) => {
                let seconds = carrier.carry_all(&images, &there)?;
                let copies = images
                    .iter()
                    .map(|image| carrier.delivered(image))
                    .collect();
                (seconds, None, None, None, copies)
            }
        };
        let link = net.since(before);
        let mut same = true;
        for (image, copy) in images.iter().zip(&copies) {
            same &= copy.is_file() && identical(image, copy)?;
        }
        Ok(Carried {
            seconds,
            link,
            wire,
            sender,
            site,
            same,
        })
    }
}

/// Timeout of drover for an image: generous, so that only a hang is killed.
///
/// # Errors
/// When there is no such image.
pub fn deadline(image: &Path) -> Result<Duration> {
    Ok(Duration::from_secs(
        180 + (std::fs::metadata(image)?.len() >> 20),
    ))
}

/// Makes a row from one or several transfers. Measured values have a spread, derived ones do not.
pub fn fill(mut row: Row, carried: &[Carried], limit: &Limit, line: Option<Line>) -> Row {
    let data = limit.data_blocks as f64 * 4096.0;
    let all = |of: &dyn Fn(&Carried) -> Option<f64>| -> Vec<f64> {
        carried.iter().filter_map(of).collect()
    };
    let ideal = |c: &Carried| {
        let (near, far) = c.link?;
        let most = near.max(far) as f64;
        (most > 0.0).then_some(most / line?.rate())
    };
    row.set_all(key::BYTES, &all(&|c| Some(c.bytes()? / 1e6)));
    row.set_all(key::SECONDS, &all(&|c| Some(c.seconds)));
    row.set_all(key::OVER_IDEAL, &all(&|c| Some(c.seconds / ideal(c)?)));
    let mib = |cost: Option<Cost>| Some(cost?.peak_rss_bytes as f64 / f64::from(1 << 20));
    let cpu = |cost: Option<Cost>| Some(cost?.cpu_seconds);
    let mut greatest = |key, of: &dyn Fn(&Carried) -> Option<f64>| {
        if let Some(value) = all(of).into_iter().reduce(f64::max) {
            row.set(key, value);
        }
    };
    greatest(key::WIRE, &|c| Some(c.wire? as f64 / 1e6));
    greatest(key::SENDER_MIB, &|c| mib(c.sender));
    greatest(key::SITE_MIB, &|c| mib(c.site));
    greatest(key::SENDER_CPU, &|c| cpu(c.sender));
    greatest(key::SITE_CPU, &|c| cpu(c.site));
    if carried.iter().any(|c| !c.same) {
        row.verdict = Verdict::Wrong("the delivered file is not its original".to_owned());
    }
    compared(row, data, limit, line)
}

/// Makes a row for the limit: its bytes, and the time they need at the line's rate. Excludes compression framing of an
/// empty stream.
pub fn fill_limit(mut row: Row, limit: &Limit, line: Option<Line>) -> Row {
    let bytes = if limit.unique_blocks == 0 {
        0.0
    } else {
        limit.limit_bytes as f64
    };
    row.set(key::BYTES, bytes / 1e6);
    // Without a line, the only known lower bound on its time is zero.
    row.set(key::SECONDS, line.map_or(0.0, |line| bytes / line.rate()));
    compared(row, limit.data_blocks as f64 * 4096.0, limit, line)
}

/// Sets the figures derived from a row's bytes and seconds. Ratios to a limit of zero are omitted.
fn compared(mut row: Row, data: f64, limit: &Limit, line: Option<Line>) -> Row {
    row.set(key::DATA, data / 1e6);
    if let Some(bytes) = row.value(key::BYTES).map(|mb| mb * 1e6) {
        if limit.unique_blocks > 0 {
            row.set(key::OVER_LIMIT, bytes / limit.limit_bytes as f64);
        }
        if data > 0.0 {
            row.set(key::TELEPORTED, 100.0 * (1.0 - bytes / data));
        }
    }
    if let (Some(line), Some(seconds)) = (line, row.value(key::SECONDS).filter(|s| *s > 0.0)) {
        row.set(key::TIMES_COPY, data / line.rate() / seconds);
    }
    row
}

impl Carried {
    /// Bytes transferred: on the link or, without one, by the tool's own count.
    pub fn bytes(&self) -> Option<f64> {
        let bytes = self.link.map(|(near, far)| near + far).or(self.wire)?;
        Some(bytes as f64)
    }

    /// The sum over several images; a figure missing for one of them is missing in the sum.
    pub fn total(all: &[Self]) -> Self {
        let sum = |cost: fn(&Self) -> Option<Cost>| {
            all.iter().map(cost).try_fold(Cost::default(), |sum, cost| {
                Some(Cost {
                    peak_rss_bytes: sum.peak_rss_bytes.max(cost?.peak_rss_bytes),
                    cpu_seconds: sum.cpu_seconds + cost?.cpu_seconds,
                })
            })
        };
        let add = |sum: (u64, u64), link: (u64, u64)| (sum.0 + link.0, sum.1 + link.1);
        Self {
            seconds: all.iter().map(|c| c.seconds).sum(),
            link: all
                .iter()
                .try_fold((0, 0), |sum, c| Some(add(sum, c.link?))),
            wire: all.iter().map(|c| c.wire).sum(),
            sender: sum(|c| c.sender),
            site: sum(|c| c.site),
            same: all.iter().all(|c| c.same),
        }
    }
}

/// The label of an image in rows: its file name without `.raw`.
pub fn label(image: &Path) -> String {
    let name = file_name(image);
    name.strip_suffix(".raw").unwrap_or(&name).to_owned()
}

/// The limits of `images` in this order, for a destination that has `with`.
///
/// # Errors
/// When an image cannot be read.
pub fn limits(lab: &Lab, with: &[PathBuf], images: &[PathBuf]) -> Result<Vec<Limit>> {
    limit::kept(&lab.common.out.join("limits.json"), with, images)
}
