//! A cache of 4-byte entries: cuckoo hashing with 4-entry buckets and LRU inside the bucket (teleportation §2.7 to
//! §2.9).
//!
//! An entry keeps a fingerprint of its digest, not the digest, so its other bucket is computed from its current
//! bucket and the fingerprint: `i2 = i1 ^ hash(fingerprint)` (§2.12). Xor requires a power of two, but a memory
//! budget rarely is one. So a cache consists of several equal *parts* with a power of two of buckets each; other
//! digest bits select the part. Xor only changes the low bits, so an entry never leaves its part.
//!
//! Inside a bucket the first slot is the most recently used one and free slots are at the end. Low-priority entries
//! that were only admitted to free slots ("guests") stay below all others ("regulars") and are evicted first. The
//! number of guests in each bucket is kept in four bits outside it, 1/32 of the cache's memory.

use drover_core::Digest;

/// Entries per bucket.
pub(crate) const SLOTS: usize = 4;

const BUCKET_BYTES: usize = SLOTS * 4;

/// Buckets that [`CuckooLru::save`] and [`CuckooLru::load`] transfer at a time.
const SAVED_AT_ONCE: usize = 4096;

/// Maximum number of parts.
const MAX_PARTS: usize = 64;

/// Maximum number of moves per insertion while the cache is not full. Measured: 93 % occupancy before the first
/// eviction.
const KICKS: usize = 256;

/// A cache counts as full when fewer than one in this many slots is free.
const FULL_SHARE: usize = 32;

/// Maximum number of moves in a full cache: the entry that falls out of a bucket replaces the last one in its other
/// bucket.
const KICKS_WHEN_FULL: usize = 1;

/// A quarter of a cache line, aligned so that it never spans two.
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

    /// Inserts `entry` at `at` and shifts the rest down; the last entry is dropped.
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

/// Number of guests in each bucket: four bits per bucket.
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

/// An entry found by its fingerprint, or evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CacheEntry {
    /// One of its two buckets.
    pub bucket: u32,
    /// Its fingerprint.
    pub fingerprint: u32,
    /// Its payload: file and address.
    pub payload: u32,
}

impl CacheEntry {
    /// The key of this entry.
    pub(crate) fn key(self) -> Key {
        Key {
            bucket: self.bucket,
            fingerprint: self.fingerprint,
        }
    }
}

/// Up to eight entries with the fingerprint of a key.
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
    /// Buckets per part, minus one.
    mask: u32,
    fingerprint_bits: u32,
    /// For each fingerprint, the value xored into a bucket's index.
    alternate: Vec<u32>,
    guests: GuestCounts,
    len: usize,
}

impl CuckooLru {
    /// Creates a cache that uses as much of `bytes` as parts of at most `max_part_bytes` allow.
    pub(crate) fn new(bytes: usize, max_part_bytes: usize, fingerprint_bits: u8) -> Self {
        let (parts, part_bytes) = divide(bytes, max_part_bytes);
        let mask = (part_bytes / BUCKET_BYTES - 1) as u32;
        let fingerprint_bits = u32::from(fingerprint_bits);
        let alternate = (0..1u64 << fingerprint_bits)
            // Odd, so that the two buckets always differ when there are at least two.
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

    /// Total number of slots.
    pub(crate) fn capacity(&self) -> usize {
        self.buckets.len() * SLOTS
    }

    /// Number of slots in use.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory of the slots in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.len() * BUCKET_BYTES
    }

    /// Memory outside the slots in bytes.
    pub(crate) fn extra_bytes(&self) -> usize {
        self.guests.0.len() + self.alternate.len() * 4
    }

    /// Memory of one part in bytes.
    pub(crate) fn part_bytes(&self) -> usize {
        (self.mask as usize + 1) * BUCKET_BYTES
    }

    /// The key of `digest`.
    #[inline]
    pub(crate) fn key(&self, digest: &Digest) -> Key {
        let p = digest.prefix();
        let part = ((p >> 32 & 0xffff) as u32 * self.parts) >> 16;
        Key {
            bucket: part * (self.mask + 1) + (p as u32 & self.mask),
            fingerprint: self.fingerprint(digest),
        }
    }

    /// The fingerprint of `digest`.
    #[inline]
    pub(crate) fn fingerprint(&self, digest: &Digest) -> u32 {
        // 1 ..= 2^bits - 1: an entry must never be zero.
        let most = (1u32 << self.fingerprint_bits) - 1;
        1 + (((digest.prefix() >> 48) as u32 * most) >> 16)
    }

    /// The key in this cache for an entry of another cache, without its digest. The other cache's parts must not be
    /// smaller than this one's.
    ///
    /// The part cannot be selected by digest bits then; it is derived from the pair of buckets and the fingerprint,
    /// which are known from either of the entry's buckets.
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

    /// Whether entries with these keys have the same buckets and fingerprint.
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

    /// Prefetches the buckets of a digest. When done for several digests in a row, later operations on them need not
    /// wait for memory one by one. The result is meaningless, but must be used so that the loads are not optimized
    /// away.
    #[inline]
    pub(crate) fn touch_buckets(&self, digest: &Digest) -> u32 {
        let key = self.key(digest);
        let other = self.other(key.bucket, key.fingerprint);
        self.buckets[key.bucket as usize].0[0] ^ self.buckets[other as usize].0[0]
    }

    /// Whether one of the key's buckets has an entry with its fingerprint.
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

    /// Whether exactly this entry is present.
    pub(crate) fn contains(&self, key: Key, payload: u32) -> bool {
        self.position(key, payload).is_some()
    }

    /// Removes the entry from its slot and updates `guests`.
    fn take(&mut self, bucket: u32, at: usize) -> u32 {
        let b = &mut self.buckets[bucket as usize];
        let guests = self.guests.get(bucket);
        if at + guests >= b.used() {
            self.guests.set(bucket, guests - 1);
        }
        b.remove(at)
    }

    /// Moves an entry, if present, to the top of its bucket. A guest becomes a regular.
    pub(crate) fn touch(&mut self, key: Key, payload: u32) {
        if let Some((bucket, at)) = self.position(key, payload) {
            let entry = self.take(bucket, at);
            self.buckets[bucket as usize].put(0, entry);
        }
    }

    /// Removes an entry; returns whether it was present.
    pub(crate) fn remove(&mut self, key: Key, payload: u32) -> bool {
        let Some((bucket, at)) = self.position(key, payload) else {
            return false;
        };
        self.take(bucket, at);
        self.len -= 1;
        true
    }

    /// Inserts an entry at the top of its bucket, or moves it there. If that evicts another entry, returns it with
    /// one of its buckets.
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

    /// Inserts an entry below the other regulars of a bucket with a free slot.
    fn put_below(&mut self, bucket: u32, entry: u32) {
        let b = &mut self.buckets[bucket as usize];
        b.put(b.used() - self.guests.get(bucket), entry);
    }

    /// Finds a place for an entry that fell out of `from`: a free slot, a guest's, or that of another entry, which is
    /// moved in turn. It goes below the regulars, because it was the least recently used in its old bucket.
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
            // Always taking the last slot would loop; the final step is an eviction.
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

    /// Inserts an entry as a guest if one of its buckets has a free slot; returns whether it is present now.
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

    /// Removes every entry for whose payload `keep` returns `false`.
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

    /// Removes all entries.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(Bucket::default());
        self.guests.0.fill(0);
        self.len = 0;
    }

    /// Passes all slots, then the guest counts of all buckets, to `sink` in pieces.
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

    /// Loads data that [`save`](Self::save) wrote for a cache of the same shape; `source` fills buffers. Arbitrary
    /// bytes result in a valid cache: inconsistent entries are dropped.
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

/// Number of parts and bytes per part: the largest power of two that wastes nothing of `bytes`, or almost nothing
/// when only tiny parts would fit exactly.
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
