//! Batches that the source does not send, since the destination has an old copy of the disk whose generations say that
//! they did not change: they are read there, and digested like any others.

use std::ops::Range;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, BlockIndex, Digest};
use drover_image::{Format, Layout, Outgoing};
use drover_net::PeerKey;
use drover_store::generations::Summary;

use crate::TeleportError;
use crate::codec::{Batch, Have, Runs};
use crate::files::write_walk;
use crate::protocol::{BATCH_BLOCKS, Offer};
use crate::site::Site;
use crate::stages::{DestinationStages, Lap};
use crate::transfer::{Transfer, clear_zeros};
use crate::walk::Walk;

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
        if have.batches.is_empty() {
            return Ok(None);
        }
        tracing::info!(
            image = %offer.name,
            batches = have.batches.count(),
            of = layout.walk_blocks().div_ceil(BATCH_BLOCKS),
            "an old copy of the disk has these"
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

    /// Brings a batch into the partial file; the batch, and the digests of its data blocks.
    pub fn take(
        &self,
        index: u64,
        transfer: &Transfer,
        stages: &DestinationStages,
    ) -> Result<(Arc<Batch>, Vec<Digest>), TeleportError> {
        let mut lap = Lap::start();
        let layout = &transfer.layout;
        let failed = |e| TeleportError::file("write", transfer.part_path())(e);
        let write = &mut |first: u64, slab: &[u8], data: &[Range<usize>]| {
            for run in data {
                let bytes = &slab[run.start * BLOCK_SIZE..run.end * BLOCK_SIZE];
                let at = BlockIndex(first + run.start as u64);
                write_walk(&transfer.part, layout, at, bytes).map_err(failed)?;
            }
            Ok(())
        };
        let mut walk = Walk::from(&self.image, index);
        let (batch, full) = walk.next_with(write)?.ok_or_else(|| {
            TeleportError::Protocol("the source skipped a batch beyond the image".into())
        })?;
        if transfer.compare {
            clear_zeros(&transfer.part, layout, &batch).map_err(failed)?;
        }
        lap.busy(&stages.copy);
        stages.copy.add_bytes(batch.data.blocks() * BLOCK_SIZE_U64);
        Ok((Arc::new(batch), full))
    }
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
