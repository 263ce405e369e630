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
/// A passphrase with fewer characters is short.
const SHORT: usize = 8;

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

/// Reads a secret from stdin: one line, without the spaces around it. At a terminal it is asked for, and not shown.
///
/// # Errors
/// When stdin cannot be read, or is empty.
pub fn secret(what: &str) -> Result<String> {
    given(what, hidden_line(what)?.trim())
}

/// Reads a passphrase, as [`secret`], but with the spaces around it: a key file has them too.
///
/// # Errors
/// As [`secret`].
pub fn passphrase(what: &str) -> Result<String> {
    given(what, without_end(&hidden_line(what)?))
}

/// Reads a new passphrase; at a terminal, twice.
///
/// # Errors
/// As [`passphrase`]; when it is not repeated.
pub fn new_passphrase() -> Result<String> {
    let first = passphrase("new passphrase")?;
    if first.chars().count() < SHORT {
        out::note(&format!(
            "drover: the passphrase is shorter than {SHORT} characters: who has a copy of the vault can find it by trying"
        ));
    }
    if io::stdin().is_terminal() {
        match without_end(&hidden_line("the same passphrase again")?) {
            "" => {
                return Err(usage(
                    "the passphrase was not repeated; nothing was changed",
                ));
            }
            again if again != first => {
                return Err(usage("the passphrases differ; nothing was changed"));
            }
            _ => {}
        }
    }
    Ok(first)
}

fn without_end(line: &str) -> &str {
    line.trim_end_matches(['\n', '\r'])
}

fn given(what: &str, secret: &str) -> Result<String> {
    match (secret, io::stdin().is_terminal()) {
        ("", true) => Err(usage(format!("the {what} is empty"))),
        ("", false) => Err(usage(format!(
            "no {what} on stdin: run the command at a terminal, or redirect stdin"
        ))),
        (secret, _) => Ok(secret.to_owned()),
    }
}

/// Reads one line from stdin, with its end. At a terminal it is asked for, and not shown.
fn hidden_line(what: &str) -> Result<String> {
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
    if line.ends_with(CTRL_C) {
        // Nothing has ended the line of the prompt.
        out::note("");
        bail!("cancelled")
    }
    Ok(line)
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
