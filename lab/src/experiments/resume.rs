//! Cost of an interruption: the link is cut for a while, or the sender or the site is killed halfway.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::lines::{self, FAST, Line, Net, REFERENCE, line};
use super::mover::{self, key};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::files::identical;
use crate::setup::{Lab, file_name, must_be_same};
use crate::site::{Sender, Sending, Site};

/// Duration of a cut, or of the site's downtime.
const AWAY: Duration = Duration::from_secs(3);
/// Polling interval for the halfway point.
const LOOK: Duration = Duration::from_millis(5);
/// Fixed port, so that the site can restart at the same address: the far end has its own network namespace.
const PORT: u16 = 7377;

pub const EXPERIMENT: Experiment = Experiment {
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
        Column::figure("extra_mb", "more MB", 2),
        Column::figure("extra_percent", "more bytes %", 1),
        Column::figure(key::SECONDS, "seconds", 2),
        Column::figure("extra_seconds", "more seconds", 2),
    ],
    cases: |lab| Ok(lines(lab).into_iter().map(case).collect()),
    run,
};

/// The events that happen halfway.
const NOTHING: &str = "nothing";
const CUT: &str = "link cut for 3 s";
const KILL_SENDER: &str = "sender killed, sent again";
const KILL_SITE: &str = "site killed, back after 3 s";

/// The lines: the reference, a fast one, and a slow, lossy one with a long round-trip time.
fn lines(lab: &Lab) -> Vec<Line> {
    // Slow enough that the small set has a halfway point, too.
    lab.either(
        vec![REFERENCE, FAST, line(20.0, 150.0, 0.1)],
        vec![REFERENCE],
    )
}

fn case(line: Line) -> Case {
    let what = format!("an image interrupted half way at {}", line.describe());
    Case::new(
        line.slug(),
        what,
        u8::from(line != REFERENCE),
        &[Need::Library, Need::Link],
    )
}

/// Runs all events; a failed one has its error, and the others still run.
fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let line = lines(lab).into_iter().find(|line| line.slug() == case.id);
    let line = line.context("no such case")?;
    let image = lab
        .image(lab.either("bookworm-plain", "small-one"))?
        .canonicalize()?;
    let net = Net::like(Some(line), 1)?;
    let mut undisturbed: Option<(u64, u64, f64)> = None;
    let mut rows = Vec::new();
    for event in [NOTHING, CUT, KILL_SENDER, KILL_SITE] {
        let mut row = Row::new([
            ("what", event.to_owned()),
            ("image", mover::label(&image)),
            ("link", lines::describe(Some(line))),
        ]);
        let half = undisturbed.map(|(near, ..)| near / 2);
        match send(lab, &net, &image, event, half) {
            Ok(total) => {
                eprintln!("  {event}: {:.1} s", total.2);
                let base = *undisturbed.get_or_insert(total);
                let (bytes, before) = ((total.0 + total.1) as f64, (base.0 + base.1) as f64);
                row.set(key::BYTES, bytes / 1e6);
                row.set("extra_mb", (bytes - before) / 1e6);
                row.set("extra_percent", 100.0 * (bytes - before) / before.max(1.0));
                row.set(key::SECONDS, total.2);
                row.set("extra_seconds", total.2 - base.2);
            }
            Err(error) => row.verdict = Verdict::failed(&error),
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Sends the image; when `half` bytes have been sent, the event happens. Returns bytes to and from the site, and
/// seconds.
fn send(
    lab: &Lab,
    net: &Net,
    image: &Path,
    event: &str,
    half: Option<u64>,
) -> Result<(u64, u64, f64)> {
    let (drover, work) = (lab.binary()?, lab.work("resume")?);
    let start = || Site::start_on(&drover, &work.join("site"), net.place(), PORT);
    let deadline = mover::deadline(image)? + AWAY;
    identical(image, image)?;
    rustix::fs::sync();
    let mut site = start()?;
    let sender = Sender::pair(&drover, &work.join("sender"), net.place(), &site)?;
    let before = net.bytes();
    let started = Instant::now();
    let mut sending = sender.begin(image, &[])?;
    if event != NOTHING {
        let half = half.context("there is no undisturbed send to compare with")?;
        wait_for(&mut sending, half, deadline, || {
            Ok(net.since(before).context("no link")?.0)
        })?;
    }
    match event {
        CUT => {
            let link = net.link().context("no link to cut")?;
            link.cut();
            std::thread::sleep(AWAY);
            link.heal();
        }
        KILL_SENDER => {
            sending.kill()?;
            sending = sender.begin(image, &[])?;
        }
        KILL_SITE => {
            site.kill()?;
            std::thread::sleep(AWAY);
            site = start().context("the site does not come back")?;
        }
        _ => {}
    }
    sending.finish(deadline)?;
    let seconds = started.elapsed().as_secs_f64();
    let (near, far) = net.since(before).context("no link")?;
    must_be_same(image, &site.image(&file_name(image)))?;
    Ok((near, far, seconds))
}

/// Waits until this many bytes have been sent.
fn wait_for(
    sending: &mut Sending,
    bytes: u64,
    deadline: Duration,
    gone: impl Fn() -> Result<u64>,
) -> Result<()> {
    let started = Instant::now();
    while gone()? < bytes {
        if !sending.runs() {
            bail!("it ended before half of its bytes had gone");
        }
        if started.elapsed() > deadline {
            bail!("half of its bytes did not go before the deadline");
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}
