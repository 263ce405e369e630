//! The dirty table: which chunks are dirty, which are frozen in the epoch in flight, and which are not in the map on
//! disk.

use std::collections::{BTreeMap, BTreeSet};

use drover_core::Digest;

use super::state::{ChunkState, Geometry, Mask};

/// Subchunks of a chunk that belong to the current epoch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Frozen {
    pub mask: Mask,
    /// Overwritten since the freeze: their frozen contents are in the copy-before-write store.
    pub kept: Mask,
    /// Staged at the remote: may be overwritten without a copy.
    pub there: Mask,
    /// Reported as staged by the remote, while its report is being read.
    seen: Mask,
}

/// Guarded by one mutex, which is taken after a stripe's lock and never held during I/O. About 40 bytes per dirty
/// chunk.
#[derive(Default)]
pub struct Table {
    /// Subchunks written since the last freeze.
    pub dirty: BTreeMap<u64, Mask>,
    /// Subchunks of the current epoch.
    pub frozen: BTreeMap<u64, Frozen>,
    /// Cached subchunks of partial chunks.
    pub present: BTreeMap<u64, Mask>,
    /// Chunks with bytes that the next flush must make durable.
    pub unlogged_dirty: BTreeSet<u64>,
    /// Other chunks whose state the map lacks, with the digest if they are clean.
    pub unlogged: BTreeMap<u64, Option<Digest>>,
    /// Settled chunks that the map still records as dirty: if they were evicted now, a crash would push zeros.
    pub guarded: BTreeSet<u64>,
    pub dirty_bytes: u64,
    pub frozen_bytes: u64,
    /// Bytes of the current epoch staged at the remote.
    pub there_bytes: u64,
    /// Incremented when an epoch begins and when one is abandoned.
    pub generation: u64,
}

impl Table {
    /// A write touched these subchunks. An empty mask: it failed where no cached data could have changed.
    pub fn wrote(&mut self, geometry: Geometry, index: u64, mask: Mask) {
        if mask == 0 {
            return;
        }
        let entry = self.dirty.entry(index).or_default();
        self.dirty_bytes += geometry.bytes(index, mask & !*entry);
        *entry |= mask;
        self.unlogged.remove(&index);
        self.unlogged_dirty.insert(index);
    }

    /// A chunk is now in a state that needs no push.
    pub fn settled(&mut self, index: u64, digest: Option<Digest>) {
        self.unlogged_dirty.remove(&index);
        self.unlogged.insert(index, digest);
    }

    /// Moves everything dirty into an epoch; the previous one must be over.
    pub fn freeze(&mut self) {
        let frozen = std::mem::take(&mut self.dirty)
            .into_iter()
            .map(|(index, mask)| {
                let frozen = Frozen {
                    mask,
                    ..Frozen::default()
                };
                (index, frozen)
            });
        self.frozen = frozen.collect();
        self.frozen_bytes = std::mem::take(&mut self.dirty_bytes);
        self.there_bytes = 0;
        self.generation += 1;
    }

    /// Abandons the current epoch: its contents are dirty again.
    pub fn thaw(&mut self, geometry: Geometry) {
        for (index, frozen) in std::mem::take(&mut self.frozen) {
            let entry = self.dirty.entry(index).or_default();
            self.dirty_bytes += geometry.bytes(index, frozen.mask & !*entry);
            *entry |= frozen.mask;
        }
        (self.frozen_bytes, self.there_bytes) = (0, 0);
        self.generation += 1;
    }

    /// A run of the epoch with that generation has been staged.
    pub fn staged(&mut self, geometry: Geometry, generation: u64, offset: u64, length: u64) {
        if self.generation != generation {
            return;
        }
        let touched = geometry.touched(offset, length);
        for (index, frozen) in self.frozen.range_mut(touched) {
            let within = geometry.within(*index, offset, length);
            let new = geometry.cover(*index, &within) & frozen.mask & !frozen.there;
            frozen.there |= new;
            self.there_bytes += geometry.bytes(*index, new);
        }
    }

    /// The remote reports a run of the current epoch as staged.
    pub fn see(&mut self, geometry: Geometry, offset: u64, length: u64) {
        let touched = geometry.touched(offset, length);
        for (index, frozen) in self.frozen.range_mut(touched) {
            let within = geometry.within(*index, offset, length);
            frozen.seen |= geometry.cover(*index, &within) & frozen.mask;
        }
    }

    /// The report is complete: what it lacks must be sent again. False when that is impossible, because some of it was
    /// overwritten since.
    pub fn believe(&mut self, geometry: Geometry) -> bool {
        self.there_bytes = 0;
        for (index, frozen) in &mut self.frozen {
            let seen = std::mem::take(&mut frozen.seen);
            let written = self.dirty.get(index).copied().unwrap_or(0);
            if frozen.there & !seen & !frozen.kept & written != 0 {
                return false;
            }
            frozen.there = seen;
            self.there_bytes += geometry.bytes(*index, seen);
        }
        true
    }

    /// Subchunks not at the remote.
    pub fn unpushed(&self, index: u64) -> Mask {
        let dirty = self.dirty.get(&index).copied().unwrap_or(0);
        dirty | self.frozen.get(&index).map_or(0, |f| f.mask)
    }

    /// Subchunks that must be copied before a write overwrites them.
    pub fn to_keep(&self, index: u64, touched: Mask) -> Mask {
        self.frozen
            .get(&index)
            .map_or(0, |f| f.mask & touched & !f.kept & !f.there)
    }

    /// The mask that the map records for a chunk in `state`.
    pub fn mask(&self, index: u64, state: ChunkState) -> Mask {
        match state {
            ChunkState::Dirty | ChunkState::Erased => self.unpushed(index),
            ChunkState::Partial => self.present.get(&index).copied().unwrap_or(0),
            _ => 0,
        }
    }
}
