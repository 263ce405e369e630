//! Generates a qcow2 file on the fly: version 3, clusters of 64 KiB, reference counts of one.
//!
//! The file has the header, refcount table, refcount blocks, L1 table, L2 tables (only those in use), then the data
//! clusters in guest order. All bytes are derived from the disk's size and the list of its data runs, so only that list
//! is kept.

use std::io;
use std::ops::Range;

use drover_core::ReadAt;

use crate::layout::{BuildError, LayoutBuilder};
use crate::limits::MAX_RANGES;
use crate::{ImageError, Layout};

const SECTOR: u64 = 512;
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// 8-byte entries per cluster.
const ENTRIES: u64 = CLUSTER / 8;
/// 16-bit reference counts per cluster.
const COUNTS: u64 = CLUSTER / 2;
const HEADER_BYTES: usize = 104;
const COPIED: u64 = 1 << 63;

/// A run of guest clusters that are in the file.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// The first cluster's index on the disk.
    guest: u64,
    /// The first cluster's index in the file's data.
    rank: u64,
    count: u64,
}

/// A generated qcow2 file with a disk's data.
pub(crate) struct Created<D> {
    disk: D,
    stretches: Vec<Stretch>,
    /// The L1 indices with an L2 table, sorted.
    tables: Vec<u64>,
    l1_entries: u64,
    /// The start of each part, in clusters; the header is the first cluster.
    refcount_blocks: u64,
    l1: u64,
    l2: u64,
    data: u64,
    end: u64,
}

impl<D: ReadAt> Created<D> {
    /// The image of `disk`, whose data is in the runs `data` (sorted and disjoint).
    pub(crate) fn new(disk: D, data: &[Range<u64>]) -> Self {
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut tables: Vec<u64> = Vec::new();
        let mut clusters = 0u64;
        for run in data.iter().filter(|r| r.start < r.end) {
            let mut guest = run.start / CLUSTER;
            let end = run.end.div_ceil(CLUSTER);
            if let Some(last) = stretches.last_mut() {
                guest = guest.max(last.guest + last.count);
                if guest >= end {
                    continue;
                }
                if guest == last.guest + last.count {
                    last.count += end - guest;
                } else {
                    stretches.push(Stretch {
                        guest,
                        rank: clusters,
                        count: end - guest,
                    });
                }
            } else {
                stretches.push(Stretch {
                    guest,
                    rank: 0,
                    count: end - guest,
                });
            }
            clusters += end - guest;
            let first = tables.last().map_or(0, |t| t + 1).max(guest / ENTRIES);
            tables.extend(first..=(end - 1) / ENTRIES);
        }
        // At least one: otherwise the table's cluster would have no owner.
        let l1_entries = disk.len().div_ceil(CLUSTER * ENTRIES).max(1);
        let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER);
        let others = 1 + l1_clusters + tables.len() as u64 + clusters;
        // Refcount blocks also count themselves and the table: grow both until they suffice.
        let (mut table, mut blocks) = (1, 1);
        loop {
            let needed = (others + table + blocks).div_ceil(COUNTS);
            let table_needed = needed.div_ceil(ENTRIES);
            if needed <= blocks && table_needed <= table {
                break;
            }
            (table, blocks) = (table.max(table_needed), blocks.max(needed));
        }
        let refcount_blocks = 1 + table;
        let l1 = refcount_blocks + blocks;
        let l2 = l1 + l1_clusters;
        let first_data = l2 + tables.len() as u64;
        Created {
            disk,
            stretches,
            l1_entries,
            refcount_blocks,
            l1,
            l2,
            data: first_data,
            end: first_data + clusters,
            tables,
        }
    }

    /// The layout: the data clusters, then everything before them as metadata.
    pub(crate) fn layout(&self) -> Result<Layout, ImageError> {
        let len = self.len();
        let whole = 0..len;
        let present = std::slice::from_ref(&whole);
        let mut builder = LayoutBuilder::new(len, present, 1 << CLUSTER_BITS, MAX_RANGES);
        let built = self
            .stretches
            .iter()
            .try_for_each(|s| {
                builder.data(
                    s.guest * CLUSTER,
                    (self.data + s.rank) * CLUSTER,
                    s.count * CLUSTER,
                )
            })
            .and_then(|()| builder.finish(&[]));
        built.map_err(|e: BuildError| {
            // The data is one run and the rest another, so only a bug leads here.
            ImageError::Unconvertible(format!("its layout cannot be made ({e:?})"))
        })
    }

    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut h = [0u8; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| h[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"QFI\xfb");
        put(4, &3u32.to_be_bytes());
        put(20, &CLUSTER_BITS.to_be_bytes());
        // In whole sectors: other programs drop a partial last one.
        let disk_bytes = self.disk.len().next_multiple_of(SECTOR);
        put(24, &disk_bytes.to_be_bytes());
        // At most 2^15 entries: a disk is no larger than MAX_VIRTUAL_SIZE.
        put(36, &(self.l1_entries as u32).to_be_bytes());
        put(40, &(self.l1 * CLUSTER).to_be_bytes());
        put(48, &CLUSTER.to_be_bytes());
        put(56, &((self.refcount_blocks - 1) as u32).to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &(HEADER_BYTES as u32).to_be_bytes());
        h
    }

    /// The file cluster of guest cluster `guest`, if allocated.
    fn cluster_of(&self, guest: u64) -> Option<u64> {
        let i = self
            .stretches
            .partition_point(|s| s.guest + s.count <= guest);
        let s = self.stretches.get(i).filter(|s| s.guest <= guest)?;
        Some(self.data + s.rank + (guest - s.guest))
    }

    /// The 8-byte entry at `index` of the part that starts at cluster `part`.
    fn entry(&self, part: u64, index: u64) -> u64 {
        if part == 1 {
            let block = self.refcount_blocks + index;
            return if block < self.l1 { block * CLUSTER } else { 0 };
        }
        if part == self.refcount_blocks {
            // Four 16-bit counts, each one where the file has a cluster.
            let first = index * 4;
            return (0..4).fold(0, |word, i| word << 16 | u64::from(first + i < self.end));
        }
        if part == self.l1 {
            return match self.tables.binary_search(&index) {
                Ok(i) => COPIED | ((self.l2 + i as u64) * CLUSTER),
                Err(_) => 0,
            };
        }
        let table = self.tables[(index / ENTRIES) as usize];
        self.cluster_of(table * ENTRIES + index % ENTRIES)
            .map_or(0, |c| COPIED | (c * CLUSTER))
    }

    /// Reads a range of the tables.
    fn read_tables(&self, buf: &mut [u8], offset: u64) {
        let header = self.header();
        let mut at = offset;
        let mut rest = buf;
        while !rest.is_empty() {
            let cluster = at / CLUSTER;
            let n = if cluster == 0 {
                let n = rest.len().min((CLUSTER - at) as usize);
                let from = (at as usize).min(HEADER_BYTES);
                let have = &header[from..HEADER_BYTES.min(from + n)];
                rest[..have.len()].copy_from_slice(have);
                rest[have.len()..n].fill(0);
                n
            } else {
                let part = [self.l2, self.l1, self.refcount_blocks, 1]
                    .into_iter()
                    .find(|&p| p <= cluster)
                    .unwrap_or(1);
                let within = at - part * CLUSTER;
                let word = self.entry(part, within / 8).to_be_bytes();
                let skip = (within % 8) as usize;
                let n = rest.len().min(8 - skip);
                rest[..n].copy_from_slice(&word[skip..skip + n]);
                n
            };
            at += n as u64;
            rest = &mut rest[n..];
        }
    }

    /// Reads from the data clusters; returns the number of bytes read.
    fn read_data(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let rank = offset / CLUSTER - self.data;
        let i = self.stretches.partition_point(|s| s.rank + s.count <= rank);
        let Some(s) = self.stretches.get(i) else {
            return Ok(0);
        };
        let guest = (s.guest + (rank - s.rank)) * CLUSTER + offset % CLUSTER;
        let left = (s.guest + s.count) * CLUSTER - guest;
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        // The disk may end inside its last cluster.
        let on_disk = usize::try_from(self.disk.len().saturating_sub(guest))
            .unwrap_or(usize::MAX)
            .min(n);
        self.disk.read_exact_at(&mut buf[..on_disk], guest)?;
        buf[on_disk..n].fill(0);
        Ok(n)
    }
}

impl<D: ReadAt> ReadAt for Created<D> {
    fn len(&self) -> u64 {
        self.end * CLUSTER
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let tables_end = self.data * CLUSTER;
        if offset < tables_end {
            let left = usize::try_from(tables_end - offset).unwrap_or(usize::MAX);
            let n = left.min(buf.len());
            self.read_tables(&mut buf[..n], offset);
            return Ok(n);
        }
        if offset >= self.len() || buf.is_empty() {
            return Ok(0);
        }
        self.read_data(buf, offset)
    }
}
