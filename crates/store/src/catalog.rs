//! The catalog interface: a site's database of images, independent of the database engine.

use std::path::PathBuf;

use drover_core::{Digest, ImageName};
use drover_image::Stamp;
use drover_index::ImageId;

use crate::catalog_error::CatalogError;

/// An image of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRecord {
    /// Its ID at this site, never reused.
    pub id: ImageId,
    /// Its name at this site.
    pub name: ImageName,
    /// The absolute path of its file.
    pub path: PathBuf,
    /// Container format, as named by the `image` crate.
    pub format: String,
    /// The file's length in bytes.
    pub size_bytes: u64,
    /// Bytes of the file that are not holes.
    pub data_bytes: u64,
    /// Virtual disk size in bytes.
    pub virtual_bytes: u64,
    /// The digest of the file.
    pub digest: Digest,
    /// File metadata from when the digest was computed; `None` when the record was rebuilt after a loss.
    pub stamp: Option<Stamp>,
    /// When it was delivered or indexed, seconds since 1970.
    pub added_unix: i64,
    /// The peer that sent it; empty when it was indexed here.
    pub from: String,
    /// Whether it was indexed in place: drover never deletes or replaces such a file.
    pub external: bool,
}

/// The catalog of a site. Calls are short transactions, safe from any thread.
pub trait Catalog: Send + Sync {
    /// Allocates an ID that no image of this site has had.
    ///
    /// # Errors
    /// Database errors; the same for every method here.
    fn new_image_id(&self) -> Result<ImageId, CatalogError>;

    /// All images.
    ///
    /// # Errors
    /// As above.
    fn images(&self) -> Result<Vec<ImageRecord>, CatalogError>;

    /// The image of that name.
    ///
    /// # Errors
    /// As above.
    fn by_name(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError>;

    /// Inserts `record`, replacing and returning any image of the same name. One transaction, durable on return.
    ///
    /// # Errors
    /// As above.
    fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>, CatalogError>;

    /// Removes and returns the image of that name.
    ///
    /// # Errors
    /// As above.
    fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError>;
}
