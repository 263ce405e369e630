//! Disks in stores: object stores, Redis. With a cache they are what images of other sites are, a managed device, with the
//! store for a site: what is written goes to the cache and is pushed in epochs, each of which is in the store as a whole or
//! not at all. Such a mount can begin and go on while the store cannot be reached. Without a cache, requests go to the store.

mod late;
mod opening;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use drover_core::BlockDevice;
use drover_device::backend::chunk_store::{NewStore, StoreAddress, StoreOptions};
use drover_device::builder::{Managed, Stack};
use drover_device::local_remote::{Committer, LocalRemote};
use drover_device::remote::{Link, Remote, Shape};
use drover_device::synced::{CacheContents, Order, Sync, SyncedOptions};
use drover_storage::HostDirectory;
use drover_store::lease::MountId;

use self::late::{Late, digest};
use self::opening::{Failed, Opening};
use super::profiling;
use super::record::{How, Record, SyncMode};
use super::status::DiskStatus;
use super::target::Prefetch;
use crate::error::{Context, Result, bail};
use crate::vaults;

/// Requests to a store at once.
const THREADS: usize = 8;

/// How long giving a lease back may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(20);

/// A cache and what it is of.
type Cache = (Managed, Arc<LocalRemote>);

/// An open disk in a store.
pub struct Stored {
    late: Arc<Late>,
    managed: Option<Cache>,
    /// The lease was given back, or none was taken.
    is_released: AtomicBool,
    /// The store does not have the disk any more, as its end showed.
    is_lost: AtomicBool,
}

/// Opens the disk at `address` for the mount with this record and identifier; `cache` is the directory of its cache, and with
/// `offline` what is left in it is enough. A disk is made only for a mount that was never up and has no cache.
///
/// # Errors
/// When there is no disk, it is in use, the store refuses or cannot be reached, or the cache is of another disk.
pub fn open(
    address: &StoreAddress,
    record: &Record,
    mount: MountId,
    cache: &Path,
    offline: bool,
) -> Result<(Arc<dyn BlockDevice>, Stored)> {
    let how = &record.how;
    let left = match how.direct {
        true => None,
        false => left(cache)?,
    };
    let text = format!("{} on {}", record.name, vaults::host());
    let mut options = StoreOptions::new(mount.0, &text);
    options.read_only = how.read_only;
    let was_here = !record.never_up || left.is_some();
    let new = how.size.filter(|_| !was_here).map(|size| NewStore {
        size,
        chunk: how.chunk,
        object: None,
    });
    let opening = Opening {
        address: address.clone(),
        options,
        name: record.name.clone(),
        size: how.size,
        new,
        was_here,
    };
    if how.direct {
        let device = Arc::new(opening.open()?);
        let late = Arc::new(Late::of(device.clone()));
        late.watch();
        let stored = Stored {
            late,
            managed: None,
            is_released: AtomicBool::new(how.read_only),
            is_lost: AtomicBool::new(false),
        };
        return Ok((Stack::over(device).build()?.device, stored));
    }
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
    late.watch();
    let stored = Stored {
        late,
        managed: Some(managed),
        is_released: AtomicBool::new(how.read_only),
        is_lost: AtomicBool::new(false),
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

/// Puts a cache before a disk.
fn manage(
    late: &Arc<Late>,
    opening: Opening,
    how: &How,
    cache: &Path,
    left: Option<CacheContents>,
) -> Result<(Arc<dyn BlockDevice>, Cache)> {
    let now = late.opened().map(|device| digest(device.id()));
    let was = left.as_ref().and_then(|left| left.image);
    let image = now.or(was).unwrap_or_default();
    if let Some(left) = &left {
        let is_same =
            was == Some(image) && (left.shape.size, left.shape.chunk) == (late.size(), how.chunk);
        if was.is_some_and(|was| was != image) {
            // It may be all that is left of its disk.
            return Err(opening.is_another());
        }
        if !is_same && left.dirty > 0 {
            bail!(
                "the chunk size has changed: {} of unpushed data in {} are in chunks of {}; mount it with --chunk {}, or `drover unmount {} --discard` discards them",
                crate::text::bytes(left.dirty),
                cache.display(),
                left.shape.chunk,
                left.shape.chunk,
                opening.name
            );
        }
        if !is_same {
            std::fs::remove_dir_all(cache)
                .with_context(|| format!("cannot remove {}", cache.display()))?;
        }
    }
    let committer = Arc::clone(late) as Arc<dyn Committer>;
    let remote = LocalRemote::new(late.clone(), how.chunk, THREADS, Some(committer))?;
    let behind = late.behind(&remote);
    let shape = remote.shape();
    let directory = HostDirectory::open_or_create(cache)
        .with_context(|| format!("cannot open {}", cache.display()))?;
    let identity = opening.address.to_string();
    let mut options = SyncedOptions::new(Arc::new(directory), behind, identity.as_bytes());
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
    if late.opened().is_none() {
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
        match (self.late.trouble(), &self.managed) {
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
        let device = self.late.opened()?;
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
            let Some(device) = self.late.opened() else {
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
        self.late.end();
        let (remote, late) = (Arc::clone(remote), Arc::clone(&self.late));
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            // Waits for its threads, which may be waiting for the store.
            remote.close(Box::new(|_| {}));
            // Epochs that were not committed are pushed again, by whoever has the cache.
            let device = late.opened().filter(|_| !is_dirty || discards);
            let _ = done.send(device.map(|device| device.abandon()));
        });
        match is_done.recv_timeout(RELEASE_LIMIT) {
            Ok(Some(Ok(()))) => self.is_released.store(true, Ordering::Release),
            Ok(Some(Err(e))) => {
                let is_away = e.is_transient();
                self.is_lost.store(!is_away, Ordering::Release);
                tracing::warn!("the lease was not given back: {e}");
            }
            Ok(None) => {}
            Err(_) => tracing::warn!(
                "the store does not answer: what it was asked last is not waited for"
            ),
        }
        Ok(saved?)
    }

    /// Whether the store has lost the disk, or has let somebody else write it: a cache may then be the only copy.
    pub fn is_lost(&self) -> bool {
        let link = self.managed.as_ref().map(|(_, remote)| remote.link());
        self.is_lost.load(Ordering::Acquire) || matches!(link, Some(Link::Gone(_)))
    }

    /// Whether the store still says that this mount writes.
    pub fn keeps_lease(&self) -> bool {
        !self.is_released.load(Ordering::Acquire)
    }
}
