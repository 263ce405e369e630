//! A lane at the destination: literals are unpacked, verified against the digests that were
//! announced, and written where they belong.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use drover_core::BLOCK_SIZE;
use drover_image::Layout;
use drover_index::digest_blocks;
use parking_lot::RwLock;
use tokio::sync::mpsc;

use super::destination::DriverEvent;
use crate::TeleportError;
use crate::codec::{Batch, Literal};
use crate::compress::Unpacker;
use crate::destination::Event;
use crate::files;
use crate::protocol::BATCH_BLOCKS;

/// The image that lanes are writing, as far as they must know it.
pub struct Incoming {
    /// Its place in the session.
    pub slot: u32,
    /// How it is walked.
    pub layout: Arc<Layout>,
    /// The partial file.
    pub part: Arc<File>,
    /// Its path, for messages.
    pub part_path: std::path::PathBuf,
    /// Batches that are not complete.
    pub open: RwLock<HashMap<u64, Arc<Batch>>>,
    /// To the driver.
    pub events: mpsc::Sender<DriverEvent>,
}

/// Buffers of a lane.
#[derive(Default)]
pub struct LaneIn {
    unpacker: Unpacker,
    blocks: Vec<u8>,
    digests: Vec<drover_core::Digest>,
}

impl LaneIn {
    /// Handles one literal frame.
    ///
    /// # Errors
    /// When the frame breaks the protocol, a block does not have its digest (the image changed at
    /// the source), or the file cannot be written.
    pub fn take(&mut self, literal: &Literal<'_>, image: &Incoming) -> Result<(), TeleportError> {
        let runs = &literal.header.runs;
        self.blocks.resize(runs.count() as usize * BLOCK_SIZE, 0);
        self.unpacker
            .unpack(literal.header.packing, literal.packed, &mut self.blocks)
            .map_err(|e| TeleportError::Protocol(e.to_string()))?;
        self.digests.clear();
        digest_blocks(&self.blocks, &mut self.digests);
        let expected = expected_digests(image, runs.blocks())?;
        if let Some(at) = (0..expected.len()).find(|&i| expected[i] != self.digests[i]) {
            let block = runs.blocks().nth(at).unwrap_or(0);
            return Err(TeleportError::Remote(format!(
                "block {block} is not what was announced: the image changed"
            )));
        }
        let mut at = 0;
        for (first, count) in runs.iter() {
            let end = at + count as usize * BLOCK_SIZE;
            files::write_walk(&image.part, &image.layout, first, &self.blocks[at..end])
                .map_err(TeleportError::file("write", &image.part_path))?;
            at = end;
        }
        let written = DriverEvent::Machine(Event::Written(runs.clone()));
        // The driver is gone only when the transfer has failed already.
        let _ = image.events.blocking_send(written);
        Ok(())
    }
}

/// The digests of blocks that were asked for, in order.
fn expected_digests(
    image: &Incoming,
    blocks: impl Iterator<Item = u64>,
) -> Result<Vec<drover_core::Digest>, TeleportError> {
    let open = image.open.read();
    let mut batch: Option<(&Arc<Batch>, u64)> = None;
    let mut rank = 0usize;
    let mut last = u64::MAX;
    let mut out = Vec::new();
    for block in blocks {
        let wrong =
            || TeleportError::Protocol(format!("block {block} came, which was not asked for"));
        let index = block / BATCH_BLOCKS;
        if batch.is_none_or(|(_, i)| i != index) {
            batch = Some((open.get(&index).ok_or_else(wrong)?, index));
            last = u64::MAX;
        }
        let Some((b, _)) = batch else {
            return Err(wrong());
        };
        let at = block % BATCH_BLOCKS;
        if !b.data.get(at) {
            return Err(wrong());
        }
        rank = if last != u64::MAX && last + 1 == block {
            rank + 1
        } else {
            b.data.rank(at) as usize
        };
        last = block;
        out.push(*b.digests.get(rank).ok_or_else(wrong)?);
    }
    Ok(out)
}
