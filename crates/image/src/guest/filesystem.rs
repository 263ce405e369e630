//! Recognises file systems, and what else a partition may hold, by their magic numbers.

use std::fmt;

use super::bounded::{Bounded, le16, le32};

/// What a partition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum FileSystem {
    Ext2,
    Ext3,
    Ext4,
    Xfs,
    Btrfs,
    Ntfs,
    Exfat,
    Fat,
    F2fs,
    Squashfs,
    Iso9660,
    Swap,
    /// A physical volume of LVM.
    Lvm,
    /// Encrypted by LUKS.
    Luks,
    /// A member of a Linux software RAID.
    Raid,
}

impl FileSystem {
    pub(super) const ALL: [FileSystem; 15] = [
        FileSystem::Ext2,
        FileSystem::Ext3,
        FileSystem::Ext4,
        FileSystem::Xfs,
        FileSystem::Btrfs,
        FileSystem::Ntfs,
        FileSystem::Exfat,
        FileSystem::Fat,
        FileSystem::F2fs,
        FileSystem::Squashfs,
        FileSystem::Iso9660,
        FileSystem::Swap,
        FileSystem::Lvm,
        FileSystem::Luks,
        FileSystem::Raid,
    ];

    /// Its name, as tools write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FileSystem::Ext2 => "ext2",
            FileSystem::Ext3 => "ext3",
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
            FileSystem::Btrfs => "btrfs",
            FileSystem::Ntfs => "ntfs",
            FileSystem::Exfat => "exfat",
            FileSystem::Fat => "vfat",
            FileSystem::F2fs => "f2fs",
            FileSystem::Squashfs => "squashfs",
            FileSystem::Iso9660 => "iso9660",
            FileSystem::Swap => "swap",
            FileSystem::Lvm => "lvm",
            FileSystem::Luks => "luks",
            FileSystem::Raid => "raid",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A magic number: where it is, and what it says.
const MAGIC: &[(u64, &[u8], FileSystem)] = &[
    (0, b"XFSB", FileSystem::Xfs),
    (0, b"LUKS\xba\xbe", FileSystem::Luks),
    (0, b"hsqs", FileSystem::Squashfs),
    (3, b"NTFS    ", FileSystem::Ntfs),
    (3, b"EXFAT   ", FileSystem::Exfat),
    (82, b"FAT32", FileSystem::Fat),
    (54, b"FAT1", FileSystem::Fat),
    (536, b"LVM2 001", FileSystem::Lvm),
    (1024, b"\x10\x20\xf5\xf2", FileSystem::F2fs),
    (4086, b"SWAPSPACE2", FileSystem::Swap),
    (4096, b"\xfc\x4e\x2b\xa9", FileSystem::Raid),
    (32_769, b"CD001", FileSystem::Iso9660),
    (65_600, b"_BHRfS_M", FileSystem::Btrfs),
];

/// Offset of the superblock of ext2, ext3 and ext4.
const EXT_SUPERBLOCK: u64 = 1024;

/// What is at `start` of the disk.
pub(super) fn at(disk: &mut Bounded<'_>, start: u64) -> Option<FileSystem> {
    let mut found = |offset: u64, magic: &[u8]| {
        let mut bytes = [0; 16];
        let bytes = &mut bytes[..magic.len().min(16)];
        start
            .checked_add(offset)
            .is_some_and(|at| disk.read(at, bytes).is_ok() && *bytes == *magic)
    };
    let magic = MAGIC.iter().find(|(at, magic, _)| found(*at, magic));
    if let Some((_, _, kind)) = magic {
        return Some(*kind);
    }
    let superblock: [u8; 256] = disk.bytes(start.checked_add(EXT_SUPERBLOCK)?).ok()?;
    if le16(&superblock, 0x38) != 0xef53 {
        return None;
    }
    let has = |at, bits| le32(&superblock, at) & bits != 0;
    // Extents, 64 bits or flexible groups; or checksums of metadata.
    Some(match () {
        () if has(0x60, 0x2c0) || has(0x64, 0x400) => FileSystem::Ext4,
        () if has(0x5c, 4) => FileSystem::Ext3,
        () => FileSystem::Ext2,
    })
}
