//! A container: up to 4,096 blocks in one object (`docs/format/vault-container.md`).

use std::cell::RefCell;
use std::fmt;

use drover_core::{BLOCK_SIZE, Digest};
use serde::{Deserialize, Serialize};
use zstd::bulk::Compressor;

use crate::digester::Digester;

/// Most blocks of a container.
pub const MAX_BLOCKS: usize = 4096;
/// Blocks that are compressed together: 128 KiB.
pub const GROUP_BLOCKS: usize = 32;
/// Most groups of a container.
pub const MAX_GROUPS: usize = MAX_BLOCKS / GROUP_BLOCKS;
/// Bytes of a full group before compression.
pub const GROUP_BYTES: usize = GROUP_BLOCKS * BLOCK_SIZE;
/// Longest head in bytes.
pub const MAX_HEAD: usize = FIXED + MAX_BLOCKS * Digest::LEN + PRESENT + MAX_GROUPS * 8 + HASH;

const MAGIC: &[u8; 8] = b"DRVRCON\0";
const VERSION: u32 = 1;
/// Blocks of 4 KiB, digested by BLAKE3: the only kind so far.
const KIND_FIXED: u32 = 1;
const FIXED: usize = 40;
const PRESENT: usize = MAX_BLOCKS / 8;
const HASH: usize = 32;
/// Set in a group's length when it is stored as it is.
const STORED: u32 = 1 << 31;
/// The level of zstd.
const LEVEL: i32 = 3;

/// The number of a container: the session that wrote it, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerId(pub u64);

impl ContainerId {
    /// Container `number` of a session.
    #[must_use]
    pub fn new(session: SessionId, number: u32) -> Self {
        ContainerId(session.0 << 24 | u64::from(number & 0xff_ffff))
    }

    /// The session that wrote it.
    #[must_use]
    pub fn session(self) -> SessionId {
        SessionId(self.0 >> 24)
    }

    /// The id that [`Display`](fmt::Display) writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        hexadecimal(text, 16).map(ContainerId)
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContainerId({self})")
    }
}

/// The random number, of 40 bits, of one attempt to make a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u64);

impl SessionId {
    /// A new one.
    #[must_use]
    pub fn random() -> Self {
        SessionId(fastrand::u64(1..1 << 40))
    }

    /// The id that [`Display`](fmt::Display) writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        hexadecimal(text, 10).map(SessionId)
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:010x}", self.0)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

/// Lower-case digits only, so that a number has one text.
fn hexadecimal(text: &str, len: usize) -> Option<u64> {
    let fine = text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    fine.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

/// Why bytes are no container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    /// Not a container, or cut off.
    #[error("it is not a container, or cut off")]
    Foreign,
    /// Written by a newer version.
    #[error("it was written by a newer version")]
    Newer,
    /// The head's checksum is wrong.
    #[error("the checksum of its head does not match")]
    Checksum,
    /// Fields that contradict each other.
    #[error("its head contradicts itself")]
    Malformed,
    /// A group's bytes are damaged.
    #[error("group {0} is damaged")]
    Group(usize),
    /// The bytes after the head are not as many as it says.
    #[error("it has not the length that its head says")]
    Length,
}

/// The blocks of a container that are there, by local id: 4,096 bits.
#[derive(Clone, PartialEq, Eq)]
pub struct LocalIds(pub [u64; MAX_BLOCKS / 64]);

impl Default for LocalIds {
    fn default() -> Self {
        LocalIds([0; MAX_BLOCKS / 64])
    }
}

impl fmt::Debug for LocalIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalIds({})", self.count())
    }
}

impl LocalIds {
    /// The ids 0 to `n` - 1.
    #[must_use]
    pub fn first(n: usize) -> Self {
        let mut ids = LocalIds::default();
        if let Some(last) = n.min(MAX_BLOCKS).checked_sub(1) {
            ids.fill(0, last as u16);
        }
        ids
    }

    /// Adds an id, which must be below 4,096.
    pub fn insert(&mut self, id: u16) {
        self.0[usize::from(id) / 64] |= 1 << (id % 64);
    }

    /// Adds the ids from `first` to `last`, which must be below 4,096.
    pub fn fill(&mut self, first: u16, last: u16) {
        let (first, last) = (usize::from(first), usize::from(last));
        for word in first / 64..=last / 64 {
            let from = first.max(word * 64) % 64;
            let to = last.min(word * 64 + 63) % 64;
            self.0[word] |= (u64::MAX >> (63 - (to - from))) << from;
        }
    }

    /// Whether it has an id.
    #[must_use]
    pub fn contains(&self, id: u16) -> bool {
        self.0
            .get(usize::from(id) / 64)
            .is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }

    /// How many ids are below `id`.
    #[must_use]
    pub fn rank(&self, id: u16) -> usize {
        let word = usize::from(id) / 64;
        let below = self.0[..word].iter().map(|w| w.count_ones()).sum::<u32>();
        (below + (self.0[word] & ((1 << (id % 64)) - 1)).count_ones()) as usize
    }

    /// Adds those of `other`.
    pub fn union(&mut self, other: &LocalIds) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    /// Those of it that `other` has not.
    #[must_use]
    pub fn without(&self, other: &LocalIds) -> LocalIds {
        LocalIds(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// Those that both have.
    #[must_use]
    pub fn common(&self, other: &LocalIds) -> LocalIds {
        LocalIds(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// The ids, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.runs().flat_map(|(first, last)| first..=last)
    }

    /// The first and the last of each run of consecutive ids, ascending.
    pub fn runs(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let first = self.first_from(at, 0)?;
            at = self.first_from(first, u64::MAX).unwrap_or(MAX_BLOCKS);
            Some((first as u16, at as u16 - 1))
        })
    }

    /// The first bit from `at` on that is set, when each word is flipped by `flip`.
    fn first_from(&self, at: usize, flip: u64) -> Option<usize> {
        let mut word = at / 64;
        let mut bits = (self.0.get(word)? ^ flip) & (u64::MAX << (at % 64));
        while bits == 0 {
            word += 1;
            bits = self.0.get(word)? ^ flip;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn to_bytes(&self) -> [u8; PRESENT] {
        let mut out = [0; PRESENT];
        for (to, word) in out.chunks_exact_mut(8).zip(&self.0) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let mut ids = LocalIds::default();
        for (word, from) in ids.0.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(from.try_into().expect("eight bytes"));
        }
        ids
    }
}

thread_local! {
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
}

/// A group of blocks as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    bytes: Vec<u8>,
    stored: bool,
}

impl Packed {
    /// Compresses blocks, unless they do not become smaller.
    #[must_use]
    pub fn new(blocks: &[u8]) -> Self {
        // A compressor's tables are larger than a group: they are made once a thread.
        let compressed = COMPRESSOR.with_borrow_mut(|kept| {
            let compressor = match kept.take() {
                Some(compressor) => kept.insert(compressor),
                None => kept.insert(Compressor::new(LEVEL)?),
            };
            compressor.compress(blocks)
        });
        match compressed {
            Ok(bytes) if bytes.len() < blocks.len() => Packed {
                bytes,
                stored: false,
            },
            _ => Packed {
                bytes: blocks.to_vec(),
                stored: true,
            },
        }
    }

    /// Bytes it takes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a group is never empty")]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// Puts a container together.
///
/// # Panics
/// When numbers of digests, ids and groups do not fit together: a mistake of the caller.
#[must_use]
pub fn assemble(
    id: ContainerId,
    generation: u32,
    digests: &[Digest],
    present: &LocalIds,
    groups: &[Packed],
) -> Vec<u8> {
    let n = digests.len();
    assert!((1..=MAX_BLOCKS).contains(&n) && present.count() as usize == n);
    assert_eq!(groups.len(), n.div_ceil(GROUP_BLOCKS));
    let head_len = FIXED + n * Digest::LEN + PRESENT + groups.len() * 8 + HASH;
    let body: usize = groups.iter().map(Packed::len).sum();
    let mut out = Vec::with_capacity(head_len + body);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(head_len as u32).to_le_bytes());
    out.extend_from_slice(&id.0.to_le_bytes());
    out.extend_from_slice(&generation.to_le_bytes());
    out.extend_from_slice(&(n as u32).to_le_bytes());
    out.extend_from_slice(&(groups.len() as u32).to_le_bytes());
    out.extend_from_slice(&KIND_FIXED.to_le_bytes());
    digests.iter().for_each(|d| out.extend_from_slice(&d.0));
    out.extend_from_slice(&present.to_bytes());
    for group in groups {
        let flag = if group.stored { STORED } else { 0 };
        out.extend_from_slice(&(group.bytes.len() as u32 | flag).to_le_bytes());
        out.extend_from_slice(&checksum(&group.bytes).to_le_bytes());
    }
    let hash = blake3::hash(&out);
    out.extend_from_slice(hash.as_bytes());
    groups.iter().for_each(|g| out.extend_from_slice(&g.bytes));
    out
}

/// The bytes as a container whose fixed fields and checksums are right, as far as there are enough of them.
#[cfg(fuzzing)]
pub(crate) fn reseal_for_fuzzing(bytes: &[u8]) -> Vec<u8> {
    let n = bytes.first().map_or(1, |b| usize::from(*b) + 1);
    let groups = n.div_ceil(GROUP_BLOCKS);
    let head_len = FIXED + n * Digest::LEN + PRESENT + groups * 8 + HASH;
    let mut out = bytes.to_vec();
    out.resize(out.len().max(head_len), 0);
    out[..8].copy_from_slice(MAGIC);
    for (at, value) in [
        (8, VERSION),
        (12, head_len as u32),
        (28, n as u32),
        (32, groups as u32),
        (36, KIND_FIXED),
    ] {
        out[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    let present = FIXED + n * Digest::LEN;
    out[present..present + PRESENT].copy_from_slice(&LocalIds::first(n).to_bytes());
    let (mut at, table) = (head_len, present + PRESENT);
    for group in 0..groups {
        let entry = table + group * 8;
        let len = usize::from(u16::from_le_bytes([out[entry], out[entry + 1]]));
        let sum = checksum(out.get(at..at + len).unwrap_or_default());
        out[entry + 4..entry + 8].copy_from_slice(&sum.to_le_bytes());
        at += len;
    }
    let hash = blake3::hash(&out[..head_len - HASH]);
    out[head_len - HASH..head_len].copy_from_slice(hash.as_bytes());
    out
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Where a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Group {
    offset: u64,
    len: u32,
    stored: bool,
    checksum: u32,
}

/// What a container holds: its head, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Its number.
    pub id: ContainerId,
    /// How often it has been compacted.
    pub generation: u32,
    /// The digests of its blocks.
    pub digests: Vec<Digest>,
    /// Their local ids.
    pub present: LocalIds,
    groups: Vec<Group>,
    len: u64,
}

impl Head {
    /// Reads a head from the first bytes of a container, at least [`MAX_HEAD`] or all.
    ///
    /// # Errors
    /// [`ContainerError`] when they are none.
    pub fn parse(bytes: &[u8]) -> Result<Head, ContainerError> {
        let fixed = bytes
            .first_chunk::<FIXED>()
            .ok_or(ContainerError::Foreign)?;
        if !fixed.starts_with(MAGIC) {
            return Err(ContainerError::Foreign);
        }
        let u32_at =
            |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
        if u32_at(8) > VERSION {
            return Err(ContainerError::Newer);
        }
        let (head_len, n, groups) = (
            u32_at(12) as usize,
            u32_at(28) as usize,
            u32_at(32) as usize,
        );
        let fits = u32_at(8) == VERSION
            && (1..=MAX_BLOCKS).contains(&n)
            && groups == n.div_ceil(GROUP_BLOCKS)
            && head_len == FIXED + n * Digest::LEN + PRESENT + groups * 8 + HASH;
        if !fits {
            return Err(ContainerError::Malformed);
        }
        let head = bytes.get(..head_len).ok_or(ContainerError::Foreign)?;
        let (sealed, hash) = head.split_at(head_len - HASH);
        if blake3::hash(sealed).as_bytes() != hash {
            return Err(ContainerError::Checksum);
        }
        if u32_at(36) != KIND_FIXED {
            return Err(ContainerError::Newer);
        }
        let (digests, rest) = sealed[FIXED..].split_at(n * Digest::LEN);
        let (present, table) = rest.split_at(PRESENT);
        let present = LocalIds::from_bytes(present);
        if present.count() as usize != n {
            return Err(ContainerError::Malformed);
        }
        let mut offset = head_len as u64;
        let mut list = Vec::with_capacity(groups);
        for (i, entry) in table.chunks_exact(8).enumerate() {
            let word = u32::from_le_bytes(entry[..4].try_into().expect("four bytes"));
            let raw = (n - i * GROUP_BLOCKS).min(GROUP_BLOCKS) * BLOCK_SIZE;
            let group = Group {
                offset,
                len: word & !STORED,
                stored: word & STORED != 0,
                checksum: u32::from_le_bytes(entry[4..].try_into().expect("four bytes")),
            };
            let len = group.len as usize;
            if len == 0 || (group.stored && len != raw) || len > raw {
                return Err(ContainerError::Malformed);
            }
            offset += u64::from(group.len);
            list.push(group);
        }
        Ok(Head {
            id: ContainerId(u64::from_le_bytes(
                fixed[16..24].try_into().expect("eight bytes"),
            )),
            generation: u32_at(24),
            digests: digests
                .as_chunks::<{ Digest::LEN }>()
                .0
                .iter()
                .map(|d| Digest(*d))
                .collect(),
            present,
            groups: list,
            len: offset,
        })
    }

    /// Length of the whole container in bytes.
    #[must_use]
    pub fn container_len(&self) -> u64 {
        self.len
    }

    /// How many groups it has.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The place of a block in the list of digests.
    #[must_use]
    pub fn position(&self, local: u16) -> Option<usize> {
        self.present
            .contains(local)
            .then(|| self.present.rank(local))
    }

    /// Where the bytes of groups `first..=last` are in the object.
    #[must_use]
    pub fn span(&self, first: usize, last: usize) -> std::ops::Range<u64> {
        let end = self.groups[last];
        self.groups[first].offset..end.offset + u64::from(end.len)
    }

    /// The blocks of a group, from the bytes at its [`span`](Self::span). Their digests are not checked.
    ///
    /// # Errors
    /// [`ContainerError::Group`] when they are damaged.
    pub fn unpack(&self, group: usize, bytes: &[u8]) -> Result<Vec<u8>, ContainerError> {
        let entry = self.groups.get(group).ok_or(ContainerError::Group(group))?;
        let raw = (self.digests.len() - group * GROUP_BLOCKS).min(GROUP_BLOCKS) * BLOCK_SIZE;
        if bytes.len() != entry.len as usize || checksum(bytes) != entry.checksum {
            return Err(ContainerError::Group(group));
        }
        if entry.stored {
            return Ok(bytes.to_vec());
        }
        match zstd::bulk::decompress(bytes, raw) {
            Ok(blocks) if blocks.len() == raw => Ok(blocks),
            _ => Err(ContainerError::Group(group)),
        }
    }

    /// Every block of a container, verified; the second value counts those whose digest is wrong, group by group.
    ///
    /// # Errors
    /// [`ContainerError::Length`] when `bytes` is not the whole container.
    pub fn verify(&self, bytes: &[u8], digester: &Digester) -> Result<Vec<usize>, ContainerError> {
        if bytes.len() as u64 != self.len {
            return Err(ContainerError::Length);
        }
        let mut wrong = Vec::new();
        let mut digests = Vec::new();
        for group in 0..self.groups.len() {
            let span = self.span(group, group);
            digests.clear();
            if let Ok(blocks) = self.unpack(group, &bytes[span.start as usize..span.end as usize]) {
                digester.blocks(&blocks, &mut digests);
            }
            let first = group * GROUP_BLOCKS;
            let last = (first + GROUP_BLOCKS).min(self.digests.len());
            wrong.extend((first..last).filter(|&i| digests.get(i - first) != self.digests.get(i)));
        }
        Ok(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn container(n: usize, gap: usize) -> (Vec<u8>, Vec<u8>) {
        let mut present = LocalIds::default();
        let mut blocks = Vec::new();
        for i in 0..n {
            present.insert((i * gap) as u16);
            let mut block = vec![i as u8 + 1; BLOCK_SIZE];
            if i % 40 > 35 {
                fastrand::Rng::with_seed(i as u64).fill(&mut block);
            }
            blocks.extend_from_slice(&block);
        }
        let mut digests = Vec::new();
        drover_index::digest_blocks(&blocks, &mut digests);
        let groups: Vec<_> = blocks.chunks(GROUP_BYTES).map(Packed::new).collect();
        (
            assemble(ContainerId(77), 3, &digests, &present, &groups),
            blocks,
        )
    }

    #[test]
    fn blocks_come_back_by_their_local_ids() {
        for (n, gap) in [(1, 1), (32, 3), (33, 7), (200, 20)] {
            let (bytes, blocks) = container(n, gap);
            let head = Head::parse(&bytes).unwrap();
            assert_eq!((head.id, head.generation), (ContainerId(77), 3));
            assert_eq!(head.container_len(), bytes.len() as u64);
            assert_eq!(
                head.verify(&bytes, &Digester::default()).unwrap(),
                Vec::<usize>::new()
            );
            for i in 0..n {
                let at = head.position((i * gap) as u16).unwrap();
                assert_eq!(at, i);
                let group = at / GROUP_BLOCKS;
                let span = head.span(group, group);
                let got = head
                    .unpack(group, &bytes[span.start as usize..span.end as usize])
                    .unwrap();
                let from = at % GROUP_BLOCKS * BLOCK_SIZE;
                assert_eq!(
                    got[from..from + BLOCK_SIZE],
                    blocks[i * BLOCK_SIZE..][..BLOCK_SIZE]
                );
            }
            assert_eq!(head.position((n * gap) as u16), None);
        }
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_found(seed in any::<u64>()) {
            let (mut bytes, _) = container(70, 1);
            let at = seed as usize % bytes.len();
            bytes[at] ^= 1 << (seed >> 60 & 7);
            let noticed = match Head::parse(&bytes) {
                Err(_) => true,
                Ok(head) => head.verify(&bytes, &Digester::default()).is_ok_and(|wrong| !wrong.is_empty()),
            };
            prop_assert!(noticed, "byte {}", at);
        }

        #[test]
        fn a_cut_container_is_refused(len in 0usize..5000) {
            let (bytes, _) = container(70, 1);
            let cut = &bytes[..len.min(bytes.len() - 1)];
            prop_assert!(Head::parse(cut).map_or(true, |h| h.verify(cut, &Digester::default()).is_err()));
        }

        #[test]
        fn sets_of_ids(a in proptest::collection::btree_set(0u16..4096, 0..50), b in proptest::collection::btree_set(0u16..4096, 0..50)) {
            let set = |ids: &std::collections::BTreeSet<u16>| {
                let mut s = LocalIds::default();
                ids.iter().for_each(|&i| s.insert(i));
                s
            };
            let (x, y) = (set(&a), set(&b));
            prop_assert_eq!(x.iter().collect::<Vec<_>>(), a.iter().copied().collect::<Vec<_>>());
            let mut runs = LocalIds::default();
            x.runs().for_each(|(first, last)| runs.fill(first, last));
            prop_assert_eq!(&runs, &x);
            let gaps = x.runs().zip(x.runs().skip(1)).all(|(one, next)| one.1 + 1 < next.0);
            prop_assert!(gaps);
            if let (Some(&first), Some(&last)) = (a.first(), a.last()) {
                let mut all = LocalIds::default();
                all.fill(first, last);
                prop_assert_eq!(all.iter().collect::<Vec<_>>(), (first..=last).collect::<Vec<_>>());
            }
            prop_assert_eq!(x.without(&y).iter().collect::<Vec<_>>(), a.difference(&b).copied().collect::<Vec<_>>());
            prop_assert_eq!(x.common(&y).count() as usize, a.intersection(&b).count());
            for (i, &id) in a.iter().enumerate() {
                prop_assert_eq!(x.rank(id), i);
            }
            prop_assert_eq!(LocalIds::from_bytes(&x.to_bytes()), x);
        }
    }
}
