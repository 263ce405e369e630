//! What a site has: the catalog of its images and peers and the names they go by, the map of each image, the data of the
//! sequence cache, and who may write an image,
//! and what room all that takes (decision `0026`).
//!
//! - [`Catalog`]: what is remembered of images, whatever database keeps it; [`SiteCatalog`] is the one on SQLite.
//! - [`Images`]: the images as sources of blocks, with an [`ImageMap`] each; [`sequences`]: blocks that images have shared.
//! - [`naming`]: how a whole file gets its name; [`lease`]: who may write an image; [`space`]: what takes room.
//!
//! What must not live here: how an image gets from one site to another (`teleport`), how a device is served (`mount`), and anything
//! about a command line.
//!
//! ```
//! use drover_store::{Catalog, SiteCatalog};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let home = tempfile::tempdir()?;
//! let (catalog, repairs) = SiteCatalog::open(home.path())?;
//! assert!(repairs.is_empty() && catalog.images()?.is_empty());
//! // A number is never given out twice, whatever becomes of its image.
//! assert_ne!(catalog.new_image_id()?, catalog.new_image_id()?);
//! # Ok(())
//! # }
//! ```

mod blockmap;
mod catalog;
mod catalog_error;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod imagemap;
mod images;
pub mod lease;
pub mod naming;
pub mod peer_name;
pub mod sequences;
pub mod space;
mod sqlite;

pub use blockmap::{BlockMap, DataBits, ENTRY_BLOCKS};
pub use catalog::{Catalog, ImageRecord};
pub use catalog_error::CatalogError;
pub use error::StoreError;
pub use imagemap::{ImageMap, MAX_IMAGE_BYTES, MAX_LAYOUT_BYTES, layout_limits};
pub use images::{Images, OpenImage};
pub use sqlite::{PairOutcome, Peer, SiteCatalog, TICKET_LIFETIME};
