//! The dirty table: which chunks are dirty, which are frozen in the epoch in flight, and which are not in the map on disk.

use std::collections::{BTreeMap, BTreeSet};

use drover_core::Digest;

use super::state::{ChunkState, Geometry, Mask};

/// Subchunks of a chunk that belong to the epoch under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Frozen {
    pub mask: Mask,
    /// Overwritten since: what they held at the freeze is in the copy_before.
    pub kept: Mask,
    /// Staged at the far side: may be overwritten.
    pub there: Mask,
    /// What the far side says that it has staged, while it is being asked.
    seen: Mask,
}

/// Guarded by one mutex, which is taken after a stripe's lock and held for no I/O. Grows with what is dirty: about 40
/// bytes a dirty chunk.
#[derive(Default)]
pub struct Table {
    /// Subchunks written since the last freeze.
    pub dirty: BTreeMap<u64, Mask>,
    /// Subchunks of the epoch under way.
    pub frozen: BTreeMap<u64, Frozen>,
    /// Subchunks that partial chunks have here.
    pub present: BTreeMap<u64, Mask>,
    /// Chunks with bytes that the next flush must make durable.
    pub unlogged_dirty: BTreeSet<u64>,
    /// Other chunks whose state the map does not know yet, with the digest if they are clean.
    pub unlogged: BTreeMap<u64, Option<Digest>>,
    /// Settled chunks that the map still calls dirty: were they evicted now, a crash would push zeros.
    pub guarded: BTreeSet<u64>,
    pub dirty_bytes: u64,
    pub frozen_bytes: u64,
    /// Bytes of the epoch under way that are staged at the far side.
    pub there_bytes: u64,
    /// Grows when an epoch begins and when one is given up.
    pub generation: u64,
}

impl Table {
    /// A write touched these subchunks. None: it failed where nothing is here that it could have changed.
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

    /// Takes all that is dirty into an epoch; the one before must be over.
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

    /// Gives up the epoch under way: what it held is dirty again.
    pub fn thaw(&mut self, geometry: Geometry) {
        for (index, frozen) in std::mem::take(&mut self.frozen) {
            let entry = self.dirty.entry(index).or_default();
            self.dirty_bytes += geometry.bytes(index, frozen.mask & !*entry);
            *entry |= frozen.mask;
        }
        (self.frozen_bytes, self.there_bytes) = (0, 0);
        self.generation += 1;
    }

    /// A run of the epoch of that generation has been staged.
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

    /// The far side says that it has staged a run of the epoch under way.
    pub fn see(&mut self, geometry: Geometry, offset: u64, length: u64) {
        let touched = geometry.touched(offset, length);
        for (index, frozen) in self.frozen.range_mut(touched) {
            let within = geometry.within(*index, offset, length);
            frozen.seen |= geometry.cover(*index, &within) & frozen.mask;
        }
    }

    /// It has said all: what it has not is to be sent again. False when that cannot be, because some of what it had was
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

    /// Subchunks that are not at the far side.
    pub fn unpushed(&self, index: u64) -> Mask {
        let dirty = self.dirty.get(&index).copied().unwrap_or(0);
        dirty | self.frozen.get(&index).map_or(0, |f| f.mask)
    }

    /// Subchunks of a write that must be kept before they are overwritten.
    pub fn to_keep(&self, index: u64, touched: Mask) -> Mask {
        self.frozen
            .get(&index)
            .map_or(0, |f| f.mask & touched & !f.kept & !f.there)
    }

    /// What the map says of a chunk in `state`.
    pub fn mask(&self, index: u64, state: ChunkState) -> Mask {
        match state {
            ChunkState::Dirty | ChunkState::Erased => self.unpushed(index),
            ChunkState::Partial => self.present.get(&index).copied().unwrap_or(0),
            _ => 0,
        }
    }
}
