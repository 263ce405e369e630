//! A reader with bounds checks.

use drover_core::take_varint;

use super::Malformed;

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
        take_varint(&mut self.rest).ok_or(self.malformed())
    }

    /// Reads a number of at most `max`.
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
