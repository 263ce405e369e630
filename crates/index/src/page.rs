//! A hash page: 340 digests, the unit of disk reads (teleportation §2.5, §2.11), and the bounded cache of pages.

mod bits;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

pub(crate) use bits::{Bits, PER_PAGE};
use drover_core::Digest;

/// Bytes of a page on disk.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Offset of a page's own checksum, if it has one.
const SEAL: usize = PAGE_BYTES - 4;

/// Number of tags in memory: a whole number of vectors.
const TAGS: usize = PER_PAGE.next_multiple_of(TAGS_AT_ONCE);
const TAGS_AT_ONCE: usize = 16;

const _: () = assert!(PER_PAGE * Digest::SHORT_LEN <= SEAL);

/// The checksum of everything the index writes: CRC-32C. A fuzzer could not get past it, so in fuzzing builds every
/// checksum matches.
pub(crate) fn crc(bytes: &[u8]) -> u32 {
    if cfg!(fuzzing) {
        return 0;
    }
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksum stored inside a page. It covers the page's number, so that a misplaced page is invalid.
fn seal_of(bytes: &[u8; PAGE_BYTES], no: u64) -> [u8; 4] {
    let mut b = [0; 8 + SEAL];
    b[..8].copy_from_slice(&no.to_le_bytes());
    b[8..].copy_from_slice(&bytes[..SEAL]);
    crc(&b).to_le_bytes()
}

/// Writes the page's checksum into its last bytes.
pub(crate) fn seal(bytes: &mut [u8; PAGE_BYTES], no: u64) {
    let sum = seal_of(bytes, no);
    bytes[SEAL..].copy_from_slice(&sum);
}

/// Whether the page's checksum is valid.
pub(crate) fn is_sealed(bytes: &[u8; PAGE_BYTES], no: u64) -> bool {
    bytes[SEAL..] == seal_of(bytes, no)
}

/// A page in memory. Digests are the first 12 bytes of full ones, in two parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Page {
    /// The last four bytes of each digest, contiguous so that a page is searched in a few vector steps; only slots in
    /// `used` are meaningful.
    tags: [u32; TAGS],
    /// The first eight bytes of each digest.
    prefixes: [u64; PER_PAGE],
    /// Slots that hold a digest.
    pub used: Bits,
    /// Slots that start a sequence. Only in the sequence cache.
    pub start: Bits,
    /// Slots that are strong heads. Only in the sequence cache.
    pub strong: Bits,
}

fn tag(d: &Digest) -> u32 {
    u32::from_le_bytes([d.0[8], d.0[9], d.0[10], d.0[11]])
}

impl Page {
    /// An empty page.
    pub(crate) fn empty() -> Self {
        Page {
            tags: [0; TAGS],
            prefixes: [0; PER_PAGE],
            used: Bits::default(),
            start: Bits::default(),
            strong: Bits::default(),
        }
    }

    /// A page of at most [`PER_PAGE`] digests.
    pub(crate) fn of(digests: &[Digest]) -> Self {
        let mut page = Page::empty();
        for (i, d) in digests.iter().enumerate() {
            page.tags[i] = tag(d);
            page.prefixes[i] = d.prefix();
        }
        page.used = Bits::range(0, digests.len());
        page
    }

    /// Decodes a page from disk; `used` gives the slots that hold digests.
    pub(crate) fn from_bytes(bytes: &[u8; PAGE_BYTES], used: Bits) -> Self {
        let mut page = Page::empty();
        let (digests, _) = bytes.as_chunks::<{ Digest::SHORT_LEN }>();
        let slots = page.prefixes.iter_mut().zip(&mut page.tags);
        for ((prefix, tag), d) in slots.zip(digests) {
            let [p0, p1, p2, p3, p4, p5, p6, p7, t0, t1, t2, t3] = *d;
            *prefix = u64::from_le_bytes([p0, p1, p2, p3, p4, p5, p6, p7]);
            *tag = u32::from_le_bytes([t0, t1, t2, t3]);
        }
        page.used = used;
        page
    }

    /// Encodes the page for the disk, without a checksum.
    pub(crate) fn to_bytes(&self) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        let (slots, _) = bytes.as_chunks_mut::<{ Digest::SHORT_LEN }>();
        for (b, (prefix, tag)) in slots.iter_mut().zip(self.prefixes.iter().zip(&self.tags)) {
            b[..8].copy_from_slice(&prefix.to_le_bytes());
            b[8..].copy_from_slice(&tag.to_le_bytes());
        }
        bytes
    }

    fn at(&self, i: usize) -> Digest {
        let mut d = Digest::default();
        d.0[..8].copy_from_slice(&self.prefixes[i].to_le_bytes());
        d.0[8..Digest::SHORT_LEN].copy_from_slice(&self.tags[i].to_le_bytes());
        d
    }

    /// The short digest in slot `i`, if there is one.
    #[inline]
    pub(crate) fn get(&self, i: usize) -> Option<Digest> {
        self.used.get(i).then(|| self.at(i))
    }

    /// Whether slot `i` holds `digest`.
    #[inline]
    pub(crate) fn holds(&self, i: usize, digest: &Digest) -> bool {
        self.prefixes[i] == digest.prefix() && self.tags[i] == tag(digest) && self.used.get(i)
    }

    /// Puts a digest into slot `i`.
    pub(crate) fn set(&mut self, i: usize, digest: &Digest) {
        self.prefixes[i] = digest.prefix();
        self.tags[i] = tag(digest);
        self.used.set(i);
    }

    /// The first slot that holds `digest`.
    #[inline]
    pub(crate) fn find(&self, digest: &Digest) -> Option<usize> {
        let want = tag(digest);
        for (group, tags) in self.tags.as_chunks::<TAGS_AT_ONCE>().0.iter().enumerate() {
            let any = tags.iter().fold(false, |any, &t| any | (t == want));
            if !any {
                continue;
            }
            for (i, &t) in tags.iter().enumerate() {
                let slot = group * TAGS_AT_ONCE + i;
                if t == want && slot < PER_PAGE && self.holds(slot, digest) {
                    return Some(slot);
                }
            }
        }
        None
    }

    /// Whether `is` holds for any digest; it may also be called for unused slots.
    #[inline]
    pub(crate) fn any(&self, is: impl Fn(&Digest) -> bool) -> bool {
        (0..PER_PAGE).any(|i| is(&self.at(i)))
    }

    /// Every digest with its slot.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Digest)> {
        (0..PER_PAGE).filter_map(|i| Some((i, self.get(i)?)))
    }
}

/// Identifies a page: the number of its file, and its number in the file.
pub(crate) type PageKey = (u32, u32);

/// The most recently read pages, a bounded number of them (second-chance eviction).
pub(crate) struct PageCache {
    index: HashMap<u64, u32, BuildHasherDefault<Mix>>,
    slots: Vec<Slot>,
    limit: usize,
    hand: usize,
}

struct Slot {
    key: u64,
    page: Arc<Page>,
    used: bool,
}

fn pack((file, page): PageKey) -> u64 {
    u64::from(file) << 32 | u64::from(page)
}

impl PageCache {
    pub(crate) fn new(limit: usize) -> Self {
        PageCache {
            index: HashMap::default(),
            slots: Vec::new(),
            limit,
            hand: 0,
        }
    }

    pub(crate) fn get(&mut self, key: PageKey) -> Option<Arc<Page>> {
        let slot = &mut self.slots[*self.index.get(&pack(key))? as usize];
        slot.used = true;
        Some(Arc::clone(&slot.page))
    }

    pub(crate) fn put(&mut self, key: PageKey, page: Arc<Page>) {
        let key = pack(key);
        if let Some(&at) = self.index.get(&key) {
            self.slots[at as usize].page = page;
            return;
        }
        // A page gets its second chance by being requested again.
        let slot = Slot {
            key,
            page,
            used: false,
        };
        if self.slots.len() < self.limit {
            self.index.insert(key, self.slots.len() as u32);
            self.slots.push(slot);
            return;
        }
        while std::mem::take(&mut self.slots[self.hand].used) {
            self.hand = (self.hand + 1) % self.limit;
        }
        self.index.remove(&self.slots[self.hand].key);
        self.index.insert(key, self.hand as u32);
        self.slots[self.hand] = slot;
        self.hand = (self.hand + 1) % self.limit;
    }

    /// Removes the page, or all pages of the file if none is given.
    pub(crate) fn forget(&mut self, file: u32, page: Option<u32>) {
        let gone = |key: u64| match page {
            Some(p) => key == pack((file, p)),
            None => (key >> 32) as u32 == file,
        };
        let mut at = 0;
        while at < self.slots.len() {
            let key = self.slots[at].key;
            if gone(key) {
                self.index.remove(&key);
                self.slots.swap_remove(at);
                if let Some(moved) = self.slots.get(at) {
                    self.index.insert(moved.key, at as u32);
                }
            } else {
                at += 1;
            }
        }
        self.hand = 0;
    }

    /// Memory of the pages in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.len() * (size_of::<Page>() + size_of::<Slot>() + 32)
    }
}

/// Hashes a page's key, which is a single number.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }
    fn write_u64(&mut self, v: u64) {
        let z = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = z ^ (z >> 29);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(n: u32) -> Digest {
        // Tags collide on purpose.
        let mut d = Digest::default();
        d.0[..4].copy_from_slice(&n.to_le_bytes());
        d.0[8] = n as u8 % 8;
        d
    }

    proptest! {
        #[test]
        fn finding_agrees_with_a_plain_search(ns in proptest::collection::vec(0u32..400, 0..=PER_PAGE), holes in proptest::collection::vec(any::<bool>(), PER_PAGE)) {
            let digests: Vec<Digest> = ns.iter().map(|&n| digest(n)).collect();
            let mut page = Page::of(&digests);
            prop_assert_eq!(page.iter().count(), digests.len());
            let kept = |i: usize| holes[i] && i < digests.len();
            (0..PER_PAGE).filter(|i| !kept(*i)).for_each(|i| page.used.clear(i, i + 1));
            let mut bytes = page.to_bytes();
            let again = Page::from_bytes(&bytes, page.used);
            prop_assert_eq!(&again, &page);
            for n in 0..400 {
                let plain = (0..digests.len()).find(|&i| kept(i) && digests[i] == digest(n));
                prop_assert_eq!(page.find(&digest(n)), plain);
                for i in 0..digests.len() {
                    prop_assert_eq!(page.holds(i, &digest(n)), page.get(i) == Some(digest(n)));
                }
            }
            seal(&mut bytes, 7);
            prop_assert!(is_sealed(&bytes, 7) && !is_sealed(&bytes, 8));
            prop_assert_eq!(Page::from_bytes(&bytes, page.used), page);
        }

        #[test]
        fn the_cache_never_answers_with_the_wrong_page(ops in proptest::collection::vec((0u32..3, 0u32..30, 0u8..10), 0..400)) {
            let mut cache = PageCache::new(8);
            let mut plain: HashMap<PageKey, Digest> = HashMap::new();
            for (t, (file, page, what)) in ops.into_iter().enumerate() {
                match what {
                    0 => { cache.forget(file, None); plain.retain(|k, _| k.0 != file); }
                    1 => { cache.forget(file, Some(page)); plain.remove(&(file, page)); }
                    2..=5 => {
                        let d = digest(t as u32);
                        cache.put((file, page), Arc::new(Page::of(&[d])));
                        plain.insert((file, page), d);
                    }
                    _ => if let Some(got) = cache.get((file, page)) {
                        prop_assert_eq!(got.get(0), plain.get(&(file, page)).copied());
                    }
                }
                prop_assert!(cache.slots.len() <= 8);
                prop_assert_eq!(cache.slots.len(), cache.index.len());
            }
        }
    }

    #[test]
    fn a_page_that_is_used_outlives_a_scan() {
        let mut cache = PageCache::new(8);
        cache.put((0, 0), Arc::new(Page::empty()));
        for p in 1..100 {
            assert!(cache.get((0, 0)).is_some(), "{p}");
            cache.put((0, p), Arc::new(Page::empty()));
        }
        assert!(cache.get((0, 1)).is_none());
    }
}
