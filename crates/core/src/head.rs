//! Classification of blocks for the matcher.

use serde::{Deserialize, Serialize};

/// Whether a block probably starts a file (teleportation §2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Head {
    /// No sign that a file starts here.
    #[default]
    No,
    /// The previous block has data but ends in five or more zero bytes, like the last block of a file.
    Weak,
    /// The block begins with a magic number of a known file type.
    Strong,
}
