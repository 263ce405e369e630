//! The data file of the sequence cache (teleportation §2.14): blocks that images have shared, kept
//! so that they can be reused when the images they were found in change or go.
//!
//! What is found is written down at once but copied later, in the background: until then a slot is
//! "pending", and its blocks are read from the image on whose way they were found, or from where
//! they were found, which is here already. So an image that never comes whole takes nothing away.
//! Nothing here needs to be durable to be correct, because every reused block is digested again; a
//! lost slot costs its bytes on the wire once. See `docs/format/sequence-cache.md`.
//!
//! - [`table`]: what is pending; [`journal`]: the same on disk.

mod journal;
mod table;

use std::fs::File;
use std::path::Path;

use drover_core::BLOCK_SIZE_U64;
use drover_index::{ImageId, SequenceStore};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};

use crate::StoreError;
use journal::Journal;
use table::{Change, Pending, Table};

/// Slots in a segment, which is what the matcher frees.
pub use drover_index::SEGMENT_SLOTS;

/// Bytes of a segment.
pub const SEGMENT_BYTES: u64 = SEGMENT_SLOTS * BLOCK_SIZE_U64;

/// Bytes of sequence data when nothing else is said: all that the matcher can number.
pub const SEQUENCE_DATA_BYTES: u64 = 128 << 30;

/// Where reused blocks are read from, once the site has looked up what a plan names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// Must be sent.
    Literal,
    /// Another image of the site.
    Image {
        /// Which.
        image: ImageId,
        /// The first block's compact index in it.
        first: u64,
    },
    /// This image, earlier.
    Own {
        /// The first block's compact index.
        first: u64,
    },
    /// The sequence cache's data file.
    Sequence {
        /// The first block's slot.
        first: u64,
    },
}

/// Whether blocks of an image can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Now.
    Here,
    /// They are on their way.
    Coming,
    /// No.
    Gone,
}

/// The data file and what is pending.
#[derive(Debug)]
pub struct Sequences {
    data: File,
    /// Slots that the file may have.
    limit: u64,
    pending: Mutex<Kept>,
    /// Held while slots are written, and while they are given back.
    writing: Mutex<()>,
}

/// What is pending, in memory and on disk.
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

/// A copy that is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// The first slot.
    pub first: u64,
    /// Slots.
    pub count: u32,
    /// The image that has the blocks.
    pub image: ImageId,
    /// The first one's compact index there.
    pub from: u64,
    /// What was pending when it was begun.
    of: Pending,
}

/// How a copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// The slots have their blocks.
    Made,
    /// The blocks cannot be had from there, now or later.
    Never,
    /// Not now: it stays pending.
    Later,
}

impl Sequences {
    /// Opens or makes the data file in `dir`, with what was pending when the site last ran. The file is cut to
    /// `limit` bytes.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(dir: &Path, limit: u64) -> Result<Self, StoreError> {
        let data_path = dir.join("sequences.data");
        let data = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&data_path)
            .map_err(StoreError::file("open", &data_path))?;
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

    /// Slots `store` get their blocks from `image`, or from where they were `found`. Whatever was
    /// pending for them is over.
    pub fn add(&self, image: ImageId, store: SequenceStore, found: Option<(ImageId, u64)>) {
        let count = u64::from(store.count);
        // A lone teleporter may have a higher limit or other segments, and be anybody's.
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

    /// Where the blocks of `count` slots from `first` are to be read from now, for an image `own`
    /// that is on its way in; `reach` tells whether so many blocks of another image can be read.
    pub fn resolve(
        &self,
        first: u64,
        count: u32,
        own: ImageId,
        reach: impl Fn(ImageId, u64, u64) -> Reach,
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

    /// The first pending store from slot `at` on that can be copied: `whole` says which images are
    /// whole, `live` which are on their way in. What an image that is neither would bring is taken
    /// from where it was found.
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

    /// Makes a copy by `write`, alone and only while it is still wanted. What was copied, or never can be, is no longer
    /// pending; what failed stays so, and is read from where it is until it is tried again.
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

    /// Segments that may have something here, in the file or pending.
    pub fn segments(&self) -> u32 {
        let size = self.data.metadata().map_or(0, |about| about.len());
        let pending = self.pending.lock().table.end().div_ceil(SEGMENT_SLOTS);
        let segments = size.div_ceil(SEGMENT_BYTES).max(pending);
        segments.min(self.limit / SEGMENT_SLOTS) as u32
    }

    /// The matcher has freed these segments: nothing is pending for them any more, and the file system gets their room
    /// back. Waits for a copy that is being written.
    pub fn free(&self, segments: &[u32]) {
        // A lone teleporter may be anybody's.
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
                // Their room is used again by the sequences to come.
                tracing::debug!("cannot give sequence data back: {e}");
                return;
            }
        }
    }

    /// An image is gone, or will never come: what is pending from it is read from where it was
    /// found, and what has no such place is given up.
    pub fn drop_image(&self, image: ImageId) {
        let mut pending = self.pending.lock();
        let about = |p: Pending| p.image == image.0 || p.found.is_some_and(|(i, _)| i == image.0);
        if pending.table.iter().any(|(_, p)| about(p)) {
            pending.apply(Change::Drop(image));
        }
    }

    /// Stores that are pending.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.lock().table.len()
    }

    /// Makes durable what is pending, and writes it anew when it could not be written before.
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

/// Whole segments in so many bytes: at least one, and no more than the matcher can number.
#[must_use]
pub fn segments_of(bytes: u64) -> u64 {
    (bytes / SEGMENT_BYTES).clamp(1, 1 << 17)
}

/// The best place that pending blocks can be read from: what is verified in its place already, then
/// what is here, then what is coming.
fn readable(p: &Pending, own: ImageId, reach: &impl Fn(ImageId, u64, u64) -> Reach) -> From {
    let brought = (ImageId(p.image), p.from);
    let found = p.found.map(|(i, at)| (ImageId(i), at));
    let from = |(image, first): (ImageId, u64)| match image == own {
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
        // What an image in transit takes from another one is there earlier.
        (_, Reach::Here | Reach::Coming, Some(found)) => from(found),
        (Reach::Coming, ..) => from(brought),
        _ => From::Literal,
    }
}

/// Any bytes as the records of a journal.
#[cfg(fuzzing)]
pub fn replay_for_fuzzing(records: &[u8]) {
    let mut table = Table::default();
    journal::replay(records, &mut table);
    table.check();
}

#[cfg(test)]
mod tests;
