//! What a site has: the catalog of its images and peers, and the names they go by.
//!
//! What must not live here: how an image gets from one site to another (`teleport`), how a device is served (`mount`), and anything
//! about a command line.

mod catalog;
pub mod peer_name;
mod sqlite;

pub use catalog::{Catalog, ImageRecord};
pub use sqlite::{CatalogError, PairOutcome, Peer, SiteCatalog, TICKET_LIFETIME};
