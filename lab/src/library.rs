//! The image library: real systems as disk images, built once and cached.
//!
//! The images are defined in a table (`lab/library.toml`). The full set is made from Debian packages; the small set is
//! made from the host's own files and needs neither root nor a network. Experiments use [`images`] to find them.

mod aged;
mod build;
mod cache;
pub mod daily;
mod debian;
mod filesystem;
mod small;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;

use cache::Manifest;
pub use table::Set;
use table::{Fs, Recipe, Spec, Table};

/// `lab library`.
#[derive(Args)]
pub struct LibraryArgs {
    /// Which images.
    #[arg(long, value_enum, default_value = "full")]
    set: Set,
    /// Where images and package caches are kept.
    #[arg(long, default_value = "lab/cache")]
    dir: PathBuf,
    /// Only these images of the set.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// A table of images other than the lab's own library.toml.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Print what there is and what there could be, and stop.
    #[arg(long, conflicts_with = "check")]
    list: bool,
    /// Read every image and compare it with its manifest, and stop.
    #[arg(long)]
    check: bool,
}

/// Builds the missing images of a set, or lists or checks them.
///
/// # Errors
/// When an image could not be built (the others are), or does not match its manifest.
pub fn run(args: &LibraryArgs) -> Result<()> {
    let table = Table::load(args.table.as_deref())?;
    let specs = table.images(args.set);
    if let Some(name) = args
        .only
        .iter()
        .find(|n| !specs.iter().any(|s| s.name == **n))
    {
        bail!("no image {name:?} in this set: lab library --list");
    }
    let wanted = |spec: &&Spec| args.only.is_empty() || args.only.contains(&spec.name);
    let chosen: Vec<&Spec> = specs.iter().filter(wanted).collect();
    if !args.list && !args.check {
        return build::all(&table, &chosen, &args.dir);
    }
    let mut wrong = 0;
    for spec in chosen {
        let path = args.dir.join("images").join(spec.file_name());
        let state = match (path.exists(), Manifest::read(&args.dir, &spec.name)?) {
            (false, _) => "missing",
            (_, None) => "NO MANIFEST",
            (_, Some(manifest)) if args.check && manifest.digest != build::digest_of(&path)? => {
                "CHANGED"
            }
            (_, Some(manifest)) if manifest.recipe != spec.describe() => {
                "built by an earlier recipe"
            }
            _ => "built",
        };
        wrong += usize::from(args.check && ["NO MANIFEST", "CHANGED"].contains(&state));
        println!("{:<22} {state:<26} {}", spec.name, spec.describe());
    }
    if wrong > 0 {
        bail!(
            "{wrong} image(s) are not what their manifests say; remove those files and build them again"
        );
    }
    Ok(())
}

/// An image of the library, built or not.
pub struct Entry {
    /// The path of its file.
    pub path: PathBuf,
    /// Whether it belongs to the images that experiments send in order: systems as installed, with their updates, raw,
    /// on ext4; or the host's files.
    pub in_order: bool,
    /// Whether its file exists.
    pub built: bool,
}

/// The images of a set in the cache `dir`, built or not, in the order of the built-in table.
///
/// # Errors
/// When the table is invalid.
pub fn images(dir: &Path, set: Set) -> Result<Vec<Entry>> {
    let table = Table::load(None)?;
    let entry = |spec: &Spec| {
        let path = dir.join("images").join(spec.file_name());
        let in_order = match spec.recipe {
            Recipe::Debian { updates, .. } => updates && spec.fs == Fs::Ext4,
            Recipe::Host(_) => true,
            _ => false,
        };
        Entry {
            built: path.exists(),
            in_order,
            path,
        }
    };
    Ok(table.images(set).iter().map(entry).collect())
}

#[cfg(test)]
mod tests;
