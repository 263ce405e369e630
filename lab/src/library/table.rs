//! The table of the library (`lab/library.toml`): its images and their recipes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Which images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// Two small related images from the host's own files and an aged one, without root or a network.
    Small,
    /// Every Debian system of the library, in all its forms.
    Full,
}

/// A selection of the host's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Selection {
    /// Seven eighths of the files.
    One,
    /// Another seven eighths; a few of the common files have grown.
    Two,
}

/// All images that can be built.
#[derive(Debug)]
pub struct Table {
    full: Vec<Spec>,
    small: Vec<Spec>,
}

/// One image of the library.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Its name. The file is `images/NAME.raw`, or `images/NAME` for other formats, whose name has the extension.
    pub name: String,
    /// How it is made.
    pub recipe: Recipe,
    /// Its file system.
    pub fs: Fs,
}

/// How an image is made.
#[derive(Clone, Debug, PartialEq)]
pub enum Recipe {
    /// From Debian packages.
    Debian {
        /// `bookworm`, `trixie`, `bullseye`.
        suite: String,
        /// Packages in addition to the plain system.
        packages: Vec<String>,
        /// Whether the suite's updates and security updates are installed.
        updates: bool,
    },
    /// From a selection of the host's files.
    Host(Selection),
    /// From the files of another image, on another file system.
    SameTree(String),
    /// From another image, after some months of use.
    Aged(String),
    /// From another image, in another format.
    Converted(String),
}

/// The file system of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fs {
    /// Linux's most common.
    #[default]
    Ext4,
    /// Extents in allocation groups.
    Xfs,
    /// Copy-on-write; small files are stored inline in its trees.
    Btrfs,
}

impl fmt::Display for Fs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        })
    }
}

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Line {
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
struct Lines {
    images: Vec<Line>,
    #[serde(default)]
    small: Vec<Line>,
    /// Named sets of packages beyond a bootable minimum.
    sets: BTreeMap<String, Vec<String>>,
}

impl Table {
    /// Loads a table, by default the built-in one.
    ///
    /// # Errors
    /// When it cannot be read, or a line is invalid.
    pub fn load(file: Option<&Path>) -> Result<Self> {
        let text = match file {
            None => include_str!("../../library.toml").to_owned(),
            Some(file) => std::fs::read_to_string(file)
                .with_context(|| format!("cannot read {}", file.display()))?,
        };
        let Lines {
            images,
            small,
            sets,
        } = toml::from_str(&text)?;
        Ok(Self {
            full: resolve(images, &sets)?,
            small: resolve(small, &sets)?,
        })
    }

    /// The images of a set, in order.
    pub fn images(&self, set: Set) -> &[Spec] {
        match set {
            Set::Full => &self.full,
            Set::Small => &self.small,
        }
    }

    /// Finds an image of either set.
    pub fn find(&self, name: &str) -> Option<&Spec> {
        self.full.iter().chain(&self.small).find(|s| s.name == name)
    }

    /// The root of an image's chain of bases: itself, if it is made from packages or files.
    pub fn root<'a>(&'a self, spec: &'a Spec) -> &'a Spec {
        match spec.recipe.base().and_then(|of| self.find(of)) {
            Some(base) => self.root(base),
            None => spec,
        }
    }
}

/// Orders images after the ones they are made from, and lets them inherit the file system unless they name one.
fn resolve(mut lines: Vec<Line>, sets: &BTreeMap<String, Vec<String>>) -> Result<Vec<Spec>> {
    let mut specs: Vec<Spec> = Vec::new();
    let all = lines.len();
    while !lines.is_empty() {
        let before = lines.len();
        for line in std::mem::take(&mut lines) {
            let of = line
                .same_tree
                .as_ref()
                .or(line.ages.as_ref())
                .or(line.converts.as_ref());
            let base = of.and_then(|of| specs.iter().find(|s| s.name == *of));
            if of.is_some() && base.is_none() {
                lines.push(line);
                continue;
            }
            let name = line.name.clone();
            if specs.iter().any(|s| s.name == name) || specs.len() > all {
                bail!("image {name:?} is there twice");
            }
            if base.is_some_and(|base| base.format() != "raw") {
                bail!("image {name:?} is made from one that is not raw");
            }
            let fs = line.fs.or(base.map(|base| base.fs)).unwrap_or_default();
            let recipe = line
                .recipe(sets)
                .with_context(|| format!("image {name:?}"))?;
            specs.push(Spec { name, recipe, fs });
        }
        if lines.len() == before {
            bail!(
                "image {:?} is made from one that the set does not have",
                lines[0].name
            );
        }
    }
    Ok(specs)
}

impl Line {
    fn recipe(self, sets: &BTreeMap<String, Vec<String>>) -> Result<Recipe> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if self.name.is_empty() || !self.name.chars().all(fits) || self.name.starts_with('.') {
            bail!("a name is of lower case letters, digits, '-' and '.'");
        }
        let mut recipes = Vec::new();
        if let (Some(suite), Some(set)) = (self.suite, self.set) {
            let packages = sets
                .get(&set)
                .with_context(|| format!("there is no package set {set:?}"))?;
            let (packages, updates) = (packages.clone(), self.updates.unwrap_or(true));
            recipes.push(Recipe::Debian {
                suite,
                packages,
                updates,
            });
        }
        recipes.extend(self.host.map(Recipe::Host));
        recipes.extend(self.same_tree.map(Recipe::SameTree));
        recipes.extend(self.ages.map(Recipe::Aged));
        recipes.extend(self.converts.map(Recipe::Converted));
        let (Some(recipe), None) = (recipes.pop(), recipes.pop()) else {
            bail!("it needs one of suite and set, host, same-tree, ages, converts");
        };
        let end = self.name.rsplit_once('.').map(|(_, end)| end);
        match (&recipe, end) {
            (Recipe::Converted(_), Some("qcow2" | "vmdk" | "vhdx")) => {}
            (Recipe::Converted(_), _) => bail!("its name must end with .qcow2, .vmdk or .vhdx"),
            (_, Some(_)) => bail!("only the name of a converted image has a '.'"),
            (_, None) => {}
        }
        Ok(recipe)
    }
}

impl Spec {
    /// `raw`, or the extension of its name.
    pub fn format(&self) -> &str {
        self.name.rsplit_once('.').map_or("raw", |(_, end)| end)
    }

    /// The name of its file in the library.
    pub fn file_name(&self) -> String {
        match self.format() {
            "raw" => format!("{}.raw", self.name),
            _ => self.name.clone(),
        }
    }

    /// Its recipe as text, for display and for comparison with a manifest.
    pub fn describe(&self) -> String {
        let on = if self.fs == Fs::Ext4 {
            String::new()
        } else {
            format!(", on {}", self.fs)
        };
        match &self.recipe {
            Recipe::Debian {
                suite,
                packages,
                updates,
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
            Recipe::Converted(of) => format!("{of} as {}", self.format()),
        }
    }
}

impl Recipe {
    /// The image it is made from, which must exist first.
    pub fn base(&self) -> Option<&str> {
        match self {
            Self::SameTree(of) | Self::Aged(of) | Self::Converted(of) => Some(of),
            Self::Debian { .. } | Self::Host(_) => None,
        }
    }
}
