//! How many bytes literals would take on the wire, from a sample of them.

use drover_core::BLOCK_SIZE;
use drover_image::Outgoing;

use crate::protocol::FRAME_BLOCKS;
use crate::walk::read_image;

/// Frames that are compressed to find out.
const SAMPLE_FRAMES: usize = 16;

/// About how many bytes `total` blocks take, of which `blocks` is a sample in order.
pub fn literal_bytes(image: &Outgoing, blocks: &[u64], total: u64) -> u64 {
    let frames: Vec<&[u64]> = blocks.chunks(FRAME_BLOCKS).collect();
    let step = frames.len().div_ceil(SAMPLE_FRAMES).max(1);
    let (mut plain, mut packed) = (0u64, 0u64);
    for frame in frames.iter().step_by(step) {
        let mut buffer = vec![0u8; frame.len() * BLOCK_SIZE];
        let read = frame
            .iter()
            .zip(buffer.chunks_mut(BLOCK_SIZE))
            .all(|(b, out)| read_image(image, *b, out).is_ok());
        if let (true, Ok(small)) = (read, zstd::bulk::compress(&buffer, 3)) {
            plain += buffer.len() as u64;
            packed += small.len().min(buffer.len()) as u64;
        }
    }
    let bytes = total * BLOCK_SIZE as u64;
    if plain == 0 {
        bytes
    } else {
        (u128::from(bytes) * u128::from(packed) / u128::from(plain)) as u64
    }
}
