//! Where the blocks of flocks were first asked for that several nodes of a site receive: an index of short digests, of which each node
//! has a range. It is in memory, and only a hint: what is copied by it is verified as all that is copied. What does not fit is not
//! entered, and is sent twice.

use std::collections::HashMap;
use std::time::Instant;

use drover_core::Digest;
use drover_index::ImageId;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Upper bound on the blocks that a node's range has: as many as fit into a table of 4 Mi places, which takes 88 MB, 24 bytes a block.
pub const MAX_HINTS: usize = 7 << 19;

/// Upper bound on the flocks that it knows blocks of.
const MAX_FLOCKS: usize = 16;

/// Upper bound on the images of a flock that it knows blocks of. Their places fit into 16 bits.
const MAX_IMAGES: usize = 4096;

/// Upper bound on the bytes of a node's name.
const MAX_NODE_BYTES: usize = 63;

/// Bytes of a short digest.
const KEY: usize = Digest::SHORT_LEN;

/// Parts of the hash space, each of which one node has.
const PARTS: usize = 1024;

/// Which node has which parts of the hash space. When a node comes or goes, only what it gets or had moves.
#[derive(Debug)]
pub(crate) struct Ranges(Vec<u16>);

impl Ranges {
    /// Those of these nodes, of which there is at least one.
    pub fn of(nodes: &[String]) -> Ranges {
        let seeds: Vec<u64> = nodes.iter().map(|node| seed(node)).collect();
        let owner = |part: usize| {
            let weigh = |seed: &u64| mixed(seed ^ (part as u64 + 1).wrapping_mul(GOLDEN));
            let best = seeds.iter().zip(0u16..).max_by_key(|(seed, _)| weigh(seed));
            best.map_or(0, |(_, nth)| nth)
        };
        Ranges((0..PARTS).map(owner).collect())
    }

    /// The place of the node that has a digest.
    pub fn owner_of(&self, digest: &Digest) -> usize {
        let part = (u128::from(digest.prefix()) * PARTS as u128) >> 64;
        self.0[part as usize].into()
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number for a name.
fn seed(name: &str) -> u64 {
    let hash = *blake3::hash(name.as_bytes()).as_bytes();
    hash.first_chunk::<8>()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// All bits of the result depend on all bits of the argument (the finalizer of SplitMix64).
fn mixed(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// The blocks of an image that were asked for before, for other images.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimed {
    /// The images, and the nodes that receive them.
    pub images: Vec<(u64, String)>,
    /// Of each such block: its place among those that were looked up, its image as a place in `images`, and its compact index there.
    pub found: Vec<(u32, u32, u64)>,
}

/// What a node knows of blocks at the other nodes of its site.
#[derive(Default)]
pub(crate) struct Elsewhere {
    /// Its own range of the index.
    pub hints: Mutex<Hints>,
    /// The nodes that receive images.
    pub images: Mutex<HashMap<ImageId, String>>,
    /// Since when images are received by no node that answers, and when they were last asked for.
    pub lost: Mutex<HashMap<ImageId, (Instant, Instant)>>,
    /// When the records of flocks were last read again for those.
    pub reread: Mutex<Option<Instant>>,
}

/// The range of a node.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// Those that were used last are at the end.
    flocks: Vec<([u8; 16], OfFlock)>,
}

#[derive(Debug, Default)]
struct OfFlock {
    images: Vec<(u64, String)>,
    blocks: HashMap<[u8; KEY], (u16, u32)>,
}

impl Hints {
    fn flock(&mut self, id: &[u8; 16]) -> &mut OfFlock {
        let place = self.flocks.iter().position(|(known, _)| known == id);
        let flock = match place {
            Some(place) => self.flocks.remove(place),
            None => (*id, OfFlock::default()),
        };
        if self.flocks.len() >= MAX_FLOCKS {
            self.flocks.remove(0);
        }
        self.flocks.push(flock);
        let last = self.flocks.len() - 1;
        &mut self.flocks[last].1
    }

    /// A flock is over.
    pub fn forget(&mut self, flock: &[u8; 16]) {
        self.flocks.retain(|(id, _)| id != flock);
    }

    /// The node `node`, which receives `image`, is about to ask for these blocks, each with its compact index: which of them were
    /// asked for before. The others are its own from now on.
    pub fn claim(
        &mut self,
        flock: &[u8; 16],
        (image, node): (u64, &str),
        blocks: &[(Digest, u64)],
    ) -> Claimed {
        let used: usize = self.flocks.iter().map(|(_, of)| of.blocks.len()).sum();
        let mut room = MAX_HINTS.saturating_sub(used);
        let of = self.flock(flock);
        let place = of
            .images
            .iter()
            .position(|(i, n)| (*i, &**n) == (image, node));
        let fits = of.images.len() < MAX_IMAGES && node.len() <= MAX_NODE_BYTES;
        let own = place.or_else(|| {
            fits.then(|| {
                of.images.push((image, node.to_owned()));
                of.images.len() - 1
            })
        });
        let own = own.and_then(|own| u16::try_from(own).ok());
        let mut claimed = Claimed::default();
        let mut places: HashMap<u16, u32> = HashMap::new();
        for (nth, (digest, index)) in blocks.iter().enumerate() {
            let (Some(key), Ok(at)) = (digest.0.first_chunk::<KEY>(), u32::try_from(*index)) else {
                continue;
            };
            match of.blocks.get(key) {
                Some((of_image, index)) if of.images[usize::from(*of_image)].0 != image => {
                    let images = &mut claimed.images;
                    let place = *places.entry(*of_image).or_insert_with(|| {
                        images.push(of.images[usize::from(*of_image)].clone());
                        (images.len() - 1) as u32
                    });
                    claimed.found.push((nth as u32, place, u64::from(*index)));
                }
                Some(_) => {}
                None if room == 0 => {}
                None => {
                    let Some(own) = own else { continue };
                    of.blocks.insert(*key, (own, at));
                    room -= 1;
                }
            }
        }
        claimed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u64) -> Digest {
        Digest(*blake3::hash(&n.to_le_bytes()).as_bytes()).short()
    }

    #[test]
    fn ranges_are_of_about_one_size_and_stay_when_others_come_or_go() {
        let names = |n: usize| Vec::from_iter((0..n).map(|n| format!("node-{n}")));
        for nodes in [1, 2, 3, 64] {
            let mut counts = vec![0; nodes];
            let ranges = Ranges::of(&names(nodes));
            (0..6400).for_each(|n| counts[ranges.owner_of(&digest(n))] += 1);
            let fair = 6400 / nodes;
            assert!(
                counts.iter().all(|n| (fair / 4..fair * 4).contains(n)),
                "{counts:?}"
            );
        }
        let (before, without) = (names(4), [0, 1, 3].map(|n| format!("node-{n}")));
        let (old, new) = (Ranges::of(&before), Ranges::of(&without));
        for n in 0..1000 {
            let was = &before[old.owner_of(&digest(n))];
            let is = &without[new.owner_of(&digest(n))];
            assert!(was == is || was == "node-2", "{was} {is}");
        }
        let last = Ranges::of(&names(3));
        assert!(last.owner_of(&Digest([0; 32])) < 3 && last.owner_of(&Digest([255; 32])) < 3);
    }

    /// Against a plain model: who asks first has a block, whoever asks after it is told.
    #[test]
    fn the_first_who_asks_has_a_block() {
        for seed in 0..200 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut hints = Hints::default();
            let mut model: HashMap<u64, (u64, u64)> = HashMap::new();
            for _ in 0..rng.u32(1..30) {
                let image = rng.u64(1..5);
                let node = format!("n{}", image % 2);
                let blocks: Vec<(u64, u64)> = (0..rng.u64(1..50))
                    .map(|i| (rng.u64(..300), 1000 * image + i))
                    .collect();
                let asked: Vec<_> = blocks.iter().map(|(n, at)| (digest(*n), *at)).collect();
                let claimed = hints.claim(&[1; 16], (image, &node), &asked);
                let mut found = claimed.found.iter();
                for (nth, (block, at)) in blocks.iter().enumerate() {
                    let first = *model.entry(*block).or_insert((image, *at));
                    if first.0 == image {
                        continue;
                    }
                    let (place, of, index) = found.next().unwrap();
                    let (of, node) = &claimed.images[*of as usize];
                    assert_eq!((*place as usize, *of, *index), (nth, first.0, first.1));
                    assert_eq!(*node, format!("n{}", of % 2), "seed {seed}");
                }
                assert_eq!(found.next(), None, "seed {seed}");
            }
        }
    }

    #[test]
    fn images_beyond_the_limit_and_long_names_are_not_remembered() {
        let mut hints = Hints::default();
        let blocks = |n: u64| [(digest(0), 7), (digest(n), 0)];
        let long = "n".repeat(MAX_NODE_BYTES + 1);
        assert_eq!(
            hints.claim(&[0; 16], (1, &long), &blocks(0)),
            Claimed::default()
        );
        assert!(hints.flocks[0].1.images.is_empty() && hints.flocks[0].1.blocks.is_empty());
        for image in 0..MAX_IMAGES as u64 + 9 {
            hints.claim(&[0; 16], (image, "n"), &blocks(image + 1));
        }
        let known = &hints.flocks[0].1;
        assert_eq!(known.images.len(), MAX_IMAGES);
        assert_eq!(known.blocks.len(), MAX_IMAGES + 1);
        // What others have is found for all of them.
        let found = hints.claim(&[0; 16], (1 << 40, &long), &blocks(0)).found;
        assert_eq!(found, [(0, 0, 7), (1, 0, 7)]);
    }

    #[test]
    fn flocks_do_not_see_each_other_and_the_oldest_makes_room() {
        let mut hints = Hints::default();
        let blocks = [(digest(1), 0), (digest(2), u64::MAX)];
        let found = |hints: &mut Hints, flock, image| {
            let id = [flock; 16];
            hints.claim(&id, (image, "n"), &blocks).found.len()
        };
        assert_eq!(found(&mut hints, 0, 1), 0);
        assert_eq!(found(&mut hints, 1, 2), 0);
        // What cannot be entered is not known.
        assert_eq!(found(&mut hints, 0, 3), 1);
        for flock in 2..=MAX_FLOCKS as u8 {
            assert_eq!(found(&mut hints, flock, 1), 0);
        }
        // 1 was used before 0.
        assert_eq!(found(&mut hints, 0, 4), 1);
        assert_eq!(found(&mut hints, 1, 5), 0);
        assert_eq!(hints.flocks.len(), MAX_FLOCKS);
        hints.forget(&[1; 16]);
        assert_eq!(hints.flocks.len(), MAX_FLOCKS - 1);
        assert_eq!(found(&mut hints, 1, 6), 0);
    }
}
