//! Hyper-V's vhdx: fixed and dynamic. Images with a log still to be replayed are refused, since their tables are not up
//! to date; differencing images are refused, too.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use drover_core::ReadAt;

use crate::container::Container;
use crate::limits::{MAX_GRAIN_BYTES, MAX_VHDX_LOG_BYTES};
use crate::mapping::{Mapping, Run, TableSpan, Target};
use crate::reader::{Reader, le16, le32, le64};
use crate::{Format, ImageError};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const HEADERS: [u64; 2] = [64 * KIB, 128 * KIB];
const REGION_TABLES: [u64; 2] = [192 * KIB, 256 * KIB];
const REGION_TABLE_BYTES: usize = 64 << 10;
const MAX_ENTRIES: usize = 2047;
/// Alignment of log entries.
const LOG_STEP: u64 = 4 * KIB;

/// GUIDs in the file's byte order.
type Guid = [u8; 16];
const REGION_BAT: Guid = guid(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
const REGION_METADATA: Guid = guid(0x8b7c_a206, 0x4790, 0x4b9a, 0xb8fe_575f_050f_886e);
const FILE_PARAMETERS: Guid = guid(0xcaa1_6737, 0xfa36, 0x4d43, 0xb3b6_33f0_aa44_e76b);
const DISK_SIZE: Guid = guid(0x2fa5_4224, 0xcd1b, 0x4876, 0xb211_5dbe_d83b_f4b8);
const PAGE_83: Guid = guid(0xbeca_12ab, 0xb2e6, 0x4523, 0x93ef_c309_e000_c746);
const LOGICAL_SECTOR: Guid = guid(0x8141_bf1d, 0xa96f, 0x4709, 0xba47_f233_a8fa_ab5f);
const PHYSICAL_SECTOR: Guid = guid(0xcda3_48c7, 0x445d, 0x4471, 0x9cc9_e988_5251_c556);
const PARENT: Guid = guid(0xa8d3_5f2d, 0xb30b, 0x454d, 0xabf7_d3d8_4834_ab0c);

const fn guid(a: u32, b: u16, c: u16, d: u64) -> Guid {
    let (a, b, c, d) = (
        a.to_le_bytes(),
        b.to_le_bytes(),
        c.to_le_bytes(),
        d.to_be_bytes(),
    );
    [
        a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], d[0], d[1], d[2], d[3], d[4], d[5], d[6],
        d[7],
    ]
}

struct Vhdx {
    file: Reader,
    size: u64,
    block: u64,
    /// Payload entries between two sector bitmap entries.
    chunk: u64,
    bat: Region,
    metadata: Region,
    log: Region,
}

#[derive(Debug, Clone, Copy)]
struct Region {
    offset: u64,
    len: u64,
}

/// The disk's parameters from the metadata region.
struct DiskMetadata {
    size: u64,
    block: u64,
    sector: u64,
}

/// Parses a file with vhdx's signature.
pub(crate) fn open(file: &Arc<dyn ReadAt>) -> Result<Container, ImageError> {
    let file = Reader::new(Arc::clone(file), Format::Vhdx);
    let header = current_header(&file)?;
    let log = Region {
        offset: le64(&header, 72),
        len: u64::from(le32(&header, 68)),
    };
    refuse_pending_log(&file, &header, log)?;
    let (bat, metadata) = regions(&file)?;
    let facts = facts(&file, metadata)?;
    let chunk = (1u64 << 23) * facts.sector / facts.block;
    let payloads = facts.size.div_ceil(facts.block);
    // One sector bitmap entry after each chunk but the last.
    let entries = payloads + payloads.saturating_sub(1) / chunk;
    if entries.checked_mul(8).is_none_or(|bytes| bytes > bat.len) {
        return Err(file.damaged(
            "block table",
            format!(
                "{} bytes are too few for a disk of {} bytes",
                bat.len, facts.size
            ),
        ));
    }
    Ok(Container::mapped(
        Format::Vhdx,
        Vhdx {
            size: facts.size,
            block: facts.block,
            chunk,
            bat,
            metadata,
            log,
            file,
        },
    ))
}

/// CRC-32C of `bytes`, with the checksum field (4 bytes at offset 4) taken as zero.
fn checksum_matches(bytes: &mut [u8]) -> bool {
    let stored = le32(bytes, 4);
    bytes[4..8].fill(0);
    let actual = checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    bytes[4..8].copy_from_slice(&stored.to_le_bytes());
    // Fuzzers would never get past it.
    stored == actual || cfg!(fuzzing)
}

/// The newer of the valid headers.
fn current_header(file: &Reader) -> Result<Vec<u8>, ImageError> {
    let mut best: Option<(u64, Vec<u8>)> = None;
    for at in HEADERS {
        let mut raw = vec![0; 4096];
        file.read(at, &mut raw, "header")?;
        if !raw.starts_with(b"head") || !checksum_matches(&mut raw) {
            continue;
        }
        let sequence = le64(&raw, 8);
        if best.as_ref().is_none_or(|(s, _)| *s < sequence) {
            best = Some((sequence, raw));
        }
    }
    let (_, header) =
        best.ok_or_else(|| file.damaged("header", "neither of its two copies is whole"))?;
    let (version, log_version) = (le16(&header, 66), le16(&header, 64));
    if version != 1 || log_version != 0 {
        return Err(file.unsupported(format!("has the unknown version {version}.{log_version}")));
    }
    Ok(header)
}

/// Refuses a log that still has to be replayed: the header names it, and it has an entry of that name.
fn refuse_pending_log(file: &Reader, header: &[u8], log: Region) -> Result<(), ImageError> {
    let name = &header[48..64];
    if log.len == 0 {
        return Ok(());
    }
    if !log.offset.is_multiple_of(MIB) || !log.len.is_multiple_of(MIB) {
        return Err(file.damaged("log", format!("it lies at {:#x}", log.offset)));
    }
    file.inside(log.offset, log.len, "log")?;
    if name.iter().all(|&b| b == 0) {
        return Ok(());
    }
    let pending = || {
        Err(file.unsupported(
            "was not closed cleanly: its log must be replayed first \
             (attach it once in Hyper-V, or run `qemu-img check -r all`)",
        ))
    };
    if log.len > MAX_VHDX_LOG_BYTES {
        return pending();
    }
    for at in (0..log.len).step_by(LOG_STEP as usize) {
        let mut entry = [0u8; 64];
        file.read(log.offset + at, &mut entry, "log")?;
        if entry.starts_with(b"loge") && entry[32..48] == *name {
            return pending();
        }
    }
    Ok(())
}

/// The block table and the metadata region.
fn regions(file: &Reader) -> Result<(Region, Region), ImageError> {
    const FIELD: &str = "region table";
    let mut raw = vec![0; REGION_TABLE_BYTES];
    let mut whole = false;
    for at in REGION_TABLES {
        file.read(at, &mut raw, FIELD)?;
        whole = raw.starts_with(b"regi") && checksum_matches(&mut raw);
        if whole {
            break;
        }
    }
    let entries = le32(&raw, 8) as usize;
    if !whole || entries > MAX_ENTRIES {
        return Err(file.damaged(FIELD, "neither of its two copies is whole"));
    }
    let (mut bat, mut metadata) = (None, None);
    for entry in raw[16..].chunks_exact(32).take(entries) {
        let region = Region {
            offset: le64(entry, 16),
            len: u64::from(le32(entry, 24)),
        };
        let slot = if entry[..16] == REGION_BAT {
            &mut bat
        } else if entry[..16] == REGION_METADATA {
            &mut metadata
        } else if le32(entry, 28) & 1 != 0 {
            return Err(file.unsupported("needs a region that is not known"));
        } else {
            continue;
        };
        if region.offset < MIB || !region.offset.is_multiple_of(MIB) {
            return Err(file.damaged(FIELD, format!("a region at {:#x}", region.offset)));
        }
        file.inside(region.offset, region.len, FIELD)?;
        if slot.replace(region).is_some() {
            return Err(file.damaged(FIELD, "a region is listed twice"));
        }
    }
    bat.zip(metadata)
        .ok_or_else(|| file.damaged(FIELD, "the block table or the metadata is missing"))
}

fn facts(file: &Reader, region: Region) -> Result<DiskMetadata, ImageError> {
    const FIELD: &str = "metadata";
    if region.len < REGION_TABLE_BYTES as u64 {
        return Err(file.damaged(FIELD, format!("a region of {} bytes", region.len)));
    }
    let mut raw = vec![0; REGION_TABLE_BYTES];
    file.read(region.offset, &mut raw, FIELD)?;
    let entries = usize::from(le16(&raw, 10));
    if !raw.starts_with(b"metadata") || entries > MAX_ENTRIES {
        return Err(file.damaged(FIELD, "its table is not whole"));
    }
    let (mut size, mut parameters, mut sector) = (None, None, None);
    for entry in raw[32..].chunks_exact(32).take(entries) {
        let (offset, len) = (u64::from(le32(entry, 16)), u64::from(le32(entry, 20)));
        let item: Guid = entry[..16].try_into().unwrap_or_default();
        if item == PARENT {
            return Err(file.unsupported("is a difference to another image"));
        }
        let slot = match item {
            DISK_SIZE => &mut size,
            FILE_PARAMETERS => &mut parameters,
            LOGICAL_SECTOR => &mut sector,
            PAGE_83 | PHYSICAL_SECTOR => continue,
            _ if le32(entry, 24) & 4 != 0 => {
                return Err(file.unsupported("needs metadata that is not known"));
            }
            _ => continue,
        };
        if offset + len > region.len || len < 4 {
            return Err(file.damaged(FIELD, format!("an item of {len} bytes at {offset:#x}")));
        }
        let mut value = [0u8; 8];
        let n = value.len().min(len as usize);
        file.read(region.offset + offset, &mut value[..n], FIELD)?;
        *slot = Some(u64::from_le_bytes(value));
    }
    let (Some(size), Some(parameters), Some(sector)) = (size, parameters, sector) else {
        return Err(file.damaged(FIELD, "the size, block size or sector size is missing"));
    };
    let (block, flags, sector) = (
        parameters & u64::from(u32::MAX),
        parameters >> 32,
        sector & u64::from(u32::MAX),
    );
    if flags & 2 != 0 {
        return Err(file.unsupported("is a difference to another image"));
    }
    if !block.is_power_of_two() || !(MIB..=MAX_GRAIN_BYTES).contains(&block) {
        return Err(file.damaged("block size", format!("{block} bytes")));
    }
    if sector != 512 && sector != 4096 {
        return Err(file.damaged("sector size", format!("{sector} bytes")));
    }
    if size % sector != 0 {
        return Err(file.damaged("disk size", format!("{size} bytes")));
    }
    Ok(DiskMetadata {
        size,
        block,
        sector,
    })
}

impl Vhdx {
    fn target(&self, entry: u64) -> Result<Target, ImageError> {
        match entry & 7 {
            // Not present; undefined.
            0 | 1 => Ok(Target::Unallocated),
            // Zero; unmapped, as now and as before version 1.
            2 | 3 | 5 => Ok(Target::Zero),
            6 => {
                let offset = entry >> 20 << 20;
                if offset < MIB || offset >= self.file.len() {
                    return Err(self.file.damaged(
                        "block table",
                        format!(
                            "a block at {offset:#x} is not in the file ({} bytes)",
                            self.file.len()
                        ),
                    ));
                }
                Ok(Target::Data { file: 0, offset })
            }
            n => Err(self
                .file
                .damaged("block table", format!("a block in state {n}"))),
        }
    }
}

impl Mapping for Vhdx {
    fn virtual_size(&self) -> u64 {
        self.size
    }

    fn grain(&self) -> u32 {
        // At most MAX_GRAIN_BYTES.
        self.block as u32
    }

    fn lookup(&self, guest: u64) -> Result<Run, ImageError> {
        let index = guest / self.block;
        let within = guest % self.block;
        let at = self.bat.offset + (index + index / self.chunk) * 8;
        let slice = self.file.slice(at, 8, "block table")?;
        // Up to the next sector bitmap entry.
        let most = (self.chunk - index % self.chunk).min(self.size.div_ceil(self.block) - index);
        let entries = slice.bytes().chunks_exact(8).take(most as usize);
        Run::joined(within, self.block, entries.map(|e| self.target(le64(e, 0))))
    }

    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        sink((0..MIB, "header"))?;
        for (region, what) in [
            (self.log, "log"),
            (self.bat, "block table"),
            (self.metadata, "metadata"),
        ] {
            if region.len > 0 {
                sink((region.offset..region.offset + region.len, what))?;
            }
        }
        Ok(())
    }
}
