//! Configuration of a matcher.

use crate::error::{IndexError, Result};

/// How a 32-bit cache entry is divided (teleportation §2.13). The sum of the three widths is at most 32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Bits of the digest's fingerprint: 4 to 16.
    pub fingerprint_bits: u8,
    /// Bits that distinguish the most recent images: at most 8. Zero in C2.
    pub file_bits: u8,
    /// Bits of the hash page's number within its file.
    pub address_bits: u8,
}

impl Layout {
    /// C0 and C1: 32 images of up to 2^19 pages (680 GiB of nonzero data).
    pub const RECENT: Layout = Layout {
        fingerprint_bits: 8,
        file_bits: 5,
        address_bits: 19,
    };

    /// C2: one file of up to 2^17 pages (170 GiB). The remaining bits are fingerprint: each false hit costs a page
    /// read.
    pub const SEQUENCES: Layout = Layout {
        fingerprint_bits: 15,
        file_bits: 0,
        address_bits: 17,
    };

    fn check(&self, which: &str, files: bool) -> Result<()> {
        let sum = u32::from(self.fingerprint_bits)
            + u32::from(self.file_bits)
            + u32::from(self.address_bits);
        let file_bits_fit = if files {
            (1..=8).contains(&self.file_bits)
        } else {
            self.file_bits == 0
        };
        if sum > 32 || !(4..=16).contains(&self.fingerprint_bits) || !file_bits_fit {
            return Err(IndexError::Config(format!("layout of {which}: {self:?}")));
        }
        Ok(())
    }
}

/// Which blocks other than heads are entered into C0 and looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorPolicy {
    /// Heads only, as in the paper.
    Off,
    /// While C0 has free slots, blocks that are not heads too, without evicting anything.
    FreeSlots {
        /// None are admitted once C0 is this full, in percent. Admission decreases on the way there.
        stop_percent: u8,
        /// After this many blocks without a match, only a sample is looked up ...
        cold_after: u32,
        /// ... one in `2^cold_shift`; backward extension finds the start of a match.
        cold_shift: u8,
    },
}

/// Sizes and policies of a matcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatcherConfig {
    /// Memory of C0 in bytes: weak heads, and entries evicted from C1.
    pub c0_bytes: usize,
    /// Memory of C1 in bytes: strong heads.
    pub c1_bytes: usize,
    /// Memory of C2 in bytes: sequences.
    pub c2_bytes: usize,
    /// Entry layout of C0 and C1.
    pub recent_layout: Layout,
    /// Entry layout of C2.
    pub sequence_layout: Layout,
    /// Which blocks other than heads are entered.
    pub anchors: AnchorPolicy,
    /// Extend matches backwards over the batch's unmatched blocks.
    pub backward: bool,
    /// Keep searching the page in memory after a mismatch.
    pub aligned: bool,
    /// The shortest match that is copied to the sequence cache, in blocks; `u32::MAX` disables copying.
    pub min_sequence: u32,
    /// Maximum number of hash pages in the sequence cache; each covers 1.3 MiB of its data file. Beyond it the oldest
    /// segment is reused.
    pub sequence_limit: u32,
    /// Hash pages cached in memory: about 4.3 KiB each.
    pub cached_pages: usize,
}

impl Default for MatcherConfig {
    fn default() -> Self {
        MatcherConfig {
            c0_bytes: 12 << 20,
            c1_bytes: 4 << 20,
            c2_bytes: 16 << 20,
            recent_layout: Layout::RECENT,
            sequence_layout: Layout::SEQUENCES,
            anchors: AnchorPolicy::FreeSlots {
                stop_percent: 90,
                cold_after: 64,
                cold_shift: 2,
            },
            backward: true,
            aligned: true,
            min_sequence: 1,
            sequence_limit: 1 << 17,
            cached_pages: 1024,
        }
    }
}

impl MatcherConfig {
    /// As in the paper: heads only, matches extended forwards only.
    #[must_use]
    pub fn paper() -> Self {
        MatcherConfig {
            anchors: AnchorPolicy::Off,
            backward: false,
            aligned: false,
            ..Self::default()
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.recent_layout.check("C0 and C1", true)?;
        self.sequence_layout.check("C2", false)?;
        let limit = 1u64 << self.sequence_layout.address_bits;
        if self.sequence_limit == 0 || u64::from(self.sequence_limit) > limit {
            return Err(IndexError::Config(format!(
                "a sequence limit of {} pages; C2 entries can address {limit}",
                self.sequence_limit
            )));
        }
        if self.cached_pages < 8 {
            return Err(IndexError::Config("fewer than 8 cached pages".into()));
        }
        Ok(())
    }
}
