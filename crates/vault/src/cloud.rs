//! A vault in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

use std::ops::Range;

use bytes::Bytes;
use drover_storage::cloud::{Cloud, CloudError};

use crate::error::{Result, StoreError, VaultError};
use crate::objects::{Listed, Objects};

/// A prefix in an object store.
pub struct CloudObjects(Cloud);

impl CloudObjects {
    /// The prefix at a URL, with credentials from the environment or from profile files. Asks nothing of the store.
    ///
    /// # Errors
    /// When the URL is none of a store that is known, or nothing says how to reach it.
    pub fn open(url: &str) -> Result<Self> {
        let cloud = Cloud::open(url).map_err(|why| VaultError::Unsupported {
            url: url.to_owned(),
            why,
        })?;
        Ok(CloudObjects(cloud))
    }
}

impl From<Cloud> for CloudObjects {
    fn from(cloud: Cloud) -> Self {
        CloudObjects(cloud)
    }
}

impl From<CloudError> for StoreError {
    fn from(error: CloudError) -> Self {
        StoreError {
            doing: error.doing,
            key: error.key,
            vault: error.url,
            why: error.why,
            can_retry: error.can_retry,
            is_damage: false,
        }
    }
}

impl Objects for CloudObjects {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        Ok(self.0.create(key, bytes)?)
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        Ok(self.0.get(key)?)
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        Ok(self.0.get_range(key, range)?)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let listed = self.0.list(prefix)?.into_iter().map(|object| Listed {
            key: object.key,
            size: object.size,
            modified_ms: object.modified_ms,
        });
        Ok(listed.collect())
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        Ok(self.0.remove(key)?)
    }

    fn describe(&self) -> String {
        self.0.url().to_owned()
    }
}

#[cfg(test)]
mod tests;
