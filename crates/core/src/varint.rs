//! LEB128 integers.

/// Appends `n`, seven bits per byte, lowest first.
pub fn put_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Reads an integer from the front of `input`; `None` when it is truncated or exceeds 64 bits.
pub fn take_varint(input: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = input.split_first()?;
        *input = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        n |= bits << shift;
        if byte < 0x80 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_and_back(n in any::<u64>()) {
            let mut v = Vec::new();
            put_varint(&mut v, n);
            let mut rest = &v[..];
            prop_assert_eq!(take_varint(&mut rest), Some(n));
            prop_assert!(rest.is_empty());
        }
    }

    #[test]
    fn a_number_without_an_end_is_none() {
        assert_eq!(take_varint(&mut &[0xff; 11][..]), None);
        assert_eq!(take_varint(&mut &[0x80][..]), None);
    }
}
