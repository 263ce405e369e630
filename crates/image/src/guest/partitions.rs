//! Partition tables: MBR with logical partitions, and GPT.

use super::bounded::{Bounded, Stop, le16, le32, le64};
use super::filesystem::{self, FileSystem};

/// Upper bound on the partitions of a disk that are looked at.
const MAX_PARTITIONS: usize = 128;

/// Bytes of a sector, as tables count them; GPT may count in 4096.
const SECTOR: u64 = 512;

/// The kind of a partition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PartitionTable {
    /// A master boot record.
    Mbr,
    /// GUID partition table.
    Gpt,
}

/// What a partition is for, as its table says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Use {
    /// The system partition of UEFI, with boot loaders.
    EfiSystem,
    /// Holds the boot loader of a BIOS.
    BiosBoot,
    /// Anything else.
    Other,
}

/// A partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Where it begins, in bytes.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
    /// What it is for.
    pub use_: Use,
    /// What it holds, if that is known here.
    pub file_system: Option<FileSystem>,
}

const EFI_SYSTEM: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];

const BIOS_BOOT: &[u8; 16] = b"Hah!IdontNeedEFI";

/// The partitions of a disk; the whole disk is one if there is no table.
pub(super) fn of(disk: &mut Bounded<'_>) -> (Option<PartitionTable>, Vec<Partition>) {
    // A file system may begin with a boot sector that looks like a table.
    let whole = filesystem::at(disk, 0);
    let mut found = Vec::new();
    let table = match whole {
        Some(_) => None,
        // What was found before an error stays.
        None => read(disk, &mut found).unwrap_or(None),
    };
    let length = disk.len();
    found.retain_mut(|p: &mut Partition| {
        p.end = p.end.min(length);
        p.start < p.end
    });
    for partition in &mut found {
        partition.file_system = filesystem::at(disk, partition.start);
    }
    if table.is_none() {
        found = vec![Partition {
            start: 0,
            end: length,
            use_: Use::Other,
            file_system: whole,
        }];
    }
    (table, found)
}

fn read(
    disk: &mut Bounded<'_>,
    found: &mut Vec<Partition>,
) -> Result<Option<PartitionTable>, Stop> {
    let sector: [u8; 512] = disk.bytes(0)?;
    if le16(&sector, 510) != 0xaa55 {
        return Ok(None);
    }
    if entries(&sector).any(|(kind, ..)| kind == 0xee) {
        for size in [SECTOR, 4096] {
            if gpt(disk, size, found)? {
                return Ok(Some(PartitionTable::Gpt));
            }
        }
        return Ok(None);
    }
    let mut any = false;
    for (kind, first, sectors) in entries(&sector) {
        any = true;
        match kind {
            5 | 0xf | 0x85 => logical(disk, first, found),
            _ => found.push(partition(first, sectors, kind)),
        }
    }
    Ok(any.then_some(PartitionTable::Mbr))
}

/// The used entries of an MBR: type, first sector, sectors.
fn entries(sector: &[u8; 512]) -> impl Iterator<Item = (u8, u64, u64)> + '_ {
    let all = sector[446..510].chunks_exact(16);
    let all = all.map(|e| (e[4], u64::from(le32(e, 8)), u64::from(le32(e, 12))));
    all.filter(|(kind, _, sectors)| *kind != 0 && *sectors > 0)
}

fn partition(first: u64, sectors: u64, kind: u8) -> Partition {
    Partition {
        start: first * SECTOR,
        end: (first + sectors) * SECTOR,
        use_: match kind {
            0xef => Use::EfiSystem,
            _ => Use::Other,
        },
        file_system: None,
    }
}

/// The partitions inside an extended one: each has a table with itself and the next.
fn logical(disk: &mut Bounded<'_>, extended: u64, found: &mut Vec<Partition>) {
    let mut at = extended;
    while found.len() < MAX_PARTITIONS {
        let Ok(sector) = disk.bytes::<512>(at * SECTOR) else {
            return;
        };
        if le16(&sector, 510) != 0xaa55 {
            return;
        }
        let mut next = None;
        for (kind, first, sectors) in entries(&sector) {
            match kind {
                5 | 0xf | 0x85 => next = Some(extended + first),
                _ if found.len() < MAX_PARTITIONS => {
                    found.push(partition(at + first, sectors, kind));
                }
                _ => {}
            }
        }
        match next {
            Some(next) if next > at => at = next,
            _ => return,
        }
    }
}

fn gpt(disk: &mut Bounded<'_>, sector: u64, found: &mut Vec<Partition>) -> Result<bool, Stop> {
    let header: [u8; 92] = disk.bytes(sector)?;
    if !header.starts_with(b"EFI PART") {
        return Ok(false);
    }
    let entries = le64(&header, 72).checked_mul(sector);
    let (count, size) = (le32(&header, 80), u64::from(le32(&header, 84)));
    let Some(entries) = entries.filter(|_| (128..=4096).contains(&size)) else {
        return Ok(false);
    };
    for i in 0..u64::from(count).min(MAX_PARTITIONS as u64) {
        let at = entries.checked_add(i * size).ok_or(Stop::Unreadable)?;
        let entry: [u8; 48] = disk.bytes(at)?;
        if entry[..16] == [0; 16] {
            continue;
        }
        let start = le64(&entry, 32).checked_mul(sector);
        let end = le64(&entry, 40).checked_add(1);
        let end = end.and_then(|end| end.checked_mul(sector));
        let (Some(start), Some(end)) = (start, end) else {
            continue;
        };
        found.push(Partition {
            start,
            end,
            use_: match () {
                () if entry[..16] == EFI_SYSTEM => Use::EfiSystem,
                () if entry[..16] == *BIOS_BOOT => Use::BiosBoot,
                () => Use::Other,
            },
            file_system: None,
        });
    }
    Ok(true)
}
