//! Runs other programs, with errors that include their output, and lists those that run.

use std::fs;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::Pid;

/// Runs a program and returns its output.
///
/// # Errors
/// When it cannot be started or its exit code is not 0; includes the last lines of its stderr.
pub fn run(command: &mut Command) -> Result<Output> {
    let shown = show(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        bail!("{shown}: {}: {}", output.status, tail(&output.stderr));
    }
    Ok(output)
}

/// Whether a program is found in `PATH`.
pub fn have(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// The last lines of a program's output, on one line.
pub fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(4)..].join(" | ")
}

/// A running process.
pub struct Process {
    pub pid: Pid,
    pub parent: Option<Pid>,
    pub group: Pid,
}

/// All running processes. Zombies count as ended.
pub fn processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let process = |entry: fs::DirEntry| {
        let number = |text: &str| Some(Pid::from_raw(text.parse().ok()?));
        let pid = number(entry.file_name().to_str()?)??;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name in brackets may contain anything; after it come state, parent, group.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let runs = fields.next()? != "Z";
        let parent = number(fields.next()?)?;
        let group = number(fields.next()?)??;
        runs.then_some(Process { pid, parent, group })
    };
    entries.filter_map(process).collect()
}

/// Characters of an argument that are shown: some are scripts.
const SHOWN: usize = 200;

/// A command as it would be typed.
pub fn show(command: &Command) -> String {
    let mut shown = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        shown.push(' ');
        let arg = arg.to_string_lossy();
        match arg
            .char_indices()
            .nth(SHOWN)
            .map_or(arg.len(), |(at, _)| at)
        {
            all if all == arg.len() && !arg.trim().contains('\n') => shown.push_str(&arg),
            _ => shown.push_str("SCRIPT"),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_says_why() {
        let error =
            run(Command::new("sh").args(["-c", "echo lost the key >&2; exit 3"])).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("lost the key") && text.contains('3'),
            "{text}"
        );
    }

    #[test]
    fn programs_are_found_in_path() {
        assert!(have("sh"));
        assert!(!have("no-such-program-here"));
    }
}
