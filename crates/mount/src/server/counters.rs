//! Counters of a site's mounts, for its status and metrics.

use drover_net::{Code, Refusal};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use super::unit::Effect;
use super::work::ReadyReply;
use crate::protocol::{Reply, Request};

/// Reasons for refusals and failures, with their metric labels.
const CODES: [(Code, &str); 14] = [
    (Code::Protocol, "protocol"),
    (Code::Version, "version"),
    (Code::NotFound, "no_image"),
    (Code::Held, "leased"),
    (Code::Lost, "lease_lost"),
    (Code::OutOfRange, "out_of_range"),
    (Code::ReadOnly, "read_only"),
    (Code::Unsupported, "unsupported"),
    (Code::NoSpace, "no_space"),
    (Code::Unavailable, "unavailable"),
    (Code::Corrupt, "corrupt"),
    (Code::Io, "io"),
    (Code::OutOfOrder, "epoch"),
    (Code::Busy, "busy"),
];

/// The live counters.
#[derive(Debug, Default)]
pub struct Counters {
    reads_waited: AtomicU64,
    reads_background: AtomicU64,
    chunks: AtomicU64,
    chunks_zero: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    epochs: AtomicU64,
    broken: AtomicU64,
    link_in: AtomicU64,
    link_out: AtomicU64,
    refused: [AtomicU64; CODES.len()],
    failed: [AtomicU64; CODES.len()],
}

/// A snapshot of the counters of a site's mounts, since the site started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountCounts {
    /// Connected mounts that may write.
    pub writers: u64,
    /// Connected mounts that may not write.
    pub readers: u64,
    /// Connections of all mounts.
    pub connections: u64,
    /// Images that are open for mounts.
    pub images: u64,
    /// Foreground reads of chunks.
    pub reads_waited: u64,
    /// Background reads of chunks.
    pub reads_background: u64,
    /// Chunks that were read and held data.
    pub chunks: u64,
    /// Chunks that were read and held zeros only.
    pub chunks_zero: u64,
    /// Bytes read from devices, including zeros.
    pub bytes_read: u64,
    /// Bytes written to devices, without zeros.
    pub bytes_written: u64,
    /// Epochs that were committed.
    pub epochs: u64,
    /// Leases that were broken.
    pub broken: u64,
    /// Payload bytes received on connections, as encoded.
    pub link_in: u64,
    /// Payload bytes sent on connections, as encoded.
    pub link_out: u64,
    /// Connections that were refused, by reason.
    pub refused: Vec<(String, u64)>,
    /// Requests that failed, by reason.
    pub failed: Vec<(String, u64)>,
}

impl Counters {
    /// Counts a received frame by its payload bytes.
    pub fn received(&self, bytes: usize) {
        self.link_in.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts sent frames by their payload bytes.
    pub fn left(&self, bytes: u64) {
        self.link_out.fetch_add(bytes, Relaxed);
    }

    /// Counts a received request.
    pub fn asked(&self, request: &Request) {
        let counter = match request {
            Request::Read {
                background: true, ..
            } => &self.reads_background,
            Request::Read { .. } => &self.reads_waited,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Counts a unit of work and its reply.
    pub fn made(&self, effect: Effect, made: &ReadyReply) {
        match &made.head {
            Reply::Error { refusal, .. } => {
                count(&self.failed, refusal);
                return;
            }
            Reply::Chunks { count, zeros, .. } => {
                let zero: u64 = zeros.iter().map(|byte| u64::from(byte.count_ones())).sum();
                self.chunks_zero.fetch_add(zero, Relaxed);
                self.chunks
                    .fetch_add(u64::from(*count).saturating_sub(zero), Relaxed);
            }
            Reply::Committed { .. } => drop(self.epochs.fetch_add(1, Relaxed)),
            _ => {}
        }
        self.bytes_read.fetch_add(effect.read, Relaxed);
        self.bytes_written.fetch_add(effect.written, Relaxed);
    }

    /// Counts a refused connection.
    pub fn refused(&self, refusal: &Refusal) {
        count(&self.refused, refusal);
    }

    /// Counts a broken lease.
    pub fn lease_broken(&self) {
        self.broken.fetch_add(1, Relaxed);
    }

    /// A snapshot of the counters.
    pub fn now(&self) -> MountCounts {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let by_reason = |counters: &[AtomicU64; CODES.len()]| {
            let words = CODES.iter().map(|(_, word)| word.to_string());
            words.zip(counters.iter().map(get)).collect()
        };
        MountCounts {
            reads_waited: get(&self.reads_waited),
            reads_background: get(&self.reads_background),
            chunks: get(&self.chunks),
            chunks_zero: get(&self.chunks_zero),
            bytes_read: get(&self.bytes_read),
            bytes_written: get(&self.bytes_written),
            epochs: get(&self.epochs),
            broken: get(&self.broken),
            link_in: get(&self.link_in),
            link_out: get(&self.link_out),
            refused: by_reason(&self.refused),
            failed: by_reason(&self.failed),
            ..MountCounts::default()
        }
    }
}

fn count(counters: &[AtomicU64; CODES.len()], refusal: &Refusal) {
    let at = CODES.iter().position(|(code, _)| *code == refusal.code);
    if let Some(counter) = at.and_then(|at| counters.get(at)) {
        counter.fetch_add(1, Relaxed);
    }
}
