//! Asking before something is destroyed.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Result, bail};

use crate::failure::usage;

/// Returns when the user agrees: by `--yes`, or by answering.
///
/// # Errors
/// When they do not, or there is nobody to ask.
pub fn confirm(question: &str, yes: bool) -> Result<()> {
    if yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(usage("there is no terminal to ask on; say --yes"));
    }
    let mut stderr = io::stderr().lock();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    drop(stderr);
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => bail!("not done"),
    }
}
