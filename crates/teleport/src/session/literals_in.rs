//! A data connection at the destination: literals are decompressed, verified against the announced digests, and
//! written in place.

use std::collections::HashMap;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, BlockIndex, Digest};
use drover_image::Layout;
use drover_index::digest_blocks;
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc;

use super::activity::Activity;
use super::destination::{DriverEvent, Flow};
use crate::TeleportError;
use crate::codec::{Batch, Literal};
use crate::compress::Unpacker;
use crate::destination::Event;
use crate::files;
use crate::protocol::BATCH_BLOCKS;
use crate::stages::{DestinationStages, Lap};
use drover_storage::SyncedFile;

/// The image that data connections are writing, as far as they need to know it.
pub struct Incoming {
    /// Its number in the session.
    pub slot: u32,
    /// How the file is laid out for the walk.
    pub layout: Arc<Layout>,
    /// The partial file.
    pub part: Arc<SyncedFile>,
    /// Its path, for messages.
    pub part_path: std::path::PathBuf,
    /// Incomplete batches.
    pub open: RwLock<HashMap<u64, Arc<OpenBatch>>>,
    /// Events for the driver.
    pub events: mpsc::Sender<DriverEvent>,
    /// Time spent in each stage.
    pub stages: Arc<DestinationStages>,
    /// Whether anything of its session moves.
    pub activity: Arc<Activity>,
    /// What has come, and is to come.
    pub flow: Arc<Flow>,
}

/// An incomplete batch, and the full digests of its data blocks that are in place.
pub struct OpenBatch {
    /// The batch.
    pub batch: Arc<Batch>,
    /// Zero where a block is not in place.
    pub full: Mutex<Vec<Digest>>,
}

impl OpenBatch {
    /// A batch none of whose blocks is in place.
    pub fn new(batch: Arc<Batch>) -> Self {
        let full = Mutex::new(vec![Digest::default(); batch.digests.len()]);
        OpenBatch { batch, full }
    }
}

/// Receiver with the buffers of one data connection.
#[derive(Default)]
pub struct LiteralReceiver {
    unpacker: Unpacker,
    blocks: Vec<u8>,
    digests: Vec<Digest>,
}

impl LiteralReceiver {
    /// Handles one literal frame.
    ///
    /// # Errors
    /// When the frame violates the protocol, a block does not match its digest (the image changed at the source), or
    /// the file cannot be written.
    pub fn take(&mut self, literal: &Literal<'_>, image: &Incoming) -> Result<(), TeleportError> {
        let runs = &literal.header.runs;
        let (stages, mut lap) = (&*image.stages, Lap::start());
        self.blocks.resize(runs.count() as usize * BLOCK_SIZE, 0);
        self.unpacker
            .unpack(literal.header.packing, literal.packed, &mut self.blocks)
            .map_err(|e| TeleportError::Protocol(e.to_string()))?;
        lap.busy(&stages.unpack);
        self.digests.clear();
        digest_blocks(&self.blocks, &mut self.digests);
        if let Some(block) = note_digests(image, runs.blocks(), &self.digests)? {
            return Err(TeleportError::NotAnnounced(block));
        }
        lap.busy(&stages.verify);
        let mut at = 0;
        for (first, count) in runs.iter() {
            let end = at + count as usize * BLOCK_SIZE;
            files::write_walk(
                &image.part,
                &image.layout,
                BlockIndex(first),
                &self.blocks[at..end],
            )
            .map_err(TeleportError::file("write", &image.part_path))?;
            at = end;
        }
        lap.busy(&stages.write);
        for stage in [&stages.unpack, &stages.verify, &stages.write] {
            stage.add_bytes(at as u64);
        }
        let written = DriverEvent::Machine(Event::Written(runs.clone()));
        // The driver is gone only when the transfer has failed already.
        let _ = image.events.blocking_send(written);
        lap.wait(&stages.write);
        Ok(())
    }
}

/// Records the digests of received blocks; returns a block whose digest is not the announced one, if any.
pub fn note_digests(
    image: &Incoming,
    blocks: impl Iterator<Item = u64>,
    digests: &[Digest],
) -> Result<Option<u64>, TeleportError> {
    let open = image.open.read();
    let mut blocks = blocks.zip(digests).peekable();
    while let Some((first, _)) = blocks.peek() {
        let index = first / BATCH_BLOCKS;
        let wrong = |b: u64| {
            TeleportError::Protocol(format!("received block {b}, which was not requested"))
        };
        let entry = open.get(&index).ok_or_else(|| wrong(*first))?;
        let (batch, mut full) = (&entry.batch, entry.full.lock());
        let (mut rank, mut last) = (0usize, None);
        while let Some((block, digest)) = blocks.next_if(|(b, _)| b / BATCH_BLOCKS == index) {
            let at = block % BATCH_BLOCKS;
            if !batch.data.get(at) {
                return Err(wrong(block));
            }
            let follows = last == Some(block.wrapping_sub(1));
            rank = if follows {
                rank + 1
            } else {
                batch.data.rank(at) as usize
            };
            last = Some(block);
            if batch.digests.get(rank) != Some(&digest.short()) {
                return Ok(Some(block));
            }
            full[rank] = *digest;
        }
    }
    Ok(None)
}
