//! Blocks that come ahead of their batch: because a machine that runs from the image waits for them, or a profile names
//! them.
//!
//! A wanted block is asked for once. If its batch arrives before it does, it counts as requested there, so that neither a plan nor
//! another request is concerned with it. If it arrives before its batch, it is written without having been verified:
//! it comes from the authenticated source, as does what it would be verified by. The batch then has to announce the same
//! block, and its proof covers it.

use std::collections::{BTreeMap, HashMap};

use drover_store::DataBits;

use crate::codec::Runs;
use crate::protocol::BATCH_BLOCKS;

/// What to do with a block that the source has sent because it was wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// Write it: its batch has not arrived.
    Ahead,
    /// Verify it by its batch, then write it, as a literal.
    Literal,
    /// Ignore it: it is in place, or being put there.
    Useless,
}

/// The blocks, by batch and position in it, of batches that have not arrived.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Asked for, and not here yet.
    wanted: BTreeMap<u64, DataBits>,
    /// Asked for since a machine waits.
    waited: BTreeMap<u64, DataBits>,
    /// Written, not zeros.
    data: BTreeMap<u64, DataBits>,
    /// Zeros in the file, as in the image.
    zero: BTreeMap<u64, DataBits>,
}

fn has(of: &BTreeMap<u64, DataBits>, block: u64) -> bool {
    let bits = of.get(&(block / BATCH_BLOCKS));
    bits.is_some_and(|bits| bits.get(block % BATCH_BLOCKS))
}

fn set(of: &mut BTreeMap<u64, DataBits>, block: u64) {
    let bits = of.entry(block / BATCH_BLOCKS);
    let bits = bits.or_insert_with(|| DataBits::new(BATCH_BLOCKS));
    bits.set(block % BATCH_BLOCKS);
}

impl Ahead {
    /// Restores what came in an earlier session and is in place.
    pub fn restore(&mut self, data: HashMap<u64, DataBits>, zero: HashMap<u64, DataBits>) {
        self.data = data.into_iter().collect();
        self.zero = zero.into_iter().collect();
    }

    /// Whether a block was asked for, and has not come.
    pub fn is_wanted(&self, block: u64) -> bool {
        has(&self.wanted, block)
    }

    /// Whether to ask for a block, which counts as asked for from now on; `waited`: a machine waits for it.
    pub fn want(&mut self, block: u64, waited: bool) -> bool {
        let new = !self.is_wanted(block) && !has(&self.data, block) && !has(&self.zero, block);
        if new {
            set(&mut self.wanted, block);
            if waited {
                set(&mut self.waited, block);
            }
        }
        new
    }

    /// Whether to ask for a block that is on its way ahead of others: once, since a machine waits for it now.
    pub fn hurry(&mut self, block: u64) -> bool {
        let new = self.is_wanted(block) && !has(&self.waited, block);
        if new {
            set(&mut self.waited, block);
        }
        new
    }

    /// Blocks have come.
    pub fn came(&mut self, data: &Runs, zero: &Runs) {
        for (runs, of) in [(data, &mut self.data), (zero, &mut self.zero)] {
            for block in runs.blocks() {
                set(of, block);
                if let Some(bits) = self.wanted.get_mut(&(block / BATCH_BLOCKS)) {
                    bits.clear(block % BATCH_BLOCKS);
                }
            }
        }
    }

    /// A batch is here: nothing of it is ahead any more. Returns what was.
    pub fn arrived(&mut self, index: u64) -> OfBatch {
        self.waited.remove(&index);
        OfBatch {
            wanted: self.wanted.remove(&index),
            data: self.data.remove(&index),
            zero: self.zero.remove(&index),
        }
    }
}

/// What there was of a batch ahead of it, by position in it.
#[derive(Debug)]
pub(super) struct OfBatch {
    /// Still on its way.
    pub wanted: Option<DataBits>,
    /// In place, not zeros.
    pub data: Option<DataBits>,
    /// In place, zeros.
    pub zero: Option<DataBits>,
}

/// Which blocks of an announced batch the source was told to send ahead of others: each once, and once more when a machine waits for it.
#[derive(Debug)]
pub(super) struct Hurried {
    all: DataBits,
    waited: DataBits,
}

impl Hurried {
    /// None of so many blocks.
    pub fn new(blocks: u64) -> Self {
        Hurried {
            all: DataBits::new(blocks),
            waited: DataBits::new(blocks),
        }
    }

    /// Whether to tell it of a block, which counts as told from now on.
    pub fn hurry(&mut self, block: u64, waited: bool) -> bool {
        let known = match waited {
            true => &self.waited,
            false => &self.all,
        };
        let new = !known.get(block);
        self.all.set(block);
        if waited {
            self.waited.set(block);
        }
        new
    }
}
