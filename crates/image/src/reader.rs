//! Bounded reading of headers and tables.

use std::sync::{Arc, Mutex, PoisonError};

use drover_core::ReadAt;

use crate::limits::{CACHED_PAGES, PAGE_BYTES};
use crate::{Format, ImageError};

/// A container file whose tables are read a page at a time and never loaded completely.
pub(crate) struct Reader {
    file: Arc<dyn ReadAt>,
    format: Format,
    /// Cached pages, most recently used first.
    pages: Mutex<Vec<(u64, Arc<[u8]>)>>,
}

/// Bytes of a table, from some offset to the end of their cached page.
pub(crate) struct Slice {
    page: Arc<[u8]>,
    start: usize,
}

impl Slice {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.page[self.start..]
    }
}

impl Reader {
    pub(crate) fn new(file: Arc<dyn ReadAt>, format: Format) -> Self {
        Reader {
            file,
            format,
            pages: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.file.len()
    }

    pub(crate) fn damaged(&self, field: &'static str, detail: impl Into<String>) -> ImageError {
        ImageError::damaged(self.format, field, detail)
    }

    pub(crate) fn unsupported(&self, detail: impl Into<String>) -> ImageError {
        ImageError::unsupported(self.format, detail)
    }

    /// Checks that `[offset, offset + len)` lies in the file.
    pub(crate) fn inside(
        &self,
        offset: u64,
        len: u64,
        field: &'static str,
    ) -> Result<(), ImageError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len()) {
            return Ok(());
        }
        Err(self.damaged(
            field,
            format!(
                "{len} bytes at {offset:#x} reach past the end of the file ({} bytes)",
                self.len()
            ),
        ))
    }

    /// Reads into `buf`, bypassing the cache.
    pub(crate) fn read(
        &self,
        offset: u64,
        buf: &mut [u8],
        field: &'static str,
    ) -> Result<(), ImageError> {
        self.inside(offset, buf.len() as u64, field)?;
        self.file
            .read_exact_at(buf, offset)
            .map_err(|e| ImageError::io(format!("read the image's {field}"), e))
    }

    /// The bytes from `offset` to the end of its page: at least `least`, if `least` is a power of two and divides
    /// `offset`.
    pub(crate) fn slice(
        &self,
        offset: u64,
        least: usize,
        field: &'static str,
    ) -> Result<Slice, ImageError> {
        self.inside(offset, least as u64, field)?;
        let number = offset / PAGE_BYTES as u64;
        let start = (offset % PAGE_BYTES as u64) as usize;
        let page = self.page(number, field)?;
        // An unaligned table of a hostile file would straddle pages.
        if page.len() < start + least {
            return Err(self.damaged(field, format!("is not aligned (at {offset:#x})")));
        }
        Ok(Slice { page, start })
    }

    /// One 8-byte big-endian entry.
    pub(crate) fn be64(&self, offset: u64, field: &'static str) -> Result<u64, ImageError> {
        Ok(be64(self.slice(offset, 8, field)?.bytes(), 0))
    }

    /// One 4-byte little-endian entry.
    pub(crate) fn le32(&self, offset: u64, field: &'static str) -> Result<u32, ImageError> {
        Ok(le32(self.slice(offset, 4, field)?.bytes(), 0))
    }

    fn page(&self, number: u64, field: &'static str) -> Result<Arc<[u8]>, ImageError> {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = pages.iter().position(|(n, _)| *n == number) {
            pages[..=i].rotate_right(1);
            return Ok(Arc::clone(&pages[0].1));
        }
        drop(pages);
        let offset = number * PAGE_BYTES as u64;
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut page = vec![0; left.min(PAGE_BYTES)];
        self.file
            .read_exact_at(&mut page, offset)
            .map_err(|e| ImageError::io(format!("read the image's {field}"), e))?;
        let page: Arc<[u8]> = page.into();
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        pages.truncate(CACHED_PAGES - 1);
        pages.insert(0, (number, Arc::clone(&page)));
        Ok(page)
    }
}

/// Fixed-size integers from a slice that is known to be long enough.
macro_rules! number {
    ($name:ident, $type:ty, $from:ident) => {
        pub(crate) fn $name(bytes: &[u8], at: usize) -> $type {
            const N: usize = size_of::<$type>();
            let mut raw = [0u8; N];
            raw.copy_from_slice(&bytes[at..at + N]);
            <$type>::$from(raw)
        }
    };
}
number!(be16, u16, from_be_bytes);
number!(be32, u32, from_be_bytes);
number!(be64, u64, from_be_bytes);
number!(le16, u16, from_le_bytes);
number!(le32, u32, from_le_bytes);
number!(le64, u64, from_le_bytes);
