//! What a bar, `--json` and metrics read while images are sent.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use drover_core::Digest;
use serde::Serialize;

use crate::protocol::Matched;
use crate::stages::{DestinationTimes, SourceStages, SourceTimes};

/// Bytes on the wire by kind, before encryption, with frame headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct WireByKind {
    /// Literal blocks, compressed.
    pub data: u64,
    /// Batches: digests, zero maps, heads.
    pub digests: u64,
    /// What comes back: needs and acknowledgements.
    pub plan: u64,
    /// Offers and layouts.
    pub header: u64,
}

/// How an image was sent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ImageReport {
    /// Its name at the destination.
    pub name: String,
    /// The digest both sides agreed on.
    #[serde(serialize_with = "as_text")]
    pub digest: Digest,
    /// The file's length in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are not holes.
    pub data_bytes: u64,
    /// Bytes that left this machine's sockets.
    pub wire_sent_bytes: u64,
    /// Bytes that came in.
    pub wire_received_bytes: u64,
    /// Blocks reused at the destination.
    pub matched_blocks: u64,
    /// Blocks that crossed the link.
    pub sent_blocks: u64,
    /// Blocks of zeros.
    pub zero_blocks: u64,
    /// Blocks that an earlier session had brought.
    pub resumed_blocks: u64,
    /// Through which caches blocks were matched.
    pub matched: Matched,
    /// The wire by kind.
    pub wire: WireByKind,
    /// From the offer to the delivery.
    pub seconds: f64,
    /// Where the time went, since the last time that the image was offered.
    pub stages: Stages,
}

/// Where the time went at both ends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Stages {
    /// Here.
    pub source: SourceTimes,
    /// There, as the destination says.
    pub destination: Box<DestinationTimes>,
}

/// Something happened in a send.
#[derive(Debug, Clone, PartialEq)]
pub enum SendEvent {
    /// Something the user should know about an image.
    Note {
        /// The image's file.
        path: PathBuf,
        /// What.
        text: String,
    },
    /// An image's transfer begins (again).
    Started {
        /// Its name at the destination.
        name: String,
        /// Blocks to walk.
        walk_blocks: u64,
        /// The file's length in bytes.
        size_bytes: u64,
        /// Bytes of the file that are not holes, as its file system sees them just now.
        data_bytes: u64,
        /// Blocks that an earlier session brought.
        resumed_blocks: u64,
    },
    /// The link broke; the next try comes after the delay.
    Reconnecting {
        /// Why.
        error: String,
        /// Milliseconds until then.
        delay_ms: u64,
    },
    /// An image was delivered.
    Delivered(Box<ImageReport>),
    /// An image was not delivered; the others are sent all the same.
    Failed {
        /// Its name at the destination.
        name: String,
        /// Why.
        error: String,
    },
    /// A dry run found this.
    Estimated {
        /// The image's name.
        name: String,
        /// Blocks that would be reused, would be sent, are zero.
        estimate: crate::protocol::Estimate,
        /// Bytes that would cross the link, about: sampled compression, digests included.
        wire_bytes: u64,
    },
}

/// Counters of the image being sent; read at any time.
#[derive(Debug, Default)]
pub struct Counters {
    /// Blocks of the walk that have been read and hashed.
    pub walked_blocks: AtomicU64,
    /// Blocks that are complete at the destination, in whole batches.
    pub done_blocks: AtomicU64,
    /// Blocks that the destination asked for.
    pub needed_blocks: AtomicU64,
    /// Of batches that are complete at the destination: blocks that are not zero.
    pub answered_blocks: AtomicU64,
    /// Those of them that it did not ask for.
    pub matched_blocks: AtomicU64,
    /// Blocks that were sent.
    pub sent_blocks: AtomicU64,
    /// Zero blocks seen.
    pub zero_blocks: AtomicU64,
    /// Bytes of literal frames.
    pub data_bytes: AtomicU64,
    /// Bytes of batch frames.
    pub digest_bytes: AtomicU64,
    /// Bytes of needs and acknowledgements.
    pub plan_bytes: AtomicU64,
    /// Bytes of offers and layouts.
    pub header_bytes: AtomicU64,
    /// What the stages do.
    pub stages: SourceStages,
}

impl Counters {
    /// Adds to one of the counters.
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Reads one of the counters.
    pub fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    /// All back to zero, for the next image or the next try.
    pub fn reset(&self) {
        let Counters {
            walked_blocks,
            done_blocks,
            needed_blocks,
            answered_blocks,
            matched_blocks,
            sent_blocks,
            zero_blocks,
            data_bytes,
            digest_bytes,
            plan_bytes,
            header_bytes,
            stages,
        } = self;
        stages.reset();
        for counter in [
            walked_blocks,
            done_blocks,
            needed_blocks,
            answered_blocks,
            matched_blocks,
            sent_blocks,
            zero_blocks,
            data_bytes,
            digest_bytes,
            plan_bytes,
            header_bytes,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    /// The wire by kind so far.
    #[must_use]
    pub fn wire(&self) -> WireByKind {
        WireByKind {
            data: Self::get(&self.data_bytes),
            digests: Self::get(&self.digest_bytes),
            plan: Self::get(&self.plan_bytes),
            header: Self::get(&self.header_bytes),
        }
    }
}

fn as_text<S: serde::Serializer>(digest: &Digest, out: S) -> Result<S::Ok, S::Error> {
    out.collect_str(digest)
}

/// Bytes on all sockets of a send, encryption included, over every reconnect.
#[derive(Debug, Default)]
pub struct WireTotals {
    connections: parking_lot::Mutex<Vec<std::sync::Arc<drover_net::WireCounters>>>,
}

impl WireTotals {
    /// Counts a connection in, from its first byte.
    pub fn add(&self, connection: std::sync::Arc<drover_net::WireCounters>) {
        self.connections.lock().push(connection);
    }

    /// Bytes sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.connections.lock().iter().map(|c| c.sent()).sum()
    }

    /// Bytes received.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.connections.lock().iter().map(|c| c.received()).sum()
    }
}
