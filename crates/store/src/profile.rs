//! The profile of an image: what a machine reads of its disk from start to service, in order (vmflock §3.4). One boot is
//! recorded at a time, and merged into what earlier boots read. It is a hint, and never more: who uses it asks for these
//! blocks first, and proves what arrives as ever (`docs/format/profile.md`, decision `0048`).
//!
//! Every block has a short digest. A block that no longer has that content is pruned, and the blocks are found in another
//! disk by their content ([`Search`]), wherever they are there.
//!
//! ```
//! use drover_store::profile::{FirstRead, Profile};
//!
//! // A disk of three blocks, of which a boot read the third, then the first.
//! let disk: Vec<u8> = [1, 2, 3].iter().flat_map(|&byte| [byte; 4096]).collect();
//! let reads = [(2, 10), (0, 30)].map(|(block, at_ms)| FirstRead { block, at_ms });
//! let profile = Profile::of_boot(&disk, &reads)?;
//! assert_eq!(profile.order(disk.len() as u64), [8192..12288, 0..4096]);
//! # Ok::<(), std::io::Error>(())
//! ```

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;

use drover_core::{BLOCK_SIZE_U64, Digest, ReadAt, blocks_for};
pub use drover_device::stage::FirstRead;
use drover_device::stage::MAX_FIRST_READS;

mod codec;
mod content;
mod search;
mod shelf;
#[cfg(test)]
mod tests;

#[cfg(fuzzing)]
pub(crate) use codec::parse;
pub use codec::{MAX_BYTES, ProfileError};
pub use content::{ShortDigest, digests_at};
pub use search::{Search, scan};
pub use shelf::Profiles;

/// Upper bound on the blocks of a profile: 512 MiB of a disk.
pub const MAX_BLOCKS: usize = MAX_FIRST_READS;

/// Upper bound on the boots that are counted. Beyond it all counts are halved, so that what is no longer read is forgotten.
pub const MAX_BOOTS: u8 = 16;

/// Upper bound on the size of a disk, in bytes.
pub const MAX_DISK_BYTES: u64 = 1 << 50;

/// A block that at most one boot in so many reads goes last.
const RARE: u8 = 5;

/// A block of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The block of the guest's disk.
    pub block: u64,
    /// When it was first read, in milliseconds since the start; the mean of the boots that read it.
    pub at_ms: u32,
    /// How many of the counted boots read it.
    pub boots: u8,
    /// Its content, padded with zeros at the end of the disk.
    pub digest: ShortDigest,
}

/// A profile. See the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    disk_bytes: u64,
    image: Digest,
    boots: u8,
    entries: Vec<Entry>,
}

impl Profile {
    /// The profile of one boot from `disk`. Blocks that hold zeros there are left out, as they cost nothing to send; so are
    /// those outside, and those after the first [`MAX_BLOCKS`].
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn of_boot(disk: &dyn ReadAt, reads: &[FirstRead]) -> io::Result<Profile> {
        let blocks = blocks_for(disk.len());
        let mut seen = HashSet::new();
        let first = |read: &&FirstRead| read.block < blocks && seen.insert(read.block);
        let reads: Vec<&FirstRead> = reads.iter().filter(first).take(MAX_BLOCKS).collect();
        let wanted: Vec<u64> = reads.iter().map(|read| read.block).collect();
        let digests = digests_at(disk, &wanted)?;
        let entry = |read: &&FirstRead| {
            Some(Entry {
                block: read.block,
                at_ms: read.at_ms,
                boots: 1,
                digest: *digests.get(&read.block)?,
            })
        };
        Ok(Profile {
            disk_bytes: disk.len(),
            image: Digest::default(),
            boots: 1,
            entries: reads.iter().filter_map(entry).collect(),
        })
    }

    /// A boot as it was recorded, without the content: for whoever has the image.
    #[must_use]
    pub fn without_content(disk_bytes: u64, reads: &[FirstRead]) -> Profile {
        let blocks = blocks_for(disk_bytes);
        let mut seen = HashSet::new();
        let first = |read: &&FirstRead| read.block < blocks && seen.insert(read.block);
        let entry = |read: &FirstRead| Entry {
            block: read.block,
            at_ms: read.at_ms,
            boots: 1,
            digest: ShortDigest::default(),
        };
        let reads = reads.iter().filter(first).take(MAX_BLOCKS);
        Profile {
            disk_bytes,
            image: Digest::default(),
            boots: 1,
            entries: reads.map(entry).collect(),
        }
    }

    /// What was read when, whatever the content.
    #[must_use]
    pub fn reads(&self) -> Vec<FirstRead> {
        let read = |entry: &Entry| FirstRead {
            block: entry.block,
            at_ms: entry.at_ms,
        };
        self.entries.iter().map(read).collect()
    }

    /// Size in bytes of the disk that it was recorded from.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// The digest of the image file that all its blocks were compared with; zeros if none is known. If an image has another
    /// one, they have to be compared again ([`Profile::prune`]).
    #[must_use]
    pub fn image(&self) -> Digest {
        self.image
    }

    /// Notes that all its blocks are those of the image with this digest.
    pub fn set_image(&mut self, image: Digest) {
        self.image = image;
    }

    /// How many boots are counted.
    #[must_use]
    pub fn boots(&self) -> u8 {
        self.boots
    }

    /// Its blocks, in the order in which they are read.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Whether it has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of the disk in its blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.entries.len() as u64 * BLOCK_SIZE_U64
    }

    /// Whether so few boots read this block that it goes last.
    #[must_use]
    pub fn is_rare(&self, entry: &Entry) -> bool {
        u32::from(entry.boots) * u32::from(RARE) <= u32::from(self.boots)
    }

    /// The byte ranges of a disk of that size to ask for, in order, clipped to the disk: what most boots read in the order
    /// in which they read it, then what few did.
    #[must_use]
    pub fn order(&self, disk_bytes: u64) -> Vec<Range<u64>> {
        let mut out: Vec<Range<u64>> = Vec::new();
        let (rare, usual): (Vec<&Entry>, Vec<&Entry>) =
            self.entries.iter().partition(|entry| self.is_rare(entry));
        for entry in usual.into_iter().chain(rare) {
            let start = entry.block.saturating_mul(BLOCK_SIZE_U64);
            let end = start.saturating_add(BLOCK_SIZE_U64).min(disk_bytes);
            match out.last_mut() {
                _ if start >= end => {}
                Some(last) if last.end == start => last.end = end,
                _ => out.push(start..end),
            }
        }
        out
    }

    /// Removes the blocks for which `keep` is false.
    pub fn retain(&mut self, keep: impl FnMut(&Entry) -> bool) {
        self.entries.retain(keep);
    }

    /// Makes it one of a disk of that size, whose content was not compared with it: blocks outside of it are removed.
    pub fn put_to_disk(&mut self, disk_bytes: u64) {
        self.retain(|entry| entry.block < blocks_for(disk_bytes));
        self.disk_bytes = disk_bytes;
        self.image = Digest::default();
    }

    /// Removes the blocks that `disk` has not, or has with another content; returns how many they were.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn prune(&mut self, disk: &dyn ReadAt) -> io::Result<usize> {
        let before = self.entries.len();
        let blocks: Vec<u64> = self.entries.iter().map(|entry| entry.block).collect();
        let now = digests_at(disk, &blocks)?;
        self.retain(|entry| now.get(&entry.block) == Some(&entry.digest));
        self.disk_bytes = disk.len();
        self.image = Digest::default();
        Ok(before - self.entries.len())
    }

    /// Adds a later boot from the same image, or several; the image is that of `boot` from then on. Where both have a block with another content, that of `boot`
    /// counts. If there are too many blocks, those are dropped that the fewest boots read, the last of them first.
    pub fn merge(&mut self, boot: &Profile) {
        let mut all: HashMap<u64, (f64, Entry)> = HashMap::new();
        for (place, entry) in self.entries.iter().enumerate() {
            all.insert(entry.block, (place as f64, *entry));
        }
        for (place, new) in boot.entries.iter().enumerate() {
            let place = place as f64;
            match all.get_mut(&new.block) {
                Some((old_place, old)) if old.digest == new.digest => {
                    let mean = |old_value: f64, new_value: f64| {
                        let (o, n) = (f64::from(old.boots), f64::from(new.boots));
                        (old_value * o + new_value * n) / (o + n)
                    };
                    *old_place = mean(*old_place, place);
                    old.at_ms = mean(old.at_ms.into(), new.at_ms.into()) as u32;
                    old.boots = old.boots.saturating_add(new.boots);
                }
                _ => {
                    all.insert(new.block, (place, *new));
                }
            }
        }
        let mut boots = self.boots.saturating_add(boot.boots);
        let mut all: Vec<(f64, Entry)> = all.into_values().collect();
        while boots > MAX_BOOTS {
            boots /= 2;
            all.iter_mut().for_each(|(_, entry)| entry.boots /= 2);
        }
        all.retain(|(_, entry)| entry.boots > 0 && entry.block < blocks_for(boot.disk_bytes));
        let in_order = |a: &(f64, Entry), b: &(f64, Entry)| {
            a.0.total_cmp(&b.0).then(a.1.block.cmp(&b.1.block))
        };
        if all.len() > MAX_BLOCKS {
            all.sort_by(|a, b| b.1.boots.cmp(&a.1.boots).then(in_order(a, b)));
            all.truncate(MAX_BLOCKS);
        }
        all.sort_by(in_order);
        *self = Profile {
            disk_bytes: boot.disk_bytes,
            image: boot.image,
            boots,
            entries: all.into_iter().map(|(_, entry)| entry).collect(),
        };
        // One boot may have counted a block more often than all: both came from elsewhere.
        let most = self.boots;
        for entry in &mut self.entries {
            entry.boots = entry.boots.min(most);
        }
    }
}
