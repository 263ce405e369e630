//! One connection from a peer: who is it, what does it want, may it.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drover_core::ImageName;
use drover_net::{
    FrameReader, FrameWriter, NetError, PeerKey, Pending, Role, Ticket, decode, encode, greet,
};
use drover_store::{Catalog, PairOutcome, Peer};
use drover_teleport::protocol::{ImageInfo, MAX_SESSION_FRAME, Refusal, Reply, Request, kind};
use drover_teleport::session::{SessionRequest, serve_teleporter};
use drover_teleport::{RefuseReason, Site};
use tracing::Instrument;

use super::admission::{Place, StrangerPlace};
use super::matchers::Matchers;
use super::{Duty, Server, jobs, quoted};
use crate::failure::one_line;
use crate::signals::told;
use crate::text::now_unix;

/// How long a peer may take to say what it wants.
const FIRST_REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// How long a peer may take to end the conversation after its answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// How long a peer may take nothing of an answer.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Images in one reply.
const IMAGES_PER_REPLY: usize = 256;

/// Transfers in one reply.
const TRANSFERS_PER_REPLY: usize = 256;

/// Runs the conversation; whatever goes wrong in it ends it, and is logged.
pub async fn run(server: Arc<Server>, pending: Pending, place: Place, stranger: StrangerPlace) {
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
    let (reader, writer) = connection.split();
    let span = tracing::info_span!("peer", %remote, name = tracing::field::Empty);
    let outcome = talk(&server, key, reader, writer, stranger)
        .instrument(span)
        .await;
    server.metrics.wire_sent.fetch_add(wire.sent(), Relaxed);
    server
        .metrics
        .wire_received
        .fetch_add(wire.received(), Relaxed);
    if let Err(e) = outcome {
        tracing::info!(%remote, peer = key.short(), "{}", one_line(&e));
    }
    drop(place);
}

async fn talk(
    server: &Arc<Server>,
    key: PeerKey,
    mut reader: FrameReader,
    mut writer: FrameWriter,
    stranger: StrangerPlace,
) -> Result<()> {
    writer.set_stall_timeout(Some(STALL_LIMIT));
    let mut stop = server.stop.clone();
    let request = tokio::select! {
        request = hear(server, &mut reader, &mut writer) => request?,
        () = told(&mut stop) => return Ok(()),
    };
    let known = {
        let server = Arc::clone(server);
        tokio::task::spawn_blocking(move || server.catalog.peer_by_key(&key)).await??
    };
    if let Request::Pair {
        secret,
        name,
        addresses,
    } = request
    {
        let reply = pair(server, key, secret, name, addresses).await?;
        return answer(reader, writer, &reply).await;
    }
    let Some(peer) = known else {
        server.metrics.rejected_trust.fetch_add(1, Relaxed);
        tracing::warn!(peer = key.short(), "refused a key that is not trusted");
        let text = format!(
            "{} does not trust your key; get a ticket there (`drover ticket`) and `drover pair` with it",
            server.name
        );
        return answer(reader, writer, &no(RefuseReason::Trust, text)).await;
    };
    let Some(_place) = server.admission.trust(key) else {
        server.metrics.rejected_limit.fetch_add(1, Relaxed);
        let text = format!(
            "{} has too many connections of yours open; wait for some to end",
            server.name
        );
        return answer(reader, writer, &no(RefuseReason::Policy, text)).await;
    };
    drop(stranger);
    tracing::Span::current().record("name", &peer.name);
    reader.set_max_frame(MAX_SESSION_FRAME);
    dispatch(server, peer, request, reader, writer).await
}

/// Does what a trusted peer asks for.
async fn dispatch(
    server: &Arc<Server>,
    peer: Peer,
    request: Request,
    reader: FrameReader,
    mut writer: FrameWriter,
) -> Result<()> {
    let (site, devices) = match &server.duty {
        Duty::Site(site, devices) => (site, devices),
        Duty::Teleporter(matchers) => {
            return match_for(server, matchers, peer, request, reader, writer).await;
        }
    };
    match request {
        Request::Send { images, session } => {
            let _open = Open::count(&server.metrics.sessions_open);
            tracing::info!(images, "session opened");
            let ended = site
                .session(
                    reader,
                    writer,
                    peer.key,
                    peer.name.clone(),
                    SessionRequest { images, session },
                    server.stop.clone(),
                )
                .await;
            let counter = if ended.is_ok() {
                &server.metrics.sessions_done
            } else {
                &server.metrics.sessions_failed
            };
            counter.fetch_add(1, Relaxed);
            ended.with_context(|| format!("session of {}", peer.name))?;
            tracing::info!("session ended");
            Ok(())
        }
        Request::Lane { session } => Ok(site.lane(reader, writer, peer.key, session).await?),
        Request::Images => {
            images(server, &mut writer).await?;
            done(reader, writer).await
        }
        Request::Verify { name } => {
            let reply = jobs::verify(server, site, name, &mut writer).await?;
            answer(reader, writer, &reply).await
        }
        Request::Teleporter => {
            let text = format!(
                "{} is a site and no teleporter; run `drover teleporter` there",
                server.name
            );
            answer(reader, writer, &no(RefuseReason::Policy, text)).await
        }
        Request::Transfers => {
            transfers(site, &mut writer).await?;
            done(reader, writer).await
        }
        Request::RemoveTransfer { key } => {
            let reply = jobs::remove_transfer(server, site, key, Some(peer.key)).await?;
            answer(reader, writer, &reply).await
        }
        Request::Status
        | Request::Metrics
        | Request::Index { .. }
        | Request::Remove { .. }
        | Request::Leases
        | Request::BreakLease { .. }
        | Request::Changes
        | Request::DropChanges { .. }
        | Request::MergeChanges { .. } => {
            let text = "that can only be asked for on the site's own machine";
            answer(reader, writer, &no(RefuseReason::Policy, text)).await
        }
        Request::Device { open } => {
            let peer = drover_mount::server::Peer {
                key: peer.key,
                name: peer.name,
            };
            let stop = server.stop.clone();
            Ok(devices
                .serve_lane(reader, writer, peer, &open, stop)
                .await?)
        }
        // Answered before trust was asked for.
        Request::Pair { .. } => bail!("a second request to pair"),
    }
}

/// What a lone teleporter does for a trusted peer.
async fn match_for(
    server: &Arc<Server>,
    matchers: &Arc<Matchers>,
    peer: Peer,
    request: Request,
    reader: FrameReader,
    writer: FrameWriter,
) -> Result<()> {
    if !matches!(request, Request::Teleporter) {
        let text = format!("{} is a teleporter and holds no images", server.name);
        return answer(reader, writer, &no(RefuseReason::Policy, text)).await;
    }
    let matcher = match matchers.of(peer.key).await {
        Ok(matcher) => matcher,
        Err(e) => return answer(reader, writer, &failed(one_line(&e))).await,
    };
    let _open = Open::count(&server.metrics.sessions_open);
    tracing::info!("matching for it");
    let mut stop = server.stop.clone();
    let ended = tokio::select! {
        ended = serve_teleporter(reader, writer, matcher.shared()) => ended,
        () = told(&mut stop) => Ok(()),
    };
    let counter = if ended.is_ok() {
        &server.metrics.sessions_done
    } else {
        &server.metrics.sessions_failed
    };
    counter.fetch_add(1, Relaxed);
    matcher.done().await?;
    ended.with_context(|| format!("matching for {}", peer.name))
}

/// Greets, and hears what is wanted.
async fn hear(
    server: &Arc<Server>,
    reader: &mut FrameReader,
    writer: &mut FrameWriter,
) -> Result<Request> {
    if let Err(e) = greet(reader, writer, Role::Server).await {
        server.metrics.rejected_handshake.fetch_add(1, Relaxed);
        return Err(e.into());
    }
    tokio::time::timeout(FIRST_REQUEST_LIMIT, first_request(reader))
        .await
        .context("no request came")?
}

async fn first_request(reader: &mut FrameReader) -> Result<Request> {
    let frame = reader.next().await?.context("it said nothing")?;
    if frame.kind != kind::REQUEST {
        bail!(
            "it began with a frame of kind {:#04x} and no request",
            frame.kind
        );
    }
    Ok(decode(&frame.payload)?)
}

/// Uses a ticket.
async fn pair(
    server: &Arc<Server>,
    key: PeerKey,
    secret: [u8; 16],
    name: String,
    mut addresses: Vec<String>,
) -> Result<Reply> {
    // Nothing but host and port, and not more of them than a ticket has.
    addresses.retain(|a| {
        a.len() <= Ticket::MAX_ADDRESS_BYTES
            && a.contains(':')
            && a.chars().all(|c| c.is_ascii_graphic())
    });
    addresses.truncate(Ticket::MAX_ADDRESSES);
    let outcome = {
        let server = Arc::clone(server);
        tokio::task::spawn_blocking(move || {
            server
                .catalog
                .pair(&secret, key, &name, &addresses, now_unix())
        })
        .await??
    };
    let why = match outcome {
        PairOutcome::Paired(as_name) => {
            server.metrics.pairings.fetch_add(1, Relaxed);
            crate::notice::notice(&format!("paired with {as_name}, whose key is {key}"));
            return Ok(Reply::Paired {
                name: server.name.clone(),
            });
        }
        PairOutcome::UnknownTicket => "this ticket is not one of this site's",
        PairOutcome::UsedTicket => "this ticket was used already",
        PairOutcome::ExpiredTicket => "this ticket is too old",
    };
    server.metrics.tickets_refused.fetch_add(1, Relaxed);
    tracing::warn!(peer = key.short(), "refused to pair: {why}");
    Ok(no(
        RefuseReason::Trust,
        format!("{why}; make another with `drover ticket`"),
    ))
}

/// Lists the images, some in each reply, an empty one last.
pub async fn images(server: &Arc<Server>, writer: &mut FrameWriter) -> Result<()> {
    let catalog = Arc::clone(&server.catalog);
    let records = tokio::task::spawn_blocking(move || catalog.images()).await??;
    let infos: Vec<ImageInfo> = records.into_iter().map(crate::images::info).collect();
    for some in infos.chunks(IMAGES_PER_REPLY) {
        reply(writer, &Reply::Images(some.to_vec())).await?;
    }
    reply(writer, &Reply::Images(Vec::new())).await?;
    Ok(())
}

/// Lists the unfinished transfers, some in each reply, an empty list last.
pub async fn transfers(site: &Arc<Site>, writer: &mut FrameWriter) -> Result<()> {
    let site = Arc::clone(site);
    let list = tokio::task::spawn_blocking(move || site.unfinished()).await??;
    for some in list.chunks(TRANSFERS_PER_REPLY) {
        reply(writer, &Reply::Transfers(some.to_vec())).await?;
    }
    reply(writer, &Reply::Transfers(Vec::new())).await?;
    Ok(())
}

/// Sends a reply.
pub async fn reply(writer: &mut FrameWriter, reply: &Reply) -> Result<(), NetError> {
    writer.send(kind::REPLY, &encode(reply)).await?;
    writer.flush().await
}

/// Sends the last reply and ends the conversation.
pub async fn answer(reader: FrameReader, mut writer: FrameWriter, last: &Reply) -> Result<()> {
    reply(&mut writer, last).await?;
    done(reader, writer).await
}

/// Ends the conversation so that the peer gets everything.
pub async fn done(reader: FrameReader, writer: FrameWriter) -> Result<()> {
    // The peer has its answer; how it hangs up is its own affair.
    let _ = drover_net::close(reader, writer, CLOSE_LIMIT).await;
    Ok(())
}

/// A refusal.
pub fn no(reason: RefuseReason, message: impl Into<String>) -> Reply {
    Reply::Refused(Refusal {
        reason: Some(reason),
        message: short(message.into()),
    })
}

/// A failure, told to whoever asked.
pub fn failed(message: impl Into<String>) -> Reply {
    Reply::Refused(Refusal {
        reason: None,
        message: short(message.into()),
    })
}

fn short(mut message: String) -> String {
    let mut end = message.len().min(Refusal::MAX_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message.truncate(end);
    message
}

/// There is no image of that name.
pub fn no_image(server: &Server, name: &ImageName) -> Reply {
    no(
        RefuseReason::Policy,
        format!("{} has no image called {name}", server.name),
    )
}

/// Counts something while it lasts.
struct Open<'a>(&'a AtomicI64);

impl<'a> Open<'a> {
    fn count(gauge: &'a AtomicI64) -> Self {
        gauge.fetch_add(1, Relaxed);
        Open(gauge)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_refusals_are_cut_at_a_character() {
        let Reply::Refused(refusal) = failed("é".repeat(5000)) else {
            unreachable!()
        };
        assert!(refusal.message.len() <= Refusal::MAX_BYTES);
        assert!(refusal.message.chars().all(|c| c == 'é'));
    }
}
