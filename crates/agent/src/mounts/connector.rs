//! Connections of a mount to a peer.

use drover_mount::client::{ConnectError, Connecting, Connector, Leaving};
use drover_net::{ConnectOptions, Identity, Route};
use drover_store::Peer;

/// Opens a mount's connections to a peer.
pub struct PeerConnector {
    identity: Identity,
    peer: Peer,
    /// All connections of a mount go to one node of the site.
    route: Route,
}

impl PeerConnector {
    /// A connector from this site to `peer`.
    pub fn new(identity: Identity, peer: Peer) -> PeerConnector {
        PeerConnector {
            identity,
            peer,
            route: Route::default(),
        }
    }
}

impl Connector for PeerConnector {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let Peer {
                name,
                key,
                addresses,
                ..
            } = &self.peer;
            let options = ConnectOptions::named(name);
            let connection = self
                .route
                .connect(addresses, &self.identity, key, &options)
                .await;
            // A site that is down may come back, so retry; a wrong identity is permanent.
            connection.map_err(|e| ConnectError {
                fatal: e.refused(),
                ..ConnectError::lost(e.to_string())
            })
        })
    }

    fn leave(&self) -> Leaving<'_> {
        Box::pin(self.route.leave())
    }
}
