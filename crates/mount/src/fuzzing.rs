//! Doors for the fuzzers into what is private. Only built by them.

use crate::compress::Unpacker;
use crate::protocol::Coding;

/// Any bytes as a body that should be `length` bytes long.
pub fn unpack(coding: Coding, body: &[u8], length: usize) {
    let mut unpacker = Unpacker::new().expect("memory");
    if let Ok(bytes) = unpacker.unpack(coding, body, length) {
        assert_eq!(bytes.len(), length);
    }
}
