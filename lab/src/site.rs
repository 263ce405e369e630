//! The real `drover` binary, driven as a script would: a site that serves, and a sender that is paired with it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::link::{Link, Side};
use crate::shell;
use crate::watch::{Cost, Watch};

/// How long a site may take until it prints its ticket.
const READY: Duration = Duration::from_secs(20);
/// How long a site may take to end after SIGTERM.
const END: Duration = Duration::from_secs(15);
/// How long pairing may take.
const PAIR: Duration = Duration::from_secs(60);
/// How long a send may take when nobody knows better.
const SEND: Duration = Duration::from_secs(1800);
/// How often a process that must end is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// What senders call the site.
const PEER: &str = "far";

/// Where the two ends are.
#[derive(Clone, Copy)]
pub enum Where<'a> {
    /// Both on this host.
    Loopback,
    /// The sender at one end of a link, the site at the other.
    Over(&'a Link),
}

impl Where<'_> {
    /// A command at the sending end.
    pub fn near(&self, program: &Path) -> Command {
        self.at(Side::A, program)
    }

    /// A command at the receiving end.
    pub fn far(&self, program: &Path) -> Command {
        self.at(Side::B, program)
    }

    /// The address at which the receiving end listens.
    pub fn far_address(&self) -> &'static str {
        match self {
            Self::Loopback => "127.0.0.1",
            Self::Over(_) => Side::B.address(),
        }
    }

    fn at(&self, side: Side, program: &Path) -> Command {
        match self {
            Self::Loopback => Command::new(program),
            Self::Over(link) => link.command(side, &program.to_string_lossy()),
        }
    }
}

/// A site that serves until it is dropped.
pub struct Site {
    home: PathBuf,
    child: Child,
    watch: Watch,
    ticket: String,
}

impl Site {
    /// Starts `drover serve` with a home of its own and waits for its ticket.
    ///
    /// # Errors
    /// When it cannot be started, ends, or prints no ticket in time; what it said is in the error.
    pub fn start(drover: &Path, home: &Path, place: Where<'_>) -> Result<Self> {
        Self::start_on(drover, home, place, 0)
    }

    /// The same on a port of one's choice, so that it can come back where it was; 0 is any that is free.
    ///
    /// # Errors
    /// As [`Site::start`].
    pub fn start_on(drover: &Path, home: &Path, place: Where<'_>, port: u16) -> Result<Self> {
        fs::create_dir_all(home)?;
        let home = home.canonicalize()?;
        let said = home.with_extension("serve.log");
        let mut child = place
            .far(drover)
            .args([
                "serve",
                "--listen",
                &format!("{}:{port}", place.far_address()),
            ])
            .env("DROVER_HOME", &home)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&said)?)
            .spawn()
            .with_context(|| format!("cannot start {}", drover.display()))?;
        let watch = Watch::start(child.id());
        let stdout = child.stdout.take().context("no stdout")?;
        let (send, lines) = mpsc::channel();
        // The reader goes on to the end, so that the site never waits for its output to be read.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let mut site = Self {
            home,
            child,
            watch,
            ticket: String::new(),
        };
        let deadline = Instant::now() + READY;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = lines.recv_timeout(left) else {
                bail!("drover serve printed no ticket: {}", last_words(&said));
            };
            let word = line.trim();
            if !word.is_empty() && !word.contains(char::is_whitespace) {
                site.ticket = word.to_owned();
                return Ok(site);
            }
        }
    }

    /// Where a delivered image is.
    pub fn image(&self, name: &str) -> PathBuf {
        self.home.join("images").join(name)
    }

    /// What the site has cost so far.
    pub fn cost(&self) -> Cost {
        self.watch.cost()
    }

    /// From now on the greatest resident set counts anew.
    pub fn forget_peak(&self) {
        self.watch.forget_peak();
    }

    /// Ends the site as a power cut would: SIGKILL.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        terminate(&mut self.child, END);
    }
}

/// Ends a process by SIGTERM, or, when it has not ended in time, by SIGKILL.
pub fn terminate(child: &mut Child, patience: Duration) {
    if matches!(child.try_wait(), Ok(Some(_))) {
        return;
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::TERM);
    }
    if end_within(child, patience).is_err() {
        eprintln!("process {} did not end on SIGTERM", child.id());
    }
}

/// What `drover send --json` says at its end about one image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// The image's name at the destination.
    pub name: String,
    /// The digest both sides agreed on.
    #[serde(default)]
    pub digest: String,
    /// The image's size.
    pub size_bytes: u64,
    /// Bytes of it that are not zero.
    #[serde(default)]
    pub data_bytes: u64,
    /// Bytes that went to the site.
    pub wire_sent_bytes: u64,
    /// Bytes that came from the site.
    pub wire_received_bytes: u64,
    /// Blocks found at the destination.
    #[serde(default)]
    pub matched_blocks: u64,
    /// Blocks that were sent.
    #[serde(default)]
    pub sent_blocks: u64,
    /// Zero blocks.
    #[serde(default)]
    pub zero_blocks: u64,
    /// Duration by drover's own clock.
    #[serde(default)]
    pub seconds: f64,
    /// Where the time went: `source` and `destination`, each by stage.
    #[serde(default)]
    pub stages: BTreeMap<String, BTreeMap<String, Stage>>,
}

/// What a stage of drover's pipeline did; threads of one stage add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Seconds of work, disk included.
    pub busy_seconds: f64,
    /// Seconds of waiting for the stage before or behind it.
    pub wait_seconds: f64,
    /// Seconds of waiting for the other end.
    pub socket_seconds: f64,
    /// Bytes that went through.
    pub bytes: u64,
}

impl Sent {
    /// Bytes on the wire, both ways.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_sent_bytes + self.wire_received_bytes
    }
}

/// How a `drover send` went.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The images, in the order in which they were named.
    pub images: Vec<Sent>,
    /// From start to exit, by the lab's clock.
    pub seconds: f64,
    /// What the sender cost.
    pub cost: Cost,
}

/// A sender with a home of its own, paired with a site.
pub struct Sender<'a> {
    drover: PathBuf,
    home: PathBuf,
    place: Where<'a>,
}

impl<'a> Sender<'a> {
    /// Pairs a new home with `site`.
    ///
    /// # Errors
    /// When pairing fails.
    pub fn pair(drover: &Path, home: &Path, place: Where<'a>, site: &Site) -> Result<Self> {
        fs::create_dir_all(home)?;
        let home = home.canonicalize()?;
        let mut pair = place.near(drover);
        pair.args(["pair", &site.ticket, "--name", PEER])
            .env("DROVER_HOME", &home)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let said = home.with_extension("pair.log");
        let mut child = pair
            .stderr(File::create(&said)?)
            .spawn()
            .with_context(|| format!("cannot start {}", drover.display()))?;
        let status = end_within(&mut child, PAIR).context("pairing did not end")?;
        if !status.success() {
            bail!("pairing failed: {status}: {}", last_words(&said));
        }
        Ok(Self {
            drover: drover.to_owned(),
            home,
            place,
        })
    }

    /// Sends one image under the name of its file, within half an hour.
    ///
    /// # Errors
    /// As [`Sending::finish`].
    pub fn send(&self, image: &Path, options: &[&str]) -> Result<Outcome> {
        self.begin(image, options)?.finish(SEND)
    }

    /// Starts to send one image under the name of its file.
    ///
    /// # Errors
    /// When there is no such image, or drover cannot be started.
    pub fn begin(&self, image: &Path, options: &[&str]) -> Result<Sending> {
        let image = image
            .canonicalize()
            .with_context(|| format!("no image {}", image.display()))?;
        let said = self.home.with_extension("send.log");
        let started = Instant::now();
        let mut child = self
            .place
            .near(&self.drover)
            .arg("send")
            .arg(&image)
            .args([PEER, "--json"])
            .args(options)
            .env("DROVER_HOME", &self.home)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&said)?)
            .spawn()
            .with_context(|| format!("cannot start {}", self.drover.display()))?;
        let watch = Watch::start(child.id());
        let stdout = child.stdout.take();
        let (send, output) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut stdout) = stdout {
                let _ = stdout.read_to_string(&mut text);
            }
            let _ = send.send(text);
        });
        Ok(Sending {
            image,
            said,
            started,
            child,
            watch,
            output,
        })
    }
}

/// A `drover send` under way; killed when it is dropped unfinished.
pub struct Sending {
    image: PathBuf,
    said: PathBuf,
    started: Instant,
    child: Child,
    watch: Watch,
    /// All of its output, when that has ended.
    output: mpsc::Receiver<String>,
}

impl Sending {
    /// Waits until it has ended, `deadline` from its start on at most.
    ///
    /// # Errors
    /// When drover fails, takes longer, or its last line is not what scripts rely on.
    pub fn finish(mut self, deadline: Duration) -> Result<Outcome> {
        let shown = format!("drover send {}", self.image.display());
        let left = deadline.saturating_sub(self.started.elapsed());
        // The end of its output is noticed at once; looking whether it runs would cost up to a look's time.
        let output = self.output.recv_timeout(left).ok();
        let left = deadline.saturating_sub(self.started.elapsed());
        let status = end_within(&mut self.child, left).with_context(|| shown.clone())?;
        let seconds = self.started.elapsed().as_secs_f64();
        let cost = self.watch.cost();
        if !status.success() {
            bail!("{shown}: {status}: {}", last_words(&self.said));
        }
        Ok(Outcome {
            images: parse_done(&output.unwrap_or_default())?,
            seconds,
            cost,
        })
    }

    /// True while it runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends it as a power cut would: SIGKILL.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a process; kills it when it has not ended in time.
///
/// # Errors
/// When it had to be killed.
pub fn end_within(child: &mut Child, time: Duration) -> Result<ExitStatus> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if started.elapsed() >= time {
            let _ = child.kill();
            let _ = child.wait();
            bail!("killed at its deadline, after {:.0} s", time.as_secs_f64());
        }
        std::thread::sleep(LOOK);
    }
}

fn last_words(file: &Path) -> String {
    shell::tail(&fs::read(file).unwrap_or_default())
}

/// The images of the last line, which says that all is done.
fn parse_done(output: &str) -> Result<Vec<Sent>> {
    #[derive(Deserialize)]
    struct Done {
        event: String,
        images: Vec<Sent>,
    }
    let last = output
        .lines()
        .rfind(|l| !l.trim().is_empty())
        .context("drover printed nothing")?;
    let done: Done = serde_json::from_str(last)
        .with_context(|| format!("not the last line promised: {last}"))?;
    if done.event != "done" || done.images.is_empty() {
        bail!("not the last line promised: {last}");
    }
    Ok(done.images)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_read() {
        let output = concat!(
            r#"{"event":"progress","bytes":5}"#,
            "\n",
            r#"{"event":"done","images":[{"name":"a.raw","digest":"00","size_bytes":10,"data_bytes":8,"wire_sent_bytes":5,"#,
            r#""wire_received_bytes":1,"matched_blocks":2,"sent_blocks":1,"zero_blocks":0,"seconds":0.5}]}"#,
            "\n"
        );
        let sent = parse_done(output).unwrap();
        assert_eq!(
            (
                sent[0].name.as_str(),
                sent[0].wire_bytes(),
                sent[0].matched_blocks
            ),
            ("a.raw", 6, 2)
        );
        assert!(parse_done(r#"{"event":"progress"}"#).is_err());
        assert!(parse_done(r#"{"event":"done","images":[]}"#).is_err());
        assert!(parse_done("").is_err());
    }

    #[test]
    fn a_program_that_is_no_drover_is_an_error_and_not_a_hang() {
        let dir = tempfile::tempdir().unwrap();
        let error = Site::start(
            Path::new("false"),
            &dir.path().join("home"),
            Where::Loopback,
        )
        .err();
        assert!(error.unwrap().to_string().contains("no ticket"));
    }
}
