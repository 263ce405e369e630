//! The catalog interface: a site's database of images, independent of the database engine.

use std::collections::HashMap;
use std::path::PathBuf;

use drover_core::{Digest, ImageName};
use drover_image::Stamp;
use drover_index::ImageId;
use drover_net::{PeerKey, Right, Rights};

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
    /// The peer that it belongs to; `None` when it belongs to this site's administrator.
    pub owner: Option<PeerKey>,
    /// Other peers that may replace it and write to it, at most [`MAX_SHARED`].
    pub shared: Vec<PeerKey>,
}

/// Upper bound on the peers that an image is shared with.
pub const MAX_SHARED: usize = 64;

impl ImageRecord {
    /// Whether a peer with these rights may replace it or change what it holds: its owner, those that it is shared with,
    /// whoever may change everything, and, if it is the site's own, everybody with the right to write. An image that came
    /// from a peer that is no longer known is nobody's.
    #[must_use]
    pub fn may_be_changed_by(&self, peer: &PeerKey, rights: Rights) -> bool {
        let is_owner = match self.owner {
            Some(owner) => owner == *peer,
            None => self.from.is_empty() && rights.has(Right::Write),
        };
        is_owner || self.shared.contains(peer) || rights.has(Right::Admin)
    }
}

/// What is known of the images of a catalog that others change as well.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// The number of the last change of the catalog.
    pub(crate) revision: Option<i64>,
    /// The checksums of the images, by name.
    pub(crate) sums: HashMap<String, i64>,
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

    /// Brings what is known of the images up to date, and returns those that have changed; `None` if nothing has.
    ///
    /// # Errors
    /// As above.
    fn changed(&self, known: &mut Known) -> Result<Option<Vec<ImageRecord>>, CatalogError> {
        let all = self.images()?;
        known.sums = all.iter().map(|r| (r.name.to_string(), 0)).collect();
        Ok(Some(all))
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_changed_by_those_that_may() {
        let key = |n| PeerKey([n; 32]);
        let image = |from: &str, owner| ImageRecord {
            id: ImageId(1),
            name: ImageName::new("a").unwrap(),
            path: "/a".into(),
            format: "raw".into(),
            size_bytes: 0,
            data_bytes: 0,
            virtual_bytes: 0,
            digest: Digest::default(),
            stamp: None,
            added_unix: 0,
            from: from.into(),
            external: false,
            owner,
            shared: vec![key(3)],
        };
        let may = |image: &ImageRecord| {
            [1, 2, 3].map(|n| image.may_be_changed_by(&key(n), Rights::DEFAULT))
        };
        assert_eq!(may(&image("a", Some(key(1)))), [true, false, true]);
        assert_eq!(may(&image("", None)), [true; 3]);
        let only_sends = Rights::of(&[Right::Send, Right::Read]);
        assert!(!image("", None).may_be_changed_by(&key(1), only_sends));
        // Its sender was forgotten, or its record was rebuilt without the owner.
        let nobodys = image("a", None);
        assert_eq!(may(&nobodys), [false, false, true]);
        assert!(nobodys.may_be_changed_by(&key(2), Rights::OWNER));
    }
}
