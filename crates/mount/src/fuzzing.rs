//! What the fuzz targets need of private modules. Compiled for them only.

use drover_device::remote::Chunks;

use crate::client::presence::{MAX_FOUND, Pages};
use crate::compress::Unpacker;
use crate::protocol::Coding;

/// Any bytes as a body that should be `length` bytes long.
pub fn unpack(coding: Coding, body: &[u8], length: usize) {
    let mut unpacker = Unpacker::new().expect("memory");
    if let Ok(bytes) = unpacker.unpack(coding, body, length) {
        assert_eq!(bytes.len(), length);
    }
}

/// Any pages as a reply to the question which chunks of `asked` are zero.
pub fn presence(asked: Chunks, pages: &[(Vec<(u64, u32)>, u64)]) {
    let mut found = Pages::of(asked);
    for (runs, end) in pages {
        match found.page(runs, *end) {
            Some(rest) => assert_eq!(rest.end(), asked.end()),
            None => break,
        }
    }
    let found = found.found();
    assert!(found.len() <= MAX_FOUND && found.len() as u64 <= u64::from(asked.count).div_ceil(2));
    let mut at = asked.first;
    for run in found {
        assert!(run.count > 0 && run.first >= at && run.end() <= asked.end());
        at = run.end();
    }
}
