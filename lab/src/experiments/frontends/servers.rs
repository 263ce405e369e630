//! Everybody who has a disk in memory: drover's front ends, nbdkit, and tmpfs.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::shell;

/// How long one may take until it serves, and until it has ended.
const READY: Duration = Duration::from_secs(20);
const END: Duration = Duration::from_secs(10);

/// Where files are memory.
const TMPFS: &str = "/dev/shm";

/// Who has the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A file on tmpfs.
    Tmpfs,
    /// `nbdkit memory`.
    Nbdkit,
    /// Drover's NBD server.
    Nbd,
    /// Drover's FUSE file.
    Fuse,
    /// A loop device on drover's FUSE file.
    Loop,
}

impl By {
    /// In the order in which they are measured.
    pub const ALL: [By; 5] = [By::Tmpfs, By::Nbdkit, By::Nbd, By::Fuse, By::Loop];

    /// In a row.
    pub fn name(self) -> &'static str {
        match self {
            By::Tmpfs => "a file on tmpfs",
            By::Nbdkit => "nbdkit memory",
            By::Nbd => "drover, NBD",
            By::Fuse => "drover, FUSE",
            By::Loop => "drover, loop on FUSE",
        }
    }

    /// For a file's name.
    pub fn slug(self) -> &'static str {
        match self {
            By::Tmpfs => "tmpfs",
            By::Nbdkit => "nbdkit",
            By::Nbd => "nbd",
            By::Fuse => "fuse",
            By::Loop => "loop",
        }
    }

    /// The example that serves it.
    pub fn example(self) -> Option<&'static str> {
        match self {
            By::Nbd => Some("nbd_memory"),
            By::Fuse | By::Loop => Some("fuse_memory"),
            By::Tmpfs | By::Nbdkit => None,
        }
    }

    /// What this machine lacks for it.
    pub fn missing(self) -> Option<String> {
        let lacks = |path: &str| {
            (!Path::new(path).exists()).then(|| format!("there is no {path} on this machine"))
        };
        match self {
            By::Nbdkit => (!shell::have("nbdkit")).then(|| "nbdkit is not installed".to_owned()),
            By::Tmpfs => lacks(TMPFS),
            By::Nbd => None,
            By::Fuse => lacks("/dev/fuse"),
            By::Loop => lacks("/dev/fuse").or_else(|| lacks("/dev/loop-control")),
        }
    }
}

/// One that serves until it is dropped.
pub struct Server {
    by: By,
    child: Option<Child>,
    dir: PathBuf,
    /// The file or device, or the socket.
    at: PathBuf,
}

impl Server {
    /// Starts it in `dir`, with a disk of so many MiB.
    ///
    /// # Errors
    /// When it does not serve in time; what it said is in the error.
    pub fn start(by: By, program: Option<&Path>, dir: &Path, mib: u32) -> Result<Self> {
        let mut server = Self {
            by,
            child: None,
            dir: dir.to_owned(),
            at: dir.join("disk.sock"),
        };
        let size = format!("{mib}M");
        if by == By::Tmpfs {
            server.at = Path::new(TMPFS).join(format!("drover-lab-{}", std::process::id()));
            std::fs::File::create(&server.at)?.set_len(u64::from(mib) << 20)?;
            return Ok(server);
        }
        let mut command = Command::new(program.unwrap_or(Path::new("nbdkit")));
        let lines = match by {
            By::Nbd => {
                command
                    .arg(format!("unix:{}", server.at.display()))
                    .arg(&size);
                1
            }
            By::Fuse | By::Loop => {
                let at = dir.join("disk");
                std::fs::create_dir_all(&at)?;
                command.arg(&size).arg(&at);
                if by == By::Loop {
                    command.arg("--device");
                }
                if by == By::Loop { 2 } else { 1 }
            }
            By::Nbdkit | By::Tmpfs => {
                command
                    .args(["--foreground", "--exit-with-parent"])
                    .arg(format!("--unix={}", server.at.display()))
                    .args(["memory", &size]);
                0
            }
        };
        let said = dir.join("said.log");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&said)?)
            .spawn()
            .with_context(|| by.name())?;
        let stdout = child.stdout.take().context("no stdout")?;
        server.child = Some(child);
        let (send, printed) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let last_words = || shell::tail(&std::fs::read(&said).unwrap_or_default());
        for _ in 0..lines {
            let Ok(line) = printed.recv_timeout(READY) else {
                bail!("{} does not serve: {}", by.name(), last_words());
            };
            if matches!(by, By::Fuse | By::Loop) {
                server.at = PathBuf::from(line.trim());
            }
        }
        let began = Instant::now();
        while !server.at.exists() {
            if began.elapsed() > READY {
                bail!("{} does not serve: {}", by.name(), last_words());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// Who it is.
    pub fn by(&self) -> By {
        self.by
    }

    /// A directory for what is left behind beside it.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// How fio gets at it.
    pub fn fio_args(&self) -> Vec<String> {
        let at = self.at.display();
        match self.by {
            By::Nbd | By::Nbdkit => vec![
                "--ioengine=nbd".to_owned(),
                format!("--uri=nbd+unix:///?socket={at}"),
            ],
            By::Tmpfs => vec!["--ioengine=libaio".to_owned(), format!("--filename={at}")],
            By::Fuse | By::Loop => vec![
                "--ioengine=libaio".to_owned(),
                "--direct=1".to_owned(),
                format!("--filename={at}"),
            ],
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.by == By::Tmpfs {
            let _ = std::fs::remove_file(&self.at);
        }
        let Some(child) = &mut self.child else {
            return;
        };
        // The examples unmount at the end of their input; nbdkit wants a signal.
        drop(child.stdin.take());
        let pid = i32::try_from(child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid.filter(|_| self.by == By::Nbdkit) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let began = Instant::now();
        while began.elapsed() < END {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        eprintln!("{} did not end by itself", self.by.name());
        let _ = child.kill();
        let _ = child.wait();
    }
}
