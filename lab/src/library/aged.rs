//! What time does to a machine: packages are upgraded and added, files are rewritten, edited, moved and deleted, logs
//! grow, a database runs.
//!
//! A copy of an image is mounted and lives on: what does not change stays where it is, what is written goes where the
//! file system finds room. An image of the host's files (the small set) is aged as a tree instead, without root.

mod database;
mod files;
mod packages;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};

use super::cache::{self, Cache};
use super::debian::{self, Built};
use super::mount::Mounted;
use super::progress::Step;
use super::table::{Fs, Spec};
use super::{ext4, jail};
use crate::shell;

/// From what all that is random about ageing grows.
pub const SEED: u64 = 0x0061_6765;
const LOG_BYTES: usize = 48 << 20;
/// How long after its installation a machine is "aged".
const AGE: Duration = Duration::from_secs(120 * 86_400);
/// How often the database and the logs take turns.
const ROUNDS: u64 = 2;

/// Ages a copy of the raw image `base` through a loop mount.
///
/// # Errors
/// Without root, when `base` is in use, when packages cannot be fetched, when the disk is full.
pub fn by_mount(
    cache: &Cache,
    spec: &Spec,
    suite: &str,
    base: &Path,
    installed_at: u64,
    out: &Path,
) -> Result<Built> {
    let name = &spec.name;
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(installed_at) + AGE;
    if !jail::is_root() {
        anyhow::bail!("ageing an installed system needs root: its packages' scripts run in it");
    }
    copy(base, out)?;
    let mounted = Mounted::new(out, cache.work.join(format!("{name}.mnt")), spec.fs, false)?;
    let root = mounted.at.as_path();
    let debs = cache.packages.join(suite);
    fs::create_dir_all(debs.join("partial"))?;

    let mut built = Built {
        written_by: "loop mount of a copy".to_owned(),
        ..Built::default()
    };
    {
        let _step = Step::new(name, "upgrading and adding packages");
        built.notes.push(packages::upgrade(root, &debs, suite)?);
        built.notes.push(packages::add(root, &debs)?);
    }
    {
        let _step = Step::new(name, "changing files");
        built.notes.push(files::churn(root, time)?);
    }
    let mut rng = fastrand::Rng::with_seed(SEED);
    for round in 0..ROUNDS {
        {
            let _step = Step::new(name, "growing logs");
            let bytes = LOG_BYTES / usize::try_from(ROUNDS)?;
            files::grow_logs(&root.join("var/log"), bytes, time, &mut rng)?;
        }
        let _step = Step::new(name, "running its database");
        match database::run(cache, root, &debs, round) {
            Ok(Some(note)) => built.notes.push(note),
            Ok(None) => {}
            Err(error) => {
                let note = format!("SKIP its database did not run: {error:#}");
                eprintln!("{name}: {note}");
                built.notes.push(note);
                break;
            }
        }
    }
    built
        .notes
        .push(format!("logs grew by {} MiB", LOG_BYTES >> 20));
    built.packages = debian::installed(root)?;
    built.files_digest = super::filesystem::files_digest(root)?;
    mounted.close()?;
    Ok(built)
}

fn copy(base: &Path, out: &Path) -> Result<()> {
    let mut command = jail::command(Duration::from_secs(1200), "cp");
    command
        .args(["--sparse=always", "--reflink=auto"])
        .args([base, out]);
    jail::run("copying the base", &mut command, None).map(drop)
}

/// Ages an image of the host's files: its tree is taken out, changed and written again, all without root.
///
/// # Errors
/// When `debugfs` or `mke2fs` fail.
pub fn by_tree(
    cache: &Cache,
    spec: &Spec,
    base: &Path,
    installed_at: u64,
    out: &Path,
) -> Result<Built> {
    let name = &spec.name;
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(installed_at) + AGE;
    if spec.fs != Fs::Ext4 || !shell::have("debugfs") {
        anyhow::bail!("ageing as a tree needs ext4 and debugfs (e2fsprogs)");
    }
    let _step = Step::new(name, "ageing a tree");
    let tree = cache.work.join(name);
    cache::remove_tree(&tree)?;
    fs::create_dir_all(&tree)?;
    let dump = format!("rdump / \"{}\"", tree.display());
    shell::run(Command::new("debugfs").args(["-R", &dump]).arg(base))
        .context("cannot take the files out of the base")?;
    let mut notes = vec![files::churn(&tree, time)?];
    let mut rng = fastrand::Rng::with_seed(SEED);
    files::grow_logs(&tree.join("var/log"), LOG_BYTES / 8, time, &mut rng)?;
    notes.push(format!("logs grew by {} MiB", LOG_BYTES >> 23));
    notes.push(files::grow_table(&tree.join("var/lib/table"), &mut rng)?);
    ext4::make(&tree, out, name)?;
    let files_digest = super::filesystem::files_digest(&tree)?;
    cache::remove_tree(&tree)?;
    Ok(Built {
        written_by: "mke2fs -d".to_owned(),
        files_digest,
        notes,
        ..Built::default()
    })
}
