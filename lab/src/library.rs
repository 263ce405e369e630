//! The image library: real systems as disk images, built once and kept in a cache.
//!
//! What there is stands in a table (`lab/library.toml`). The full set is made of Debian's packages; the small set is
//! made of the host's own files and needs neither root nor a network. Experiments ask [`images`] what there is.

mod aged;
mod build;
mod cache;
pub mod catalog;
mod convert;
mod debian;
mod ext4;
mod filesystem;
mod jail;
mod manifest;
mod mount;
mod plan;
mod progress;
mod small;
mod state;
mod table;

pub use catalog::images;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use table::{Recipe, Spec, Table};

/// Which images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// Two small related images from the host's own files and an aged one, without root or a network.
    Small,
    /// Every Debian system of the library, in all its forms.
    Full,
}

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
    /// Read every image and compare it with its manifest, and that with the table, and stop.
    #[arg(long)]
    check: bool,
    /// With --list or --check: print JSON.
    #[arg(long)]
    json: bool,
}

/// Builds what is missing of a set, or says what there is.
///
/// # Errors
/// When an image could not be built, after the others; when there is no room for all.
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
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|n| n == name);
    if args.list || args.check {
        let mut entries = catalog::entries(&args.dir, &table, args.set)?;
        entries.retain(|e| wanted(&e.name));
        if args.check {
            return state::check(&entries, args.json);
        }
        state::list(&entries, args.json)?;
        let missing = entries.iter().filter(|e| !e.built);
        let missing: Vec<&Spec> = missing.filter_map(|e| table.find(&e.name)).collect();
        if !missing.is_empty() && !args.json {
            plan::print(&table, &missing, &args.dir);
        }
        return Ok(());
    }
    let chosen: Vec<&Spec> = specs.iter().filter(|s| wanted(&s.name)).collect();
    build::all(&table, &chosen, &args.dir)
}

/// Makes `NAME-aged` from any image of the library, whether the table has a line for it or not.
///
/// # Errors
/// When there is no such image or it cannot be aged.
pub fn age(name: &str, dir: &Path) -> Result<()> {
    let table = Table::load(None)?;
    let base = table
        .find(name)
        .with_context(|| format!("no image {name:?} in the library: lab library --list"))?;
    let spec = Spec {
        name: format!("{name}-aged"),
        recipe: Recipe::Aged(name.to_owned()),
        ..base.clone()
    };
    build::all(&table, &[&spec], dir)
}
