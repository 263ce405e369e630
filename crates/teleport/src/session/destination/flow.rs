//! How much of an image has come, and is to come.

use std::sync::atomic::AtomicU64;

/// What the driver tells of an image.
#[derive(Debug, Default)]
pub struct Flow {
    /// Blocks that were requested and have not come.
    pub coming: AtomicU64,
    /// Blocks that have come.
    pub came: AtomicU64,
    /// Batches that were claimed and are planned.
    pub planned: AtomicU64,
}
