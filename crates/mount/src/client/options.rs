//! The options of a mount: image, access, connections, timeouts.

use std::time::Duration;

use drover_core::ImageName;
use drover_store::lease::{Access, Identity, MountId};

use super::early;
use crate::protocol::{ConnectionKind, DEFAULT_CHUNK, MAX_CONNECTIONS, Opened, Request};

/// Timeout of a request, also while the link is down.
pub const GIVE_UP: Duration = Duration::from_secs(30);

/// Timeout of a commit: the site syncs the whole epoch after copying the previous one. Meanwhile its pings show that it
/// is alive.
pub const COMMIT_LIMIT: Duration = Duration::from_secs(3600);

/// Timeout of the first connection.
pub const FIRST_CONTACT: Duration = Duration::from_secs(20);

/// Options of a mount.
#[derive(Clone, Debug)]
pub struct Options {
    /// The image's name at the site.
    pub image: ImageName,
    /// Read-only, writable, or beside a writer in order to take over.
    pub access: Access,
    /// Chunk size in bytes (see [`chunk_is_allowed`](crate::protocol::chunk_is_allowed)).
    pub chunk: u32,
    /// The mount's ID: the same as before in order to resume a lease and a cache.
    pub mount: MountId,
    /// The image state that the cache belongs to, if there is one.
    pub expected: Option<Identity>,
    /// A note identifying the mounting party, shown at the site.
    pub note: String,
    /// How many seconds without a connection the mount wants to keep its write lease, from 1 to
    /// [`MAX_TERM`](drover_store::lease::MAX_TERM); `None` for ever. The site may grant less:
    /// [`Opened::term`].
    pub term: Option<u64>,
    /// Connections for background reads in addition to the front one, at most 7.
    pub back_connections: usize,
    /// Limit of background bytes in flight; determined automatically if not given.
    pub window: Option<u64>,
    /// Timeout of a request.
    pub give_up: Duration,
    /// Timeout of a commit, after which the link is re-established to learn its outcome; at least that of other
    /// requests.
    pub commit_limit: Duration,
    /// Timeout of the first connection.
    pub first_contact: Duration,
    /// Chunks to request together with the first open, most urgent first, which saves a round trip: at most 8, and 512
    /// KiB in total; kept until they are requested, or something is pushed. For a mount with an empty cache.
    pub wanted: Vec<u64>,
    /// The site's reply to an earlier mount: with it, the mount can start while the site is unreachable.
    pub known: Option<Opened>,
}

impl Options {
    /// The default options for `image`.
    #[must_use]
    pub fn new(image: ImageName, access: Access) -> Self {
        Self {
            image,
            access,
            chunk: DEFAULT_CHUNK,
            mount: MountId::random(),
            expected: None,
            note: String::new(),
            term: None,
            back_connections: 2,
            window: None,
            give_up: GIVE_UP,
            commit_limit: COMMIT_LIMIT,
            first_contact: FIRST_CONTACT,
            wanted: Vec::new(),
            known: None,
        }
    }

    /// The timeout of a request.
    pub(super) fn limit(&self, request: &Request) -> Duration {
        match request {
            Request::Commit { .. } => self.commit_limit.max(self.give_up),
            _ => self.give_up,
        }
    }

    /// The requests sent with the open; the first is a foreground one.
    pub(super) fn early(&self) -> Vec<Request> {
        let most = (early::MAX_EARLY_BYTES / u64::from(self.chunk.max(1))).max(1) as usize;
        let wanted = self.wanted.iter().take(most.min(early::MAX_EARLY));
        let requests = wanted.enumerate().map(|(n, index)| Request::Read {
            id: n as u64 + 1,
            first: *index,
            count: 1,
            background: n > 0,
        });
        requests.collect()
    }

    /// The connections to open.
    pub(super) fn connections(&self) -> Vec<ConnectionKind> {
        let mut connections = vec![ConnectionKind::Front];
        connections.extend(std::iter::repeat_n(
            ConnectionKind::Back,
            self.back_connections.min(MAX_CONNECTIONS - 2),
        ));
        if self.access == Access::ReadWrite {
            connections.push(ConnectionKind::Push);
        }
        connections
    }
}
