//! A local disk behind a cache of its mount, since each of its reads takes long: a snapshot in an object store. It is the
//! managed device that images of other sites have, with the store for a site: many requests at once, what readers wait for
//! first, prefetching, and what is here stays here for as long as the mount does.

use std::path::Path;
use std::sync::Arc;

use drover_core::{BlockDevice, Digest};
use drover_device::builder::{Managed, Stack};
use drover_device::local_remote::LocalRemote;
use drover_device::remote::{Remote, Shape};
use drover_device::synced::{Order, Sync, SyncedOptions};
use drover_storage::HostDirectory;

use super::profiling::{self, Content};
use super::record::How;
use super::target::Prefetch;
use crate::error::{Context, Result};
use crate::home::Home;
use crate::profiles;

/// Requests to the store at once.
const THREADS: usize = 8;

/// A device with its cache.
pub struct Cached {
    managed: Managed,
    shape: Shape,
}

impl Cached {
    /// Bytes of it that are here.
    pub fn local(&self) -> u64 {
        let local = self.managed.synced.progress().local;
        (local * u64::from(self.shape.chunk)).min(self.shape.size)
    }

    /// Ends its requests. Nothing in the cache was written by the mount.
    pub fn close(&self) {
        if let Err(e) = self.managed.synced.close(false) {
            tracing::warn!("cannot close the cache of a snapshot: {e}");
        }
    }
}

/// Puts a cache in the directory `cache` before `disk`, which `identity` and `digest` name for as long as the mount exists.
///
/// # Errors
/// When the cache cannot be made, or is of another disk.
pub fn open(
    home: &Home,
    disk: Arc<dyn BlockDevice>,
    how: &How,
    cache: &Path,
    identity: &str,
    digest: Digest,
) -> Result<(Arc<dyn BlockDevice>, Cached)> {
    let remote = LocalRemote::new(disk, how.chunk, THREADS, None)?;
    let shape = remote.shape();
    let directory = HostDirectory::open_or_create(cache)
        .with_context(|| format!("cannot open {}", cache.display()))?;
    let mut options = SyncedOptions::new(Arc::new(directory), remote, identity.as_bytes());
    options.image = digest;
    options.sync = Sync::Local;
    options.cache_size = how.cache_size;
    options.prefetch = match &how.prefetch {
        // Until it is found.
        Prefetch::None | Prefetch::Profile => Order::None,
        Prefetch::Sequential => Order::Sequential,
        Prefetch::File(path) => profiling::order(&profiling::read(path)?, shape),
    };
    let stack = Stack::managed(options).build()?;
    let managed = stack.managed.context("a managed device has no handles")?;
    if how.prefetch == Prefetch::Profile {
        prefetch_by_content(home, stack.device.clone(), &managed, shape);
    }
    Ok((stack.device, Cached { managed, shape }))
}

/// Prefetches what the profile of an image of this site names of which the disk has the most, then the rest in order. What is
/// compared with the disk to find it is read through its cache.
fn prefetch_by_content(home: &Home, disk: Arc<dyn BlockDevice>, managed: &Managed, shape: Shape) {
    let find = profiles::by_content(home);
    let pull = managed.pull.clone();
    std::thread::spawn(move || {
        pull.set_order(&match find.0(&Content(disk)) {
            Some(profile) => profiling::order(&profile, shape),
            None => Order::Sequential,
        });
    });
}
