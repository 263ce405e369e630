//! The recipe of a snapshot: from a block of its walk to a block of a container (`docs/format/vault-recipe.md`).
//!
//! A *page* describes 128 MiB of the walk: the digest of each 2 MiB segment, and runs. The digests of the pages are in
//! the recipe's head, and the snapshot's root digest covers those, the layout and the length: one digest that proves
//! every block.

use std::collections::HashMap;

use drover_core::{Digest, put_varint, take_varint};
use drover_image::{Layout, LayoutLimits};
use drover_index::ZERO_BLOCK;
use drover_storage::{Envelope, EnvelopeError};
use serde::{Deserialize, Serialize};

use crate::container::{ContainerId, MAX_BLOCKS};
use crate::names::Machine;
use crate::record::unpack;

/// Blocks of a segment: 2 MiB.
pub const SEGMENT_BLOCKS: usize = 512;
/// Segments of a page: 128 MiB.
pub const PAGE_SEGMENTS: usize = 64;
/// Blocks of a page.
pub const PAGE_BLOCKS: usize = SEGMENT_BLOCKS * PAGE_SEGMENTS;
/// Most bytes of a page as it is stored.
pub const MAX_PAGE_BYTES: usize = 1 << 20;
/// A part of a recipe is closed when it has so many bytes.
pub const PART_BYTES: usize = 4 << 20;
/// Most bytes of a recipe's head before compression.
pub const MAX_HEAD_BYTES: usize = 192 << 20;
/// Most containers that a snapshot refers to.
pub const MAX_CONTAINERS: usize = 1 << 22;
/// Most pages of a recipe: 128 TiB.
pub const MAX_PAGES: usize = 1 << 20;

const MAX_RUNS_BYTES: usize = PAGE_BLOCKS * 12;

/// Where blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// They are zero and stored nowhere.
    Zero,
    /// In a container, by its number in the recipe's table, from a local id on.
    At {
        /// The number in the table.
        container: u32,
        /// The first local id; the others follow it.
        local: u16,
    },
}

/// Consecutive blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// How many, never zero.
    pub blocks: u32,
    /// Where they are.
    pub place: Place,
}

/// Consecutive blocks, of a container by its name: none if they are zero.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    /// How many.
    pub blocks: u32,
    /// The machine of the container, the container, and the first local id.
    pub place: Option<(&'a Machine, ContainerId, u16)>,
}

/// Why bytes are no part of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecipeError {
    /// Not a recipe, or damaged.
    #[error("it is not a recipe, or cut off")]
    Foreign,
    /// Written by a newer version.
    #[error("it was written by a newer version")]
    Newer,
    /// The checksum does not match.
    #[error("its checksum does not match")]
    Checksum,
    /// Fields that contradict each other.
    #[error("it contradicts itself: {0}")]
    Malformed(&'static str),
}

/// The digest of a segment's blocks, zero blocks included.
#[must_use]
pub fn segment_digest(blocks: &[Digest]) -> Digest {
    const PREFIX: &[u8] = b"drover vault segment v1\0";
    // In one piece: many calls with 32 bytes each take several times as long.
    let mut bytes = Vec::with_capacity(PREFIX.len() + blocks.len() * Digest::LEN);
    bytes.extend_from_slice(PREFIX);
    for d in blocks {
        bytes.extend_from_slice(&d.0);
    }
    Digest(*blake3::hash(&bytes).as_bytes())
}

/// The digest of the segments of a page.
#[must_use]
pub fn page_digest(segments: &[Digest]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"drover vault page v1\0");
    for d in segments {
        hasher.update(&d.0);
    }
    Digest(*hasher.finalize().as_bytes())
}

/// 128 MiB of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// The digest of each segment.
    pub segments: Vec<Digest>,
    /// The runs, which cover all blocks of the page in order.
    pub runs: Vec<Run>,
}

impl Page {
    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut runs = Vec::new();
        put_varint(&mut runs, self.runs.len() as u64);
        let (mut container, mut next) = (0i64, 0i64);
        for run in &self.runs {
            let data = matches!(run.place, Place::At { .. });
            put_varint(&mut runs, u64::from(run.blocks) << 1 | u64::from(data));
            if let Place::At {
                container: at,
                local,
            } = run.place
            {
                put_varint(&mut runs, zigzag(i64::from(at) - container));
                put_varint(&mut runs, zigzag(i64::from(local) - next));
                container = i64::from(at);
                next = i64::from(local) + i64::from(run.blocks);
            }
        }
        let packed = zstd::bulk::compress(&runs, 3).unwrap_or_default();
        let mut out = Vec::with_capacity(self.segments.len() * Digest::LEN + packed.len() + 8);
        put_varint(&mut out, self.segments.len() as u64);
        self.segments
            .iter()
            .for_each(|d| out.extend_from_slice(&d.0));
        put_varint(&mut out, runs.len() as u64);
        out.extend_from_slice(&packed);
        out
    }

    /// Reads a page of `blocks` blocks that refers to containers below `containers`.
    ///
    /// # Errors
    /// [`RecipeError`].
    pub fn decode(bytes: &[u8], blocks: usize, containers: usize) -> Result<Page, RecipeError> {
        let bad = RecipeError::Malformed;
        let mut rest = bytes;
        let n = take_varint(&mut rest).ok_or(RecipeError::Foreign)?;
        if blocks > PAGE_BLOCKS || n != blocks.div_ceil(SEGMENT_BLOCKS) as u64 {
            return Err(bad("the number of segments"));
        }
        let (digests, tail) = rest
            .split_at_checked(n as usize * Digest::LEN)
            .ok_or(RecipeError::Foreign)?;
        rest = tail;
        let raw = take_varint(&mut rest)
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n <= MAX_RUNS_BYTES)
            .ok_or(bad("the length of its runs"))?;
        let runs = zstd::bulk::decompress(rest, raw).map_err(|_| RecipeError::Foreign)?;
        if runs.len() != raw {
            return Err(bad("the length of its runs"));
        }
        Ok(Page {
            segments: digests
                .as_chunks::<{ Digest::LEN }>()
                .0
                .iter()
                .map(|d| Digest(*d))
                .collect(),
            runs: decode_runs(&runs, blocks, containers)?,
        })
    }

    /// The runs of a segment, clipped to it.
    #[must_use]
    pub fn runs_of(&self, segment: usize) -> Vec<Run> {
        let (from, to) = (segment * SEGMENT_BLOCKS, (segment + 1) * SEGMENT_BLOCKS);
        let mut out = Vec::new();
        let mut at = 0usize;
        for run in &self.runs {
            let end = at + run.blocks as usize;
            let (first, last) = (at.max(from), end.min(to));
            if first < last {
                let skipped = first - at;
                let place = match run.place {
                    Place::Zero => Place::Zero,
                    Place::At { container, local } => Place::At {
                        container,
                        local: local + skipped as u16,
                    },
                };
                out.push(Run {
                    blocks: (last - first) as u32,
                    place,
                });
            }
            at = end;
            if at >= to {
                break;
            }
        }
        out
    }
}

fn zigzag(n: i64) -> u64 {
    (n << 1 ^ n >> 63) as u64
}

fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

fn decode_runs(mut rest: &[u8], blocks: usize, containers: usize) -> Result<Vec<Run>, RecipeError> {
    let bad = RecipeError::Malformed;
    let count = take_varint(&mut rest)
        .filter(|&n| n <= blocks as u64)
        .ok_or(bad("the number of runs"))?;
    let mut runs = Vec::with_capacity((count as usize).min(rest.len()));
    let (mut container, mut next, mut left) = (0i64, 0i64, blocks as u64);
    for _ in 0..count {
        let word = take_varint(&mut rest).ok_or(RecipeError::Foreign)?;
        let n = word >> 1;
        if n == 0 || n > left {
            return Err(bad("the length of a run"));
        }
        left -= n;
        let mut place = Place::Zero;
        if word & 1 == 1 {
            let mut step = || {
                take_varint(&mut rest)
                    .map(unzigzag)
                    .ok_or(RecipeError::Foreign)
            };
            container = container
                .checked_add(step()?)
                .filter(|c| (0..containers as i64).contains(c))
                .ok_or(bad("the container of a run"))?;
            let local = next
                .checked_add(step()?)
                .filter(|&l| l >= 0 && l + n as i64 <= MAX_BLOCKS as i64)
                .ok_or(bad("the blocks of a run"))?;
            next = local + n as i64;
            place = Place::At {
                container: container as u32,
                local: local as u16,
            };
        }
        runs.push(Run {
            blocks: n as u32,
            place,
        });
    }
    match (left, rest.is_empty()) {
        (0, true) => Ok(runs),
        _ => Err(bad("what its runs cover")),
    }
}

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageAt {
    /// The part of the recipe.
    pub part: u32,
    /// Offset in the part, in bytes.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
    /// CRC-32C of those bytes.
    pub checksum: u32,
    /// [`page_digest`].
    pub digest: Digest,
}

/// The head of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecipeHead {
    /// Length of the file in bytes.
    pub file_len: u64,
    /// Blocks of its walk.
    pub walk_blocks: u64,
    /// The layout, as `drover_image` encodes it.
    pub layout: Vec<u8>,
    /// The machines whose containers are referred to.
    pub machines: Vec<Machine>,
    /// The containers, by number: the index of the machine, and the id.
    pub containers: Vec<(u32, ContainerId)>,
    /// How many parts there are.
    pub parts: u32,
    /// The pages, in order.
    pub pages: Vec<PageAt>,
}

/// The envelope of a recipe's head.
const HEAD: Envelope = Envelope {
    magic: *b"DRVRREC\0",
    version: 1,
    max_bytes: MAX_HEAD_BYTES as u64,
};

impl RecipeHead {
    /// The digest that proves every block of the snapshot.
    #[must_use]
    pub fn root(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"drover vault root v1\0");
        hasher.update(&self.file_len.to_le_bytes());
        hasher.update(&self.walk_blocks.to_le_bytes());
        hasher.update(blake3::hash(&self.layout).as_bytes());
        for page in &self.pages {
            hasher.update(&page.digest.0);
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let body = postcard::to_stdvec(self).expect("numbers and bytes can be encoded");
        let mut out = Vec::new();
        put_varint(&mut out, body.len() as u64);
        out.extend(zstd::bulk::compress(&body, 3).unwrap_or_default());
        HEAD.seal(&out)
    }

    /// Reads a head, and the layout in it.
    ///
    /// # Errors
    /// [`RecipeError`].
    pub fn decode(bytes: &[u8]) -> Result<(RecipeHead, Layout), RecipeError> {
        let bad = RecipeError::Malformed;
        let mut rest = HEAD.open(bytes).map_err(|error| match error {
            EnvelopeError::Version => RecipeError::Newer,
            EnvelopeError::Foreign => RecipeError::Foreign,
            EnvelopeError::Damaged => RecipeError::Checksum,
        })?;
        let raw = take_varint(&mut rest)
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n <= MAX_HEAD_BYTES)
            .ok_or(bad("its length"))?;
        let body = unpack(rest, raw).ok_or(bad("its length"))?;
        let (head, left) =
            postcard::take_from_bytes::<RecipeHead>(&body).map_err(|_| RecipeError::Foreign)?;
        if !left.is_empty() {
            return Err(bad("its length"));
        }
        let layout =
            Layout::decode(&head.layout, LayoutLimits::default()).map_err(|_| bad("its layout"))?;
        if layout.file_len() != head.file_len || layout.walk_blocks() != head.walk_blocks {
            return Err(bad("its layout"));
        }
        let pages = head.walk_blocks.div_ceil(PAGE_BLOCKS as u64);
        if pages > MAX_PAGES as u64 || head.pages.len() as u64 != pages {
            return Err(bad("the number of pages"));
        }
        let in_parts = head
            .pages
            .iter()
            .all(|p| p.part < head.parts && p.len as usize <= MAX_PAGE_BYTES);
        if !in_parts || head.parts as usize > head.pages.len() {
            return Err(bad("its pages"));
        }
        let known = head
            .containers
            .iter()
            .all(|(machine, _)| (*machine as usize) < head.machines.len());
        if !known || head.containers.len() > MAX_CONTAINERS {
            return Err(bad("its containers"));
        }
        Ok((head, layout))
    }
}

/// A body in the envelope of a head.
#[cfg(fuzzing)]
pub(crate) fn head_for_fuzzing(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_varint(&mut out, body.len() as u64);
    out.extend(zstd::bulk::compress(body, 1).unwrap_or_default());
    HEAD.seal(&out)
}

/// Puts a recipe together, block by block.
pub struct RecipeWriter {
    page: Page,
    /// Digests of the segment under way.
    segment: Vec<Digest>,
    part: Vec<u8>,
    parts: u32,
    pages: Vec<PageAt>,
    numbers: HashMap<ContainerId, u32>,
    containers: Vec<(u32, ContainerId)>,
    machines: Vec<Machine>,
    last: u32,
}

impl Default for RecipeWriter {
    fn default() -> Self {
        Self {
            page: Page::default(),
            segment: Vec::with_capacity(SEGMENT_BLOCKS),
            part: Vec::new(),
            parts: 0,
            pages: Vec::new(),
            numbers: HashMap::new(),
            containers: Vec::new(),
            machines: Vec::new(),
            last: u32::MAX,
        }
    }
}

impl RecipeWriter {
    /// Adds a block of zeros. A part of the recipe may be complete with it.
    pub fn zero(&mut self) -> Option<Vec<u8>> {
        self.block(*ZERO_BLOCK, Place::Zero)
    }

    /// Adds a block of a container. A part of the recipe may be complete with it.
    pub fn data(
        &mut self,
        digest: Digest,
        machine: &Machine,
        id: ContainerId,
        local: u16,
    ) -> Option<Vec<u8>> {
        let place = self.place(machine, id, local);
        self.block(digest, place)
    }

    /// Adds a whole segment, between others, of which this is the digest. A part of the recipe may be complete with it.
    pub fn segment(&mut self, digest: Digest, runs: &[Placed<'_>]) -> Option<Vec<u8>> {
        debug_assert!(self.segment.is_empty());
        for run in runs {
            let place = match run.place {
                None => Place::Zero,
                Some((machine, id, local)) => self.place(machine, id, local),
            };
            match self.page.runs.last_mut() {
                Some(last) if follows(last, place) => last.blocks += run.blocks,
                _ => self.page.runs.push(Run {
                    blocks: run.blocks,
                    place,
                }),
            }
        }
        self.page.segments.push(digest);
        match self.page.segments.len() == PAGE_SEGMENTS {
            true => self.end_page(),
            false => None,
        }
    }

    /// A place in a container, which gets a number.
    fn place(&mut self, machine: &Machine, id: ContainerId, local: u16) -> Place {
        let same = self
            .containers
            .get(self.last as usize)
            .is_some_and(|c| c.1 == id);
        if !same {
            self.last = *self.numbers.entry(id).or_insert_with(|| {
                let known = self.machines.iter().position(|m| m == machine);
                let owner = known.unwrap_or_else(|| {
                    self.machines.push(machine.clone());
                    self.machines.len() - 1
                });
                self.containers.push((owner as u32, id));
                self.containers.len() as u32 - 1
            });
        }
        Place::At {
            container: self.last,
            local,
        }
    }

    fn block(&mut self, digest: Digest, place: Place) -> Option<Vec<u8>> {
        match self.page.runs.last_mut() {
            Some(run) if follows(run, place) => run.blocks += 1,
            _ => self.page.runs.push(Run { blocks: 1, place }),
        }
        self.segment.push(digest);
        if self.segment.len() == SEGMENT_BLOCKS {
            self.end_segment();
        }
        match self.page.segments.len() == PAGE_SEGMENTS {
            true => self.end_page(),
            false => None,
        }
    }

    fn end_segment(&mut self) {
        if !self.segment.is_empty() {
            self.page.segments.push(segment_digest(&self.segment));
            self.segment.clear();
        }
    }

    fn end_page(&mut self) -> Option<Vec<u8>> {
        let page = std::mem::take(&mut self.page);
        let bytes = page.encode();
        self.pages.push(PageAt {
            part: self.parts,
            offset: self.part.len() as u32,
            len: bytes.len() as u32,
            checksum: page_checksum(&bytes),
            digest: page_digest(&page.segments),
        });
        self.part.extend_from_slice(&bytes);
        (self.part.len() >= PART_BYTES).then(|| self.end_part())
    }

    fn end_part(&mut self) -> Vec<u8> {
        self.parts += 1;
        std::mem::take(&mut self.part)
    }

    /// How many parts are complete.
    #[must_use]
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// How many containers are referred to.
    #[must_use]
    pub fn containers(&self) -> usize {
        self.containers.len()
    }

    /// The head of the whole recipe, and its last part, if there is one.
    #[must_use]
    pub fn finish(mut self, layout: &Layout) -> (RecipeHead, Option<Vec<u8>>) {
        self.end_segment();
        let mut last = None;
        if !self.page.segments.is_empty() {
            last = self.end_page();
        }
        if !self.part.is_empty() {
            last = Some(self.end_part());
        }
        let head = RecipeHead {
            file_len: layout.file_len(),
            walk_blocks: layout.walk_blocks(),
            layout: layout.encode(),
            machines: self.machines,
            containers: self.containers,
            parts: self.parts,
            pages: self.pages,
        };
        (head, last)
    }
}

fn follows(run: &Run, place: Place) -> bool {
    match (run.place, place) {
        (Place::Zero, Place::Zero) => true,
        (
            Place::At { container, local },
            Place::At {
                container: c,
                local: l,
            },
        ) => container == c && u32::from(local) + run.blocks == u32::from(l),
        _ => false,
    }
}

/// The checksum of a page as it is stored.
#[must_use]
pub fn page_checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place() -> impl Strategy<Value = Place> {
        prop_oneof![
            Just(Place::Zero),
            (0u32..40, 0u16..4096).prop_map(|(container, local)| Place::At { container, local }),
        ]
    }

    proptest! {
        #[test]
        fn pages_and_back(places in proptest::collection::vec((place(), 1u32..900), 1..60)) {
            let mut page = Page::default();
            let mut blocks = 0;
            for (place, n) in places {
                let n = match place {
                    Place::Zero => n,
                    Place::At { local, .. } => n.min(MAX_BLOCKS as u32 - u32::from(local)),
                }.min((PAGE_BLOCKS - blocks) as u32);
                if n > 0 {
                    page.runs.push(Run { blocks: n, place });
                    blocks += n as usize;
                }
            }
            page.segments = (0..blocks.div_ceil(SEGMENT_BLOCKS)).map(|i| segment_digest(&[Digest([i as u8; 32])])).collect();
            let bytes = page.encode();
            prop_assert!(bytes.len() <= MAX_PAGE_BYTES);
            prop_assert_eq!(Page::decode(&bytes, blocks, 40).unwrap(), page.clone());
            prop_assert!(Page::decode(&bytes, blocks + 1, 40).is_err());
            // The segments' runs together are the page's blocks.
            let total: u32 = (0..page.segments.len()).flat_map(|s| page.runs_of(s)).map(|r| r.blocks).sum();
            prop_assert_eq!(total as usize, blocks);
            for cut in 0..bytes.len().min(50) {
                prop_assert!(Page::decode(&bytes[..cut], blocks, 40).is_err());
            }
        }

        #[test]
        fn hostile_pages_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), blocks in 0usize..2000) {
            let _ = Page::decode(&bytes, blocks, 3);
            let _ = RecipeHead::decode(&bytes);
        }
    }

    #[test]
    fn a_written_recipe_says_where_every_block_is() {
        let blocks = PAGE_BLOCKS + 700;
        let len = blocks as u64 * 4096 - 5;
        let layout = Layout::in_file_order(len, std::slice::from_ref(&(0..len)));
        let machine = Machine::new("web").unwrap();
        let mut writer = RecipeWriter::default();
        let mut parts = Vec::new();
        for i in 0..blocks {
            let part = match i % 7 {
                0 => writer.zero(),
                _ => writer.data(
                    Digest([i as u8; 32]),
                    &machine,
                    ContainerId(i as u64 / 4096),
                    (i % 4096) as u16,
                ),
            };
            parts.extend(part);
        }
        let (head, last) = writer.finish(&layout);
        parts.extend(last);
        assert_eq!((head.pages.len(), head.parts as usize), (2, parts.len()));
        let (decoded, l) = RecipeHead::decode(&head.encode()).unwrap();
        assert_eq!((&decoded, &l), (&head, &layout));
        let at = head.pages[1];
        let bytes = &parts[at.part as usize][at.offset as usize..][..at.len as usize];
        let page = Page::decode(bytes, 700, head.containers.len()).unwrap();
        assert_eq!(page_digest(&page.segments), at.digest);
        // Every change of content changes the root.
        let mut other = head.clone();
        other.pages[0].digest.0[0] ^= 1;
        assert_ne!(other.root(), head.root());
    }
}
