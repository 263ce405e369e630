//! What a site remembers about its images, whatever database keeps it.

use std::path::PathBuf;

use drover_core::{Digest, ImageName};
use drover_image::Stamp;
use drover_index::ImageId;

use crate::catalog_error::CatalogError;

/// An image of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRecord {
    /// Its number at this site, never reused.
    pub id: ImageId,
    /// Its name at this site.
    pub name: ImageName,
    /// Where its file is (absolute).
    pub path: PathBuf,
    /// Container format, as `image` names it.
    pub format: String,
    /// The file's length in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are not holes.
    pub data_bytes: u64,
    /// The size the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// The digest of the file.
    pub digest: Digest,
    /// The file as it was when the digest was taken; `None` when it was rebuilt after a loss.
    pub stamp: Option<Stamp>,
    /// When it was delivered or indexed, seconds since 1970.
    pub added_unix: i64,
    /// The peer it came from; empty when it was indexed here.
    pub from: String,
    /// Whether it was indexed in place: drover never deletes or replaces such a file.
    pub external: bool,
}

/// The catalog of a site. Calls are short transactions, safe from any thread.
pub trait Catalog: Send + Sync {
    /// A number that no image of this site has had.
    ///
    /// # Errors
    /// What the database reports. The same holds for every method here.
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

    /// Puts `record` in, in place of any image of the same name, which it returns. One transaction,
    /// durable when it returns.
    ///
    /// # Errors
    /// As above.
    fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>, CatalogError>;

    /// Takes the image of that name out and returns it.
    ///
    /// # Errors
    /// As above.
    fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError>;
}
