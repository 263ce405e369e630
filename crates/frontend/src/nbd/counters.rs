//! Counters of a server, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since a server began.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections: AtomicU64,
    pub(super) open: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) failed_handshakes: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
}

/// What a server has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections accepted.
    pub connections: u64,
    /// Open connections.
    pub open: u64,
    /// Connections refused at the limit.
    pub refused: u64,
    /// Connections that failed before the transmission phase.
    pub failed_handshakes: u64,
    /// Requests.
    pub requests: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients (without zeroing requests).
    pub written_bytes: u64,
    /// Bytes of replies on the connections, before encryption.
    pub sent_bytes: u64,
}

impl Counters {
    pub(super) fn now(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            connections: get(&self.connections),
            open: get(&self.open),
            refused: get(&self.refused),
            failed_handshakes: get(&self.failed_handshakes),
            requests: get(&self.requests),
            errors: get(&self.errors),
            read_bytes: get(&self.read_bytes),
            written_bytes: get(&self.written_bytes),
            sent_bytes: get(&self.sent_bytes),
        }
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
