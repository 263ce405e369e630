//! The interface of all formats: the mapping from guest offsets to file offsets.

use std::ops::Range;

use crate::ImageError;

/// The location of guest bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Stored uncompressed in a file of the image (0 is the container itself).
    Data { file: usize, offset: u64 },
    /// In a compressed grain.
    Packed(Packed),
    /// Not stored: reads as zeros.
    Zero,
    /// Not in this image: reads from the backing file, or as zeros without one.
    Unallocated,
}

/// A compressed grain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    /// The file of the image that has it.
    pub(crate) file: usize,
    /// Offset of the compressed data.
    pub(crate) offset: u64,
    /// Upper bound on the length of the compressed data.
    pub(crate) len: u64,
    /// The first guest byte of the grain.
    pub(crate) guest: u64,
}

/// A run of guest bytes of one kind, contiguous in one file if data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Never zero. May extend past the end of the disk.
    pub(crate) len: u64,
    pub(crate) target: Target,
}

impl Run {
    /// The run that starts `within` bytes into a grain, with `targets` giving that grain and the following ones:
    /// extends over grains of the same kind, or contiguous data. A compressed grain is a run of its own.
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

/// A span of a container's own tables, and its name.
pub(crate) type TableSpan = (Range<u64>, &'static str);

/// The mapping of one container, which reads its tables on demand.
pub(crate) trait Mapping: Send + Sync {
    /// The virtual disk size in bytes.
    fn virtual_size(&self) -> u64;

    /// The allocation unit in bytes.
    fn grain(&self) -> u32;

    /// The run that starts at `guest`, which is below the virtual size.
    fn lookup(&self, guest: u64) -> Result<Run, ImageError>;

    /// Passes each span of the container's own tables to `sink`, and checks that the tables form a tree. Only after
    /// this is a walk by `lookup` bounded by the file's size.
    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError>;

    /// Decompresses a grain that `lookup` returned.
    fn unpack(&self, packed: Packed) -> Result<Vec<u8>, ImageError> {
        let _ = packed;
        Err(ImageError::Unconvertible(
            "it has no compressed data".into(),
        ))
    }
}

/// The identity mapping: raw images, and flat extents of others.
pub(crate) struct Flat {
    pub(crate) size: u64,
    /// The offset of the disk in the file.
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
