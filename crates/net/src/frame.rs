//! Frames: a fixed header and a payload (`docs/format/wire.md`).
//!
//! ```text
//! 0  u8   wire format version, 1
//! 1  u8   kind; 0xf0 and above belong to this crate
//! 2  u16  zero
//! 4  u32  length of the payload, little-endian
//! 8  u32  CRC-32C of the eight bytes before and the payload, little-endian
//! 12      payload
//! ```
//!
//! TLS authenticates every byte already; the checksum is for Unix sockets, and for memory and
//! software that go wrong outside of TLS.

mod close;
mod reader;
mod writer;

use std::ops::RangeInclusive;

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};

use crate::NetError;

pub use close::close;
pub use reader::FrameReader;
pub use writer::FrameWriter;

/// The version of the frame format.
pub const WIRE_VERSION: u8 = 1;
/// Bytes before the payload.
pub const HEADER_LEN: usize = 12;
/// The longest payload, unless a reader and its writer agree on another limit.
pub const MAX_FRAME: usize = 4 << 20;
/// The longest payload from a peer of which only the key is known, not whether it is trusted.
pub const MAX_FRAME_BEFORE_TRUST: usize = 4 << 10;
/// Kinds that this crate uses itself: [`FrameWriter::send`] does not take them and
/// [`FrameReader::next`] does not yield them.
pub const RESERVED_KINDS: RangeInclusive<u8> = 0xf0..=0xff;

/// Keep-alive.
pub(crate) const PING: u8 = 0xf0;
/// A reply to a ping; not sent by this version, accepted from others.
pub(crate) const PONG: u8 = 0xf1;
/// The first frame each way.
pub(crate) const HELLO: u8 = 0xf2;
/// The last frame of a direction.
pub(crate) const END: u8 = 0xf3;

/// One message as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the payload is; below 0xf0.
    pub kind: u8,
    /// The message.
    pub payload: Bytes,
}

impl Frame {
    /// A frame with this payload.
    #[must_use]
    pub fn new(kind: u8, payload: impl Into<Bytes>) -> Self {
        let payload = payload.into();
        Frame { kind, payload }
    }
}

/// A parsed header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub kind: u8,
    pub length: usize,
    checked: [u8; 8],
    crc: u32,
}

impl Header {
    /// The bytes of a header for a payload in `parts`. The payload fits into a `u32`.
    pub fn make(kind: u8, parts: &[&[u8]]) -> [u8; HEADER_LEN] {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        let mut out = [0u8; HEADER_LEN];
        out[0] = WIRE_VERSION;
        out[1] = kind;
        out[4..8].copy_from_slice(&(length as u32).to_le_bytes());
        let crc = crc(&out[..8], parts);
        out[8..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Validates a header before anything is allocated for its payload.
    pub fn parse(bytes: &[u8; HEADER_LEN], limit: usize, peer: &str) -> Result<Self, NetError> {
        let [version, kind, r0, r1, l0, l1, l2, l3, c0, c1, c2, c3] = *bytes;
        if version != WIRE_VERSION {
            return Err(NetError::FrameVersion {
                peer: peer.to_owned(),
                found: version,
                ours: WIRE_VERSION,
            });
        }
        if (r0, r1) != (0, 0) {
            return Err(corrupt(peer, "reserved bits are set"));
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if length as usize > limit {
            return Err(NetError::FrameTooLarge {
                peer: peer.to_owned(),
                length: u64::from(length),
                limit,
            });
        }
        Ok(Header {
            kind,
            length: length as usize,
            checked: [version, kind, r0, r1, l0, l1, l2, l3],
            crc: u32::from_le_bytes([c0, c1, c2, c3]),
        })
    }

    /// Whether the checksum matches `payload`.
    pub fn matches(&self, payload: &[u8]) -> bool {
        crc(&self.checked, &[payload]) == self.crc
    }
}

fn crc(head: &[u8], parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(head);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

pub(crate) fn corrupt(peer: &str, reason: &'static str) -> NetError {
    NetError::FrameCorrupt {
        peer: peer.to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_documented_bytes() {
        // docs/format/wire.md shows this frame.
        let header = Header::make(0x21, &[b"dro", b"ver"]);
        assert_eq!(header[..8], [1, 0x21, 0, 0, 6, 0, 0, 0]);
        assert_eq!(header, Header::make(0x21, &[b"drover"]));
        let crc = u32::from_le_bytes(header[8..].try_into().unwrap());
        assert_eq!(crc, plain_crc32c(b"\x01\x21\0\0\x06\0\0\0drover"));
        assert_eq!(plain_crc32c(b"123456789"), 0xe306_9283);
    }

    /// CRC-32C, bit by bit.
    fn plain_crc32c(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &b| {
            (0..8).fold(crc ^ u32::from(b), |c, _| {
                (c >> 1) ^ (0x82f6_3b78 & (c & 1).wrapping_neg())
            })
        })
    }

    proptest! {
        #[test]
        fn any_header_parses_within_the_limit_or_fails(bytes: [u8; HEADER_LEN], limit in 0usize..1 << 24) {
            if let Ok(h) = Header::parse(&bytes, limit, "peer") {
                prop_assert!(h.length <= limit && bytes[0] == WIRE_VERSION);
            }
        }

        #[test]
        fn one_wrong_bit_is_noticed(payload in proptest::collection::vec(any::<u8>(), 0..100), bit in 0usize..1 << 16) {
            let mut whole = Header::make(7, &[&payload]).to_vec();
            whole.extend(&payload);
            let bit = bit % (whole.len() * 8);
            whole[bit / 8] ^= 1 << (bit % 8);
            let head = whole[..HEADER_LEN].try_into().unwrap();
            let right = Header::parse(head, MAX_FRAME, "peer")
                .is_ok_and(|h| h.length == payload.len() && h.matches(&whole[HEADER_LEN..]));
            prop_assert!(!right);
        }
    }
}
