//! The data file of the sequence cache (teleportation §2.14): blocks that images have shared, kept
//! so that they can be reused when the images they were found in change or go.
//!
//! What is found is written down at once but copied later, in the background: until then a slot's
//! blocks are read from the image they came with ("pending"). Nothing here needs to be durable to
//! be correct, because every reused block is digested again; a lost slot costs its bytes on the
//! wire once. See `docs/format/sequence-cache.md`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use drover_core::BLOCK_SIZE_U64;
use drover_index::{ImageId, SequenceStore};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::destination::From;

/// Stores that may be pending; beyond this the oldest slots are given up.
const MAX_PENDING: usize = 1 << 18;

/// Slots whose blocks are still only in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Pending {
    count: u32,
    image: u64,
    from: u64,
}

/// The data file and what is pending.
#[derive(Debug)]
pub struct Sequences {
    data: File,
    pending_path: PathBuf,
    pending: Mutex<BTreeMap<u64, Pending>>,
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
}

impl Sequences {
    /// Opens or makes the data file in `dir`, with what was pending when the site last closed.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(dir: &Path) -> Result<Self, TeleportError> {
        let data_path = dir.join("sequences.data");
        let data = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&data_path)
            .map_err(TeleportError::file("open", &data_path))?;
        let pending_path = dir.join("sequences.pending");
        let saved = std::fs::read(&pending_path).ok();
        let pending = saved.and_then(|b| unpack_pending(&b)).unwrap_or_default();
        Ok(Sequences {
            data,
            pending_path,
            pending: Mutex::new(pending),
        })
    }

    /// The data file.
    #[must_use]
    pub fn data(&self) -> &File {
        &self.data
    }

    /// Slots `store` get their blocks from `image`. Whatever was pending for them is over.
    pub fn add(&self, image: ImageId, store: SequenceStore) {
        let mut pending = self.pending.lock();
        forget_slots(&mut pending, store.first, u64::from(store.count));
        if store.count > 0 {
            let entry = Pending {
                count: store.count,
                image: image.0,
                from: store.from,
            };
            pending.insert(store.first, entry);
        }
        if pending.len() > MAX_PENDING {
            pending.pop_first();
        }
    }

    /// Where the blocks of `count` slots from `first` are to be read from now, for an image `own`
    /// that is on its way in; `known` tells whether another image can be read.
    pub fn resolve(
        &self,
        first: u64,
        count: u32,
        own: ImageId,
        known: impl Fn(ImageId) -> bool,
    ) -> Vec<(u32, From)> {
        let pending = self.pending.lock();
        let end = first + u64::from(count);
        let mut out = Vec::new();
        let mut at = first;
        while at < end {
            let covering = pending
                .range(..=at)
                .next_back()
                .filter(|(s, p)| **s + u64::from(p.count) > at);
            let (stop, from) = match covering {
                Some((start, p)) => {
                    let from = p.from + (at - start);
                    let image = ImageId(p.image);
                    let from = if image == own {
                        From::Own { first: from }
                    } else if known(image) {
                        From::Image { image, first: from }
                    } else {
                        From::Literal
                    };
                    (start + u64::from(p.count), from)
                }
                None => {
                    let next = pending.range(at..).next().map_or(end, |(s, _)| *s);
                    (next, From::Sequence { first: at })
                }
            };
            let n = stop.min(end) - at;
            out.push((n as u32, from));
            at += n;
        }
        out
    }

    /// A pending store whose image satisfies `ready`.
    pub fn next_copy(&self, ready: impl Fn(ImageId) -> bool) -> Option<Copy> {
        let pending = self.pending.lock();
        pending
            .iter()
            .find(|(_, p)| ready(ImageId(p.image)))
            .map(|(&first, p)| Copy {
                first,
                count: p.count,
                image: ImageId(p.image),
                from: p.from,
            })
    }

    /// The copy was made (or given up): its slots are no longer pending, unless they have been
    /// given other blocks meanwhile.
    pub fn copied(&self, copy: Copy) {
        let mut pending = self.pending.lock();
        let entry = Pending {
            count: copy.count,
            image: copy.image.0,
            from: copy.from,
        };
        if pending.get(&copy.first) == Some(&entry) {
            pending.remove(&copy.first);
        }
    }

    /// Gives up what is pending from an image that will never be delivered.
    pub fn drop_image(&self, image: ImageId) {
        self.pending.lock().retain(|_, p| p.image != image.0);
    }

    /// Stores that are pending.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.lock().len()
    }

    /// Writes down what is pending, for the next start.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self) -> Result<(), TeleportError> {
        let bytes = pack_pending(&self.pending.lock());
        crate::imagemap::write_atomically(&self.pending_path, &bytes)
    }

    /// The offset of a slot in the data file.
    #[must_use]
    pub fn offset(slot: u64) -> u64 {
        slot * BLOCK_SIZE_U64
    }
}

/// Cuts the slots out of whatever is pending.
fn forget_slots(pending: &mut BTreeMap<u64, Pending>, first: u64, count: u64) {
    let end = first + count;
    let touched: Vec<u64> = pending
        .range(..end)
        .rev()
        // Sequences never cross a page of 128 slots, so nothing starts further back than that.
        .take_while(|(s, _)| **s + 128 > first)
        .filter(|(s, p)| **s + u64::from(p.count) > first)
        .map(|(s, _)| *s)
        .collect();
    for start in touched {
        let Some(p) = pending.remove(&start) else {
            continue;
        };
        let stop = start + u64::from(p.count);
        if start < first {
            pending.insert(
                start,
                Pending {
                    count: (first - start) as u32,
                    ..p
                },
            );
        }
        if stop > end {
            let entry = Pending {
                count: (stop - end) as u32,
                from: p.from + (end - start),
                ..p
            };
            pending.insert(end, entry);
        }
    }
}

const PENDING_VERSION: u8 = 1;

fn pack_pending(pending: &BTreeMap<u64, Pending>) -> Vec<u8> {
    let mut out = vec![PENDING_VERSION];
    out.extend(drover_net::encode(pending));
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &out) as u32;
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

fn unpack_pending(bytes: &[u8]) -> Option<BTreeMap<u64, Pending>> {
    let (body, sum) = bytes.split_last_chunk::<4>()?;
    let good = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, body) as u32;
    let (version, body) = body.split_first()?;
    if sum != &good.to_le_bytes() || *version != PENDING_VERSION {
        return None;
    }
    drover_net::decode(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OWN: ImageId = ImageId(1);

    proptest! {
        /// Against a plain table of where every slot's block is.
        #[test]
        fn slots_are_found_where_they_were_last_put(
            adds in prop::collection::vec((0u64..6, 0u64..128, 1u32..60, 1u64..4, 0u64..1000), 0..60),
            asks in prop::collection::vec((0u64..700, 1u32..128), 1..20),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let s = Sequences::open(dir.path()).unwrap();
            let mut plain: Vec<Option<(u64, u64)>> = vec![None; 2000];
            for (page, start, count, image, from) in adds {
                let count = count.min(128 - start as u32);
                let first = page * 128 + start;
                s.add(ImageId(image), SequenceStore { first, from, count });
                (0..u64::from(count)).for_each(|i| plain[(first + i) as usize] = Some((image, from + i)));
            }
            s.save().unwrap();
            let s = Sequences::open(dir.path()).unwrap();
            for (first, count) in asks {
                let found = s.resolve(first, count, OWN, |i| i == ImageId(2));
                let mut at = first;
                for (n, from) in found {
                    for i in 0..u64::from(n) {
                        let want = match plain[at as usize] {
                            None => From::Sequence { first: at },
                            Some((1, f)) => From::Own { first: f },
                            Some((2, f)) => From::Image { image: ImageId(2), first: f },
                            Some(_) => From::Literal,
                        };
                        let got = match from {
                            From::Literal => From::Literal,
                            From::Own { first } => From::Own { first: first + i },
                            From::Image { image, first } => From::Image { image, first: first + i },
                            From::Sequence { first } => From::Sequence { first: first + i },
                        };
                        prop_assert_eq!(got, want);
                        at += 1;
                    }
                }
                prop_assert_eq!(at, first + u64::from(count));
            }
        }
    }
}
