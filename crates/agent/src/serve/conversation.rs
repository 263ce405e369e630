//! Handles one connection: handshake, authorization, and its one request.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_net::service::{IncomingCall, Peer, Services};
use drover_net::{Code, Connection, PeerKey, Pending, Refusal, Rights, Role, greet};
use tracing::Instrument;

use super::admission::{Place, StrangerPlace};
use super::server::{Server, quoted};
use super::sessions::Open;
use crate::error::{Error, Result, one_line};
use crate::signals::stopped;

/// Timeout for a peer that does not read its reply.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Serves a peer's connection; errors close it and are logged.
pub async fn with_peer(
    server: Arc<Server>,
    services: Arc<Services>,
    pending: Pending,
    place: Place,
    stranger: StrangerPlace,
) {
    let remote = pending.remote();
    let _open = Open::count(&server.metrics.connections_open);
    let connection = match pending.handshake().await {
        Ok(connection) => connection,
        Err(e) => {
            server.metrics.rejected_handshake.fetch_add(1, Relaxed);
            tracing::info!(%remote, "{}", quoted(&e.to_string()));
            return;
        }
    };
    let wire = connection.wire();
    let Some(key) = connection.peer() else { return };
    let span = tracing::info_span!("peer", %remote, name = tracing::field::Empty);
    let outcome = talk(&server, &services, key, connection, stranger)
        .instrument(span)
        .await;
    let metrics = &server.metrics;
    metrics.wire_sent.fetch_add(wire.sent(), Relaxed);
    metrics.wire_received.fetch_add(wire.received(), Relaxed);
    if let Err(e) = outcome {
        tracing::info!(%remote, peer = key.short(), "{}", one_line(&e));
    }
    drop(place);
}

async fn talk(
    server: &Arc<Server>,
    services: &Services,
    key: PeerKey,
    connection: Connection,
    stranger: StrangerPlace,
) -> Result<()> {
    let mut stop = server.stop.clone();
    let call = tokio::select! {
        call = hear(server, connection) => call?,
        () = stopped(&mut stop) => return Ok(()),
    };
    let known = {
        let catalog = Arc::clone(&server.catalog);
        tokio::task::spawn_blocking(move || catalog.peer_by_key(&key)).await??
    };
    let peer = match known {
        Some(known) => Peer {
            key,
            name: known.name,
            rights: Rights::PEER,
        },
        None => Peer {
            key,
            name: key.short(),
            rights: Rights::STRANGER,
        },
    };
    let serve = |peer, call| async { services.serve(peer, call).await.map_err(Error::msg) };
    if services.allow(Rights::STRANGER, &call.service) {
        return serve(peer, call).await;
    }
    if peer.rights == Rights::STRANGER {
        server.metrics.rejected_trust.fetch_add(1, Relaxed);
        tracing::warn!(peer = key.short(), "refused a key that is not trusted");
        // The peer adds the name under which it knows this site, which may be another.
        let text = "the key of your site is not trusted: get a ticket there with `drover ticket`, then run `drover pair` here";
        return Ok(call.refuse(&Refusal::new(Code::Untrusted, text)).await?);
    }
    let Some(_place) = server.admission.trust(key) else {
        server.metrics.rejected_limit.fetch_add(1, Relaxed);
        let text = format!(
            "too many connections from your site to {} are open; wait until some are closed",
            server.name
        );
        return Ok(call.refuse(&Refusal::new(Code::Denied, text)).await?);
    };
    drop(stranger);
    tracing::Span::current().record("name", &peer.name);
    serve(peer, call).await
}

/// Exchanges hellos and reads the request.
async fn hear(server: &Server, connection: Connection) -> Result<IncomingCall> {
    let (mut reader, mut writer) = connection.split();
    writer.set_stall_timeout(Some(STALL_LIMIT));
    if let Err(e) = greet(&mut reader, &mut writer, Role::Server).await {
        server.metrics.rejected_handshake.fetch_add(1, Relaxed);
        return Err(e.into());
    }
    Ok(IncomingCall::receive_after_hello(reader, writer, server.stop.clone()).await?)
}

/// Serves a local connection: access to the home's socket permits every request that is not for peers only.
pub async fn with_owner(server: Arc<Server>, services: Arc<Services>, connection: Connection) {
    let peer = crate::mounts::own(server.identity.key());
    let served = async {
        let call = IncomingCall::receive(connection, server.stop.clone()).await?;
        services.serve(peer, call).await
    };
    if let Err(e) = served.await {
        tracing::debug!("local caller: {}", one_line(&Error::msg(e)));
    }
}
