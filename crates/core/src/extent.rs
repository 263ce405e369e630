//! Extents: runs of bytes with their allocation status.

use serde::{Deserialize, Serialize};

/// The allocation status of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExtentKind {
    /// Data that has to be read.
    Data,
    /// Known to read as zeros.
    Zero,
    /// Not allocated; reads as zeros, or from the backing image if there is one.
    Hole,
}

/// A run of bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Its allocation status.
    pub kind: ExtentKind,
}

impl Extent {
    /// The first byte after the run; saturates instead of wrapping.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}
