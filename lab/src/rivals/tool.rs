//! Detection of the rivals' programs on this machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use super::process::{Deadline, Running};
use crate::shell;

/// Timeout of a version query.
const ANSWER: Duration = Duration::from_secs(20);

/// Cached output of programs, by their arguments: experiments query often, and some programs are slow.
static SAID: Mutex<BTreeMap<String, Result<String, String>>> = Mutex::new(BTreeMap::new());

/// The first word in the output of `program args` that looks like a version.
///
/// # Errors
/// Why it cannot be used.
pub fn version(program: &str, args: &[&str]) -> Result<String, String> {
    let said = ask(program, args)?;
    version_in(&said).ok_or_else(|| format!("{program} {} prints no version", args.join(" ")))
}

/// The output of `program args`.
///
/// # Errors
/// Why it cannot be used.
pub fn ask(program: &str, args: &[&str]) -> Result<String, String> {
    needs(&[program])?;
    let key = format!("{program} {}", args.join(" "));
    if let Some(said) = SAID.lock().ok().and_then(|said| said.get(&key).cloned()) {
        return said;
    }
    let answer = ask_now(&key, program, args);
    if let Ok(mut said) = SAID.lock() {
        said.insert(key, answer.clone());
    }
    answer
}

fn ask_now(what: &str, program: &str, args: &[&str]) -> Result<String, String> {
    let said = std::env::temp_dir().join(format!(
        "drover-lab-{}-{}.said",
        std::process::id(),
        fastrand::u64(..)
    ));
    let answer = Running::start(what, Command::new(program).args(args), &said)
        .and_then(|running| running.finish(Deadline::after(ANSWER)))
        .and_then(|()| Ok(std::fs::read(&said)?))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|error| format!("{error:#}"));
    let _ = std::fs::remove_file(&said);
    answer
}

/// Checks that all these programs are installed.
///
/// # Errors
/// The first missing one.
pub fn needs(programs: &[&str]) -> Result<(), String> {
    match programs.iter().find(|program| !shell::have(program)) {
        Some(missing) if Path::new(missing).is_absolute() => Err(format!("there is no {missing}")),
        Some(missing) => Err(format!("{missing} is not installed")),
        None => Ok(()),
    }
}

fn version_in(said: &str) -> Option<String> {
    said.split_whitespace()
        .map(|word| word.trim_end_matches([',', ')', ';']))
        .find(|word| {
            let digits = word.strip_prefix('v').unwrap_or(word);
            digits.starts_with(|c: char| c.is_ascii_digit())
        })
        .map(|word| word.strip_prefix('v').unwrap_or(word).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_tools_say() {
        let of = |said| version_in(said).unwrap_or_default();
        assert_eq!(
            of("*** Zstandard CLI (64-bit) v1.5.4, by Yann Collet ***"),
            "1.5.4"
        );
        assert_eq!(of("rsync  version 3.2.7  protocol version 31"), "3.2.7");
        assert_eq!(of("casync 2\n+XZ +GZIP"), "2");
        assert_eq!(of("qemu-img version 7.2.22 (Debian 1:7.2)"), "7.2.22");
        assert_eq!(version_in("none"), None);
    }

    #[test]
    fn what_is_missing_is_told() {
        let error = version("no-such-program-here", &["--version"]).unwrap_err();
        assert_eq!(error, "no-such-program-here is not installed");
        let error = version("false", &[]).unwrap_err();
        assert!(error.contains("exit status: 1"), "{error}");
    }
}
