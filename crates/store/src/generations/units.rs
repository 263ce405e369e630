//! What lines and summaries count in.

use drover_net::random_id;

/// The unit of a map, in bytes.
pub const CHUNK: u64 = 1 << 20;

/// The largest disk, in bytes: bounds the map in memory, which needs 2 bits to 9 bits for each chunk.
pub const MAX_SIZE: u64 = 64 << 40;

/// How many generations a map tells apart; earlier ones count as the earliest of them.
pub(super) const MAX_AGE: u8 = 200;

/// Names a line of copies of a disk: random, chosen when its first map is made.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seed(pub [u8; 16]);

impl std::fmt::Display for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seed({self})")
    }
}

/// A random tag of a generation.
pub(super) fn new_tag() -> u64 {
    let bytes: [u8; 16] = random_id();
    bytes
        .first_chunk()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
