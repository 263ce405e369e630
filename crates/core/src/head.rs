//! What a block looks like to the matcher.

use serde::{Deserialize, Serialize};

/// Whether a block probably starts a file (teleportation §2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Head {
    /// Nothing says that a file starts here.
    #[default]
    No,
    /// The block before has data but ends in five or more zero bytes, as the tail of a file does.
    Weak,
    /// The block begins with a known file type's magic number.
    Strong,
}
