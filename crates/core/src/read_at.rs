//! Positioned reads.

use std::io;
use std::sync::Arc;

/// A byte source of known length, read by offset and shared between threads.
///
/// `read_at` MUST behave like `pread`: it returns the number of bytes read into the start of `buf`, zero only at or
/// beyond the end (or for an empty `buf`).
pub trait ReadAt: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> u64;

    /// Reads at most `buf.len()` bytes from `offset`.
    ///
    /// # Errors
    /// I/O errors of the medium.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Whether the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` when the end is reached before `buf` is full; else any error of `read_at`.
    fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match self.read_at(buf, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    buf = &mut buf[n..];
                    offset += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl<T: ReadAt + ?Sized> ReadAt for Arc<T> {
    fn len(&self) -> u64 {
        (**self).len()
    }
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        (**self).read_at(buf, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn len(&self) -> u64 {
        Vec::len(self) as u64
    }
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let from = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(Vec::len(self));
        let n = buf.len().min(Vec::len(self) - from);
        buf[..n].copy_from_slice(&self[from..from + n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_past_the_end_is_short_and_then_an_error() {
        let v: Vec<u8> = (0..10).collect();
        let mut buf = [0u8; 4];
        assert_eq!(v.read_at(&mut buf, 8).unwrap(), 2);
        assert_eq!(&buf[..2], &[8, 9]);
        assert_eq!(v.read_at(&mut buf, u64::MAX).unwrap(), 0);
        let e = v.read_exact_at(&mut buf, 8).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
    }
}
