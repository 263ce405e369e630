//! A cache of 4-byte entries: cuckoo hashing with 4-entry buckets and LRU inside the bucket
//! (teleportation §2.7 to §2.9).
//!
//! An entry keeps a fingerprint of its digest, not the digest, so its other bucket is found from
//! the bucket it is in and the fingerprint: `i2 = i1 ^ hash(fingerprint)` (§2.12). Xor needs a
//! power of two, a memory budget seldom is one: a cache is several equal *parts* of a power of two
//! of buckets each, chosen by digest bits of their own. Xor only touches the low bits, so an entry
//! never leaves its part.
//!
//! Inside a bucket the first slot is the most recently used one and free slots are at the end.
//! Entries that were only put there because there was room ("guests") stay below all others, and
//! whatever needs a slot takes a guest's. How many of a bucket's entries are guests is kept in
//! four bits beside it, 1/32 of the cache's memory.

use drover_core::Digest;

/// Entries in a bucket.
pub(crate) const SLOTS: usize = 4;

const BUCKET_BYTES: usize = SLOTS * 4;

/// Buckets that [`CuckooLru::save`] and [`CuckooLru::load`] move at once.
const SAVED_AT_ONCE: usize = 4096;

/// The most parts a budget is divided into.
const MAX_PARTS: usize = 64;

/// How far an insertion moves entries while there is room somewhere. Measured: 93 % full before
/// the first eviction.
const KICKS: usize = 256;

/// A cache counts as full when less than one slot in this many is free.
const FULL_SHARE: usize = 32;

/// Moves in a full cache: the entry that falls out of a bucket takes the place of the last one in
/// its other bucket.
const KICKS_WHEN_FULL: usize = 1;

/// A quarter of a cache line, and never across two.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[repr(align(16))]
struct Bucket([u32; SLOTS]);

impl Bucket {
    fn used(&self) -> usize {
        self.0.iter().filter(|&&e| e != 0).count()
    }

    fn is_full(&self) -> bool {
        self.0[SLOTS - 1] != 0
    }

    /// Puts `entry` at `at` and moves the rest down; what falls off the end is lost.
    fn put(&mut self, at: usize, entry: u32) {
        self.0.copy_within(at..SLOTS - 1, at + 1);
        self.0[at] = entry;
    }

    fn remove(&mut self, at: usize) -> u32 {
        let out = self.0[at];
        self.0[at] = 0;
        self.0[at..].rotate_left(1);
        out
    }
}

/// How many guests each bucket has: four bits a bucket.
#[derive(Default)]
struct GuestCounts(Vec<u8>);

impl GuestCounts {
    fn get(&self, bucket: u32) -> usize {
        let byte = self.0[bucket as usize / 2];
        usize::from(byte >> (4 * (bucket % 2)) & 0xf)
    }

    fn set(&mut self, bucket: u32, n: usize) {
        let byte = &mut self.0[bucket as usize / 2];
        let shift = 4 * (bucket % 2);
        *byte = *byte & !(0xf << shift) | (n as u8) << shift;
    }
}

/// Where a digest belongs in one particular cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    /// One of its two buckets, counted over all parts.
    pub bucket: u32,
    /// Its fingerprint; never zero.
    pub fingerprint: u32,
}

/// An entry that was found by its fingerprint, or pushed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CacheEntry {
    /// A bucket it belongs to.
    pub bucket: u32,
    /// Its fingerprint.
    pub fingerprint: u32,
    /// What the entry says: file and address.
    pub payload: u32,
}

impl CacheEntry {
    /// The key that leads to it.
    pub(crate) fn key(self) -> Key {
        Key {
            bucket: self.bucket,
            fingerprint: self.fingerprint,
        }
    }
}

/// At most eight entries with the fingerprint of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidates {
    found: [CacheEntry; 2 * SLOTS],
    len: usize,
}

impl Candidates {
    pub(crate) fn as_slice(&self) -> &[CacheEntry] {
        &self.found[..self.len]
    }
}

/// The cache.
pub(crate) struct CuckooLru {
    buckets: Vec<Bucket>,
    parts: u32,
    /// Buckets of a part, less one.
    mask: u32,
    fingerprint_bits: u32,
    /// What a fingerprint is xored into a bucket as.
    alternate: Vec<u32>,
    guests: GuestCounts,
    len: usize,
}

impl CuckooLru {
    /// A cache that uses `bytes` as fully as parts of at most `max_part_bytes` can.
    pub(crate) fn new(bytes: usize, max_part_bytes: usize, fingerprint_bits: u8) -> Self {
        let (parts, part_bytes) = divide(bytes, max_part_bytes);
        let mask = (part_bytes / BUCKET_BYTES - 1) as u32;
        let fingerprint_bits = u32::from(fingerprint_bits);
        let alternate = (0..1u64 << fingerprint_bits)
            // Odd, so that the two buckets always differ when there are two.
            .map(|f| (mix(f) as u32 | 1) & mask)
            .collect();
        let buckets = parts * (mask as usize + 1);
        CuckooLru {
            buckets: vec![Bucket::default(); buckets],
            guests: GuestCounts(vec![0; buckets.div_ceil(2)]),
            parts: parts as u32,
            mask,
            fingerprint_bits,
            alternate,
            len: 0,
        }
    }

    /// Slots.
    pub(crate) fn capacity(&self) -> usize {
        self.buckets.len() * SLOTS
    }

    /// Slots in use.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory of the slots.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.len() * BUCKET_BYTES
    }

    /// Memory beside the slots.
    pub(crate) fn extra_bytes(&self) -> usize {
        self.guests.0.len() + self.alternate.len() * 4
    }

    /// Memory of one part.
    pub(crate) fn part_bytes(&self) -> usize {
        (self.mask as usize + 1) * BUCKET_BYTES
    }

    /// Where `digest` belongs.
    #[inline]
    pub(crate) fn key(&self, digest: &Digest) -> Key {
        let p = digest.prefix();
        let part = ((p >> 32 & 0xffff) as u32 * self.parts) >> 16;
        Key {
            bucket: part * (self.mask + 1) + (p as u32 & self.mask),
            fingerprint: self.fingerprint(digest),
        }
    }

    /// The part of `digest` that entries keep.
    #[inline]
    pub(crate) fn fingerprint(&self, digest: &Digest) -> u32 {
        // 1 ..= 2^bits - 1: an entry must never be zero.
        let most = (1u32 << self.fingerprint_bits) - 1;
        1 + (((digest.prefix() >> 48) as u32 * most) >> 16)
    }

    /// Where an entry of another cache belongs in this one when its digest is not at hand. The
    /// other cache's parts must not be smaller than this one's.
    ///
    /// The part cannot come from digest bits then; it is taken from the pair of buckets and the
    /// fingerprint, which the other cache's entry tells whichever of its buckets it is in.
    #[inline]
    pub(crate) fn adopted_key(&self, foreign: Key) -> Key {
        let a = foreign.bucket & self.mask;
        let b = a ^ self.alternate[foreign.fingerprint as usize];
        let pair = u64::from(a.min(b)) << 16 | u64::from(foreign.fingerprint);
        let part = ((mix(pair) >> 48) as u32 * self.parts) >> 16;
        Key {
            bucket: part * (self.mask + 1) + a,
            fingerprint: foreign.fingerprint,
        }
    }

    #[inline]
    fn other(&self, bucket: u32, fingerprint: u32) -> u32 {
        bucket ^ self.alternate[fingerprint as usize]
    }

    /// Whether entries with these keys are in the same buckets with the same fingerprint.
    pub(crate) fn same_entry(&self, a: Key, b: Key) -> bool {
        a.fingerprint == b.fingerprint
            && (a.bucket == b.bucket || self.other(a.bucket, a.fingerprint) == b.bucket)
    }

    #[inline]
    fn payload_bits(&self) -> u32 {
        32 - self.fingerprint_bits
    }

    #[inline]
    fn entry(&self, fingerprint: u32, payload: u32) -> u32 {
        debug_assert!(payload >> self.payload_bits() == 0);
        fingerprint << self.payload_bits() | payload
    }

    #[inline]
    fn split(&self, entry: u32) -> (u32, u32) {
        let bits = self.payload_bits();
        (entry >> bits, entry & ((1 << bits) - 1))
    }

    /// Touches the buckets of a digest. Done for several digests in a row, what is done with them
    /// next need not wait for memory one by one. The answer means nothing, but must be used.
    #[inline]
    pub(crate) fn touch_buckets(&self, digest: &Digest) -> u32 {
        let key = self.key(digest);
        let other = self.other(key.bucket, key.fingerprint);
        self.buckets[key.bucket as usize].0[0] ^ self.buckets[other as usize].0[0]
    }

    /// Whether an entry with the key's fingerprint is in one of its buckets.
    #[inline]
    pub(crate) fn may_contain(&self, key: Key) -> bool {
        let bits = self.payload_bits();
        let other = self.other(key.bucket, key.fingerprint);
        let hit = |b: u32| {
            self.buckets[b as usize]
                .0
                .iter()
                .fold(false, |any, &e| any | (e >> bits == key.fingerprint))
        };
        hit(key.bucket) | hit(other)
    }

    /// The entries with the key's fingerprint, most recently used first in each bucket.
    pub(crate) fn candidates(&self, key: Key) -> Candidates {
        let none = CacheEntry {
            bucket: 0,
            fingerprint: 0,
            payload: 0,
        };
        let mut c = Candidates {
            found: [none; 2 * SLOTS],
            len: 0,
        };
        let other = self.other(key.bucket, key.fingerprint);
        let both = [key.bucket, other];
        for &bucket in &both[..1 + usize::from(other != key.bucket)] {
            for &e in &self.buckets[bucket as usize].0 {
                let (fingerprint, payload) = self.split(e);
                if fingerprint == key.fingerprint {
                    c.found[c.len] = CacheEntry {
                        bucket,
                        fingerprint,
                        payload,
                    };
                    c.len += 1;
                }
            }
        }
        c
    }

    fn position(&self, key: Key, payload: u32) -> Option<(u32, usize)> {
        let entry = self.entry(key.fingerprint, payload);
        [key.bucket, self.other(key.bucket, key.fingerprint)]
            .into_iter()
            .find_map(|b| {
                let at = self.buckets[b as usize]
                    .0
                    .iter()
                    .position(|&e| e == entry)?;
                Some((b, at))
            })
    }

    /// Whether exactly this entry is there.
    pub(crate) fn contains(&self, key: Key, payload: u32) -> bool {
        self.position(key, payload).is_some()
    }

    /// Takes the entry out of its slot; `guests` stays true.
    fn take(&mut self, bucket: u32, at: usize) -> u32 {
        let b = &mut self.buckets[bucket as usize];
        let guests = self.guests.get(bucket);
        if at + guests >= b.used() {
            self.guests.set(bucket, guests - 1);
        }
        b.remove(at)
    }

    /// Moves an entry to the top of its bucket, if it is there. A guest becomes a regular.
    pub(crate) fn touch(&mut self, key: Key, payload: u32) {
        if let Some((bucket, at)) = self.position(key, payload) {
            let entry = self.take(bucket, at);
            self.buckets[bucket as usize].put(0, entry);
        }
    }

    /// Removes an entry; whether it was there.
    pub(crate) fn remove(&mut self, key: Key, payload: u32) -> bool {
        let Some((bucket, at)) = self.position(key, payload) else {
            return false;
        };
        self.take(bucket, at);
        self.len -= 1;
        true
    }

    /// Inserts an entry at the top of its bucket, or moves it there. Another entry may be pushed
    /// out of the cache; it comes back with one of the buckets it belonged to.
    pub(crate) fn insert(&mut self, key: Key, payload: u32) -> Option<CacheEntry> {
        if self.contains(key, payload) {
            self.touch(key, payload);
            return None;
        }
        let entry = self.entry(key.fingerprint, payload);
        let other = self.other(key.bucket, key.fingerprint);
        let both = [key.bucket, other];
        let room = |&b: &u32| !self.buckets[b as usize].is_full();
        if let Some(b) = both.into_iter().find(room) {
            self.buckets[b as usize].put(0, entry);
            self.len += 1;
            return None;
        }
        if let Some(b) = both.into_iter().find(|&b| self.guests.get(b) > 0) {
            let out = self.take(b, SLOTS - 1);
            self.buckets[b as usize].put(0, entry);
            return Some(self.found(b, out));
        }
        let out = self.take(key.bucket, SLOTS - 1);
        self.buckets[key.bucket as usize].put(0, entry);
        self.move_on(key.bucket, out)
    }

    fn found(&self, bucket: u32, entry: u32) -> CacheEntry {
        let (fingerprint, payload) = self.split(entry);
        CacheEntry {
            bucket,
            fingerprint,
            payload,
        }
    }

    /// Puts an entry below the other regulars of a bucket that has room.
    fn put_below(&mut self, bucket: u32, entry: u32) {
        let b = &mut self.buckets[bucket as usize];
        b.put(b.used() - self.guests.get(bucket), entry);
    }

    /// Finds a place for an entry that fell out of `from`: a free slot, a guest's, or that of
    /// another entry that moves on in turn. It is put below the regulars, for it was the least
    /// recently used where it comes from.
    fn move_on(&mut self, from: u32, entry: u32) -> Option<CacheEntry> {
        let room = self.capacity() - self.len;
        let kicks = if room * FULL_SHARE > self.capacity() {
            KICKS
        } else {
            KICKS_WHEN_FULL
        };
        let (mut from, mut entry) = (from, entry);
        for left in (0..kicks).rev() {
            let (fingerprint, _) = self.split(entry);
            let to = self.other(from, fingerprint);
            if !self.buckets[to as usize].is_full() {
                self.put_below(to, entry);
                self.len += 1;
                return None;
            }
            let guest = self.guests.get(to) > 0;
            // Always the last one would walk in circles; the very last step is an eviction.
            let slot = if guest || left == 0 {
                SLOTS - 1
            } else {
                mix(u64::from(entry) ^ left as u64) as usize % SLOTS
            };
            let out = self.take(to, slot);
            self.put_below(to, entry);
            (from, entry) = (to, out);
            if guest {
                break;
            }
        }
        Some(self.found(from, entry))
    }

    /// Inserts an entry as a guest, if one of its buckets has room. Whether it is there now.
    pub(crate) fn insert_in_room(&mut self, key: Key, payload: u32) -> bool {
        if self.contains(key, payload) {
            return true;
        }
        let entry = self.entry(key.fingerprint, payload);
        let other = self.other(key.bucket, key.fingerprint);
        for bucket in [key.bucket, other] {
            let b = &mut self.buckets[bucket as usize];
            if !b.is_full() {
                b.put(b.used(), entry);
                self.guests.set(bucket, self.guests.get(bucket) + 1);
                self.len += 1;
                return true;
            }
        }
        false
    }

    /// Removes every entry whose payload `keep` refuses.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        let payload_mask = (1u32 << self.payload_bits()) - 1;
        for bucket in 0..self.buckets.len() as u32 {
            let mut at = 0;
            while at < SLOTS && self.buckets[bucket as usize].0[at] != 0 {
                if keep(self.buckets[bucket as usize].0[at] & payload_mask) {
                    at += 1;
                } else {
                    self.take(bucket, at);
                    self.len -= 1;
                }
            }
        }
    }

    /// Clears bits of every entry's payload.
    pub(crate) fn clear_bits(&mut self, bits: u32) {
        debug_assert!(bits >> self.payload_bits() == 0);
        for bucket in &mut self.buckets {
            bucket.0.iter_mut().for_each(|e| *e &= !bits);
        }
    }

    /// Removes everything.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(Bucket::default());
        self.guests.0.fill(0);
        self.len = 0;
    }

    /// Hands all slots, and then how many guests each bucket has, to `sink` in pieces.
    pub(crate) fn save<E>(&self, mut sink: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut bytes = Vec::with_capacity(SAVED_AT_ONCE * BUCKET_BYTES);
        for buckets in self.buckets.chunks(SAVED_AT_ONCE) {
            bytes.clear();
            for e in buckets.iter().flat_map(|b| b.0) {
                bytes.extend_from_slice(&e.to_le_bytes());
            }
            sink(&bytes)?;
        }
        sink(&self.guests.0)
    }

    /// Takes what [`save`](Self::save) of a cache of the same shape made from `source`, which
    /// fills buffers. Any bytes make a cache that works: what makes no sense is dropped.
    pub(crate) fn load<E>(
        &mut self,
        mut source: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.clear();
        let bits = self.payload_bits();
        let mut bytes = vec![0; SAVED_AT_ONCE * BUCKET_BYTES];
        for buckets in self.buckets.chunks_mut(SAVED_AT_ONCE) {
            let bytes = &mut bytes[..buckets.len() * BUCKET_BYTES];
            source(bytes)?;
            for (bucket, saved) in buckets.iter_mut().zip(bytes.as_chunks::<BUCKET_BYTES>().0) {
                let entries = saved.as_chunks().0.iter().map(|e| u32::from_le_bytes(*e));
                for e in entries.filter(|e| e >> bits != 0) {
                    bucket.put(bucket.used(), e);
                    self.len += 1;
                }
            }
        }
        source(&mut self.guests.0)?;
        for bucket in 0..self.buckets.len() as u32 {
            let used = self.buckets[bucket as usize].used();
            self.guests.set(bucket, self.guests.get(bucket).min(used));
        }
        Ok(())
    }
}

/// Parts and bytes of a part: the largest power of two that leaves nothing of `bytes` unused, or
/// next to nothing when only very small ones would.
fn divide(bytes: usize, max_part_bytes: usize) -> (usize, usize) {
    let bytes = bytes.max(BUCKET_BYTES);
    let mut part = prev_power_of_two(bytes.min(max_part_bytes.max(BUCKET_BYTES)));
    while !bytes.is_multiple_of(part) && part > BUCKET_BYTES && bytes / part <= MAX_PARTS / 2 {
        part /= 2;
    }
    (bytes / part, part)
}

fn prev_power_of_two(n: usize) -> usize {
    1 << n.ilog2()
}

/// A fixed 64-bit mixer (the finalizer of splitmix64).
fn mix(v: u64) -> u64 {
    let mut z = v.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
