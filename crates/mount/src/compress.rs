//! Bodies, packed when that helps.

use std::io;

use crate::protocol::{Coding, MAX_BODY};

/// Bytes below which packing is not worth a look.
const LEAST: usize = 512;

/// Bytes that are tried before a long body is packed as a whole.
const PROBE: usize = 8 << 10;

/// A body that keeps more than this share, in 256ths, is sent as it is.
const WORTHWHILE: usize = 230;

/// The effort: of zstd's levels the last that keeps up with a gigabit on a part of a core.
const LEVEL: i32 = 1;

/// Packs bodies. One for each thread that does.
pub struct Packer {
    zstd: zstd::bulk::Compressor<'static>,
    out: Vec<u8>,
}

impl Packer {
    /// A packer.
    ///
    /// # Errors
    /// Lack of memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            zstd: zstd::bulk::Compressor::new(LEVEL)?,
            out: Vec::new(),
        })
    }

    /// What to send for `body`: a smaller form where there is one.
    pub fn pack<'a>(&'a mut self, body: &'a [u8]) -> (Coding, &'a [u8]) {
        if body.len() < LEAST || !self.probe(body) {
            return (Coding::Plain, body);
        }
        match self.squeeze(body) {
            Some(length) => (Coding::Zstd, &self.out[..length]),
            None => (Coding::Plain, body),
        }
    }

    /// Whether a piece from the middle shrinks.
    fn probe(&mut self, body: &[u8]) -> bool {
        if body.len() < 4 * PROBE {
            return true;
        }
        let middle = body.len() / 2;
        self.squeeze(&body[middle..middle + PROBE]).is_some()
    }

    fn squeeze(&mut self, bytes: &[u8]) -> Option<usize> {
        let most = bytes.len() / 256 * WORTHWHILE;
        if self.out.len() < most {
            self.out.resize(most, 0);
        }
        // Too little room is how zstd is told to give up.
        self.zstd
            .compress_to_buffer(bytes, &mut self.out[..most])
            .ok()
    }
}

/// Unpacks bodies. One for each thread that does.
pub struct Unpacker(zstd::bulk::Decompressor<'static>);

impl Unpacker {
    /// An unpacker.
    ///
    /// # Errors
    /// Lack of memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self(zstd::bulk::Decompressor::new()?))
    }

    /// The `length` bytes that `body` holds.
    ///
    /// # Errors
    /// That it holds more, fewer, or none that can be read. Never allocates more than `length`.
    pub fn unpack(&mut self, coding: Coding, body: &[u8], length: usize) -> io::Result<Vec<u8>> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        if length > MAX_BODY {
            return Err(wrong("a body that is longer than allowed"));
        }
        let bytes = match coding {
            Coding::Plain => body.to_vec(),
            Coding::Zstd => {
                let mut out = vec![0; length];
                let found = self.0.decompress_to_buffer(body, &mut out[..])?;
                out.truncate(found);
                out
            }
        };
        if bytes.len() != length {
            return Err(wrong("a body of another length than announced"));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both() -> (Packer, Unpacker) {
        (Packer::new().unwrap(), Unpacker::new().unwrap())
    }

    #[test]
    fn what_shrinks_is_packed_and_what_does_not_is_left() {
        let (mut packer, mut unpacker) = both();
        let text = b"a mount is several connections ".repeat(10_000);
        let (coding, packed) = packer.pack(&text);
        assert!(coding == Coding::Zstd && packed.len() < text.len() / 10);
        assert_eq!(unpacker.unpack(coding, packed, text.len()).unwrap(), text);
        let mut noise = vec![0; 100_000];
        fastrand::Rng::with_seed(1).fill(&mut noise);
        let (coding, packed) = packer.pack(&noise);
        assert!(coding == Coding::Plain && packed == noise);
    }

    #[test]
    fn a_bomb_does_not_go_off() {
        let mut unpacker = Unpacker::new().unwrap();
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
        assert!(unpacker.unpack(Coding::Zstd, &bomb, 65_536).is_err());
        assert!(unpacker.unpack(Coding::Zstd, &bomb, usize::MAX).is_err());
        let short = zstd::bulk::compress(&[7; 4096], 1).unwrap();
        assert!(unpacker.unpack(Coding::Zstd, &short, 8192).is_err());
    }

    proptest! {
        #[test]
        fn rubbish_is_refused_and_bodies_come_back(bytes in prop::collection::vec(0u8..4, 0..70_000), length in 0usize..5000) {
            let (mut packer, mut unpacker) = both();
            let (coding, packed) = packer.pack(&bytes);
            let packed = packed.to_vec();
            prop_assert_eq!(unpacker.unpack(coding, &packed, bytes.len()).unwrap(), bytes.clone());
            if length != bytes.len() {
                prop_assert!(unpacker.unpack(coding, &packed, length).is_err());
            }
            let _ = unpacker.unpack(Coding::Zstd, &bytes, length);
        }
    }
}
