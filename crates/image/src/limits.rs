//! Limits that bound the resources a hostile image can consume.

/// Upper bound on the virtual disk size for guest order (16 TiB); larger disks are sent in file order and not
/// converted.
pub const MAX_VIRTUAL_SIZE: u64 = 16 << 40;

/// Upper bound on the ranges of a layout; a more fragmented image is sent in file order.
pub const MAX_RANGES: usize = 1 << 20;

/// Upper bound on the data runs of a file that are tracked; everything after the last is one run.
pub const MAX_FILE_EXTENTS: usize = 1 << 20;

/// Upper bound on the length of a backing chain, the image itself included.
pub const MAX_CHAIN_DEPTH: usize = 64;

/// Upper bound on the extent files of one disk.
pub const MAX_EXTENT_FILES: usize = 8192;

/// The largest qcow2 L1 table, as in QEMU (32 MiB).
pub const MAX_L1_BYTES: u64 = 32 << 20;

/// The largest qcow2 refcount table, as in QEMU (8 MiB).
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;

/// Upper bound on the tables of one image; each is remembered while data is checked against it.
pub const MAX_TABLES: usize = 1 << 21;

/// Upper bound on the length of a backing or data file name.
pub const MAX_NAME_BYTES: usize = 1023;

/// Upper bound on the size of a vmdk descriptor.
pub const MAX_DESCRIPTOR_BYTES: u64 = 1 << 20;

/// Upper bound on the allocation unit of any format (vhdx blocks go up to 256 MiB).
pub const MAX_GRAIN_BYTES: u64 = 256 << 20;

/// Upper bound on a compressed unit: that of qcow2 clusters, applied to vmdk grains, too.
pub const MAX_COMPRESSED_GRAIN_BYTES: u64 = 2 << 20;

/// Upper bound on a vhdx log that is searched for entries.
pub const MAX_VHDX_LOG_BYTES: u64 = 64 << 20;

/// Upper bound on an encoded layout (a layout of [`MAX_RANGES`] is far smaller).
pub const MAX_ENCODED_LAYOUT_BYTES: usize = 48 << 20;

/// Size of a disk's cache of decompressed grains, in bytes.
pub(crate) const GRAIN_CACHE_BYTES: usize = 8 << 20;

/// Table pages cached per open file, [`PAGE_BYTES`] each.
pub(crate) const CACHED_PAGES: usize = 32;

/// Bytes in a cached page of an image's tables.
pub(crate) const PAGE_BYTES: usize = 64 << 10;
