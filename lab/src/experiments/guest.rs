//! A virtual machine without KVM whose disk is an NBD export: its kernel, console, and shutdown.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::qmp::Qmp;
use crate::shell;
use crate::site::end_within;

/// How much of the end of the console output is kept for diagnosis.
const KEEP: usize = 4 << 10;
/// The prompt of a getty.
const PROMPT: &[u8] = b"login: ";

/// Programs needed to boot.
pub const PROGRAMS: &[&str] = &["qemu-system-x86_64", "debugfs", "e2fsck", "nbdcopy"];

/// A kernel and its initial RAM disk, which QEMU loads instead of a boot loader.
pub struct Kernel {
    kernel: PathBuf,
    initrd: PathBuf,
}

impl Kernel {
    /// Extracts them from an image with an ext4 file system, by the links in its root; the image is only read.
    pub fn of(image: &Path, dir: &Path) -> Result<Self> {
        let kernel = take_out(image, "vmlinuz", dir)?;
        let initrd = take_out(image, "initrd.img", dir)?;
        Ok(Self { kernel, initrd })
    }
}

fn take_out(image: &Path, link: &str, dir: &Path) -> Result<PathBuf> {
    let debugfs =
        |request: String| shell::run(Command::new("debugfs").arg("-R").arg(request).arg(image));
    // debugfs does not follow links by itself.
    let said = debugfs(format!("stat /{link}"))?.stdout;
    let name = destination(&String::from_utf8_lossy(&said))
        .with_context(|| format!("{} has no link /{link}", image.display()))?;
    let to = dir.join(link);
    debugfs(format!("dump /{name} {}", to.display()))?;
    match std::fs::metadata(&to) {
        Ok(meta) if meta.len() > 0 => Ok(to),
        _ => bail!("{} has no /{name}", image.display()),
    }
}

/// The target of a link in debugfs's output.
fn destination(stat: &str) -> Option<String> {
    let (_, after) = stat.split_once("link dest: \"")?;
    let name = after.split_once('"')?.0.trim_start_matches('/');
    (!name.is_empty()).then(|| name.to_owned())
}

/// The disk I/O of a guest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk {
    /// Number of read requests.
    pub reads: f64,
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
}

/// A running machine; killed when dropped.
pub struct Guest {
    child: Child,
    console: Receiver<Vec<u8>>,
    heard: Vec<u8>,
    control: Qmp,
}

impl Guest {
    /// Starts a machine with the export `name` at `socket` as its disk; `dir` holds its control socket.
    pub fn start(kernel: &Kernel, socket: &Path, name: &str, dir: &Path) -> Result<Self> {
        let control = dir.join("qmp.sock");
        let _ = std::fs::remove_file(&control);
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg,thread=multi", "-smp", "2", "-m", "1024"])
            .args(["-display", "none", "-serial", "stdio", "-monitor", "none"])
            // Ctrl-Alt-Delete requests a reboot.
            .arg("-no-reboot")
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", control.display()))
            .arg("-kernel")
            .arg(&kernel.kernel)
            .arg("-initrd")
            .arg(&kernel.initrd)
            .args(["-append", "root=/dev/vda console=ttyS0"])
            .arg("-drive")
            .arg(format!(
                "file=nbd:unix:{}:exportname={name},if=virtio,format=raw",
                socket.display()
            ))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(dir.join("qemu.log"))?)
            .spawn()
            .context("qemu-system-x86_64")?;
        let console = read_along(child.stdout.take().context("no console")?);
        match Qmp::connect(&control, &mut child) {
            Ok(control) => Ok(Self {
                child,
                console,
                heard: Vec::new(),
                control,
            }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                let said = std::fs::read(dir.join("qemu.log")).unwrap_or_default();
                Err(e.context(shell::tail(&said)))
            }
        }
    }

    /// Waits for the login prompt.
    pub fn login(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.console.recv_timeout(left) {
                Ok(piece) => self.heard.extend(piece),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("no login within {} s: {}", patience.as_secs(), self.tail())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("it ended before its login: {}", self.tail())
                }
            }
            if self.heard.windows(PROMPT.len()).any(|w| w == PROMPT) {
                return Ok(());
            }
            let surplus = self.heard.len().saturating_sub(KEEP);
            self.heard.drain(..surplus);
        }
    }

    /// Its disk I/O so far.
    pub fn disk(&mut self) -> Result<Disk> {
        let answer = self.control.ask("query-blockstats", json!({}))?;
        let devices = answer.as_array().context("no list of disks")?;
        let ours = devices
            .iter()
            .map(|d| &d["stats"])
            .max_by_key(|s| s["rd_bytes"].as_u64())
            .context("no disk")?;
        let figure = |key: &str| ours[key].as_f64().with_context(|| format!("no {key}"));
        Ok(Disk {
            reads: figure("rd_operations")?,
            read: figure("rd_bytes")?,
            written: figure("wr_bytes")?,
        })
    }

    /// Presses Ctrl-Alt-Delete, which makes init shut down cleanly, and waits until QEMU exits.
    pub fn shut_down(mut self, patience: Duration) -> Result<()> {
        let keys = ["ctrl", "alt", "delete"].map(|key| json!({"type": "qcode", "data": key}));
        self.control.ask("send-key", json!({"keys": keys}))?;
        let status = end_within(&mut self.child, patience);
        self.heard.extend(self.console.try_iter().flatten());
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => bail!("QEMU: {status}: {}", self.tail()),
            Err(e) => Err(e.context(format!("it did not shut down: {}", self.tail()))),
        }
    }

    fn tail(&self) -> String {
        shell::tail(&self.heard)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads continuously, so that the machine never blocks on its console.
fn read_along(mut from: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut piece) {
            if send.send(piece[..n].to_vec()).is_err() {
                return;
            }
        }
    });
    receive
}
