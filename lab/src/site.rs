//! The real `drover` binary, run as a script would: a serving site, and a sender that is paired with it.

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

/// Timeout for a site to print its ticket.
const READY: Duration = Duration::from_secs(20);
/// Timeout for a site to exit after SIGTERM.
const END: Duration = Duration::from_secs(15);
/// Timeout of pairing.
const PAIR: Duration = Duration::from_secs(60);
/// Default timeout of a send.
const SEND: Duration = Duration::from_secs(1800);
/// Polling interval for the exit of a process.
const LOOK: Duration = Duration::from_millis(5);
/// The senders' name for the site.
const PEER: &str = "far";

/// Where the two ends run.
#[derive(Clone, Copy)]
pub enum Where<'a> {
    /// Both on this host.
    Loopback,
    /// The sender at one end of a link, the site at the other.
    Over(&'a Link),
}

impl Where<'_> {
    /// A command that runs at the sending end.
    pub fn near(&self, program: &Path) -> Command {
        self.at(Side::A, program)
    }

    /// A command that runs at the receiving end.
    pub fn far(&self, program: &Path) -> Command {
        self.at(Side::B, program)
    }

    /// The listen address of the receiving end.
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

/// A running site; killed when dropped.
pub struct Site {
    home: PathBuf,
    child: Child,
    watch: Watch,
    ticket: String,
}

impl Site {
    /// Starts `drover serve` with its own home and waits for its ticket.
    ///
    /// # Errors
    /// When it cannot be started, exits, or prints no ticket in time; includes its output.
    pub fn start(drover: &Path, home: &Path, place: Where<'_>) -> Result<Self> {
        Self::start_on(drover, home, place, 0)
    }

    /// The same on a given port, so that it can restart at the same address; 0 for any free port.
    ///
    /// # Errors
    /// As [`Site::start`].
    pub fn start_on(drover: &Path, home: &Path, place: Where<'_>, port: u16) -> Result<Self> {
        let listen = format!("{}:{port}", place.far_address());
        Self::start_by(place.far(drover), home, &listen)
    }

    /// The same by a command that runs drover where it is to run, at this address.
    ///
    /// # Errors
    /// As [`Site::start`].
    pub fn start_by(mut drover: Command, home: &Path, listen: &str) -> Result<Self> {
        fs::create_dir_all(home)?;
        let home = home.canonicalize()?;
        let said = home.with_extension("serve.log");
        let mut child = drover
            .args(["serve", "--listen", listen])
            .env("DROVER_HOME", &home)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&said)?)
            .spawn()
            .with_context(|| format!("cannot start {}", drover.get_program().display()))?;
        let watch = Watch::start(child.id());
        let stdout = child.stdout.take().context("no stdout")?;
        let (send, lines) = mpsc::channel();
        // Read until the end, so that the site never blocks on its output.
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

    /// The path of a delivered image.
    pub fn image(&self, name: &str) -> PathBuf {
        self.home.join("images").join(name)
    }

    /// The cost of the site so far.
    pub fn cost(&self) -> Cost {
        self.watch.cost()
    }

    /// Resets the peak memory.
    pub fn forget_peak(&self) {
        self.watch.forget_peak();
    }

    /// Kills the site by SIGKILL, like a crash.
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

/// Ends a process by SIGTERM or, if it does not exit in time, by SIGKILL.
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

/// The result for one image in the last line of `drover send --json`.
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
    /// Bytes sent to the site.
    pub wire_sent_bytes: u64,
    /// Bytes received from the site.
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
    /// Duration according to drover.
    #[serde(default)]
    pub seconds: f64,
    /// Time spent per stage, for `source` and `destination`.
    #[serde(default)]
    pub stages: BTreeMap<String, BTreeMap<String, Stage>>,
}

/// Statistics of a stage of drover's pipeline, summed over its threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Seconds of work, including disk I/O.
    pub busy_seconds: f64,
    /// Seconds of waiting for the previous or the next stage.
    pub wait_seconds: f64,
    /// Seconds of waiting for the other end.
    pub socket_seconds: f64,
    /// Bytes processed.
    pub bytes: u64,
}

impl Sent {
    /// Bytes on the wire, in both directions.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_sent_bytes + self.wire_received_bytes
    }
}

/// The result of a `drover send`.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The images, in the order given.
    pub images: Vec<Sent>,
    /// From start to exit, measured by the lab.
    pub seconds: f64,
    /// Cost of the sender.
    pub cost: Cost,
}

/// A sender with its own home, paired with a site.
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

    /// Sends one image under its file name, with a timeout of half an hour.
    ///
    /// # Errors
    /// As [`Sending::finish`].
    pub fn send(&self, image: &Path, options: &[&str]) -> Result<Outcome> {
        self.begin(image, options)?.finish(SEND)
    }

    /// Starts sending one image under its file name.
    ///
    /// # Errors
    /// When there is no such image, or drover cannot be started.
    pub fn begin(&self, image: &Path, options: &[&str]) -> Result<Sending> {
        self.begin_all(&[image.to_owned()], options)
    }

    /// Starts sending images as a flock, under their file names.
    ///
    /// # Errors
    /// As [`Sender::begin`].
    pub fn begin_flock(&self, images: &[PathBuf]) -> Result<Sending> {
        self.begin_all(images, &["--flock", "flock"])
    }

    fn begin_all(&self, images: &[PathBuf], options: &[&str]) -> Result<Sending> {
        let real = |image: &PathBuf| {
            let real = image.canonicalize();
            real.with_context(|| format!("no image {}", image.display()))
        };
        let images = images.iter().map(real).collect::<Result<Vec<_>>>()?;
        let said = self.home.with_extension("send.log");
        let started = Instant::now();
        let mut child = self
            .place
            .near(&self.drover)
            .arg("send")
            .args(&images)
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
            image: images.into_iter().next().unwrap_or_default(),
            said,
            started,
            child,
            watch,
            output,
        })
    }
}

/// A running `drover send`; killed when dropped before it is finished.
pub struct Sending {
    image: PathBuf,
    said: PathBuf,
    started: Instant,
    child: Child,
    watch: Watch,
    /// Receives all of its output, after it has ended.
    output: mpsc::Receiver<String>,
}

impl Sending {
    /// Waits for its end, at most until `deadline` after its start.
    ///
    /// # Errors
    /// When drover fails, is too slow, or its last line is not in the documented form.
    pub fn finish(mut self, deadline: Duration) -> Result<Outcome> {
        let shown = format!("drover send {}", self.image.display());
        let left = deadline.saturating_sub(self.started.elapsed());
        // The end of the output is noticed at once, whereas polling for the exit takes up to an interval.
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

    /// Whether it is running.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Kills it by SIGKILL, like a crash.
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

/// Waits for a process; kills it at the timeout.
///
/// # Errors
/// When it was killed.
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

/// Parses the images of the last line, which reports completion.
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
