//! What takes room at a site, file by file and each once, and what is free where it lies.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::StoreError;
use crate::catalog::Catalog;

/// What a file is for. The order is that of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Images that the site keeps.
    Images,
    /// What mounts wrote over them.
    Changes,
    /// Transfers that have not arrived.
    Transfers,
    /// Caches of mounts, and their records.
    MountCaches,
    /// The data of the sequence cache.
    SequenceData,
    /// The matcher's files.
    Index,
    /// Room kept for a full disk.
    Reserve,
    /// Catalog, settings, keys.
    Other,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Images,
        Kind::Changes,
        Kind::Transfers,
        Kind::MountCaches,
        Kind::SequenceData,
        Kind::Index,
        Kind::Reserve,
        Kind::Other,
    ];
}

/// What some files take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Room {
    /// How many.
    pub files: u64,
    /// Bytes that they say they hold.
    pub size_bytes: u64,
    /// Bytes of the disk.
    pub disk_bytes: u64,
}

impl Room {
    fn add(&mut self, about: &Metadata) {
        self.files += 1;
        self.size_bytes += about.len();
        self.disk_bytes += about.blocks() * 512;
    }
}

/// A file system that holds some of it.
#[derive(Debug, Serialize)]
pub struct FileSystem {
    /// What of the site is there.
    pub holds: Vec<&'static str>,
    /// The first of them.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// What is free.
    pub free_bytes: u64,
    /// Without what only root may use.
    pub available_bytes: u64,
}

/// Everything that `space` tells.
#[derive(Debug, Serialize)]
pub struct Space {
    /// The site's directory.
    pub home: PathBuf,
    /// What takes room, by kind.
    pub items: Vec<Item>,
    /// Of all items.
    pub total: Room,
    /// Images that were indexed where they are: their files are not drover's, and not in the total.
    pub indexed: Room,
    /// Where it lies.
    pub file_systems: Vec<FileSystem>,
    /// The most that sequence data may take.
    pub sequence_data_limit_bytes: u64,
    /// Files and directories that could not be looked at.
    pub unreadable: Vec<String>,
}

/// What files of one kind take.
#[derive(Debug, Serialize)]
pub struct Item {
    /// What they are for.
    pub kind: Kind,
    /// Where they are.
    pub path: PathBuf,
    #[serde(flatten)]
    /// What they take.
    pub room: Room,
}

impl Space {
    /// Looks at all that a site keeps. `sequence_data_limit_bytes` is told as it is.
    ///
    /// # Errors
    /// When the catalog cannot be read, or a file system is silent.
    pub fn look(
        places: Places,
        catalog: &dyn Catalog,
        sequence_data_limit_bytes: u64,
    ) -> Result<Space, StoreError> {
        let images = catalog.images()?;
        let (indexed, own): (Vec<_>, Vec<_>) = images.into_iter().partition(|i| i.external);
        let mut walk = Walk {
            images: own.iter().map(|i| i.path.clone()).collect(),
            places,
            rooms: BTreeMap::new(),
            seen: HashSet::new(),
            unreadable: Vec::new(),
        };
        let home = walk.places.home.clone();
        walk.tree(&home);
        let work = walk.places.work.clone();
        if !work.starts_with(&home) {
            walk.tree(&work);
        }
        for image in &own {
            if !image.path.starts_with(&home) {
                walk.file(&image.path);
            }
        }
        let mut elsewhere = Room::default();
        for image in &indexed {
            // One that is gone takes nothing.
            if let Ok(about) = fs::metadata(&image.path) {
                elsewhere.add(&about);
            }
        }
        let items: Vec<Item> = Kind::ALL
            .into_iter()
            .map(|kind| Item {
                kind,
                path: walk.places.path_of(kind),
                room: walk.rooms.get(&kind).copied().unwrap_or_default(),
            })
            .collect();
        let mut total = Room::default();
        for Item { room, .. } in &items {
            total.files += room.files;
            total.size_bytes += room.size_bytes;
            total.disk_bytes += room.disk_bytes;
        }
        Ok(Space {
            home,
            items,
            total,
            indexed: elsewhere,
            file_systems: file_systems(&walk.places)?,
            sequence_data_limit_bytes,
            unreadable: walk.unreadable,
        })
    }
}

/// Where a site keeps what.
#[derive(Debug, Clone)]
pub struct Places {
    /// Its directory.
    pub home: PathBuf,
    /// Delivered images.
    pub images: PathBuf,
    /// What mounts wrote over them.
    pub overlays: PathBuf,
    /// Transfers and the data of the sequence cache.
    pub work: PathBuf,
    /// Mounts of this machine.
    pub mounts: PathBuf,
    /// The matcher's files.
    pub index: PathBuf,
    /// Room kept for a full disk.
    pub reserve: PathBuf,
}

impl Places {
    fn path_of(&self, kind: Kind) -> PathBuf {
        match kind {
            Kind::Images => self.images.clone(),
            Kind::Changes => self.overlays.clone(),
            Kind::Transfers => self.work.join("transfers"),
            Kind::MountCaches => self.mounts.clone(),
            Kind::SequenceData => self.work.join("sequences.data"),
            Kind::Index => self.index.clone(),
            Kind::Reserve => self.reserve.clone(),
            Kind::Other => self.home.clone(),
        }
    }

    fn kind_of(&self, path: &Path, images: &HashSet<PathBuf>) -> Kind {
        if let Ok(inside) = path.strip_prefix(&self.work) {
            let first = inside.iter().next().unwrap_or_default();
            return match first.as_encoded_bytes() {
                b"transfers" => Kind::Transfers,
                name if name.starts_with(b"sequences.") => Kind::SequenceData,
                _ => Kind::Other,
            };
        }
        if images.contains(path) {
            return Kind::Images;
        }
        let under = [
            (&self.overlays, Kind::Changes),
            (&self.mounts, Kind::MountCaches),
            (&self.index, Kind::Index),
            (&self.reserve, Kind::Reserve),
        ];
        let found = under.into_iter().find(|(dir, _)| path.starts_with(dir));
        found.map_or(Kind::Other, |(_, kind)| kind)
    }
}

/// Counts files, those with several names once.
struct Walk {
    places: Places,
    /// The files of images.
    images: HashSet<PathBuf>,
    rooms: BTreeMap<Kind, Room>,
    seen: HashSet<(u64, u64)>,
    unreadable: Vec<String>,
}

impl Walk {
    fn tree(&mut self, root: &Path) {
        let mut dirs = vec![root.to_path_buf()];
        while let Some(dir) = dirs.pop() {
            let entries = match fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(e) => {
                    self.cannot(&dir, &e);
                    continue;
                }
            };
            for entry in entries {
                match entry.and_then(|entry| Ok((entry.path(), entry.file_type()?))) {
                    Ok((path, kind)) if kind.is_dir() => dirs.push(path),
                    Ok((path, kind)) if kind.is_file() => self.file(&path),
                    // Links and sockets take nothing worth telling.
                    Ok(_) => {}
                    Err(e) => self.cannot(&dir, &e),
                }
            }
        }
    }

    fn file(&mut self, path: &Path) {
        match fs::symlink_metadata(path) {
            Ok(about) => {
                let known = about.nlink() > 1 && !self.seen.insert((about.dev(), about.ino()));
                if !known {
                    let kind = self.places.kind_of(path, &self.images);
                    self.rooms.entry(kind).or_default().add(&about);
                }
            }
            Err(e) => self.cannot(path, &e),
        }
    }

    /// What went meanwhile takes nothing; all else is told.
    fn cannot(&mut self, path: &Path, error: &io::Error) {
        if error.kind() != io::ErrorKind::NotFound {
            self.unreadable.push(format!("{}: {error}", path.display()));
        }
    }
}

/// The file systems of the home, the images and what is beside them, each once.
fn file_systems(at: &Places) -> Result<Vec<FileSystem>, StoreError> {
    let mut found: Vec<(u64, FileSystem)> = Vec::new();
    let places = [
        ("home", &at.home),
        ("images", &at.images),
        ("work", &at.work),
        ("index", &at.index),
        ("changes", &at.overlays),
        ("mounts", &at.mounts),
    ];
    for (name, path) in places {
        let about = match fs::metadata(path) {
            Ok(about) => about,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(StoreError::file("look at", path)(e)),
        };
        if let Some((_, known)) = found.iter_mut().find(|(dev, _)| *dev == about.dev()) {
            known.holds.push(name);
            continue;
        }
        let fs = rustix::fs::statvfs(path)
            .map_err(|e| StoreError::file("look at the file system of", path)(e.into()))?;
        let known = FileSystem {
            holds: vec![name],
            path: path.clone(),
            size_bytes: fs.f_blocks.saturating_mul(fs.f_frsize),
            free_bytes: fs.f_bfree.saturating_mul(fs.f_frsize),
            available_bytes: fs.f_bavail.saturating_mul(fs.f_frsize),
        };
        found.push((about.dev(), known));
    }
    Ok(found.into_iter().map(|(_, known)| known).collect())
}
