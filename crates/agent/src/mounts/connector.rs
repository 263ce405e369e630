//! Connections of a mount to a peer, each opened as a lane.

use std::future::Future;
use std::pin::Pin;

use drover_mount::client::{ConnectError, Connected, Connector};
use drover_net::{
    ConnectOptions, Connection, Identity, NetError, Role, connect_any, decode, encode, hear_hello,
    say_hello,
};
use drover_store::Peer;
use drover_teleport::protocol::{Reply, Request, kind};

use crate::text::clean;

/// Makes a mount's connections to a peer.
pub struct PeerConnector {
    identity: Identity,
    peer: Peer,
}

impl PeerConnector {
    /// Connections of this site to `peer`.
    pub fn new(identity: Identity, peer: Peer) -> PeerConnector {
        PeerConnector { identity, peer }
    }

    async fn open_lane(
        &self,
        open: Vec<u8>,
        asks: Vec<Vec<u8>>,
    ) -> Result<Connected, ConnectError> {
        // A site that is down or restarts comes back; one that is another does not become the right one. What greets
        // wrongly, unlike what breaks a link that is up, may be something that stands there only while the site does not.
        let failed = |e: NetError| ConnectError {
            fatal: e.refused(),
            ..ConnectError::lost(e.to_string())
        };
        self.reach(open, asks).await.map_err(failed)
    }

    async fn reach(&self, open: Vec<u8>, asks: Vec<Vec<u8>>) -> Result<Connected, NetError> {
        let options = ConnectOptions::named(&self.peer.name);
        let connection = connect_any(
            &self.peer.addresses,
            &self.identity,
            &self.peer.key,
            &options,
        )
        .await?;
        begin(connection, open, &asks).await
    }
}

/// Greets and says what is wanted, with requests of the mount behind it; the other end's greeting has been heard then, its answer has not.
pub async fn begin(
    connection: Connection,
    open: Vec<u8>,
    asks: &[Vec<u8>],
) -> Result<Connected, NetError> {
    let wire = connection.wire();
    let round_trip = connection.round_trip();
    let (mut reader, mut writer) = connection.split();
    // Everything in one flight: over a WAN each round trip is seen.
    say_hello(&mut writer, Role::Client).await?;
    writer
        .send(kind::REQUEST, &encode(&Request::Device { open }))
        .await?;
    for ask in asks {
        writer.send(drover_mount::protocol::kind::ASK, ask).await?;
    }
    writer.flush().await?;
    hear_hello(&mut reader, Role::Client).await?;
    Ok(Connected {
        reader,
        writer,
        wire,
        round_trip,
    })
}

impl Connector for PeerConnector {
    fn connect(
        &self,
        open: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, ConnectError>> + Send + '_>> {
        Box::pin(self.open_lane(open, Vec::new()))
    }

    fn connect_asking(
        &self,
        open: Vec<u8>,
        asks: Vec<Vec<u8>>,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, ConnectError>> + Send + '_>> {
        Box::pin(self.open_lane(open, asks))
    }

    fn refusal(&self, frame: u8, payload: &[u8]) -> Option<ConnectError> {
        refusal(&self.peer.name, frame, payload)
    }
}

/// A site's refusal before mounts come into it.
pub fn refusal(site: &str, frame: u8, payload: &[u8]) -> Option<ConnectError> {
    if frame != kind::REPLY {
        return None;
    }
    match decode(payload) {
        Ok(Reply::Refused(refusal)) => Some(ConnectError {
            fatal: refusal.reason.is_some(),
            ..ConnectError::lost(format!("{}: {}", clean(site), clean(&refusal.message)))
        }),
        _ => None,
    }
}
