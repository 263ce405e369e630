//! The copy-before-write store: the old bytes of subchunks overwritten while an epoch containing them is being pushed.
//! In memory up to a limit, then in an unnamed sparse file, each subchunk at its own offset.

use std::collections::HashMap;

use drover_core::DeviceError;

use super::cache::Cache;
use drover_storage::{File, read_exact_at};

/// Limit of the bytes kept in memory.
const IN_MEMORY: u64 = 32 << 20;

/// Keyed by a subchunk's offset in the device; each is kept at most once. Cleared when the epoch ends.
#[derive(Default)]
pub struct CopyBeforeWrite {
    kept: HashMap<u64, Vec<u8>>,
    bytes: u64,
    file: Option<Box<dyn File>>,
    /// Upper bound of the bytes in the file.
    filed: u64,
}

impl CopyBeforeWrite {
    /// Keeps the bytes of a subchunk; none means zeros.
    pub fn keep(
        &mut self,
        offset: u64,
        bytes: Option<Vec<u8>>,
        cache: &Cache,
    ) -> Result<(), DeviceError> {
        // Holes in the file read as zeros.
        let Some(bytes) = bytes else { return Ok(()) };
        let length = bytes.len() as u64;
        if self.bytes + length <= IN_MEMORY {
            self.bytes += length;
            self.kept.insert(offset, bytes);
            return Ok(());
        }
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(cache.copy_before()?),
        };
        // Counted before the result: a failed write may take space too.
        self.filed += length;
        Ok(file.write_at(&bytes, offset)?)
    }

    /// The bytes of a subchunk that was kept.
    pub fn get(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        match (self.kept.get(&offset), &self.file) {
            (Some(bytes), _) if bytes.len() == buffer.len() => buffer.copy_from_slice(bytes),
            (Some(_), _) => {
                return Err(DeviceError::Corrupt(format!(
                    "what was at {offset} before an overwrite was not kept"
                )));
            }
            (None, Some(file)) => read_exact_at(file.as_ref(), buffer, offset)?,
            (None, None) => buffer.fill(0),
        }
        Ok(())
    }

    /// Whether it occupies disk space.
    pub fn takes_room(&self) -> bool {
        self.filed > 0
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
