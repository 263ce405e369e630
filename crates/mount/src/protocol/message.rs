//! A message as the payload of a frame: the length of its head, the head, the body.

use std::ops::Range;

use bytes::Bytes;
use drover_core::Digest;
use drover_device::remote::Shape;
use drover_net::{Code, Refusal, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{MAX_BODY, MAX_HEAD, MAX_UNIT};

/// A head and its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<T> {
    /// The request or reply.
    pub head: T,
    /// Its bytes; empty for most.
    pub body: Bytes,
}

/// The bytes before a message's body.
#[must_use]
pub fn encode_message<T: Serialize>(head: &T) -> Vec<u8> {
    let head = encode(head);
    debug_assert!(head.len() <= MAX_HEAD, "heads are bounded by their lists");
    let mut out = Vec::with_capacity(2 + head.len());
    out.extend((head.len() as u16).to_le_bytes());
    out.extend(head);
    out
}

/// A message from a frame's payload. Its body shares the payload's memory.
///
/// # Errors
/// [`Code::Protocol`] for what is not one, or longer than allowed.
pub fn decode_message<T: DeserializeOwned>(payload: &Bytes) -> Result<Message<T>, Refusal> {
    let bad = |text: &str| Refusal::new(Code::Protocol, text);
    let Some((length, rest)) = payload.split_first_chunk::<2>() else {
        return Err(bad("a message without a head"));
    };
    let length = usize::from(u16::from_le_bytes(*length));
    if length > MAX_HEAD || length > rest.len() {
        return Err(bad("a message whose head is longer than it may be"));
    }
    if rest.len() - length > MAX_BODY {
        return Err(bad("a message whose body is longer than it may be"));
    }
    Ok(Message {
        head: decode(&rest[..length])?,
        body: payload.slice(2 + length..),
    })
}

/// A chunk inside the unpacked body of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which chunk.
    pub index: u64,
    /// The digest it should have and where its bytes are; none for zeros.
    pub data: Option<(Range<usize>, Range<usize>)>,
}

/// Where the chunks of a reply are in its body, and how long that must be once unpacked. `zeros` says which
/// hold zeros only.
///
/// # Errors
/// [`Code::Protocol`] when the run is not inside the device, is longer than a frame may be, or `zeros` is not of its
/// length.
pub fn pieces(
    shape: Shape,
    first: u64,
    count: u32,
    zeros: &[u8],
) -> Result<(Vec<Piece>, usize), Refusal> {
    let bad = |text: &str| Refusal::new(Code::Protocol, text);
    let end = first.checked_add(u64::from(count));
    if count == 0 || end.is_none_or(|end| end > shape.chunks()) {
        return Err(bad("chunks that are not inside the device"));
    }
    let count = count as usize;
    if count > 1 && count > (MAX_UNIT / shape.chunk) as usize {
        return Err(bad("more chunks than an answer may have"));
    }
    if zeros.len() != count.div_ceil(8) {
        return Err(bad("a zero map of the wrong length"));
    }
    let is_zero = |n: usize| zeros[n / 8] >> (n % 8) & 1 == 1;
    let data = (0..count).filter(|&n| !is_zero(n)).count();
    let (mut digest, mut byte) = (0, data * Digest::LEN);
    let found = (0..count).map(|n| {
        let index = first + n as u64;
        let data = (!is_zero(n)).then(|| {
            let length = shape.length(index) as usize;
            let at = (digest..digest + Digest::LEN, byte..byte + length);
            digest += Digest::LEN;
            byte += length;
            at
        });
        Piece { index, data }
    });
    let found: Vec<Piece> = found.collect();
    Ok((found, byte))
}
