//! The table of the library (`lab/library.toml`): what images there are and what each is made of.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::Set;
use super::small::Selection;

const BUILT_IN: &str = include_str!("../../library.toml");

/// All that can be built.
#[derive(Debug)]
pub struct Table {
    /// Package sets by name.
    pub sets: BTreeMap<String, PackageSet>,
    full: Vec<Spec>,
    small: Vec<Spec>,
}

/// Packages beyond a bootable minimum, and what they are expected to cost beyond it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackageSet {
    /// Their names.
    pub packages: Vec<String>,
    /// MiB in the image.
    #[serde(default)]
    pub disk: u64,
    /// MiB to download.
    #[serde(default)]
    pub download: u64,
    /// Seconds to install.
    #[serde(default)]
    pub seconds: u64,
}

/// One image of the library.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Its name. A raw image is `images/NAME.raw`; one in another format has it in its name: `images/NAME`.
    pub name: String,
    /// What it is made of.
    pub recipe: Recipe,
    /// What it has on it.
    pub fs: Fs,
    /// What its file is.
    pub format: Format,
}

/// What an image is made of.
#[derive(Clone, Debug, PartialEq)]
pub enum Recipe {
    /// Debian's packages.
    Debian {
        /// `bookworm`, `trixie`, `bullseye`.
        suite: String,
        /// The name of the package set.
        set: String,
        /// Packages on top of the plain system.
        packages: Vec<String>,
        /// Whether the suite's updates and security updates are in it.
        updates: bool,
    },
    /// A selection of the host's files.
    Host(Selection),
    /// The files of an image on another file system.
    SameTree(String),
    /// An image after some months of use.
    Aged(String),
    /// An image in another format.
    Converted(String),
}

/// File systems of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fs {
    /// Linux' most common.
    #[default]
    Ext4,
    /// Extents in allocation groups.
    Xfs,
    /// Copy on write; small files lie inside its trees.
    Btrfs,
}

impl fmt::Display for Fs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        })
    }
}

/// Formats of image files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The disk as it is, with holes.
    #[default]
    Raw,
    /// QEMU's, clusters of 64 KiB, not compressed.
    Qcow2,
    /// VMware's, one sparse file (`monolithicSparse`).
    Vmdk,
    /// Hyper-V's, dynamic.
    Vhdx,
}

impl Format {
    /// Its name, for file names and for `qemu-img`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Row {
    name: String,
    suite: Option<String>,
    set: Option<String>,
    updates: Option<bool>,
    host: Option<Selection>,
    same_tree: Option<String>,
    ages: Option<String>,
    converts: Option<String>,
    fs: Option<Fs>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    images: Vec<Row>,
    #[serde(default)]
    small: Vec<Row>,
    sets: BTreeMap<String, PackageSet>,
}

impl Table {
    /// Reads a table, or the one that the lab came with.
    ///
    /// # Errors
    /// When it cannot be read, or a line makes no sense.
    pub fn load(file: Option<&Path>) -> Result<Self> {
        match file {
            None => Self::parse(BUILT_IN).context("the lab's own library.toml"),
            Some(file) => {
                let text = std::fs::read_to_string(file)
                    .with_context(|| format!("cannot read {}", file.display()))?;
                Self::parse(&text).with_context(|| format!("in {}", file.display()))
            }
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let rows: Rows = toml::from_str(text)?;
        let full = resolve(rows.images, &rows.sets)?;
        let small = resolve(rows.small, &rows.sets)?;
        if let Some(twice) = small.iter().find(|s| full.iter().any(|f| f.name == s.name)) {
            bail!("image {:?} is there twice", twice.name);
        }
        Ok(Self {
            sets: rows.sets,
            full,
            small,
        })
    }

    /// The images of a set, in order.
    pub fn images(&self, set: Set) -> &[Spec] {
        match set {
            Set::Full => &self.full,
            Set::Small => &self.small,
        }
    }

    /// The set that an image is in.
    pub fn set_of(&self, name: &str) -> Set {
        if self.small.iter().any(|s| s.name == name) {
            Set::Small
        } else {
            Set::Full
        }
    }

    /// An image of either set.
    pub fn find(&self, name: &str) -> Option<&Spec> {
        self.full.iter().chain(&self.small).find(|s| s.name == name)
    }
}

fn resolve(rows: Vec<Row>, sets: &BTreeMap<String, PackageSet>) -> Result<Vec<Spec>> {
    let mut specs: Vec<Spec> = Vec::new();
    for row in rows {
        let name = row.name.clone();
        let spec = row
            .resolve(sets)
            .with_context(|| format!("image {name:?}"))?;
        if specs.iter().any(|s| s.name == name) {
            bail!("image {name:?} is there twice");
        }
        specs.push(spec);
    }
    let base_of = |spec: &Spec| spec.recipe.base().map(str::to_owned);
    for at in 0..specs.len() {
        let name = specs[at].name.clone();
        let mut seen = 0;
        let mut base = base_of(&specs[at]);
        while let Some(of) = base {
            let found = specs.iter().find(|s| s.name == of);
            let Some(found) = found else {
                bail!("image {name:?} is made from {of:?}, which the set does not have");
            };
            if found.format != Format::Raw {
                bail!("image {name:?} is made from {of:?}, which is not raw");
            }
            seen += 1;
            if seen > specs.len() {
                bail!("image {name:?} is made from itself");
            }
            base = base_of(found);
        }
    }
    // What is made from another lies on the same file system unless it says so.
    for at in 0..specs.len() {
        if let Recipe::Aged(of) | Recipe::Converted(of) = &specs[at].recipe
            && let Some(fs) = specs.iter().find(|s| s.name == *of).map(|s| s.fs)
        {
            specs[at].fs = fs;
        }
    }
    Ok(specs)
}

impl Row {
    fn resolve(self, sets: &BTreeMap<String, PackageSet>) -> Result<Spec> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if self.name.is_empty() || !self.name.chars().all(fits) || self.name.starts_with('.') {
            bail!("a name is of lower case letters, digits, '-' and '.'");
        }
        let mut recipes = Vec::new();
        if let (Some(suite), Some(set)) = (self.suite.clone(), self.set.clone()) {
            let packages = sets
                .get(&set)
                .with_context(|| format!("there is no package set {set:?}"))?
                .packages
                .clone();
            let updates = self.updates.unwrap_or(true);
            recipes.push(Recipe::Debian {
                suite,
                set,
                packages,
                updates,
            });
        } else if self.suite.is_some() || self.set.is_some() {
            bail!("a Debian system needs both suite and set");
        }
        recipes.extend(self.host.map(Recipe::Host));
        recipes.extend(self.same_tree.map(Recipe::SameTree));
        recipes.extend(self.ages.map(Recipe::Aged));
        recipes.extend(self.converts.map(Recipe::Converted));
        let (Some(recipe), None) = (recipes.pop(), recipes.pop()) else {
            bail!("it needs one of suite and set, host, same-tree, ages, converts");
        };
        if self.updates.is_some() && !matches!(recipe, Recipe::Debian { .. }) {
            bail!("updates is for a suite");
        }
        if self.fs.is_some() && matches!(recipe, Recipe::Aged(_) | Recipe::Converted(_)) {
            bail!("it has the file system of what it is made from");
        }
        let format = match (&recipe, self.name.rsplit_once('.').map(|(_, end)| end)) {
            (Recipe::Converted(_), Some("qcow2")) => Format::Qcow2,
            (Recipe::Converted(_), Some("vmdk")) => Format::Vmdk,
            (Recipe::Converted(_), Some("vhdx")) => Format::Vhdx,
            (Recipe::Converted(_), _) => bail!("its name must end with .qcow2, .vmdk or .vhdx"),
            (_, None) => Format::Raw,
            (_, Some(_)) => bail!("only the name of a converted image has a '.'"),
        };
        Ok(Spec {
            name: self.name,
            recipe,
            fs: self.fs.unwrap_or_default(),
            format,
        })
    }
}

impl Spec {
    /// The name of its file in the library.
    pub fn file_name(&self) -> String {
        match self.format {
            Format::Raw => format!("{}.raw", self.name),
            _ => self.name.clone(),
        }
    }

    /// What it is made of, for people and for the comparison with a manifest.
    pub fn describe(&self) -> String {
        let on = match self.fs {
            Fs::Ext4 => String::new(),
            fs => format!(", on {fs}"),
        };
        match &self.recipe {
            Recipe::Debian {
                suite,
                packages,
                updates,
                ..
            } => {
                let what = match packages.as_slice() {
                    [] => "minimal machine with ssh".to_owned(),
                    some => format!("plain + {}", some.join(" ")),
                };
                let without = if *updates { "" } else { ", without updates" };
                format!("Debian {suite}, {what}{without}{on}")
            }
            Recipe::Host(Selection::One) => format!("seven eighths of some host files{on}"),
            Recipe::Host(Selection::Two) => format!("another seven eighths, a few changed{on}"),
            Recipe::SameTree(of) => format!("the files of {of}{on}"),
            Recipe::Aged(of) => format!("{of} some months later"),
            Recipe::Converted(of) => format!("{of} as {}", self.format),
        }
    }
}

impl Recipe {
    /// The image that must be there first.
    pub fn base(&self) -> Option<&str> {
        match self {
            Self::SameTree(of) | Self::Aged(of) | Self::Converted(of) => Some(of),
            Self::Debian { .. } | Self::Host(_) => None,
        }
    }

    /// `system`, `tree`, `aged`, `format` or `host`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Debian { .. } => "system",
            Self::Host(_) => "host",
            Self::SameTree(_) => "tree",
            Self::Aged(_) => "aged",
            Self::Converted(_) => "format",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(images: &str) -> String {
        let text = format!("images = [{images}]\n[sets]\nplain = {{ packages = [] }}\n");
        format!("{:#}", Table::parse(&text).unwrap_err())
    }

    #[test]
    fn the_table_that_the_lab_came_with_is_sound() {
        let table = Table::load(None).unwrap();
        let full = table.images(Set::Full);
        for suite in ["bullseye", "bookworm", "trixie"] {
            assert!(full.iter().any(|s| s.name == format!("{suite}-plain")));
        }
        for set in ["plain", "app", "db", "nfs", "web", "dev", "pg"] {
            let name = format!("bookworm-{set}");
            assert!(full.iter().any(|s| s.name == name), "{name}");
        }
        let qcow2 = table.find("bookworm-db.qcow2").unwrap();
        assert_eq!(
            (qcow2.format, qcow2.file_name().as_str()),
            (Format::Qcow2, "bookworm-db.qcow2")
        );
        let aged = table.find("small-two-aged").unwrap();
        assert_eq!(
            (aged.recipe.base(), aged.file_name().as_str()),
            (Some("small-two"), "small-two-aged.raw")
        );
        assert_eq!(table.images(Set::Small).len(), 3);
    }

    #[test]
    fn one_line_adds_an_image() {
        let text = "images = [\n{ name = \"a\", suite = \"trixie\", set = \"x\", fs = \"xfs\" },\n\
            { name = \"b\", ages = \"a\" },\n]\n[sets]\nx = { packages = [\"vim\"] }\n";
        let table = Table::parse(text).unwrap();
        assert_eq!(
            table.images(Set::Full)[0].describe(),
            "Debian trixie, plain + vim, on xfs"
        );
        assert_eq!(table.find("b").unwrap().fs, Fs::Xfs);
    }

    #[test]
    fn lines_that_make_no_sense_are_refused_by_name() {
        for (line, says) in [
            (r#"{ name = "a" }"#, "needs one of"),
            (r#"{ name = "../a", host = "one" }"#, "lower case"),
            (r#"{ name = "a", suite = "bookworm" }"#, "both"),
            (
                r#"{ name = "a", suite = "bookworm", set = "no" }"#,
                "no package set",
            ),
            (r#"{ name = "a", ages = "b" }"#, "does not have"),
            (r#"{ name = "a", ages = "a" }"#, "from itself"),
            (
                r#"{ name = "a", host = "one", ages = "a" }"#,
                "needs one of",
            ),
            (
                r#"{ name = "a", host = "one" }, { name = "a", host = "two" }"#,
                "twice",
            ),
            (
                r#"{ name = "a", host = "one" }, { name = "b", converts = "a" }"#,
                "must end",
            ),
            (r#"{ name = "a", host = "one", fs = "zfs" }"#, "zfs"),
            (r#"{ name = "a", host = "one", flavour = "x" }"#, "flavour"),
            (
                r#"{ name = "a", host = "one" }, { name = "b.vmdk", converts = "a" }, { name = "c", ages = "b.vmdk" }"#,
                "not raw",
            ),
        ] {
            let said = refused(line);
            assert!(said.contains(says), "{line}: {said}");
        }
    }
}
