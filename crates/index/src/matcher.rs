//! The matcher: finds the blocks of an image that the destination already has.
//!
//! It holds the hash files of the images at the destination, C0 and C1 that point into the most recent ones, and the
//! sequence cache with C2. Each call takes a batch and returns a [`Plan`]. Memory is bounded by its configuration;
//! the on-disk formats are described in `docs/format/hash-files.md` and `docs/format/sequence-cache.md`.

mod config;
mod finish;
mod open;
mod pass;
mod plan;
mod repeats;
mod shared;
mod snapshot;
mod stats;
mod trim;

use std::collections::BTreeMap;
use std::sync::Arc;

use drover_core::{Digest, Head};
use drover_storage::Directory;

pub use config::{AnchorPolicy, Layout, MatcherConfig};
pub use finish::Finishing;
pub use plan::{ImageId, Origin, Plan, PlanRun, SequenceStore, Via};
pub(crate) use shared::MatcherContext;
pub use stats::{CacheStats, ImageInfo, MatcherStats, OpenReport, Repair};
pub use trim::{MAX_FREED, Trim, Trimmed};

use crate::error::{IndexError, Result};
use crate::hash_file::{HashFile, Header, names};
use crate::page::PER_PAGE;
use crate::recent::{Recent, Slot};
use crate::sequence::SequenceCache;
use pass::{Outcome, Pass, Purpose, Walk};
use repeats::Repeats;

/// Maximum number of blocks per call of [`Matcher::batch`].
const MAX_BATCH: usize = 4096;

/// Pages read at a time when an image is indexed again.
const REINDEX_PAGES: u64 = 6;

/// An image being matched or recorded, from [`Matcher::begin`].
#[derive(Debug)]
pub struct Cursor {
    image: ImageId,
    slot: u8,
    serial: u64,
    blocks: u64,
    walk: Walk,
}

/// The position of a [`Matcher::probe`] in an image.
#[derive(Debug, Default)]
pub struct Probe {
    walk: Walk,
}

/// A slot number that no image has.
const NO_SLOT: u8 = u8::MAX;

impl Cursor {
    /// The image.
    #[must_use]
    pub fn image(&self) -> ImageId {
        self.image
    }

    /// Blocks recorded so far: the compact index of the next one.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
}

/// The matcher.
pub struct Matcher {
    storage: Arc<dyn Directory>,
    config: MatcherConfig,
    recent: Recent,
    sequences: SequenceCache,
    shared: MatcherContext,
    repeats: Repeats,
    /// Complete images that have no slot in C0 and C1.
    older: BTreeMap<ImageId, Header>,
    next_serial: u64,
    /// Bytes read and written by files that are closed.
    closed_traffic: (u64, u64),
}

impl Matcher {
    /// Starts the hash file of `image`; the remains of an interrupted transfer are deleted.
    ///
    /// # Errors
    /// [`IndexError::Busy`], [`IndexError::TooManyOpen`], or storage errors.
    pub fn begin(&mut self, image: ImageId) -> Result<Cursor> {
        if let Some(slot) = self.recent.slot_of(image)
            && self.recent.slot(slot).is_some_and(|s| s.open)
        {
            return Err(IndexError::Busy(image));
        }
        // Its files are recreated at once, so their removal need not be durable.
        self.begin_forget(image)?;
        let can_go = |s: &Option<Slot>| s.as_ref().is_none_or(|s| !s.open);
        if !self.recent.slots.iter().any(can_go) {
            return Err(IndexError::TooManyOpen(self.recent.slots.len()));
        }
        // Fallible operations first, so that an image that cannot begin does not take another's slot.
        let serial = self.next_serial;
        let file = HashFile::create(self.storage.as_ref(), image.0, serial)
            .map_err(IndexError::io("creating", names(image.0).0))?;
        let slot = self.free_slot()?;
        self.next_serial += 1;
        self.recent.slots[usize::from(slot)] = Some(Slot {
            image,
            file,
            open: true,
            used: serial,
        });
        Ok(Cursor {
            image,
            slot,
            serial,
            blocks: 0,
            walk: Walk::default(),
        })
    }

    /// A slot for another image; takes that of the complete one that was used longest ago if necessary.
    fn free_slot(&mut self) -> Result<u8> {
        if let Some(free) = self.recent.slots.iter().position(Option::is_none) {
            return Ok(free as u8);
        }
        let oldest = (0..self.recent.slots.len())
            .filter_map(|i| Some((i as u8, self.recent.slots[i].as_ref()?)))
            .filter(|(_, s)| !s.open)
            .min_by_key(|(_, s)| s.used)
            .map(|(i, _)| i)
            .ok_or(IndexError::TooManyOpen(self.recent.slots.len()))?;
        if let Some(old) = self.release(oldest) {
            self.older.insert(old.image, old.file.header());
        }
        Ok(oldest)
    }

    fn release(&mut self, slot: u8) -> Option<Slot> {
        let gone = self.recent.release(slot, &mut self.shared)?;
        self.closed_traffic.0 += gone.file.traffic.read;
        self.closed_traffic.1 += gone.file.traffic.written;
        Some(gone)
    }

    /// Records blocks without matching: in the hash file, and in the caches if they lack them.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    pub fn record(
        &mut self,
        cursor: &mut Cursor,
        digests: &[Digest],
        heads: &[Head],
    ) -> Result<()> {
        for (digests, heads) in digests.chunks(MAX_BATCH).zip(heads.chunks(MAX_BATCH)) {
            self.pass(cursor, digests, heads, Purpose::Record)?;
        }
        Ok(())
    }

    /// Matches the next blocks of an image, none of them zero: `heads[i]` belongs to `digests[i]`. At most 4096
    /// blocks per call.
    ///
    /// # Errors
    /// [`IndexError::BadBatch`], or storage errors; then nothing of the batch was recorded, and the call can be
    /// retried or the cursor [aborted](Self::abort).
    pub fn batch(
        &mut self,
        cursor: &mut Cursor,
        digests: &[Digest],
        heads: &[Head],
    ) -> Result<Plan> {
        let outcome = self.pass(cursor, digests, heads, Purpose::Plan)?;
        Ok(Plan {
            runs: outcome.runs,
            stores: outcome.stores,
        })
    }

    /// Reports which of an image's next blocks [`batch`](Self::batch) would match, in the images that are present and
    /// in the batch itself. Nothing is recorded or promoted. `probe` keeps the position from the image's previous
    /// batch.
    ///
    /// # Errors
    /// [`IndexError::BadBatch`] when there are more than 4096 blocks, or the number of heads differs.
    pub fn probe(
        &mut self,
        probe: &mut Probe,
        digests: &[Digest],
        heads: &[Head],
    ) -> Result<Vec<bool>> {
        if digests.len() != heads.len() || digests.len() > MAX_BATCH {
            return Err(IndexError::BadBatch(
                "digests and heads differ, or are too many",
            ));
        }
        let digests = &short(digests);
        let pass = Pass {
            config: &self.config,
            recent: &mut self.recent,
            sequences: &mut self.sequences,
            shared: &mut self.shared,
            purpose: Purpose::Record,
            own: NO_SLOT,
            base: 0,
            digests,
            heads,
            walk: probe.walk,
            warmed: 0,
        };
        let (known, walk) = pass.probe(&mut self.repeats);
        // A run of repeats within this batch cannot continue in the next one.
        probe.walk = walk.without(NO_SLOT);
        Ok(known)
    }

    fn pass(
        &mut self,
        cursor: &mut Cursor,
        digests: &[Digest],
        heads: &[Head],
        purpose: Purpose,
    ) -> Result<Outcome> {
        if digests.len() != heads.len() {
            return Err(IndexError::BadBatch("digests and heads differ in number"));
        }
        if digests.len() > MAX_BATCH {
            return Err(IndexError::BadBatch("more than 4096 blocks"));
        }
        let slot = self
            .recent
            .slot_mut(cursor.slot)
            .filter(|s| s.open && s.image == cursor.image)
            .filter(|s| s.file.header().serial == cursor.serial)
            .ok_or(IndexError::BadBatch("the cursor's image was forgotten"))?;
        let digests = &short(digests);
        // Fallible operations first.
        slot.file.append(digests, heads);
        if let Err(e) = slot.file.flush() {
            slot.file.take_back(digests.len());
            return Err(IndexError::io("writing", names(cursor.image.0).0)(e));
        }
        let pass = Pass {
            config: &self.config,
            recent: &mut self.recent,
            sequences: &mut self.sequences,
            shared: &mut self.shared,
            purpose,
            own: cursor.slot,
            base: cursor.blocks,
            digests,
            heads,
            walk: cursor.walk,
            warmed: 0,
        };
        let mut outcome = pass.run(&mut self.repeats);
        cursor.blocks += digests.len() as u64;
        cursor.walk = outcome.walk;
        if !self.sequences.flush_or_forget(&mut self.shared) {
            outcome.stores.clear();
        }
        Ok(outcome)
    }

    /// Aborts a transfer: deletes everything recorded of the image.
    pub fn abort(&mut self, cursor: Cursor) {
        drop(self.begin_abort(cursor));
    }

    /// Removes an image that was deleted or replaced at the destination: it is no longer matched with, and its hash
    /// file is deleted. An image that is not in the index is no error.
    ///
    /// # Errors
    /// Storage errors; the image is no longer matched with even then.
    pub fn forget(&mut self, image: ImageId) -> Result<()> {
        match self.begin_forget(image)? {
            Some(sync) => sync().map_err(IndexError::io("removing", names(image.0).0)),
            None => Ok(()),
        }
    }

    /// Enters an image's blocks into C0 and C1 where they are missing, for example after another image with the same
    /// blocks was forgotten. An image without a slot gets one if there is a free one.
    ///
    /// # Errors
    /// [`IndexError::Unknown`], [`IndexError::Busy`], or storage errors.
    pub fn reindex(&mut self, image: ImageId) -> Result<()> {
        let slot = match self.recent.slot_of(image) {
            Some(slot) if self.recent.slot(slot).is_some_and(|s| s.open) => {
                return Err(IndexError::Busy(image));
            }
            Some(slot) => slot,
            None if !self.older.contains_key(&image) => return Err(IndexError::Unknown(image)),
            None => {
                let Some(free) = self.recent.slots.iter().position(Option::is_none) else {
                    return Ok(());
                };
                match self.seat_older(image, free as u8)? {
                    true => free as u8,
                    false => return Ok(()),
                }
            }
        };
        self.reindex_slot(slot);
        Ok(())
    }

    /// Has an image found by its blocks from now on, in the place of the one that was used longest ago if necessary: it is probably
    /// similar to one that comes next. Nothing changes for an image that is not in the index, or is in transit.
    ///
    /// # Errors
    /// Storage errors.
    pub fn recall(&mut self, image: ImageId) -> Result<()> {
        let used = self.next_serial;
        if let Some(slot) = self.recent.slot_of(image) {
            self.next_serial += 1;
            if let Some(slot) = self.recent.slot_mut(slot) {
                slot.used = used;
            }
            return Ok(());
        }
        let can_go = |s: &Option<Slot>| s.as_ref().is_none_or(|s| !s.open);
        if !self.older.contains_key(&image) || !self.recent.slots.iter().any(can_go) {
            return Ok(());
        }
        let slot = self.free_slot()?;
        if self.seat_older(image, slot)? {
            self.next_serial += 1;
            if let Some(slot) = self.recent.slot_mut(slot) {
                slot.used = used;
            }
            self.reindex_slot(slot);
        }
        Ok(())
    }

    /// Gives a free slot to an image without one; `false` if its files are damaged.
    fn seat_older(&mut self, image: ImageId, slot: u8) -> Result<bool> {
        let file = HashFile::open(self.storage.as_ref(), image.0)
            .map_err(IndexError::io("opening", names(image.0).0))?;
        let Some(file) = file else {
            self.shared.report(Repair::Image(image));
            self.forget(image)?;
            return Ok(false);
        };
        self.older.remove(&image);
        self.recent.slots[usize::from(slot)] = Some(Slot {
            image,
            open: false,
            used: file.header().serial,
            file,
        });
        Ok(true)
    }

    fn reindex_slot(&mut self, slot: u8) {
        let mut walk = Walk::default();
        let (mut digests, mut heads) = (Vec::new(), Vec::new());
        let mut no = 0;
        loop {
            let base = no * PER_PAGE as u64;
            digests.clear();
            heads.clear();
            for _ in 0..REINDEX_PAGES {
                let Some(s) = self.recent.slot_mut(slot) else {
                    return;
                };
                let (page, head_bits) = match (s.file.page(no), s.file.heads(no)) {
                    (Ok(None), _) => break,
                    (Ok(Some(page)), Ok(heads)) => (page, heads),
                    _ => {
                        let image = s.image;
                        self.shared.damaged(Repair::ImagePage(image, no));
                        no += 1;
                        // The rest becomes a separate batch, because the blocks of a batch must be contiguous.
                        break;
                    }
                };
                digests.extend(page.iter().map(|(_, d)| d));
                heads.extend(head_bits);
                no += 1;
            }
            let end = self.recent.slot(slot).map_or(0, |s| s.file.blocks());
            if digests.is_empty() && no * PER_PAGE as u64 >= end {
                return;
            }
            let pass = Pass {
                config: &self.config,
                recent: &mut self.recent,
                sequences: &mut self.sequences,
                shared: &mut self.shared,
                purpose: Purpose::Record,
                own: slot,
                base,
                digests: &digests,
                heads: &heads,
                walk,
                warmed: 0,
            };
            walk = pass.run(&mut self.repeats).walk;
        }
    }

    /// Saves the caches, so that the next [`open`](Self::open) need not rebuild them.
    ///
    /// # Errors
    /// Storage errors; the previous snapshot is kept.
    pub fn persist(&mut self) -> Result<()> {
        self.sequences
            .flush(&mut self.shared)
            .and_then(|()| self.sequences.file.sync())
            .map_err(IndexError::io("writing", "the sequence cache"))?;
        let epoch = self.sequences.file.epoch() + 1;
        let slots = self.recent.slots.iter().map(|s| {
            s.as_ref().map(|s| snapshot::SavedSlot {
                image: s.image,
                serial: s.file.header().serial,
                blocks: s.file.blocks(),
            })
        });
        let saved = snapshot::Saved {
            epoch,
            slots: slots.collect(),
            used_bits: self.recent.numbers.used_bits(),
            regions: self.recent.numbers.regions().to_vec(),
        };
        let caches = [&self.recent.c0, &self.recent.c1, &self.sequences.c2];
        let bytes = snapshot::write(self.storage.as_ref(), &self.config, caches, &saved)
            .map_err(IndexError::io("writing", snapshot::NAME))?;
        self.closed_traffic.1 += bytes;
        self.sequences
            .file
            .mark_clean(epoch)
            .map_err(IndexError::io("writing", "the sequence cache"))
    }

    /// All images with hash files in the index.
    #[must_use]
    pub fn images(&self) -> Vec<ImageInfo> {
        let recent = self.recent.slots.iter().flatten().map(|s| ImageInfo {
            image: s.image,
            blocks: s.file.blocks(),
            complete: !s.open,
            recent: true,
        });
        let older = self.older.iter().map(|(&image, h)| ImageInfo {
            image,
            blocks: h.blocks,
            complete: true,
            recent: false,
        });
        let mut all: Vec<ImageInfo> = recent.chain(older).collect();
        all.sort_by_key(|i| i.image);
        all
    }

    /// Counters and sizes.
    #[must_use]
    pub fn stats(&self) -> MatcherStats {
        let mut s = self.shared.stats;
        let caches = [
            (&mut s.c0, &self.recent.c0, self.recent.c0_stats),
            (&mut s.c1, &self.recent.c1, self.recent.c1_stats),
            (&mut s.c2, &self.sequences.c2, self.sequences.stats),
        ];
        let mut memory = 0;
        for (to, cache, counted) in caches {
            *to = CacheStats {
                capacity: cache.capacity() as u64,
                entries: cache.len() as u64,
                bytes: cache.bytes() as u64,
                ..counted
            };
            memory += cache.bytes() + cache.extra_bytes();
        }
        s.sequences_stored = self.sequences.stored;
        s.sequence_blocks_stored = self.sequences.stored_blocks;
        s.sequences_evicted = self.sequences.evicted;
        s.bytes_read = self.closed_traffic.0 + self.sequences.file.traffic.read;
        s.bytes_written = self.closed_traffic.1 + self.sequences.file.traffic.written;
        for slot in self.recent.slots.iter().flatten() {
            s.bytes_read += slot.file.traffic.read;
            s.bytes_written += slot.file.traffic.written;
            memory += slot.file.bytes();
        }
        memory += self.shared.pages.bytes() + self.sequences.file.bytes();
        s.memory = memory as u64;
        s
    }

    /// Damage found and failed writes since the last call.
    pub fn take_repairs(&mut self) -> Vec<Repair> {
        self.shared.take_repairs()
    }
}

/// The short digests used for matching (`docs/format/digests.md`).
fn short(digests: &[Digest]) -> Vec<Digest> {
    digests.iter().map(Digest::short).collect()
}
