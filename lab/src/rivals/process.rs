//! Processes with a deadline, killed together with their descendants.
//!
//! They stay in the lab's process group, so that whatever ends the lab ends them: Ctrl-C in a terminal, or the case
//! runner.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::shell;

/// Polling interval.
const EVERY: Duration = Duration::from_millis(2);
/// How much of a failed program's output is read.
const SAID_BYTES: u64 = 16 << 10;
/// Timeout for a daemon to listen.
const READY: Duration = Duration::from_secs(20);

/// A deadline, and the duration from its start.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    /// A deadline from now.
    pub fn after(after: Duration) -> Self {
        Self {
            at: Instant::now() + after,
            after,
        }
    }

    /// So many times as far away as it was at first.
    pub fn times(self, n: u32) -> Self {
        let more = self.after * n.saturating_sub(1);
        Self {
            at: self.at + more,
            after: self.after + more,
        }
    }
}

/// A running process; killed with its descendants when dropped.
pub struct Running {
    what: String,
    child: Child,
    said: PathBuf,
    ended: bool,
}

impl Running {
    /// Starts a program without stdin; its output goes to the file `said`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(what: &str, command: &mut Command, said: &Path) -> Result<Self> {
        let log = File::create(said).with_context(|| format!("cannot make {}", said.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {what}"))?;
        Ok(Self {
            what: what.to_owned(),
            child,
            said: said.to_owned(),
            ended: false,
        })
    }

    /// Waits for it to exit; kills it at the deadline.
    ///
    /// # Errors
    /// When it is killed or its exit code is not 0; includes its output.
    pub fn finish(mut self, deadline: Deadline) -> Result<()> {
        loop {
            if let Some(status) = self.status()? {
                if status.success() {
                    return Ok(());
                }
                bail!("{}: {status}: {}", self.what, self.words());
            }
            if Instant::now() > deadline.at {
                let after = deadline.after.as_secs_f64();
                let words = self.words();
                bail!(
                    "{}: killed, not done after {after:.0} s: {words}",
                    self.what
                );
            }
            std::thread::sleep(EVERY);
        }
    }

    /// Waits until it listens on a TCP port, without connecting to it.
    ///
    /// # Errors
    /// When it exits or does not listen in time.
    pub fn listens(&mut self, port: u16) -> Result<()> {
        let deadline = Instant::now() + READY;
        while Instant::now() < deadline {
            if let Some(status) = self.status()? {
                bail!("{}: {status}: {}", self.what, self.words());
            }
            // In its own network namespace, which it enters before it execs the program.
            if ["tcp", "tcp6"].iter().any(|table| {
                let path = format!("/proc/{}/net/{table}", self.child.id());
                is_listening(&fs::read_to_string(path).unwrap_or_default(), port)
            }) {
                return Ok(());
            }
            std::thread::sleep(EVERY);
        }
        bail!("{}: does not listen: {}", self.what, self.words())
    }

    /// The last lines of its output, on one line.
    pub fn words(&self) -> String {
        match tail(&self.said) {
            Ok(words) if !words.is_empty() => words,
            _ => "it said nothing".to_owned(),
        }
    }

    fn status(&mut self) -> Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        self.ended = status.is_some();
        Ok(status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            kill_tree(Pid::from_child(&self.child));
            let _ = self.child.wait();
        }
    }
}

fn tail(said: &Path) -> Result<String> {
    let mut file = File::open(said)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(SAID_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(SAID_BYTES).read_to_end(&mut bytes)?;
    Ok(shell::tail(&bytes))
}

/// Kills a process and its descendants. All are stopped first, so that none forks meanwhile.
fn kill_tree(root: Pid) {
    let mut tree = Vec::new();
    loop {
        let new: Vec<Pid> = with_descendants(root)
            .into_iter()
            .filter(|pid| !tree.contains(pid))
            .collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            let _ = kill_process(pid, Signal::STOP);
            tree.push(pid);
        }
    }
    for pid in tree {
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn with_descendants(root: Pid) -> Vec<Pid> {
    let processes = shell::processes();
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        let children = processes.iter().filter(|p| p.parent == Some(parent));
        tree.extend(children.map(|p| p.pid));
        next += 1;
    }
    tree
}

/// Whether a table in the format of `/proc/net/tcp` has a socket that listens on `port`.
fn is_listening(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let local = fields.next().and_then(|local| local.rsplit_once(':'));
        local.is_some_and(|(_, hex)| u16::from_str_radix(hex, 16) == Ok(port))
            && fields.nth(1) == Some(LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(dir: &Path, script: &str) -> Running {
        let mut command = Command::new("sh");
        Running::start("a script", command.args(["-c", script]), &dir.join("said")).unwrap()
    }

    fn deadline(ms: u64) -> Deadline {
        Deadline::after(Duration::from_millis(ms))
    }

    #[test]
    fn a_program_that_fails_says_why_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let error = sh(dir.path(), "echo one; echo two >&2; exit 3")
            .finish(deadline(5000))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "a script: exit status: 3: one | two");
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let started = Instant::now();
        let script = "sleep 600 & echo $!; setsid sleep 600 & echo $!; wait";
        let error = sh(dir.path(), script).finish(deadline(300)).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5));
        assert!(error.to_string().contains("killed, not done"), "{error}");
        let said = fs::read_to_string(dir.path().join("said")).unwrap();
        let pids: Vec<u32> = said.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(pids.len(), 2);
        // A killed orphan remains a zombie until its new parent reaps it.
        let deadline = Instant::now() + Duration::from_secs(2);
        let alive = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
        };
        while pids.iter().any(alive) {
            assert!(Instant::now() < deadline, "{pids:?} still run");
            std::thread::sleep(EVERY);
        }
    }

    #[test]
    fn a_listening_port_is_seen_in_the_table() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let table = || fs::read_to_string("/proc/self/net/tcp").unwrap();
        assert!(is_listening(&table(), port));
        drop(listener);
        // Another test may have got the port at once.
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_listening(&table(), port) {
            assert!(Instant::now() < deadline, "{port} is still in the table");
            std::thread::sleep(EVERY);
        }
    }
}
