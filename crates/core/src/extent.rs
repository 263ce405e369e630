//! Runs of bytes and what they hold.

use serde::{Deserialize, Serialize};

/// What a run of bytes holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExtentKind {
    /// Bytes that must be read.
    Data,
    /// Known to read as zeros.
    Zero,
    /// Not allocated; reads as zeros, or as the backing image where there is one.
    Hole,
}

/// A run `offset, length, kind` (bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// Where the run starts.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// What it holds.
    pub kind: ExtentKind,
}

impl Extent {
    /// The first byte after the run; saturates instead of wrapping.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}
