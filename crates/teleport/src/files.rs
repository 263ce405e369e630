//! Blocks of a walk in files: reading and writing them in place, copying them between files (sharing extents where
//! the file system can), and the digest of a whole file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, BlockIndex, Digest, is_zero};
use drover_image::{Layout, Order};
use drover_index::{ImageDigest, digest_blocks};

use crate::codec::Batch;

/// Bytes read, digested or copied at a time.
const SLAB: usize = 1 << 20;

/// Writes whole blocks of the walk into the file. Padding must be zero and is not written.
///
/// # Errors
/// I/O errors; `InvalidData` when padding is not zero: those bytes have no place in the file, so the block could not
/// be read back as it was sent.
pub fn write_walk(
    file: &File,
    layout: &Layout,
    first_block: BlockIndex,
    bytes: &[u8],
) -> io::Result<()> {
    let mut done = 0;
    for piece in layout.pieces(first_block.byte_offset(), bytes.len() as u64) {
        let part = &bytes[done..done + piece.len as usize];
        match piece.file {
            Some(at) => file.write_all_at(part, at)?,
            None if is_zero(part) => {}
            None => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "data where the layout has padding",
                ));
            }
        }
        done += part.len();
    }
    Ok(())
}

/// Byte ranges of a file in any order: `(offset, length)`; `None` reads as zeros.
pub type Spans = Vec<(Option<u64>, u64)>;

/// Byte ranges of the blocks of `runs` in their file.
#[must_use]
pub fn spans_of(layout: &Layout, runs: &[(BlockIndex, u64)]) -> Spans {
    let mut out: Spans = Vec::new();
    for &(first, blocks) in runs {
        for piece in layout.pieces(first.byte_offset(), blocks * BLOCK_SIZE_U64) {
            match (out.last_mut(), piece.file) {
                (Some((Some(at), len)), Some(next)) if *at + *len == next => *len += piece.len,
                _ => out.push((piece.file, piece.len)),
            }
        }
    }
    out
}

/// Copies `from` to `to` span by span. Parts without a place in the target are skipped, and parts without a source
/// leave the target unchanged (a hole): the caller verifies the target, so neither can be mistaken for data.
///
/// `copy_file_range` can share extents: on file systems that support it (xfs, btrfs), the kernel first tries to remap
/// them (the operation behind `FICLONERANGE`); elsewhere it copies.
///
/// # Errors
/// I/O errors, for example a full disk. A source that has become shorter is no error.
pub fn copy_spans(
    source: &File,
    from: &[(Option<u64>, u64)],
    target: &File,
    to: &[(Option<u64>, u64)],
) -> io::Result<()> {
    let (mut f, mut t) = (from.iter().copied(), to.iter().copied());
    let (mut a, mut b) = (f.next(), t.next());
    while let (Some((src, src_len)), Some((dst, dst_len))) = (a, b) {
        let n = src_len.min(dst_len);
        if let (Some(s), Some(d)) = (src, dst) {
            copy_range(source, s, target, d, n)?;
        }
        a = if n == src_len {
            f.next()
        } else {
            Some((src.map(|s| s + n), src_len - n))
        };
        b = if n == dst_len {
            t.next()
        } else {
            Some((dst.map(|d| d + n), dst_len - n))
        };
    }
    Ok(())
}

fn copy_range(
    source: &File,
    mut from: u64,
    target: &File,
    mut to: u64,
    mut len: u64,
) -> io::Result<()> {
    while len > 0 {
        let chunk = usize::try_from(len).unwrap_or(usize::MAX).min(1 << 30);
        match rustix::fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => len -= n as u64,
            Err(rustix::io::Errno::INTR) => {}
            // Different file systems, or one without support: copy through memory.
            Err(
                rustix::io::Errno::XDEV
                | rustix::io::Errno::OPNOTSUPP
                | rustix::io::Errno::NOSYS
                | rustix::io::Errno::INVAL,
            ) => {
                return copy_through_memory(source, from, target, to, len);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn copy_through_memory(
    source: &File,
    mut from: u64,
    target: &File,
    mut to: u64,
    mut len: u64,
) -> io::Result<()> {
    let mut buf = vec![0u8; SLAB.min(len as usize)];
    while len > 0 {
        let want = buf.len().min(len as usize);
        let n = source.read_at(&mut buf[..want], from)?;
        if n == 0 {
            return Ok(());
        }
        target.write_all_at(&buf[..n], to)?;
        from += n as u64;
        to += n as u64;
        len -= n as u64;
    }
    Ok(())
}

/// Digests the blocks of `runs` in place, in order, and appends the digests to `out`. Anything beyond the end of the
/// file counts as zeros.
///
/// # Errors
/// I/O errors.
pub fn digest_in_place(
    file: &File,
    layout: &Layout,
    runs: &[(BlockIndex, u64)],
    out: &mut Vec<Digest>,
) -> io::Result<()> {
    let blocks: u64 = runs.iter().map(|r| r.1).sum();
    let mut buf = vec![0u8; SLAB.min(blocks as usize * BLOCK_SIZE)];
    let mut filled = 0usize;
    for &(BlockIndex(first), blocks) in runs {
        let mut block = first;
        while block < first + blocks {
            let n = ((first + blocks - block) as usize).min((buf.len() - filled) / BLOCK_SIZE);
            let part = &mut buf[filled..filled + n * BLOCK_SIZE];
            read_walk_lenient(file, layout, BlockIndex(block), part)?;
            filled += n * BLOCK_SIZE;
            block += n as u64;
            if filled == buf.len() {
                digest_blocks(&buf, out);
                filled = 0;
            }
        }
    }
    digest_blocks(&buf[..filled], out);
    Ok(())
}

/// Reads blocks of the walk; parts beyond the end of the file read as zeros.
fn read_walk_lenient(
    file: &File,
    layout: &Layout,
    first_block: BlockIndex,
    buf: &mut [u8],
) -> io::Result<()> {
    let mut done = 0;
    for piece in layout.pieces(first_block.byte_offset(), buf.len() as u64) {
        let part = &mut buf[done..done + piece.len as usize];
        done += part.len();
        let got = match piece.file {
            Some(at) => read_some(file, part, at)?,
            None => 0,
        };
        part[got..].fill(0);
    }
    buf[done..].fill(0);
    Ok(())
}

/// Whether the file has data in any of the spans, according to its file system.
///
/// # Errors
/// I/O errors.
pub fn has_data(file: &File, spans: &[(Option<u64>, u64)]) -> io::Result<bool> {
    for (start, len) in spans.iter().filter_map(|(at, len)| Some(((*at)?, len))) {
        match next_data(file, start)? {
            Some(data) if data < start + len => return Ok(true),
            Some(_) => {}
            None => continue,
        }
    }
    Ok(false)
}

/// Makes these bytes of the file read as zeros; bytes that already do are not written.
///
/// # Errors
/// I/O errors.
pub fn clear(file: &File, spans: impl IntoIterator<Item = (u64, u64)>) -> io::Result<()> {
    let mut slab = Vec::new();
    for (start, len) in spans {
        let (mut at, end) = (start, start + len);
        while let Some(data) = next_data(file, at)?.filter(|data| *data < end) {
            let hole = next_hole(file, data)?.min(end);
            slab.resize(SLAB, 0);
            for from in (data..hole).step_by(SLAB) {
                let part = &mut slab[..SLAB.min((hole - from) as usize)];
                let n = read_some(file, part, from)?;
                if !is_zero(&part[..n]) {
                    punch(file, from, part)?;
                }
            }
            at = hole;
        }
    }
    Ok(())
}

/// The spans of a file that are not holes.
///
/// # Errors
/// I/O errors.
pub fn data_spans(file: &File, len: u64) -> io::Result<Spans> {
    let (mut out, mut at) = (Spans::new(), 0);
    while let Some(data) = next_data(file, at)?.filter(|data| *data < len) {
        at = next_hole(file, data)?.min(len);
        out.push((Some(data), at - data));
    }
    Ok(out)
}

/// The first byte at or after `at` that is not in a hole.
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        // A file system that does not report holes.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(Some(at)),
        Err(e) => Err(e.into()),
    }
}

/// The first byte at or after `at` that is in a hole or past the end.
fn next_hole(file: &File, at: u64) -> io::Result<u64> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(at)) {
        Ok(hole) => Ok(hole),
        Err(rustix::io::Errno::NXIO | rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
            Ok(u64::MAX)
        }
        Err(e) => Err(e.into()),
    }
}

/// Zeros `part.len()` bytes at `at`; writes `part`, filled with zeros, where holes cannot be punched.
fn punch(file: &File, at: u64, part: &mut [u8]) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, at, part.len() as u64) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            part.fill(0);
            file.write_all_at(part, at)
        }
        other => Ok(other?),
    }
}

/// Reads until `buf` is full or the file ends.
fn read_some(file: &File, buf: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buf.len() {
        match file.read_at(&mut buf[got..], at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

/// The ranges `(offset, length)` of the file that the layout does not cover: holes.
#[must_use]
pub fn uncovered(layout: &Layout) -> Vec<(u64, u64)> {
    let mut covered: Vec<_> = layout.ranges().iter().map(|r| r.file_span()).collect();
    covered.sort_by_key(|span| span.start);
    let mut out = Vec::new();
    let mut at = 0;
    for span in covered {
        if span.start > at {
            out.push((at, span.start - at));
        }
        at = at.max(span.end);
    }
    if layout.file_len() > at {
        out.push((at, layout.file_len() - at));
    }
    out
}

/// Whether walking the layout visits the file's own 4096-byte blocks in file order, so that the file's digest can be
/// computed from the digests of the walk.
#[must_use]
pub fn walks_in_file_order(layout: &Layout) -> bool {
    let mut end = 0;
    layout.ranges().iter().all(|r| {
        let aligned =
            r.walk.is_multiple_of(BLOCK_SIZE_U64) && r.file.is_multiple_of(BLOCK_SIZE_U64);
        let ahead = r.file >= end && (r.order == Order::Forward || r.count == 1);
        // A range may end inside a block only at the end of the file.
        let whole = r.len().is_multiple_of(BLOCK_SIZE_U64) || r.file + r.len() == layout.file_len();
        end = r.file + r.len();
        aligned && ahead && whole
    })
}

/// Computes the digest of a file from the batches of a walk in file order.
#[derive(Clone)]
pub struct FileOrderDigest {
    digest: ImageDigest,
    /// The next block of the file.
    next: u64,
}

impl FileOrderDigest {
    /// Starts at the beginning of a file for which [`walks_in_file_order`] holds.
    #[must_use]
    pub fn new(layout: &Layout) -> Self {
        FileOrderDigest {
            digest: ImageDigest::new(layout.file_len()),
            next: 0,
        }
    }

    /// Adds the next batch, with the full digests of its data blocks.
    pub fn batch(&mut self, layout: &Layout, batch: &Batch, full: &[Digest]) {
        let mut digests = full;
        let mut nth = 0;
        let blocks = batch.data.blocks();
        let start = batch.first_block() * BLOCK_SIZE_U64;
        for piece in layout.pieces(start, blocks * BLOCK_SIZE_U64) {
            let end = nth + piece.len.div_ceil(BLOCK_SIZE_U64);
            if let Some(file) = piece.file {
                self.zeros_to(file / BLOCK_SIZE_U64);
            }
            while nth < end {
                let data = batch.data.get(nth);
                let run = (nth..end)
                    .take_while(|&i| batch.data.get(i) == data)
                    .count() as u64;
                let (here, rest) = digests.split_at(if data { run as usize } else { 0 });
                digests = rest;
                nth += run;
                match piece.file {
                    None => {}
                    Some(_) if data => self.digest.blocks(here),
                    Some(_) => self.digest.zero_blocks(run),
                }
                self.next += if piece.file.is_some() { run } else { 0 };
            }
        }
    }

    fn zeros_to(&mut self, block: u64) {
        self.digest.zero_blocks(block - self.next);
        self.next = block;
    }

    /// The digest, after the last batch.
    #[must_use]
    pub fn finish(mut self, layout: &Layout) -> Digest {
        self.zeros_to(drover_core::blocks_for(layout.file_len()));
        self.digest.finish()
    }
}

/// Reorders batches, which complete in any order, for the digest of the file.
pub struct OrderedDigest {
    digest: FileOrderDigest,
    next: u64,
    /// Complete batches waiting for an earlier one; bounded by the window.
    waiting: BTreeMap<u64, (Arc<Batch>, Vec<Digest>)>,
}

impl OrderedDigest {
    /// Starts at the beginning of a file; `None` unless [`walks_in_file_order`] holds.
    #[must_use]
    pub fn new(layout: &Layout) -> Option<Self> {
        let digest = walks_in_file_order(layout).then(|| FileOrderDigest::new(layout))?;
        Some(OrderedDigest {
            digest,
            next: 0,
            waiting: BTreeMap::new(),
        })
    }

    /// Adds a complete batch with the full digests of its data blocks.
    pub fn batch(&mut self, layout: &Layout, batch: Arc<Batch>, full: Vec<Digest>) {
        self.waiting.insert(batch.index, (batch, full));
        while let Some((batch, full)) = self.waiting.remove(&self.next) {
            self.digest.batch(layout, &batch, &full);
            self.next += 1;
        }
    }

    /// The digest, after the last batch.
    #[must_use]
    pub fn finish(self, layout: &Layout) -> Digest {
        self.digest.finish(layout)
    }
}

/// Removes a directory with its contents, or a file. A failure is only logged.
pub(crate) fn remove_dir(path: &Path) {
    let removed = match path.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    if let Err(e) = removed
        && e.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), error = %e, "cannot remove");
    }
}

#[cfg(test)]
mod tests;
