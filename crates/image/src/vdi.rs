//! VirtualBox's vdi: a single table from disk blocks to file blocks.

use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::Container;
use crate::limits::MAX_GRAIN_BYTES;
use crate::mapping::{Mapping, Run, TableSpan, Target};
use crate::reader::{Reader, le32, le64};
use crate::{Format, ImageError};

const HEADER: u64 = 512;
const UNALLOCATED: u32 = u32::MAX;
const DISCARDED: u32 = u32::MAX - 1;

struct Vdi {
    file: Reader,
    size: u64,
    block: u64,
    /// Offset of the table, checked to lie in the file.
    map: u64,
    blocks: u64,
    data: u64,
}

/// Parses a file with vdi's signature.
pub(crate) fn open(file: &Arc<dyn ReadAt>) -> Result<Container, ImageError> {
    let file = Reader::new(Arc::clone(file), Format::Vdi);
    let mut raw = [0u8; HEADER as usize];
    file.read(0, &mut raw, "header")?;
    let version = le32(&raw, 0x44);
    if version != 0x0001_0001 {
        return Err(file.unsupported(format!("has the unknown version {version:#x}")));
    }
    let kind = le32(&raw, 0x4c);
    if !(1..=2).contains(&kind) {
        return Err(file.unsupported(format!(
            "is of type {kind}, neither dynamic nor fixed (a difference to another image?)"
        )));
    }
    // Links to a snapshot and to a parent.
    if raw[0x1a8..0x1c8].iter().any(|&b| b != 0) {
        return Err(file.unsupported("is a difference to another image"));
    }
    let block = u64::from(le32(&raw, 0x178));
    if !block.is_power_of_two() || !(512..=MAX_GRAIN_BYTES).contains(&block) {
        return Err(file.damaged("block size", format!("{block} bytes")));
    }
    if le32(&raw, 0x17c) != 0 {
        return Err(file.unsupported("has extra bytes in its blocks"));
    }
    let (size, blocks) = (le64(&raw, 0x170), u64::from(le32(&raw, 0x180)));
    if size.div_ceil(block) > blocks {
        return Err(file.damaged(
            "block map",
            format!("{blocks} blocks are too few for a disk of {size} bytes"),
        ));
    }
    let (map, data) = (u64::from(le32(&raw, 0x154)), u64::from(le32(&raw, 0x158)));
    for (at, field) in [(map, "block map"), (data, "data")] {
        if at < HEADER || at % 512 != 0 {
            return Err(file.damaged(field, format!("it starts at {at:#x}")));
        }
    }
    file.inside(map, blocks * 4, "block map")?;
    Ok(Container::mapped(
        Format::Vdi,
        Vdi {
            file,
            size,
            block,
            map,
            blocks,
            data,
        },
    ))
}

impl Vdi {
    fn target(&self, entry: u32) -> Result<Target, ImageError> {
        match entry {
            UNALLOCATED => Ok(Target::Unallocated),
            DISCARDED => Ok(Target::Zero),
            n => {
                let offset = self.data + u64::from(n) * self.block;
                if offset >= self.file.len() {
                    return Err(self.file.damaged(
                        "block map",
                        format!(
                            "block {n} at {offset:#x} lies past the end of the file ({} bytes)",
                            self.file.len()
                        ),
                    ));
                }
                Ok(Target::Data { file: 0, offset })
            }
        }
    }
}

impl Mapping for Vdi {
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
        let slice = self.file.slice(self.map + index * 4, 4, "block map")?;
        let entries = slice
            .bytes()
            .chunks_exact(4)
            .take((self.blocks - index) as usize);
        Run::joined(within, self.block, entries.map(|e| self.target(le32(e, 0))))
    }

    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        sink((0..HEADER, "header"))?;
        sink((self.map..self.map + self.blocks * 4, "block map"))
    }
}
