//! The machine that migrates: the small guest of drover's tests, which writes numbered records, under a QEMU of the lab.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use drover_hypervisor::testing::{Guest, Launch};
use serde_json::json;

use super::super::qmp::Qmp;
use crate::shell;

/// The two ends.
pub const NAMES: [&str; 2] = ["near", "far"];
/// The program.
pub const QEMU: &str = "qemu-system-x86_64";
/// Timeout for what the guest says: verifying reads every record.
const PATIENCE: Duration = Duration::from_secs(120);
/// Polling interval of the console.
const LOOK: Duration = Duration::from_millis(5);

/// A disk of the machine, whose block node is `disk0`, `disk1` and so on.
pub enum Disk {
    /// A raw file.
    File(PathBuf),
    /// One that two machines have open, as on shared storage.
    Shared(PathBuf),
    /// An empty one of so many bytes, for drover to replace.
    Empty(u64),
}

impl Disk {
    fn nodes(&self, number: usize) -> [String; 2] {
        let file = format!("file{number}");
        let below = match self {
            Self::File(path) => json!({"driver": "file", "node-name": file, "filename": path}),
            Self::Shared(path) => {
                json!({"driver": "file", "node-name": file, "filename": path, "locking": "off"})
            }
            Self::Empty(size) => {
                json!({"driver": "null-co", "node-name": file, "size": size, "read-zeroes": true})
            }
        };
        let raw = json!({"driver": "raw", "node-name": format!("disk{number}"), "file": file});
        [below, raw].map(|node| node.to_string())
    }
}

/// How the machine starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// It boots.
    Boot,
    /// It waits for a migration, after which it is paused.
    Wait,
    /// It waits for a migration, after which it runs.
    WaitAndRun,
}

/// A line of the guest: record `number` is durable.
#[derive(Clone, Copy, Debug)]
pub struct Beat {
    /// When it arrived here.
    pub at: Instant,
    /// Its number.
    pub number: u64,
}

/// A QEMU; killed when dropped.
pub struct Machine {
    child: Child,
    console: ChildStdin,
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
    said: PathBuf,
    /// The lab's own connection.
    pub qmp: Qmp,
}

impl Machine {
    /// Starts it with `command`, which runs QEMU at one end. Its control socket for drover is `DIR/web.qmp`. The guest makes
    /// a record every 10 ms and with each changes `dirty_mib` of its memory, of `memory_mib`.
    pub fn start(
        mut command: Command,
        dir: &Path,
        guest: &Guest,
        (memory_mib, dirty_mib): (u32, u32),
        disks: &[Disk],
        start: Start,
    ) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let mut launch = Launch::with_memory(memory_mib).guest(guest, 10, dirty_mib);
        for number in 0..disks.len() {
            launch = launch.disk(&format!("vd{number}"), &format!("disk{number}"));
        }
        launch = match start {
            Start::Boot => launch,
            Start::Wait => launch.incoming(),
            Start::WaitAndRun => launch.with("-incoming defer"),
        };
        for (number, disk) in disks.iter().enumerate() {
            for node in disk.nodes(number) {
                command.arg("-blockdev").arg(node);
            }
        }
        let sockets = ["web.qmp", "lab.qmp"].map(|name| dir.join(name));
        for socket in &sockets {
            let _ = fs::remove_file(socket);
            let socket = format!("unix:{},server=on,wait=off", socket.display());
            command.arg("-qmp").arg(socket);
        }
        let said = dir.join("qemu.log");
        let mut child = command
            .args(launch.arguments())
            .args(["-name", "web"])
            .args(["-chardev", "stdio,id=console,signal=off"])
            .args(["-serial", "chardev:console"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&said)?)
            .spawn()
            .context("cannot start QEMU")?;
        let lines = read_along(child.stdout.take().context("no console")?);
        let console = child.stdin.take().context("no console")?;
        match Qmp::connect(&sockets[1], &mut child) {
            Ok(qmp) => Ok(Self {
                child,
                console,
                lines,
                said,
                qmp,
            }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                let said = fs::read(&said).unwrap_or_default();
                Err(e.context(shell::tail(&said)))
            }
        }
    }

    /// The records of which the guest has said here that they are durable. Of a line that began elsewhere there is only the end:
    /// it does not count.
    pub fn beats(&self) -> Result<Vec<Beat>> {
        let lines = self.said("beat")?.into_iter();
        Ok(lines.map(|(at, number)| Beat { at, number }).collect())
    }

    /// The last record that is durable.
    pub fn last(&self) -> Result<Beat> {
        self.beats()?.last().copied().context("no record yet")
    }

    /// Waits until there is a record of this number.
    pub fn wait_beat(&mut self, number: u64) -> Result<()> {
        self.wait("beat", |said| said.iter().any(|(_, n)| *n >= number))
    }

    /// Has the guest compare all its records with the disk.
    pub fn verify(&mut self) -> Result<()> {
        let last = self.last()?.number;
        self.console.write_all(b"v\n")?;
        self.console.flush()?;
        self.wait("verified", |said| said.iter().any(|(_, n)| *n >= last))
    }

    /// Has the guest use the files of its second disk in a way; how many bytes it wrote.
    pub fn edit(&mut self, kind: char) -> Result<u64> {
        let before = self.said("edited")?.len();
        writeln!(self.console, "e{kind}")?;
        self.console.flush()?;
        self.wait("edited", |said| said.len() > before)?;
        let said = self.said("edited")?;
        Ok(said.last().context("nothing edited")?.1)
    }

    /// Waits until QEMU has ended.
    pub fn ended(&mut self) -> Result<()> {
        crate::site::end_within(&mut self.child, PATIENCE).map(drop)
    }

    /// The numbers that the guest has said after `word`, and when.
    fn said(&self, word: &str) -> Result<Vec<(Instant, u64)>> {
        let lines = self
            .lines
            .lock()
            .ok()
            .context("the console's thread died")?;
        if let Some((_, bad)) = lines.iter().find(|(_, line)| line.contains("BAD")) {
            bail!("{bad}");
        }
        let prefix = format!("guest: {word} ");
        let number = |(at, line): &(Instant, String)| {
            Some((*at, line.strip_prefix(&prefix)?.trim().parse().ok()?))
        };
        Ok(lines.iter().filter_map(number).collect())
    }

    fn wait(&mut self, word: &str, enough: impl Fn(&[(Instant, u64)]) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !enough(&self.said(word)?) {
            if Instant::now() > deadline || self.child.try_wait()?.is_some() {
                let said = fs::read(&self.said).unwrap_or_default();
                bail!("the guest says no {word}: {}", shell::tail(&said));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads continuously, so that each line has the time at which it arrived.
fn read_along(from: impl Read + Send + 'static) -> Arc<Mutex<Vec<(Instant, String)>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let read = lines.clone();
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        // A line that QEMU's end has torn is not one.
        while from.read_until(b'\n', &mut line).is_ok() && line.ends_with(b"\n") {
            let text = String::from_utf8_lossy(&line).trim().to_owned();
            if let Ok(mut lines) = read.lock() {
                lines.push((Instant::now(), text));
            }
            line.clear();
        }
    });
    lines
}
