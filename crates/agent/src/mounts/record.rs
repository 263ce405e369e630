//! The durable record of a mount, written before it starts and removed by the unmount: one directory per mount, in the
//! home.
//! ```text
//! mounts/NAME/record.json   targets, front end, options, and the mount daemon's PID
//! mounts/NAME/control.sock  the daemon's control socket
//! mounts/NAME/log           the daemon's log
//! mounts/NAME/known         image metadata from the other site
//! mounts/NAME/standby       of a mount that stands by: what was written when its cache began
//! mounts/NAME/cache/        cached chunks, and dirty data
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_device::synced::CacheContents;
use drover_storage::{Directory, HostDirectory, atomic_replace, open_private};
use serde::{Deserialize, Serialize};

use super::target::{Listen, LocalDisk, Prefetch, Target};
use crate::error::{Context, Error, Result, bail};
use crate::home::{Home, make_dir};
use crate::text::now_unix;

/// How long another process may hold the lock of a mount just to check it.
const LOOK_LIMIT: Duration = Duration::from_millis(200);

/// The version of `record.json` with disks in stores.
const VERSION: u32 = 5;

/// The version with snapshots of vaults, but no disks in stores.
const SNAPSHOT_VERSION: u32 = 4;

/// The version with images of a domain other than the default one, or exports of NBD servers, but no snapshots.
const DOMAIN_VERSION: u32 = 3;

/// The version of records with local files and directories, but neither of those.
const LOCAL_VERSION: u32 = 2;

/// The version of records with images only, which earlier versions of drover can read.
const IMAGES_VERSION: u32 = 1;

/// The front end of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Front {
    /// A FUSE file, with a loop device on it if requested.
    File {
        /// Its path.
        path: PathBuf,
        /// Whether a loop device is wanted.
        device: bool,
        /// Whether the kernel scans it for partitions; records of earlier versions do not say, and it did.
        #[serde(default = "scanned")]
        partitions: bool,
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
        /// The driver.
        driver: Driver,
        /// The device, if a particular one was requested.
        device: Option<PathBuf>,
    },
}

fn scanned() -> bool {
    true
}

impl Front {
    /// Its path, address or device, for users.
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

    /// Part of the mount's name that distinguishes mounts of the same images. Independent of the kernel driver, so that
    /// a mount by the other driver finds the cache after a crash.
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

/// What a flush guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyncMode {
    /// Data is on this machine's disk, in the cache.
    Local,
    /// Data is on the other site's disk.
    Remote,
}

/// Options of a mount; the same for every front end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct How {
    /// Writes are refused.
    pub read_only: bool,
    /// No local cache.
    pub direct: bool,
    /// What a flush guarantees.
    pub sync: SyncMode,
    /// Chunk size, in bytes.
    pub chunk: u32,
    /// Whether the user requested `chunk` for a local disk: an existing disk must match it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_chunk_chosen: bool,
    /// Upper bound on cached bytes; `None` caches the whole image.
    pub cache_size: Option<u64>,
    /// What to prefetch.
    pub prefetch: Prefetch,
    /// Record what is read first, and write the profile to this file.
    pub record: Option<PathBuf>,
    /// Record what is read first, for the profile of each image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub profile: bool,
    /// How long it is recorded; `None` to the end of the mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile_for: Option<Duration>,
    /// Interval of background pushes.
    pub push_interval: Duration,
    /// Upper bound on background bytes in flight; `None` adapts it to the link.
    pub window: Option<u64>,
    /// How long a request waits for the link before it fails.
    pub give_up_after: Duration,
    /// How long the mount keeps its write lease while it is out of contact; `None` for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Duration>,
    /// The share of each disk, in percent, that has to be here before the mount is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_local: Option<u8>,
    /// It begins as one that stands by: the cache is filled beside the writer, and the mount begins when that hands its lease over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub standby: bool,
    /// With `standby`, whose lease it waits for. Its NBD server is up before, and requests wait: a hypervisor opens its disks before
    /// its machine arrives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heir_of: Option<HeirOf>,
    /// Size in bytes of a local disk to create when it does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// The image may be one of this site that is still arriving.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub launch: bool,
}

/// The site whose write lease a mount waits for: another's is none of its business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeirOf {
    /// Its key.
    pub site: [u8; 32],
    /// What that site calls this mount.
    pub mount: [u8; 16],
}

/// A mount's record, written before the mount starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Format version.
    pub version: u32,
    /// Its name in `drover mounts`.
    pub name: String,
    /// Its targets.
    pub images: Vec<Target>,
    /// Its front end.
    pub front: Front,
    /// Its options.
    pub how: How,
    /// Identifier at other sites, under which it holds its leases.
    pub id: [u8; 16],
    /// Devices that the front end created (`/dev/loop0`), once it is up.
    #[serde(default)]
    pub devices: Vec<PathBuf>,
    /// PID of the last daemon.
    #[serde(default)]
    pub process: u32,
    /// Start time, seconds since 1970.
    #[serde(default)]
    pub since_unix: i64,
    /// Boot ID under which the devices were created: after a reboot their names may have been reused.
    #[serde(default)]
    pub boot: String,
    /// The mount was ended cleanly and its cache kept.
    #[serde(default)]
    pub unmounted: bool,
    /// Its process began to hand the write lease over, and did not learn that it stays: until the site was asked, the mount is not
    /// opened from its cache alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub handing_over: bool,
    /// It was never up: only then is a disk in a store made for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub never_up: bool,
}

/// The directory of one mount. The process that serves the mount holds its lock.
#[derive(Debug, Clone)]
pub struct Place {
    dir: PathBuf,
}

/// A mount and its record.
pub type Written = (Place, Record);

/// A mount whose record is unusable, and why.
pub type Damaged = (Place, Error);

/// The lock of a mount, held by its daemon.
#[derive(Debug)]
pub struct Kept(#[expect(dead_code, reason = "the lock lasts as long as the file is open")] File);

impl Place {
    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of all mounts of a home.
    pub fn all(home: &Home) -> PathBuf {
        home.dir().join("mounts")
    }

    /// The place of a mount of these images at this front end. Deterministic, so that mounting again after a crash
    /// finds the cache.
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

    /// Every mount of a home with a usable record, by name.
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

    /// Like [`Place::list`], and the mounts with an unusable record, each with the reason.
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

    /// The cache directory of the image at this index of the record.
    pub fn cache(&self, image: usize) -> PathBuf {
        match image {
            0 => self.dir.join("cache"),
            n => self.dir.join(format!("cache-{n}")),
        }
    }

    /// The metadata file of the image at this index.
    pub fn known(&self, image: usize) -> PathBuf {
        match image {
            0 => self.dir.join("known"),
            n => self.dir.join(format!("known-{n}")),
        }
    }

    /// What the cache of a mount that stands by may be compared by; there as long as it does.
    pub fn standby(&self) -> PathBuf {
        self.dir.join("standby")
    }

    /// Dirty bytes in the mount's caches, according to their files. Only for mounts without a running daemon.
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

    /// The content of the cache of the image at this index; `None` when there is none.
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

    /// The daemon's control socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("control.sock")
    }

    /// The daemon's log.
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Reads the record; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read or has another version.
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
                "{} has version {}, but this drover supports only versions up to {VERSION}: use the drover that wrote it",
                path.display(),
                record.version
            );
        }
        Ok(Some(record))
    }

    /// Writes the record durably.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn write(&self, record: &Record) -> Result<()> {
        let path = self.dir.join("record.json");
        let text = serde_json::to_vec_pretty(record)?;
        atomic_replace(&path, &text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Creates the directory and takes its lock; `None` when a living process holds it.
    ///
    /// # Errors
    /// When the directory cannot be created or locked.
    pub fn keep(&self) -> Result<Option<Kept>> {
        make_dir(&self.dir)?;
        let path = self.lock();
        let file =
            open_private(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Kept(file))),
                // The holder may only be checking the lock.
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

    /// Whether a living process holds the lock. Creates nothing.
    pub fn is_kept(&self) -> bool {
        File::open(self.lock())
            .is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }

    /// Removes the directory, including the cache.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self) -> Result<()> {
        remove_dir(&self.dir)
    }

    /// Removes the cache of the image at this index.
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

/// The machine's boot ID; empty when unknown.
pub fn boot() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

impl Record {
    /// A record for a mount that is about to start; keeps the identifier of an earlier one.
    pub fn new(
        place: &Place,
        images: Vec<Target>,
        front: Front,
        how: How,
        before: Option<&Record>,
    ) -> Record {
        let id = match (how.heir_of, before) {
            (Some(heir), _) => heir.mount,
            (None, Some(before)) => before.id,
            (None, None) => drover_net::random_id(),
        };
        Record {
            version: images
                .iter()
                .map(|image| match (&image.domain, &image.local) {
                    (_, Some(LocalDisk::Store(_))) => VERSION,
                    (_, Some(LocalDisk::Snapshot { .. })) => SNAPSHOT_VERSION,
                    (Some(_), _) | (_, Some(LocalDisk::Nbd(_))) => DOMAIN_VERSION,
                    (None, Some(LocalDisk::File(_) | LocalDisk::Dir(_))) => LOCAL_VERSION,
                    (None, None) => IMAGES_VERSION,
                })
                .max()
                .unwrap_or(IMAGES_VERSION),
            name: place.name(),
            images,
            front,
            how,
            id,
            devices: Vec::new(),
            process: 0,
            since_unix: 0,
            boot: String::new(),
            // Cleared once the mount is up.
            unmounted: before.is_some_and(|b| b.unmounted),
            handing_over: before.is_some_and(|b| b.handing_over),
            never_up: before.is_none_or(|b| b.never_up),
        }
    }

    /// It is up in this process, with these devices.
    pub fn is_up(&mut self, devices: Vec<PathBuf>) {
        self.devices = devices;
        self.process = std::process::id();
        self.since_unix = now_unix();
        self.boot = boot();
        (self.unmounted, self.handing_over) = (false, false);
        self.never_up = false;
    }

    /// Whether `what` names this mount: its name, path, device or socket, as printed when it was mounted.
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
                // If the path is a directory, the file in it has the image's name.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_partitions_means_what_it_meant() {
        let front = |partitions| Front::File {
            path: "/mnt/web".into(),
            device: true,
            partitions,
        };
        let old = r#"{"file":{"path":"/mnt/web","device":true}}"#;
        assert_eq!(serde_json::from_str::<Front>(old).unwrap(), front(true));
        for partitions in [true, false] {
            let json = serde_json::to_string(&front(partitions)).unwrap();
            assert_eq!(
                serde_json::from_str::<Front>(&json).unwrap(),
                front(partitions)
            );
        }
    }
}
