//! A disk in a store of keys and values: an object store, Redis, Cassandra. One core for all of them, over [`ChunkStore`].
//!
//! Nothing is overwritten but one header. An object holds a run of chunks, each with a digest; it is written once, under
//! a key with its number and a version that no other write has. A table, in pages that are written once as well, has the
//! version of each object, and the header those of the pages. A flush writes what has changed, the pages, and then the
//! header, by a conditional write: from then on the disk is as it was flushed, and before it is as the flush before had
//! left it. What is lost, mangled or old is found by that: no key, no digest, no chunk that the table does not name, is
//! ever taken for zeros. Who writes has a lease, in the header; without it the conditional write fails, and nothing else
//! that it wrote is named by any header. The bytes: `docs/format/chunk-store.md`; why: decision 0070.

mod address;
mod buffer;
#[cfg(feature = "cassandra")]
mod cassandra;
#[cfg(feature = "s3")]
mod cloud;
mod commit;
mod connect;
mod device;
mod epochs;
mod error;
mod format;
#[cfg(all(fuzzing, not(feature = "cassandra")))]
#[path = "chunk_store/cassandra/frame.rs"]
mod frame;
mod head;
mod inner;
mod open;
#[cfg(feature = "redis")]
mod redis;
#[cfg(all(fuzzing, not(feature = "redis")))]
#[path = "chunk_store/redis/reply.rs"]
mod reply;
#[cfg(any(feature = "redis", feature = "cassandra"))]
mod socket;
mod store;
mod sweep;
mod table;
#[cfg(feature = "testing")]
mod testing;
#[cfg(test)]
mod tests;
mod write_back;

pub use address::{AddressError, CassandraTable, RedisServer, StoreAddress};
#[cfg(feature = "cassandra")]
pub use cassandra::CassandraStore;
#[cfg(all(feature = "cassandra", feature = "testing"))]
pub use cassandra::cassandra_query;
#[cfg(feature = "s3")]
pub use cloud::CloudStore;
pub use device::StoreDevice;
pub use epochs::Epochs;
pub use error::OpenError;
pub use format::Holder;
pub use open::{NewStore, StoreOptions, break_lease, create, holder};
#[cfg(feature = "redis")]
pub use redis::RedisStore;
pub use store::{ChunkStore, Each, Promise, Tag, Wanted};
#[cfg(feature = "testing")]
pub use testing::{MemoryStore, StoreFault};

/// For fuzzing: parsers of what a store returns.
#[cfg(fuzzing)]
pub mod fuzzing {
    /// A header, a page and a chunk of an object, from any bytes.
    pub fn parse(bytes: &[u8]) {
        use super::format::{self, Header, Version};
        if let Ok(header) = Header::decode(bytes) {
            assert_eq!(Header::decode(&header.encode()).as_ref(), Ok(&header));
            let length = header.length(0) as usize;
            if length > 0 {
                let span = format::span(&header, 0, &(length - 1..length));
                let mut to = vec![0; span.covers.len()];
                let _ = format::decode_span(&header, (0, Version(1)), &span, bytes, &mut to);
            }
        }
        let _ = format::decode_page(&[0; 16], 0, Version(1), bytes);
        #[cfg(not(feature = "redis"))]
        let _ = super::reply::read(&mut std::io::Cursor::new(bytes), 4096);
        #[cfg(not(feature = "cassandra"))]
        let _ = super::frame::read(&mut std::io::Cursor::new(bytes), 4096)
            .and_then(|frame| super::frame::answer(&frame));
        if let Ok(key) = std::str::from_utf8(bytes) {
            let _ = format::parse_key(key);
            let _ = key.parse::<super::StoreAddress>();
        }
    }
}
