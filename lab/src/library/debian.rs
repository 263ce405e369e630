//! Debian systems with mmdebstrap, from the mirror that the host itself uses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::cache::{self, Cache};
use super::progress::Step;
use super::table::Fs;
use super::{ext4, filesystem, jail};
use crate::shell;

/// What every machine of the library has: it boots and can be reached.
const PLAIN: &[&str] = &["linux-image-amd64", "systemd-sysv", "openssh-server"];

/// Long enough for a slow mirror.
const LIMIT: Duration = Duration::from_secs(3600);

/// A system to build.
pub struct System<'a> {
    /// The image's name: host name, UUID and time of installation follow from it.
    pub name: &'a str,
    /// Debian's suite.
    pub suite: &'a str,
    /// Packages on top of the plain system.
    pub packages: &'a [String],
    /// Whether the suite's updates are taken in.
    pub updates: bool,
    /// What its root file system will be.
    pub fs: Fs,
}

/// What was built.
#[derive(Default)]
pub struct Built {
    /// `package version`, sorted.
    pub packages: Vec<String>,
    /// By which means.
    pub written_by: String,
    /// Over what is in the files.
    pub files_digest: String,
    /// What was not as it should be.
    pub notes: Vec<String>,
}

/// Builds a system and writes it to `out`.
///
/// As root by loop mount; without root (ext4 only) in a user namespace or `fakechroot`, whichever mmdebstrap can,
/// and by `mke2fs -d` under `fakeroot`, and that is said.
///
/// # Errors
/// One line: what is missing, or what mmdebstrap said.
pub fn make(cache: &Cache, system: &System<'_>, out: &Path) -> Result<Built> {
    let name = system.name;
    if !shell::have("mmdebstrap") {
        bail!("mmdebstrap is not installed");
    }
    if !jail::is_root() {
        if system.fs != Fs::Ext4 {
            bail!("{} needs a loop mount: not root", system.fs);
        }
        if !shell::have("fakeroot") {
            bail!("not root, and fakeroot is not installed");
        }
        eprintln!(
            "NOTE {name}: not root: packages are installed by mmdebstrap in a user namespace or fakechroot, and mke2fs -d writes the image, whose layout is not that of an installed machine"
        );
    }
    let debs = cache.packages.join(system.suite);
    fs::create_dir_all(&debs)?;
    let tree = cache.work.join(name);
    let mut built = Built::default();
    let mut installed_by = install(cache, system, system.updates, &debs, &tree);
    // A suite that has left support has lost its update suites on the mirror.
    if let Err(error) = &installed_by
        && system.updates
        && format!("{error:#}").contains("Release file")
    {
        let note = format!("the mirror has no update suites of {}", system.suite);
        eprintln!("NOTE {name}: {note}; built without");
        built.notes.push(note);
        cache::remove_tree(&tree)?;
        installed_by = install(cache, system, false, &debs, &tree);
    }
    installed_by?;
    let _step = Step::new(name, &format!("writing {}", system.fs));
    if jail::is_root() {
        let order = cache.work.join(format!("{name}.order"));
        let job = filesystem::Job {
            name,
            fs: system.fs,
            work: &cache.work,
            order: Some(&order),
            fstab: None,
        };
        let written = filesystem::write(&tree, out, &job)?;
        built.written_by = format!("mmdebstrap --mode=root, {}", written.by);
        built.files_digest = written.files_digest;
        built.packages = installed(&tree)?;
        let _ = fs::remove_file(order);
    } else {
        unpack_and_write(&tree, out, name, cache)?;
        built.written_by =
            "mmdebstrap --mode=auto without root, mke2fs -d under fakeroot".to_owned();
        built.packages = installed(&tree.join("tree"))?;
        built.files_digest = filesystem::files_digest(&tree.join("tree"))?;
    }
    cache::remove_tree(&tree)?;
    Ok(built)
}

/// Installs a system into `tree`: as a directory, or without root as `tree/tar`.
fn install(
    cache: &Cache,
    system: &System<'_>,
    updates: bool,
    debs: &Path,
    tree: &Path,
) -> Result<()> {
    let System { name, suite, .. } = *system;
    let _step = Step::new(name, "installing packages");
    let sources = cache.work.join(format!("{suite}.sources"));
    fs::write(&sources, sources_for(suite, updates)?)?;
    let plain = PLAIN.iter().map(|p| (*p).to_owned());
    let include: Vec<String> = plain.chain(system.packages.iter().cloned()).collect();
    let archives = "/var/cache/apt/archives";
    // Downloads are kept between builds; what is installed still comes from apt's own choice.
    let debs_in = format!(
        "mkdir -p \"$1{archives}\"; cp '{0}'/*.deb \"$1{archives}/\" 2>/dev/null || true",
        debs.display()
    );
    let debs_out = format!("sync-out {archives} '{}'", debs.display());
    let identity = format!(
        "echo {name} > \"$1/etc/hostname\"; echo 'nameserver 192.0.2.53' > \"$1/etc/resolv.conf\"; \
         chmod 644 \"$1/etc/resolv.conf\"; printf '{}\\n' > \"$1/etc/fstab\"",
        fstab(name, system.fs)
    );
    let order = format!(
        "cp \"$1/var/log/dpkg.log\" '{}' 2>/dev/null || true",
        cache.work.join(format!("{name}.order")).display()
    );
    let mut command = jail::command(LIMIT, "mmdebstrap");
    command.arg("--variant=important");
    // A tree that is half built is thrown away, so nothing in it needs to be on disk yet.
    command.arg("--dpkgopt=force-unsafe-io");
    command.arg("--customize-hook=rm -f \"$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap\"");
    command.args(["--skip=essential/unlink", "--skip=download/empty"]);
    if jail::is_root() {
        command.args(["--mode=root", "--format=directory"]);
    } else {
        fs::create_dir_all(tree)?;
        command
            .args(["--mode=auto", "--format=tar"])
            .env("TMPDIR", tree);
    }
    command
        .arg(format!("--setup-hook={debs_in}"))
        .arg(format!("--customize-hook={debs_out}"))
        .arg(format!("--customize-hook={identity}"))
        .arg(format!("--customize-hook={order}"))
        .arg(format!("--include={}", include.join(",")))
        .arg(suite)
        .arg(if jail::is_root() {
            tree.to_owned()
        } else {
            tree.join("tar")
        })
        .arg(&sources)
        .env("SOURCE_DATE_EPOCH", ext4::time_of(name).to_string())
        .env("DEBIAN_FRONTEND", "noninteractive");
    let done = jail::run("mmdebstrap", &mut command, None);
    fs::remove_file(&sources)?;
    done.map(drop)
}

/// The line that mounts a machine's root.
pub fn fstab(name: &str, fs: Fs) -> String {
    let (options, pass) = match fs {
        Fs::Ext4 => ("errors=remount-ro", 1),
        Fs::Xfs | Fs::Btrfs => ("defaults", 0),
    };
    format!(
        "UUID={} / {fs} {options} 0 {pass}",
        ext4::uuid_of(name, "file system")
    )
}

/// Under one `fakeroot`, which remembers whose the files would be.
fn unpack_and_write(dir: &Path, out: &Path, name: &str, cache: &Cache) -> Result<()> {
    let (state, tree) = (
        cache.work.join(format!("{name}.fakeroot")),
        dir.join("tree"),
    );
    fs::create_dir_all(&tree)?;
    let mut unpack = Command::new("fakeroot");
    unpack
        .arg("-s")
        .arg(&state)
        .args(["tar", "-xpf"])
        .arg(dir.join("tar"))
        .arg("-C")
        .arg(&tree);
    jail::run("unpacking", &mut unpack, None)?;
    let mut write = Command::new("fakeroot");
    write.arg("-i").arg(&state).arg("mke2fs");
    ext4::make_with(write, &tree, out, name, ext4::size_for(&tree)?)?;
    fs::remove_file(state)?;
    Ok(())
}

/// The packages of a tree, `name version`, sorted.
///
/// # Errors
/// When it has no packages.
pub fn installed(tree: &Path) -> Result<Vec<String>> {
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
///
/// # Errors
/// When the host is no Debian.
pub fn sources_for(suite: &str, with_updates: bool) -> Result<String> {
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
