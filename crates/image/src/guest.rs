//! A look inside a guest's disk: its partitions, their file systems, and what an ext2, ext3 or ext4 file system says about
//! the operating system: its name and version, the host name, the installed packages. Other file systems are only named.
//!
//! What is found is a hint, made from untrusted bytes: nothing depends on it but which images are compared and which blocks
//! are read early. A look reads at most [`MAX_LOOK_BYTES`] in at most [`MAX_LOOK_READS`] reads, also from a damaged or hostile
//! disk, and holds no more than what it returns and 256 KiB; it ends with what it has found until then. A journal is not
//! replayed: of a disk that was not unmounted, the last changes may be missing.

mod boot;
mod bounded;
mod ext4;
mod files;
mod filesystem;
mod partitions;
mod system;
#[cfg(test)]
mod tests;

use drover_core::ReadAt;

pub use boot::{MAX_BOOT_BYTES, MAX_BOOT_RANGES, boot_ranges};
pub use bounded::{MAX_LOOK_BYTES, MAX_LOOK_READS};
pub use files::{FileError, FoundFile, find_file};
pub use filesystem::FileSystem;
pub use partitions::{Partition, PartitionTable, Use};
pub use system::{MAX_PACKAGES, Package, System};

use bounded::Bounded;
use ext4::Ext4;

/// What a look inside a disk has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Guest {
    /// The kind of its partition table; `None` when it has none that is known.
    pub table: Option<PartitionTable>,
    /// Its partitions, as their table lists them; a disk without a table is one partition.
    pub partitions: Vec<Partition>,
    /// The operating system, if one was found.
    pub system: Option<System>,
    /// The kind of the file system with the operating system, or else of the largest one.
    pub file_system: Option<FileSystem>,
    /// Bytes of the disk that were read.
    pub read_bytes: u64,
}

/// Looks inside a disk: the whole of it, as its guest sees it.
#[must_use]
pub fn look(disk: &dyn ReadAt) -> Guest {
    let mut disk = Bounded::new(disk);
    let (table, partitions) = partitions::of(&mut disk);
    let mut system = None;
    let mut file_system = None;
    for partition in &partitions {
        // Another file system may still be readable.
        let Ok(Some(ext4)) = Ext4::open(&mut disk, partition.start..partition.end) else {
            continue;
        };
        system = system::of(&mut disk, &ext4);
        if system.is_some() {
            file_system = partition.file_system;
            break;
        }
    }
    let largest = partitions.iter().filter(|p| p.file_system.is_some());
    let largest = largest.max_by_key(|p| p.end - p.start);
    Guest {
        table,
        system,
        file_system: file_system.or_else(|| largest.and_then(|p| p.file_system)),
        read_bytes: disk.read_bytes(),
        partitions,
    }
}
