//! Starts the mount daemon and waits for its readiness message.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::record::Place;
use crate::error::{Context, Error, Kind, Result, bail};
use crate::home::Home;
use crate::notice::notice;

/// What the daemon writes to stdout, one line each: how far it is, perhaps, and then that the mount is up, or that it failed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ready {
    /// It waits until enough of its disks is here: bytes that are, and that have to be.
    Waiting(u64, u64),
    /// Something that the user should know while it waits.
    Note(String),
    /// The mount is up; its paths or addresses, one per line, and what the user should know.
    There(Vec<String>, Vec<String>),
    /// It failed, with the exit code and message.
    Failed(u8, String),
}

/// Starts `drover mount-daemon` for a recorded mount and waits until the mount is up.
///
/// # Errors
/// The daemon's error, or when it exits without a message.
pub fn start(
    home: &Home,
    place: &Place,
    verbose: u8,
    waiting: impl Fn(u64, u64),
) -> Result<Vec<String>> {
    let log = File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(place.log())
        .with_context(|| format!("cannot open {}", place.log().display()))?;
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut command = Command::new(program);
    command.arg("--home").arg(home.dir());
    for _ in 0..verbose {
        command.arg("-v");
    }
    command
        .arg("mount-daemon")
        .arg(place.name())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    let mut child = command.spawn().context("cannot start the mount daemon")?;
    let stdout = child
        .stdout
        .take()
        .context("the mount daemon has no stdout")?;
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = String::new();
        stdout
            .read_line(&mut line)
            .context("cannot read from the mount daemon")?;
        if line.is_empty() {
            let status = child.wait().context("cannot wait for the mount daemon")?;
            bail!(
                "the mount daemon exited ({status}); see its log {}",
                place.log().display()
            );
        }
        match serde_json::from_str(&line).context("the mount daemon sent an invalid message")? {
            Ready::Waiting(local, wanted) => waiting(local, wanted),
            Ready::Note(text) => notice(&text),
            Ready::There(lines, notes) => {
                notes.iter().for_each(|note| notice(note));
                // A site that has started it lives on, and is told of its end.
                std::thread::spawn(move || child.wait());
                return Ok(lines);
            }
            Ready::Failed(code, message) => {
                // It exits by itself: wait, so that nothing of it is left when the failure is reported.
                let _ = child.wait();
                return Err(Error::of_kind(Kind::of_code(code), message));
            }
        }
    }
}
