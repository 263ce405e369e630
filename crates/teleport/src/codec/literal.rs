//! `LITERAL`: the contents of blocks, compressed together.

use drover_core::put_varint;

use super::{Malformed, Reader, Runs};
use serde::{Deserialize, Serialize};

use crate::protocol::FRAME_BLOCKS;

/// How a literal frame's blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Packing {
    /// Uncompressed.
    Plain,
    /// One LZ4 block.
    Lz4,
    /// A part of the connection's zstd stream, which restarts with this frame.
    ZstdNew,
    /// A part of the connection's zstd stream, continued.
    ZstdMore,
}

/// The header in front of the compressed blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiteralHeader {
    /// The image's number in the session.
    pub slot: u32,
    /// How the blocks are compressed.
    pub packing: Packing,
    /// The blocks: at least one, at most [`FRAME_BLOCKS`].
    pub runs: Runs,
}

/// A literal frame, borrowed.
#[derive(Debug, PartialEq, Eq)]
pub struct Literal<'a> {
    /// Its header.
    pub header: LiteralHeader,
    /// The compressed blocks.
    pub packed: &'a [u8],
}

impl LiteralHeader {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(16);
        put_varint(&mut out, u64::from(self.slot));
        out.push(match self.packing {
            Packing::Plain => 0,
            Packing::Lz4 => 1,
            Packing::ZstdNew => 2,
            Packing::ZstdMore => 3,
        });
        self.runs.put(&mut out);
        out
    }
}

impl<'a> Literal<'a> {
    /// Decodes a frame.
    ///
    /// # Errors
    /// When the header is not one that an encoder would write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "literal");
        let slot = r.at_most(u64::from(u32::MAX))? as u32;
        let packing = match r.byte()? {
            0 => Packing::Plain,
            1 => Packing::Lz4,
            2 => Packing::ZstdNew,
            3 => Packing::ZstdMore,
            _ => return Err(r.malformed()),
        };
        let runs = Runs::get(&mut r, FRAME_BLOCKS as u64)?;
        if runs.is_empty() {
            return Err(r.malformed());
        }
        Ok(Literal {
            header: LiteralHeader {
                slot,
                packing,
                runs,
            },
            packed: r.rest(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn there_and_back(
            slot in any::<u32>(),
            set in prop::collection::btree_set(0u64..5000, 1..=FRAME_BLOCKS),
            packed in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let header = LiteralHeader { slot, packing: Packing::ZstdMore, runs: set.into_iter().collect() };
            let mut bytes = header.encode();
            bytes.extend_from_slice(&packed);
            prop_assert_eq!(Literal::decode(&bytes), Ok(Literal { header, packed: &packed }));
        }

        #[test]
        fn rubbish_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Literal::decode(&bytes);
        }
    }
}
