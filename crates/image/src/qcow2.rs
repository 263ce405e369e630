//! QEMU's qcow2, versions 2 and 3: two levels of tables from guest clusters to file clusters.
//!
//! Supported: any cluster size, zero clusters, subclusters (extended L2), external data files, deflate and zstd
//! compression, backing files. Internal snapshots are not interpreted: clusters that only they use count as metadata.

mod attached;
mod bitmaps;
mod create;
mod header;

use std::io::Read;
use std::sync::Arc;

use drover_core::ReadAt;
use flate2::{Decompress, FlushDecompress, Status};

pub use attached::{Change, MAX_ATTACHED_BYTES, attach, attached, detach, qcow2_size};
pub(crate) use create::Created;
use header::{Compression, Header};

use crate::container::{Backing, Container};
use crate::mapping::{Mapping, Packed, Run, TableSpan, Target};
use crate::reader::{Reader, be64};
use crate::{Format, ImageError};

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Flag in a standard L2 entry of version 3.
const READS_AS_ZEROS: u64 = 1;
const SUBCLUSTERS: u64 = 32;

struct Qcow2 {
    file: Reader,
    header: Header,
}

/// Parses a file with qcow2's magic number.
pub(crate) fn open(file: &Arc<dyn ReadAt>) -> Result<Container, ImageError> {
    let file = Reader::new(Arc::clone(file), Format::Qcow2);
    let header = Header::read(&file)?;
    let backing = header.backing_name.clone().map(|name| {
        let said = header.backing_format.as_deref();
        let format = match said {
            // QEMU's protocol drivers for raw disks.
            Some("file" | "host_device") => Some(Format::Raw),
            other => other.and_then(|f| f.parse().ok()),
        };
        Backing {
            name,
            format,
            foreign: said.filter(|_| format.is_none()).map(str::to_owned),
        }
    });
    let data_file = header.data_file.clone();
    // Each cluster is where the guest has it. A raw one has all, others need not have the last ones.
    let whole = header.size.next_multiple_of(header.cluster_size());
    let data_file_len = match header.raw_data {
        true => header.size..=whole,
        false => 0..=whole,
    };
    let sealed = match (header.encryption, header.external_data, &data_file) {
        (Some(method), _, _) => Some(format!("it is encrypted ({method})")),
        (None, true, None) => Some("it does not name its external data file".into()),
        _ => None,
    };
    let mut notes = Vec::new();
    if let Some(method) = header.encryption {
        notes.push(format!(
            "it is encrypted ({method}): its blocks cannot match other images"
        ));
    }
    if header.dirty {
        notes.push("it was not closed cleanly; its data is complete all the same".into());
    }
    Ok(Container {
        backing,
        data_file,
        data_file_len,
        notes,
        sealed,
        ..Container::mapped(Format::Qcow2, Qcow2 { file, header })
    })
}

/// A decoded L2 entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    Normal(u64),
    Compressed(u64),
    Zero,
    Unallocated,
}

impl Qcow2 {
    fn damaged(&self, field: &'static str, detail: String) -> ImageError {
        self.file.damaged(field, detail)
    }

    /// The file number of the data clusters.
    fn data_file(&self) -> usize {
        usize::from(self.header.external_data)
    }

    /// The L2 table of an L1 entry; zero for none.
    fn l2_offset(&self, entry: u64) -> Result<u64, ImageError> {
        let offset = entry & OFFSET_MASK;
        if !offset.is_multiple_of(self.header.cluster_size()) {
            return Err(self.damaged(
                "L1 table",
                format!("the L2 table at {offset:#x} is not aligned to a cluster"),
            ));
        }
        Ok(offset)
    }

    fn check_cluster(&self, offset: u64) -> Result<u64, ImageError> {
        if !offset.is_multiple_of(self.header.cluster_size()) {
            return Err(self.damaged(
                "L2 table",
                format!("the cluster at {offset:#x} is not aligned"),
            ));
        }
        if !self.header.external_data && offset >= self.file.len() {
            return Err(self.damaged(
                "L2 table",
                format!(
                    "the cluster at {offset:#x} lies past the end of the file ({} bytes)",
                    self.file.len()
                ),
            ));
        }
        Ok(offset)
    }

    /// Decodes a standard entry, or the first word of an extended one without its zero bits.
    fn entry(&self, word: u64) -> Result<Entry, ImageError> {
        if word & COMPRESSED != 0 {
            if self.header.external_data {
                return Err(self.damaged(
                    "L2 table",
                    "a compressed cluster in an external data file".into(),
                ));
            }
            return Ok(Entry::Compressed(word));
        }
        if self.header.version >= 3 && !self.header.extended_l2 && word & READS_AS_ZEROS != 0 {
            return Ok(Entry::Zero);
        }
        let offset = word & OFFSET_MASK;
        // In an external data file, offset 0 is valid.
        if offset == 0 && !(self.header.external_data && word & COPIED != 0) {
            return Ok(Entry::Unallocated);
        }
        Ok(Entry::Normal(self.check_cluster(offset)?))
    }

    fn packed(&self, word: u64, guest: u64) -> Result<Packed, ImageError> {
        let offset_bits = 62 - (self.header.cluster_bits - 8);
        let offset = word & ((1 << offset_bits) - 1);
        let sectors = ((word & !(COPIED | COMPRESSED)) >> offset_bits) + 1;
        let len = sectors * 512 - offset % 512;
        if offset >= self.file.len() {
            return Err(self.damaged(
                "L2 table",
                format!(
                    "the compressed cluster at {offset:#x} lies past the end of the file ({} bytes)",
                    self.file.len()
                ),
            ));
        }
        Ok(Packed {
            file: 0,
            offset,
            len: len.min(self.file.len() - offset),
            guest: guest - guest % self.header.cluster_size(),
        })
    }

    /// The run of subclusters at `guest` within its cluster.
    fn subclusters(&self, word: u64, bitmap: u64, guest: u64) -> Result<Run, ImageError> {
        let cluster = self.header.cluster_size();
        let within = guest % cluster;
        let entry = self.entry(word)?;
        if let Entry::Compressed(word) = entry {
            return Ok(Run {
                len: cluster - within,
                target: Target::Packed(self.packed(word, guest)?),
            });
        }
        let (alloc, zero) = (bitmap as u32, (bitmap >> 32) as u32);
        if alloc & zero != 0 {
            return Err(self.damaged(
                "L2 table",
                "a subcluster that is both allocated and zero".into(),
            ));
        }
        let size = cluster / SUBCLUSTERS;
        let first = within / size;
        let state = |i: u64| (alloc >> i & 1, zero >> i & 1);
        let end = (first..SUBCLUSTERS)
            .find(|&i| state(i) != state(first))
            .unwrap_or(SUBCLUSTERS);
        let target = match (state(first), entry) {
            ((1, _), Entry::Normal(offset)) => Target::Data {
                file: self.data_file(),
                offset: offset + within,
            },
            ((1, _), _) => {
                return Err(self.damaged(
                    "L2 table",
                    "an allocated subcluster in a cluster that is not".into(),
                ));
            }
            ((_, 1), _) => Target::Zero,
            _ => Target::Unallocated,
        };
        Ok(Run {
            len: end * size - within,
            target,
        })
    }
}

impl Mapping for Qcow2 {
    fn virtual_size(&self) -> u64 {
        self.header.size
    }

    fn grain(&self) -> u32 {
        1 << self.header.cluster_bits
    }

    fn lookup(&self, guest: u64) -> Result<Run, ImageError> {
        let h = &self.header;
        let cluster = h.cluster_size();
        let covers = cluster << h.l2_bits();
        let l1 = self
            .file
            .slice(h.l1_offset + guest / covers * 8, 8, "L1 table")?;
        let table = self.l2_offset(be64(l1.bytes(), 0))?;
        if table == 0 {
            let empty = l1
                .bytes()
                .chunks_exact(8)
                .take_while(|e| be64(e, 0) & OFFSET_MASK == 0)
                .count() as u64;
            return Ok(Run {
                len: empty * covers - guest % covers,
                target: Target::Unallocated,
            });
        }
        let index = guest % covers / cluster;
        let width = h.l2_entry_bytes();
        let slice = self
            .file
            .slice(table + index * width as u64, width, "L2 table")?;
        let left = ((1u64 << h.l2_bits()) - index).min((slice.bytes().len() / width) as u64);
        let mut entries = slice.bytes().chunks_exact(width).take(left as usize);
        let Some(first) = entries.next() else {
            return Err(self.damaged("L2 table", format!("at {table:#x} it ends early")));
        };
        if h.extended_l2 {
            return self.subclusters(be64(first, 0), be64(first, 8), guest);
        }
        let targets = std::iter::once(first).chain(entries).map(|e| {
            Ok(match self.entry(be64(e, 0))? {
                Entry::Normal(offset) => Target::Data {
                    file: self.data_file(),
                    offset,
                },
                Entry::Compressed(word) => Target::Packed(self.packed(word, guest)?),
                Entry::Zero => Target::Zero,
                Entry::Unallocated => Target::Unallocated,
            })
        });
        Run::joined(guest % cluster, cluster, targets)
    }

    fn tables(
        &self,
        sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let h = &self.header;
        let cluster = h.cluster_size();
        sink((0..cluster, "header"))?;
        // Disks of size zero have no L1 table, but may have an offset for one.
        if h.l1_entries > 0 {
            sink((h.l1_offset..h.l1_offset + h.l1_entries * 8, "L1 table"))?;
        }
        for i in 0..h.l1_entries {
            let table = self.l2_offset(self.file.be64(h.l1_offset + i * 8, "L1 table")?)?;
            if table != 0 {
                self.file.inside(table, cluster, "L2 table")?;
                sink((table..table + cluster, "L2 table"))?;
            }
        }
        if h.refcount_bytes > 0 {
            let end = h.refcount_offset + h.refcount_bytes;
            sink((h.refcount_offset..end, "refcount table"))?;
        }
        for i in 0..h.refcount_bytes / 8 {
            let at = h.refcount_offset + i * 8;
            let block = self.file.be64(at, "refcount table")? & !511;
            if block == 0 {
                continue;
            }
            if !block.is_multiple_of(cluster) || block >= self.file.len() {
                return Err(self.damaged(
                    "refcount table",
                    format!("the refcount block at {block:#x} is not a cluster of the file"),
                ));
            }
            sink((block..block.saturating_add(cluster), "refcount block"))?;
        }
        header::snapshot_tables(&self.file, h, sink)
    }

    fn unpack(&self, packed: Packed) -> Result<Vec<u8>, ImageError> {
        // Both bounded by a few clusters of at most 2 MiB.
        let mut input = vec![0; packed.len as usize];
        self.file
            .read(packed.offset, &mut input, "compressed cluster")?;
        let mut out = vec![0; self.header.cluster_size() as usize];
        let whole = match self.header.compression {
            Compression::Deflate => inflate(&input, &mut out),
            Compression::Zstd => zstd::stream::read::Decoder::with_buffer(input.as_slice())
                .and_then(|mut d| d.read_exact(&mut out))
                .is_ok(),
        };
        if !whole {
            return Err(self.damaged(
                "compressed cluster",
                format!("at {:#x} it does not decompress", packed.offset),
            ));
        }
        Ok(out)
    }
}

/// Inflates raw deflate data into `out`; trailing bytes in `input` are ignored.
fn inflate(input: &[u8], out: &mut [u8]) -> bool {
    let mut state = Decompress::new(false);
    let status = state.decompress(input, out, FlushDecompress::Finish);
    // A full output is enough: the end marker may not have been read yet.
    matches!(
        status,
        Ok(Status::StreamEnd | Status::Ok | Status::BufError)
    ) && state.total_out() == out.len() as u64
}
