//! The data file of the sequence cache (teleportation §2.14): blocks that images have shared, kept
//! so that they can be reused when the images they were found in change or go.
//!
//! What is found is written down at once but copied later, in the background: until then a slot is
//! "pending", and its blocks are read from the image on whose way they were found, or from where
//! they were found, which is here already. So an image that never comes whole takes nothing away.
//! Nothing here needs to be durable to be correct, because every reused block is digested again; a
//! lost slot costs its bytes on the wire once. See `docs/format/sequence-cache.md`.

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

/// Slots whose blocks are still only in images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Pending {
    count: u32,
    image: u64,
    from: u64,
    /// Where they were when they were found: another image, and the first one's compact index.
    found: Option<(u64, u64)>,
}

impl Pending {
    /// The places of `count` blocks that are `skip` blocks on.
    fn part(self, skip: u64, count: u64) -> Self {
        Pending {
            count: count as u32,
            from: self.from.saturating_add(skip),
            found: self.found.map(|(i, at)| (i, at.saturating_add(skip))),
            ..self
        }
    }
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
    /// What was pending when it was begun.
    of: Pending,
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

    /// Slots `store` get their blocks from `image`, or from where they were `found`. Whatever was
    /// pending for them is over.
    pub fn add(&self, image: ImageId, store: SequenceStore, found: Option<(ImageId, u64)>) {
        let mut pending = self.pending.lock();
        forget_slots(&mut pending, store.first, u64::from(store.count));
        if store.count > 0 {
            let entry = Pending {
                count: store.count,
                image: image.0,
                from: store.from,
                found: found.map(|(i, at)| (i.0, at)),
            };
            pending.insert(store.first, entry);
        }
        if pending.len() > MAX_PENDING {
            pending.pop_first();
        }
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
        let pending = self.pending.lock();
        let end = first.saturating_add(u64::from(count));
        let mut out = Vec::new();
        let mut at = first;
        while at < end {
            let covering = pending
                .range(..=at)
                .next_back()
                .filter(|(s, p)| **s + u64::from(p.count) > at);
            let (n, from) = match covering {
                Some((start, p)) => {
                    let n = (start + u64::from(p.count)).min(end) - at;
                    (n, readable(&p.part(at - start, n), own, &reach))
                }
                None => {
                    let next = pending.range(at..).next().map_or(end, |(s, _)| *s);
                    (next.min(end) - at, From::Sequence { first: at })
                }
            };
            out.push((n as u32, from));
            at += n;
        }
        out
    }

    /// A pending store that can be copied: `whole` says which images are whole, `live` which are on
    /// their way in. What an image that is neither would bring is taken from where it was found.
    pub fn next_copy(
        &self,
        whole: impl Fn(ImageId) -> bool,
        live: impl Fn(ImageId) -> bool,
    ) -> Option<Copy> {
        let pending = self.pending.lock();
        pending.iter().find_map(|(&first, p)| {
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
                of: *p,
            })
        })
    }

    /// The copy was made (or given up): its slots are no longer pending, unless they have been
    /// given other blocks meanwhile.
    pub fn copied(&self, copy: Copy) {
        let mut pending = self.pending.lock();
        if pending.get(&copy.first) == Some(&copy.of) {
            pending.remove(&copy.first);
        }
    }

    /// An image is gone, or will never come: what is pending from it is read from where it was
    /// found, and what has no such place is given up.
    pub fn drop_image(&self, image: ImageId) {
        self.pending.lock().retain(|_, p| {
            let found = p
                .found
                .take_if(|(i, _)| *i == image.0 || p.image == image.0);
            if p.image != image.0 {
                return true;
            }
            match found.filter(|(i, _)| *i != image.0) {
                Some((other, at)) => (p.image, p.from) = (other, at),
                None => return false,
            }
            true
        });
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
            pending.insert(start, p.part(0, first - start));
        }
        if stop > end {
            pending.insert(end, p.part(end - start, stop - end));
        }
    }
}

const PENDING_VERSION: u8 = 2;

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

    const COMING: ImageId = ImageId(3);

    /// What is here: image 2; what comes: image 3; no other.
    fn reach(image: ImageId, _: u64, _: u64) -> Reach {
        match image {
            ImageId(2) => Reach::Here,
            COMING => Reach::Coming,
            _ => Reach::Gone,
        }
    }

    fn place(image: u64, first: u64) -> From {
        match ImageId(image) {
            OWN => From::Own { first },
            image => From::Image { image, first },
        }
    }

    /// The rules, one after the other.
    fn expected(brought: (u64, u64), found: Option<(u64, u64)>) -> From {
        let (a, b) = (Some(brought), found);
        let is = |c: Option<(u64, u64)>, image| c.filter(|(i, _)| *i == image);
        let order = [is(a, 1), is(a, 2), is(b, 2), is(b, 1), is(b, 3), is(a, 3)];
        let first = order.into_iter().flatten().next();
        first.map_or(From::Literal, |(i, at)| place(i, at))
    }

    proptest! {
        /// Against a plain table of where every slot's block is.
        #[test]
        fn slots_are_found_where_they_were_last_put(
            adds in prop::collection::vec((0u64..6, 0u64..128, 1u32..60, 1u64..5, 0u64..1000, prop::option::of((1u64..5, 0u64..1000))), 0..60),
            asks in prop::collection::vec((0u64..700, 1u32..128), 1..20),
            dropped in prop::option::of(1u64..5),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let s = Sequences::open(dir.path()).unwrap();
            type Places = Option<((u64, u64), Option<(u64, u64)>)>;
            let mut plain: Vec<Places> = vec![None; 2000];
            for (page, start, count, image, from, found) in adds {
                let count = count.min(128 - start as u32);
                let first = page * 128 + start;
                s.add(ImageId(image), SequenceStore { first, from, count }, found.map(|(i, at)| (ImageId(i), at)));
                for i in 0..u64::from(count) {
                    plain[(first + i) as usize] = Some(((image, from + i), found.map(|(f, at)| (f, at + i))));
                }
            }
            if let Some(gone) = dropped {
                s.drop_image(ImageId(gone));
                for slot in &mut plain {
                    *slot = slot.and_then(|(brought, found)| {
                        let found = found.filter(|f| f.0 != gone);
                        if brought.0 == gone { found.map(|f| (f, None)) } else { Some((brought, found)) }
                    });
                }
            }
            s.save().unwrap();
            let s = Sequences::open(dir.path()).unwrap();
            for (first, count) in asks {
                let found = s.resolve(first, count, OWN, reach);
                let mut at = first;
                for (n, from) in found {
                    for i in 0..u64::from(n) {
                        let want = match plain[at as usize] {
                            None => From::Sequence { first: at },
                            Some((brought, found)) => expected(brought, found),
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

    /// What an image that does not come any more would have brought is copied from where it is.
    #[test]
    fn what_is_copied_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let s = Sequences::open(dir.path()).unwrap();
        let store = SequenceStore {
            first: 5,
            from: 10,
            count: 7,
        };
        s.add(COMING, store, Some((ImageId(2), 90)));
        let whole = |i| i == ImageId(2);
        assert_eq!(s.next_copy(whole, |i| i == COMING), None);
        let copy = s.next_copy(whole, |_| false).unwrap();
        assert_eq!((copy.image, copy.from, copy.count), (ImageId(2), 90, 7));
        let copy = s.next_copy(|_| true, |_| true).unwrap();
        assert_eq!((copy.image, copy.from), (COMING, 10));
        // Given other blocks meanwhile.
        s.add(COMING, SequenceStore { from: 11, ..store }, None);
        s.copied(copy);
        assert_eq!(s.pending(), 1);
        let copy = s.next_copy(|_| true, |_| false).unwrap();
        s.copied(copy);
        assert_eq!(s.pending(), 0);
    }
}
