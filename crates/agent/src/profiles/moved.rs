//! Finds the profile of another image for one whose blocks are in other places, as after a defragmentation, by the digests that the
//! site has of it: its hash file says which content the image has, its map where. The image itself is read only for the blocks that
//! the profile lists, which are compared as ever.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, CompactIndex, ReadAt};
use drover_image::{Layout, Stored, VirtualDisk};
use drover_index::digests_of;
use drover_storage::HostDirectory;
use drover_store::profile::{Entry, Profile, Search, ShortDigest};
use drover_store::{ImageMap, ImageRecord};

use crate::error::{Context, Result};
use crate::home::Home;

/// Blocks of another image's profile that are compared before the whole is.
const SAMPLE: usize = 64;

/// The share of its blocks, in percent, that another image's profile needs to be worth having.
pub const MIN_SHARED: usize = 50;

/// Upper bound on the blocks of an image that are looked through: 64 GiB of data, 192 MiB of digests.
const MAX_SEARCHED: u64 = 16 << 20;

/// Upper bound on the lookups in the tables of a container.
const MAX_PARTS: usize = 1 << 20;

/// Some of a profile's blocks.
pub fn sample(profile: &Profile) -> Vec<&Entry> {
    let entries = profile.entries();
    let step = entries.len().div_ceil(SAMPLE).max(1);
    entries.iter().step_by(step).collect()
}

/// The profiles that blocks are looked for of, as far as it takes to choose one.
#[derive(Default)]
pub struct Samples {
    /// The profiles that have a block of this content in their sample.
    of: HashMap<ShortDigest, Vec<usize>>,
    /// How many different blocks there are in each sample.
    sizes: Vec<usize>,
}

impl Samples {
    /// Adds a profile.
    pub fn add(&mut self, profile: &Profile) {
        let number = self.sizes.len();
        let digests: HashSet<ShortDigest> =
            sample(profile).iter().map(|entry| entry.digest).collect();
        self.sizes.push(digests.len());
        for digest in digests {
            self.of.entry(digest).or_default().push(number);
        }
    }

    /// The number of the profile of which an image has the most blocks, if it has enough of one.
    fn best(&self, home: &Home, image: &ImageRecord) -> Result<Option<usize>> {
        let mut found = vec![0; self.sizes.len()];
        let mut seen = HashSet::new();
        let looked = each_digest(home, image, |_, digest| {
            if let Some(profiles) = self.of.get(digest).filter(|_| seen.insert(*digest)) {
                profiles.iter().for_each(|number| found[*number] += 1);
            }
        })?;
        if !looked {
            return Ok(None);
        }
        let share = |number: &usize| found[*number] * 100 / self.sizes[*number].max(1);
        let best = (0..found.len()).rev().max_by_key(share);
        Ok(best.filter(|number| share(number) >= MIN_SHARED))
    }

    /// The profile of those, as `load` has them by their numbers, of which an image has the most blocks anywhere, with the places that they
    /// have there.
    ///
    /// # Errors
    /// When a profile or the image cannot be read.
    pub fn find(
        &self,
        home: &Home,
        image: &ImageRecord,
        disk: &VirtualDisk,
        load: impl FnOnce(usize) -> Result<Option<Profile>>,
    ) -> Result<Option<Profile>> {
        let Some(best) = self.best(home, image)? else {
            return Ok(None);
        };
        let map = ImageMap::load(&home.maps_dir().join(format!("{}.map", image.id.0)));
        // Without a map it is of no use for other images either, which is said when the site starts.
        let (Some(profile), Ok(Some((_, map)))) = (load(best)?, map) else {
            return Ok(None);
        };
        let Some(places) = Places::of(&map, disk)? else {
            return Ok(None);
        };
        let mut search = Search::new(&profile);
        each_digest(home, image, |index, digest| {
            if search.wants(digest)
                && let Some(walk) = map.blocks.walk_of(CompactIndex(index))
                && let Some(block) = places.block_at(walk.0)
            {
                search.see(block, digest);
            }
        })?;
        let mut found = search.finish(disk.len());
        // The places are inferred; this is the proof.
        found.prune(disk).context("cannot read the image")?;
        let enough = found.entries().len() * 100 >= profile.entries().len() * MIN_SHARED;
        Ok(Some(found).filter(|found| enough && !found.is_empty()))
    }
}

/// Shows the digests of an image with their compact indices; false when this site has not all of them, or they are too many.
fn each_digest(
    home: &Home,
    image: &ImageRecord,
    mut see: impl FnMut(u64, &ShortDigest),
) -> Result<bool> {
    let Ok(directory) = HostDirectory::open(&home.index_dir().join("index")) else {
        return Ok(false);
    };
    let looked = digests_of(&directory, image.id.0, MAX_SEARCHED, |index, digest| {
        see(index, digest);
        true
    });
    let looked = looked.context("cannot read the digests of an image")?;
    Ok(looked.is_some())
}

/// Where the blocks of a walk are in the guest's disk.
struct Places {
    /// Where they are in the image's file.
    layout: Arc<Layout>,
    /// Where the parts of the file are in the disk, in the file's order.
    stored: Vec<Stored>,
}

impl Places {
    /// Those of an image; `None` when it takes too long to tell.
    fn of(map: &ImageMap, disk: &VirtualDisk) -> Result<Option<Places>> {
        let layout = Arc::clone(&map.layout);
        let stored = disk.stored(MAX_PARTS)?;
        Ok(stored.map(|mut stored| {
            stored.sort_unstable_by_key(|part| part.file);
            Places { layout, stored }
        }))
    }

    /// The block of the disk that a block of the walk is, unless it is none as such.
    fn block_at(&self, walk: u64) -> Option<u64> {
        let mut pieces = self.layout.pieces(walk * BLOCK_SIZE_U64, BLOCK_SIZE_U64);
        let file = pieces.find_map(|piece| piece.file)?;
        let after = self.stored.partition_point(|part| part.file <= file);
        let part = self.stored.get(after.checked_sub(1)?)?;
        let inside = file - part.file;
        (inside < part.len).then_some((part.guest + inside) / BLOCK_SIZE_U64)
    }
}
