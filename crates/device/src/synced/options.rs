//! Options of a managed device.

use std::sync::Arc;
use std::time::Duration;

use drover_core::Digest;
use drover_storage::Directory;

use super::order::Order;
use crate::remote::Remote;

/// Where a flush makes earlier writes durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sync {
    /// At the remote: a flush costs a round trip, and blocks while the link is down.
    #[default]
    Remote,
    /// In the local cache; the data is pushed to the remote asynchronously.
    Local,
}

/// Event callbacks (r3map §1.4.5.7). Called on threads of the device, with no lock held.
#[derive(Clone, Default)]
pub struct Hooks {
    /// Before dirty data is frozen for a push requested by `PushHandle::sync` or `Synced::close`: the place to
    /// flush the layers above. Not called for the device's own pushes, which capture the state as of some flush.
    pub before_sync: Option<Arc<dyn Fn() + Send + std::marker::Sync>>,
    /// Before the device closes, while it still serves requests.
    pub before_close: Option<Arc<dyn Fn() + Send + std::marker::Sync>>,
    /// A chunk has become local; the argument is its index.
    pub chunk_is_local: Option<Arc<dyn Fn(u64) + Send + std::marker::Sync>>,
}

/// Options of a managed device.
pub struct SyncedOptions {
    /// The cache directory; the cache is created if the directory is empty. At most one device at a time may use it.
    pub directory: Arc<dyn Directory>,
    /// The remote.
    pub remote: Arc<dyn Remote>,
    /// Identifies the remote image; a cache with another identity is refused.
    pub identity: Vec<u8>,
    /// The image's digest, from the remote; a cache of another digest is refused, even with the same name and size.
    pub image: Digest,
    /// The image digest that a version 1 cache, which does not record one, is known to belong to: such a cache is
    /// adopted if this is set, refused otherwise.
    pub former: Option<Digest>,
    /// Where a flush makes data durable.
    pub sync: Sync,
    /// Limit of the chunk bytes kept in the cache, at least 16 chunks; none: unlimited.
    pub cache_size: Option<u64>,
    /// What is pulled in the background, and in which order.
    pub prefetch: Order,
    /// Interval between pushes of dirty data.
    pub push_interval: Duration,
    /// Dirty bytes that trigger a push at once.
    pub high_water: u64,
    /// Timeout of a request that needs the remote: a read of a missing chunk, a flush to the remote, a write that finds
    /// the cache full of unpushed data.
    pub give_up_after: Duration,
    /// Event callbacks.
    pub hooks: Hooks,
}

impl SyncedOptions {
    /// The defaults: flushes go to the remote, everything is pulled, a push every 5 s or 256 MiB, a timeout of ten
    /// minutes.
    #[must_use]
    pub fn new(directory: Arc<dyn Directory>, remote: Arc<dyn Remote>, identity: &[u8]) -> Self {
        Self {
            directory,
            remote,
            identity: identity.to_vec(),
            image: Digest::default(),
            former: None,
            sync: Sync::default(),
            cache_size: None,
            prefetch: Order::Sequential,
            push_interval: Duration::from_secs(5),
            high_water: 256 << 20,
            give_up_after: Duration::from_secs(600),
            hooks: Hooks::default(),
        }
    }
}
