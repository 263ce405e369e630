//! Prompts: confirmation, and secrets from stdin.

use std::io::{self, BufRead, ErrorKind, IsTerminal, Read, Stdin, Write};

use anyhow::{Context, Result, bail};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};

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
    let line = read_line(stdin.lock().take(MAX_SECRET));
    let line = line.with_context(|| format!("cannot read the {what} from stdin"))?;
    drop(silent);
    match line.trim() {
        line if line.ends_with(CTRL_C) => {
            // Nothing has ended the line of the prompt.
            out::note("");
            bail!("cancelled")
        }
        "" => Err(usage(format!(
            "no {what} on stdin: run the command at a terminal, or redirect stdin"
        ))),
        secret => Ok(secret.to_owned()),
    }
}

/// Ctrl-C, as a terminal passes it on that makes no signal of it.
const CTRL_C: char = '\x03';

/// Reads up to the end of a line, or Ctrl-C.
fn read_line(from: impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    for byte in from.bytes() {
        let byte = byte?;
        line.push(byte);
        if byte == b'\n' || char::from(byte) == CTRL_C {
            break;
        }
    }
    String::from_utf8(line).map_err(|e| io::Error::new(ErrorKind::InvalidData, e))
}

/// A terminal that does not echo; dropped, it does as before. Ctrl-C ends the line instead of the process, which would leave
/// the terminal silent.
struct Silent<'a> {
    terminal: &'a Stdin,
    before: Termios,
}

impl Silent<'_> {
    fn start(terminal: &Stdin) -> io::Result<Silent<'_>> {
        let before = tcgetattr(terminal)?;
        let mut modes = before.clone();
        modes
            .local_modes
            .remove(LocalModes::ECHO | LocalModes::ISIG);
        modes.local_modes.insert(LocalModes::ECHONL);
        modes.special_codes[SpecialCodeIndex::VEOL] = CTRL_C as u8;
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
