//! Debian systems with mmdebstrap, from the mirror that the host itself uses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{Dirs, ext4};
use crate::shell;

/// What every machine of the library has: it boots and can be reached.
const PLAIN: &[&str] = &["linux-image-amd64", "systemd-sysv", "openssh-server"];

/// Builds one system and writes it to `out`; returns its packages with their versions.
pub fn make(
    dirs: &Dirs,
    name: &str,
    suite: &str,
    packages: &[&str],
    out: &Path,
) -> Result<Vec<String>> {
    if !rustix::process::geteuid().is_root() {
        bail!("needs root: packages' scripts run in a chroot");
    }
    if !shell::have("mmdebstrap") {
        bail!("mmdebstrap is not installed");
    }
    let tree = dirs.work.join(name);
    remove_tree(&tree)?;
    let debs = dirs.packages.join(suite);
    fs::create_dir_all(&debs)?;
    let sources = dirs.work.join(format!("{suite}.sources"));

    // A suite that has left support may have lost its update suites on the mirror.
    let mut result = Ok(());
    for with_updates in [true, false] {
        fs::write(&sources, sources_for(suite, with_updates)?)?;
        result = bootstrap(&tree, &debs, name, suite, packages, &sources);
        if result.is_ok() {
            break;
        }
        remove_tree(&tree)?;
    }
    result?;

    let versions = installed(&tree)?;
    ext4::make(&tree, out, name)?;
    remove_tree(&tree)?;
    Ok(versions)
}

fn bootstrap(
    tree: &Path,
    debs: &Path,
    name: &str,
    suite: &str,
    packages: &[&str],
    sources: &Path,
) -> Result<()> {
    let include: Vec<&str> = PLAIN.iter().chain(packages).copied().collect();
    let archives = "/var/cache/apt/archives";
    // Downloads are kept between builds; what is installed still comes from apt's own choice.
    let sync_in = format!("sync-in '{}' {archives}/", debs.display());
    let sync_out = format!("sync-out {archives} '{}'", debs.display());
    let identity = format!(
        "echo {name} > \"$1/etc/hostname\"; echo 'nameserver 192.0.2.53' > \"$1/etc/resolv.conf\"; \
         printf 'UUID={} / ext4 errors=remount-ro 0 1\\n' > \"$1/etc/fstab\"",
        ext4::uuid_of(name, "file system")
    );
    shell::run(
        Command::new("mmdebstrap")
            .args([
                "--mode=root",
                "--format=directory",
                "--variant=important",
                "--quiet",
            ])
            .args(["--skip=essential/unlink", "--skip=download/empty"])
            .arg(format!("--setup-hook=mkdir -p \"$1{archives}/\""))
            .arg(format!("--setup-hook={sync_in}"))
            .arg(format!("--customize-hook={sync_out}"))
            .arg(format!("--customize-hook={identity}"))
            .arg(format!("--include={}", include.join(",")))
            .arg(suite)
            .arg(tree)
            .arg(sources)
            .env("SOURCE_DATE_EPOCH", ext4::time_of(name).to_string())
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )?;
    Ok(())
}

/// Removes a tree that was built, unmounting what a killed build left mounted in it first.
fn remove_tree(tree: &Path) -> Result<()> {
    if !tree.exists() {
        return Ok(());
    }
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let below = |line: &&str| {
        line.split(' ')
            .nth(1)
            .is_some_and(|at| Path::new(at).starts_with(tree))
    };
    for line in mounts.lines().rev().filter(below) {
        let at = line.split(' ').nth(1).unwrap_or_default();
        shell::run(Command::new("umount").args(["-l", at]))?;
    }
    fs::remove_dir_all(tree).with_context(|| format!("cannot remove {}", tree.display()))
}

fn installed(tree: &Path) -> Result<Vec<String>> {
    let admin = tree.join("var/lib/dpkg");
    let output = shell::run(
        Command::new("dpkg-query")
            .arg(format!("--admindir={}", admin.display()))
            .args(["-W", "-f", "${Package} ${Version}\n"]),
    )?;
    let mut list: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_owned)
        .collect();
    list.sort();
    Ok(list)
}

/// The host's own apt sources, turned to another suite.
fn sources_for(suite: &str, with_updates: bool) -> Result<String> {
    let release = fs::read_to_string("/etc/os-release")?;
    let host = release
        .lines()
        .find_map(|l| l.strip_prefix("VERSION_CODENAME="))
        .map(|v| v.trim_matches('"').to_owned())
        .context("the host is no Debian: no VERSION_CODENAME in /etc/os-release")?;
    let mut files: Vec<PathBuf> = fs::read_dir("/etc/apt/sources.list.d")
        .map(|dir| dir.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    files.sort();
    files.insert(0, "/etc/apt/sources.list".into());
    for path in files {
        let known = path
            .extension()
            .is_some_and(|e| e == "list" || e == "sources");
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        if known && text.contains(&host) {
            return Ok(turn(&text, &host, suite, with_updates));
        }
    }
    bail!("no apt source of the host names {host}: nowhere to take {suite} from");
}

/// Replaces the host's suite by another in a sources file of either style.
fn turn(text: &str, host: &str, suite: &str, with_updates: bool) -> String {
    if text.contains("URIs:") {
        turn_stanzas(text, host, suite, with_updates)
    } else {
        text.lines()
            .filter(|l| l.starts_with("deb "))
            .filter(|l| {
                let is_plain = l.split_whitespace().any(|word| word == host);
                is_plain || (with_updates && l.contains(host))
            })
            .map(|l| l.replace(host, suite) + "\n")
            .collect()
    }
}

fn turn_stanzas(text: &str, host: &str, suite: &str, with_updates: bool) -> String {
    let mut out = String::new();
    for stanza in text.split("\n\n") {
        let mut lines = String::new();
        let mut any_suite = false;
        for line in stanza.lines().filter(|l| !l.starts_with('#')) {
            let Some(suites) = line.strip_prefix("Suites:") else {
                lines.push_str(line);
                lines.push('\n');
                continue;
            };
            let turned: Vec<String> = suites
                .split_whitespace()
                .filter(|s| *s == host || (with_updates && s.starts_with(host)))
                .map(|s| s.replace(host, suite))
                .collect();
            any_suite = !turned.is_empty();
            lines.push_str(&format!("Suites: {}\n", turned.join(" ")));
        }
        if any_suite {
            out.push_str(&lines);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "Types: deb\n# a comment\nURIs: http://mirror.invalid/debian\nSuites: bookworm bookworm-updates\n\
        Components: main\n\nTypes: deb\nURIs: http://mirror.invalid/security\nSuites: bookworm-security\nComponents: main\n";

    #[test]
    fn stanzas_are_turned_to_another_suite() {
        let all = turn(STANZAS, "bookworm", "trixie", true);
        assert!(all.contains("Suites: trixie trixie-updates\n"));
        assert!(all.contains("Suites: trixie-security\n"));
        assert!(!all.contains("bookworm") && !all.contains("comment"));
    }

    #[test]
    fn without_updates_only_the_release_itself_is_left() {
        let plain = turn(STANZAS, "bookworm", "bullseye", false);
        assert!(plain.contains("Suites: bullseye\n"));
        assert!(!plain.contains("security") && !plain.contains("updates"));
    }

    #[test]
    fn one_line_sources_are_turned_too() {
        let text = "# x\ndeb http://mirror.invalid/debian bookworm main\ndeb http://mirror.invalid/security bookworm-security main\n";
        assert_eq!(
            turn(text, "bookworm", "trixie", false),
            "deb http://mirror.invalid/debian trixie main\n"
        );
        assert_eq!(turn(text, "bookworm", "trixie", true).lines().count(), 2);
    }
}
