//! Encoding of layouts: sent by the source and stored by the destination (`docs/format/layout.md`).

use std::io::Read;

use crc_fast::{CrcAlgorithm, checksum};
use drover_core::{put_varint, take_varint};

use super::{GrainRange, Layout, LayoutError, Order, RangeKind};
use crate::limits::{MAX_ENCODED_LAYOUT_BYTES, MAX_RANGES};

const MAGIC: &[u8; 4] = b"DRLY";
const VERSION: u8 = 1;
/// Magic, version, CRC-32C of everything after it.
const HEADER: usize = 9;
const ZSTD_LEVEL: i32 = 3;
/// Window size: enough for [`Layout::encode`]; decoders allocate no more.
const WINDOW_LOG: u32 = 22;

/// The memory of a decompressor: its window, and as much for its state.
const DECODER_BYTES: u64 = 2 << WINDOW_LOG;
/// A range takes at least a byte in the columns of flags, file offsets and counts.
const MIN_RANGE_BYTES: u64 = 3;

const REVERSE: u8 = 1;
const METADATA: u8 = 2;
/// The grain differs from that of the range before.
const NEW_GRAIN: u8 = 4;
/// The file delta is counted in grains.
const IN_GRAINS: u8 = 8;
/// The range does not start where the one before it ends.
const GAP: u8 = 16;
const ALL_FLAGS: u8 = 31;

/// Limits of a decoder, for input from peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutLimits {
    /// Length of the encoded layout in bytes.
    pub max_encoded: usize,
    /// Number of ranges.
    pub max_ranges: usize,
    /// Length of the described file in bytes.
    pub max_file_len: u64,
}

impl Default for LayoutLimits {
    fn default() -> Self {
        LayoutLimits {
            max_encoded: MAX_ENCODED_LAYOUT_BYTES,
            max_ranges: MAX_RANGES,
            max_file_len: 1 << 60,
        }
    }
}

fn take(input: &mut &[u8], what: &'static str) -> Result<u64, LayoutError> {
    take_varint(input).ok_or(LayoutError::Malformed(what))
}

fn zigzag(v: i64) -> u64 {
    ((v << 1) ^ (v >> 63)) as u64
}

fn unzigzag(v: u64) -> i64 {
    (v >> 1) as i64 ^ -((v & 1) as i64)
}

/// The file offset after the last grain of a range, to which the next range's offset is relative.
fn file_after(r: &GrainRange) -> u64 {
    match r.order {
        Order::Forward => r.file_span().end,
        Order::Reverse => r.file_span().start,
    }
}

impl Layout {
    /// Encodes the layout: deltas as varints, column by column, compressed by zstd, with a version and a checksum.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        seal(&self.body())
    }

    pub(super) fn body(&self) -> Vec<u8> {
        let mut flags = Vec::with_capacity(self.ranges.len());
        let (mut gaps, mut deltas, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut walk, mut file, mut grain) = (0u64, 0u64, 0u32);
        for r in &self.ranges {
            let mut flag = 0;
            if r.order == Order::Reverse {
                flag |= REVERSE;
            }
            if r.kind == RangeKind::Metadata {
                flag |= METADATA;
            }
            if r.grain != grain {
                flag |= NEW_GRAIN;
                put_varint(&mut sizes, u64::from(r.grain));
            }
            if r.walk != walk {
                flag |= GAP;
                put_varint(&mut gaps, r.walk - walk);
            }
            let delta = r.file.wrapping_sub(file) as i64;
            if delta % i64::from(r.grain) == 0 {
                flag |= IN_GRAINS;
                put_varint(&mut deltas, zigzag(delta / i64::from(r.grain)));
            } else {
                put_varint(&mut deltas, zigzag(delta));
            }
            put_varint(&mut sizes, r.count);
            flags.push(flag);
            (walk, file, grain) = (r.walk_end(), file_after(r), r.grain);
        }
        let mut body = Vec::new();
        put_varint(&mut body, self.file_len);
        put_varint(&mut body, u64::from(self.table_grain));
        for column in [&flags, &gaps, &deltas, &sizes] {
            put_varint(&mut body, column.len() as u64);
        }
        for column in [&flags, &gaps, &deltas, &sizes] {
            body.extend_from_slice(column);
        }
        body
    }

    /// Upper bound on the memory that [`Layout::decode`] takes for this input, the result included, in bytes. Reads only
    /// the header: what the input claims is what `decode` permits.
    ///
    /// # Errors
    /// [`LayoutError`] when the header is invalid, or beyond `limits`.
    pub fn decoding_bytes(bytes: &[u8], limits: LayoutLimits) -> Result<u64, LayoutError> {
        let (_, body_len) = open(bytes, limits)?;
        let ranges = (body_len / MIN_RANGE_BYTES).min(limits.max_ranges as u64);
        let range = size_of::<GrainRange>() + size_of::<(u64, u64)>();
        // The body's buffer grows by doubling.
        Ok(DECODER_BYTES + 2 * body_len + ranges * range as u64)
    }

    /// Decodes a layout. The input is untrusted: the result satisfies every invariant of a layout, and memory use is
    /// bounded by `limits`.
    ///
    /// # Errors
    /// [`LayoutError`] when the input is invalid, or beyond `limits`.
    pub fn decode(bytes: &[u8], limits: LayoutLimits) -> Result<Layout, LayoutError> {
        let (packed, body_len) = open(bytes, limits)?;
        let body = decompress(packed, body_len)?;
        let mut rest = body.as_slice();
        let file_len = take(&mut rest, "the file's length")?;
        if file_len > limits.max_file_len {
            return Err(LayoutError::TooLarge("the file's length"));
        }
        let table_grain = u32::try_from(take(&mut rest, "the table's grain")?)
            .map_err(|_| LayoutError::Malformed("the table's grain"))?;
        let mut lens = [0u64; 4];
        for len in &mut lens {
            *len = take(&mut rest, "a column's length")?;
        }
        let mut columns: [&[u8]; 4] = [&[]; 4];
        for (column, len) in columns.iter_mut().zip(lens) {
            let len = usize::try_from(len).map_err(|_| LayoutError::Malformed("a column"))?;
            (*column, rest) = rest
                .split_at_checked(len)
                .ok_or(LayoutError::Malformed("a column"))?;
        }
        if !rest.is_empty() {
            return Err(LayoutError::Malformed("the end"));
        }
        let ranges = decode_ranges(columns, limits.max_ranges)?;
        Layout::new(file_len, table_grain, ranges)
    }
}

/// Checks the header; returns the compressed body, and its length as claimed.
fn open(bytes: &[u8], limits: LayoutLimits) -> Result<(&[u8], u64), LayoutError> {
    if bytes.len() > limits.max_encoded {
        return Err(LayoutError::TooLarge("encoded bytes"));
    }
    let (header, mut packed) = bytes
        .split_at_checked(HEADER)
        .ok_or(LayoutError::Malformed("the header"))?;
    if &header[..4] != MAGIC {
        return Err(LayoutError::Malformed("the magic number"));
    }
    if header[4] != VERSION {
        return Err(LayoutError::Version(header[4]));
    }
    if header[5..9] != crc(packed).to_le_bytes() {
        return Err(LayoutError::Checksum);
    }
    let body_len = take(&mut packed, "the body's length")?;
    // A range takes at most 1 + 10 + 10 + 5 + 10 bytes, the preceding fields at most 60.
    let most = (limits.max_ranges as u64).saturating_mul(36) + 60;
    if body_len > most {
        return Err(LayoutError::TooLarge("ranges"));
    }
    Ok((packed, body_len))
}

fn decode_ranges(
    [flags, mut gaps, mut deltas, mut sizes]: [&[u8]; 4],
    max_ranges: usize,
) -> Result<Vec<GrainRange>, LayoutError> {
    if flags.len() > max_ranges {
        return Err(LayoutError::TooLarge("ranges"));
    }
    let mut ranges = Vec::with_capacity(flags.len());
    let (mut walk, mut file, mut grain) = (0u64, 0u64, 0u32);
    for &flag in flags {
        if flag & !ALL_FLAGS != 0 {
            return Err(LayoutError::Malformed("a range's flags"));
        }
        if flag & NEW_GRAIN != 0 {
            grain = u32::try_from(take(&mut sizes, "a grain")?)
                .map_err(|_| LayoutError::Malformed("a grain"))?;
        }
        if grain == 0 {
            return Err(LayoutError::Malformed("a grain"));
        }
        if flag & GAP != 0 {
            walk = walk
                .checked_add(take(&mut gaps, "a gap")?)
                .ok_or(LayoutError::Order)?;
        }
        let mut delta = unzigzag(take(&mut deltas, "a file offset")?);
        if flag & IN_GRAINS != 0 {
            delta = delta
                .checked_mul(i64::from(grain))
                .ok_or(LayoutError::OutsideFile)?;
        }
        let at = file
            .checked_add_signed(delta)
            .ok_or(LayoutError::OutsideFile)?;
        let count = take(&mut sizes, "a count")?;
        let range = GrainRange {
            walk,
            file: at,
            grain,
            count,
            order: if flag & REVERSE != 0 {
                Order::Reverse
            } else {
                Order::Forward
            },
            kind: if flag & METADATA != 0 {
                RangeKind::Metadata
            } else {
                RangeKind::Data
            },
        };
        // Only used as the base of the next range; `Layout::new` checks the rest.
        let len = u64::from(grain)
            .checked_mul(count)
            .ok_or(LayoutError::OutsideFile)?;
        let end = match range.order {
            Order::Forward => at.checked_add(len),
            Order::Reverse => at
                .checked_add(u64::from(grain))
                .and_then(|e| e.checked_sub(len)),
        };
        file = end.ok_or(LayoutError::OutsideFile)?;
        walk = walk.checked_add(len).ok_or(LayoutError::Order)?;
        ranges.push(range);
    }
    if [gaps, deltas, sizes].iter().any(|c| !c.is_empty()) {
        return Err(LayoutError::Malformed("the columns' ends"));
    }
    Ok(ranges)
}

/// Compresses a body and prepends the header.
#[must_use]
pub fn seal(body: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    put_varint(&mut packed, body.len() as u64);
    packed.extend_from_slice(&compress(body));
    let mut out = Vec::with_capacity(HEADER + packed.len());
    out.extend_from_slice(MAGIC);
    out.push(VERSION);
    out.extend_from_slice(&crc(&packed).to_le_bytes());
    out.extend_from_slice(&packed);
    out
}

fn crc(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn compress(body: &[u8]) -> Vec<u8> {
    // Compression in memory can only fail for lack of memory.
    zstd::bulk::Compressor::new(ZSTD_LEVEL)
        .and_then(|mut c| {
            c.window_log(WINDOW_LOG)?;
            c.compress(body)
        })
        .expect("zstd compresses into a buffer that it sized itself")
}

fn decompress(packed: &[u8], body_len: u64) -> Result<Vec<u8>, LayoutError> {
    const BAD: LayoutError = LayoutError::Malformed("the compressed body");
    let mut decoder = zstd::stream::read::Decoder::with_buffer(packed).map_err(|_| BAD)?;
    decoder.window_log_max(WINDOW_LOG).map_err(|_| BAD)?;
    let mut body = Vec::new();
    // Grows with the actual output, never by a claimed size.
    decoder
        .take(body_len + 1)
        .read_to_end(&mut body)
        .map_err(|_| BAD)?;
    if body.len() as u64 != body_len {
        return Err(BAD);
    }
    Ok(body)
}
