//! The blocks of a partial file that came ahead of their batches, with their digests: a file `ahead` beside the log, in its
//! format. Nothing of it need be durable: a block counts only if it has its digest, and one that is not in it is asked for again.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, BlockIndex, Digest};
use drover_image::Layout;
use drover_index::digest_block;
use drover_storage::Disk;
use drover_store::DataBits;

use crate::TeleportError;
use crate::files::{digest_in_place, remove_dir};
use crate::log::{Log, LogReader, RecordKind};
use crate::protocol::BATCH_BLOCKS;

/// The file's name.
const AHEAD: &str = "ahead";

/// Bytes of an entry: the block, and its digest.
const ENTRY: usize = 8 + 32;

/// Removes the file of the transfer in `dir`, if there is one.
pub fn forget(dir: &Path) {
    let path = dir.join(AHEAD);
    if path.exists() {
        remove_dir(&path);
    }
}

/// The file, open for appending.
pub struct AheadLog(Log);

impl AheadLog {
    /// Opens the file of the transfer in `dir`, created if missing.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(dir: &Path, disk: &Arc<dyn Disk>) -> Result<Self, TeleportError> {
        let path = dir.join(AHEAD);
        if path.exists()
            && let Some(mut reader) = LogReader::open(&path)?
        {
            reader.by_ref().for_each(drop);
            return Ok(AheadLog(Log::reopen(&path, reader.valid_bytes(), disk)?));
        }
        forget(dir);
        Ok(AheadLog(Log::create(&path, disk)?))
    }

    /// Notes blocks with their digests.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn note(&mut self, blocks: &[(u64, Digest)]) -> Result<(), TeleportError> {
        let mut payload = Vec::with_capacity(blocks.len() * ENTRY);
        for (block, digest) in blocks {
            payload.extend_from_slice(&block.to_le_bytes());
            payload.extend_from_slice(&digest.0);
        }
        self.0.append(RecordKind::Ahead, &payload)
    }

    /// Makes it durable.
    ///
    /// # Errors
    /// I/O errors.
    pub fn sync(&self) -> Result<(), TeleportError> {
        self.0.sync()
    }
}

/// The blocks from batch `from` on that came ahead and are in the partial file, by batch: those that are not zeros, and those that
/// are.
///
/// # Errors
/// When a file cannot be read.
pub fn read_ahead(
    dir: &Path,
    part: &File,
    layout: &Layout,
    from: u64,
) -> Result<[HashMap<u64, DataBits>; 2], TeleportError> {
    let mut found: [HashMap<u64, DataBits>; 2] = Default::default();
    let path = dir.join(AHEAD);
    let reader = match path.exists() {
        true => LogReader::open(&path)?,
        false => None,
    };
    let zero = digest_block(&[0; BLOCK_SIZE]);
    let walk_blocks = layout.walk_blocks();
    for record in reader.into_iter().flatten() {
        if record.kind != RecordKind::Ahead {
            break;
        }
        for entry in record.payload.chunks_exact(ENTRY) {
            let (block, digest) = entry.split_at(8);
            let block = u64::from_le_bytes(block.try_into().unwrap_or_default());
            if block >= walk_blocks || block / BATCH_BLOCKS < from {
                continue;
            }
            let mut now = Vec::with_capacity(1);
            digest_in_place(part, layout, &[(BlockIndex(block), 1)], &mut now)
                .map_err(TeleportError::file("read", dir.join("image.part")))?;
            if now.first().is_some_and(|now| now.0 == digest) {
                let of = &mut found[usize::from(digest == zero.0)];
                let bits = of.entry(block / BATCH_BLOCKS);
                let bits = bits.or_insert_with(|| DataBits::new(BATCH_BLOCKS));
                bits.set(block % BATCH_BLOCKS);
            }
        }
    }
    Ok(found)
}
