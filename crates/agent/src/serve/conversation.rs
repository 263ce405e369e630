//! Handles one connection: handshake, authorization, and its one request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_net::service::{IncomingCall, Peer, Request, Services};
use drover_net::{
    Code, Connection, DEFAULT_DOMAIN, MAX_FRAME, NetError, PeerKey, Pending, Refusal, Right,
    Rights, Role, Slot, greet,
};
use drover_teleport::services::{OpenSession, SendFlock};
use tracing::Instrument;

use super::audited::write;
use super::server::{Server, quoted};
use super::sessions::Open;
use crate::audit::{Audit, Event, Record};
use crate::error::{Error, Result, one_line};
use crate::rights::must_have;
use crate::signals::stopped;

/// The other nodes of this site, in logs.
const NODE_NAME: &str = "a node of this site";

/// Timeout for a peer that does not read its reply.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Serves a peer's connection; errors close it and are logged.
pub async fn with_peer(server: Arc<Server>, services: Arc<Services>, pending: Pending) {
    let remote = pending.remote();
    let _open = Open::count(&server.metrics.connections_open);
    let (connection, slot) = match pending.authenticate().await {
        Ok(authenticated) => authenticated,
        Err(e) => {
            let metrics = &server.metrics;
            let counter = match e {
                NetError::Displaced { .. } => &metrics.rejected_limit,
                _ => &metrics.rejected_handshake,
            };
            counter.fetch_add(1, Relaxed);
            if server.strangers.is_first(remote.ip()) {
                let why = quoted(&e.to_string());
                tracing::info!(%remote, "{why}");
                let record = Record::new(Event::Refused).by_stranger(None).detail(why);
                let record = record.from(&remote.to_string());
                write(server.home.audit(), record, Audit::write_limited).await;
            }
            return;
        }
    };
    let wire = connection.wire();
    let Some(key) = connection.peer() else { return };
    let span = tracing::info_span!("peer", %remote, name = tracing::field::Empty);
    let mut known = false;
    let outcome = talk(&server, &services, key, connection, slot, &mut known)
        .instrument(span)
        .await;
    let metrics = &server.metrics;
    metrics.wire_sent.fetch_add(wire.sent(), Relaxed);
    metrics.wire_received.fetch_add(wire.received(), Relaxed);
    if let Err(e) = outcome
        && (known || server.strangers.is_first(remote.ip()))
    {
        tracing::info!(%remote, peer = key.short(), "{}", one_line(&e));
    }
}

/// Admits the connection and serves its call. A peer's connection has a place among those of its key; any other keeps
/// its slot, which is taken away at a deadline or for a newer connection.
async fn talk(
    server: &Arc<Server>,
    services: &Services,
    key: PeerKey,
    connection: Connection,
    slot: Slot,
    is_known: &mut bool,
) -> Result<()> {
    let found = match slot.hold("its admission", known(server, key)).await? {
        Ok(found) => found,
        Err(e) => {
            let call = slot
                .hold("its request", hear(server, connection, false))
                .await??;
            slot.hold("its reply", not_now(server, call)).await??;
            return Err(e);
        }
    };
    *is_known = found.is_some();
    let place = is_known.then(|| server.places.try_take(key, 1)).flatten();
    if place.is_some() {
        slot.release();
    }
    let peer = found.unwrap_or_else(|| Peer {
        key,
        name: key.short(),
        rights: Rights::STRANGER,
        domain: String::new(),
    });
    let mut stop = server.stop.clone();
    let mut call = tokio::select! {
        call = slot.hold("its request", hear(server, connection, *is_known)) => call??,
        () = stopped(&mut stop) => return Ok(()),
    };
    let right = services.right(&call.service);
    let serve = |peer, call| async { services.serve(peer, call).await.map_err(Error::msg) };
    if !*is_known && right == Some(Right::Pair) {
        return slot.hold("its reply", serve(peer, call)).await?;
    }
    if !*is_known {
        server.metrics.rejected_trust.fetch_add(1, Relaxed);
        if let Ok(from) = call.reader.peer_text().parse::<SocketAddr>()
            && server.strangers.is_first(from.ip())
        {
            tracing::warn!(peer = key.short(), "refused a key that is not trusted");
            let record = Record {
                request: Some(call.service.clone()),
                ..Record::new(Event::Refused).by_stranger(Some(key))
            };
            let record = record.from(call.reader.peer_text());
            let record = record.detail("its key is not trusted");
            write(server.home.audit(), record, Audit::write_limited).await;
        }
        // The peer adds the name under which it knows this site, which may be another.
        let text = "the key of your site is not trusted: get a ticket there with `drover ticket`, then run `drover pair` here";
        let refusal = Refusal::new(Code::Untrusted, text);
        return Ok(slot.hold("its reply", call.refuse(&refusal)).await??);
    }
    let Some(place) = place else {
        server.metrics.rejected_limit.fetch_add(1, Relaxed);
        let text = format!(
            "too many connections from your site to {} are open; wait until some are closed",
            server.name
        );
        let refusal = Refusal::new(Code::Denied, text);
        refused(server, &peer, &call, &refusal, None).await;
        return Ok(slot.hold("its reply", call.refuse(&refusal)).await??);
    };
    drop(slot);
    if place.is_only() {
        let record = Record::new(Event::Connected).by(&peer);
        let record = record.from(call.reader.peer_text());
        write(server.home.audit(), record, Audit::write_limited).await;
    }
    tracing::Span::current().record("name", &peer.name);
    let Some(right) = right else {
        return serve(peer, call).await;
    };
    if let Err(refusal) = must_have(&peer, right, &server.name) {
        server.metrics.rejected_trust.fetch_add(1, Relaxed);
        tracing::warn!(service = call.service, "refused: it has no right to it");
        refused(server, &peer, &call, &refusal, Some(right)).await;
        return Ok(call.refuse(&refusal).await?);
    }
    let (_trusted, stop) = server.trust.enter(&peer, right);
    // What changes from here on stops it; what has changed meanwhile did not.
    if known(server, key).await?.as_ref() != Some(&peer) {
        let text = "what your site may do has just been changed; try again";
        return Ok(call.refuse(&Refusal::new(Code::Unavailable, text)).await?);
    }
    call.stop = stop;
    serve(peer, call).await
}

/// Tells the audit log that a peer's call is refused.
async fn refused(
    server: &Server,
    peer: &Peer,
    call: &IncomingCall,
    refusal: &Refusal,
    right: Option<Right>,
) {
    let record = Record::refused(&call.service, refusal, right).by(peer);
    let record = record.from(call.reader.peer_text());
    write(server.home.audit(), record, Audit::write_limited).await;
}

/// Answers a call of somebody who cannot be looked up now.
async fn not_now(server: &Server, call: IncomingCall) -> Result<()> {
    // A source that is cut off connects again by itself; one that is refused does not.
    if [OpenSession::SERVICE, SendFlock::SERVICE].contains(&&*call.service) {
        return Ok(());
    }
    let text = format!(
        "the catalog of {} cannot be read now; try again later",
        server.name
    );
    Ok(call.refuse(&Refusal::new(Code::Unavailable, text)).await?)
}

/// The peer with this key, as the catalog has it now.
async fn known(server: &Arc<Server>, key: PeerKey) -> Result<Option<Peer>> {
    // Another node of this site.
    if key == server.identity.key() && server.home.node().is_some() {
        return Ok(Some(Peer {
            key,
            name: NODE_NAME.into(),
            rights: Rights::of(&[Right::Node]),
            domain: DEFAULT_DOMAIN.into(),
        }));
    }
    let catalog = Arc::clone(&server.catalog);
    let found = tokio::task::spawn_blocking(move || catalog.peer_by_key(&key)).await??;
    Ok(found.map(|found| Peer {
        key,
        name: found.name,
        rights: found.grant.rights.of_peer(),
        domain: found.grant.domain,
    }))
}

/// Exchanges hellos and reads the request, which may be long if the caller is known.
async fn hear(server: &Server, connection: Connection, is_known: bool) -> Result<IncomingCall> {
    let (mut reader, mut writer) = connection.split();
    writer.set_stall_timeout(Some(STALL_LIMIT));
    if let Err(e) = greet(&mut reader, &mut writer, Role::Server).await {
        server.metrics.rejected_handshake.fetch_add(1, Relaxed);
        return Err(e.into());
    }
    if is_known {
        reader.set_max_frame(MAX_FRAME);
    }
    Ok(IncomingCall::receive_after_hello(reader, writer, server.stop.clone()).await?)
}

/// Serves a local connection to a domain: access to its socket permits every request that is not for peers only.
pub async fn with_owner(
    server: Arc<Server>,
    services: Arc<Services>,
    connection: Connection,
    domain: String,
) {
    let peer = crate::mounts::own(server.identity.key(), &domain);
    let served = async {
        let call = IncomingCall::receive(connection, server.stop.clone()).await?;
        let right = services.right(&call.service);
        match right.map_or(Ok(()), |right| must_have(&peer, right, &server.name)) {
            Ok(()) => services.serve(peer, call).await,
            Err(refusal) => Ok(call.refuse(&refusal).await?),
        }
    };
    if let Err(e) = served.await {
        tracing::debug!("local caller: {}", one_line(&Error::msg(e)));
    }
}
