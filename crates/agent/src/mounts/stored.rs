//! Disks in stores: object stores, Redis. With a cache they are what images of other sites are, a managed device, with the
//! store for a site: what is written goes to the cache and is pushed in epochs, each of which is in the store as a whole or
//! not at all. Such a mount can begin and go on while the store cannot be reached. Without a cache, requests go to the store.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Digest, Extent, ExtentKind, Zeroes, check_range,
};
use drover_device::backend::StoreDevice;
use drover_device::backend::chunk_store::{
    Epochs, NewStore, OpenError, StoreAddress, StoreOptions, create,
};
use drover_device::builder::{Managed, Stack};
use drover_device::local_remote::{Committer, LocalRemote};
use drover_device::remote::{Change, Epoch, Link, Remote, Shape};
use drover_device::synced::{CacheContents, Order, Sync, SyncedOptions};
use drover_net::Code;
use drover_storage::HostDirectory;
use drover_store::lease::MountId;
use parking_lot::Mutex;

use super::profiling;
use super::record::{How, SyncMode};
use super::status::DiskStatus;
use super::target::Prefetch;
use crate::error::{Context, Error, Result, bail};
use crate::vaults;

/// Requests to a store at once.
const THREADS: usize = 8;

/// How long giving a lease back may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(20);

/// The pause between attempts to open a disk whose store could not be reached.
const AGAIN: Duration = Duration::from_secs(2);

/// A cache and what it is of.
type Cache = (Managed, Arc<LocalRemote>);

/// An open disk in a store.
pub struct Stored {
    late: Arc<Late>,
    managed: Option<Cache>,
    /// The lease was given back, or none was taken.
    is_released: AtomicBool,
}

/// Why a disk was not opened.
enum Failed {
    /// Its store cannot be reached now.
    Away(String),
    /// Another reason.
    Finally(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        match failed {
            Failed::Away(why) => Error::coded(Code::Unavailable, why),
            Failed::Finally(error) => error,
        }
    }
}

fn failed(error: OpenError, address: &StoreAddress) -> Failed {
    if error.is_transient() {
        return Failed::Away(error.to_string());
    }
    Failed::Finally(match error {
        OpenError::Absent(_) => Error::refused(format!("{error}; --size SIZE makes one")),
        OpenError::Held { .. } => Error::refused(format!(
            "{error}; if that mount is gone for good, `drover mounts break '{address}'` ends its lease"
        )),
        OpenError::Store(error) => Error::from(error),
        error => Error::refused(error.to_string()),
    })
}

/// How a mount opens a disk.
struct Opening {
    address: StoreAddress,
    options: StoreOptions,
    /// Of a disk that is made if there is none.
    new: Option<NewStore>,
}

impl Opening {
    fn open(&self) -> Result<StoreDevice, Failed> {
        let failed = |error| failed(error, &self.address);
        let store = self.address.store().map_err(|e| failed(e.into()))?;
        let opened = match StoreDevice::open(Arc::clone(&store), &self.options) {
            Err(OpenError::Absent(_)) if let Some(new) = self.new => {
                create(&*store, new).map_err(failed)?;
                StoreDevice::open(store, &self.options)
            }
            opened => opened,
        };
        let device = opened.map_err(failed)?;
        match self.new {
            Some(new) if new.size != device.size() => {
                let error = Error::refused(format!(
                    "{} has {} bytes, not {}; leave --size out to use it as it is",
                    self.address,
                    device.size(),
                    new.size
                ));
                if let Err(e) = device.close() {
                    tracing::warn!("{e}");
                }
                Err(Failed::Finally(error))
            }
            _ => Ok(device),
        }
    }
}

/// Opens the disk at `address` for the mount with this identifier; `cache` is the directory of its cache, and with `offline`
/// what is left in it is enough.
///
/// # Errors
/// When there is no disk, it is in use, the store refuses or cannot be reached, or the cache is of another disk.
pub fn open(
    address: &StoreAddress,
    how: &How,
    name: &str,
    mount: MountId,
    cache: &Path,
    offline: bool,
) -> Result<(Arc<dyn BlockDevice>, Stored)> {
    let mut options = StoreOptions::new(mount.0, &format!("{name} on {}", vaults::host()));
    options.read_only = how.read_only;
    let opening = Opening {
        address: address.clone(),
        options,
        new: how.size.map(|size| NewStore {
            size,
            chunk: how.chunk,
            object: None,
        }),
    };
    if how.direct {
        let device = Arc::new(opening.open()?);
        let stored = Stored {
            late: Arc::new(Late::of(device.clone())),
            managed: None,
            is_released: AtomicBool::new(how.read_only),
        };
        return Ok((Stack::over(device).build()?.device, stored));
    }
    let left = left(cache)?;
    let late = match (opening.open(), &left) {
        (Ok(device), _) => Late::of(Arc::new(device)),
        (Err(Failed::Away(why)), Some(left)) if offline && left.image.is_some() => {
            Late::away(left.shape.size, how.read_only, why)
        }
        (Err(failed), _) => return Err(failed.into()),
    };
    let late = Arc::new(late);
    let result = manage(&late, opening, how, cache, left);
    if result.is_err() {
        late.give_up();
    }
    let (device, managed) = result?;
    let stored = Stored {
        late,
        managed: Some(managed),
        is_released: AtomicBool::new(how.read_only),
    };
    Ok((device, stored))
}

fn left(cache: &Path) -> Result<Option<CacheContents>> {
    if !cache.exists() {
        return Ok(None);
    }
    let directory = HostDirectory::open(cache);
    let directory = directory.with_context(|| format!("cannot open {}", cache.display()))?;
    let directory: Arc<dyn drover_storage::Directory> = Arc::new(directory);
    Ok(CacheContents::read(&directory)?)
}

/// What a cache calls the disk with this number.
fn digest(id: [u8; 16]) -> Digest {
    Digest(blake3::hash(&id).into())
}

/// Puts a cache before a disk.
fn manage(
    late: &Arc<Late>,
    opening: Opening,
    how: &How,
    cache: &Path,
    left: Option<CacheContents>,
) -> Result<(Arc<dyn BlockDevice>, Cache)> {
    let now = late.device.get().map(|device| digest(device.id()));
    let was = left.as_ref().and_then(|left| left.image);
    let image = now.or(was).unwrap_or_default();
    if let Some(left) = &left {
        let is_same =
            was == Some(image) && (left.shape.size, left.shape.chunk) == (late.size, how.chunk);
        if !is_same && left.dirty > 0 {
            bail!(
                "another disk was made at {}, or the chunk size has changed: {} of unpushed data in {} belong to the old one; `drover unmount --discard` discards them",
                opening.address,
                crate::text::bytes(left.dirty),
                cache.display()
            );
        }
        if !is_same {
            std::fs::remove_dir_all(cache)
                .with_context(|| format!("cannot remove {}", cache.display()))?;
        }
    }
    let committer = Arc::clone(late) as Arc<dyn Committer>;
    let remote = LocalRemote::new(late.clone(), how.chunk, THREADS, Some(committer))?;
    if let Some(why) = late.why() {
        remote.cut(&why);
    }
    let _ = late.remote.set(Arc::downgrade(&remote));
    let shape = remote.shape();
    let directory = HostDirectory::open_or_create(cache)
        .with_context(|| format!("cannot open {}", cache.display()))?;
    let identity = opening.address.to_string();
    let mut options = SyncedOptions::new(
        Arc::new(directory),
        Arc::clone(&remote) as Arc<dyn Remote>,
        identity.as_bytes(),
    );
    options.image = image;
    options.sync = match how.sync {
        SyncMode::Local => Sync::Local,
        SyncMode::Remote => Sync::Remote,
    };
    options.cache_size = how.cache_size;
    options.push_interval = how.push_interval;
    options.give_up_after = how.give_up_after;
    options.prefetch = order(&how.prefetch, shape)?;
    let stack = Stack::managed(options).build()?;
    let managed = stack.managed.context("a managed device has no handles")?;
    if late.device.get().is_none() {
        let (late, remote) = (Arc::clone(late), Arc::clone(&remote));
        std::thread::Builder::new()
            .name("store-open".into())
            .spawn(move || late.open_some_time(&opening, image, &remote))?;
    }
    Ok((stack.device, (managed, remote)))
}

fn order(prefetch: &Prefetch, shape: Shape) -> Result<Order> {
    Ok(match prefetch {
        Prefetch::None => Order::None,
        // No image's profile is its.
        Prefetch::Sequential | Prefetch::Profile => Order::Sequential,
        Prefetch::File(path) => profiling::order(&profiling::read(path)?, shape),
    })
}

impl Stored {
    /// Its cache, if it has one.
    pub fn managed(&self) -> Option<&Managed> {
        self.managed.as_ref().map(|(managed, _)| managed)
    }

    /// Whether the store can be reached.
    pub fn link(&self) -> Link {
        let device = self.late.device.get();
        match (device.and_then(|device| device.trouble()), &self.managed) {
            (Some(error), _) => Link::Gone(error),
            (None, Some((_, remote))) => remote.link(),
            (None, None) => Link::Up(1),
        }
    }

    /// Bytes sent to the store.
    pub fn sent(&self) -> u64 {
        let remote = self.managed.as_ref().map(|(_, remote)| remote);
        remote.map_or(0, |remote| remote.traffic().sent)
    }

    /// Puts what it transfers into a status.
    pub fn fill(&self, status: &mut DiskStatus) {
        if let Some((_, remote)) = &self.managed {
            let traffic = remote.traffic();
            status.in_flight = traffic.in_flight;
            (status.received, status.sent) = (traffic.received, traffic.sent);
            status.rate = traffic.rate;
        } else {
            status.local = status.size;
        }
        status.link = match self.link() {
            Link::Up(_) => "up".into(),
            Link::Down(why) => why,
            Link::Gone(error) => error.to_string(),
        };
    }

    /// What the user should know about it: what the store does not promise.
    pub fn note(&self) -> Option<String> {
        let device = self.late.device.get()?;
        device.promise().note.clone()
    }

    /// Chunk size of its cache.
    pub fn chunk(&self) -> u64 {
        let remote = self.managed.as_ref().map(|(_, remote)| remote);
        remote.map_or(1, |remote| u64::from(remote.shape().chunk))
    }

    /// Ends its requests; gives the lease back unless dirty data is left to push.
    ///
    /// # Errors
    /// When the cache cannot be saved, or, without a cache, what was written is not in the store.
    pub fn close(&self, discards: bool) -> Result<()> {
        let Some((managed, remote)) = &self.managed else {
            let Some(device) = self.late.device.get() else {
                return Ok(());
            };
            match discards {
                true => device.abandon()?,
                false => device.close()?,
            }
            self.is_released.store(true, Ordering::Release);
            return Ok(());
        };
        let is_dirty = managed.push.pending() > 0;
        let saved = managed.synced.close(false);
        remote.close(Box::new(|_| {}));
        self.late.end();
        if let Some(device) = self.late.device.get()
            && (!is_dirty || discards)
        {
            // Epochs that were not committed are pushed again, by whoever has the cache.
            let (done, is_done) = channel();
            let device = Arc::clone(device);
            std::thread::spawn(move || {
                let _ = done.send(device.abandon());
            });
            match is_done.recv_timeout(RELEASE_LIMIT) {
                Ok(Ok(())) => self.is_released.store(true, Ordering::Release),
                Ok(Err(e)) => tracing::warn!("the lease was not given back: {e}"),
                Err(_) => tracing::warn!("the lease was not given back: the store does not answer"),
            }
        }
        Ok(saved?)
    }

    /// Whether the store still says that this mount writes.
    pub fn keeps_lease(&self) -> bool {
        !self.is_released.load(Ordering::Acquire)
    }
}

/// A disk whose store may not have been reached yet.
struct Late {
    size: u64,
    read_only: bool,
    device: OnceLock<Arc<StoreDevice>>,
    epochs: OnceLock<Epochs>,
    /// Why it is not there.
    why: Mutex<Option<String>>,
    /// What is told when the store cannot be reached.
    remote: OnceLock<Weak<LocalRemote>>,
    /// It was told so, and a thread looks whether it still holds.
    is_down: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
}

impl Late {
    fn of(device: Arc<StoreDevice>) -> Late {
        let late = Late::away(
            device.size(),
            device.capabilities().read_only,
            String::new(),
        );
        late.is_here(device);
        late
    }

    fn away(size: u64, read_only: bool, why: String) -> Late {
        Late {
            size,
            read_only,
            device: OnceLock::new(),
            epochs: OnceLock::new(),
            why: Mutex::new(Some(why)),
            remote: OnceLock::new(),
            is_down: Arc::new(AtomicBool::new(false)),
            ended: Arc::new(AtomicBool::new(false)),
        }
    }

    fn is_here(&self, device: Arc<StoreDevice>) {
        let _ = self.epochs.set(Epochs::new(Arc::clone(&device)));
        let _ = self.device.set(device);
        *self.why.lock() = None;
    }

    fn why(&self) -> Option<String> {
        self.why.lock().clone()
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// The mount did not begin: nobody will use it.
    fn give_up(&self) {
        self.end();
        if let Some(device) = self.device.get()
            && let Err(e) = device.abandon()
        {
            tracing::warn!("the lease was not given back: {e}");
        }
    }

    /// Opens it when its store can be reached again.
    fn open_some_time(&self, opening: &Opening, image: Digest, remote: &LocalRemote) {
        while !self.ended.load(Ordering::Acquire) {
            std::thread::sleep(AGAIN);
            let why = match opening.open() {
                Ok(device) if digest(device.id()) == image && device.size() == self.size => {
                    if self.ended.load(Ordering::Acquire) {
                        // Its lease is that of the cache, and stays.
                        return;
                    }
                    self.is_here(Arc::new(device));
                    remote.mend();
                    return;
                }
                Ok(device) => {
                    if let Err(e) = device.abandon() {
                        tracing::warn!("{e}");
                    }
                    format!("another disk was made at {}", opening.address)
                }
                Err(Failed::Away(why)) => why,
                Err(Failed::Finally(error)) => error.to_string(),
            };
            if self.why().as_ref() != Some(&why) {
                tracing::warn!("{why}");
                *self.why.lock() = Some(why.clone());
                remote.cut(&why);
            }
        }
    }

    /// Passes a result on; if the store could not be reached, its link is down until it can.
    fn seen<T>(&self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        let (Err(error), Some(device), Some(remote)) =
            (&result, self.device.get(), self.remote.get())
        else {
            return result;
        };
        if !error.is_transient() || self.is_down.swap(true, Ordering::AcqRel) {
            return result;
        }
        let (device, remote) = (Arc::clone(device), Weak::clone(remote));
        let (is_down, ended) = (Arc::clone(&self.is_down), Arc::clone(&self.ended));
        let mut why = error.to_string();
        tracing::warn!("{why}");
        if let Some(remote) = remote.upgrade() {
            remote.cut(&why);
        }
        let looking = std::thread::Builder::new().name("store-look".into());
        let looking = looking.spawn(move || {
            loop {
                std::thread::sleep(AGAIN);
                let reached = device.reach();
                let Some(remote) = remote.upgrade().filter(|_| !ended.load(Ordering::Acquire))
                else {
                    return;
                };
                match reached {
                    Err(error) if error.is_transient() => {
                        let now = error.to_string();
                        if now != why {
                            why = now;
                            remote.cut(&why);
                        }
                    }
                    // Another error is met by the next request.
                    _ => {
                        is_down.store(false, Ordering::Release);
                        remote.mend();
                        return;
                    }
                }
            }
        });
        if let (Err(e), Some(remote)) = (looking, self.remote.get().and_then(Weak::upgrade)) {
            tracing::warn!("{e}");
            self.is_down.store(false, Ordering::Release);
            remote.mend();
        }
        result
    }

    fn device(&self) -> Result<&StoreDevice, DeviceError> {
        let device = self.device.get().map(|device| &**device);
        device.ok_or_else(|| DeviceError::Unavailable(self.why().unwrap_or_default()))
    }

    fn epochs(&self) -> Result<&Epochs, DeviceError> {
        let epochs = self.epochs.get();
        epochs.ok_or_else(|| DeviceError::Unavailable(self.why().unwrap_or_default()))
    }
}

impl Committer for Late {
    fn committed(&self) -> Epoch {
        // Asked for only when the link is up.
        self.epochs.get().map_or(Epoch(0), Epochs::committed)
    }

    fn push(&self, epoch: Epoch, changes: &[Change]) -> Result<(), DeviceError> {
        self.seen(self.epochs()?.push(epoch, changes))
    }

    fn commit(&self, epoch: Epoch, covers: u64) -> Result<(), DeviceError> {
        self.seen(self.epochs()?.commit(epoch, covers))
    }
}

impl BlockDevice for Late {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        match self.device.get() {
            Some(device) => device.capabilities(),
            None => Capabilities {
                read_only: self.read_only,
                fast_zeroes: !self.read_only,
                trim: !self.read_only,
                durable: false,
                extents: true,
                alignment: 1,
                preferred: 4096,
                longest: u32::MAX,
            },
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.seen(self.device()?.read(offset, buffer))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.device()?.write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.device()?.write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.device()?.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.device()?.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        match self.device.get() {
            Some(device) => device.extents(offset, length),
            None => {
                check_range(offset, length, self.size)?;
                let kind = ExtentKind::Data;
                Ok(vec![Extent {
                    offset,
                    length,
                    kind,
                }])
            }
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        let device = self.device.get();
        device.map_or(Cost::Network, |device| device.cost(offset, length))
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        let device = self.device.get();
        device.map_or(Cost::Network, |device| device.write_cost(offset, length))
    }
}
