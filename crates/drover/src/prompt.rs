//! Confirmation prompts.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Result, bail};

use crate::failure::usage;

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
