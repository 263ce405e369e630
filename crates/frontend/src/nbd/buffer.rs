//! A pool of buffers: a fresh one costs a page fault every 4 KiB.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::Mutex;

/// Buffer lengths are multiples of this (bytes).
const GRAIN: usize = 4096;
/// Maximum bytes that a pool keeps.
const POOL_BYTES: usize = 32 << 20;
/// Maximum buffers that a pool keeps.
const POOL_BUFFERS: usize = 256;

/// The buffers of one connection, so that data read by one client is never in a buffer of another.
#[derive(Default)]
pub(super) struct Buffers {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Buffers {
    /// A buffer of `length` bytes with arbitrary contents.
    pub(super) fn take(self: &Arc<Self>, length: usize) -> Buffer {
        let whole = length.div_ceil(GRAIN) * GRAIN;
        let found = {
            let mut kept = self.kept.lock();
            // The newest first: it is in the CPU's caches. One that is much too long would exceed the accounting.
            let fits = |b: &Vec<u8>| b.len() >= whole && b.len() <= whole + whole / 4;
            kept.buffers.iter().rposition(fits).map(|at| {
                let bytes = kept.buffers.swap_remove(at);
                kept.bytes -= bytes.len();
                bytes
            })
        };
        Buffer {
            bytes: found.unwrap_or_else(|| vec![0; whole]),
            length,
            pool: Arc::clone(self),
        }
    }

    /// Frees the kept buffers: the connection is idle.
    pub(super) fn clear(&self) {
        *self.kept.lock() = Kept::default();
    }

    fn give_back(&self, bytes: Vec<u8>) {
        let mut kept = self.kept.lock();
        if bytes.is_empty() {
            return;
        }
        while !kept.buffers.is_empty()
            && (kept.bytes + bytes.len() > POOL_BYTES || kept.buffers.len() >= POOL_BUFFERS)
        {
            let oldest = kept.buffers.remove(0);
            kept.bytes -= oldest.len();
        }
        kept.bytes += bytes.len();
        kept.buffers.push(bytes);
    }
}

/// Bytes that go back to their pool.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    pool: Arc<Buffers>,
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_what_is_kept_is_limited() {
        let pool = Arc::new(Buffers::default());
        let mut first = pool.take(5000);
        assert_eq!(first.len(), 5000);
        first[4999] = 7;
        let place = first.as_ptr();
        drop(first);
        // The same again for what is about as long, but not for what is much shorter.
        assert_ne!(pool.take(100).as_ptr(), place);
        assert_eq!(pool.take(8192).as_ptr(), place);
        let many: Vec<Buffer> = (0..100).map(|_| pool.take(1 << 20)).collect();
        drop(many);
        let kept = pool.kept.lock();
        let bytes: usize = kept.buffers.iter().map(Vec::len).sum();
        assert_eq!(bytes, kept.bytes);
        assert!(bytes <= POOL_BYTES && bytes > POOL_BYTES / 2, "{bytes}");
        drop(kept);
        let small: Vec<Buffer> = (0..1000).map(|_| pool.take(1)).collect();
        drop(small);
        assert!(pool.kept.lock().buffers.len() <= POOL_BUFFERS);
        pool.clear();
        assert_eq!(pool.kept.lock().bytes, 0);
    }
}
