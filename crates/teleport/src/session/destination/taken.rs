//! Batches that the source does not send, since the destination has an old copy of the disk whose generations say that
//! they did not change: they are read there, and digested like any others. Of a batch that changed, most blocks did not: what is
//! the same at its place in the old copy by its digest is not asked for.

use std::ops::Range;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, BlockIndex, Digest};
use drover_image::{Format, Layout, Outgoing};
use drover_index::digest_blocks;
use drover_net::PeerKey;
use drover_store::DataBits;
use drover_store::generations::Summary;

use crate::TeleportError;
use crate::codec::{Batch, Have, Runs};
use crate::files::write_walk;
use crate::protocol::{BATCH_BLOCKS, Offer};
use crate::session::literals_in::Incoming;
use crate::site::Site;
use crate::stages::Lap;
use crate::transfer::clear_zeros;
use crate::walk::{Walk, read_image};

/// Blocks of a changed batch that are read and digested at a time.
const SLAB_BLOCKS: usize = 256;

/// A batch that was taken from an old copy.
pub struct Taken {
    /// The batch.
    pub batch: Arc<Batch>,
    /// The digests of its data blocks.
    pub full: Vec<Digest>,
}

/// What the destination has of an image.
pub struct Known {
    /// The batches.
    pub have: Have,
    image: Outgoing,
}

impl Known {
    /// Looks for an old copy of the disk with these generations; none if nothing of it is of use.
    pub fn find(
        site: &Site,
        peer: &PeerKey,
        offer: &Offer,
        layout: Layout,
        generations: &[u8],
    ) -> Result<Option<Self>, TeleportError> {
        let generations =
            Summary::decode(generations).map_err(|e| TeleportError::Protocol(e.to_string()))?;
        let is_raw = offer.format == Format::Raw.as_str();
        if !is_raw || layout.file_len() != generations.size {
            return Ok(None);
        }
        let Some(copy) = site.old_copy(peer, &generations) else {
            return Ok(None);
        };
        if copy.content.len() != layout.file_len() {
            return Ok(None);
        }
        let have = Have {
            batches: unchanged(&layout, &copy.differs),
        };
        // As the source is told.
        let have = Have::decode(&have.encode())?;
        tracing::info!(
            image = %offer.name,
            batches = have.batches.count(),
            of = layout.walk_blocks().div_ceil(BATCH_BLOCKS),
            "an old copy of the disk has these unchanged"
        );
        let image = Outgoing {
            content: copy.content,
            virtual_size: layout.file_len(),
            layout,
            format: Format::Raw,
            notes: Vec::new(),
            stamps: Vec::new(),
        };
        Ok(Some(Known { have, image }))
    }

    /// Brings a batch into the partial file, which may hold something there (`compare`).
    pub fn take(&self, index: u64, into: &Incoming, compare: bool) -> Result<Taken, TeleportError> {
        let mut lap = Lap::start();
        let layout = &into.layout;
        let failed = |e| TeleportError::file("write", &into.part_path)(e);
        let write = &mut |first: u64, slab: &[u8], data: &[Range<usize>]| {
            for run in data {
                let bytes = &slab[run.start * BLOCK_SIZE..run.end * BLOCK_SIZE];
                let at = BlockIndex(first + run.start as u64);
                write_walk(&into.part, layout, at, bytes).map_err(failed)?;
            }
            Ok(())
        };
        let mut walk = Walk::from(&self.image, index);
        let (batch, full) = walk.next_with(write)?.ok_or_else(|| {
            TeleportError::Protocol("the source skipped a batch beyond the image".into())
        })?;
        if compare {
            clear_zeros(&into.part, layout, &batch).map_err(failed)?;
        }
        lap.busy(&into.stages.copy);
        into.stages
            .copy
            .add_bytes(batch.data.blocks() * BLOCK_SIZE_U64);
        let batch = Arc::new(batch);
        Ok(Taken { batch, full })
    }

    /// Brings those data blocks of a batch into place which the old copy has at the same place, apart from these others, which are
    /// there or on their way; which they are, by order among the batch's data blocks.
    pub fn bring(
        &self,
        into: &Incoming,
        batch: &Batch,
        others: [&DataBits; 2],
        lap: &mut Lap,
    ) -> Result<DataBits, TeleportError> {
        let mut brought = DataBits::new(batch.digests.len() as u64);
        let Some(open) = into.open.read().get(&batch.index).cloned() else {
            return Ok(brought);
        };
        let nth: Vec<u64> = (0..batch.digests.len() as u64)
            .filter(|i| !others.iter().any(|there| there.get(*i)))
            .collect();
        let places: Vec<u64> = batch.data.iter().collect();
        let wanted: Vec<u64> = nth.iter().map(|i| places[*i as usize]).collect();
        let mut next = nth.iter().copied();
        let mut buffer = vec![0; SLAB_BLOCKS * BLOCK_SIZE];
        for (BlockIndex(first), count) in batch.runs_at(&wanted) {
            for at in (0..count).step_by(SLAB_BLOCKS) {
                let blocks = (count - at).min(SLAB_BLOCKS as u64) as usize;
                let slab = &mut buffer[..blocks * BLOCK_SIZE];
                let here: Vec<u64> = next.by_ref().take(blocks).collect();
                if let Err(error) = read_image(&self.image, first + at, slab) {
                    tracing::warn!(%error, "cannot read an old copy of a disk");
                    continue;
                }
                let mut found = Vec::with_capacity(blocks);
                digest_blocks(slab, &mut found);
                let same = |n: &usize| found[*n].short() == batch.digests[here[*n] as usize];
                for run in runs_where(blocks, same) {
                    let bytes = &slab[run.start * BLOCK_SIZE..run.end * BLOCK_SIZE];
                    let to = BlockIndex(first + at + run.start as u64);
                    write_walk(&into.part, &into.layout, to, bytes)
                        .map_err(TeleportError::file("write", &into.part_path))?;
                    let mut full = open.full.lock();
                    for n in run {
                        full[here[n] as usize] = found[n];
                        brought.set(here[n]);
                    }
                }
            }
        }
        lap.busy(&into.stages.copy);
        into.stages
            .copy
            .add_bytes(nth.len() as u64 * BLOCK_SIZE_U64);
        Ok(brought)
    }
}

/// The runs of numbers below `end` for which that is so.
fn runs_where(end: usize, is_so: impl Fn(&usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for n in (0..end).filter(is_so) {
        match runs.last_mut() {
            Some(run) if run.end == n => run.end += 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}

/// The batches of a raw image's walk that have nothing in these ranges of the disk.
fn unchanged(layout: &Layout, differs: &[Range<u64>]) -> Runs {
    let bytes = BATCH_BLOCKS * BLOCK_SIZE_U64;
    let is_same = |piece: Range<u64>| {
        let next = differs.partition_point(|range| range.end <= piece.start);
        differs
            .get(next)
            .is_none_or(|range| range.start >= piece.end)
    };
    let batches = 0..layout.walk_blocks().div_ceil(BATCH_BLOCKS);
    batches
        .filter(|batch| {
            let mut pieces = layout.pieces(batch * bytes, bytes);
            pieces.all(|piece| match piece.file {
                Some(at) => is_same(at..at + piece.len),
                None => true,
            })
        })
        .collect()
}
