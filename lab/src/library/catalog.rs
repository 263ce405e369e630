//! What there is of a library: for experiments, which only read it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use super::Set;
use super::manifest::Manifest;
use super::table::{Format, Fs, Recipe, Spec, Table};

/// An image of the library, built or not.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// Its name: `bookworm-db`, `bookworm-db.qcow2`, `small-two-aged`.
    pub name: String,
    /// Where its file is, or will be.
    pub path: PathBuf,
    /// `system`, `tree` (another's files on another file system), `aged`, `format`, `host`.
    pub kind: &'static str,
    /// Debian's suite, where it is a system.
    pub suite: Option<String>,
    /// Its package set, where it is a system.
    pub set: Option<String>,
    /// What it has on it.
    pub fs: Fs,
    /// What its file is.
    pub format: Format,
    /// The image that it was made from, by name.
    pub derived_from: Option<String>,
    /// Whether it is one of those that experiments send in order: systems as they were installed, with their updates,
    /// raw, on ext4.
    pub in_order: bool,
    /// What it is made of, in words.
    pub recipe: String,
    /// Whether its file is there.
    pub built: bool,
    /// What is written beside it.
    pub manifest: Option<Manifest>,
}

/// The images of a set in the cache `dir`, built or not, in the order of the lab's own table.
///
/// # Errors
/// When the table or a manifest makes no sense.
pub fn images(dir: &Path, set: Set) -> Result<Vec<Entry>> {
    entries(dir, &Table::load(None)?, set)
}

/// As [`images`], of another table.
///
/// # Errors
/// When a manifest makes no sense.
pub fn entries(dir: &Path, table: &Table, set: Set) -> Result<Vec<Entry>> {
    table
        .images(set)
        .iter()
        .map(|spec| entry(dir, spec))
        .collect()
}

fn entry(dir: &Path, spec: &Spec) -> Result<Entry> {
    let images = dir.join("images");
    let path = images.join(spec.file_name());
    let manifest = Manifest::read(&images.join(format!("{}.json", spec.name)))?;
    let (suite, set, updates) = match &spec.recipe {
        Recipe::Debian {
            suite,
            set,
            updates,
            ..
        } => (Some(suite.clone()), Some(set.clone()), *updates),
        _ => (None, None, true),
    };
    Ok(Entry {
        name: spec.name.clone(),
        built: path.exists(),
        path,
        kind: spec.recipe.kind(),
        in_order: suite.is_some() && updates && spec.fs == Fs::Ext4,
        suite,
        set,
        fs: spec.fs,
        format: spec.format,
        derived_from: spec.recipe.base().map(str::to_owned),
        recipe: spec.describe(),
        manifest,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_say_what_is_there_and_from_what_it_comes() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("images")).unwrap();
        std::fs::write(dir.path().join("images/small-two.raw"), b"x").unwrap();
        let small = images(dir.path(), Set::Small).unwrap();
        let built: Vec<bool> = small.iter().map(|e| e.built).collect();
        assert_eq!(built, [false, true, false]);
        assert_eq!(small[2].derived_from.as_deref(), Some("small-two"));
        let full = images(dir.path(), Set::Full).unwrap();
        let in_order = full.iter().filter(|e| e.in_order);
        assert!(
            in_order
                .clone()
                .all(|e| e.kind == "system" && e.format == Format::Raw)
        );
        assert!(in_order.count() >= 9);
        assert!(
            full.iter()
                .any(|e| e.name == "bookworm-db-release" && !e.in_order)
        );
    }
}
