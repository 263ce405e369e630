//! The pairing service: accepts a site that holds a ticket as a peer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use drover_net::service::{Exchange, Handler, Peer, Request};
use drover_net::{Code, PeerKey, Refusal, Ticket, request};
use drover_store::{Grant, PairOutcome, ticket_id};
use serde::{Deserialize, Serialize};

use super::audited::write;
use super::server::{Common, Server};
use crate::audit::{Audit, Event, Record, grant_text};
use crate::error::{Result, failed};
use crate::notice::notice;
use crate::text::now_unix;

/// Request: pair by ticket. The reply has this site's own name.
#[derive(Debug, Serialize, Deserialize)]
pub struct Pair {
    /// The ticket's secret.
    pub secret: [u8; 16],
    /// The requesting site's own name.
    pub name: String,
    /// The listen addresses of the requesting site, if any.
    pub addresses: Vec<String>,
}
request!(Pair: "site.pair", Pair, () => String);

impl Handler<Pair> for Common {
    async fn handle(
        &self,
        peer: &Peer,
        request: Pair,
        exchange: &mut Exchange<'_, Pair>,
    ) -> Result<String, Refusal> {
        let server = &self.0;
        let ticket = ticket_id(&request.secret);
        let why = match used(server, peer.key, request).await.map_err(failed)? {
            PairOutcome::Paired(as_name) => {
                server.metrics.pairings.fetch_add(1, Relaxed);
                let key = peer.key;
                notice(&format!("paired with {as_name}, key {key}"));
                let from = exchange.remote().to_owned();
                told(server, key, as_name, &ticket, from)
                    .await
                    .map_err(failed)?;
                return Ok(server.name.clone());
            }
            PairOutcome::UnknownTicket => "this ticket is not one of this site's",
            PairOutcome::UsedTicket => "this ticket was used already",
            PairOutcome::ExpiredTicket => "this ticket is too old",
        };
        server.metrics.tickets_refused.fetch_add(1, Relaxed);
        let from = exchange.remote().parse::<SocketAddr>();
        if from.is_ok_and(|from| server.strangers.is_first(from.ip())) {
            tracing::warn!(peer = peer.key.short(), "refused to pair: {why}");
            let refusal = Refusal::new(Code::Untrusted, why);
            let record = Record::refused(Pair::SERVICE, &refusal, None)
                .by_stranger(Some(peer.key))
                .from(exchange.remote())
                .ticket(&ticket);
            write(server.home.audit(), record, Audit::write_limited).await;
        }
        let text = format!("{why}; print another with `drover ticket`");
        Err(Refusal::new(Code::Untrusted, text))
    }
}

/// Tells the audit log of a new peer.
async fn told(
    server: &Arc<Server>,
    key: PeerKey,
    name: String,
    ticket: &str,
    from: String,
) -> Result<()> {
    let catalog = Arc::clone(&server.catalog);
    let peer = tokio::task::spawn_blocking(move || catalog.peer_by_key(&key)).await??;
    let grant = peer.map(|peer| peer.grant).unwrap_or_else(Grant::nothing);
    let record = Record::new(Event::Paired)
        .by_peer(&name, key)
        .from(&from)
        .in_domain(&grant.domain)
        .ticket(ticket)
        .detail(grant_text(&grant));
    write(server.home.audit(), record, Audit::write).await;
    Ok(())
}

/// Redeems a ticket.
async fn used(server: &Arc<Server>, key: PeerKey, request: Pair) -> Result<PairOutcome> {
    let Pair {
        secret,
        name,
        mut addresses,
    } = request;
    // Only well-formed host and port pairs, and at most as many as a ticket has.
    addresses.retain(|a| {
        a.len() <= Ticket::MAX_ADDRESS_BYTES
            && a.contains(':')
            && a.chars().all(|c| c.is_ascii_graphic())
    });
    addresses.truncate(Ticket::MAX_ADDRESSES);
    let catalog = Arc::clone(&server.catalog);
    let pair = move || catalog.pair(&secret, key, &name, &addresses, now_unix());
    Ok(tokio::task::spawn_blocking(pair).await??)
}
