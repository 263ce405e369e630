//! The options of a mount: image, access, connections, timeouts.

use std::time::Duration;

use drover_core::ImageName;
use drover_store::lease::{Access, Identity, MountId};

use super::early;
use crate::protocol::{ConnectionKind, DEFAULT_CHUNK, MAX_CONNECTIONS, Opened, Request};

/// How long a request may take before it fails, also while the link is down.
pub const GIVE_UP: Duration = Duration::from_secs(30);

/// How long the site may take to commit an epoch: it syncs all of it, after it has copied the previous one. Its pings show
/// meanwhile that it is alive.
pub const COMMIT_LIMIT: Duration = Duration::from_secs(3600);

/// How long the first connection may take.
pub const FIRST_CONTACT: Duration = Duration::from_secs(20);

/// Options of a mount.
#[derive(Clone, Debug)]
pub struct Options {
    /// The image, by its name at the site.
    pub image: ImageName,
    /// Read-only, or with the right to write.
    pub access: Access,
    /// The chunk, in bytes (see [`chunk_is_allowed`](crate::protocol::chunk_is_allowed)).
    pub chunk: u32,
    /// The mount's name for itself: the same as before to take up a lease and a cache.
    pub mount: MountId,
    /// The state that the cache is of, if there is one.
    pub expected: Option<Identity>,
    /// Who mounts, for people at the site.
    pub note: String,
    /// Connections for background reads beside the one for foreground ones, at most 7.
    pub back_connections: usize,
    /// Background bytes in flight; found out when not given.
    pub window: Option<u64>,
    /// How long a request may take before it fails.
    pub give_up: Duration,
    /// How long a commit may take before the link is made anew, to learn what became of it; no less than other requests.
    pub commit_limit: Duration,
    /// How long the first connection may take.
    pub first_contact: Duration,
    /// Chunks to ask for in the same flight as the first open, the most urgent first, so that they are here a round trip
    /// sooner: at most 8, and 512 KiB of them; kept until they are asked for, or something is pushed. For a mount
    /// whose cache is empty.
    pub wanted: Vec<u64>,
    /// The site's reply of an earlier mount: with it, the mount can start while the site is not reachable.
    pub known: Option<Opened>,
}

impl Options {
    /// The usual way to mount `image`.
    #[must_use]
    pub fn new(image: ImageName, access: Access) -> Self {
        Self {
            image,
            access,
            chunk: DEFAULT_CHUNK,
            mount: MountId::random(),
            expected: None,
            note: String::new(),
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

    /// What is asked for with the open: the first is waited for.
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

    /// The connections that are opened.
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
