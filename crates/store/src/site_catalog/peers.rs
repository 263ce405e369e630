//! Peers in the catalog of a site.

use drover_net::PeerKey;
use rusqlite::types::Value;

use super::SiteCatalog;
use super::rows::Peer;
use super::seal::Seal;
use super::table::{Row, RowError, Tables};
use crate::catalog_error::Result;
use crate::grant::Grant;
use crate::peer_name;

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

    /// Stores a peer under a name chosen here; a known key gets the new name, addresses and grant.
    ///
    /// # Errors
    /// `CatalogError::Conflict` when another key has the name, or the grant is not valid.
    pub fn put_peer(&self, peer: &Peer) -> Result<()> {
        self.change("storing a peer", |tx, seal| {
            peer.grant.check().map_err(RowError::Conflict)?;
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

    /// Changes what the peer of this name may do in one transaction, and returns the peer as it is then; `None` when there is
    /// none.
    ///
    /// # Errors
    /// `CatalogError::Conflict` when the grant is not valid, or when the database cannot be written.
    pub fn change_grant(
        &self,
        name: &str,
        change: impl FnOnce(&mut Grant),
    ) -> Result<Option<Peer>> {
        self.change("changing what a peer may do", |tx, seal| {
            let Some(mut peer) = Peer::get(tx, name)? else {
                return Ok(None);
            };
            change(&mut peer.grant);
            peer.grant.check().map_err(RowError::Conflict)?;
            seal.put(tx, &peer)?;
            Ok(Some(peer))
        })
    }
}

/// The peer with this key.
pub(super) fn by_key(c: &dyn Tables, key: &PeerKey) -> Result<Option<Peer>, RowError> {
    Peer::find(c, "key", &Value::Text(key.to_string()))
}

/// Inserts a peer, replacing any with the same key.
pub(super) fn replace(tx: &dyn Tables, seal: &mut Seal, peer: &Peer) -> Result<(), RowError> {
    if let Some(old) = by_key(tx, &peer.key)? {
        seal.take::<Peer>(tx, &old.name)?;
    }
    seal.put(tx, peer)?;
    Ok(())
}

/// `wanted` or a variant of it that no other key has.
pub(super) fn free_name(tx: &dyn Tables, wanted: &str, key: &PeerKey) -> Result<String, RowError> {
    let peers = Peer::all(tx)?;
    let wanted = peer_name::from_untrusted(wanted);
    Ok(peer_name::unique(&wanted, |n| {
        peers.iter().any(|p| p.name == n && p.key != *key)
    }))
}
