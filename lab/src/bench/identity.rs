//! What a result depends on: as long as it is the same, a kept result holds.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::{Case, Experiment, Need, Subject};
use crate::experiments::Lab;
use crate::library::{self, Set};
use crate::report::Machine;
use crate::shell;

/// What a result depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The build of drover, or the rival's name and version.
    pub subject: String,
    /// How many images, and a digest of their sizes, dates and manifests.
    pub images: String,
    /// Where it was measured.
    pub machine: Machine,
}

impl Identity {
    /// What in `self` is not as in `now`, in words.
    pub fn differs(&self, now: &Self) -> Option<&'static str> {
        if self.subject != now.subject {
            Some("another build or version")
        } else if self.images != now.images {
            Some("other images")
        } else if self.machine != now.machine {
            Some("another machine")
        } else {
            None
        }
    }
}

/// Finds identities, reading each file once.
pub struct Identities<'a> {
    lab: &'a Lab,
    machine: Machine,
    drover: String,
    set: Vec<PathBuf>,
    seen: BTreeMap<PathBuf, String>,
}

impl<'a> Identities<'a> {
    /// Of this machine and this build.
    pub fn new(lab: &'a Lab) -> Self {
        Self {
            lab,
            machine: Machine::this(),
            drover: build_of(lab),
            set: set(lab),
            seen: BTreeMap::new(),
        }
    }

    /// What the case's result will depend on.
    pub fn of(&mut self, experiment: &dyn Experiment, case: &Case) -> Identity {
        let subject = match &case.subject {
            Subject::Drover => self.drover.clone(),
            Subject::Rival(version) => version.clone(),
            Subject::Images => "the images".to_owned(),
            Subject::Lab => "the lab".to_owned(),
        };
        let images = read(self.lab, experiment, case, &self.set);
        let mut digest = blake3::Hasher::new();
        for image in &images {
            let line = self
                .seen
                .entry(image.clone())
                .or_insert_with(|| describe(image));
            digest.update(line.as_bytes());
        }
        let images = match images.len() {
            0 => "none".to_owned(),
            count => format!("{count} images, {}", short(digest.finalize())),
        };
        Identity {
            subject,
            images,
            machine: self.machine.clone(),
        }
    }
}

/// The images that a case reads; `set` is those of the library.
pub fn read(lab: &Lab, experiment: &dyn Experiment, case: &Case, set: &[PathBuf]) -> Vec<PathBuf> {
    experiment.images(lab, case).unwrap_or_else(|| {
        if case.needs.contains(&Need::Library) {
            set.to_vec()
        } else {
            Vec::new()
        }
    })
}

/// Every image of the library that is built, or of its small set.
pub fn set(lab: &Lab) -> Vec<PathBuf> {
    let set = if lab.small { Set::Small } else { Set::Full };
    let images = library::images(&lab.common.dir, set).unwrap_or_else(|error| {
        eprintln!("WARNING the library: {error:#}");
        Vec::new()
    });
    let built = images.into_iter().filter(|image| image.built);
    built.map(|image| image.path).collect()
}

/// What the images take on disk.
pub fn allocated_bytes(images: &[PathBuf]) -> u64 {
    images
        .iter()
        .filter_map(|path| Some(fs::metadata(path).ok()?.blocks() * 512))
        .sum()
}

/// The commit of the checkout, and whether something but documents differs from it.
pub fn commit() -> String {
    let git = |args: &[&str]| {
        let output = shell::run(Command::new("git").args(args)).ok()?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    let Some(commit) = git(&["describe", "--always", "--tags", "--abbrev=10"]) else {
        return "unknown".to_owned();
    };
    // The documents are what a run itself writes.
    let changed = git(&[
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":(top,exclude)docs",
    ]);
    match changed.as_deref() {
        Some("") => commit,
        _ => format!("{commit}-dirty"),
    }
}

/// The binary under test; experiments inside the lab's own process are measured with the crates it was built from, and
/// both are built together. Without it, the lab's own binary.
fn build_of(lab: &Lab) -> String {
    let of = |path: &Path| {
        let mut digest = blake3::Hasher::new();
        digest.update_reader(std::fs::File::open(path).ok()?).ok()?;
        Some(short(digest.finalize()))
    };
    if let Some(digest) = of(&lab.common.drover) {
        return format!("drover {digest}");
    }
    let own = std::env::current_exe().ok().and_then(|path| of(&path));
    format!("lab {}", own.as_deref().unwrap_or("unknown"))
}

/// A line that is another when the image is. A copy has another date and is taken for another image.
fn describe(image: &Path) -> String {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    let (size, modified) = fs::metadata(image).map_or((0, 0), |m| (m.len(), m.mtime()));
    let manifest = fs::read(image.with_extension("json")).unwrap_or_default();
    format!(
        "{name} {size} {modified} {}\n",
        short(blake3::hash(&manifest))
    )
}

fn short(digest: blake3::Hash) -> String {
    digest.to_hex()[..16].to_owned()
}
