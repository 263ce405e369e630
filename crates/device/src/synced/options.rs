//! Options of a managed device.

use std::sync::Arc;
use std::time::Duration;

use drover_core::Digest;
use drover_storage::Directory;

use super::order::Order;
use crate::remote::Remote;

/// Where a flush puts what was written before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sync {
    /// At the far side, durably: a flush takes a round trip, and waits while the link is down.
    #[default]
    Remote,
    /// In the local cache, durably; it reaches the far side a little later.
    Local,
}

/// What to call when something happens (r3map §1.4.5.7). From threads of the device, with no lock held.
#[derive(Clone, Default)]
pub struct Hooks {
    /// Before dirty data is frozen for a push that `PushHandle::sync` or `Synced::close` asks for: the place to flush
    /// what lies above. Not before the device's own pushes, which take a state as it was at some flush.
    pub before_sync: Option<Arc<dyn Fn() + Send + std::marker::Sync>>,
    /// Before the device closes, while it still takes requests.
    pub before_close: Option<Arc<dyn Fn() + Send + std::marker::Sync>>,
    /// A chunk has become local: its index.
    pub chunk_is_local: Option<Arc<dyn Fn(u64) + Send + std::marker::Sync>>,
}

/// How a managed device is set up.
pub struct SyncedOptions {
    /// Where the cache lives; made when it is empty. One device at a time.
    pub directory: Arc<dyn Directory>,
    /// The far side.
    pub remote: Arc<dyn Remote>,
    /// What names the far side's image; a cache of another identity is refused.
    pub identity: Vec<u8>,
    /// The image's digest, from the far side; a cache of another is refused, also one of the same name and size.
    pub image: Digest,
    /// The digest that a cache of version 1, which does not say it itself, is known to be of: with it such a cache is taken
    /// over, without it refused.
    pub former: Option<Digest>,
    /// Where a flush puts things.
    pub sync: Sync,
    /// Most bytes of chunks that the cache keeps, at least 16 chunks; none: no limit.
    pub cache_size: Option<u64>,
    /// What is pulled in the background, and in which order.
    pub prefetch: Order,
    /// How often dirty data is pushed.
    pub push_interval: Duration,
    /// Dirty bytes at which a push begins at once.
    pub high_water: u64,
    /// How long a request that needs the far side waits for it: a read of what is not here, a flush to there, a write that
    /// finds the cache full of what was not pushed yet.
    pub give_up_after: Duration,
    /// What to call.
    pub hooks: Hooks,
    /// Remember in which order chunks are first used (`PullHandle::recorded`).
    pub record_order: bool,
}

impl SyncedOptions {
    /// The usual ones: flushes go to the far side, everything is pulled, a push every 5 s or 256 MiB, ten minutes of
    /// timeout.
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
            record_order: false,
        }
    }
}
