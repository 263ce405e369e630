//! Prompts: confirmation, and secrets from stdin.

use std::io::{self, BufRead, IsTerminal, Read, Stdin, Write};

use anyhow::{Context, Result, bail};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::failure::usage;
use crate::out;

/// Maximum length of a secret, in bytes.
const MAX_SECRET: u64 = 64 << 10;

/// Returns if the user confirms, by `--yes` or at the prompt.
///
/// # Errors
/// When they do not, or stdin is not a terminal.
pub fn confirm(question: &str, yes: bool) -> Result<()> {
    if yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(usage(
            "cannot ask for confirmation: stdin is not a terminal; use --yes to confirm",
        ));
    }
    let mut stderr = io::stderr().lock();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    drop(stderr);
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => bail!("cancelled"),
    }
}

/// Reads a secret from stdin: one line. At a terminal it is asked for, and not shown.
///
/// # Errors
/// When stdin cannot be read, or is empty.
pub fn secret(what: &str) -> Result<String> {
    let stdin = io::stdin();
    let silent = match stdin.is_terminal() {
        true => Some(Silent::start(&stdin).context("cannot prepare the terminal")?),
        false => None,
    };
    if silent.is_some() {
        let mut stderr = io::stderr().lock();
        write!(stderr, "{what} (not shown): ")?;
        stderr.flush()?;
    }
    let mut line = String::new();
    stdin
        .lock()
        .take(MAX_SECRET)
        .read_line(&mut line)
        .with_context(|| format!("cannot read the {what} from stdin"))?;
    match line.trim() {
        "" => Err(usage(format!(
            "no {what} on stdin: run the command at a terminal, or redirect stdin"
        ))),
        secret => Ok(secret.to_owned()),
    }
}

/// A terminal that does not echo; dropped, it does as before.
struct Silent<'a> {
    terminal: &'a Stdin,
    before: Termios,
}

impl Silent<'_> {
    fn start(terminal: &Stdin) -> io::Result<Silent<'_>> {
        let before = tcgetattr(terminal)?;
        let mut modes = before.clone();
        modes.local_modes.remove(LocalModes::ECHO);
        modes.local_modes.insert(LocalModes::ECHONL);
        tcsetattr(terminal, OptionalActions::Flush, &modes)?;
        Ok(Silent { terminal, before })
    }
}

impl Drop for Silent<'_> {
    fn drop(&mut self) {
        if let Err(e) = tcsetattr(self.terminal, OptionalActions::Now, &self.before) {
            out::note(&format!("drover: cannot restore the terminal: {e}"));
        }
    }
}
