//! Reading the block map from the log of an overlay.

use drover_core::BLOCK_SIZE_U64;
use drover_storage::chunk_log::Record;

use super::saving::{EPOCH, PLAIN, SETTLED};
use super::states::{BlockState, States};

/// Beyond any real epoch, and far from overflow.
const MAX_EPOCH: u64 = 1 << 62;

/// The contents of the log.
#[derive(Default)]
pub(super) struct Logged {
    pub(super) states: States,
    pub(super) epoch: u64,
    /// There may be plain changes that no flush covered.
    pub(super) marked: bool,
}

impl Logged {
    pub(super) fn take(&mut self, record: Record, size: u64) -> Result<(), String> {
        match record.state {
            EPOCH if record.first > MAX_EPOCH => return Err("an epoch beyond all".into()),
            EPOCH => self.epoch = record.first,
            PLAIN => self.marked = true,
            SETTLED => self.marked = false,
            number => {
                let state = BlockState::from_number(number)
                    .ok_or_else(|| format!("a block in state {number}"))?;
                let end = record.first.checked_add(u64::from(record.count));
                let end = end
                    .filter(|end| *end <= size.div_ceil(BLOCK_SIZE_U64))
                    .ok_or("blocks beyond the device")?;
                self.states.load(record.first..end, state);
            }
        }
        Ok(())
    }
}
