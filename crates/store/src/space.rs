//! Disk usage of a site by kind of file, each file counted once, and free space of the file systems involved.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::StoreError;
use crate::catalog::Catalog;

/// What a file is used for, in the order of display.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Delivered images.
    Images,
    /// Changes that mounts made to images.
    Changes,
    /// Unfinished transfers.
    Transfers,
    /// Caches and records of mounts.
    MountCaches,
    /// The data of the sequence cache.
    SequenceData,
    /// The matcher's files.
    Index,
    /// Space reserved for cleanup on a full disk.
    Reserve,
    /// Catalog, configuration, keys.
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

/// The space taken by a set of files.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Room {
    /// Number of files.
    pub files: u64,
    /// Apparent size in bytes.
    pub size_bytes: u64,
    /// Allocated bytes.
    pub disk_bytes: u64,
}

impl Room {
    fn add(&mut self, about: &Metadata) {
        self.files += 1;
        self.size_bytes += about.len();
        self.disk_bytes += about.blocks() * 512;
    }
}

/// A file system with files of the site.
#[derive(Debug, Serialize)]
pub struct FileSystem {
    /// What it holds.
    pub holds: Vec<&'static str>,
    /// The first path on it.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Free bytes, without those reserved for root.
    pub available_bytes: u64,
}

/// The report of `space`.
#[derive(Debug, Serialize)]
pub struct Space {
    /// The site's directory.
    pub home: PathBuf,
    /// Space taken, by kind.
    pub items: Vec<Item>,
    /// Sum of all items.
    pub total: Room,
    /// Images indexed in place: their files are not drover's, and are not in the total.
    pub indexed: Room,
    /// The file systems involved.
    pub file_systems: Vec<FileSystem>,
    /// The limit on sequence data.
    pub sequence_data_limit_bytes: u64,
    /// Files and directories that could not be examined.
    pub unreadable: Vec<String>,
}

/// The space taken by files of one kind.
#[derive(Debug, Serialize)]
pub struct Item {
    /// The kind.
    pub kind: Kind,
    /// Their directory or file.
    pub path: PathBuf,
    #[serde(flatten)]
    /// The space.
    pub room: Room,
}

impl Space {
    /// Examines all files of a site. `sequence_data_limit_bytes` is copied to the report.
    ///
    /// # Errors
    /// When the catalog cannot be read, or a file system cannot be queried.
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
            // A file that is gone takes no space.
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

/// The directories of a site.
#[derive(Debug, Clone)]
pub struct Places {
    /// The home.
    pub home: PathBuf,
    /// Delivered images.
    pub images: PathBuf,
    /// Changes that mounts made to images.
    pub overlays: PathBuf,
    /// Transfers and the data of the sequence cache.
    pub work: PathBuf,
    /// Mounts of this home.
    pub mounts: PathBuf,
    /// The matcher's files.
    pub index: PathBuf,
    /// The reserve for cleanup on a full disk.
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

/// Counts files, hard-linked ones once.
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
                    // Symbolic links and sockets take negligible space.
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

    /// Records an unreadable path, unless it has been deleted meanwhile.
    fn cannot(&mut self, path: &Path, error: &io::Error) {
        if error.kind() != io::ErrorKind::NotFound {
            self.unreadable.push(format!("{}: {error}", path.display()));
        }
    }
}

/// The file systems of the home, the images and the other directories, each once.
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
            .map_err(|e| StoreError::file("query the file system of", path)(e.into()))?;
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
