//! What a disk asks of a store.

use std::ops::Range;

use bytes::Bytes;
use drover_core::DeviceError;

/// What names the state of a value in a store, for conditional writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    /// Its entity tag.
    pub etag: Option<String>,
    /// Its version, where a store has such.
    pub version: Option<String>,
}

/// A part of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its key.
    pub key: String,
    /// Which bytes of it.
    pub range: Range<u64>,
}

/// What became of a request of many: as many results as there were keys, in their order.
pub type Each<T> = Vec<Result<T, DeviceError>>;

/// What a store promises of what it has acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// It survives a crash and a loss of power of the store.
    pub is_durable: bool,
    /// What a person should know of it.
    pub note: Option<String>,
}

/// A store of values by key, as a disk uses it. Keys consist of `a-z`, `0-9`, `-` and `/`.
///
/// Calls block, from any thread, and keep many requests under way where there are many. Errors that a retry may help
/// against were met with retries, for some minutes at most, and are then [`DeviceError::Unavailable`]; all others are final.
/// A value that was written MUST be seen by every read that begins later. Writes, but for [`ChunkStore::swap`], may be
/// repeated, and may take place long after their error: no two have the same key and another value.
pub trait ChunkStore: Send + Sync {
    /// Parts of values; none for keys that do not exist. What is returned may be longer or shorter than was asked for, but
    /// not by much: the implementation bounds it.
    fn get(&self, wanted: &[Wanted]) -> Each<Option<Bytes>>;

    /// Writes values.
    fn put(&self, values: Vec<(String, Bytes)>) -> Each<()>;

    /// Removes values; those that do not exist are no errors.
    ///
    /// # Errors
    /// [`DeviceError`]; some may have been removed.
    fn remove(&self, keys: &[String]) -> Result<(), DeviceError>;

    /// Calls `each` with every key that begins so. Keys that are written or removed meanwhile may be among them or not.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn list(&self, prefix: &str, each: &mut dyn FnMut(&str)) -> Result<(), DeviceError>;

    /// A value of at most `most` bytes with its tag; none if it does not exist.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn look(&self, key: &str, most: usize) -> Result<Option<(Bytes, Tag)>, DeviceError>;

    /// Writes a value if it has that tag, or if it does not exist; returns its new tag, or none if it was refused. It is tried
    /// once.
    ///
    /// # Errors
    /// [`DeviceError`]; it may have been written.
    fn swap(&self, key: &str, was: Option<&Tag>, value: Bytes) -> Result<Option<Tag>, DeviceError>;

    /// A tag that no value has.
    fn no_tag(&self) -> Tag;

    /// Returns when everything that was acknowledged is as safe as the store can make it.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn settle(&self) -> Result<(), DeviceError>;

    /// What it promises.
    fn promise(&self) -> Promise;

    /// Bytes of the disk in an object, unless the user wants another number: more where each request takes long.
    fn object(&self) -> u32;

    /// Where it is, for messages: without a password.
    fn describe(&self) -> String;
}
