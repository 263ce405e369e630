//! What an interruption costs: a link that is cut for a while, a sender or a site that is killed half way.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::lines::{FAST, Line, Net, REFERENCE};
use super::mover::{self, key};
use super::pictures::{Words, bars, only, shown_link, values};
use super::weights::{Scales, drover_seconds, weight};
use super::{Lab, Work, file_name};
use crate::bench::{About, Axis, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};
use crate::rivals::Weight;
use crate::same::identical;
use crate::site::{Sender, Sending, Site, Where};

/// How long the link is cut, or the site is away.
const AWAY: Duration = Duration::from_secs(3);
/// How often a transfer is looked at for its half.
const LOOK: Duration = Duration::from_millis(5);
/// Where a site is that has to come back to the same place: the far end's namespace is its own.
const PORT: u16 = 7377;

const EXTRA_MB: &str = "extra_mb";
const EXTRA_PERCENT: &str = "extra_percent";
const EXTRA_SECONDS: &str = "extra_seconds";

static ABOUT: About = About {
    name: "resume",
    title: "What an interruption costs",
    text: "An image is sent to an empty site. When half of the bytes of an undisturbed send have crossed the link, it is \
cut, and healed after 3 s; or the sender is killed (SIGKILL) and started again at once; or the site is killed, and comes \
back at the same address after 3 s, while the sender goes on by itself. *More MB* and *more seconds* are those beyond the \
undisturbed send, everything of both attempts included: bytes that were sent twice, and the time that the other end was \
away. The image that arrives in the end is compared with its original.",
    columns: &[
        Column::label("what", "what happens"),
        Column::label("image", "image"),
        Column::label("link", "link"),
        Column::figure(key::BYTES, "MB on the link", 2),
        Column::figure(EXTRA_MB, "more MB", 2),
        Column::figure(EXTRA_PERCENT, "more bytes %", 1),
        Column::figure(key::SECONDS, "seconds", 2),
        Column::figure(EXTRA_SECONDS, "more seconds", 2),
    ],
};

/// What happens half way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Nothing,
    Cut,
    KillSender,
    KillSite,
}

impl Event {
    const ALL: [Self; 4] = [Self::Nothing, Self::Cut, Self::KillSender, Self::KillSite];

    fn describe(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Cut => "link cut for 3 s",
            Self::KillSender => "sender killed, sent again",
            Self::KillSite => "site killed, back after 3 s",
        }
    }
}

/// Interruptions.
pub struct Resume;

impl Experiment for Resume {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let image = image(lab)?;
        let weight = Scales::new(&lab.common.out)
            .guess(&[], std::slice::from_ref(&image))?
            .into_iter()
            .next()
            .context("nothing was weighed")?;
        let lines = lines(lab).into_iter();
        Ok(lines.map(|line| case(&image, &weight, line)).collect())
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let line = lines(lab)
            .into_iter()
            .find(|line| line.slug() == case.id)
            .with_context(|| format!("no case {}", case.id))?;
        measure(lab, line, &image(lab)?)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        plots(rows)
    }

    fn images(&self, lab: &Lab, _case: &Case) -> Option<Vec<PathBuf>> {
        Some(vec![image(lab).ok()?])
    }
}

/// The image that is sent.
fn image(lab: &Lab) -> Result<PathBuf> {
    let name = if lab.small {
        "small-one"
    } else {
        "bookworm-plain"
    };
    Ok(lab.image(name)?.canonicalize()?)
}

/// The reference; what is slow, far and lossy; and what is fast.
fn lines(lab: &Lab) -> Vec<Line> {
    if lab.small {
        // Slow enough that there is a half to wait for.
        return vec![REFERENCE];
    }
    let far = Line {
        rate_mbit: 20.0,
        rtt_ms: 150.0,
        loss_percent: 0.1,
    };
    vec![REFERENCE, FAST, far]
}

fn case(image: &Path, weight: &Weight, line: Line) -> Case {
    let once = drover_seconds(weight, Some(line));
    Case {
        id: line.slug(),
        what: format!(
            "{} interrupted half way at {}",
            mover::label(image),
            line.describe()
        ),
        seconds: 4.0 * (once + 3.0) + 2.0 * AWAY.as_secs_f64(),
        rank: if line == REFERENCE { 1 } else { 3 },
        subject: Subject::Drover,
        needs: &[Need::Library, Need::Link],
    }
}

/// What a send cost until its image was there.
#[derive(Clone, Copy, Debug)]
struct Total {
    /// IP bytes both ways.
    bytes: u64,
    /// Those towards the site.
    forward: u64,
    seconds: f64,
    same: bool,
}

/// All events; those that fail say why, and the others go on.
fn measure(lab: &Lab, line: Line, image: &Path) -> Result<Vec<Row>> {
    let drover = lab.binary()?;
    let limit = Scales::new(&lab.common.out)
        .limits(&[], &[image.to_owned()])?
        .into_iter()
        .next()
        .context("nothing was weighed")?;
    let deadline = mover::deadline(&weight(&limit), Some(line)) + AWAY;
    let net = Net::like(Some(line), 1)?;
    let mut undisturbed: Option<Total> = None;
    let mut rows = Vec::new();
    for event in Event::ALL {
        let work = lab.work("resume")?;
        let half = match (event, undisturbed) {
            (Event::Nothing, _) => Ok(None),
            (_, Some(total)) => Ok(Some(total.forward / 2)),
            (_, None) => Err(anyhow::anyhow!(
                "there is no undisturbed send to compare with"
            )),
        };
        let ends = Ends {
            drover: &drover,
            net: &net,
            work: &work,
            image,
            deadline,
        };
        let outcome = half.and_then(|half| ends.send(event, half));
        let mut row = Row::new([
            ("what", event.describe().to_owned()),
            ("image", mover::label(image)),
            ("link", line.describe()),
        ]);
        match outcome {
            Ok(total) => {
                eprintln!("  {}: {:.1} s", event.describe(), total.seconds);
                let base = *undisturbed.get_or_insert(total);
                row = compare(row, &total, &base);
            }
            Err(error) => row.verdict = Verdict::Failed(mover::reason(&error)),
        }
        rows.push(row);
    }
    Ok(rows)
}

fn compare(mut row: Row, total: &Total, base: &Total) -> Row {
    let (bytes, before) = (total.bytes as f64, base.bytes as f64);
    row.set(key::BYTES, bytes / 1e6);
    row.set(EXTRA_MB, (bytes - before) / 1e6);
    row.set(EXTRA_PERCENT, 100.0 * (bytes - before) / before.max(1.0));
    row.set(key::SECONDS, total.seconds);
    row.set(EXTRA_SECONDS, total.seconds - base.seconds);
    if !total.same {
        row.verdict = Verdict::Wrong("the delivered file is not its original".to_owned());
    }
    row
}

/// Both ends of one send.
struct Ends<'a> {
    drover: &'a Path,
    net: &'a Net,
    work: &'a Work,
    image: &'a Path,
    deadline: Duration,
}

impl<'a> Ends<'a> {
    fn place(&self) -> Where<'a> {
        self.net.place()
    }

    fn site(&self) -> Result<Site> {
        Site::start_on(self.drover, &self.work.join("site"), self.place(), PORT)
    }

    /// Sends the image; when `half` bytes have gone towards the site, the event happens.
    fn send(&self, event: Event, half: Option<u64>) -> Result<Total> {
        identical(self.image, self.image)?;
        rustix::fs::sync();
        let mut site = self.site()?;
        let sender = Sender::pair(self.drover, &self.work.join("sender"), self.place(), &site)?;
        let before = self.net.bytes()?;
        let started = Instant::now();
        let mut sending = sender.begin(self.image, &[])?;
        if let Some(half) = half {
            self.wait_for(&mut sending, before, half)?;
        }
        match event {
            Event::Nothing => {}
            Event::Cut => {
                let link = self.net.link().context("no link to cut")?;
                link.cut()?;
                std::thread::sleep(AWAY);
                link.heal()?;
            }
            Event::KillSender => {
                sending.kill()?;
                sending = sender.begin(self.image, &[])?;
            }
            Event::KillSite => {
                site.kill()?;
                std::thread::sleep(AWAY);
                site = self.site().context("the site does not come back")?;
            }
        }
        sending.finish(self.deadline)?;
        let seconds = started.elapsed().as_secs_f64();
        let (near, far) = self.net.since(before)?.context("no link")?;
        let delivered = site.image(&file_name(self.image));
        Ok(Total {
            bytes: near + far,
            forward: near,
            seconds,
            same: delivered.is_file() && identical(self.image, &delivered)?,
        })
    }

    /// Waits until so many bytes have gone towards the site.
    fn wait_for(
        &self,
        sending: &mut Sending,
        before: Option<(u64, u64)>,
        bytes: u64,
    ) -> Result<()> {
        let started = Instant::now();
        while self.net.since(before)?.context("no link")?.0 < bytes {
            if !sending.runs() {
                bail!("it ended before half of its bytes had gone");
            }
            if started.elapsed() > self.deadline {
                bail!("half of its bytes did not go before the deadline");
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

fn plots(rows: &[Row]) -> Vec<Plot> {
    let all: Vec<&Row> = rows.iter().collect();
    let links = values(&all, "link");
    let Some(link) = shown_link(&links) else {
        return Vec::new();
    };
    // Of the undisturbed send nothing is more, and less than nothing is noise.
    let mut here: Vec<Row> = only(&all, "link", link).into_iter().cloned().collect();
    here.retain(|row| row.label("what") != Event::Nothing.describe());
    for row in &mut here {
        for figure in [EXTRA_MB, EXTRA_SECONDS] {
            if let Some(value) = row.value(figure) {
                row.set(figure, value.max(0.0));
            }
        }
    }
    let here: Vec<&Row> = here.iter().collect();
    let words = |name, title: String, y| Words { name, title, y };
    [
        bars(
            &here,
            "what",
            "link",
            EXTRA_MB,
            words(
                "bytes",
                format!("What crosses the link more than in an undisturbed send, {link}"),
                Axis::linear("MB"),
            ),
        ),
        bars(
            &here,
            "what",
            "link",
            EXTRA_SECONDS,
            words(
                "seconds",
                format!("What an interrupted send takes longer, {link}"),
                Axis::linear("seconds"),
            ),
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests;
