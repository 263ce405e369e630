//! What is written beside an image: what it is, from what it was made and with what, so that it can be made again
//! and told from another.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};

use super::table::{Format, Fs};

/// Raised when the same recipe is made in another way.
pub const BUILDER: u32 = 2;

/// What is written beside an image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The image's name.
    pub name: String,
    /// What it was made of, as its line of the table says it in words.
    pub recipe: String,
    /// The size that the file has.
    pub size_bytes: u64,
    /// What the file takes on disk.
    pub allocated_bytes: u64,
    /// Which generation of the lab's builder made it.
    #[serde(default = "first_builder")]
    pub builder: u32,
    /// The BLAKE3 of the file; empty from builders that did not say it.
    #[serde(default)]
    pub digest: String,
    /// True when the digest was not taken by the builder but later, of a file that had none.
    #[serde(default)]
    pub digest_taken_later: bool,
    /// The BLAKE3 over the names, kinds, modes, owners and contents of all files but those that are random by
    /// their nature (host keys and the like): equal when an image was rebuilt from the same packages.
    #[serde(default)]
    pub files_digest: String,
    /// Its file system.
    #[serde(default)]
    pub fs: Fs,
    /// Its format.
    #[serde(default)]
    pub format: Format,
    /// How the files came onto the file system, and by what rights.
    #[serde(default)]
    pub written_by: String,
    /// The file system's UUID.
    #[serde(default)]
    pub fs_uuid: String,
    /// What all that is random about it grows from.
    #[serde(default)]
    pub seed: String,
    /// The time at which the machine was installed, by its own clock: seconds since 1970.
    #[serde(default)]
    pub installed_at: u64,
    /// The image that it was made from, and that one's digest.
    #[serde(default)]
    pub made_from: Option<Base>,
    /// What was done to it, with numbers, and what could not be done and why.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Versions of the tools that made it.
    #[serde(default)]
    pub tools: BTreeMap<String, String>,
    /// `package version`, one a line, sorted; empty where it was not made of packages.
    #[serde(default)]
    pub packages: Vec<String>,
}

/// The image that another was made from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Base {
    /// Its name.
    pub name: String,
    /// Its digest then.
    pub digest: String,
}

fn first_builder() -> u32 {
    1
}

impl Manifest {
    /// Reads one; `None` where there is none.
    ///
    /// # Errors
    /// When it is no manifest.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .with_context(|| format!("{} is no manifest", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Writes it in one step.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let part = path.with_extension("json.part");
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        fs::write(&part, bytes)
            .and_then(|()| fs::rename(&part, path))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Fills in what the finished file says: size, room, digest.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn measure(&mut self, file: &Path) -> Result<()> {
        let meta = fs::metadata(file)?;
        self.size_bytes = meta.len();
        self.allocated_bytes = meta.blocks() * 512;
        self.digest = digest_of(file)?;
        Ok(())
    }
}

/// The BLAKE3 of a file. Holes are hashed as zeros without being read.
///
/// # Errors
/// When it cannot be read.
pub fn digest_of(path: &Path) -> Result<String> {
    const STEP: usize = 1 << 20;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let size = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; STEP];
    let zeros = vec![0; STEP];
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data.min(size),
            Err(rustix::io::Errno::NXIO) => size,
            Err(error) => return Err(error).context("cannot look for data"),
        };
        while at < data {
            let step = (data - at).min(STEP as u64);
            hasher.update(&zeros[..usize::try_from(step)?]);
            at += step;
        }
        let hole = match rustix::fs::seek(&file, SeekFrom::Hole(at)) {
            Ok(hole) => hole.min(size),
            Err(_) => size,
        };
        while at < hole {
            let step = usize::try_from((hole - at).min(STEP as u64))?;
            file.read_exact_at(&mut buffer[..step], at)
                .with_context(|| format!("cannot read {}", path.display()))?;
            hasher.update(&buffer[..step]);
            at += step as u64;
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_hash_as_the_zeros_that_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = File::create(&path).unwrap();
        file.set_len(5 << 20).unwrap();
        file.write_all_at(b"data", 3 << 20).unwrap();
        let plain = blake3::hash(&fs::read(&path).unwrap()).to_hex().to_string();
        assert_eq!(digest_of(&path).unwrap(), plain);
        let empty = dir.path().join("empty");
        File::create(&empty).unwrap();
        assert_eq!(
            digest_of(&empty).unwrap(),
            blake3::hash(b"").to_hex().to_string()
        );
    }

    #[test]
    fn manifests_of_the_first_builder_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let text =
            r#"{"name":"a","recipe":"r","size_bytes":5,"allocated_bytes":5,"packages":["x 1"]}"#;
        fs::write(&path, text).unwrap();
        let mut manifest = Manifest::read(&path).unwrap().unwrap();
        assert_eq!((manifest.builder, manifest.digest.as_str()), (1, ""));
        manifest.digest = "00".into();
        manifest.write(&path).unwrap();
        assert_eq!(Manifest::read(&path).unwrap().unwrap(), manifest);
        assert!(
            Manifest::read(&dir.path().join("b.json"))
                .unwrap()
                .is_none()
        );
        fs::write(&path, "{").unwrap();
        assert!(Manifest::read(&path).is_err());
    }
}
