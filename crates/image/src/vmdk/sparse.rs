//! Hosted sparse extents: a grain directory of grain tables, with plain or compressed grains.

use std::io::Read;

use super::descriptor::{self, Descriptor};
use crate::ImageError;
use crate::limits::MAX_COMPRESSED_GRAIN_BYTES;
use crate::mapping::{Mapping, Packed, Run, TableSpan, Target};
use crate::reader::{Reader, le16, le32, le64};

const SECTOR: u64 = 512;
const NEWLINE_TEST: u32 = 1;
const REDUNDANT: u32 = 1 << 1;
const ZERO_GRAINS: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 16;
const MARKERS: u32 = 1 << 17;
/// The directory's offset is in a footer, because the file was written sequentially.
const AT_END: u64 = u64::MAX;
/// As in QEMU.
const MAX_TABLE_ENTRIES: u64 = 512;
const MAX_GRAIN_SECTORS: u64 = 1 << 21;

pub(super) struct Sparse {
    file: Reader,
    flags: u32,
    size: u64,
    grain: u64,
    table_entries: u64,
    /// Offset in bytes, checked to lie in the file.
    directory: u64,
    redundant: u64,
    descriptor: (u64, u64),
    footer: bool,
}

impl Sparse {
    pub(super) fn read(file: Reader) -> Result<Self, ImageError> {
        let mut raw = [0u8; 512];
        file.read(0, &mut raw, "header")?;
        let descriptor = (le64(&raw, 28), le64(&raw, 36));
        let footer = le64(&raw, 56) == AT_END;
        if footer {
            let at = file
                .len()
                .checked_sub(2 * SECTOR)
                .ok_or_else(|| file.damaged("footer", "the file is too short for it"))?;
            file.read(at, &mut raw, "footer")?;
            if !raw.starts_with(b"KDMV") {
                return Err(file.damaged("footer", "it is missing"));
            }
        }
        let (version, flags) = (le32(&raw, 4), le32(&raw, 8));
        if !(1..=3).contains(&version) {
            return Err(file.unsupported(format!("has the unknown version {version}")));
        }
        if flags & NEWLINE_TEST != 0 && raw[73..77] != *b"\n \r\n" {
            return Err(file.damaged("header", "line ends were changed in transit"));
        }
        if flags & COMPRESSED != 0 && le16(&raw, 77) != 1 {
            return Err(file.unsupported("is compressed by an unknown method"));
        }
        let sectors = |at: usize, field| {
            le64(&raw, at).checked_mul(SECTOR).ok_or_else(|| {
                file.damaged(field, format!("{:#x} sectors are too many", le64(&raw, at)))
            })
        };
        let (size, grain) = (sectors(12, "capacity")?, sectors(20, "grain size")?);
        if !grain.is_power_of_two() || grain > MAX_GRAIN_SECTORS * SECTOR {
            return Err(file.damaged("grain size", format!("{grain} bytes")));
        }
        if flags & COMPRESSED != 0 && grain > MAX_COMPRESSED_GRAIN_BYTES {
            return Err(file.damaged("grain size", format!("{grain} bytes, compressed")));
        }
        let table_entries = u64::from(le32(&raw, 44));
        if !(1..=MAX_TABLE_ENTRIES).contains(&table_entries) {
            return Err(file.damaged("grain table", format!("{table_entries} entries")));
        }
        let directory = sectors(56, "grain directory")?;
        let redundant = if flags & REDUNDANT != 0 {
            sectors(48, "redundant grain directory")?
        } else {
            0
        };
        let sparse = Sparse {
            flags,
            size,
            grain,
            table_entries,
            directory,
            redundant,
            descriptor,
            footer,
            file,
        };
        for (at, field) in sparse.directories() {
            sparse.file.inside(at, sparse.directory_bytes(), field)?;
        }
        if size > 0 && directory == 0 {
            return Err(sparse.file.damaged("grain directory", "its offset is zero"));
        }
        Ok(sparse)
    }

    /// The embedded descriptor, if there is one.
    pub(super) fn descriptor(&self) -> Result<Option<Descriptor>, ImageError> {
        match self.descriptor {
            (0, _) | (_, 0) => Ok(None),
            (at, len) => {
                let bytes = |n: u64| {
                    n.checked_mul(SECTOR).ok_or_else(|| {
                        self.file
                            .damaged("descriptor", format!("{n:#x} sectors are too many"))
                    })
                };
                descriptor::read(&self.file, bytes(at)?, bytes(len)?).map(Some)
            }
        }
    }

    /// Bytes of the disk mapped by one grain table.
    fn covers(&self) -> u64 {
        self.table_entries * self.grain
    }

    fn directory_bytes(&self) -> u64 {
        self.size.div_ceil(self.covers()) * 4
    }

    fn directories(&self) -> impl Iterator<Item = (u64, &'static str)> {
        [
            (self.directory, "grain directory"),
            (self.redundant, "redundant grain directory"),
        ]
        .into_iter()
        .filter(|d| d.0 != 0)
    }

    /// Decodes a table entry; contiguous entries form one run.
    fn target(&self, entry: u32, guest: u64) -> Result<Target, ImageError> {
        let offset = u64::from(entry) * SECTOR;
        match entry {
            0 => Ok(Target::Unallocated),
            1 if self.flags & ZERO_GRAINS != 0 => Ok(Target::Zero),
            _ if offset >= self.file.len() => Err(self.file.damaged(
                "grain table",
                format!(
                    "the grain at {offset:#x} lies past the end of the file ({} bytes)",
                    self.file.len()
                ),
            )),
            _ if self.flags & COMPRESSED != 0 => Ok(Target::Packed(Packed {
                file: 0,
                offset,
                // The actual length precedes the data and is read with it.
                len: self.grain,
                guest: guest - guest % self.grain,
            })),
            _ => Ok(Target::Data { file: 0, offset }),
        }
    }
}

impl Mapping for Sparse {
    fn virtual_size(&self) -> u64 {
        self.size
    }

    fn grain(&self) -> u32 {
        // At most 1 GiB.
        self.grain as u32
    }

    fn lookup(&self, guest: u64) -> Result<Run, ImageError> {
        let covers = self.covers();
        let at = self.directory + guest / covers * 4;
        let table = u64::from(self.file.le32(at, "grain directory")?) * SECTOR;
        if table == 0 {
            return Ok(Run {
                len: covers - guest % covers,
                target: Target::Unallocated,
            });
        }
        let index = guest % covers / self.grain;
        let slice = self.file.slice(table + index * 4, 4, "grain table")?;
        let entries = slice
            .bytes()
            .chunks_exact(4)
            .take((self.table_entries - index) as usize);
        Run::joined(
            guest % self.grain,
            self.grain,
            entries.map(|e| self.target(le32(e, 0), guest)),
        )
    }

    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        sink((0..SECTOR, "header"))?;
        if self.footer {
            sink((self.file.len() - 2 * SECTOR..self.file.len(), "footer"))?;
        }
        if let (1.., 1..) = self.descriptor {
            // Both products were computed when the descriptor was read.
            let (at, len) = (self.descriptor.0 * SECTOR, self.descriptor.1 * SECTOR);
            sink((at..at + len, "descriptor"))?;
        }
        for (directory, field) in self.directories() {
            let bytes = self.directory_bytes();
            sink((directory..directory + bytes, field))?;
            for i in 0..bytes / 4 {
                let table = u64::from(self.file.le32(directory + i * 4, field)?) * SECTOR;
                if table != 0 {
                    let len = self.table_entries * 4;
                    self.file.inside(table, len, "grain table")?;
                    sink((table..table + len, "grain table"))?;
                }
            }
        }
        Ok(())
    }

    fn unpack(&self, packed: Packed) -> Result<Vec<u8>, ImageError> {
        const FIELD: &str = "compressed grain";
        let (mut start, mut len) = (packed.offset, self.grain * 2);
        if self.flags & MARKERS != 0 {
            let mut marker = [0u8; 12];
            self.file.read(start, &mut marker, FIELD)?;
            (start, len) = (start + 12, u64::from(le32(&marker, 8)));
            // Deflate expands incompressible data by a few bytes at most.
            if len > self.grain * 2 {
                return Err(self.file.damaged(
                    FIELD,
                    format!("{len} compressed bytes at {start:#x} are too many"),
                ));
            }
        } else {
            len = len.min(self.file.len().saturating_sub(start));
        }
        let mut input = vec![0; len as usize];
        self.file.read(start, &mut input, FIELD)?;
        let mut out = Vec::new();
        flate2::read::ZlibDecoder::new(input.as_slice())
            .take(self.grain)
            .read_to_end(&mut out)
            .map_err(|_| {
                self.file.damaged(
                    FIELD,
                    format!("at {:#x} it does not decompress", packed.offset),
                )
            })?;
        Ok(out)
    }
}
