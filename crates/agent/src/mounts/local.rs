//! Local files and directories, exports of NBD servers, and snapshots of vaults ([`super::snapshots`]), as disks. Reads
//! and writes go directly to them: there is no cache, but for snapshots in object stores, and no lease; a lock prevents a second mount of a file or directory.

use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::nbd::{NbdAddress, NbdDevice, NbdOptions};
use drover_device::backend::{DirectoryDevice, DirectoryOptions, FileDevice, MAX_CHUNKS};
use drover_device::builder::Stack;
use drover_device::remote::Shape;
use drover_image::VirtualDisk;
use drover_net::DEFAULT_DOMAIN;
use drover_storage::HostDirectory;
use drover_store::Catalog;
use drover_vault::Hold;

use super::cached::Cached;
use super::record::{How, Place};
use super::snapshots::{self, Holder};
use super::target::LocalDisk;
use crate::error::{Context, Error, Result, bail};
use crate::home::Home;
use crate::site;
use crate::text::bytes;

/// The largest chunk size of a directory, in bytes.
const MAX_CHUNK: u64 = 4 << 20;

/// How long locking a disk is retried: an unmount in progress, or udev probing a device, holds the lock only briefly.
const LOCK_LIMIT: Duration = Duration::from_secs(1);

/// How long letting go of a snapshot may take; a hold that stays ends by itself.
const HOLD_LIMIT: Duration = Duration::from_secs(10);

/// Refuses files that belong to the site, before anything is created.
///
/// # Errors
/// When the disk is refused, with the way out.
pub fn check(home: &Home, disk: &LocalDisk, how: &How) -> Result<()> {
    let Some(path) = disk.path().map(real) else {
        return Ok(());
    };
    // Once the directory before `..` is created, the path would lead elsewhere.
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(Error::usage(format!(
            "{disk}: `..` cannot follow a directory that does not exist"
        )));
    }
    for own in [home.dir(), &home.images_dir()] {
        if path.starts_with(real(own)) {
            return Err(Error::refused(format!(
                "{disk} is in this site's own directory {}; an image of the site is mounted by its name (`drover images` lists them)",
                own.display()
            )));
        }
    }
    let Ok(ours) = path.metadata() else {
        return Ok(());
    };
    if how.read_only || !ours.is_file() {
        return Ok(());
    }
    for domain in home.all_domains()? {
        let images = site::look_at_catalog(&domain)?.images()?;
        if let Some(image) = images.iter().find(|image| is_read_by(&ours, &image.path)) {
            let option = match domain.domain_name() {
                DEFAULT_DOMAIN => String::new(),
                name => format!(" --domain {name}"),
            };
            return Err(Error::refused(format!(
                "{disk} is a file of this site's image {0}, which writes would damage; `drover mount {0}{option}` stores writes separately, and a read-only mount is possible",
                image.name
            )));
        }
    }
    Ok(())
}

/// Whether a file is the image itself or one that the image is read from: a backing file or an external data file.
pub fn is_read_by(file: &Metadata, image: &Path) -> bool {
    let same = |path: &Path| {
        let theirs = path.metadata();
        theirs.is_ok_and(|theirs| (theirs.dev(), theirs.ino()) == (file.dev(), file.ino()))
    };
    // An image that cannot be opened reads no files.
    same(image)
        || VirtualDisk::open(image)
            .is_ok_and(|disk| disk.stamps().iter().any(|(path, _)| same(path)))
}

/// Refuses to read an image while a mount of this home writes to it as a local disk: the data read would not be
/// consistent.
///
/// # Errors
/// When such a mount exists; the error names it.
pub fn refuse_written(home: &Home, image: &Path) -> Result<()> {
    // A domain has no mounts of its own.
    let home = home.of_site().unwrap_or_else(|| home.clone());
    for (place, record) in Place::list(&home)? {
        let mut files = record.images.iter().filter_map(|i| match &i.local {
            Some(LocalDisk::File(path)) => path.metadata().ok(),
            _ => None,
        });
        if !record.how.read_only && files.any(|file| is_read_by(&file, image)) && place.is_kept() {
            return Err(Error::refused(format!(
                "{} is mounted for writing at {}: `drover unmount {}` ends that",
                image.display(),
                record.front.place(),
                record.name
            )));
        }
    }
    Ok(())
}

/// The path with symbolic links resolved, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let existing = path.ancestors().find_map(|above| {
        let real = above.canonicalize().ok()?;
        // Joining an empty path would add a trailing slash.
        Some(match path.strip_prefix(above).ok()? {
            rest if rest.as_os_str().is_empty() => real,
            rest => real.join(rest),
        })
    });
    existing.unwrap_or_else(|| path.to_owned())
}

/// What keeps a disk open, and locks it against other mounts.
pub enum Lock {
    /// The lock of an open file, shared with its device.
    File(File),
    /// The lock of a directory.
    Directory(Arc<DirectoryDevice>),
    /// No lock: who may connect is the server's affair.
    Server(Arc<NbdDevice>),
    /// A snapshot is held in its vault; in an object store, there is a cache before it. Its changes are locked while the
    /// device is open.
    Snapshot(Arc<Hold>, Option<Cached>),
}

impl Lock {
    /// Releases the lock; call it after the last request.
    pub fn release(&self) {
        match self {
            Lock::File(file) => {
                if let Err(e) = file.unlock() {
                    tracing::warn!("cannot unlock a disk: {e}");
                }
            }
            Lock::Directory(device) => device.unlock(),
            Lock::Server(_) => {}
            Lock::Snapshot(hold, cached) => {
                if let Some(cached) = cached {
                    cached.close();
                }
                release(hold);
            }
        }
    }

    /// Bytes of the disk that are on this host, if not all are.
    pub fn local(&self) -> Option<u64> {
        match self {
            Lock::Snapshot(_, cached) => cached.as_ref().map(Cached::local),
            Lock::File(_) | Lock::Directory(_) | Lock::Server(_) => None,
        }
    }

    /// Why the disk can no longer be used, if it cannot.
    pub fn trouble(&self) -> Option<DeviceError> {
        match self {
            Lock::File(_) | Lock::Directory(_) | Lock::Snapshot(..) => None,
            Lock::Server(device) => device.ended(),
        }
    }
}

/// Lets go of a snapshot. A store that does not answer is not waited for longer than [`HOLD_LIMIT`].
fn release(hold: &Arc<Hold>) {
    let (done, is_done) = channel();
    let held = Arc::clone(hold);
    std::thread::spawn(move || {
        held.release();
        let _ = done.send(());
    });
    if is_done.recv_timeout(HOLD_LIMIT) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!(
            "the vault does not answer: the snapshot counts as in use for at most another 24 hours"
        );
    }
}

/// Opens and locks the disk, until the lock is released or device and lock are dropped. `cache` is a directory of the
/// mount's for a cache, should there be one.
///
/// # Errors
/// When the disk does not exist, has another type, size or chunk size, is already mounted, or its server refuses.
pub fn open(
    home: &Home,
    disk: &LocalDisk,
    how: &How,
    mount: &Holder,
    cache: &Path,
) -> Result<(Arc<dyn BlockDevice>, Lock)> {
    let (stack, lock) = match disk {
        LocalDisk::File(path) => {
            let file = open_file(home, disk, path, how.read_only)?;
            let lock = Lock::File(file.try_clone()?);
            (Stack::over(FileDevice::new(file, how.read_only)?), lock)
        }
        LocalDisk::Dir(path) => {
            let device = Arc::new(open_directory(home, disk, path, how)?);
            (Stack::over(device.clone()), Lock::Directory(device))
        }
        LocalDisk::Nbd(address) => {
            let device = Arc::new(connect(address, how.read_only)?);
            let stack = Stack::over(device.clone());
            let stack = match device.capabilities().alignment {
                1 => stack,
                alignment => stack.chunked(alignment.max(4096)),
            };
            (stack, Lock::Server(device))
        }
        LocalDisk::Store(address) => bail!("{address} is opened by its own module; this is a bug"),
        LocalDisk::Snapshot {
            vault,
            id,
            key_file,
        } => {
            let disk = (vault, key_file.as_ref(), id);
            let (device, hold, cached) = snapshots::open(home, disk, how, mount, cache)?;
            (Stack::over(device), Lock::Snapshot(Arc::new(hold), cached))
        }
    };
    Ok((stack.build()?.device, lock))
}

fn connect(address: &NbdAddress, read_only: bool) -> Result<NbdDevice> {
    let options = NbdOptions {
        read_only,
        ..NbdOptions::default()
    };
    let device = NbdDevice::connect(address, &options).map_err(|e| match e.is_transient() {
        true => Error::msg(e),
        false => Error::refused(e.to_string()),
    })?;
    match device.capabilities().read_only && !read_only {
        true => Err(Error::refused(format!(
            "{address}: the server exports it read-only; mount it with --read-only"
        ))),
        false => Ok(device),
    }
}

/// Repeats `attempt` while it fails because another process holds the lock, for up to [`LOCK_LIMIT`].
fn retry_locked<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_locked: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let began = Instant::now();
    loop {
        match attempt() {
            Err(e) if is_locked(&e) && began.elapsed() < LOCK_LIMIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

fn open_file(home: &Home, disk: &LocalDisk, path: &Path, read_only: bool) -> Result<File> {
    let kind = match path.metadata() {
        Ok(metadata) => metadata.file_type(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => bail!(
            "{} does not exist; `truncate -s SIZE {}` makes an empty disk",
            path.display(),
            path.display()
        ),
        Err(e) => return Err(e).with_context(|| format!("cannot open {}", path.display())),
    };
    if kind.is_dir() {
        bail!(
            "{} is a directory; dir:{} is a disk of one file per chunk in it",
            path.display(),
            path.display()
        );
    }
    // Opening a FIFO would block until its other end is opened.
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{} is neither a file nor a block device", path.display());
    }
    let exclusive = match kind.is_block_device() && !read_only {
        // O_EXCL: fails if the device is mounted.
        true => rustix::fs::OFlags::EXCL.bits().cast_signed(),
        false => 0,
    };
    let file = File::options()
        .read(true)
        .write(!read_only)
        .custom_flags(exclusive)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let lock = || match read_only {
        true => file.try_lock_shared(),
        false => file.try_lock(),
    };
    match retry_locked(lock, |e| matches!(e, TryLockError::WouldBlock)) {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(in_use(home, disk)),
        Err(TryLockError::Error(e)) => {
            Err(e).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

fn open_directory(
    home: &Home,
    disk: &LocalDisk,
    path: &Path,
    how: &How,
) -> Result<DirectoryDevice> {
    let options = DirectoryOptions {
        read_only: how.read_only,
        ..DirectoryOptions::default()
    };
    let opened = match how.size {
        None => HostDirectory::open(path),
        Some(_) => HostDirectory::open_or_create(path),
    };
    let directory = match opened {
        Ok(directory) => Arc::new(directory),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(nothing_at(path)),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => bail!(
            "{} is not a directory; file:{} is a disk in one file",
            path.display(),
            path.display()
        ),
        Err(e) => return Err(e).with_context(|| format!("cannot open {}", path.display())),
    };
    let is_absent =
        |e: &DeviceError| matches!(e, DeviceError::Io(e) if e.kind() == io::ErrorKind::NotFound);
    let is_locked = |e: &DeviceError| matches!(e, DeviceError::Unavailable(_));
    let open = || DirectoryDevice::open(directory.clone(), options);
    let opened = match (retry_locked(open, is_locked), how.size) {
        (Err(e), Some(size)) if is_absent(&e) => {
            let shape = shape(size, how.chunk)?;
            check_empty(path)?;
            DirectoryDevice::create(directory, shape, options)
        }
        (Err(e), None) if is_absent(&e) => return Err(nothing_at(path)),
        (opened, _) => opened,
    };
    let device = match opened {
        Err(e) if is_locked(&e) => return Err(in_use(home, disk)),
        opened => opened?,
    };
    let chunk = device.shape().chunk;
    match how.size {
        Some(size) if size != device.size() => bail!(
            "{} has {} bytes, not {size}; leave --size out to use it as it is",
            path.display(),
            device.size()
        ),
        size if how.chunk != chunk && (size.is_some() || how.is_chunk_chosen) => bail!(
            "{} has chunks of {}K, not {}K; leave --size and --chunk out to use it as it is",
            path.display(),
            chunk >> 10,
            how.chunk >> 10
        ),
        _ => Ok(device),
    }
}

/// Refuses a directory with subdirectories: it is in use for something else. Its files are checked when the disk is
/// created.
fn check_empty(path: &Path) -> Result<()> {
    for entry in path.read_dir()? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.file_name() != "lost+found" {
            bail!(
                "{}: the directory is not empty; --size creates a disk in an empty or new one",
                entry.path().display()
            );
        }
    }
    Ok(())
}

fn nothing_at(path: &Path) -> Error {
    Error::msg(format!(
        "there is no disk in {}; --size SIZE creates one",
        path.display()
    ))
}

/// The shape of a new directory; an error if it would have too many chunks.
fn shape(size: u64, chunk: u32) -> Result<Shape> {
    let shape = Shape { size, chunk };
    if shape.chunks() <= MAX_CHUNKS {
        return Ok(shape);
    }
    let least = size.div_ceil(MAX_CHUNKS).next_power_of_two();
    match least <= MAX_CHUNK {
        true => Err(Error::usage(format!(
            "a directory has at most {MAX_CHUNKS} chunks; for {} use --chunk {}K",
            bytes(size),
            least >> 10
        ))),
        false => Err(Error::usage(format!(
            "{} is too large: a directory holds at most {}",
            bytes(size),
            bytes(MAX_CHUNKS * MAX_CHUNK)
        ))),
    }
}

/// The error for a disk that another process has locked; names the mount if it is one of this home.
fn in_use(home: &Home, disk: &LocalDisk) -> Error {
    let mounts = Place::list(home).unwrap_or_default();
    let holder = mounts.into_iter().find(|(place, record)| {
        let theirs = |local: &LocalDisk| local.path().map(real) == disk.path().map(real);
        place.is_kept()
            && record.process != std::process::id()
            && record.process != 0
            && record
                .images
                .iter()
                .filter_map(|i| i.local.as_ref())
                .any(theirs)
    });
    Error::refused(match holder {
        Some((_, record)) => format!(
            "{disk} is mounted already, at {}; `drover unmount {}` ends that",
            record.front.place(),
            record.name
        ),
        None => format!("{disk} is in use: another process has locked it"),
    })
}
