//! Finds a file in a disk, to be copied out of it.

use std::ops::Range;

use drover_core::ReadAt;

use super::bounded::{Bounded, Stop};
use super::ext4::Ext4;
use super::partitions;

/// A file in a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// The number of its partition, from 1 on; 0 on a disk without a table.
    pub partition: usize,
    /// Its length in bytes.
    pub size: u64,
    /// Where its content is: an offset in the file, and a range of the disk, in order. The rest is zero.
    pub pieces: Vec<(u64, Range<u64>)>,
}

/// Why there is no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// No file system that can be read.
    #[error("there is no ext2, ext3 or ext4 file system in it")]
    NoFileSystem,
    /// Nothing at that path.
    #[error("there is no such file in it")]
    NotThere,
    /// A directory, or a device.
    #[error("that is no regular file")]
    NotAFile,
    /// The file system was in use, and its journal has changes that are not in their places.
    #[error("its file system was in use, and part of it is in its journal only")]
    InUse,
    /// A damaged file system, one with features that are not read here, or a file in too many pieces.
    #[error("it cannot be read here")]
    Unreadable,
    /// The disk failed.
    #[error("the disk cannot be read")]
    Io,
}

impl From<Stop> for FileError {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Io => FileError::Io,
            Stop::Limit | Stop::Unreadable => FileError::Unreadable,
        }
    }
}

/// Finds the file at an absolute path, in the first file system of the disk that has it; links are followed as the guest does. Bounded
/// as a [`look`](super::look); what is found lies within the disk.
///
/// # Errors
/// [`FileError`].
pub fn find_file(disk: &dyn ReadAt, path: &str) -> Result<FoundFile, FileError> {
    let mut disk = Bounded::new(disk);
    let (table, partitions) = partitions::of(&mut disk);
    let mut why = FileError::NoFileSystem;
    for (n, partition) in partitions.iter().enumerate() {
        let ext4 = match Ext4::open(&mut disk, partition.start..partition.end) {
            Ok(Some(ext4)) => ext4,
            Ok(None) => continue,
            Err(stop) => {
                why = stop.into();
                continue;
            }
        };
        let number = if table.is_some() { n + 1 } else { 0 };
        match in_this(&mut disk, &ext4, path) {
            Ok(found) => {
                return Ok(FoundFile {
                    partition: number,
                    ..found
                });
            }
            // What is known of one that can be read goes before one that cannot.
            Err(found) if why == FileError::NoFileSystem || found != FileError::NotThere => {
                why = found;
            }
            Err(_) => {}
        }
    }
    Err(why)
}

fn in_this(disk: &mut Bounded<'_>, fs: &Ext4, path: &str) -> Result<FoundFile, FileError> {
    if fs.needs_recovery() {
        return Err(FileError::InUse);
    }
    let inode = fs.find(disk, path)?.ok_or(FileError::NotThere)?;
    if !inode.is_file() {
        return Err(FileError::NotAFile);
    }
    Ok(FoundFile {
        partition: 0,
        size: inode.size,
        pieces: fs.pieces(disk, &inode)?,
    })
}
