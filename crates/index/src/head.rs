//! Detects blocks that start a file by their magic number (teleportation §2.3), and encodes head kinds as bits on the
//! wire and on disk.

mod magic;

use std::sync::LazyLock;

use drover_core::Head;

/// The pairs of first bytes of all prefixes in the table; most blocks are rejected here.
static FIRST_TWO: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let mut bits = vec![0u64; 65536 / 64];
    for p in magic::PREFIXES {
        let i = usize::from(u16::from_le_bytes([p[0], p[1]]));
        bits[i / 64] |= 1 << (i % 64);
    }
    bits
});

/// Whether the block begins with the magic number of a known file type.
///
/// Some types have theirs at an offset (`ustar` at 257, `ftyp` at 4).
#[must_use]
pub fn is_strong_head(block: &[u8]) -> bool {
    let Some(&two) = block.first_chunk::<2>() else {
        return false;
    };
    let i = usize::from(u16::from_le_bytes(two));
    let known_pair = FIRST_TWO[i / 64] >> (i % 64) & 1 == 1;
    (known_pair && has_known_prefix(block, two))
        || magic::INSIDE
            .iter()
            .any(|&(at, m)| block.get(at..at + m.len()) == Some(m))
}

fn has_known_prefix(block: &[u8], two: [u8; 2]) -> bool {
    let from = magic::PREFIXES.partition_point(|p| p[..2] < two[..]);
    magic::PREFIXES[from..]
        .iter()
        .take_while(|p| p[..2] == two)
        .any(|p| block.starts_with(p))
}

/// Encodes two bits per block, four blocks per byte, first block in the low bits: 0 no head, 1 weak, 2 strong.
#[must_use]
pub fn pack_heads(heads: &[Head]) -> Vec<u8> {
    heads
        .chunks(4)
        .map(|four| {
            four.iter()
                .enumerate()
                .fold(0, |byte, (i, &h)| byte | head_to_bits(h) << (2 * i))
        })
        .collect()
}

/// The bytes are not `count` packed heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("head bits: {bytes} bytes are not {count} heads")]
pub struct HeadBitsError {
    /// Number of bytes given.
    pub bytes: usize,
    /// Number of heads expected in them.
    pub count: usize,
}

/// Decodes the output of [`pack_heads`].
///
/// # Errors
/// [`HeadBitsError`] when the length is wrong, a pair of bits is invalid, or padding is not zero.
pub fn unpack_heads(bytes: &[u8], count: usize) -> Result<Vec<Head>, HeadBitsError> {
    let err = HeadBitsError {
        bytes: bytes.len(),
        count,
    };
    if bytes.len() != count.div_ceil(4) {
        return Err(err);
    }
    let bits = |i: usize| bytes[i / 4] >> (2 * (i % 4)) & 3;
    if (count..bytes.len() * 4).any(|i| bits(i) != 0) {
        return Err(err);
    }
    (0..count)
        .map(|i| head_from_bits(bits(i)).ok_or(err))
        .collect()
}

pub(crate) fn head_to_bits(head: Head) -> u8 {
    match head {
        Head::No => 0,
        Head::Weak => 1,
        Head::Strong => 2,
    }
}

pub(crate) fn head_from_bits(bits: u8) -> Option<Head> {
    match bits {
        0 => Some(Head::No),
        1 => Some(Head::Weak),
        2 => Some(Head::Strong),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(block: &[u8]) -> bool {
        magic::PREFIXES.iter().any(|p| block.starts_with(p))
            || magic::INSIDE
                .iter()
                .any(|(at, m)| block.len() >= at + m.len() && block[*at..].starts_with(m))
    }

    #[test]
    fn the_table_is_sorted_and_no_entry_is_shadowed() {
        for pair in magic::PREFIXES.windows(2) {
            assert!(pair[0] < pair[1], "{pair:?}");
            assert!(!pair[1].starts_with(pair[0]), "{pair:?}");
        }
        assert!(magic::PREFIXES.iter().all(|p| p.len() >= 2));
    }

    #[test]
    fn well_known_types() {
        let known: &[&[u8]] = &[
            b"\x7fELF\x02\x01\x01",
            b"MZ\x90\0\x03",
            b"%PDF-1.7",
            b"\x1f\x8b\x08\0",
            b"\x89PNG\r\n\x1a\n",
            b"PK\x03\x04",
            b"#!/bin/sh\n",
            b"\xff\xd8\xff\xe0\0\x10JFIF",
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
            b"7z\xbc\xaf\x27\x1c",
            b"SQLite format 3\0",
            b"<?xml version",
            b"\xfd7zXZ\0",
            b"\x28\xb5\x2f\xfd",
            b"!<arch>\n",
            b"OggS",
            b"RIFF",
        ];
        for k in known {
            let mut block = k.to_vec();
            block.resize(4096, 0x5a);
            assert!(is_strong_head(&block), "{k:?}");
        }
        let mut tar = vec![b'a'; 4096];
        assert!(!is_strong_head(&tar));
        tar[257..262].copy_from_slice(b"ustar");
        assert!(is_strong_head(&tar));
        assert!(!is_strong_head(&[0x5a; 4096]));
        assert!(!is_strong_head(b"M"));
    }

    proptest! {
        #[test]
        fn the_fast_look_agrees_with_the_plain_one(which in 0..magic::PREFIXES.len(), cut in 0usize..9, noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let p = magic::PREFIXES[which];
            let block = [&p[..cut.min(p.len())], &noise].concat();
            prop_assert_eq!(is_strong_head(&block), plain(&block));
        }

        #[test]
        fn bits_and_back(kinds in proptest::collection::vec(0u8..3, 0..200)) {
            let heads: Vec<Head> = kinds.iter().map(|&k| head_from_bits(k).unwrap()).collect();
            let packed = pack_heads(&heads);
            prop_assert_eq!(unpack_heads(&packed, heads.len()).unwrap(), heads);
        }

        #[test]
        fn any_bits_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..20), count in 0usize..90) {
            if let Ok(heads) = unpack_heads(&bytes, count) {
                prop_assert_eq!(pack_heads(&heads), bytes);
            }
        }
    }
}
