//! The image library: real systems as raw ext4 images, built once and kept in a cache.
//!
//! The full set is made of Debian's packages, in the order in which the experiments send it; the
//! small set is made of the host's own files and needs no network.

mod aged;
pub mod catalog;
mod debian;
mod ext4;
pub mod manifest;
mod small;
pub mod table;

pub use catalog::images;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

/// Which images to build.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// Two small related images from the host's own files, without a network.
    Small,
    /// Every Debian system of the library.
    Full,
}

/// One image of the library.
pub struct Spec {
    /// Its name; the file is `images/NAME.raw`.
    pub name: &'static str,
    /// What it is made of.
    pub recipe: Recipe,
}

/// What an image is made of.
pub enum Recipe {
    /// A Debian suite and the packages beyond a bootable minimum.
    Debian {
        /// `bookworm`, `trixie`, `bullseye`.
        suite: &'static str,
        /// Packages on top of the plain system.
        packages: &'static [&'static str],
    },
    /// A selection of the host's files.
    Host(small::Selection),
}

/// The images of the full set, in the order in which they are sent.
pub const FULL: &[Spec] = &[
    debian("bookworm-plain", "bookworm", &[]),
    debian("bookworm-app", "bookworm", &["ruby-rails", "nodejs"]),
    debian("bookworm-db", "bookworm", &["mariadb-server"]),
    debian("bookworm-nfs", "bookworm", &["nfs-kernel-server"]),
    debian("bookworm-web", "bookworm", &["nginx", "php-fpm"]),
    debian("bookworm-dev", "bookworm", &["build-essential", "git"]),
    debian("trixie-plain", "trixie", &[]),
    debian("bullseye-plain", "bullseye", &[]),
];

/// The images of the small set.
pub const SMALL: &[Spec] = &[
    Spec {
        name: "small-one",
        recipe: Recipe::Host(small::Selection::One),
    },
    Spec {
        name: "small-two",
        recipe: Recipe::Host(small::Selection::Two),
    },
];

const fn debian(
    name: &'static str,
    suite: &'static str,
    packages: &'static [&'static str],
) -> Spec {
    Spec {
        name,
        recipe: Recipe::Debian { suite, packages },
    }
}

pub use manifest::Manifest;

/// Where the parts of the cache are.
pub struct Dirs {
    /// Finished images and manifests.
    pub images: PathBuf,
    /// Downloaded packages, a directory per suite.
    pub packages: PathBuf,
    /// Trees that are being built.
    pub work: PathBuf,
    /// Held open: its lock keeps two builds out of the same cache.
    _lock: File,
}

impl Dirs {
    /// Opens (and makes) the cache under `dir` and locks it for building.
    pub fn open(dir: &Path) -> Result<Self> {
        let at = |name: &str| -> Result<PathBuf> {
            let path = dir.join(name);
            std::fs::create_dir_all(&path)
                .with_context(|| format!("cannot make {}", path.display()))?;
            Ok(path.canonicalize()?)
        };
        let (images, packages) = (at("images")?, at("packages")?);
        let work = work_of(&images);
        std::fs::create_dir_all(&work)
            .with_context(|| format!("cannot make {}", work.display()))?;
        let lock = File::create(dir.join("lock"))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another build uses {}", dir.display()))?;
        Ok(Self {
            images,
            packages,
            work,
            _lock: lock,
        })
    }

    fn image(&self, name: &str) -> PathBuf {
        self.images.join(format!("{name}.raw"))
    }
}

/// Where a cache's trees are built. Not in the cache: they have `/proc` mounted while packages are
/// installed, and tools that walk a checkout (cargo is one) would stumble over it.
fn work_of(images: &Path) -> PathBuf {
    let temporary = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
    let id = blake3::hash(images.as_os_str().as_encoded_bytes()).to_hex();
    temporary.join(format!("drover-lab-{}", &id[..12]))
}

/// Builds what is missing of a set; a failing image is reported and the rest goes on.
pub fn build(set: Set, dir: &Path, only: &[String], list: bool) -> Result<()> {
    let specs = match set {
        Set::Small => SMALL,
        Set::Full => FULL,
    };
    for name in only {
        if !specs.iter().any(|s| s.name == name) {
            bail!("no image {name:?} in this set");
        }
    }
    let wanted = || {
        specs
            .iter()
            .filter(|s| only.is_empty() || only.iter().any(|name| name == s.name))
    };
    if list {
        for spec in wanted() {
            let path = dir.join("images").join(format!("{}.raw", spec.name));
            println!(
                "{:<18} {:<52} {}",
                spec.name,
                spec.recipe.describe(),
                have_or_missing(&path)
            );
        }
        return Ok(());
    }
    let missing = wanted().filter(|s| !dir.join("images").join(format!("{}.raw", s.name)).exists());
    eprintln!(
        "{} to build, about 1 GiB of disk and a minute each",
        missing.count()
    );
    let dirs = Dirs::open(dir)?;
    let mut failed = 0;
    for spec in wanted() {
        let path = dirs.image(spec.name);
        if !path.exists() {
            let started = Instant::now();
            if let Err(error) = build_one(spec, &dirs) {
                println!("{:<18} FAILED: {error:#}", spec.name);
                failed += 1;
                continue;
            }
            eprintln!(
                "{} built in {:.0} s",
                spec.name,
                started.elapsed().as_secs_f64()
            );
        }
        println!("{:<18} {}", spec.name, have_or_missing(&path));
    }
    if failed > 0 {
        bail!("{failed} image(s) could not be built");
    }
    Ok(())
}

/// Makes `NAME-aged` from an image of the library.
pub fn age(name: &str, dir: &Path) -> Result<()> {
    let dirs = Dirs::open(dir)?;
    let aged = format!("{name}-aged");
    if !dirs.image(&aged).exists() {
        let manifest = aged::make(&dirs, name, &aged)?;
        finish(&dirs, &aged, &manifest)?;
    }
    println!("{aged:<18} {}", have_or_missing(&dirs.image(&aged)));
    Ok(())
}

fn build_one(spec: &Spec, dirs: &Dirs) -> Result<()> {
    let part = part_of(dirs, spec.name);
    let packages = match &spec.recipe {
        Recipe::Debian { suite, packages } => {
            debian::make(dirs, spec.name, suite, packages, &part)?
        }
        Recipe::Host(selection) => {
            small::make(dirs, spec.name, *selection, &part)?;
            Vec::new()
        }
    };
    let manifest = manifest_of(spec.name, spec.recipe.describe(), &part, packages)?;
    finish(dirs, spec.name, &manifest)
}

/// The unfinished file of an image: only a finished one has its name.
fn part_of(dirs: &Dirs, name: &str) -> PathBuf {
    dirs.images.join(format!("{name}.raw.part"))
}

fn manifest_of(name: &str, recipe: String, file: &Path, packages: Vec<String>) -> Result<Manifest> {
    let meta = std::fs::metadata(file)?;
    Ok(Manifest {
        name: name.to_owned(),
        recipe,
        size_bytes: meta.len(),
        allocated_bytes: meta.blocks() * 512,
        packages,
        ..Manifest::default()
    })
}

fn finish(dirs: &Dirs, name: &str, manifest: &Manifest) -> Result<()> {
    let path = dirs.images.join(format!("{name}.json"));
    std::fs::write(path, serde_json::to_vec_pretty(manifest)?)?;
    std::fs::rename(part_of(dirs, name), dirs.image(name))?;
    Ok(())
}

fn have_or_missing(path: &Path) -> String {
    match std::fs::metadata(path) {
        Ok(meta) => format!(
            "{:>6} MiB, {:>5} MiB on disk  {}",
            meta.len() >> 20,
            (meta.blocks() * 512) >> 20,
            path.display()
        ),
        Err(_) => "not built".to_owned(),
    }
}

impl Recipe {
    fn describe(&self) -> String {
        match self {
            Self::Debian {
                suite,
                packages: [],
            } => {
                format!("Debian {suite}, minimal machine with ssh")
            }
            Self::Debian { suite, packages } => {
                format!("Debian {suite}, plain + {}", packages.join(" "))
            }
            Self::Host(small::Selection::One) => "seven eighths of some host files".to_owned(),
            Self::Host(small::Selection::Two) => "another seven eighths, a few changed".to_owned(),
        }
    }
}
