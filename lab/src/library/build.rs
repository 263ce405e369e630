//! Building images, one after another: plan, base, recipe, manifest, name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::Set;
use super::cache::Cache;
use super::debian::{Built, System};
use super::manifest::{self, Base, Manifest};
use super::progress::Step;
use super::table::{Format, Recipe, Spec, Table};
use super::{aged, convert, debian, ext4, filesystem, jail, mount, plan, small};
use crate::shell;

/// Builds what is missing of some images, each after what it is made from; a failing one does not stop the others.
///
/// # Errors
/// When there is no room for all, or after the others when one could not be built.
pub fn all(table: &Table, chosen: &[&Spec], dir: &Path) -> Result<()> {
    let images = dir.join("images");
    let is_missing = |s: &Spec| !images.join(s.file_name()).exists();
    let missing: Vec<&Spec> = chosen.iter().copied().filter(|s| is_missing(s)).collect();
    plan::announce(table, &missing, dir)?;
    let cache = Cache::open(dir)?;
    let mut failed = Vec::new();
    for spec in in_order(chosen) {
        let path = cache.images.join(spec.file_name());
        if path.exists() {
            if let Err(error) = adopt(&cache, spec, &path) {
                println!("{:<22} {error:#}", spec.name);
                failed.push(spec.name.as_str());
            } else {
                println!("{:<22} {}", spec.name, shown(&path));
            }
            continue;
        }
        let started = Instant::now();
        if let Err(error) = build_one(table, spec, &cache) {
            let _ = std::fs::remove_file(cache.part(&spec.file_name()));
            if let Err(error) = cache.clear() {
                eprintln!("{error:#}");
            }
            println!("{:<22} FAILED: {error:#}", spec.name);
            failed.push(spec.name.as_str());
            continue;
        }
        println!(
            "{:<22} {}, {} s",
            spec.name,
            shown(&path),
            started.elapsed().as_secs()
        );
    }
    if !failed.is_empty() {
        bail!(
            "{} image(s) could not be built: {}",
            failed.len(),
            failed.join(", ")
        );
    }
    Ok(())
}

/// What others are made from comes before them.
fn in_order<'a>(chosen: &[&'a Spec]) -> Vec<&'a Spec> {
    let mut out: Vec<&Spec> = Vec::new();
    let mut left: Vec<&Spec> = chosen.to_vec();
    while !left.is_empty() {
        let waits = |s: &Spec| {
            s.recipe
                .base()
                .is_some_and(|of| left.iter().any(|l| l.name == of))
        };
        let (later, now): (Vec<&Spec>, Vec<&Spec>) = left.iter().copied().partition(|s| waits(s));
        out.extend(now);
        left = later;
    }
    out
}

/// Takes the digest of an image that an earlier builder left without.
fn adopt(cache: &Cache, spec: &Spec, path: &Path) -> Result<()> {
    let beside = cache.images.join(format!("{}.json", spec.name));
    let mut manifest = Manifest::read(&beside)?.with_context(|| {
        format!(
            "{} has no manifest: remove it and build it again",
            path.display()
        )
    })?;
    if manifest.digest.is_empty() {
        mount::check_still(path)?;
        let room = manifest.allocated_bytes;
        manifest.measure(path)?;
        manifest.allocated_bytes = room;
        manifest.digest_taken_later = true;
        manifest.fs_uuid = uuid_of(path, spec.format);
        manifest.write(&beside)?;
        eprintln!("{}: its manifest had no digest; taken now", spec.name);
    }
    Ok(())
}

fn build_one(table: &Table, spec: &Spec, cache: &Cache) -> Result<()> {
    let name = &spec.name;
    let part = cache.part(&spec.file_name());
    let base = spec
        .recipe
        .base()
        .map(|of| base_of(cache, table.set_of(of), of))
        .transpose()?;
    // A machine is installed once, in whatever form its disk is kept.
    let installed_at = ext4::time_of(root_name(table, spec));
    let built = match (&spec.recipe, &base) {
        (
            Recipe::Debian {
                suite,
                packages,
                updates,
                ..
            },
            _,
        ) => {
            let system = System {
                name,
                suite,
                packages,
                updates: *updates,
                fs: spec.fs,
            };
            debian::make(cache, &system, &part)?
        }
        (Recipe::Host(selection), _) => {
            let _step = Step::new(name, "copying the host's files");
            small::make(cache, name, *selection, &part)?
        }
        (Recipe::SameTree(of), Some((path, manifest))) => {
            let _step = Step::new(name, &format!("copying the files of {of}"));
            same_tree(cache, spec, path, manifest, &part)?
        }
        (Recipe::Aged(of), Some((path, _))) => match root_of(table, of) {
            Some(Recipe::Debian { suite, .. }) => {
                aged::by_mount(cache, spec, suite, path, installed_at, &part)?
            }
            _ => aged::by_tree(cache, spec, path, installed_at, &part)?,
        },
        (Recipe::Converted(_), Some((path, manifest))) => {
            let _step = Step::new(name, "converting");
            Built {
                packages: manifest.packages.clone(),
                written_by: convert::make(name, path, spec.format, &part)?,
                files_digest: manifest.files_digest.clone(),
                notes: Vec::new(),
            }
        }
        (_, None) => bail!("nothing to make it from"),
    };
    let _step = Step::new(name, "taking its digest");
    let mut manifest = Manifest {
        name: name.clone(),
        recipe: spec.describe(),
        builder: manifest::BUILDER,
        files_digest: built.files_digest,
        fs: spec.fs,
        format: spec.format,
        written_by: built.written_by,
        fs_uuid: match &base {
            Some((_, base)) if spec.format != Format::Raw => base.fs_uuid.clone(),
            _ => uuid_of(&part, spec.format),
        },
        seed: match spec.recipe {
            Recipe::Aged(_) => format!("{:#x}", aged::SEED),
            _ => format!("the name {name:?}"),
        },
        installed_at,
        made_from: base.map(|(_, base)| Base {
            name: base.name,
            digest: base.digest,
        }),
        notes: built.notes,
        tools: tools(),
        packages: built.packages,
        ..Manifest::default()
    };
    manifest.measure(&part)?;
    cache.finish(&spec.file_name(), &manifest)
}

/// What an image is made from: it must be there, and be what its manifest says.
fn base_of(cache: &Cache, set: Set, of: &str) -> Result<(PathBuf, Manifest)> {
    let path = cache.images.join(format!("{of}.raw"));
    let manifest = Manifest::read(&cache.images.join(format!("{of}.json")))?;
    let (Some(mut manifest), true) = (manifest, path.exists()) else {
        let set = match set {
            Set::Full => "",
            Set::Small => "--set small ",
        };
        bail!("it is made from {of}, which is not built: lab library {set}--only {of}");
    };
    mount::check_still(&path)?;
    let digest = manifest::digest_of(&path)?;
    if !manifest.digest.is_empty() && manifest.digest != digest {
        bail!(
            "it is made from {of}, which is no longer what its manifest says: lab library --check"
        );
    }
    manifest.digest = digest;
    Ok((path, manifest))
}

/// The recipe at the root of what an image is made from.
fn root_of<'a>(table: &'a Table, name: &str) -> Option<&'a Recipe> {
    let recipe = &table.find(name)?.recipe;
    match recipe.base() {
        Some(of) => root_of(table, of),
        None => Some(recipe),
    }
}

/// The name of the image at the root of what an image is made from: its own, if it is made of packages or files.
fn root_name<'a>(table: &'a Table, spec: &'a Spec) -> &'a str {
    match spec.recipe.base().and_then(|of| table.find(of)) {
        Some(base) => root_name(table, base),
        None => &spec.name,
    }
}

fn same_tree(
    cache: &Cache,
    spec: &Spec,
    base: &Path,
    manifest: &Manifest,
    out: &Path,
) -> Result<Built> {
    if !jail::is_root() {
        bail!("{} needs a loop mount: not root", spec.fs);
    }
    let name = &spec.name;
    let at = cache.work.join(format!("{name}.base"));
    let from = mount::Mounted::new(base, at, manifest.fs, true)?;
    let job = filesystem::Job {
        name,
        fs: spec.fs,
        work: &cache.work,
        order: None,
        fstab: Some(debian::fstab(name, spec.fs)),
    };
    let written = filesystem::write(&from.at, out, &job)?;
    from.close()?;
    Ok(Built {
        packages: manifest.packages.clone(),
        written_by: written.by,
        files_digest: written.files_digest,
        notes: vec!["/etc/fstab says the new file system".to_owned()],
    })
}

/// The UUID of a raw image's file system, empty where nothing can tell.
fn uuid_of(image: &Path, format: Format) -> String {
    if format != Format::Raw || !shell::have("blkid") {
        return String::new();
    }
    shell::run(
        Command::new("blkid")
            .args(["-p", "-o", "value", "-s", "UUID"])
            .arg(image),
    )
    .map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    .unwrap_or_default()
}

/// Versions of the tools that make images, of those that are here.
fn tools() -> BTreeMap<String, String> {
    const TOOLS: &[(&str, &str)] = &[
        ("mmdebstrap", "--version"),
        ("mke2fs", "-V"),
        ("mkfs.xfs", "-V"),
        ("mkfs.btrfs", "--version"),
        ("qemu-img", "--version"),
        ("tar", "--version"),
    ];
    let mut tools = BTreeMap::new();
    for (tool, option) in TOOLS {
        let Ok(output) = Command::new(tool).arg(option).output() else {
            continue;
        };
        // mke2fs speaks on standard error.
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let line = said
            .lines()
            .find(|line| !line.trim().is_empty())
            .unwrap_or_default();
        tools.insert((*tool).to_owned(), line.trim().to_owned());
    }
    let kernel = rustix::system::uname();
    tools.insert(
        "kernel".to_owned(),
        kernel.release().to_string_lossy().into_owned(),
    );
    tools.insert("lab".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    tools
}

fn shown(path: &Path) -> String {
    match std::fs::metadata(path) {
        Ok(meta) => format!(
            "{:>6} MiB, {:>5} MiB on disk  {}",
            meta.len() >> 20,
            (std::os::unix::fs::MetadataExt::blocks(&meta) * 512) >> 20,
            path.display()
        ),
        Err(_) => "not built".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_are_made_from_comes_first() {
        let table = Table::load(None).unwrap();
        let mut backwards: Vec<&Spec> = table.images(Set::Full).iter().collect();
        backwards.reverse();
        let sorted = in_order(&backwards);
        assert_eq!(sorted.len(), backwards.len());
        for (at, spec) in sorted.iter().enumerate() {
            if let Some(of) = spec.recipe.base() {
                assert!(sorted[..at].iter().any(|s| s.name == of), "{}", spec.name);
            }
        }
    }

    #[test]
    fn a_missing_base_is_said_in_one_line_and_the_others_are_not_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let text = "images = [{ name = \"gone\", suite = \"no-such-suite\", set = \"plain\" }, { name = \"gone.qcow2\", converts = \"gone\" }]\n[sets]\nplain = { packages = [] }\n";
        let file = dir.path().join("table.toml");
        std::fs::write(&file, text).unwrap();
        let table = Table::load(Some(&file)).unwrap();
        let cache = Cache::open(&dir.path().join("cache")).unwrap();
        let converted = &table.images(Set::Full)[1];
        let error = build_one(&table, converted, &cache)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "it is made from gone, which is not built: lab library --only gone"
        );
    }
}
