//! From the address of a disk to its store.

use std::sync::Arc;

use drover_core::DeviceError;

use super::address::{CassandraTable, RedisServer, StoreAddress};
use super::store::ChunkStore;

impl StoreAddress {
    /// The store. Credentials come from the environment or from files.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::Unsupported`] if this program was built without it.
    pub fn store(&self) -> Result<Arc<dyn ChunkStore>, DeviceError> {
        match self {
            StoreAddress::Objects(url) => objects(url),
            StoreAddress::Redis(server, prefix) => redis(server, prefix, &self.to_string()),
            StoreAddress::Cassandra(table) => cassandra(table, &self.to_string()),
        }
    }
}

#[cfg(feature = "s3")]
fn objects(url: &str) -> Result<Arc<dyn ChunkStore>, DeviceError> {
    let store = super::cloud::CloudStore::open(url);
    let store = store.map_err(|why| DeviceError::Unavailable(format!("{url}: {why}")))?;
    Ok(Arc::new(store))
}

#[cfg(not(feature = "s3"))]
fn objects(url: &str) -> Result<Arc<dyn ChunkStore>, DeviceError> {
    let why = format!("use {url}: this program was built without object stores (feature s3)");
    Err(DeviceError::Unsupported(why.into()))
}

#[cfg(feature = "redis")]
fn redis(
    server: &RedisServer,
    prefix: &str,
    text: &str,
) -> Result<Arc<dyn ChunkStore>, DeviceError> {
    let store = super::redis::RedisStore::connect(server.clone(), prefix, text)?;
    Ok(Arc::new(store))
}

#[cfg(not(feature = "redis"))]
fn redis(_: &RedisServer, _: &str, text: &str) -> Result<Arc<dyn ChunkStore>, DeviceError> {
    let why = format!("use {text}: this program was built without Redis (feature redis)");
    Err(DeviceError::Unsupported(why.into()))
}

#[cfg(feature = "cassandra")]
fn cassandra(table: &CassandraTable, text: &str) -> Result<Arc<dyn ChunkStore>, DeviceError> {
    let store = super::cassandra::CassandraStore::connect(table.clone(), text)?;
    Ok(Arc::new(store))
}

#[cfg(not(feature = "cassandra"))]
fn cassandra(_: &CassandraTable, text: &str) -> Result<Arc<dyn ChunkStore>, DeviceError> {
    let why = format!("use {text}: this program was built without Cassandra (feature cassandra)");
    Err(DeviceError::Unsupported(why.into()))
}
