//! The qcow2 header, its extensions, and the snapshot table.

use crate::ImageError;
use crate::limits::{MAX_L1_BYTES, MAX_NAME_BYTES, MAX_REFCOUNT_TABLE_BYTES};
use crate::mapping::TableSpan;
use crate::reader::{Reader, be16, be32, be64};

const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
const KNOWN: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;

/// Of the autoclear features.
const RAW_EXTERNAL_DATA: u64 = 1 << 1;

const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// Bytes of the extension that says where the bitmaps are.
const BITMAPS_BYTES: usize = 24;

/// As in QEMU.
const MAX_SNAPSHOTS: u32 = 65_536;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Deflate,
    Zstd,
}

/// The header, validated as far as possible without reading tables.
#[derive(Debug, Clone)]
pub(super) struct Header {
    pub(super) version: u32,
    /// 9 to 21.
    pub(super) cluster_bits: u32,
    pub(super) size: u64,
    /// Checked: the L1 table lies in the file and covers `size`.
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u64,
    pub(super) refcount_offset: u64,
    pub(super) refcount_bytes: u64,
    pub(super) snapshots: u32,
    pub(super) snapshots_offset: u64,
    pub(super) extended_l2: bool,
    pub(super) external_data: bool,
    /// The external data file is a raw disk.
    pub(super) raw_data: bool,
    pub(super) dirty: bool,
    pub(super) encryption: Option<&'static str>,
    pub(super) compression: Compression,
    pub(super) backing_name: Option<String>,
    pub(super) backing_format: Option<String>,
    pub(super) data_file: Option<String>,
    pub(super) autoclear: u64,
    /// Bytes and offset of the directory of bitmaps, unchecked.
    pub(super) bitmaps: Option<(u64, u64)>,
    /// Of data that drover has attached.
    pub(super) attached: Option<AttachedExtension>,
    /// Where the list of extensions ends, with a mark.
    pub(super) extensions_end: Option<u64>,
}

/// Type of the header extension: `drgn`.
pub(super) const ATTACHED: u32 = 0x6472_676e;

/// Bytes of the extension after its type and length.
pub(super) const ATTACHED_BYTES: usize = 80;

/// The header extension of attached data.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttachedExtension {
    /// Where it begins, with its type.
    pub(super) offset: u64,
    /// What it says of the bytes that follow type and length.
    pub(super) length: u32,
    /// They, if they are as many as this version knows.
    pub(super) content: [u8; ATTACHED_BYTES],
}

impl Header {
    pub(super) fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes per L2 entry.
    pub(super) fn l2_entry_bytes(&self) -> usize {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Base-2 logarithm of the entries per L2 table.
    pub(super) fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.extended_l2 { 4 } else { 3 }
    }

    pub(super) fn read(file: &Reader) -> Result<Header, ImageError> {
        let mut raw = [0u8; 112];
        file.read(0, &mut raw[..72], "header")?;
        let version = be32(&raw, 4);
        if !(2..=3).contains(&version) {
            return Err(file.unsupported(format!("has the unknown version {version}")));
        }
        let mut header_len = 72;
        if version == 3 {
            file.read(72, &mut raw[72..104], "header")?;
            header_len = be32(&raw, 100);
            if header_len > 104 {
                file.read(104, &mut raw[104..112], "header")?;
            }
        }
        let cluster_bits = be32(&raw, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(file.damaged("cluster size", format!("2^{cluster_bits} bytes")));
        }
        let cluster = 1u64 << cluster_bits;
        if version == 3 && (header_len < 104 || u64::from(header_len) > cluster) {
            return Err(file.damaged("header length", format!("{header_len} bytes")));
        }
        let features = if version == 3 { be64(&raw, 72) } else { 0 };
        if features & !KNOWN != 0 {
            return Err(file.unsupported(format!(
                "needs unknown features (bits {:#x})",
                features & !KNOWN
            )));
        }
        if features & CORRUPT != 0 {
            return Err(file.damaged("feature bits", "it is marked as corrupt"));
        }
        let autoclear = if version == 3 { be64(&raw, 88) } else { 0 };
        let compression = match raw[104] {
            0 => Compression::Deflate,
            1 if features & COMPRESSION_TYPE != 0 => Compression::Zstd,
            n => return Err(file.unsupported(format!("has the unknown compression type {n}"))),
        };
        let encryption = match be32(&raw, 32) {
            0 => None,
            1 => Some("AES"),
            2 => Some("LUKS"),
            n => return Err(file.unsupported(format!("has the unknown encryption {n}"))),
        };
        let refcount_bytes = u64::from(be32(&raw, 56)) << cluster_bits;
        let mut header = Header {
            version,
            cluster_bits,
            size: be64(&raw, 24),
            l1_offset: be64(&raw, 40),
            l1_entries: u64::from(be32(&raw, 36)),
            refcount_offset: be64(&raw, 48),
            refcount_bytes,
            snapshots: be32(&raw, 60),
            snapshots_offset: be64(&raw, 64),
            extended_l2: features & EXTENDED_L2 != 0,
            external_data: features & EXTERNAL_DATA != 0,
            raw_data: autoclear & RAW_EXTERNAL_DATA != 0,
            dirty: features & DIRTY != 0,
            encryption,
            compression,
            backing_name: None,
            backing_format: None,
            data_file: None,
            autoclear,
            bitmaps: None,
            attached: None,
            extensions_end: None,
        };
        header.check_tables(file)?;
        let (name_at, name_len) = (be64(&raw, 8), be32(&raw, 16));
        if name_at != 0 {
            header.backing_name = Some(backing_name(file, name_at, name_len, cluster)?);
        }
        let extensions_end = if name_at == 0 { cluster } else { name_at };
        header.read_extensions(file, u64::from(header_len), extensions_end)?;
        Ok(header)
    }

    fn check_tables(&self, file: &Reader) -> Result<(), ImageError> {
        let cluster = self.cluster_size();
        if self.extended_l2 && self.cluster_bits < 14 {
            return Err(file.damaged(
                "cluster size",
                format!("{cluster} bytes are too few for subclusters"),
            ));
        }
        let l1_bytes = self.l1_entries * 8;
        if l1_bytes > MAX_L1_BYTES {
            return Err(file.damaged("L1 table", format!("{l1_bytes} bytes are too many")));
        }
        let needed = self.size.div_ceil(cluster << self.l2_bits());
        if self.l1_entries < needed {
            return Err(file.damaged(
                "L1 table",
                format!(
                    "{} entries are too few for a disk of {} bytes",
                    self.l1_entries, self.size
                ),
            ));
        }
        if self.l1_entries > 0 {
            aligned(file, self.l1_offset, cluster, "L1 table")?;
            file.inside(self.l1_offset, l1_bytes, "L1 table")?;
        }
        if self.refcount_bytes > MAX_REFCOUNT_TABLE_BYTES {
            return Err(file.damaged(
                "refcount table",
                format!("{} bytes are too many", self.refcount_bytes),
            ));
        }
        if self.refcount_bytes > 0 {
            aligned(file, self.refcount_offset, cluster, "refcount table")?;
            file.inside(self.refcount_offset, self.refcount_bytes, "refcount table")?;
        }
        if self.snapshots > MAX_SNAPSHOTS {
            return Err(file.damaged(
                "snapshot table",
                format!("{} snapshots are too many", self.snapshots),
            ));
        }
        if self.snapshots > 0 {
            aligned(file, self.snapshots_offset, cluster, "snapshot table")?;
        }
        Ok(())
    }

    /// Extensions lie between the header and the backing file's name, in the first cluster.
    fn read_extensions(&mut self, file: &Reader, start: u64, end: u64) -> Result<(), ImageError> {
        let mut at = start;
        // Each takes at least 8 bytes of at most a cluster.
        while at + 8 <= end.min(file.len()) {
            let mut head = [0u8; 8];
            file.read(at, &mut head, "header extension")?;
            let (kind, len) = (be32(&head, 0), be32(&head, 4));
            if kind == EXTENSION_END {
                self.extensions_end = Some(at);
                break;
            }
            at += 8;
            if u64::from(len) > end.saturating_sub(at) {
                return Err(file.damaged(
                    "header extension",
                    format!("{kind:#x} of {len} bytes leaves the header's cluster"),
                ));
            }
            if kind == EXTENSION_BITMAPS && len as usize == BITMAPS_BYTES {
                let mut content = [0; BITMAPS_BYTES];
                file.read(at, &mut content, "header extension")?;
                self.bitmaps = Some((be64(&content, 8), be64(&content, 16)));
            }
            if kind == ATTACHED {
                let mut content = [0; ATTACHED_BYTES];
                if len as usize == content.len() {
                    file.read(at, &mut content, "header extension")?;
                }
                self.attached = Some(AttachedExtension {
                    offset: at - 8,
                    length: len,
                    content,
                });
            }
            let field = match kind {
                EXTENSION_BACKING_FORMAT => Some(&mut self.backing_format),
                EXTENSION_DATA_FILE => Some(&mut self.data_file),
                _ => None,
            };
            if let Some(field) = field {
                *field = Some(text(file, at, len, "header extension")?);
            }
            at += u64::from(len).next_multiple_of(8);
        }
        Ok(())
    }
}

fn aligned(
    file: &Reader,
    offset: u64,
    cluster: u64,
    field: &'static str,
) -> Result<(), ImageError> {
    if offset == 0 || !offset.is_multiple_of(cluster) {
        return Err(file.damaged(field, format!("its offset {offset:#x} is not a cluster's")));
    }
    Ok(())
}

fn backing_name(file: &Reader, at: u64, len: u32, cluster: u64) -> Result<String, ImageError> {
    if len == 0 || at.checked_add(u64::from(len)).is_none_or(|e| e > cluster) {
        return Err(file.damaged(
            "backing file name",
            format!("{len} bytes at {at:#x} are not in the header's cluster"),
        ));
    }
    text(file, at, len, "backing file name")
}

fn text(file: &Reader, at: u64, len: u32, field: &'static str) -> Result<String, ImageError> {
    let len = len as usize;
    if len > MAX_NAME_BYTES {
        return Err(file.damaged(field, format!("a name of {len} bytes is too long")));
    }
    let mut bytes = vec![0; len];
    file.read(at, &mut bytes, field)?;
    String::from_utf8(bytes).map_err(|_| file.damaged(field, "a name that is not UTF-8"))
}

/// The snapshot table, and the L1 table of each snapshot.
pub(super) fn snapshot_tables(
    file: &Reader,
    h: &Header,
    sink: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    const FIELD: &str = "snapshot table";
    let mut at = h.snapshots_offset;
    for _ in 0..h.snapshots {
        let mut entry = [0u8; 40];
        file.read(at, &mut entry, FIELD)?;
        let (l1, entries) = (be64(&entry, 0), u64::from(be32(&entry, 8)));
        if entries * 8 > MAX_L1_BYTES {
            return Err(file.damaged(FIELD, format!("an L1 table of {entries} entries")));
        }
        if entries > 0 {
            aligned(file, l1, h.cluster_size(), FIELD)?;
            file.inside(l1, entries * 8, "snapshot's L1 table")?;
            sink((l1..l1 + entries * 8, "snapshot's L1 table"))?;
        }
        let texts = u64::from(be16(&entry, 12)) + u64::from(be16(&entry, 14));
        let extra = u64::from(be32(&entry, 36));
        at += (40 + extra + texts).next_multiple_of(8);
        // Only the last entry's padding may be missing.
        if at > file.len().next_multiple_of(8) {
            return Err(file.damaged(FIELD, "an entry reaches past the end of the file"));
        }
    }
    if h.snapshots > 0 {
        sink((h.snapshots_offset..at, FIELD))?;
    }
    Ok(())
}
