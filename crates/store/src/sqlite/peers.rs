//! Trusted peers in the SQLite catalog, and the tickets for pairing.

use std::time::Duration;

use drover_net::PeerKey;
use rusqlite::Transaction;
use rusqlite::types::Value;

use super::SiteCatalog;
use super::rows::{Peer, Row, RowError, TicketRow};
use super::seal::Seal;
use crate::catalog_error::Result;
use crate::peer_name;

/// Upper bound on stored tickets; the oldest are dropped.
const MAX_TICKETS: usize = 1000;

/// The outcome of a pairing request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PairOutcome {
    /// The key is now trusted, under this name.
    Paired(String),
    /// The secret belongs to no ticket of this site.
    UnknownTicket,
    /// Another key used the ticket.
    UsedTicket,
    /// The ticket has expired.
    ExpiredTicket,
}

impl SiteCatalog {
    /// All peers, by name.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn peers(&self) -> Result<Vec<Peer>> {
        self.read("listing peers", Peer::all)
    }

    /// The peer of this name.
    ///
    /// # Errors
    /// As above.
    pub fn peer(&self, name: &str) -> Result<Option<Peer>> {
        self.read("finding a peer", |c| Peer::get(c, name))
    }

    /// The peer with this key.
    ///
    /// # Errors
    /// As above.
    pub fn peer_by_key(&self, key: &PeerKey) -> Result<Option<Peer>> {
        self.read("finding a peer", |c| by_key(c, key))
    }

    /// Stores a peer under a name chosen here; a known key gets the new name and addresses.
    ///
    /// # Errors
    /// `CatalogError::Conflict` when another key has the name.
    pub fn put_peer(&self, peer: &Peer) -> Result<()> {
        self.change("storing a peer", |tx, seal| {
            if Peer::get(tx, &peer.name)?.is_some_and(|p| p.key != peer.key) {
                return Err(RowError::Conflict(format!(
                    "another site is called {0} here already; choose another name, or `drover peers forget {0}` first",
                    peer.name
                )));
            }
            replace(tx, seal, peer)
        })
    }

    /// Revokes the trust in the peer of this name, and returns it.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn forget_peer(&self, name: &str) -> Result<Option<Peer>> {
        self.change("forgetting a peer", |tx, seal| seal.take(tx, name))
    }

    /// Stores a ticket that can be used once within `lifetime`.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn add_ticket(&self, secret: &[u8; 16], now_unix: i64, lifetime: Duration) -> Result<()> {
        let lifetime = i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX);
        self.change("storing a ticket", |tx, seal| {
            // Drop tickets that can no longer be used; they are kept for another week so that an attempt to use one
            // gets a specific error.
            let mut tickets = TicketRow::all(tx)?;
            tickets.sort_by_key(|t| t.created_unix);
            let too_many = (tickets.len() + 1).saturating_sub(MAX_TICKETS);
            for (i, t) in tickets.iter().enumerate() {
                if i < too_many || t.expires_unix < now_unix.saturating_sub(7 * 86_400) {
                    seal.take::<TicketRow>(tx, &t.secret)?;
                }
            }
            seal.put(
                tx,
                &TicketRow {
                    secret: hidden(secret),
                    created_unix: now_unix,
                    expires_unix: now_unix.saturating_add(lifetime),
                    used_by: String::new(),
                },
            )?;
            Ok(())
        })
    }

    /// Redeems a ticket: from now on `key` is trusted, under `wanted` or a free variant of that name. The same key may
    /// redeem the same ticket again, so that a request can be retried when its reply was lost.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn pair(
        &self,
        secret: &[u8; 16],
        key: PeerKey,
        wanted: &str,
        addresses: &[String],
        now_unix: i64,
    ) -> Result<PairOutcome> {
        self.change("pairing", |tx, seal| {
            let Some(ticket) = TicketRow::get(tx, &hidden(secret))? else {
                return Ok(PairOutcome::UnknownTicket);
            };
            let known = by_key(tx, &key)?;
            let again = ticket.used_by == key.to_string() && known.is_some();
            if !ticket.used_by.is_empty() && !again {
                return Ok(PairOutcome::UsedTicket);
            }
            if ticket.expires_unix <= now_unix && !again {
                return Ok(PairOutcome::ExpiredTicket);
            }
            let name = match &known {
                Some(peer) => peer.name.clone(),
                None => free_name(tx, wanted)?,
            };
            let kept = known.map(|k| k.addresses).unwrap_or_default();
            let addresses = if addresses.is_empty() {
                kept
            } else {
                addresses.to_vec()
            };
            replace(
                tx,
                seal,
                &Peer {
                    name: name.clone(),
                    key,
                    addresses,
                    paired_unix: now_unix,
                },
            )?;
            seal.put(
                tx,
                &TicketRow {
                    used_by: key.to_string(),
                    ..ticket
                },
            )?;
            Ok(PairOutcome::Paired(name))
        })
    }
}

fn by_key(c: &rusqlite::Connection, key: &PeerKey) -> Result<Option<Peer>, RowError> {
    Peer::find(c, "key", &Value::Text(key.to_string()))
}

/// Inserts a peer, replacing any with the same key.
fn replace(tx: &Transaction<'_>, seal: &mut Seal, peer: &Peer) -> Result<(), RowError> {
    if let Some(old) = by_key(tx, &peer.key)? {
        seal.take::<Peer>(tx, &old.name)?;
    }
    seal.put(tx, peer)?;
    Ok(())
}

fn free_name(tx: &Transaction<'_>, wanted: &str) -> Result<String, RowError> {
    let peers = Peer::all(tx)?;
    let wanted = peer_name::from_untrusted(wanted);
    Ok(peer_name::unique(&wanted, |n| {
        peers.iter().any(|p| p.name == n)
    }))
}

/// The hash of a ticket's secret, which is what is stored.
fn hidden(secret: &[u8; 16]) -> String {
    blake3::derive_key("drover 2026 ticket secret", secret)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}
