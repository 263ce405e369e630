//! Digests, which identify blocks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A 256-bit BLAKE3 hash, of a block unless stated otherwise; see `docs/format/digests.md` for other uses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Bytes in a digest.
    pub const LEN: usize = 32;

    /// Bytes of a [short](Digest::short) digest.
    pub const SHORT_LEN: usize = 12;

    /// The digest with all but its first [`Digest::SHORT_LEN`] bytes zeroed: sufficient to find a block, not to verify
    /// it (`docs/format/digests.md`).
    #[must_use]
    pub fn short(&self) -> Self {
        let mut out = [0; Self::LEN];
        out[..Self::SHORT_LEN].copy_from_slice(&self.0[..Self::SHORT_LEN]);
        Digest(out)
    }

    /// The first eight bytes as an integer: uniformly distributed, so suitable for choosing a bucket.
    #[must_use]
    pub fn prefix(&self) -> u64 {
        let d = &self.0;
        u64::from_le_bytes([d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// The text is not 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a digest is 64 hexadecimal digits")]
pub struct ParseDigestError;

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(s: &str) -> Result<Self, ParseDigestError> {
        let bytes = s.as_bytes();
        if bytes.len() != 64 {
            return Err(ParseDigestError);
        }
        let mut out = [0u8; 32];
        for (o, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            let hi = char::from(pair[0]).to_digit(16).ok_or(ParseDigestError)?;
            let lo = char::from(pair[1]).to_digit(16).ok_or(ParseDigestError)?;
            *o = (hi * 16 + lo) as u8;
        }
        Ok(Digest(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let d = Digest(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(d.to_string().parse(), Ok(d));
        assert_eq!("xyz".parse::<Digest>(), Err(ParseDigestError));
        assert_eq!("é".repeat(32).parse::<Digest>(), Err(ParseDigestError));
    }
}
