//! Builds images one after another: base image, recipe, manifest, rename.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::fs::{SeekFrom, seek};

use super::cache::{Built, Cache, Manifest};
use super::table::{Recipe, Spec, Table};
use super::{aged, debian, filesystem, small};
use crate::shell;

/// Builds the missing ones of some images, in table order; a failure does not stop the others.
///
/// # Errors
/// After the others, when one could not be built.
pub fn all(table: &Table, chosen: &[&Spec], dir: &Path) -> Result<()> {
    let cache = Cache::open(dir)?;
    let mut failed = Vec::new();
    for spec in chosen {
        let path = cache.dir.join("images").join(spec.file_name());
        if path.exists() {
            println!("{:<22} {}", spec.name, path.display());
            continue;
        }
        let started = Instant::now();
        eprintln!("{}: {}", spec.name, spec.describe());
        if let Err(error) = build_one(table, spec, &cache, &path) {
            cache.clear()?;
            println!("{:<22} FAILED: {error:#}", spec.name);
            failed.push(spec.name.as_str());
        } else {
            println!(
                "{:<22} {}, {} s",
                spec.name,
                path.display(),
                started.elapsed().as_secs()
            );
        }
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

/// Builds an image. It is renamed into place atomically, after its manifest.
fn build_one(table: &Table, spec: &Spec, cache: &Cache, path: &Path) -> Result<()> {
    let part = path.with_file_name(format!("{}.part", spec.file_name()));
    let base = spec
        .recipe
        .base()
        .map(|of| base_of(cache, of))
        .transpose()?;
    // A machine is installed only once, whatever the formats of its disk.
    let root = table.root(spec);
    let built = match (&spec.recipe, &base) {
        (Recipe::Debian { .. }, _) => debian::make(cache, spec, &part)?,
        (Recipe::Host(selection), _) => small::make(cache, &spec.name, *selection, &part)?,
        (Recipe::SameTree(_), Some((image, manifest))) => {
            let from = filesystem::Mounted::new(image, cache.work.join("base"), root.fs, true)?;
            let fstab = debian::fstab(&spec.name, spec.fs);
            let written_by =
                filesystem::write(&from.at, &part, spec, &cache.work, None, Some(&fstab))?;
            from.close()?;
            Built {
                packages: manifest.packages.clone(),
                written_by,
                notes: vec!["/etc/fstab says the new file system".to_owned()],
            }
        }
        (Recipe::Aged(_), Some((image, _))) => aged::make(cache, spec, root, image, &part)?,
        (Recipe::Converted(_), Some((image, manifest))) => {
            let format = spec.format();
            let options: &[&str] = match format {
                "vmdk" => &["-o", "subformat=monolithicSparse"],
                "vhdx" => &["-o", "subformat=dynamic"],
                _ => &[],
            };
            let mut convert = Command::new("qemu-img");
            convert
                .args(["convert", "-f", "raw", "-O", format])
                .args(options)
                .args([image, &part]);
            shell::run(&mut convert)?;
            Built {
                packages: manifest.packages.clone(),
                written_by: "qemu-img convert".to_owned(),
                notes: Vec::new(),
            }
        }
        (_, None) => bail!("nothing to make it from"),
    };
    let meta = fs::metadata(&part)?;
    let manifest = Manifest {
        name: spec.name.clone(),
        recipe: spec.describe(),
        size_bytes: meta.len(),
        allocated_bytes: meta.blocks() * 512,
        digest: digest_of(&part)?,
        written_by: built.written_by,
        notes: built.notes,
        packages: built.packages,
    };
    File::open(&part)?.sync_all()?;
    fs::write(
        path.with_file_name(format!("{}.json", spec.name)),
        serde_json::to_vec_pretty(&manifest)?,
    )?;
    Ok(fs::rename(part, path)?)
}

/// The base of an image, which must exist and match its manifest.
fn base_of(cache: &Cache, of: &str) -> Result<(PathBuf, Manifest)> {
    let path = cache.dir.join("images").join(format!("{of}.raw"));
    let manifest = Manifest::read(&cache.dir, of)?.filter(|_| path.exists());
    let manifest = manifest.with_context(|| {
        format!("it is made from {of}, which is not built: lab library --only {of}")
    })?;
    if manifest.digest != digest_of(&path)? {
        bail!(
            "it is made from {of}, which is no longer what its manifest says: lab library --check"
        );
    }
    Ok((path, manifest))
}

/// The BLAKE3 hash of a file. Holes are hashed as zeros without reading them.
///
/// # Errors
/// When it cannot be read.
pub fn digest_of(path: &Path) -> Result<String> {
    const STEP: usize = 1 << 20;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let size = file.metadata()?.len();
    let (mut hasher, mut buffer, zeros) = (blake3::Hasher::new(), vec![0; STEP], vec![0; STEP]);
    let mut at = 0;
    while at < size {
        let data = match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data.min(size),
            Err(rustix::io::Errno::NXIO) => size,
            Err(error) => return Err(error).context("cannot look for data"),
        };
        while at < data {
            let step = (data - at).min(STEP as u64) as usize;
            hasher.update(&zeros[..step]);
            at += step as u64;
        }
        let step = (size - at).min(STEP as u64) as usize;
        file.read_exact_at(&mut buffer[..step], at)?;
        hasher.update(&buffer[..step]);
        at += step as u64;
    }
    Ok(hasher.finalize().to_hex().to_string())
}
