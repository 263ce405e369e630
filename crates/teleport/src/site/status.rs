//! Status of a site, for the user and for metrics.

use drover_index::MatcherStats;
use serde::{Deserialize, Serialize};

/// Status of a site.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SiteStatus {
    /// Incoming transfers in progress.
    pub transfers: Vec<TransferStatus>,
    /// Images in the catalog.
    pub images: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Images delivered since the site started.
    pub delivered_images: u64,
    /// Blocks reused since the site started.
    pub matched_blocks: u64,
    /// Blocks received over the link since the site started.
    pub sent_blocks: u64,
    /// Sequences that wait to be copied.
    pub pending_sequences: u64,
    /// Whether the matcher lacks images; they are being sent, or will be when it can be reached.
    pub catching_up: bool,
    /// The matcher's counters by name; empty with a remote teleporter.
    pub matcher: Vec<(String, u64)>,
}

/// One transfer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TransferStatus {
    /// The image's name.
    pub name: String,
    /// Who is sending it.
    pub peer: String,
    /// Completed blocks.
    pub done_blocks: u64,
    /// Total blocks.
    pub total_blocks: u64,
}

/// The matcher's counters by name.
pub(super) fn matcher_counts(s: &MatcherStats) -> Vec<(String, u64)> {
    let caches = [("c0", &s.c0), ("c1", &s.c1), ("c2", &s.c2)];
    let mut out: Vec<(String, u64)> = caches
        .iter()
        .flat_map(|(name, c)| {
            [
                ("capacity", c.capacity),
                ("entries", c.entries),
                ("lookups", c.lookups),
                ("hits", c.hits),
                ("false_matches", c.false_matches),
                ("evictions", c.evictions),
            ]
            .map(|(what, n)| (format!("{name}_{what}"), n))
        })
        .collect();
    out.extend(
        [
            ("blocks", s.blocks),
            ("heads", s.heads),
            ("matched", s.matched),
            ("via_c0", s.via_c0),
            ("via_c1", s.via_c1),
            ("via_c2", s.via_c2),
            ("via_anchor", s.via_anchor),
            ("via_aligned", s.via_aligned),
            ("via_repeat", s.via_repeat),
            ("backward", s.backward),
            ("runs", s.runs),
            ("pages_read", s.pages_read),
            ("bytes_read", s.bytes_read),
            ("bytes_written", s.bytes_written),
            ("memory", s.memory),
        ]
        .map(|(what, n)| (what.to_string(), n)),
    );
    out
}
