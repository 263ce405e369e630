//! How much disk space changes take: for the caller to ask whether there is so much, before it makes them.

use std::ops::Range;

use drover_core::{BLOCK_SIZE_U64, check_range};

use super::Overlay;
use super::blocks::blocks_of;
use super::redo::Redo;
use super::states::BlockState;
use crate::remote::{Change, Epoch};

/// Upper bound on what logging the state of a run of blocks takes, in bytes.
const LOGGED_RUN: u64 = 64;

impl Overlay {
    /// Upper bound on the disk space that a plain write takes, in bytes; nothing where the overlay has the blocks already.
    #[must_use]
    pub fn space_for_write(&self, offset: u64, length: u64) -> u64 {
        if check_range(offset, length, self.size).is_err() {
            return 0;
        }
        match self.bytes_in(blocks_of(offset, length), |state| state != BlockState::Here) {
            0 => 0,
            new => new + LOGGED_RUN,
        }
    }

    /// The same for writing zeroes; what that gives back is subtracted.
    #[must_use]
    pub fn space_for_zeroes(&self, offset: u64, length: u64, keep_allocated: bool) -> u64 {
        if check_range(offset, length, self.size).is_err() {
            return 0;
        }
        let blocks = blocks_of(offset, length);
        let whole = self.whole_blocks(offset, length);
        let edges = match whole.is_empty() {
            true => [blocks, 0..0],
            false => [blocks.start..whole.start, whole.end..blocks.end],
        };
        // Part of a block is written, with what the base has of the rest.
        let edges: u64 = edges
            .into_iter()
            .map(|edge| self.bytes_in(edge, |state| state == BlockState::Base))
            .sum();
        let inside = match keep_allocated {
            true => self.bytes_in(whole, |state| state != BlockState::Here),
            false => return (edges + self.log_of_zeroes(&whole)).saturating_sub(self.held(whole)),
        };
        match edges + inside {
            0 => 0,
            new => new + 3 * LOGGED_RUN,
        }
    }

    /// The same for a trim.
    #[must_use]
    pub fn space_for_trim(&self, offset: u64, length: u64) -> u64 {
        if check_range(offset, length, self.size).is_err() {
            return 0;
        }
        let whole = self.whole_blocks(offset, length);
        self.log_of_zeroes(&whole).saturating_sub(self.held(whole))
    }

    /// Upper bound on the disk space that staging changes takes, in bytes, until their epoch is copied or abandoned.
    #[must_use]
    pub fn space_to_stage(changes: &[Change]) -> u64 {
        Redo::bytes_of(changes)
    }

    /// Upper bound on the disk space that committing a staged epoch takes beyond that, in bytes.
    #[must_use]
    pub fn space_to_commit(&self, epoch: Epoch) -> u64 {
        let staging = self.staging.lock();
        let redo = staging.redo.as_ref().filter(|redo| redo.epoch == epoch);
        let pieces = redo.into_iter().flat_map(Redo::all);
        let bytes = pieces.map(|(blocks, place)| {
            let copied = match place {
                Some(_) => self.bytes_in(blocks, |state| state != BlockState::Here),
                None => 0,
            };
            copied + LOGGED_RUN
        });
        bytes.sum()
    }

    /// Bytes of the blocks in such a state.
    fn bytes_in(&self, blocks: Range<u64>, is_meant: impl Fn(BlockState) -> bool) -> u64 {
        let states = self.states.read();
        let runs = states.runs(blocks).filter(|run| is_meant(run.1));
        runs.map(|(run, _)| (run.end - run.start) * BLOCK_SIZE_U64)
            .sum()
    }

    /// What the log takes when all these blocks become zeros.
    fn log_of_zeroes(&self, whole: &Range<u64>) -> u64 {
        match self.bytes_in(whole.clone(), |state| state != BlockState::Zero) {
            0 => 0,
            _ => LOGGED_RUN,
        }
    }

    /// Bytes of these blocks that the overlay has.
    fn held(&self, blocks: Range<u64>) -> u64 {
        self.bytes_in(blocks, |state| state == BlockState::Here)
    }
}
