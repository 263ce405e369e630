//! What is remembered of a mount while it is there, and after a crash: one directory for each, in the home.
//!
//! ```text
//! mounts/NAME/record.json   what it shows, where, how, and the mount daemon
//! mounts/NAME/control.sock  that process's ear
//! mounts/NAME/log           what it had to say
//! mounts/NAME/known         what the other site said of the image
//! mounts/NAME/cache/        chunks that are here, and what was not pushed yet
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_device::synced::CacheContents;
use drover_storage::{Directory, HostDirectory, atomic_replace};
use serde::{Deserialize, Serialize};

use super::target::{Listen, Prefetch, Target};
use crate::error::{Context, Error, Result, bail};
use crate::home::{Home, make_dir};

/// How long one who only looks whether a mount is kept may hold its lock.
const LOOK_LIMIT: Duration = Duration::from_millis(200);

/// The version of `record.json` that knows local disks.
const VERSION: u32 = 2;

/// The version of a record of images alone, which older programs read.
const IMAGES_VERSION: u32 = 1;

/// How a disk is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Front {
    /// A file, by FUSE; with a loop device on it when asked for.
    File {
        /// Where.
        path: PathBuf,
        /// Whether a loop device is wanted.
        device: bool,
    },
    /// Exports of an NBD server.
    Nbd {
        /// Where it listens.
        listen: Listen,
        /// Directory with its certificates.
        tls: Option<PathBuf>,
    },
    /// A kernel block device.
    Kernel {
        /// By which driver.
        driver: Driver,
        /// Which, when that was asked for.
        device: Option<PathBuf>,
    },
}

impl Front {
    /// Where a person looks for it.
    pub fn place(&self) -> String {
        match self {
            Front::File { path, .. } => path.display().to_string(),
            Front::Nbd { listen, .. } => listen.to_string(),
            Front::Kernel { driver, device } => match device {
                Some(device) => device.display().to_string(),
                None => format!("{driver:?}").to_lowercase(),
            },
        }
    }

    /// What a mount is told from others of the same images by. By which driver does not matter: after a crash the other
    /// one finds the cache, too.
    fn key(&self) -> String {
        match self {
            Front::Kernel { device: None, .. } => "a kernel device".into(),
            other => other.place(),
        }
    }
}

/// A kernel driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    /// The kernel's NBD client.
    Nbd,
    /// A ublk device.
    Ublk,
}

/// What a flush waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyncMode {
    /// The cache on this machine's disk.
    Local,
    /// The other site's disk.
    Remote,
}

/// How an image is read and written; the same for every front end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct How {
    /// No writes are taken.
    pub read_only: bool,
    /// Nothing is kept here.
    pub direct: bool,
    /// What a flush waits for.
    pub sync: SyncMode,
    /// The unit of fetching, in bytes.
    pub chunk: u32,
    /// The most bytes of the image to keep here; all of it without.
    pub cache_size: Option<u64>,
    /// What is fetched before anybody asks.
    pub prefetch: Prefetch,
    /// Where the order in which chunks were first read is written at the end.
    pub record: Option<PathBuf>,
    /// How often what was written goes back.
    pub push_interval: Duration,
    /// Bytes under way at once in the background; what the link takes without.
    pub window: Option<u64>,
    /// How long a request waits for the link.
    pub give_up_after: Duration,
    /// Bytes of a local disk that is created when it does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// A mount, as it is written down before it is there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The version of this form.
    pub version: u32,
    /// Its name in `drover mounts`.
    pub name: String,
    /// What is shown.
    pub images: Vec<Target>,
    /// How it is shown.
    pub front: Front,
    /// How it is read and written.
    pub how: How,
    /// Its number at other sites, whose lease it holds.
    pub id: [u8; 16],
    /// Devices that the front end made (`/dev/loop0`), once it is there.
    #[serde(default)]
    pub devices: Vec<PathBuf>,
    /// The process that keeps it, last time.
    #[serde(default)]
    pub process: u32,
    /// Since when, seconds since 1970.
    #[serde(default)]
    pub since_unix: i64,
    /// The start of this machine in which the devices were made: after another one their names are somebody else's.
    #[serde(default)]
    pub boot: String,
    /// It was ended in good order, and its cache kept.
    #[serde(default)]
    pub unmounted: bool,
}

/// The directory of one mount. Whoever keeps the mount holds its lock.
#[derive(Debug, Clone)]
pub struct Place {
    dir: PathBuf,
}

/// A mount as it was written down.
pub type Written = (Place, Record);

/// A mount whose record cannot be used, and why.
pub type Damaged = (Place, Error);

/// Held by the mount daemon.
#[derive(Debug)]
pub struct Kept(#[expect(dead_code, reason = "the lock lasts as long as the file is open")] File);

impl Place {
    /// The directory of all mounts of a home.
    pub fn all(home: &Home) -> PathBuf {
        home.dir().join("mounts")
    }

    /// The place of a mount of these images at this front end: the same each time, so that a mount that died finds its
    /// cache again.
    pub fn of(home: &Home, images: &[Target], front: &Front, read_only: bool) -> Place {
        let mut hasher = blake3::Hasher::new();
        for image in images {
            hasher.update(image.to_string().as_bytes());
            hasher.update(b"\n");
        }
        hasher.update(front.key().as_bytes());
        hasher.update(if read_only { b"\nr" } else { b"\nw" });
        let digest = hasher.finalize().to_hex();
        let first = images.first().map_or("", |i| i.image.as_str());
        let short: String = first.chars().take(60).collect();
        Place {
            dir: Place::all(home).join(format!("{short}-{}", &digest[..8])),
        }
    }

    /// Every mount of a home that was written down, by name.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list(home: &Home) -> Result<Vec<(Place, Record)>> {
        let (found, damaged) = Place::list_all(home)?;
        for (_, why) in damaged {
            tracing::warn!("{why:#}");
        }
        Ok(found)
    }

    /// The same, and those whose record cannot be used, with the reason.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list_all(home: &Home) -> Result<(Vec<Written>, Vec<Damaged>)> {
        let all = Place::all(home);
        let (mut found, mut damaged) = (Vec::new(), Vec::new());
        let entries = match fs::read_dir(&all) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((found, damaged)),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", all.display())),
        };
        for entry in entries {
            let entry = entry.context("cannot read the directory of mounts")?;
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let place = Place { dir: entry.path() };
            match place.read() {
                Ok(Some(record)) => found.push((place, record)),
                Ok(None) => {}
                Err(e) => damaged.push((place, e)),
            }
        }
        found.sort_by(|a, b| a.1.name.cmp(&b.1.name));
        damaged.sort_by_key(|(place, _)| place.name());
        Ok((found, damaged))
    }

    /// The mount's name.
    pub fn name(&self) -> String {
        let name = self.dir.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// The cache of the image with that number in the record.
    pub fn cache(&self, image: usize) -> PathBuf {
        match image {
            0 => self.dir.join("cache"),
            n => self.dir.join(format!("cache-{n}")),
        }
    }

    /// What the other site said of the image with that number.
    pub fn known(&self, image: usize) -> PathBuf {
        match image {
            0 => self.dir.join("known"),
            n => self.dir.join(format!("known-{n}")),
        }
    }

    /// Bytes in the mount's caches that were not pushed, as far as is written down. For mounts that nobody keeps.
    ///
    /// # Errors
    /// When a cache cannot be read.
    pub fn dirty(&self, images: usize) -> Result<u64> {
        let mut sum = 0;
        for index in 0..images {
            sum += self.left(index)?.map_or(0, |left| left.dirty);
        }
        Ok(sum)
    }

    /// What the cache of the image with that number holds; none when there is none.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn left(&self, image: usize) -> Result<Option<CacheContents>> {
        let cache = self.cache(image);
        if !cache.exists() {
            return Ok(None);
        }
        let directory = HostDirectory::open(&cache)
            .with_context(|| format!("cannot open {}", cache.display()))?;
        let directory: Arc<dyn Directory> = Arc::new(directory);
        Ok(CacheContents::read(&directory)?)
    }

    /// Where the mount daemon listens.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("control.sock")
    }

    /// What that process says.
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// What is written down.
    ///
    /// # Errors
    /// When it cannot be read or is of another version.
    pub fn read(&self) -> Result<Option<Record>> {
        let path = self.dir.join("record.json");
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        let record: Record = serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} is damaged; move the file away and mount again at the same place, which reuses the cache beside it (`drover mounts break` at the other site ends the lease of the mount that was lost)",
                path.display()
            )
        })?;
        if !(IMAGES_VERSION..=VERSION).contains(&record.version) {
            bail!(
                "{} has version {}, this drover supports version {VERSION}: use the drover that wrote it",
                path.display(),
                record.version
            );
        }
        Ok(Some(record))
    }

    /// Writes it down, durably.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn write(&self, record: &Record) -> Result<()> {
        let path = self.dir.join("record.json");
        let text = serde_json::to_vec_pretty(record)?;
        atomic_replace(&path, &text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Makes the directory and takes its lock; none when a living process keeps the mount.
    ///
    /// # Errors
    /// When the directory cannot be made or locked.
    pub fn keep(&self) -> Result<Option<Kept>> {
        make_dir(&self.dir)?;
        let path = self.lock();
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Kept(file))),
                // Somebody may only be looking.
                Err(TryLockError::WouldBlock) if began.elapsed() < LOOK_LIMIT => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(e)) => {
                    return Err(e).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
        }
    }

    /// Whether a living process keeps it. Makes nothing.
    pub fn is_kept(&self) -> bool {
        File::open(self.lock())
            .is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }

    /// Takes the directory away, with what is in the cache.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self) -> Result<()> {
        remove_dir(&self.dir)
    }

    /// Takes the cache of the image with that number away.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove_cache(&self, image: usize) -> Result<()> {
        remove_dir(&self.cache(image))
    }
}

fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Which start of this machine it is; empty when it does not say.
pub fn boot() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

impl Record {
    /// A mount that is about to be, with the number it had when it was there before.
    pub fn new(
        place: &Place,
        images: Vec<Target>,
        front: Front,
        how: How,
        before: Option<&Record>,
    ) -> Record {
        Record {
            version: match images.iter().any(|image| image.local.is_some()) {
                true => VERSION,
                false => IMAGES_VERSION,
            },
            name: place.name(),
            images,
            front,
            how,
            id: before.map_or_else(drover_net::random_id, |b| b.id),
            devices: Vec::new(),
            process: 0,
            since_unix: 0,
            boot: String::new(),
            // Until it is there again.
            unmounted: before.is_some_and(|b| b.unmounted),
        }
    }

    /// Whether a person means this mount by `what`: its name, path, device or socket, or what was printed for it.
    pub fn is_meant_by(&self, what: &str) -> bool {
        if self.name == what || self.front.place() == what {
            return true;
        }
        let Ok(path) = std::path::absolute(what) else {
            return false;
        };
        let same = |p: &Path| p == path;
        self.devices.iter().any(|d| same(d))
            || match &self.front {
                // A directory has a file of the image's name in it.
                Front::File { path, .. } => {
                    same(path) || self.images.iter().any(|i| same(&path.join(&i.image)))
                }
                Front::Nbd {
                    listen: Listen::Unix(socket),
                    ..
                } => same(socket),
                Front::Nbd { .. } => false,
                Front::Kernel { device, .. } => device.as_deref().is_some_and(same),
            }
    }
}
