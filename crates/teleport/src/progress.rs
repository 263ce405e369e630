//! Progress of a send, as read by the progress bar, `--json` and metrics.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use drover_core::Digest;
use serde::{Deserialize, Deserializer, Serialize};

use crate::protocol::{Matched, Origins};
use crate::stages::{DestinationTimes, SourceStages, SourceTimes};

/// Bytes on the wire by kind, before encryption, including frame headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WireByKind {
    /// Literal blocks, compressed.
    pub data: u64,
    /// Batches: digests, zero maps, heads.
    pub digests: u64,
    /// Replies: needs and acknowledgements.
    pub plan: u64,
    /// Offers and layouts.
    pub header: u64,
}

/// Report of an image that was sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImageReport {
    /// Its name at the destination.
    pub name: String,
    /// The digest both sides agreed on.
    #[serde(serialize_with = "as_text", deserialize_with = "of_text")]
    pub digest: Digest,
    /// The file's length in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are not holes.
    pub data_bytes: u64,
    /// Bytes sent by this machine's sockets.
    pub wire_sent_bytes: u64,
    /// Bytes received.
    pub wire_received_bytes: u64,
    /// Blocks reused at the destination.
    pub matched_blocks: u64,
    /// Blocks that crossed the link.
    pub sent_blocks: u64,
    /// Blocks of zeros.
    pub zero_blocks: u64,
    /// Blocks that an earlier session had sent.
    pub resumed_blocks: u64,
    /// Blocks that were not read here, since the destination has an old copy of the disk with the same generations. Then
    /// the digest is only the destination's.
    pub unread_blocks: u64,
    /// Where the matched blocks of an image of a flock came from.
    pub origins: Option<Origins>,
    /// Whether the image is complete at the destination, but gets its name only with the rest of its flock.
    pub waits: bool,
    /// Matched blocks by cache.
    pub matched: Matched,
    /// Bytes on the wire by kind.
    pub wire: WireByKind,
    /// Seconds from the offer to the delivery.
    pub seconds: f64,
    /// Time per stage since the image was last offered.
    pub stages: Stages,
}

/// Time per stage at both ends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stages {
    /// At the source.
    pub source: SourceTimes,
    /// At the destination, as it reports.
    pub destination: Box<DestinationTimes>,
}

/// An event during a send.
#[derive(Debug, Clone, PartialEq)]
pub enum SendEvent {
    /// A message for the user about an image.
    Note {
        /// The image's file.
        path: PathBuf,
        /// The message.
        text: String,
    },
    /// An image's transfer starts or restarts.
    Started {
        /// Its name at the destination.
        name: String,
        /// Blocks to walk.
        walk_blocks: u64,
        /// The file's length in bytes.
        size_bytes: u64,
        /// Bytes of the file that are not holes, according to its file system at this moment.
        data_bytes: u64,
        /// Blocks that an earlier session sent.
        resumed_blocks: u64,
    },
    /// The destination has an old copy of the image, and not all of it is read. Once in each session.
    Skips {
        /// Its name at the destination.
        name: String,
    },
    /// The connection broke; the next attempt follows after a delay.
    Reconnecting {
        /// The error.
        error: String,
        /// The delay in milliseconds.
        delay_ms: u64,
    },
    /// An image was delivered.
    Delivered(Box<ImageReport>),
    /// An image was not delivered; the others are still sent.
    Failed {
        /// Its name at the destination.
        name: String,
        /// The error.
        error: String,
    },
    /// Result of a dry run.
    Estimated {
        /// The image's name.
        name: String,
        /// Blocks that would be reused, that would be sent, and that are zero.
        estimate: crate::protocol::Estimate,
        /// Estimated bytes on the wire, from sampled compression and including digests.
        wire_bytes: u64,
    },
}

/// Counters of the image being sent; can be read at any time.
#[derive(Debug, Default)]
pub struct Counters {
    /// Blocks of the walk that have been read and hashed.
    pub walked_blocks: AtomicU64,
    /// Blocks complete at the destination, in whole batches.
    pub done_blocks: AtomicU64,
    /// Blocks that the destination requested.
    pub needed_blocks: AtomicU64,
    /// Nonzero blocks of batches that are complete at the destination.
    pub answered_blocks: AtomicU64,
    /// Those of them that it did not request.
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
    /// Time per stage.
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

    /// Resets all counters, for the next image or attempt.
    pub fn reset(&self) {
        self.stages.reset();
        self.set(&[0; 11]);
    }

    fn all(&self) -> [&AtomicU64; 11] {
        [
            &self.walked_blocks,
            &self.done_blocks,
            &self.needed_blocks,
            &self.answered_blocks,
            &self.matched_blocks,
            &self.sent_blocks,
            &self.zero_blocks,
            &self.data_bytes,
            &self.digest_bytes,
            &self.plan_bytes,
            &self.header_bytes,
        ]
    }

    /// The numbers as they are now, for another process that shows them: see [`Counters::set`].
    #[must_use]
    pub fn values(&self) -> [u64; 11] {
        self.all().map(Self::get)
    }

    /// Sets the numbers to those of another process.
    pub fn set(&self, values: &[u64; 11]) {
        for (counter, value) in self.all().into_iter().zip(values) {
            counter.store(*value, Ordering::Relaxed);
        }
    }

    /// Bytes on the wire by kind so far.
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

fn of_text<'de, D: Deserializer<'de>>(from: D) -> Result<Digest, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(serde::de::Error::custom)
}

fn as_text<S: serde::Serializer>(digest: &Digest, out: S) -> Result<S::Ok, S::Error> {
    out.collect_str(digest)
}

/// Bytes on all sockets of a send, including encryption and all reconnects.
#[derive(Debug, Default)]
pub struct WireTotals {
    connections: parking_lot::Mutex<Vec<Arc<drover_net::WireCounters>>>,
    /// What these are a part of.
    all: Option<Arc<WireTotals>>,
    /// Bytes that other processes have sent and received for the same send.
    elsewhere: (AtomicU64, AtomicU64),
}

impl WireTotals {
    /// Totals of one of several that send at once: they also count in those of `all`.
    #[must_use]
    pub fn part_of(all: &Arc<WireTotals>) -> Self {
        WireTotals {
            all: Some(Arc::clone(all)),
            ..WireTotals::default()
        }
    }

    /// Adds a connection's counters; they count from its first byte.
    pub fn add(&self, connection: Arc<drover_net::WireCounters>) {
        if let Some(all) = &self.all {
            all.add(Arc::clone(&connection));
        }
        self.connections.lock().push(connection);
    }

    /// Counts what other processes have sent and received so far.
    pub fn set_elsewhere(&self, sent: u64, received: u64) {
        self.elsewhere.0.store(sent, Ordering::Relaxed);
        self.elsewhere.1.store(received, Ordering::Relaxed);
    }

    /// Bytes sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        let here: u64 = self.connections.lock().iter().map(|c| c.sent()).sum();
        here + Counters::get(&self.elsewhere.0)
    }

    /// Bytes received.
    #[must_use]
    pub fn received(&self) -> u64 {
        let here: u64 = self.connections.lock().iter().map(|c| c.received()).sum();
        here + Counters::get(&self.elsewhere.1)
    }
}
