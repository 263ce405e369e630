//! Flocks: images that are sent together, as one job.
//!
//! - `hints`: which blocks nodes of the site have asked for, if several receive it;
//! - `live`: the flocks of a site while they are received;
//! - `record`: what is known of a flock, and the file that keeps it;
//! - `provenance`: which blocks first came to the site with it.
//!
//! How a site receives one is in `site/flocks.rs`, how a source sends one in `session/flock.rs`.

pub(crate) mod hints;
pub(crate) mod live;
pub(crate) mod provenance;
pub(crate) mod record;

pub use record::{
    FlockImage, FlockInfo, FlockRecord, FlockState, ImageBlocks, ImageState, MAX_FLOCK_IMAGES,
    MAX_FLOCKS, MAX_PEER_FLOCKS, flocks,
};
