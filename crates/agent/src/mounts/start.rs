//! Starting the mount daemon, and hearing from it that the mount is there.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::record::Place;
use crate::error::{Context, Error, Kind, Result, bail};
use crate::home::Home;

/// What the process says once, on its stdout, when the mount is there or will not be.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ready {
    /// It is there; what a person wants to see of it, one line each.
    There(Vec<String>),
    /// It will not be, with the exit code.
    Failed(u8, String),
}

/// Starts `drover mount-daemon` for a mount that is written down, and waits until it is there.
///
/// # Errors
/// What the process could not do; that it ended without a word.
pub fn start(home: &Home, place: &Place, verbose: u8) -> Result<Vec<String>> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(place.log())
        .with_context(|| format!("cannot open {}", place.log().display()))?;
    let program = std::env::current_exe().context("cannot find the program itself")?;
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
    let said = child.stdout.take().context("the process has no stdout")?;
    let mut line = String::new();
    BufReader::new(said)
        .read_line(&mut line)
        .context("cannot hear the mount daemon")?;
    if line.is_empty() {
        let status = child.wait().context("cannot wait for it")?;
        bail!(
            "the mount daemon exited ({status}); see its log {}",
            place.log().display()
        );
    }
    match serde_json::from_str(&line).context("the mount daemon made no sense")? {
        Ready::There(lines) => Ok(lines),
        Ready::Failed(code, message) => {
            // It ends by itself: nothing of it is to be left when we say that it failed.
            let _ = child.wait();
            Err(Error::of_kind(Kind::of_code(code), message))
        }
    }
}
