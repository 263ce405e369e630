//! What a site has: the catalog of its images and peers and the names they go by, the map of each image, and the data of the
//! sequence cache.
//!
//! What must not live here: how an image gets from one site to another (`teleport`), how a device is served (`mount`), and anything
//! about a command line.

mod blockmap;
mod catalog;
mod catalog_error;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod imagemap;
mod images;
pub mod naming;
pub mod peer_name;
pub mod sequences;
mod sqlite;

pub use blockmap::{BlockMap, DataBits, ENTRY_BLOCKS};
pub use catalog::{Catalog, ImageRecord};
pub use catalog_error::CatalogError;
pub use error::StoreError;
pub use imagemap::{ImageMap, MAX_IMAGE_BYTES, MAX_LAYOUT_BYTES, layout_limits};
pub use images::{Images, OpenImage};
pub use sqlite::{PairOutcome, Peer, SiteCatalog, TICKET_LIFETIME};
