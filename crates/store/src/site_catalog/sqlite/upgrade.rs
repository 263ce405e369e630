//! Rows of schema 1, which had no rights, domains and owners, and what they become.

use std::collections::HashMap;

use rusqlite::types::Value;

use crate::catalog::ImageRecord;
use crate::grant::Grant;
use crate::site_catalog::rows::{Peer, TicketRow};
use crate::site_catalog::table::{Row, RowError, Tables};

/// Says what a peer of a catalog without rights may do, or with `None` what its tickets give.
pub type FormerGrant<'a> = dyn Fn(Option<&Peer>) -> Grant + 'a;

/// A row in the columns that schema 1 had.
#[derive(Debug)]
pub struct First<R>(pub R);

impl<R: Row> Row for First<R> {
    const TABLE: &'static str = R::TABLE;
    const COLUMNS: &'static [&'static str] = R::COLUMNS.split_at(R::FIRST).0;

    fn values(&self) -> Vec<Value> {
        let mut values = self.0.values();
        values.truncate(R::FIRST);
        values
    }

    fn of(values: &[Value]) -> Option<Self> {
        R::of(&[values, &R::added()].concat()).map(First)
    }
}

/// The rows of the tables that schema 2 has changed.
#[derive(Debug, Default)]
pub struct Rows {
    /// The peers.
    pub peers: Vec<Peer>,
    /// The tickets.
    pub tickets: Vec<TicketRow>,
    /// The images.
    pub images: Vec<ImageRecord>,
}

/// Reads the rows of an intact database of schema 1.
pub fn rows(c: &dyn Tables, former: &FormerGrant<'_>) -> Result<Rows, RowError> {
    let mut rows = Rows {
        peers: all(c)?,
        tickets: all(c)?,
        images: all(c)?,
    };
    give(&mut rows.peers, former);
    for ticket in &mut rows.tickets {
        ticket.grant = former(None);
    }
    own(&mut rows.images, &rows.peers);
    Ok(rows)
}

fn all<R: Row>(c: &dyn Tables) -> Result<Vec<R>, RowError> {
    let rows = First::<R>::all(c)?;
    Ok(rows.into_iter().map(|First(row)| row).collect())
}

/// Sets the grants of peers that had none.
pub fn give(peers: &mut [Peer], former: &FormerGrant<'_>) {
    for peer in peers {
        peer.grant = former(Some(&*peer));
    }
}

/// Sets the owners of images that had none: the peers that have the names under which they were sent, which is all that
/// schema 1 knows.
pub fn own(images: &mut [ImageRecord], peers: &[Peer]) {
    let keys: HashMap<&str, _> = peers.iter().map(|p| (&*p.name, p.key)).collect();
    for image in images {
        image.owner = keys.get(&*image.from).copied();
    }
}
