//! Tickets for pairing in the catalog of a site.

use std::time::Duration;

use drover_net::PeerKey;

use super::SiteCatalog;
use super::peers::{by_key, free_name, replace};
use super::rows::{Peer, TicketRow};
use super::table::{Row, RowError};
use crate::catalog_error::Result;
use crate::grant::Grant;
use crate::peer_name;

/// Upper bound on stored tickets; the oldest are dropped.
const MAX_TICKETS: usize = 1000;

/// Digits of the identifier by which users know a ticket.
const ID_DIGITS: usize = 8;

/// The outcome of a pairing request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PairOutcome {
    /// The key is now a peer, under this name.
    Paired(String),
    /// The secret belongs to no ticket of this site.
    UnknownTicket,
    /// Another key used the ticket.
    UsedTicket,
    /// The ticket has expired.
    ExpiredTicket,
}

/// A ticket that this site made. The ticket itself is not stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketInfo {
    /// A short identifier: the first eight hexadecimal digits of the hash of its secret.
    pub id: String,
    /// When it was created, in seconds since 1970.
    pub created_unix: i64,
    /// When it expires.
    pub expires_unix: i64,
    /// The key that redeemed it.
    pub used_by: Option<PeerKey>,
    /// The name that the peer gets; empty for the one that it proposes.
    pub name: String,
    /// What the peer may do.
    pub grant: Grant,
}

/// The identifier of the ticket with this secret.
#[must_use]
pub fn ticket_id(secret: &[u8; 16]) -> String {
    id_of(hidden(secret))
}

/// The beginning of the hash of a secret.
fn id_of(mut hidden: String) -> String {
    hidden.truncate(ID_DIGITS);
    hidden
}

impl From<TicketRow> for TicketInfo {
    fn from(row: TicketRow) -> Self {
        TicketInfo {
            id: id_of(row.secret),
            created_unix: row.created_unix,
            expires_unix: row.expires_unix,
            used_by: row.used_by.parse().ok(),
            name: row.name,
            grant: row.grant,
        }
    }
}

impl SiteCatalog {
    /// Stores a ticket that can be used once within `lifetime`: its peer gets the grant and, unless it is empty, the
    /// name.
    ///
    /// # Errors
    /// `CatalogError::Conflict` when the name or the grant is not valid, or when the database cannot be written.
    pub fn add_ticket(
        &self,
        secret: &[u8; 16],
        grant: &Grant,
        name: &str,
        now_unix: i64,
        lifetime: Duration,
    ) -> Result<()> {
        let lifetime = i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX);
        self.change("storing a ticket", |tx, seal| {
            grant.check().map_err(RowError::Conflict)?;
            if !name.is_empty() {
                peer_name::check(name).map_err(RowError::Conflict)?;
            }
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
                    grant: grant.clone(),
                    name: name.into(),
                },
            )?;
            Ok(())
        })
    }

    /// The tickets, also used and expired ones of the last days, the oldest first.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn tickets(&self) -> Result<Vec<TicketInfo>> {
        let mut tickets: Vec<TicketInfo> = self
            .read("listing tickets", TicketRow::all)?
            .into_iter()
            .map(TicketInfo::from)
            .collect();
        tickets.sort_by_key(|t| t.created_unix);
        Ok(tickets)
    }

    /// The ticket with this secret, if this site made it and it is not too old.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn ticket(&self, secret: &[u8; 16]) -> Result<Option<TicketInfo>> {
        let found = self.read("finding a ticket", |c| TicketRow::get(c, &hidden(secret)))?;
        Ok(found.map(TicketInfo::from))
    }

    /// Removes the ticket whose identifier begins with `id`, and returns it; `None` when there is none. A peer that has
    /// used it stays.
    ///
    /// # Errors
    /// `CatalogError::Conflict` when `id` is the beginning of several, or when the database cannot be written.
    pub fn revoke_ticket(&self, id: &str) -> Result<Option<TicketInfo>> {
        self.change("revoking a ticket", |tx, seal| {
            let id = id.to_ascii_lowercase();
            let mut found = TicketRow::all(tx)?;
            found.retain(|t| !id.is_empty() && t.secret.starts_with(&id));
            if found.len() > 1 {
                return Err(RowError::Conflict(format!(
                    "{} tickets begin with {id}: give more digits",
                    found.len()
                )));
            }
            let Some(ticket) = found.pop() else {
                return Ok(None);
            };
            let taken = seal.take::<TicketRow>(tx, &ticket.secret)?;
            Ok(taken.map(TicketInfo::from))
        })
    }

    /// Redeems a ticket: `key` becomes a peer with the ticket's grant, under the ticket's name, else the name that it has
    /// here, else `wanted`; if that name is taken, a free variant of it. The same key may redeem the same ticket again,
    /// so that a request can be retried when its reply was lost; this changes neither grant nor name.
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
            let used_by = key.to_string();
            let again = ticket.used_by == used_by && known.is_some();
            if !ticket.used_by.is_empty() && !again {
                return Ok(PairOutcome::UsedTicket);
            }
            if ticket.expires_unix <= now_unix && !again {
                return Ok(PairOutcome::ExpiredTicket);
            }
            let mut peer = match known {
                Some(peer) => peer,
                None => Peer {
                    name: free_name(tx, wanted, &key)?,
                    key,
                    addresses: Vec::new(),
                    paired_unix: now_unix,
                    grant: Grant::nothing(),
                },
            };
            if !again {
                // The grant may have been changed since the ticket was used: it must not come back.
                peer.grant = ticket.grant.clone();
                if !ticket.name.is_empty() {
                    peer.name = free_name(tx, &ticket.name, &key)?;
                }
            }
            if !addresses.is_empty() {
                peer.addresses = addresses.to_vec();
            }
            peer.paired_unix = now_unix;
            replace(tx, seal, &peer)?;
            seal.put(tx, &TicketRow { used_by, ..ticket })?;
            Ok(PairOutcome::Paired(peer.name))
        })
    }
}

/// The hash of a ticket's secret, which is what is stored.
fn hidden(secret: &[u8; 16]) -> String {
    blake3::derive_key("drover 2026 ticket secret", secret)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}
