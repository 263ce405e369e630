//! Disks in object stores: S3, Google Cloud Storage, Azure Blob Storage.

use bytes::Bytes;
use drover_core::DeviceError;
use drover_storage::cloud::{Cloud, CloudError, Version};

use super::store::{ChunkStore, Each, Promise, Tag, Wanted};

/// Bytes of the disk in an object: a request takes some tens of milliseconds, whatever its size.
const OBJECT: u32 = 1 << 20;

/// A prefix in an object store.
pub struct CloudStore(Cloud);

impl CloudStore {
    /// The prefix at a URL, with credentials from the environment or from profile files. Asks nothing of the store.
    ///
    /// # Errors
    /// When the URL is none of a store that is known, or nothing says how to reach it: why.
    pub fn open(url: &str) -> Result<Self, String> {
        Ok(CloudStore(Cloud::open(url)?))
    }
}

impl From<Cloud> for CloudStore {
    fn from(cloud: Cloud) -> Self {
        CloudStore(cloud)
    }
}

fn error(error: CloudError) -> DeviceError {
    // Credentials that have expired may be renewed, in their file.
    match error.can_retry || error.is_denied {
        true => DeviceError::Unavailable(error.to_string()),
        false => DeviceError::Io(std::sync::Arc::new(std::io::Error::other(
            error.to_string(),
        ))),
    }
}

fn version(tag: &Tag) -> Version {
    Version::new(tag.etag.clone(), tag.version.clone())
}

fn tag(version: Version) -> Tag {
    let (etag, version) = version.into_parts();
    Tag { etag, version }
}

impl ChunkStore for CloudStore {
    fn get(&self, wanted: &[Wanted]) -> Each<Option<Bytes>> {
        let wanted: Vec<_> = wanted
            .iter()
            .map(|wanted| (wanted.key.clone(), wanted.range.clone()))
            .collect();
        let got = self.0.get_many(&wanted).into_iter();
        got.map(|got| got.map_err(error)).collect()
    }

    fn put(&self, values: Vec<(String, Bytes)>) -> Each<()> {
        let put = self.0.put_many(values).into_iter();
        put.map(|put| put.map_err(error)).collect()
    }

    fn remove(&self, keys: &[String]) -> Result<(), DeviceError> {
        let mut removed = self.0.remove_many(keys).into_iter();
        removed.try_for_each(|removed| removed.map_err(error))
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(&str)) -> Result<(), DeviceError> {
        let listed = self.0.list_each(prefix.trim_end_matches('/'), each);
        listed.map_err(error)
    }

    fn look(&self, key: &str, most: usize) -> Result<Option<(Bytes, Tag)>, DeviceError> {
        let got = self.0.get_versioned(key, most as u64).map_err(error)?;
        Ok(got.map(|(bytes, version)| (bytes, tag(version))))
    }

    fn swap(&self, key: &str, was: Option<&Tag>, value: Bytes) -> Result<Option<Tag>, DeviceError> {
        let was = was.map(version);
        let swapped = self.0.swap(key, was.as_ref(), value).map_err(error)?;
        Ok(swapped.map(tag))
    }

    fn no_tag(&self) -> Tag {
        Tag {
            etag: Some("\"00000000000000000000000000000000\"".into()),
            version: Some("1".into()),
        }
    }

    fn settle(&self) -> Result<(), DeviceError> {
        // What it acknowledges is durable.
        Ok(())
    }

    fn promise(&self) -> Promise {
        Promise {
            is_durable: true,
            note: None,
        }
    }

    fn object(&self) -> u32 {
        OBJECT
    }

    fn describe(&self) -> String {
        self.0.url().to_owned()
    }
}

#[cfg(test)]
mod tests;
