//! LEB128 numbers and a reader that never runs over.

use super::Malformed;

/// Appends `n`.
pub fn put_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Reads from the front of a slice.
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Reader { rest: bytes, what }
    }

    pub fn malformed(&self) -> Malformed {
        Malformed(self.what)
    }

    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        if self.rest.len() < n {
            return Err(self.malformed());
        }
        let (a, b) = self.rest.split_at(n);
        self.rest = b;
        Ok(a)
    }

    pub fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    pub fn varint(&mut self) -> Result<u64, Malformed> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let b = self.byte()?;
            let bits = u64::from(b & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(self.malformed());
            }
            n |= bits << shift;
            if b & 0x80 == 0 {
                return Ok(n);
            }
        }
        Err(self.malformed())
    }

    /// A number that may not be over `max`.
    pub fn at_most(&mut self, max: u64) -> Result<u64, Malformed> {
        let n = self.varint()?;
        if n > max {
            Err(self.malformed())
        } else {
            Ok(n)
        }
    }

    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    pub fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.malformed())
        }
    }
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
            let mut r = Reader::new(&v, "number");
            prop_assert_eq!(r.varint(), Ok(n));
            prop_assert!(r.end().is_ok());
        }
    }

    #[test]
    fn a_number_without_an_end_is_malformed() {
        assert!(Reader::new(&[0xff; 11], "n").varint().is_err());
        assert!(Reader::new(&[0x80], "n").varint().is_err());
    }
}
