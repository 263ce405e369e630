//! Compression of literals: the stream of each connection, and a level that suits its link.
//!
//! Each connection is one zstd stream that is flushed at every frame, so that a frame can refer to earlier data of
//! the connection: related blocks rarely fall into a single frame. [`Pace`] chooses the level.

use std::fmt;
use std::io;

use drover_core::BLOCK_SIZE;
use serde::{Deserialize, Serialize};
use zstd::stream::raw::{CParameter, DParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};

use crate::codec::Packing;
use crate::protocol::FRAME_BLOCKS;

mod pace;

pub use pace::{Pace, Passed};

/// The highest zstd level that can be requested: higher ones are slower than any link.
pub const MAX_LEVEL: u8 = 15;

/// How a connection compresses a frame.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// No compression.
    None,
    /// LZ4.
    Lz4,
    /// zstd at this level, 1 to [`MAX_LEVEL`].
    Zstd(u8),
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Effort::None => f.write_str("none"),
            Effort::Lz4 => f.write_str("lz4"),
            Effort::Zstd(level) => write!(f, "zstd {level}"),
        }
    }
}

/// The largest window that a stream may use, as a power of two: the memory that the receiver allocates for it.
pub const MAX_WINDOW_LOG: u32 = 24;

/// A frame that shrinks to more than this fraction (in 256ths) is sent uncompressed.
const WORTHWHILE: usize = 248;

/// Bytes of a frame that are sampled to test whether it is compressible.
const PROBE_BYTES: usize = 32 << 10;

/// The sending end of a connection.
pub struct Packer {
    stream: Option<(i32, Encoder<'static>)>,
    window_log: u32,
}

impl Packer {
    /// With a window of at most `2^window_log` bytes.
    #[must_use]
    pub fn new(window_log: u32) -> Self {
        Packer {
            stream: None,
            window_log: window_log.min(MAX_WINDOW_LOG),
        }
    }

    /// Compresses one frame's blocks and appends them to `out`.
    ///
    /// # Errors
    /// When zstd cannot allocate a stream.
    pub fn pack(
        &mut self,
        blocks: &[u8],
        effort: Effort,
        out: &mut Vec<u8>,
    ) -> io::Result<Packing> {
        match effort {
            Effort::None => {}
            Effort::Lz4 => {
                let packed = lz4_flex::block::compress(blocks);
                if packed.len() < blocks.len() / 256 * WORTHWHILE {
                    out.extend_from_slice(&packed);
                    return Ok(Packing::Lz4);
                }
            }
            Effort::Zstd(level) => {
                if shrinks(blocks)? {
                    return self.stream(blocks, level.min(MAX_LEVEL).into(), out);
                }
            }
        }
        out.extend_from_slice(blocks);
        Ok(Packing::Plain)
    }

    fn stream(&mut self, blocks: &[u8], level: i32, out: &mut Vec<u8>) -> io::Result<Packing> {
        let packing = match &self.stream {
            Some((at, _)) if *at == level => Packing::ZstdMore,
            _ => {
                let mut encoder = Encoder::new(level)?;
                if level >= 3 {
                    encoder.set_parameter(CParameter::WindowLog(self.window_log))?;
                    encoder.set_parameter(CParameter::EnableLongDistanceMatching(true))?;
                }
                self.stream = Some((level, encoder));
                Packing::ZstdNew
            }
        };
        let Some((_, encoder)) = &mut self.stream else {
            return Ok(Packing::Plain);
        };
        let mut input = InBuffer::around(blocks);
        let mut piece = vec![0u8; 128 << 10];
        loop {
            let mut output = OutBuffer::around(piece.as_mut_slice());
            let done = input.pos() == blocks.len();
            let left = if done {
                encoder.flush(&mut output)?
            } else {
                encoder.run(&mut input, &mut output)?
            };
            out.extend_from_slice(output.as_slice());
            if done && left == 0 {
                return Ok(packing);
            }
        }
    }
}

/// Whether a sample of the frame is compressible. Incompressible data (media, archives, encrypted data) would cost
/// time and push useful history out of the window.
///
/// Each block of the sample is compressed by itself: together, a text would get the statistics of the noise beside it.
fn shrinks(blocks: &[u8]) -> io::Result<bool> {
    if blocks.len() < PROBE_BYTES {
        return Ok(true);
    }
    let pieces = PROBE_BYTES / BLOCK_SIZE;
    let apart = blocks.len() / BLOCK_SIZE / pieces * BLOCK_SIZE;
    let mut compressor = zstd::bulk::Compressor::new(1)?;
    let mut packed = 0;
    for sample in blocks.chunks(apart).take(pieces) {
        let sample = &sample[..BLOCK_SIZE];
        packed += compressor.compress(sample)?.len().min(BLOCK_SIZE);
    }
    Ok(packed < PROBE_BYTES / 256 * WORTHWHILE)
}

/// The receiving end of a connection.
#[derive(Default)]
pub struct Unpacker {
    stream: Option<Decoder<'static>>,
}

impl Unpacker {
    /// Decompresses one frame into `out`, which must be exactly as long as its blocks.
    ///
    /// # Errors
    /// `InvalidData` when the frame is corrupt or has another length.
    pub fn unpack(&mut self, packing: Packing, packed: &[u8], out: &mut [u8]) -> io::Result<()> {
        debug_assert!(out.len() <= FRAME_BLOCKS * BLOCK_SIZE);
        let wrong =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("literal: {what}"));
        match packing {
            Packing::Plain if packed.len() == out.len() => out.copy_from_slice(packed),
            Packing::Plain => return Err(wrong("plain blocks of the wrong length")),
            Packing::Lz4 => {
                let n = lz4_flex::block::decompress_into(packed, out)
                    .map_err(|e| wrong(&e.to_string()))?;
                if n != out.len() {
                    return Err(wrong("lz4 data too short"));
                }
            }
            Packing::ZstdNew | Packing::ZstdMore => {
                if packing == Packing::ZstdNew {
                    let mut decoder = Decoder::new()?;
                    decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG))?;
                    self.stream = Some(decoder);
                }
                let decoder = self
                    .stream
                    .as_mut()
                    .ok_or_else(|| wrong("it continues a stream that was not begun"))?;
                unpack_stream(decoder, packed, out).map_err(|e| wrong(&e.to_string()))?;
            }
        }
        Ok(())
    }
}

fn unpack_stream(decoder: &mut Decoder<'_>, packed: &[u8], out: &mut [u8]) -> io::Result<()> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(out);
    loop {
        let before = (input.pos(), output.pos());
        decoder.run(&mut input, &mut output)?;
        let full = output.pos() == output.capacity();
        if input.pos() == packed.len() && full {
            break;
        }
        if (input.pos(), output.pos()) == before {
            return Err(wrong(if full {
                "more data than blocks"
            } else {
                "less data than blocks"
            }));
        }
    }
    // A flush may have left bytes inside the decoder: then the frame was longer than announced.
    let mut extra = [0u8; 1];
    let mut output = OutBuffer::around(&mut extra[..]);
    decoder.run(&mut InBuffer::around(&[]), &mut output)?;
    if output.pos() != 0 {
        return Err(wrong("more data than blocks"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Compressible blocks, incompressible ones, and repeats of earlier ones.
    fn frames(seed: u64) -> Vec<Vec<u8>> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let words: Vec<Vec<u8>> = (0..50)
            .map(|_| {
                (0..rng.usize(3..12))
                    .map(|_| rng.alphabetic() as u8)
                    .collect()
            })
            .collect();
        let mut out: Vec<Vec<u8>> = Vec::new();
        for n in 0..8 {
            let len = rng.usize(1..=FRAME_BLOCKS / 4) * BLOCK_SIZE;
            let frame = match rng.u8(0..3) {
                0 => (0..len).map(|_| rng.u8(..)).collect(),
                1 if n > 0 => out[rng.usize(0..n)].clone(),
                _ => std::iter::from_fn(|| Some(&words[rng.usize(0..50)]))
                    .flatten()
                    .copied()
                    .take(len)
                    .collect(),
            };
            out.push(frame);
        }
        out
    }

    /// None, LZ4, zstd from level 1.
    fn effort(n: u8) -> Effort {
        match n {
            0 => Effort::None,
            1 => Effort::Lz4,
            level => Effort::Zstd(level - 1),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn every_effort_and_every_change_of_it_is_undone(seed in any::<u64>(), levels in prop::collection::vec(0u8..=MAX_LEVEL + 1, 8)) {
            let (mut packer, mut unpacker) = (Packer::new(20), Unpacker::default());
            for (frame, level) in frames(seed).iter().zip(levels) {
                let mut packed = Vec::new();
                let packing = packer.pack(frame, effort(level), &mut packed).unwrap();
                let mut back = vec![1u8; frame.len()];
                unpacker.unpack(packing, &packed, &mut back).unwrap();
                prop_assert!(&back == frame);
            }
        }

        #[test]
        fn rubbish_and_wrong_lengths_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..2000), which in 0usize..4) {
            let packing = [Packing::Plain, Packing::Lz4, Packing::ZstdNew, Packing::ZstdMore][which];
            let mut out = vec![0u8; 4 * BLOCK_SIZE];
            prop_assert!(Unpacker::default().unpack(packing, &bytes, &mut out).is_err());
        }
    }

    #[test]
    fn text_between_what_does_not_compress_is_compressed() {
        let mut rng = fastrand::Rng::with_seed(5);
        let text = FRAME_BLOCKS / 4 * BLOCK_SIZE;
        let mut frame = vec![0u8; FRAME_BLOCKS * BLOCK_SIZE];
        rng.fill(&mut frame);
        // Noise before it, or behind it; every word is used once in a block.
        for at in [0, text, 3 * text] {
            let mut frame = frame.clone();
            frame[at..at + text].fill_with(|| b'a' + rng.u8(..26));
            let mut packed = Vec::new();
            let packing = Packer::new(20).pack(&frame, Effort::Zstd(2), &mut packed);
            assert_eq!(packing.unwrap(), Packing::ZstdNew);
            assert!(frame.len() - packed.len() > text / 4, "{}", packed.len());
        }
        let mut packed = Vec::new();
        let packing = Packer::new(20).pack(&frame, Effort::Zstd(2), &mut packed);
        assert_eq!(packing.unwrap(), Packing::Plain);
    }

    #[test]
    fn a_frame_with_more_than_announced_is_refused() {
        for level in [1, 4] {
            let frame = vec![7u8; 8 * BLOCK_SIZE];
            let mut packed = Vec::new();
            let packing = Packer::new(20)
                .pack(&frame, effort(level), &mut packed)
                .unwrap();
            let mut small = vec![0u8; 7 * BLOCK_SIZE];
            assert!(
                Unpacker::default()
                    .unpack(packing, &packed, &mut small)
                    .is_err()
            );
            let mut large = vec![0u8; 9 * BLOCK_SIZE];
            assert!(
                Unpacker::default()
                    .unpack(packing, &packed, &mut large)
                    .is_err()
            );
        }
    }
}
