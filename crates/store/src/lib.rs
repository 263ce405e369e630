//! The persistent state of a site: the catalog of its images and peers, the map of each image, the data of the sequence
//! cache, the leases of images and the changes to them; and a report of the disk space they take (decision `0026`).
//!
//! - [`Catalog`]: the interface of the image database; [`SiteCatalog`] implements it on SQLite and, with the feature
//!   `postgres`, on a PostgreSQL server that several nodes share.
//! - [`Grant`]: what a peer may do; [`domain`]: the names of domains.
//! - [`Images`]: the images as sources of blocks, with an [`ImageMap`] each; [`sequences`]: blocks shared between
//!   images.
//! - [`nodes`]: the nodes of a site that share its catalog and the directory of its images.
//! - [`Likeness`]: what is noted of an image to choose similar ones; [`KnownFiles`]: that of every image of a site, and of files that
//!   are not indexed.
//! - [`naming`]: renames a complete file into place; [`lease`]: who may write an image; [`machine`]: which site may run a machine; [`generations`]: when
//!   each chunk of a disk was last written; [`changes`]: what mounts wrote
//!   over images; [`profile`]: what a machine reads of an image first; [`space`]: disk usage.
//!
//! What must not live here: how an image gets from one site to another (`teleport`), how a device is served (`mount`),
//! and anything about a command line.
//!
//! ```
//! use drover_store::{Catalog, SiteCatalog};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let home = tempfile::tempdir()?;
//! let (catalog, repairs) = SiteCatalog::open(home.path())?;
//! assert!(repairs.is_empty() && catalog.images()?.is_empty());
//! // An ID is never reused, even if its image is removed.
//! assert_ne!(catalog.new_image_id()?, catalog.new_image_id()?);
//! # Ok(())
//! # }
//! ```

mod blockmap;
mod catalog;
mod catalog_error;
pub mod changes;
pub mod domain;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod generations;
mod grant;
mod imagemap;
mod images;
mod known;
pub mod lease;
mod likeness;
pub mod machine;
pub mod naming;
pub mod nodes;
pub mod peer_name;
pub mod profile;
pub mod replica;
pub mod sequences;
mod site_catalog;
pub mod space;
#[cfg(feature = "testing")]
pub mod testing;

pub use blockmap::{BlockMap, DataBits, ENTRY_BLOCKS};
pub use catalog::{Catalog, ImageRecord, Known, MAX_SHARED};
pub use catalog_error::CatalogError;
pub use error::StoreError;
pub use grant::Grant;
pub use imagemap::{ImageMap, MAX_IMAGE_BYTES, MAX_LAYOUT_BYTES, layout_limits};
pub use images::{Images, OpenImage};
pub use known::{KnownFile, KnownFiles, MAX_KNOWN_FILES};
pub use likeness::{Likeness, Looked, MAX_LIKENESS_BYTES, MIN_SIMILARITY, look_at_file};
pub use site_catalog::{
    CatalogUrl, FormerGrant, PairOutcome, Peer, SiteCatalog, TICKET_LIFETIME, TicketInfo, ticket_id,
};
