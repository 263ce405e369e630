//! A piece of a request's work, and what it weighs.

use bytes::Bytes;

use super::pool::Kind;
use crate::protocol::Request;

/// A piece of work, small enough that what is more urgent need not wait long for it.
#[derive(Debug, PartialEq, Eq)]
pub enum Unit {
    /// Chunks of a read.
    Read {
        /// The read's id.
        id: u64,
        /// The first chunk.
        first: u64,
        /// How many.
        count: u32,
    },
    /// Anything else, whole.
    Other(Request, Bytes),
}

impl Unit {
    /// Whether it changes something, or makes changes durable.
    pub fn changes(&self) -> bool {
        matches!(self, Unit::Other(request, _) if changes(request))
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

/// Whether a request changes something, or makes changes durable.
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

/// What is to be counted of a unit of work once it is done.
#[derive(Clone, Copy, Debug)]
pub struct Effect {
    /// Bytes of the device that were read.
    pub read: u64,
    /// Bytes of it that were written.
    pub written: u64,
}

impl Effect {
    /// Of a unit, on a device with chunks of so many bytes.
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

    /// Bytes that its reply takes until it has left, about.
    pub fn weight(self) -> u64 {
        self.read
    }
}
