//! Running builders: programs that start others, mount things and run for minutes. They end at a deadline, and
//! with the lab however that ends, and take their mounts and their children with them.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::shell;

/// True for root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command that ends after `limit`, and with the lab. As root it has process and mount namespaces of its own, so
/// that nothing of it stays: no daemon, no `/proc` in a tree.
pub fn command(limit: Duration, program: &str) -> Command {
    let limit = limit.as_secs().to_string();
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if is_root() {
        command.args(["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]);
        command.arg("--mount-proc");
    }
    command.args(["timeout", "--kill-after=10", &limit, program]);
    command
}

/// A command inside a system's tree, as root: with `/proc`, an empty `/run`, the host's resolver, and downloads
/// kept in `debs`. Ends after `limit`, daemons included.
pub fn inside(root: &Path, debs: &Path, limit: Duration, script: &str) -> Command {
    // Mounted in a namespace of its own: the image sees none of it.
    const ENTER: &str = r#"
        root=$1 debs=$2
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmpfs "$root/run"
        mkdir -p "$root/run/lock" "$root/dev/shm"
        mount -t tmpfs tmpfs "$root/dev/shm"
        mount --bind "$debs" "$root/var/cache/apt/archives"
        if [ -f "$root/etc/resolv.conf" ] && [ ! -L "$root/etc/resolv.conf" ]; then
            mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
        fi
        exec chroot "$root" sh -ec "$3"
    "#;
    let mut command = command(limit, "sh");
    command
        .args(["-ec", ENTER, "enter"])
        .args([root, debs])
        .arg(script)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C.UTF-8")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// Runs a command to its end, optionally with a file as its standard input.
///
/// # Errors
/// One line that says what went wrong, by what the command said.
pub fn run(what: &str, command: &mut Command, input: Option<&Path>) -> Result<Output> {
    if !shell::have("setpriv") || !shell::have("timeout") {
        bail!("{what}: setpriv and timeout (util-linux, coreutils) are not installed");
    }
    let stdin = match input {
        Some(path) => File::open(path)?.into(),
        None => Stdio::null(),
    };
    let output = command
        .stdin(stdin)
        .output()
        .with_context(|| format!("{what}: cannot start"))?;
    match output.status.code() {
        Some(0) => Ok(output),
        Some(124 | 137) => bail!("{what}: stopped at its deadline: {}", why(&output.stderr)),
        _ => bail!("{what}: {}", why(&output.stderr)),
    }
}

/// The line of a failed program's output that tells most.
fn why(stderr: &[u8]) -> String {
    const TELLING: &[&str] = &[
        "No space left on device",
        "Temporary failure resolving",
        "Could not resolve",
        "Could not connect",
        "does not have a Release file",
        "Failed to fetch",
        "have enough free space",
        "ERROR",
        "E: ",
    ];
    let text = String::from_utf8_lossy(stderr);
    for word in TELLING {
        if let Some(line) = text.lines().find(|line| line.contains(word)) {
            return line.trim().chars().take(300).collect();
        }
    }
    match shell::tail(stderr) {
        empty if empty.is_empty() => "it failed without a word".to_owned(),
        said => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_ends_a_command_and_its_children() {
        if !shell::have("setpriv") || !shell::have("unshare") {
            eprintln!("SKIP a_deadline_ends_a_command_and_its_children: no util-linux");
            return;
        }
        let started = std::time::Instant::now();
        let mut command = command(Duration::from_secs(1), "sh");
        let error = run(
            "sleeping",
            command.args(["-c", "sleep 60 & sleep 60"]),
            None,
        )
        .unwrap_err();
        assert!(error.to_string().contains("deadline"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn the_telling_line_is_found() {
        let said = b"I: starting\nErr: Temporary failure resolving 'x'\nE: apt-get update failed\nI: cleanup\n";
        assert_eq!(why(said), "Err: Temporary failure resolving 'x'");
        assert_eq!(why(b"a\nb\n"), "a | b");
        assert_eq!(why(b""), "it failed without a word");
    }
}
