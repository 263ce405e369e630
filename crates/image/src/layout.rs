//! The walk: a permutation of a file's bytes into a stream of blocks.
//!
//! A [`Layout`] is the order in which the bytes of one image file are walked, such that guest data comes in
//! guest-logical order, aligned as on the virtual disk (teleportation §2.2), whatever the container format. It is
//! stored as a sorted list of grain ranges (teleportation §2.17), each sequential or reverse-sequential in the file,
//! and searched by bisection.
//!
//! - Data ranges come first, in guest order. Unallocated guest space takes no space in the walk. A run that continues
//!   in the guest block where the previous one ended stays in that block; any other run starts a new block. Either way,
//!   bytes keep their guest offset modulo 4096. Gaps (each under 8192 bytes) are padding that reads as zeros.
//! - Metadata ranges follow, in file order, aligned in the same way to their file offset. They contain everything else
//!   in the file: headers, tables, leaked clusters, gaps, footers, and compressed data, for which guest order would not
//!   help.
//! - Every byte outside of the file's holes is covered exactly once.
//! - An opaque layout (for encrypted or fully compressed containers, or on request) is the file in file order, as
//!   [`RangeKind::Data`], like that of a raw image.

mod builder;
mod codec;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;

use drover_core::{BLOCK_SIZE_U64, ReadAt, blocks_for};

pub(crate) use builder::{BuildError, LayoutBuilder};
pub use codec::LayoutLimits;
#[cfg(fuzzing)]
pub use codec::seal as seal_for_fuzzing;

/// The direction of a range's grains in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Ascending.
    Forward,
    /// Descending.
    Reverse,
}

/// The content of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RangeKind {
    /// Guest data in guest order (in file order, if the layout is opaque).
    Data,
    /// Container metadata, and compressed data.
    Metadata,
}

/// `count` consecutive grains of `grain` bytes.
///
/// Grain *i* covers walk bytes `[walk + i*grain, +grain)` and file bytes that start at
/// `file + i*grain` ([`Order::Forward`]) or `file - i*grain` ([`Order::Reverse`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GrainRange {
    /// Where the range starts in the walk, in bytes.
    pub walk: u64,
    /// Where its first grain starts in the file, in bytes.
    pub file: u64,
    /// Bytes per grain.
    pub grain: u32,
    /// Number of grains.
    pub count: u64,
    /// Their direction.
    pub order: Order,
    /// Their content.
    pub kind: RangeKind,
}

/// The grain size for a forward run: `native` if it divides the length, else smaller.
fn forward_grain(len: u64, native: u32) -> u32 {
    [native, 4096, 512]
        .into_iter()
        .find(|&g| len.is_multiple_of(u64::from(g)))
        .unwrap_or(1)
}

impl GrainRange {
    /// Length of the range in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub fn len(&self) -> u64 {
        u64::from(self.grain) * self.count
    }

    /// The end of the range in the walk.
    #[must_use]
    pub fn walk_end(&self) -> u64 {
        self.walk + self.len()
    }

    /// The file bytes it covers, which are contiguous in either direction.
    #[must_use]
    pub fn file_span(&self) -> Range<u64> {
        match self.order {
            Order::Forward => self.file..self.file + self.len(),
            Order::Reverse => {
                let end = self.file + u64::from(self.grain);
                end - self.len()..end
            }
        }
    }
}

/// A contiguous run in both walk and file, or padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its offset in the walk.
    pub walk: u64,
    /// Its length in bytes, never zero.
    pub len: u64,
    /// Its offset in the file; `None` for padding, which reads as zeros.
    pub file: Option<u64>,
}

/// Why a list of ranges is not a valid layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not written by [`Layout::encode`], or truncated.
    #[error("a layout that is malformed at {0}")]
    Malformed(&'static str),
    /// Written by a newer version.
    #[error("a layout of the unknown version {0}")]
    Version(u8),
    /// The checksum does not match.
    #[error("a layout whose checksum does not match")]
    Checksum,
    /// Larger than a limit.
    #[error("a layout beyond the limit on {0}")]
    TooLarge(&'static str),
    /// A range lies outside of the file.
    #[error("a layout with a range outside its file")]
    OutsideFile,
    /// Two ranges overlap in the file.
    #[error("a layout that covers bytes of its file twice")]
    Overlap,
    /// The ranges are not in a valid order in the walk.
    #[error("a layout whose walk is out of order")]
    Order,
}

/// The order in which a file's bytes are walked; see the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    file_len: u64,
    table_grain: u32,
    ranges: Vec<GrainRange>,
    data_bytes: u64,
    metadata_bytes: u64,
}

/// Upper bound on the gap between two ranges: the rest of one block and the start of another.
const MAX_GAP: u64 = 2 * BLOCK_SIZE_U64 - 1;

impl Layout {
    /// The file in file order, without its holes. `present` are the data runs, sorted and disjoint (see
    /// `ImageFile::data_extents`).
    #[must_use]
    pub fn in_file_order(file_len: u64, present: &[Range<u64>]) -> Layout {
        let mut walk = 0u64;
        let mut ranges = Vec::with_capacity(present.len());
        for run in present.iter().filter(|r| r.start < r.end) {
            let len = run.end.min(file_len).saturating_sub(run.start);
            if len == 0 {
                break;
            }
            walk = walk.next_multiple_of(BLOCK_SIZE_U64) + run.start % BLOCK_SIZE_U64;
            let grain = forward_grain(len, 4096);
            ranges.push(GrainRange {
                walk,
                file: run.start,
                grain,
                count: len / u64::from(grain),
                order: Order::Forward,
                kind: RangeKind::Data,
            });
            walk += len;
        }
        let data_bytes = ranges.iter().map(GrainRange::len).sum();
        Layout {
            file_len,
            table_grain: 4096,
            ranges,
            data_bytes,
            metadata_bytes: 0,
        }
    }

    /// Validates `ranges` against every invariant in the module's documentation.
    ///
    /// # Errors
    /// [`LayoutError`] when one is violated.
    pub fn new(
        file_len: u64,
        table_grain: u32,
        ranges: Vec<GrainRange>,
    ) -> Result<Layout, LayoutError> {
        if table_grain == 0 {
            return Err(LayoutError::Malformed("the table's grain"));
        }
        let (mut walk_end, mut data_bytes, mut metadata_bytes) = (0u64, 0u64, 0u64);
        let mut spans = Vec::new();
        for r in &ranges {
            if r.grain == 0 || r.count == 0 {
                return Err(LayoutError::Malformed("an empty range"));
            }
            let len = u64::from(r.grain)
                .checked_mul(r.count)
                .filter(|&l| l <= file_len)
                .ok_or(LayoutError::OutsideFile)?;
            let inside = match r.order {
                Order::Forward => r.file.checked_add(len).is_some_and(|e| e <= file_len),
                Order::Reverse => r
                    .file
                    .checked_add(u64::from(r.grain))
                    .is_some_and(|e| e <= file_len && e >= len),
            };
            if !inside {
                return Err(LayoutError::OutsideFile);
            }
            match r.walk.checked_sub(walk_end) {
                Some(gap) if gap <= MAX_GAP => {}
                _ => return Err(LayoutError::Order),
            }
            // The last block is padded, and callers round the end of the walk up.
            walk_end = r
                .walk
                .checked_add(len)
                .filter(|&e| e <= u64::MAX - MAX_GAP)
                .ok_or(LayoutError::Order)?;
            match r.kind {
                RangeKind::Data if metadata_bytes > 0 => return Err(LayoutError::Order),
                RangeKind::Data => data_bytes += len,
                RangeKind::Metadata => metadata_bytes += len,
            }
            // Both sums count bytes of the file; more than it has means that some are covered twice.
            if data_bytes
                .checked_add(metadata_bytes)
                .is_none_or(|sum| sum > file_len)
            {
                return Err(LayoutError::Overlap);
            }
            let span = r.file_span();
            spans.push((span.start, span.end));
        }
        spans.sort_unstable();
        if spans.windows(2).any(|w| w[0].1 > w[1].0) {
            return Err(LayoutError::Overlap);
        }
        Ok(Layout {
            file_len,
            table_grain,
            ranges,
            data_bytes,
            metadata_bytes,
        })
    }

    /// Length of the file in bytes, holes included.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Length of the walk in blocks.
    #[must_use]
    pub fn walk_blocks(&self) -> u64 {
        blocks_for(self.ranges.last().map_or(0, GrainRange::walk_end))
    }

    /// Memory that it takes, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<GrainRange>()
    }

    /// The ranges, sorted by walk offset.
    #[must_use]
    pub fn ranges(&self) -> &[GrainRange] {
        &self.ranges
    }

    /// File bytes covered as data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// File bytes covered as metadata.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        self.metadata_bytes
    }

    /// File bytes covered; all others are holes.
    #[must_use]
    pub fn covered_bytes(&self) -> u64 {
        self.data_bytes + self.metadata_bytes
    }

    /// Whether the walk equals the file, byte for byte (with the last block padded).
    #[must_use]
    pub fn is_identity(&self) -> bool {
        match self.ranges.as_slice() {
            [] => self.file_len == 0,
            ranges => {
                self.covered_bytes() == self.file_len
                    && ranges
                        .iter()
                        .all(|r| r.walk == r.file && (r.order == Order::Forward || r.count == 1))
            }
        }
    }

    /// The pieces of walk bytes `[walk_offset, walk_offset + len)`, in order and without gaps. Ends early at the end of
    /// the walk's last block.
    #[must_use]
    pub fn pieces(&self, walk_offset: u64, len: u64) -> Pieces<'_> {
        let end = walk_offset
            .saturating_add(len)
            .min(self.walk_blocks() * BLOCK_SIZE_U64);
        Pieces {
            ranges: &self.ranges,
            next: self.ranges.partition_point(|r| r.walk_end() <= walk_offset),
            at: walk_offset,
            end,
        }
    }

    /// Reads walk bytes from `walk_offset` into `buf`; bytes beyond the walk are zero.
    ///
    /// # Errors
    /// Errors from reading `content`; `UnexpectedEof` if it has become shorter.
    pub fn read(&self, content: &dyn ReadAt, walk_offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0usize;
        for piece in self.pieces(walk_offset, buf.len() as u64) {
            // A piece is never longer than the buffer.
            let n = piece.len as usize;
            let part = &mut buf[done..done + n];
            match piece.file {
                Some(file) => content.read_exact_at(part, file)?,
                None => part.fill(0),
            }
            done += n;
        }
        buf[done..].fill(0);
        Ok(())
    }

    /// Ratio of a table of 8 bytes per used grain to the encoded size of the ranges (teleportation §2.17).
    #[must_use]
    pub fn compression_ratio(&self) -> f64 {
        let table = self.data_bytes.div_ceil(u64::from(self.table_grain)) * 8;
        table as f64 / self.encode().len() as f64
    }
}

/// The iterator that [`Layout::pieces`] returns.
#[derive(Debug, Clone)]
pub struct Pieces<'a> {
    ranges: &'a [GrainRange],
    next: usize,
    at: u64,
    end: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.at >= self.end {
            return None;
        }
        let walk = self.at;
        let left = self.end - walk;
        let (len, file) = match self.ranges.get(self.next) {
            None => (left, None),
            Some(r) if walk < r.walk => (left.min(r.walk - walk), None),
            Some(r) => {
                let within = walk - r.walk;
                let (len, file) = match r.order {
                    Order::Forward => (left.min(r.len() - within), r.file + within),
                    Order::Reverse => {
                        let grain = u64::from(r.grain);
                        let inner = within % grain;
                        (left.min(grain - inner), r.file + inner - (within - inner))
                    }
                };
                if walk + len == r.walk_end() {
                    self.next += 1;
                }
                (len, Some(file))
            }
        };
        self.at += len;
        Some(Piece { walk, len, file })
    }
}
