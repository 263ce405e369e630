//! Walking an image: its batches of zero map, heads and digests, and the digest of the file.

use std::ops::Range;
use std::path::Path;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Digest, Extent, ExtentKind, ReadAt};
use drover_image::{ImageFile, Outgoing, Stamp};
use drover_index::{ImageDigest, Scanner, digest_blocks, image_digest};
use drover_store::DataBits;

use crate::TeleportError;
use crate::codec::Batch;
use crate::files::{FileOrderDigest, walks_in_file_order};
use crate::protocol::BATCH_BLOCKS;
use crate::stages::{Lap, SourceStages};

/// Blocks read, scanned and digested at a time: few enough to stay in a core's cache.
const SLAB_BLOCKS: u64 = 256;

/// Gets what a walk reads.
pub type EachSlab<'a> = dyn FnMut(u64, &[u8], &[Range<usize>]) -> Result<(), TeleportError> + 'a;

/// Reads an image in the order of its layout.
pub struct Walk<'a> {
    image: &'a Outgoing,
    scanner: Scanner,
    next: u64,
    buffer: Vec<u8>,
    /// Computed during the walk if that visits the file's blocks in order; else the file is read once more.
    digest: Option<FileOrderDigest>,
}

impl<'a> Walk<'a> {
    /// Starts at the beginning of an image.
    #[must_use]
    pub fn new(image: &'a Outgoing) -> Self {
        let in_order = walks_in_file_order(&image.layout);
        let digest = in_order.then(|| FileOrderDigest::new(&image.layout));
        Walk {
            image,
            scanner: Scanner::new(),
            next: 0,
            buffer: Vec::new(),
            digest,
        }
    }

    /// Starts at a batch; it never has a digest.
    #[must_use]
    pub fn from(image: &'a Outgoing, batch: u64) -> Self {
        Walk {
            next: batch,
            digest: None,
            ..Walk::new(image)
        }
    }

    /// The next batch; `None` after the last.
    ///
    /// # Errors
    /// When the image cannot be read, or has become shorter.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, TeleportError> {
        self.next_timed(&SourceStages::default(), &mut Lap::start())
    }

    /// Like [`Walk::next_batch`]; `lap` attributes the time to the stages of the walk.
    ///
    /// # Errors
    /// As [`Walk::next_batch`].
    pub fn next_timed(
        &mut self,
        stages: &SourceStages,
        lap: &mut Lap,
    ) -> Result<Option<Batch>, TeleportError> {
        let next = self.next_read(stages, lap, &mut |_, _, _| Ok(()))?;
        Ok(next.map(|(batch, _)| batch))
    }

    /// The next batch with the full digests of its data blocks. `each` gets what is read: the first block of the walk, the
    /// bytes, and in these the runs of blocks that are not zero.
    ///
    /// # Errors
    /// As [`Walk::next_batch`], and those of `each`.
    pub fn next_with(
        &mut self,
        each: &mut EachSlab<'_>,
    ) -> Result<Option<(Batch, Vec<Digest>)>, TeleportError> {
        self.next_read(&SourceStages::default(), &mut Lap::start(), each)
    }

    fn next_read(
        &mut self,
        stages: &SourceStages,
        lap: &mut Lap,
        each: &mut EachSlab<'_>,
    ) -> Result<Option<(Batch, Vec<Digest>)>, TeleportError> {
        let layout = &self.image.layout;
        let first = self.next * BATCH_BLOCKS;
        let blocks = layout.walk_blocks().saturating_sub(first).min(BATCH_BLOCKS);
        if blocks == 0 {
            return Ok(None);
        }
        let mut data = DataBits::new(blocks);
        let mut heads = Vec::with_capacity(blocks as usize);
        let mut digests = Vec::with_capacity(blocks as usize);
        for at in (0..blocks).step_by(SLAB_BLOCKS as usize) {
            let n = (blocks - at).min(SLAB_BLOCKS);
            self.buffer.resize(n as usize * BLOCK_SIZE, 0);
            read_image(self.image, first + at, &mut self.buffer)?;
            lap.busy(&stages.read);
            stages.read.add_bytes(self.buffer.len() as u64);
            let scan = self.scanner.scan(&self.buffer);
            let mut here = DataBits::new(n);
            for (i, _) in scan.zero.iter().enumerate().filter(|(_, zero)| !zero) {
                here.set(i as u64);
                data.set(at + i as u64);
            }
            heads.extend(scan.heads);
            each(first + at, &self.buffer, &runs(&here))?;
            lap.busy(&stages.scan);
            stages.scan.add_bytes(self.buffer.len() as u64);
            digest_blocks(pack_data(&mut self.buffer, &here), &mut digests);
            lap.busy(&stages.digest);
        }
        let batch = Batch::new(self.next, data, heads, &digests);
        if let Some(digest) = &mut self.digest {
            digest.batch(layout, &batch, &digests);
        }
        self.next += 1;
        lap.busy(&stages.digest);
        stages
            .digest
            .add_bytes(digests.len() as u64 * BLOCK_SIZE_U64);
        Ok(Some((batch, digests)))
    }

    /// Passes over the next batch without reading it.
    pub fn skip_batch(&mut self) {
        self.next += 1;
        self.scanner = Scanner::new();
    }

    /// The digest of the file, after the last batch, if none was skipped.
    ///
    /// # Errors
    /// When the file has to be read again and cannot be.
    pub fn digest(self) -> Result<Digest, TeleportError> {
        match self.digest {
            Some(digest) => Ok(digest.finish(&self.image.layout)),
            None => {
                let gaps = holes(&self.image.layout);
                let path = image_path(self.image);
                image_digest(&*self.image.content, gaps).map_err(TeleportError::file("read", path))
            }
        }
    }
}

/// The runs of data blocks.
fn runs(data: &DataBits) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for block in data.iter().map(|block| block as usize) {
        match runs.last_mut() {
            Some(run) if run.end == block => run.end += 1,
            _ => runs.push(block..block + 1),
        }
    }
    runs
}

/// The digest of an image, read now; none when it was stopped.
///
/// # Errors
/// When it cannot be read, or has become shorter.
pub fn digest_of(
    image: &Outgoing,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Digest>, TeleportError> {
    let mut walk = Walk::new(image);
    while walk.next_batch()?.is_some() {
        if stop() {
            return Ok(None);
        }
    }
    walk.digest().map(Some)
}

/// Moves the data blocks to the front, so that they can be digested contiguously.
fn pack_data<'b>(buffer: &'b mut [u8], data: &DataBits) -> &'b [u8] {
    let count = data.count() as usize;
    if count as u64 != data.blocks() {
        for (to, from) in data.iter().enumerate() {
            let from = from as usize * BLOCK_SIZE;
            buffer.copy_within(from..from + BLOCK_SIZE, to * BLOCK_SIZE);
        }
    }
    &buffer[..count * BLOCK_SIZE]
}

/// The parts of the file that no range covers: holes.
fn holes(layout: &drover_image::Layout) -> Vec<Extent> {
    let mut spans: Vec<_> = layout.ranges().iter().map(|r| r.file_span()).collect();
    spans.sort_by_key(|s| s.start);
    let mut out = Vec::new();
    let mut at = 0;
    for span in spans
        .into_iter()
        .chain(std::iter::once(layout.file_len()..layout.file_len()))
    {
        if span.start > at {
            out.push(Extent {
                offset: at,
                length: span.start - at,
                kind: ExtentKind::Hole,
            });
        }
        at = at.max(span.end);
    }
    out
}

/// Reads blocks of an image's walk.
///
/// # Errors
/// When the image cannot be read; if it has become shorter, it changed.
pub fn read_image(image: &Outgoing, first_block: u64, buf: &mut [u8]) -> Result<(), TeleportError> {
    image
        .layout
        .read(&*image.content, first_block * BLOCK_SIZE_U64, buf)
        .map_err(|e| {
            let path = image_path(image);
            match e.kind() {
                std::io::ErrorKind::UnexpectedEof => TeleportError::SourceChanged(path),
                _ => TeleportError::file("read", path)(e),
            }
        })
}

/// The image's own file, for messages.
#[must_use]
pub fn image_path(image: &Outgoing) -> std::path::PathBuf {
    let own = image.stamps.first().map(|(path, _)| path.clone());
    own.unwrap_or_else(|| "the disk".into())
}

/// Checks that none of the image's files changed since it was opened.
///
/// # Errors
/// [`TeleportError::SourceChanged`] with the file that changed.
pub fn check_unchanged(image: &Outgoing) -> Result<(), TeleportError> {
    for (path, stamp) in &image.stamps {
        let same = Stamp::of_path(path).is_ok_and(|now| now == *stamp);
        if !same {
            return Err(TeleportError::SourceChanged(path.clone()));
        }
    }
    Ok(())
}

/// Digests a file, skipping its holes; reports bytes processed and total bytes.
///
/// # Errors
/// When it cannot be read.
pub fn digest_file(
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Digest, TeleportError> {
    let file = ImageFile::open(path)?;
    let length = ReadAt::len(&file);
    let blocks = drover_core::blocks_for(length);
    let mut digest = ImageDigest::new(length);
    let mut buffer = vec![0u8; 1 << 20];
    let mut digests = Vec::new();
    let mut next = 0;
    for span in file.data_extents()? {
        let (first, end) = (
            span.start / BLOCK_SIZE_U64,
            drover_core::blocks_for(span.end),
        );
        digest.zero_blocks(first.saturating_sub(next));
        next = next.max(first);
        while next < end {
            let offset = next * BLOCK_SIZE_U64;
            let n = (end - next).min((buffer.len() / BLOCK_SIZE) as u64);
            let slab = &mut buffer[..n as usize * BLOCK_SIZE];
            let here = slab.len().min((length - offset) as usize);
            file.read_exact_at(&mut slab[..here], offset)
                .map_err(TeleportError::file("read", path))?;
            slab[here..].fill(0);
            digests.clear();
            digest_blocks(slab, &mut digests);
            digest.blocks(&digests);
            next += n;
            progress((next * BLOCK_SIZE_U64).min(length), length);
        }
    }
    digest.zero_blocks(blocks - next);
    Ok(digest.finish())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drover_image::{Format, Layout};
    use drover_index::digest_block;

    use super::*;

    /// Heads, zeros and digests do not depend on the read size.
    #[test]
    fn a_batch_is_what_its_blocks_are_wherever_reads_end() {
        let blocks = BATCH_BLOCKS + SLAB_BLOCKS + 7;
        let mut rng = fastrand::Rng::with_seed(19);
        let mut bytes = vec![0; blocks as usize * BLOCK_SIZE];
        for (i, block) in bytes.chunks_mut(BLOCK_SIZE).enumerate() {
            // Each read but the first begins with a block that follows a file's end.
            let tail = i as u64 % SLAB_BLOCKS == SLAB_BLOCKS - 1;
            let first = (i as u64).is_multiple_of(SLAB_BLOCKS);
            if tail || first || rng.u8(0..4) > 0 {
                rng.fill(block);
            }
            if tail || rng.bool() {
                block[BLOCK_SIZE - 9..].fill(0);
            }
        }
        let len = bytes.len() as u64;
        let image = Outgoing {
            content: Arc::new(bytes.clone()),
            layout: Layout::in_file_order(len, std::slice::from_ref(&(0..len))),
            format: Format::Raw,
            virtual_size: len,
            notes: vec![],
            stamps: vec![],
        };
        let (mut walk, mut scanner) = (Walk::new(&image), Scanner::new());
        for (index, part) in bytes.chunks(BATCH_BLOCKS as usize * BLOCK_SIZE).enumerate() {
            let scan = scanner.scan(part);
            let (mut data, mut full) = (DataBits::new((part.len() / BLOCK_SIZE) as u64), vec![]);
            for (i, block) in part.chunks(BLOCK_SIZE).enumerate() {
                if !drover_core::is_zero(block) {
                    data.set(i as u64);
                    full.push(digest_block(block));
                }
            }
            let expected = Batch::new(index as u64, data, scan.heads, &full);
            assert_eq!(walk.next_batch().unwrap(), Some(expected));
        }
        assert_eq!(walk.next_batch().unwrap(), None);
    }
}
