//! An administrator's upgrades and additions, by the machine's own apt.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::library::{debian, jail};

/// Packages that an administrator adds in the first week.
const ADDED: &[&str] = &["vim", "tmux", "htop", "curl", "rsync"];
const LIMIT: Duration = Duration::from_secs(1800);

/// Turns the suite's updates and security updates on and upgrades all there is; says how much it was.
///
/// # Errors
/// When the mirror cannot be reached, or a package fails.
pub fn upgrade(root: &Path, debs: &Path, suite: &str) -> Result<String> {
    let sources = debian::sources_for(suite, true)?;
    let (stanzas, lines) = ("etc/apt/sources.list.d", "etc/apt/sources.list");
    for entry in fs::read_dir(root.join(stanzas))
        .into_iter()
        .flatten()
        .flatten()
    {
        fs::remove_file(entry.path())?;
    }
    let place = if sources.contains("URIs:") {
        format!("{stanzas}/debian.sources")
    } else {
        lines.to_owned()
    };
    fs::write(root.join(place), sources)?;
    let before = debian::installed(root)?;
    let script = "apt-get -q update; \
        apt-get -q -y -o Dpkg::Options::=--force-confold -o Dpkg::Options::=--force-unsafe-io --with-new-pkgs --no-install-recommends upgrade";
    apt(root, debs, script).context("upgrading packages")?;
    let after = debian::installed(root)?;
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    let names: Vec<String> = before.iter().map(|l| name(l)).collect();
    let changed = after.iter().filter(|l| !before.contains(l));
    let (upgraded, new): (Vec<_>, Vec<_>) = changed.partition(|l| names.contains(&name(l)));
    Ok(format!(
        "{} packages upgraded, {} came with them",
        upgraded.len(),
        new.len()
    ))
}

/// Adds some tools; says which.
///
/// # Errors
/// When the mirror cannot be reached, or a package fails.
pub fn add(root: &Path, debs: &Path) -> Result<String> {
    let added = ADDED.join(" ");
    apt(
        root,
        debs,
        &format!("apt-get -q -y --no-install-recommends install {added}"),
    )
    .context("adding packages")?;
    Ok(format!("{added} added"))
}

/// Runs apt in the machine. No service starts: nobody would stop it.
fn apt(root: &Path, debs: &Path, script: &str) -> Result<()> {
    let policy = root.join("usr/sbin/policy-rc.d");
    let there = policy.exists();
    if !there {
        fs::write(&policy, "#!/bin/sh\nexit 101\n")?;
        fs::set_permissions(&policy, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    let result = jail::run("apt", &mut jail::inside(root, debs, LIMIT, script), None);
    if !there {
        fs::remove_file(policy)?;
    }
    result.map(drop)
}
