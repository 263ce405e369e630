//! What every format comes down to: guest offsets mapped to file offsets.

use std::ops::Range;

use crate::ImageError;

/// Where some guest bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// In a file of the image (0 is the container itself), as they are.
    Data { file: usize, offset: u64 },
    /// In a compressed grain.
    Packed(Packed),
    /// Nowhere: they read as zeros.
    Zero,
    /// Nowhere in this image: what is behind it shows, zeros if nothing is.
    Unallocated,
}

/// A compressed grain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    /// The file of the image that has it.
    pub(crate) file: usize,
    /// Where its bytes start there.
    pub(crate) offset: u64,
    /// How many compressed bytes there may be.
    pub(crate) len: u64,
    /// The first guest byte of the grain.
    pub(crate) guest: u64,
}

/// A run of guest bytes that are all of one kind and, if data, contiguous in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Never zero. May reach past the end of the disk.
    pub(crate) len: u64,
    pub(crate) target: Target,
}

impl Run {
    /// The run that starts `within` bytes into a grain, of the grains that `targets` give from
    /// there on: as long as they are alike, or contiguous data. A compressed grain stays alone.
    pub(crate) fn joined(
        within: u64,
        grain: u64,
        targets: impl IntoIterator<Item = Result<Target, ImageError>>,
    ) -> Result<Run, ImageError> {
        let mut targets = targets.into_iter();
        let first = targets.next().unwrap_or(Ok(Target::Unallocated))?;
        let mut len = grain;
        for target in targets {
            let follows = match (first, target?) {
                (Target::Data { file: f, offset: a }, Target::Data { file: g, offset: b }) => {
                    f == g && a.checked_add(len) == Some(b)
                }
                (Target::Packed(_), _) => false,
                (a, b) => a == b,
            };
            if !follows {
                break;
            }
            len += grain;
        }
        let target = match first {
            Target::Data { file, offset } => Target::Data {
                file,
                offset: offset + within,
            },
            other => other,
        };
        Ok(Run {
            len: len - within,
            target,
        })
    }
}

/// A span of a container's own tables, and what it is.
pub(crate) type TableSpan = (Range<u64>, &'static str);

/// One container's map, read from its tables as it is asked for.
pub(crate) trait Mapping: Send + Sync {
    /// Bytes in the disk that the guest sees.
    fn virtual_size(&self) -> u64;

    /// The container's unit of allocation in bytes.
    fn grain(&self) -> u32;

    /// The run that starts at `guest`, which is below the virtual size.
    fn lookup(&self, guest: u64) -> Result<Run, ImageError>;

    /// Hands each span of the container's own tables to `sink`, and checks on the way that the
    /// tables form a tree. A walk by `lookup` is bounded by the file's size only after this.
    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError>;

    /// The guest bytes of a compressed grain that `lookup` returned.
    fn unpack(&self, packed: Packed) -> Result<Vec<u8>, ImageError> {
        let _ = packed;
        Err(ImageError::Unconvertible(
            "it has no compressed data".into(),
        ))
    }
}

/// The disk is the file: raw images, and flat extents of others.
pub(crate) struct Flat {
    pub(crate) size: u64,
    /// Where the disk starts in the file.
    pub(crate) offset: u64,
    pub(crate) file: usize,
}

impl Mapping for Flat {
    fn virtual_size(&self) -> u64 {
        self.size
    }

    fn grain(&self) -> u32 {
        4096
    }

    fn lookup(&self, guest: u64) -> Result<Run, ImageError> {
        Ok(Run {
            len: self.size - guest,
            target: Target::Data {
                file: self.file,
                offset: self.offset + guest,
            },
        })
    }

    fn tables(
        &self,
        _: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        Ok(())
    }
}
