//! Compression of literals: a lane's stream, and the level that suits its link.
//!
//! A lane is one zstd stream that is flushed at every frame, so that a frame can refer to what the
//! lane carried before it: blocks that belong together are rarely in one frame only. The level
//! follows the link: when frames wait for the link there is time to compress better, and when the
//! link waits for frames there is not.

use std::io;
use std::time::Duration;

use drover_core::BLOCK_SIZE;
use zstd::stream::raw::{CParameter, DParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};

use crate::codec::Packing;
use crate::protocol::FRAME_BLOCKS;

/// What a lane may do to a frame, from the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effort {
    Plain,
    Lz4,
    Zstd(i32),
}

/// The ladder of efforts. Measured on the literals of Debian images (`examples/pack.rs`), each
/// step costs between a third more and twice what the one before does.
const EFFORTS: [Effort; 7] = [
    Effort::Plain,
    Effort::Lz4,
    Effort::Zstd(1),
    Effort::Zstd(3),
    Effort::Zstd(6),
    Effort::Zstd(9),
    Effort::Zstd(12),
];

/// Seconds a step takes compared with the first that compresses at all.
const COSTS: [f64; 7] = [0.1, 1.0, 1.5, 2.0, 4.0, 7.0, 14.0];

/// Where a lane begins: with a long window this costs little more than less does.
const FIRST_EFFORT: usize = 3;

/// Where a lane to a site nearby begins.
const NEAR_EFFORT: usize = 1;

/// Bytes on the wire between looks: more than a socket takes without anybody having to wait.
const LOOK_BYTES: usize = 6 << 20;

/// A look is taken after this long even if fewer bytes went out: an effort that is far too much
/// must not last.
const LOOK_TIME: Duration = Duration::from_millis(400);

/// More effort only after this long: a moment's wait is no slow link.
const UP_TIME: Duration = Duration::from_millis(200);

/// The share of the time that compression may be planned to take: the rest is for the link, and
/// for whatever else the machine does.
const AFFORDABLE: f64 = 0.55;

/// Looks for which an effort that was too much is not tried again.
const COOLING: u32 = 16;

/// The largest window a stream may use, as a power of two: what the receiver sets aside for it.
pub const MAX_WINDOW_LOG: u32 = 24;

/// A frame that keeps more than this share (in 256ths) is sent as it is.
const WORTHWHILE: usize = 248;

/// Bytes of a frame that are looked at to see whether it shrinks at all.
const PROBE_BYTES: usize = 32 << 10;

/// Chooses how hard to compress, from where the time goes. Pure: it is told times.
///
/// Waiting for the link is time to compress better in, but only while the receiver waits, too:
/// when it is the receiver that cannot keep up, effort would be wasted on both.
#[derive(Debug)]
pub struct Pace {
    step: usize,
    busy: Duration,
    waited: Duration,
    /// Bytes on the wire since the last look.
    packed: usize,
    /// The greatest effort for the time being, and for how many more looks.
    ceiling: usize,
    cooling: u32,
}

impl Default for Pace {
    fn default() -> Self {
        let (busy, waited) = (Duration::ZERO, Duration::ZERO);
        Pace {
            step: FIRST_EFFORT,
            busy,
            waited,
            packed: 0,
            ceiling: EFFORTS.len() - 1,
            cooling: 0,
        }
    }
}

impl Pace {
    /// How many efforts there are.
    pub const STEPS: usize = EFFORTS.len();

    /// At an effort by number, from the fastest; for measurements.
    #[must_use]
    pub fn fixed(step: usize) -> Self {
        Pace {
            step: step.min(Self::STEPS - 1),
            ..Self::default()
        }
    }

    /// Where to begin on a connection with this round-trip time. A link within a building is
    /// rarely slow, and on one machine both ends want the same cores.
    #[must_use]
    pub fn for_round_trip(time: Duration) -> Self {
        let near = time < Duration::from_micros(1500);
        Self::fixed(if near { NEAR_EFFORT } else { FIRST_EFFORT })
    }

    /// Says how long a frame took to be read and compressed, to how many bytes, how long it then
    /// waited for the link, and which share of its time the receiver was last known to be busy.
    pub fn note(&mut self, busy: Duration, waited: Duration, packed: usize, receiver_busy: f64) {
        self.busy += busy;
        self.waited += waited;
        self.packed += packed;
        let elapsed = self.busy + self.waited;
        if self.packed < LOOK_BYTES && elapsed < LOOK_TIME {
            return;
        }
        let best = if receiver_busy > 0.6 {
            self.step.saturating_sub(1)
        } else {
            self.best_for(self.busy.as_secs_f64().max(1e-9), elapsed.as_secs_f64())
        };
        if best > self.step && elapsed < UP_TIME {
            return;
        }
        self.packed = 0;
        (self.busy, self.waited) = (Duration::ZERO, Duration::ZERO);
        if best < self.step {
            // What turned out to be too much is not tried again soon.
            self.ceiling = best;
            self.cooling = COOLING;
            self.step = best;
        } else if best > self.step {
            self.cooling = self.cooling.saturating_sub(1);
            let most = if self.cooling > 0 {
                self.ceiling
            } else {
                EFFORTS.len() - 1
            };
            self.step = best.min(most).max(self.step);
        }
    }

    /// The greatest effort that still leaves the link a little to wait for, if `busy` of `total`
    /// seconds went into the present one.
    fn best_for(&self, busy: f64, total: f64) -> usize {
        let waiting = 1.0 - busy / total;
        if waiting < 0.05 {
            return self.step.saturating_sub(1);
        }
        if waiting < 0.45 {
            return self.step;
        }
        let affordable = AFFORDABLE * total / busy * COSTS[self.step];
        COSTS
            .iter()
            .rposition(|c| *c <= affordable)
            .map_or(self.step, |best| best.max(self.step))
    }

    fn effort(&self) -> Effort {
        EFFORTS[self.step]
    }

    /// The present effort, for logs.
    #[must_use]
    pub fn describe(&self) -> String {
        match self.effort() {
            Effort::Plain => "none".into(),
            Effort::Lz4 => "lz4".into(),
            Effort::Zstd(level) => format!("zstd {level}"),
        }
    }
}

/// The sending end of a lane.
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

    /// Packs one frame's blocks, as hard as `pace` says, behind what is in `out`.
    ///
    /// # Errors
    /// When zstd cannot set up a stream (memory).
    pub fn pack(&mut self, blocks: &[u8], pace: &Pace, out: &mut Vec<u8>) -> io::Result<Packing> {
        match pace.effort() {
            Effort::Plain => {}
            Effort::Lz4 => {
                let packed = lz4_flex::block::compress(blocks);
                if packed.len() < blocks.len() / 256 * WORTHWHILE {
                    out.extend_from_slice(&packed);
                    return Ok(Packing::Lz4);
                }
            }
            Effort::Zstd(level) => {
                if shrinks(blocks)? {
                    return self.stream(blocks, level, out);
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

/// Whether a sample of the frame shrinks. What does not (media, archives, encrypted data) would
/// cost time and push useful history out of the stream.
fn shrinks(blocks: &[u8]) -> io::Result<bool> {
    if blocks.len() < PROBE_BYTES {
        return Ok(true);
    }
    let mut sample = Vec::with_capacity(PROBE_BYTES);
    let pieces = PROBE_BYTES / BLOCK_SIZE;
    let apart = blocks.len() / BLOCK_SIZE / pieces * BLOCK_SIZE;
    (0..pieces).for_each(|i| sample.extend_from_slice(&blocks[i * apart..i * apart + BLOCK_SIZE]));
    let packed = zstd::bulk::compress(&sample, 1)?;
    Ok(packed.len() < PROBE_BYTES / 256 * WORTHWHILE)
}

/// The receiving end of a lane.
#[derive(Default)]
pub struct Unpacker {
    stream: Option<Decoder<'static>>,
}

impl Unpacker {
    /// Unpacks one frame into `out`, which must be as long as its blocks: not a byte more or less
    /// may come out.
    ///
    /// # Errors
    /// `InvalidData` when something else comes out.
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
                    .ok_or_else(|| wrong("no stream to go on with"))?;
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
    // A flush may have left bytes inside the decoder: then there was more than was announced.
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

    /// Blocks that shrink, blocks that do not, and repeats of earlier ones.
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn every_effort_and_every_change_of_it_is_undone(seed in any::<u64>(), steps in prop::collection::vec(0usize..EFFORTS.len(), 8)) {
            let (mut packer, mut unpacker) = (Packer::new(20), Unpacker::default());
            for (frame, step) in frames(seed).iter().zip(steps) {
                let mut packed = Vec::new();
                let packing = packer.pack(frame, &Pace::fixed(step), &mut packed).unwrap();
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
    fn a_frame_with_more_than_announced_is_refused() {
        for step in [1, 4] {
            let frame = vec![7u8; 8 * BLOCK_SIZE];
            let mut packed = Vec::new();
            let packing = Packer::new(20)
                .pack(&frame, &Pace::fixed(step), &mut packed)
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

    #[test]
    fn a_slow_link_raises_the_level_at_once_and_a_fast_one_gives_compression_up() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        (0..12).for_each(|_| pace.note(ms(5), ms(95), 1 << 19, 0.1));
        assert_eq!(pace.describe(), "zstd 12");
        (0..2000).for_each(|_| pace.note(ms(10), ms(0), 1 << 19, 0.1));
        assert_eq!(pace.describe(), "none");
        // In balance it stays where it is.
        let mut pace = Pace::fixed(4);
        (0..400).for_each(|_| pace.note(ms(80), ms(20), 1 << 19, 0.1));
        assert_eq!(pace.step, 4);
    }

    #[test]
    fn a_receiver_that_cannot_keep_up_is_not_mistaken_for_a_slow_link() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        (0..2000).for_each(|_| pace.note(ms(5), ms(95), 1 << 19, 0.9));
        assert_eq!(pace.describe(), "none");
    }
}
