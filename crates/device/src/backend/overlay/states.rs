//! The block map: the state of each block, and reading it from the log of an overlay.

use drover_core::BLOCK_SIZE_U64;
use drover_storage::chunk_log::Record;
use drover_storage::chunk_map::{ChunkMap, ChunkValue};

/// Records that are not about blocks: `first` holds the committed epoch.
pub(super) const EPOCH: u8 = 16;
/// Plain changes may follow.
pub(super) const PLAIN: u8 = 17;
/// All plain changes so far are durable.
pub(super) const SETTLED: u8 = 18;

/// Beyond any real epoch, and far from overflow.
const MAX_EPOCH: u64 = 1 << 62;

/// Where a block is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum BlockState {
    /// In the base.
    #[default]
    Base = 0,
    /// In the overlay's data.
    Here = 1,
    /// Nowhere: zeros.
    Zero = 2,
}

impl ChunkValue for BlockState {
    const BITS: u32 = 2;

    fn parts(self) -> (u8, u64) {
        (self as u8, 0)
    }

    /// No record returns a block to the base.
    fn from_parts(state: u8, _: u64) -> Option<Self> {
        match state {
            1 => Some(Self::Here),
            2 => Some(Self::Zero),
            _ => None,
        }
    }
}

/// The states of all blocks.
pub(super) type States = ChunkMap<BlockState>;

/// The contents of the log.
#[derive(Default)]
pub(super) struct Logged {
    pub states: States,
    pub epoch: u64,
    /// There may be plain changes that no flush covered.
    pub marked: bool,
}

impl Logged {
    /// Takes a record of the log of a device of `size` bytes.
    pub fn take(&mut self, record: Record, size: u64) -> Result<(), String> {
        match record.state {
            EPOCH if record.first > MAX_EPOCH => return Err("an epoch beyond all".into()),
            EPOCH => self.epoch = record.first,
            PLAIN => self.marked = true,
            SETTLED => self.marked = false,
            _ => return self.states.replay(record, size.div_ceil(BLOCK_SIZE_U64)),
        }
        Ok(())
    }
}
