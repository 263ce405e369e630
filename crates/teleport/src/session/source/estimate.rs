//! Estimates the wire size of literals in bytes from a sample.

use drover_core::BLOCK_SIZE;

use crate::protocol::FRAME_BLOCKS;

/// Number of frames compressed for the estimate.
const SAMPLE_FRAMES: usize = 16;

/// Estimated wire size in bytes of `total` blocks, of which `blocks` is an ordered sample. `read` reads a block if
/// possible; `None` once `stopped` returns true. Blocks the thread.
pub fn literal_bytes(
    blocks: &[u64],
    total: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> bool,
    stopped: impl Fn() -> bool,
) -> Option<u64> {
    let frames: Vec<&[u64]> = blocks.chunks(FRAME_BLOCKS).collect();
    let step = frames.len().div_ceil(SAMPLE_FRAMES).max(1);
    let (mut plain, mut packed) = (0u64, 0u64);
    for frame in frames.iter().step_by(step) {
        let mut buffer = vec![0u8; frame.len() * BLOCK_SIZE];
        let mut whole = true;
        for (block, out) in frame.iter().zip(buffer.chunks_mut(BLOCK_SIZE)) {
            if stopped() {
                return None;
            }
            whole = whole && read(*block, out);
        }
        if let (true, Ok(small)) = (whole, zstd::bulk::compress(&buffer, 3)) {
            plain += buffer.len() as u64;
            packed += small.len().min(buffer.len()) as u64;
        }
    }
    let bytes = total * BLOCK_SIZE as u64;
    Some(match plain {
        0 => bytes,
        _ => (u128::from(bytes) * u128::from(packed) / u128::from(plain)) as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_read_until_it_is_stopped() {
        let blocks: Vec<u64> = (0..10 * FRAME_BLOCKS as u64).collect();
        for stop_after in [0, 1, FRAME_BLOCKS + 3] {
            let read = std::cell::Cell::new(0);
            let count = |_: u64, out: &mut [u8]| {
                out.fill(7);
                read.set(read.get() + 1);
                true
            };
            let found = literal_bytes(&blocks, 1 << 20, count, || read.get() >= stop_after);
            assert_eq!((found, read.get()), (None, stop_after));
        }
        let found = literal_bytes(&blocks, 1 << 20, |_, _| true, || false);
        assert!(found.is_some_and(|bytes| bytes < 1 << 30));
        assert_eq!(literal_bytes(&[], 3, |_, _| true, || false), Some(3 * 4096));
    }
}
