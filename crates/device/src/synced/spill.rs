//! What granules held when an epoch was frozen, if they were overwritten before the pusher had read them: in memory up
//! to a limit, then in a file without a name.

use std::collections::HashMap;

use drover_core::DeviceError;

use super::cache::Cache;
use crate::storage::{File, read_exact_at};

/// Bytes kept in memory.
const IN_MEMORY: u64 = 32 << 20;

enum Kept {
    Zeros,
    Memory(Vec<u8>),
    /// Where in the file.
    File(u64),
}

/// By a granule's offset in the device. Emptied when the epoch is over.
#[derive(Default)]
pub struct Spill {
    kept: HashMap<u64, Kept>,
    bytes: u64,
    file: Option<Box<dyn File>>,
    end: u64,
}

impl Spill {
    /// Keeps the bytes of a granule; none are zeros.
    pub fn keep(
        &mut self,
        offset: u64,
        bytes: Option<Vec<u8>>,
        cache: &Cache,
    ) -> Result<(), DeviceError> {
        let kept = match bytes {
            None => Kept::Zeros,
            Some(bytes) if self.bytes + bytes.len() as u64 <= IN_MEMORY => {
                self.bytes += bytes.len() as u64;
                Kept::Memory(bytes)
            }
            Some(bytes) => {
                let file = match &self.file {
                    Some(file) => file,
                    None => self.file.insert(cache.spill()?),
                };
                file.write_at(&bytes, self.end)?;
                self.end += bytes.len() as u64;
                Kept::File(self.end - bytes.len() as u64)
            }
        };
        self.kept.insert(offset, kept);
        Ok(())
    }

    /// The bytes of a granule that was kept.
    pub fn get(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        match (self.kept.get(&offset), &self.file) {
            (Some(Kept::Zeros), _) => buffer.fill(0),
            (Some(Kept::Memory(bytes)), _) if bytes.len() == buffer.len() => {
                buffer.copy_from_slice(bytes);
            }
            (Some(Kept::File(at)), Some(file)) => read_exact_at(file.as_ref(), buffer, *at)?,
            _ => {
                return Err(DeviceError::Corrupt(format!(
                    "what was at {offset} before an overwrite was not kept"
                )));
            }
        }
        Ok(())
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
