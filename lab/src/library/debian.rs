//! Builds Debian systems with mmdebstrap, from the mirror that the host uses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cache::{Built, Cache, remove_tree};
use super::filesystem;
use super::table::{Fs, Recipe, Spec};
use crate::shell;

/// Packages of every machine in the library, which make it bootable and reachable.
const PLAIN: [&str; 3] = ["linux-image-amd64", "systemd-sysv", "openssh-server"];

/// Builds a system and writes it to `out`: as root by loop mount; without root (ext4 only) mmdebstrap creates the file
/// system.
///
/// # Errors
/// What is missing, or the error of mmdebstrap.
pub fn make(cache: &Cache, spec: &Spec, out: &Path) -> Result<Built> {
    let Recipe::Debian {
        suite,
        packages,
        updates,
    } = &spec.recipe
    else {
        bail!("{} is no Debian system", spec.name);
    };
    if !filesystem::is_root() {
        bail!("an installed system needs root: its packages' scripts run in it");
    }
    let tree = cache.work.join(&spec.name);
    let mut notes = Vec::new();
    let mut installed_by = install(cache, spec, suite, packages, *updates, &tree);
    // When a suite reaches end of life, its update suites disappear from the mirror.
    if *updates
        && installed_by
            .as_ref()
            .is_err_and(|e| format!("{e:#}").contains("Release"))
    {
        notes.push(format!(
            "the mirror has no update suites of {suite}; built without"
        ));
        remove_tree(&tree)?;
        installed_by = install(cache, spec, suite, packages, false, &tree);
    }
    installed_by?;
    let log = tree.join("var/log/dpkg.log");
    let written_by = filesystem::write(&tree, out, spec, &cache.work, Some(&log), None)?;
    let packages = installed(&tree)?;
    remove_tree(&tree)?;
    Ok(Built {
        packages,
        written_by,
        notes,
    })
}

/// Installs a system into `tree`. Downloads are cached between builds; apt still chooses the versions.
fn install(
    cache: &Cache,
    spec: &Spec,
    suite: &str,
    packages: &[String],
    updates: bool,
    tree: &Path,
) -> Result<()> {
    let sources = cache.work.join(format!("{suite}.sources"));
    fs::write(&sources, sources_for(suite, updates)?)?;
    let debs = cache.packages(suite)?;
    let (debs, archives) = (debs.display(), "/var/cache/apt/archives");
    let include: Vec<&str> = PLAIN
        .into_iter()
        .chain(packages.iter().map(String::as_str))
        .collect();
    let identity = format!(
        "echo {0} > \"$1/etc/hostname\"; echo 'nameserver 192.0.2.53' > \"$1/etc/resolv.conf\"; \
         chmod 644 \"$1/etc/resolv.conf\"; printf '{1}\\n' > \"$1/etc/fstab\"",
        spec.name,
        fstab(&spec.name, spec.fs)
    );
    let mut command = contained("mmdebstrap");
    command
        .args(["--mode=root", "--format=directory", "--variant=important"])
        // An incomplete tree is discarded, so nothing in it needs to be durable.
        .args(["--dpkgopt=force-unsafe-io", "--customize-hook=rm -f \"$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap\""])
        .args(["--skip=essential/unlink", "--skip=download/empty"])
        .arg(format!("--setup-hook=mkdir -p \"$1{archives}\"; cp '{debs}'/*.deb \"$1{archives}/\" 2>/dev/null || true"))
        .arg(format!("--customize-hook=sync-out {archives} '{debs}'"))
        .arg(format!("--customize-hook={identity}"))
        .arg(format!("--include={}", include.join(",")))
        .arg(suite)
        .args([tree, &sources])
        .env("SOURCE_DATE_EPOCH", filesystem::seconds_of(&spec.name))
        .env("DEBIAN_FRONTEND", "noninteractive");
    shell::run(&mut command).map(drop)
}

/// A command with its own PID and mount namespaces, so that it leaves nothing behind: no daemon, no `/proc` in a tree.
/// It is killed when the lab exits.
fn contained(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child=KILL",
    ]);
    command.args(["--mount-proc", program]);
    command
}

/// Runs a script inside a system's tree, as root: with `/proc`, an empty `/run`, the host's resolver, and downloads
/// cached in `debs`. It runs in its own namespaces: mounts do not affect the image, and daemons end with it. Returns
/// its output.
///
/// # Errors
/// When the script fails; includes its output.
pub fn inside(root: &Path, debs: &Path, script: &str) -> Result<String> {
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
        exec timeout --kill-after=10 1800 chroot "$root" sh -ec "$3"
    "#;
    let mut command = contained("sh");
    command
        .args(["-ec", ENTER, "enter"])
        .args([root, debs])
        .arg(script);
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C.UTF-8");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    Ok(String::from_utf8_lossy(&shell::run(&mut command)?.stdout)
        .trim()
        .to_owned())
}

/// The fstab entry of a machine's root.
pub fn fstab(name: &str, fs: Fs) -> String {
    let (options, pass) = if fs == Fs::Ext4 {
        ("errors=remount-ro", 1)
    } else {
        ("defaults", 0)
    };
    format!(
        "UUID={} / {fs} {options} 0 {pass}",
        filesystem::uuid_of(name, "file system")
    )
}

/// The packages installed in a tree, `name version`, sorted.
///
/// # Errors
/// When it has no packages.
pub fn installed(tree: &Path) -> Result<Vec<String>> {
    let admin = format!("--admindir={}", tree.join("var/lib/dpkg").display());
    let said = shell::run(Command::new("dpkg-query").args([
        &admin,
        "-W",
        "-f",
        "${Package} ${Version}\n",
    ]))?
    .stdout;
    let mut list: Vec<String> = String::from_utf8_lossy(&said)
        .lines()
        .map(str::to_owned)
        .collect();
    list.sort();
    Ok(list)
}

/// The host's own apt sources, changed to another suite.
///
/// # Errors
/// When the host is not Debian.
pub fn sources_for(suite: &str, updates: bool) -> Result<String> {
    let release = fs::read_to_string("/etc/os-release")?;
    let host = release
        .lines()
        .find_map(|l| l.strip_prefix("VERSION_CODENAME="))
        .map(|v| v.trim_matches('"'));
    let host = host.context("the host is no Debian: no VERSION_CODENAME in /etc/os-release")?;
    let parts = fs::read_dir("/etc/apt/sources.list.d")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path());
    let mut files: Vec<PathBuf> = parts
        .filter(|p| p.extension().is_some_and(|e| e == "list" || e == "sources"))
        .collect();
    files.sort();
    files.insert(0, "/etc/apt/sources.list".into());
    let texts = files
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    let text = texts.into_iter().find(|text| text.contains(host));
    let text = text.with_context(|| {
        format!("no apt source of the host names {host}: nowhere to take {suite} from")
    })?;
    Ok(turn(&text, host, suite, updates))
}

/// Replaces the host's suite with another in a sources file of either style.
pub fn turn(text: &str, host: &str, suite: &str, updates: bool) -> String {
    if !text.contains("URIs:") {
        let plain = |line: &str| line.split_whitespace().any(|word| word == host);
        let lines = text
            .lines()
            .filter(|l| l.starts_with("deb ") && (plain(l) || (updates && l.contains(host))));
        return lines.map(|l| l.replace(host, suite) + "\n").collect();
    }
    let mut out = String::new();
    for stanza in text.split("\n\n") {
        let (mut lines, mut any) = (String::new(), false);
        for line in stanza.lines().filter(|l| !l.starts_with('#')) {
            let Some(suites) = line.strip_prefix("Suites:") else {
                lines += &format!("{line}\n");
                continue;
            };
            let kept = suites
                .split_whitespace()
                .filter(|s| *s == host || (updates && s.starts_with(host)));
            let turned: Vec<String> = kept.map(|s| s.replace(host, suite)).collect();
            any = !turned.is_empty();
            lines += &format!("Suites: {}\n", turned.join(" "));
        }
        if any {
            out += &format!("{lines}\n");
        }
    }
    out
}
