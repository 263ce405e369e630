//! Where the blocks of a disk are in the file of its image.

use super::VirtualDisk;
use crate::ImageError;
use crate::mapping::Target;

/// A part of a disk that is stored as it is in the file of its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Where it begins in the disk, in bytes.
    pub guest: u64,
    /// Where it begins in the file.
    pub file: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl VirtualDisk {
    /// The parts of the disk that are stored as they are in the image's own file, in the disk's order; whether the file has holes there
    /// does not matter. What is compressed, or in other files, is left out. `None` if it takes more than `max` lookups in its tables.
    ///
    /// # Errors
    /// When the tables cannot be read, or are damaged.
    pub fn stored(&self, max: usize) -> Result<Option<Vec<Stored>>, ImageError> {
        let mut out: Vec<Stored> = Vec::new();
        let Some(own) = self.layers.first() else {
            return Ok(Some(out));
        };
        let (mut at, mut lookups) = (0, 0);
        while at < self.size {
            if lookups == max {
                return Ok(None);
            }
            lookups += 1;
            let run = own.mapping.lookup(at)?;
            let len = run.len.max(1).min(self.size - at);
            if let Target::Data { file: 0, offset } = run.target {
                match out.last_mut() {
                    Some(last) if last.guest + last.len == at && last.file + last.len == offset => {
                        last.len += len;
                    }
                    _ => out.push(Stored {
                        guest: at,
                        file: offset,
                        len,
                    }),
                }
            }
            at += len;
        }
        Ok(Some(out))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_raw_disk_is_stored_in_one_part() {
        let bytes: Arc<Vec<u8>> = Arc::new(vec![7; 8192]);
        let disk = VirtualDisk::from_content(bytes).unwrap();
        let all = Stored {
            guest: 0,
            file: 0,
            len: 8192,
        };
        assert_eq!(disk.stored(1).unwrap(), Some(vec![all]));
        assert_eq!(disk.stored(0).unwrap(), None);
    }
}
