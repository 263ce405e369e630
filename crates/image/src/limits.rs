//! Every bound that keeps a hostile image from costing more than it should.

/// The largest virtual disk whose guest order is worked out (16 TiB); what is larger travels in
/// file order and is not converted.
pub const MAX_VIRTUAL_SIZE: u64 = 16 << 40;

/// The most ranges a layout may have; an image more fragmented than this travels in file order.
pub const MAX_RANGES: usize = 1 << 20;

/// The most data runs of a file that are told apart; everything after the last is one run.
pub const MAX_FILE_EXTENTS: usize = 1 << 20;

/// The longest chain of backing files, the image itself included.
pub const MAX_CHAIN_DEPTH: usize = 64;

/// The most files that one disk may be made of.
pub const MAX_EXTENT_FILES: usize = 8192;

/// The largest qcow2 L1 table, as in QEMU (32 MiB).
pub const MAX_L1_BYTES: u64 = 32 << 20;

/// The largest qcow2 refcount table, as in QEMU (8 MiB).
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;

/// The most tables that one image may have; each is remembered while data is checked against it.
pub const MAX_TABLES: usize = 1 << 21;

/// The longest name of a backing or data file that an image may carry.
pub const MAX_NAME_BYTES: usize = 1023;

/// The largest vmdk descriptor.
pub const MAX_DESCRIPTOR_BYTES: u64 = 1 << 20;

/// The largest unit of allocation in any format (vhdx blocks go up to 256 MiB).
pub const MAX_GRAIN_BYTES: u64 = 256 << 20;

/// The largest compressed unit: qcow2 clusters end at 2 MiB, vmdk grains are kept to the same.
pub const MAX_COMPRESSED_GRAIN_BYTES: u64 = 2 << 20;

/// The largest vhdx log that is looked through for entries.
pub const MAX_VHDX_LOG_BYTES: u64 = 64 << 20;

/// The largest encoded layout that is accepted (a layout of [`MAX_RANGES`] is far below).
pub const MAX_ENCODED_LAYOUT_BYTES: usize = 48 << 20;

/// Bytes of decompressed grains that one disk keeps.
pub(crate) const GRAIN_CACHE_BYTES: usize = 8 << 20;

/// Table pages that one open file keeps, [`PAGE_BYTES`] each.
pub(crate) const CACHED_PAGES: usize = 32;

/// Bytes in a cached page of an image's tables.
pub(crate) const PAGE_BYTES: usize = 64 << 10;
