//! The cache of an image of another site: what an earlier mount left of it, and opening it.

use std::path::Path;
use std::sync::Arc;

use drover_core::{BlockDevice, Digest};
use drover_device::builder::{Managed, Stack};
use drover_device::remote::{Chunks, Remote, Shape};
use drover_device::synced::{Order, Sync, SyncedOptions};
use drover_mount::client::Client;
use drover_mount::protocol::{MAX_SIZE, Opened};
use drover_storage::HostDirectory;
use drover_store::profile::Profile;

use crate::error::{Context, Error, Result, bail};
use crate::mounts::record::{How, Place, SyncMode};
use crate::mounts::target::Prefetch;
use crate::mounts::{known, profiling};
use crate::text::bytes;

/// The site's metadata of the image from an earlier mount; `None` when there was none.
pub(super) fn remembered(place: &Place, index: usize) -> Result<Option<Opened>> {
    let known = known::read(&place.known(index));
    if let Err(e) = &known {
        tracing::warn!("{e:#}");
    }
    known
}

/// Removes a cache of an unknown image: earlier versions did not record the image in the cache, and `known` does not
/// have it either. Refused when the cache has dirty data.
pub(super) fn forget_former(
    place: &Place,
    index: usize,
    dirty: u64,
    why: Option<&Error>,
) -> Result<()> {
    let cache = place.cache(index);
    if dirty > 0 {
        let why = why.map(|e| format!(" ({e:#})")).unwrap_or_default();
        bail!(
            "{} was written by an earlier version of drover and has {} of unpushed data of an unknown image{why}; push it with that version, or discard it with `drover unmount {} --discard`",
            cache.display(),
            bytes(dirty),
            place.name()
        );
    }
    tracing::info!(
        "{}: the cache was written by an earlier version and is replaced by an empty one",
        place.name()
    );
    place.remove_cache(index)
}

/// Removes a cache of another image or with another chunk size. Refused when it has dirty data.
pub(super) fn begin_anew(place: &Place, index: usize, dirty: u64) -> Result<()> {
    let cache = place.cache(index);
    if dirty > 0 {
        bail!(
            "the image was replaced at the other site, or the chunk size has changed: {} of unpushed data in {} belong to the old image; `drover unmount {} --discard` discards them",
            bytes(dirty),
            cache.display(),
            place.name()
        );
    }
    tracing::info!(
        "{}: the cache is of another image or chunk size and is replaced by an empty one",
        place.name()
    );
    place.remove_cache(index)
}

/// Opens the cache of an image and starts prefetching.
pub fn open_cache(
    client: &Arc<Client>,
    how: &How,
    profile: Option<&Profile>,
    cache: &Path,
    identity: Vec<u8>,
    was_of: Option<Digest>,
) -> Result<(Arc<dyn BlockDevice>, Managed)> {
    let shape = client.shape();
    let prefetch = match &how.prefetch {
        Prefetch::None => Order::None,
        Prefetch::Sequential => Order::Sequential,
        Prefetch::Profile => match profile {
            Some(profile) => profiling::order(profile, shape),
            None => Order::Sequential,
        },
        Prefetch::File(path) => profiling::order(&profiling::read(path)?, shape),
    };
    let directory = HostDirectory::open_or_create(cache)
        .with_context(|| format!("cannot open {}", cache.display()))?;
    let remote = Arc::clone(client) as Arc<dyn Remote>;
    let mut options = SyncedOptions::new(Arc::new(directory), remote, &identity);
    options.sync = match how.sync {
        SyncMode::Local => Sync::Local,
        SyncMode::Remote => Sync::Remote,
    };
    options.image = client.identity().digest;
    options.former = was_of;
    options.cache_size = how.cache_size;
    options.prefetch = prefetch;
    options.push_interval = how.push_interval;
    options.give_up_after = how.give_up_after;
    let stack = Stack::managed(options).build()?;
    let managed = stack.managed.context("a managed device has no handles")?;
    Ok((stack.device, managed))
}

/// The chunks that a mount with an empty cache needs first: requested together with the open, before the size of the
/// image is known.
pub(super) fn wanted(how: &How) -> Vec<u64> {
    let any = Shape {
        size: MAX_SIZE,
        chunk: how.chunk,
    };
    let first = match &how.prefetch {
        // Only what readers request is fetched, and that is not known yet.
        Prefetch::None => Vec::new(),
        Prefetch::Sequential | Prefetch::Profile => vec![Chunks { first: 0, count: 8 }],
        // Errors are reported when the cache is opened.
        Prefetch::File(path) => match profiling::read(path).map(|p| profiling::order(&p, any)) {
            Ok(Order::List(runs)) => runs,
            _ => Vec::new(),
        },
    };
    let chunks = first.iter().flat_map(|run| run.first..run.end());
    chunks.take(MAX_WANTED).collect()
}

/// Upper bound on the chunks requested with an open; see [`drover_mount::client::Options::wanted`].
const MAX_WANTED: usize = 8;
