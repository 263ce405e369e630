//! Statistics and repairs of a matcher.

use crate::matcher::ImageId;

/// Maximum number of repairs kept between two calls of `take_repairs`.
pub(crate) const MAX_REPAIRS: usize = 1000;

/// Statistics of one cache. Counters start when the matcher is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Slots.
    pub capacity: u64,
    /// Slots in use.
    pub entries: u64,
    /// Memory in bytes.
    pub bytes: u64,
    /// Digests looked up.
    pub lookups: u64,
    /// Lookups that were found and verified against a hash page.
    pub hits: u64,
    /// Fingerprint matches where the page did not contain the digest.
    pub false_matches: u64,
    /// Evicted entries.
    pub evictions: u64,
}

/// Statistics of the whole matcher. Counters start when it is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MatcherStats {
    /// C0: weak heads, and entries evicted from C1.
    pub c0: CacheStats,
    /// C1: strong heads.
    pub c1: CacheStats,
    /// C2: sequences.
    pub c2: CacheStats,
    /// Blocks submitted for matching.
    pub blocks: u64,
    /// Heads among them.
    pub heads: u64,
    /// Strong heads among them.
    pub strong_heads: u64,
    /// Matched blocks in total.
    pub matched: u64,
    /// Blocks in runs found through C0.
    pub via_c0: u64,
    /// Blocks in runs found through C1.
    pub via_c1: u64,
    /// Blocks in runs found through C2.
    pub via_c2: u64,
    /// Blocks in runs found through anchors.
    pub via_anchor: u64,
    /// Blocks in runs found in the page in memory after a mismatch.
    pub via_aligned: u64,
    /// Blocks in runs found in the same batch.
    pub via_repeat: u64,
    /// Blocks that backward extension added to runs; included in `via_*`.
    pub backward: u64,
    /// Matched runs.
    pub runs: u64,
    /// Anchors admitted to C0.
    pub anchors_admitted: u64,
    /// Sequences written to the sequence cache.
    pub sequences_stored: u64,
    /// Blocks in them.
    pub sequence_blocks_stored: u64,
    /// Sequences evicted from the sequence cache.
    pub sequences_evicted: u64,
    /// Hash pages read from storage.
    pub pages_read: u64,
    /// Hash pages found in the page cache.
    pub page_hits: u64,
    /// Bytes read from storage, including side files.
    pub bytes_read: u64,
    /// Bytes written to storage, including side files.
    pub bytes_written: u64,
    /// Pages with a wrong checksum.
    pub corrupt_pages: u64,
    /// Memory in bytes: caches, cached pages and tables of the sequence cache.
    pub memory: u64,
}

/// An image with hash files in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageInfo {
    /// The image.
    pub image: ImageId,
    /// Number of nonzero blocks.
    pub blocks: u64,
    /// Whether its hash file is complete.
    pub complete: bool,
    /// Whether it is one of the recent images to which C0 and C1 can point.
    pub recent: bool,
}

/// Damaged data that was dropped. The only loss is possible matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repair {
    /// The snapshot of the caches had a wrong checksum: they were rebuilt from the hash files.
    Snapshot,
    /// An image's hash file has no valid header or the wrong length: it was removed.
    /// The image can be indexed again.
    Image(ImageId),
    /// A page of an image's hash file has a wrong checksum: its blocks cannot be matched.
    ImagePage(ImageId, u64),
    /// The sequence cache has no valid header: it was emptied.
    Sequences,
    /// A segment of the sequence cache has a wrong checksum: its sequences were dropped.
    SequencePage(u64),
    /// C2 was rebuilt from the sequence cache, because the index was not shut down cleanly.
    SequencesRebuilt,
    /// New sequences could not be written (a full disk): they were dropped.
    SequencesNotWritten,
    /// A file of an earlier version could not be converted for lack of space: it was removed. The image can be
    /// indexed again.
    NoRoomToConvert(String),
}

impl std::fmt::Display for Repair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Repair::Snapshot => write!(f, "the cache snapshot was damaged; caches rebuilt"),
            Repair::Image(i) => write!(f, "the hash file of image {} was damaged; removed", i.0),
            Repair::ImagePage(i, p) => {
                write!(
                    f,
                    "page {p} of the hash file of image {} is damaged; ignored",
                    i.0
                )
            }
            Repair::Sequences => write!(f, "the sequence cache was damaged; emptied"),
            Repair::SequencePage(p) => {
                write!(f, "segment {p} of the sequence cache is damaged; dropped")
            }
            Repair::SequencesNotWritten => {
                write!(f, "new sequences could not be written; dropped")
            }
            Repair::NoRoomToConvert(file) => {
                write!(
                    f,
                    "the disk is too full to convert {file} of the index to this version; it was removed, and is made again"
                )
            }
            Repair::SequencesRebuilt => write!(f, "the sequence index was rebuilt"),
        }
    }
}

/// Report of [`Matcher::open`](crate::Matcher::open).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// Images with complete hash files.
    pub images: Vec<ImageInfo>,
    /// Images with incomplete hash files, which were deleted.
    pub interrupted: Vec<ImageId>,
    /// Images that were entered into the caches again from their hash files.
    pub reindexed: Vec<ImageId>,
    /// Whether a snapshot of the caches was loaded.
    pub from_snapshot: bool,
    /// Whether files of an earlier version were converted to this one.
    pub converted: bool,
    /// Repairs made: the first thousand.
    pub repairs: Vec<Repair>,
}

impl OpenReport {
    pub(crate) fn repaired(&mut self, what: Repair) {
        if self.repairs.len() < MAX_REPAIRS {
            self.repairs.push(what);
        }
    }
}
