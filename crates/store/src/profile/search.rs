//! Finds the blocks of a profile in another disk by their content: in an image derived from a template, in another
//! container format, or after a defragmentation.

use std::collections::{HashMap, HashSet};

use drover_core::{BLOCK_SIZE_U64, Digest, ExtentKind, ReadAt, blocks_for};
use drover_image::{ImageError, VirtualDisk};

use super::Profile;
use super::content::{AT_ONCE, Reader, ShortDigest};

/// Upper bound on the places remembered for one content that is in a disk many times.
const MAX_PLACES: usize = 4;

/// A content that is looked for.
#[derive(Default)]
struct Wanted {
    /// The blocks in the profile that have it.
    blocks: Vec<u64>,
    /// Where it was found, other than at those.
    places: Vec<u64>,
}

/// A search for the blocks of a profile in another disk, which is shown to it block by block.
///
/// A block stays where it is if its content is there too. Else it is preferred where the block before it was found, so that
/// a file that has moved stays whole.
pub struct Search<'a> {
    profile: &'a Profile,
    wanted: HashMap<ShortDigest, Wanted>,
    /// Blocks whose content is in the same place.
    stayed: HashSet<u64>,
}

impl<'a> Search<'a> {
    /// Begins a search for the blocks of `profile`.
    #[must_use]
    pub fn new(profile: &'a Profile) -> Self {
        let mut wanted: HashMap<ShortDigest, Wanted> = HashMap::new();
        for entry in profile.entries() {
            wanted
                .entry(entry.digest)
                .or_default()
                .blocks
                .push(entry.block);
        }
        Search {
            profile,
            wanted,
            stayed: HashSet::new(),
        }
    }

    /// Whether a block of this content is of use.
    #[must_use]
    pub fn wants(&self, digest: &ShortDigest) -> bool {
        self.wanted.contains_key(digest)
    }

    /// Shows it a block of the other disk.
    pub fn see(&mut self, block: u64, digest: &ShortDigest) {
        let Some(wanted) = self.wanted.get_mut(digest) else {
            return;
        };
        if wanted.blocks.contains(&block) {
            self.stayed.insert(block);
        } else if wanted.places.len() < MAX_PLACES {
            wanted.places.push(block);
        }
    }

    /// The profile of the other disk, which has that size: the same order and counts, without what was not found.
    #[must_use]
    pub fn finish(self, disk_bytes: u64) -> Profile {
        let end = blocks_for(disk_bytes);
        let mut taken = self.stayed.clone();
        let mut last: Option<(u64, u64)> = None;
        let mut entries = Vec::new();
        for entry in self.profile.entries() {
            let place = if self.stayed.contains(&entry.block) {
                Some(entry.block)
            } else {
                let places = self.wanted.get(&entry.digest).map(|w| w.places.as_slice());
                let mut free = places.unwrap_or_default().iter().copied();
                let beside = last.and_then(|(was, is)| {
                    is.checked_add_signed(entry.block.wrapping_sub(was) as i64)
                });
                let mut free = free
                    .by_ref()
                    .filter(|place| !taken.contains(place))
                    .peekable();
                let first = free.peek().copied();
                free.find(|place| Some(*place) == beside).or(first)
            };
            let Some(place) = place.filter(|place| *place < end) else {
                continue;
            };
            taken.insert(place);
            last = Some((entry.block, place));
            entries.push(super::Entry {
                block: place,
                ..*entry
            });
        }
        Profile {
            disk_bytes,
            image: Digest::default(),
            boots: self.profile.boots(),
            entries,
        }
    }
}

/// Searches a whole disk for the blocks of `profile`; `progress` is called with the bytes done and the total, and ends the
/// search when it returns false.
///
/// # Errors
/// When the disk cannot be read.
pub fn scan(
    profile: &Profile,
    disk: &VirtualDisk,
    mut progress: impl FnMut(u64, u64) -> bool,
) -> Result<Profile, ImageError> {
    let size = disk.len();
    let mut search = Search::new(profile);
    let mut reader = Reader::new(disk);
    let mut done = 0;
    for extent in disk.extents() {
        let extent = extent?;
        if extent.kind != ExtentKind::Data {
            continue;
        }
        // A block that two extents share is read once.
        let mut at = (extent.offset / BLOCK_SIZE_U64).max(done);
        let end = blocks_for(extent.end());
        while at < end {
            let count = (end - at).min(AT_ONCE);
            reader
                .read(at, count, |block, digest| search.see(block, &digest))
                .map_err(|source| ImageError::Io {
                    doing: "read the disk".into(),
                    source,
                })?;
            at += count;
            if !progress(at * BLOCK_SIZE_U64, size) {
                return Ok(search.finish(size));
            }
        }
        done = end;
    }
    Ok(search.finish(size))
}
