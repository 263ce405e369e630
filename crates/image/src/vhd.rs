//! Virtual PC images ("vpc" in QEMU): fixed and dynamic.

use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::Container;
use crate::limits::MAX_GRAIN_BYTES;
use crate::mapping::{Flat, Mapping, Run, TableSpan, Target};
use crate::reader::{Reader, be16, be32, be64};
use crate::{Format, ImageError};

const FOOTER: usize = 512;
const DYNAMIC_HEADER: usize = 1024;
const SECTOR: u64 = 512;
const UNALLOCATED: u32 = u32::MAX;
/// Larger sizes than the geometry can express are in the size field (65535 x 16 x 255 sectors).
const MAX_GEOMETRY_SECTORS: u64 = 65_535 * 16 * 255;
/// Creators whose images have the size in the size field; for all others the geometry counts, as in QEMU.
const SIZE_FIELD_COUNTS: [&[u8; 4]; 5] = [b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS"];

/// Whether the last sector is the footer of a fixed disk, including a valid checksum: a raw disk that merely ends with
/// the cookie stays raw.
pub(crate) fn has_fixed_footer(file: &dyn ReadAt) -> Result<bool, ImageError> {
    let Some(at) = file.len().checked_sub(FOOTER as u64) else {
        return Ok(false);
    };
    let mut footer = [0u8; FOOTER];
    file.read_exact_at(&mut footer, at)
        .map_err(|e| ImageError::io("read the last sector", e))?;
    Ok(footer.starts_with(b"conectix") && checksum_matches(&footer, 64))
}

/// The ones' complement of the sum of all bytes except the checksum itself.
fn checksum_matches(bytes: &[u8], at: usize) -> bool {
    let sum = bytes
        .iter()
        .enumerate()
        .filter(|(i, _)| !(at..at + 4).contains(i))
        .fold(0u32, |sum, (_, &b)| sum.wrapping_add(u32::from(b)));
    // Fuzzers would never get past it.
    !sum == be32(bytes, at) || cfg!(fuzzing)
}

/// Parses a file with a vhd footer at its end or, if dynamic, at its start.
pub(crate) fn open(file: &Arc<dyn ReadAt>) -> Result<Container, ImageError> {
    let file = Reader::new(Arc::clone(file), Format::Vhd);
    let mut footer = [0u8; FOOTER];
    file.read(0, &mut footer, "header")?;
    if footer.starts_with(b"conectix") {
        if !checksum_matches(&footer, 64) {
            return Err(file.damaged("header", "its checksum does not match"));
        }
    } else {
        // Probing found a footer with a valid checksum there.
        let at = file.len() - FOOTER as u64;
        file.read(at, &mut footer, "footer")?;
    }
    let geometry = u64::from(be16(&footer, 56)) * u64::from(footer[58]) * u64::from(footer[59]);
    let creator = &footer[28..32];
    let by_field = geometry == MAX_GEOMETRY_SECTORS
        || SIZE_FIELD_COUNTS.iter().any(|c| c.as_slice() == creator);
    let size = if by_field {
        be64(&footer, 48) / SECTOR * SECTOR
    } else {
        geometry * SECTOR
    };
    match be32(&footer, 60) {
        2 => {
            if size > file.len() - FOOTER as u64 {
                return Err(file.damaged(
                    "footer",
                    format!("a fixed disk of {size} bytes in a file of {}", file.len()),
                ));
            }
            let flat = Flat {
                size,
                offset: 0,
                file: 0,
            };
            Ok(Container::mapped(Format::Vhd, flat))
        }
        3 => dynamic(file, size, be64(&footer, 16)),
        4 => Err(file.unsupported("is a difference to another image")),
        n => Err(file.unsupported(format!("is of the unknown type {n}"))),
    }
}

fn dynamic(file: Reader, size: u64, header: u64) -> Result<Container, ImageError> {
    let mut raw = [0u8; DYNAMIC_HEADER];
    file.read(header, &mut raw, "dynamic header")?;
    if !raw.starts_with(b"cxsparse") {
        return Err(file.damaged("dynamic header", "its cookie is missing"));
    }
    if !checksum_matches(&raw, 36) {
        return Err(file.damaged("dynamic header", "its checksum does not match"));
    }
    let block = u64::from(be32(&raw, 32));
    if !block.is_power_of_two() || !(512..=MAX_GRAIN_BYTES).contains(&block) {
        return Err(file.damaged("block size", format!("{block} bytes")));
    }
    let (table, entries) = (be64(&raw, 16), u64::from(be32(&raw, 28)));
    if size.div_ceil(block) > entries {
        return Err(file.damaged(
            "block table",
            format!("{entries} entries are too few for a disk of {size} bytes"),
        ));
    }
    if table % SECTOR != 0 {
        return Err(file.damaged("block table", format!("it starts at {table:#x}")));
    }
    file.inside(table, entries * 4, "block table")?;
    let disk = Dynamic {
        size,
        block,
        header,
        table,
        entries,
        // One bit per sector, in whole sectors.
        bitmap: (block / SECTOR).div_ceil(8).next_multiple_of(SECTOR),
        file,
    };
    Ok(Container::mapped(Format::Vhd, disk))
}

struct Dynamic {
    file: Reader,
    size: u64,
    block: u64,
    header: u64,
    /// Offset of the table, checked to lie in the file.
    table: u64,
    entries: u64,
    /// Size of the bitmap in front of each block that tells which of its sectors were written. Without a parent,
    /// unwritten sectors are zeros in the file, too.
    bitmap: u64,
}

impl Dynamic {
    fn target(&self, entry: u32) -> Result<Target, ImageError> {
        if entry == UNALLOCATED {
            return Ok(Target::Unallocated);
        }
        let offset = u64::from(entry) * SECTOR + self.bitmap;
        if offset >= self.file.len() {
            return Err(self.file.damaged(
                "block table",
                format!(
                    "the block at {offset:#x} lies past the end of the file ({} bytes)",
                    self.file.len()
                ),
            ));
        }
        Ok(Target::Data { file: 0, offset })
    }
}

impl Mapping for Dynamic {
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
        let slice = self.file.slice(self.table + index * 4, 4, "block table")?;
        let entries = slice
            .bytes()
            .chunks_exact(4)
            .take((self.entries - index) as usize);
        Run::joined(within, self.block, entries.map(|e| self.target(be32(e, 0))))
    }

    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        sink((0..FOOTER as u64, "header"))?;
        let end = self.header + DYNAMIC_HEADER as u64;
        sink((self.header..end, "dynamic header"))?;
        sink((self.table..self.table + self.entries * 4, "block table"))
    }
}
