//! The data file of the sequence cache (teleportation §2.14): blocks shared between images, kept so that they can be
//! reused after the images they were found in change or are removed.
//!
//! A new sequence is recorded at once but copied later, in the background. Until then its slots are "pending", and its
//! blocks are read from the incoming image it was found in, or from the older image that it matched. So an incoming
//! image that is never completed loses nothing. Correctness does not depend on durability, because every reused block
//! is hashed again; a lost slot costs one retransmission. See `docs/format/sequence-cache.md`.
//!
//! - `table`: the pending stores; `journal`: the same on disk.

mod journal;
mod table;

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use drover_core::{BLOCK_SIZE_U64, CompactIndex};
use drover_index::{ImageId, SequenceStore};
use drover_storage::open_private;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};

use crate::StoreError;
use journal::Journal;
use table::{Change, Pending, Table};

/// Slots per segment, the unit in which the matcher frees space.
pub use drover_index::SEGMENT_SLOTS;

/// Bytes per segment.
pub const SEGMENT_BYTES: u64 = SEGMENT_SLOTS * BLOCK_SIZE_U64;

/// Default limit on sequence data, in bytes: the range of the matcher's slot numbers.
pub const SEQUENCE_DATA_BYTES: u64 = 128 << 30;

/// The source of reused blocks, resolved from a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// None: must be sent.
    Literal,
    /// Another image of the site.
    Image {
        /// The image.
        image: ImageId,
        /// The first block.
        first: CompactIndex,
    },
    /// An earlier part of the same image.
    Own {
        /// The first block.
        first: CompactIndex,
    },
    /// The sequence cache's data file.
    Sequence {
        /// The slot of the first block.
        first: u64,
    },
}

/// Whether blocks of an image can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// They can be read.
    Here,
    /// They are being transferred.
    Coming,
    /// They will never be readable.
    Gone,
}

/// The data file and the pending stores.
#[derive(Debug)]
pub struct Sequences {
    data: File,
    /// Upper bound on the file's slots.
    limit: u64,
    pending: Mutex<Kept>,
    /// Held while slots are written or freed.
    writing: Mutex<()>,
}

/// The pending stores, in memory and on disk.
#[derive(Debug)]
struct Kept {
    table: Table,
    journal: Journal,
}

impl Kept {
    fn apply(&mut self, change: Change) {
        self.table.apply(change);
        self.journal.append(change, &self.table);
    }
}

/// A copy to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// The first slot.
    pub first: u64,
    /// Number of slots.
    pub count: u32,
    /// The image that has the blocks.
    pub image: ImageId,
    /// Its first block there.
    pub from: CompactIndex,
    /// The pending store when the copy began.
    of: Pending,
}

/// The outcome of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// The slots hold their blocks.
    Made,
    /// The image will never have the blocks.
    Never,
    /// Not possible now: the store stays pending.
    Later,
}

impl Sequences {
    /// Opens or creates the data file in `dir`, with the stores that were pending when the site last ran. The file is
    /// truncated to `limit` bytes.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(dir: &Path, limit: u64) -> Result<Self, StoreError> {
        let data_path = dir.join("sequences.data");
        let data = open_private(&data_path).map_err(StoreError::file("open", &data_path))?;
        // Earlier versions made it readable to others. The directory is private in any case.
        let _ = data.set_permissions(Permissions::from_mode(0o600));
        let limit = segments_of(limit) * SEGMENT_SLOTS;
        let size = data.metadata().map_or(0, |about| about.len());
        if size > limit * BLOCK_SIZE_U64 {
            data.set_len(limit * BLOCK_SIZE_U64)
                .map_err(StoreError::file("cut", &data_path))?;
        }
        let (mut journal, mut table) = Journal::open(&dir.join("sequences.pending"));
        if table
            .iter_from(limit.saturating_sub(SEGMENT_SLOTS))
            .any(|(first, p)| first + u64::from(p.count) > limit)
        {
            table.cut(limit);
            journal.rewrite(&table);
        }
        Ok(Sequences {
            data,
            limit,
            pending: Mutex::new(Kept { table, journal }),
            writing: Mutex::new(()),
        })
    }

    /// The data file.
    #[must_use]
    pub fn data(&self) -> &File {
        &self.data
    }

    /// Slots `store` get their blocks from `image`, or from where they were `found`. Replaces any pending store of
    /// these slots.
    pub fn add(
        &self,
        image: ImageId,
        store: SequenceStore,
        found: Option<(ImageId, CompactIndex)>,
    ) {
        let count = u64::from(store.count);
        // A standalone teleporter may use a higher limit or another segment size, and is not trusted.
        let inside = store.first < self.limit && count <= self.limit - store.first;
        if !(1..=SEGMENT_SLOTS).contains(&count) || !inside {
            return;
        }
        let entry = Pending {
            count: store.count,
            image: image.0,
            from: store.from,
            found: found.map(|(i, at)| (i.0, at)),
        };
        self.pending.lock().apply(Change::Put(store.first, entry));
    }

    /// Where to read the blocks of `count` slots from `first` at present, for an incoming image `own`; `reach` says
    /// whether a range of another image can be read.
    pub fn resolve(
        &self,
        first: u64,
        count: u32,
        own: ImageId,
        reach: impl Fn(ImageId, CompactIndex, u64) -> Reach,
    ) -> Vec<(u32, From)> {
        let pending = &self.pending.lock().table;
        let end = first.saturating_add(u64::from(count));
        let mut out = Vec::new();
        let mut at = first;
        while at < end {
            let (n, from) = match pending.covering(at) {
                Some((start, p)) => {
                    let n = (start + u64::from(p.count)).min(end) - at;
                    (n, readable(&p.part(at - start, n), own, &reach))
                }
                None if at >= self.limit => (end - at, From::Literal),
                None => {
                    let next = pending.iter_from(at).next().map_or(end, |(s, _)| s);
                    let next = next.min(end).min(self.limit);
                    (next - at, From::Sequence { first: at })
                }
            };
            out.push((n as u32, from));
            at += n;
        }
        out
    }

    /// The first pending store at or after slot `at` that can be copied: `whole` says which images are complete,
    /// `live` which are incoming. Blocks of an image that is neither are copied from where they were found.
    pub fn next_copy(
        &self,
        at: u64,
        whole: impl Fn(ImageId) -> bool,
        live: impl Fn(ImageId) -> bool,
    ) -> Option<Copy> {
        let pending = &self.pending.lock().table;
        pending.iter_from(at).find_map(|(first, p)| {
            let image = ImageId(p.image);
            let (image, from) = if whole(image) {
                (image, p.from)
            } else {
                let found = p.found.map(|(i, at)| (ImageId(i), at));
                found.filter(|(i, _)| whole(*i) && !live(image))?
            };
            Some(Copy {
                first,
                count: p.count,
                image,
                from,
                of: p,
            })
        })
    }

    /// Makes a copy by calling `write`, exclusively and only if the store is still pending. A store that was copied, or
    /// never can be, is no longer pending; after a transient failure it stays so, and its blocks are read from their
    /// source.
    pub fn copy(&self, copy: Copy, write: impl FnOnce() -> Copied) -> Copied {
        let _writing = self.writing.lock();
        if self.pending.lock().table.at(copy.first) != Some(copy.of) {
            return Copied::Never;
        }
        let copied = write();
        if copied != Copied::Later {
            let mut pending = self.pending.lock();
            if pending.table.at(copy.first) == Some(copy.of) {
                pending.apply(Change::Clear(copy.first, copy.count));
            }
        }
        copied
    }

    /// Number of segments that may have data, in the file or pending.
    pub fn segments(&self) -> u32 {
        let size = self.data.metadata().map_or(0, |about| about.len());
        let pending = self.pending.lock().table.end().div_ceil(SEGMENT_SLOTS);
        let segments = size.div_ceil(SEGMENT_BYTES).max(pending);
        segments.min(self.limit / SEGMENT_SLOTS) as u32
    }

    /// Frees segments on behalf of the matcher: drops their pending stores, and punches holes in the file. Waits for a
    /// copy in progress.
    pub fn free(&self, segments: &[u32]) {
        // A standalone teleporter is not trusted.
        let inside = |no: &u32| (u64::from(*no) + 1) * SEGMENT_SLOTS <= self.limit;
        let segments: Vec<u32> = segments.iter().copied().filter(inside).collect();
        for &no in &segments {
            let first = u64::from(no) * SEGMENT_SLOTS;
            let mut pending = self.pending.lock();
            if pending.table.is_in(first, first + SEGMENT_SLOTS) {
                pending.apply(Change::Clear(first, SEGMENT_SLOTS as u32));
            }
        }
        let _writing = self.writing.lock();
        for run in segments.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
            let at = u64::from(run[0]) * SEGMENT_BYTES;
            let length = run.len() as u64 * SEGMENT_BYTES;
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(e) = fallocate(&self.data, how, at, length) {
                // Later sequences reuse their space.
                tracing::debug!("cannot free sequence data: {e}");
                return;
            }
        }
    }

    /// An image was removed, or will never be completed: its pending stores are read from where they were found, or
    /// dropped if there is no such place.
    pub fn drop_image(&self, image: ImageId) {
        let mut pending = self.pending.lock();
        let about = |p: Pending| p.image == image.0 || p.found.is_some_and(|(i, _)| i == image.0);
        if pending.table.iter().any(|(_, p)| about(p)) {
            pending.apply(Change::Drop(image));
        }
    }

    /// Number of pending stores.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.lock().table.len()
    }

    /// Makes the pending stores durable; rewrites the journal if an earlier write failed.
    pub fn settle(&self) {
        let mut pending = self.pending.lock();
        let Kept { table, journal } = &mut *pending;
        journal.settle(table);
    }

    /// The offset of a slot in the data file.
    #[must_use]
    pub fn offset(slot: u64) -> u64 {
        slot * BLOCK_SIZE_U64
    }
}

/// Converts bytes to whole segments: at least one, and no more than the matcher can number.
#[must_use]
pub fn segments_of(bytes: u64) -> u64 {
    (bytes / SEGMENT_BYTES).clamp(1, 1 << 17)
}

/// The best source of pending blocks: data already verified at its place, then other local data, then incoming data.
fn readable(
    p: &Pending,
    own: ImageId,
    reach: &impl Fn(ImageId, CompactIndex, u64) -> Reach,
) -> From {
    let brought = (ImageId(p.image), p.from);
    let found = p.found.map(|(i, at)| (ImageId(i), at));
    let from = |(image, first): (ImageId, CompactIndex)| match image == own {
        true => From::Own { first },
        false => From::Image { image, first },
    };
    if brought.0 == own {
        return from(brought);
    }
    let ask = |(image, first)| match image == own {
        true => Reach::Coming,
        false => reach(image, first, u64::from(p.count)),
    };
    let (first, second) = (ask(brought), found.map_or(Reach::Gone, ask));
    match (first, second, found) {
        (Reach::Here, ..) => from(brought),
        // An incoming image has the blocks that it reuses from another one earlier.
        (_, Reach::Here | Reach::Coming, Some(found)) => from(found),
        (Reach::Coming, ..) => from(brought),
        _ => From::Literal,
    }
}

/// Parses journal records, for fuzzing.
#[cfg(fuzzing)]
pub fn replay_for_fuzzing(records: &[u8]) {
    let mut table = Table::default();
    journal::replay(records, &mut table);
    table.check();
}

#[cfg(test)]
mod tests;
