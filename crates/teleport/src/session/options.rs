//! Options of a send: what to send, where to, and how.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::{Digest, ImageName, ReadAt};
use drover_image::{Conversion, Outgoing};
use drover_net::{ConnectOptions, Connection, Identity, NetError, PeerKey, RateLimit, Route};
use drover_store::Peer;
use drover_store::profile::Profile;

use crate::compress::Effort;
use crate::progress::{SendEvent, WireTotals};

/// One image to send.
#[derive(Debug, Clone)]
pub struct SendItem {
    /// Path of the local file.
    pub path: PathBuf,
    /// Name at the destination.
    pub name: ImageName,
    /// Format conversion.
    pub conversion: Conversion,
    /// What is sent instead of the file, which then only has a name for messages.
    pub snapshot: Option<Snapshot>,
    /// What a machine reads first of its disk: sent first, and kept with the image.
    pub profile: Option<Arc<Profile>>,
}

/// An image that is not a file: a state of a running machine's disk, which does not change while it is sent.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The image.
    pub image: Arc<Outgoing>,
    /// Identifies the state: an interrupted transfer is resumed only with the same.
    pub stamp: Digest,
    /// Its generations, an encoded `drover_store::generations::Summary`: what an old copy at the destination has need not
    /// be read. If anything was not read, [`ImageReport::unread_blocks`](crate::progress::ImageReport::unread_blocks) says
    /// so, and [`digest_of`](crate::digest_of) has to confirm the digest of what was delivered.
    pub generations: Option<Arc<[u8]>>,
}

/// Destination and options of a send.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// Identity of the sender.
    pub identity: Identity,
    /// Key of the receiving site.
    pub peer: PeerKey,
    /// The user's name for the peer.
    pub peer_name: String,
    /// The peer's addresses; tried in order.
    pub addresses: Vec<String>,
    /// Which of them is used: all connections of a session go to one node of the site.
    pub route: Arc<Route>,
    /// Rate limit over all connections together.
    pub limit: Option<Arc<RateLimit>>,
    /// Only estimate what would cross the link.
    pub dry_run: bool,
    /// Number of connections for literals; `None` adapts it.
    pub connections: Option<u16>,
    /// Compression of literals; `None` adapts it to the link and the machines.
    pub compress: Option<Effort>,
    /// How long to keep reconnecting without progress.
    pub give_up_after: Duration,
    /// Finds profiles for images that have none.
    pub profiles: Option<FindProfile>,
}

/// Finds the profile of a disk by its content. Blocks the thread.
#[derive(Clone)]
pub struct FindProfile(pub Arc<Find>);

/// See [`FindProfile`].
pub type Find = dyn Fn(&dyn ReadAt) -> Option<Profile> + Send + Sync;

impl std::fmt::Debug for FindProfile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FindProfile")
    }
}

impl SendOptions {
    /// To a peer: connections and compression adapt to the link, without a limit, and a link that is lost is not tried again.
    #[must_use]
    pub fn to_peer(identity: Identity, peer: &Peer) -> Self {
        SendOptions {
            identity,
            peer: peer.key,
            peer_name: peer.name.clone(),
            addresses: peer.addresses.clone(),
            route: Arc::default(),
            limit: None,
            dry_run: false,
            connections: None,
            compress: None,
            give_up_after: Duration::ZERO,
            profiles: None,
        }
    }

    /// Connects to the peer, and adds the connection to the totals.
    pub(super) async fn connect(&self, wire: &WireTotals) -> Result<Connection, NetError> {
        let options = ConnectOptions::named(&self.peer_name);
        let Self {
            addresses,
            identity,
            peer,
            ..
        } = self;
        let connection = self
            .route
            .connect(addresses, identity, peer, &options)
            .await?;
        wire.add(connection.wire());
        Ok(connection)
    }
}

/// Callback for events during a send.
pub type OnEvent = Arc<dyn Fn(SendEvent) + Send + Sync>;
