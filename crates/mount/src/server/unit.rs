//! A unit of work of a request, and its cost.

use bytes::Bytes;
use drover_core::BLOCK_SIZE_U64;

use super::pool::Kind;
use crate::protocol::Request;

/// A unit of work, small enough that more urgent work need not wait long for it.
#[derive(Debug, PartialEq, Eq)]
pub enum Unit {
    /// Chunks of a read.
    Read {
        /// The read's ID.
        id: u64,
        /// The first chunk.
        first: u64,
        /// Number of chunks.
        count: u32,
    },
    /// Any other request, as a whole, with its body.
    Other(Request, Bytes),
}

impl Unit {
    /// Whether it changes data or leases, or makes changes durable.
    pub fn changes(&self) -> bool {
        matches!(self, Unit::Other(request, _) if changes(request))
    }

    /// The ranges `(offset, length)` of the disk that it reads: a change reads the blocks of which it covers only a part.
    pub fn reads(&self, chunk: u32) -> Vec<(u64, u64)> {
        let chunk = u64::from(chunk);
        match self {
            Unit::Read { first, count, .. } => {
                vec![(first.saturating_mul(chunk), u64::from(*count) * chunk)]
            }
            Unit::Other(request, _) => match *request {
                Request::DirectRead { offset, length, .. } => vec![(offset, length.into())],
                Request::Digests { first, count, .. } => {
                    vec![(first.saturating_mul(chunk), u64::from(count) * chunk)]
                }
                Request::DirectWrite { offset, length, .. } => edges(offset, length.into()),
                Request::DirectZero { offset, length, .. }
                | Request::DirectTrim { offset, length, .. } => edges(offset, length),
                _ => Vec::new(),
            },
        }
    }

    /// Its kind for the pool's schedule; `front` for a foreground request.
    pub fn kind(&self, front: bool) -> Kind {
        match self {
            Unit::Other(
                Request::Commit { .. } | Request::Close { .. } | Request::DirectFlush { .. },
                _,
            ) => Kind::Sync,
            Unit::Other(Request::DirectWrite { offset, length, .. }, _) => {
                Kind::Write(*offset, offset.saturating_add(u64::from(*length)))
            }
            Unit::Other(request, _) if changes(request) => Kind::Change,
            _ if front => Kind::Front,
            _ => Kind::Back,
        }
    }
}

/// The blocks of which a range covers a part.
fn edges(offset: u64, length: u64) -> Vec<(u64, u64)> {
    let end = offset.saturating_add(length);
    let block = |at: u64| (at - at % BLOCK_SIZE_U64, BLOCK_SIZE_U64);
    let cut = |at: &u64| !at.is_multiple_of(BLOCK_SIZE_U64);
    let mut edges: Vec<_> = [offset, end]
        .iter()
        .filter(|at| cut(at))
        .map(|at| block(*at))
        .collect();
    edges.dedup();
    edges
}

/// Whether a request changes data or leases, or makes changes durable.
pub fn changes(request: &Request) -> bool {
    !matches!(
        request,
        Request::Read { .. }
            | Request::Presence { .. }
            | Request::Digests { .. }
            | Request::DirectRead { .. }
            | Request::DirectExtents { .. }
    )
}

/// The bytes that a unit of work reads or writes, for the counters and limits.
#[derive(Clone, Copy, Debug)]
pub struct Effect {
    /// Bytes read from the device.
    pub read: u64,
    /// Bytes written to the device.
    pub written: u64,
}

impl Effect {
    /// The effect of a unit on a device whose chunks have `chunk` bytes.
    pub fn of(unit: &Unit, chunk: u32) -> Self {
        let (mut read, mut written) = (0, 0);
        match unit {
            Unit::Read { count, .. } => read = u64::from(*count) * u64::from(chunk),
            Unit::Other(Request::DirectRead { length, .. }, _) => read = u64::from(*length),
            Unit::Other(Request::Write { length, .. } | Request::DirectWrite { length, .. }, _) => {
                written = u64::from(*length);
            }
            Unit::Other(..) => {}
        }
        Self { read, written }
    }

    /// Approximate size of its reply in bytes, which count until it is sent.
    pub fn weight(self) -> u64 {
        self.read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_reads_the_blocks_that_it_cuts() {
        assert_eq!(edges(0, 8192), []);
        assert_eq!(edges(100, 50), [(0, 4096)]);
        assert_eq!(edges(100, 8092), [(0, 4096)]);
        assert_eq!(edges(4096, 5000), [(8192, 4096)]);
        assert_eq!(edges(4095, 4098), [(0, 4096), (8192, 4096)]);
        assert_eq!(edges(u64::MAX - 1, 5).len(), 1);
    }
}
