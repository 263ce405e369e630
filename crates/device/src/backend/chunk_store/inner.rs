//! What the threads of a disk in a store share.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use drover_core::{DeviceError, check_range};
use parking_lot::{Condvar, Mutex};

use super::buffer::Buffer;
use super::format::{self, Header, Version};
use super::head::Own;
use super::store::{ChunkStore, Promise, Tag};
use super::sweep::Doomed;
use super::table::{Changes, Table};

/// Bytes that are written and not yet in the store.
pub(super) const MAX_BUFFER: u64 = 64 << 20;

pub(super) struct State {
    pub(super) buffer: Buffer,
    pub(super) table: Table,
    /// Versions of this session so far.
    pub(super) count: u64,
    /// Why the last attempt to write something back failed.
    pub(super) failed: Option<(DeviceError, Instant)>,
    /// Why something that was written is lost: every flush says so, until the disk is opened again.
    pub(super) lost: Option<DeviceError>,
    pub(super) closing: bool,
}

pub(super) struct Inner {
    pub(super) store: Arc<dyn ChunkStore>,
    /// As it was opened: its sizes and its number do not change.
    pub(super) header: Header,
    pub(super) read_only: bool,
    pub(super) promise: Promise,
    pub(super) max_buffer: u64,
    pub(super) state: Mutex<State>,
    /// A slot is free again, or there is something to do.
    pub(super) changed: Condvar,
    pub(super) committed: Mutex<Committed>,
    /// Its own headers, and the last epoch that is durable: nobody who holds these waits for the store.
    pub(super) own: Mutex<Own>,
    pub(super) settled: AtomicU64,
    pub(super) doomed: Doomed,
    /// Why the disk can no longer be used.
    pub(super) gone: OnceLock<DeviceError>,
    pub(super) closed: AtomicBool,
    /// The lease was given back.
    pub(super) released: AtomicBool,
    pub(super) logged: AtomicU32,
}

/// A part of a request that lies in one object.
pub(super) struct Part {
    pub(super) index: u64,
    /// In the object's part of the disk.
    pub(super) range: Range<usize>,
    /// In the request.
    pub(super) within: Range<usize>,
    pub(super) is_whole: bool,
}

/// Pages with their versions.
type Pages = Vec<(u64, Version)>;

/// The header as it was written last.
pub(super) struct Committed {
    pub(super) header: Header,
    pub(super) tag: Tag,
    /// One of which it is not known whether it was written, with what it commits.
    pub(super) unsure: Option<(Header, Changes, Pages)>,
    /// Pages that no header names, once the next one is written: until then an earlier one may still arrive.
    pub(super) stale: Pages,
    /// The store has not said yet that it is safe.
    pub(super) is_unsettled: bool,
}

impl Committed {
    pub(super) fn new(header: Header, tag: Tag) -> Self {
        Committed {
            header,
            tag,
            unsure: None,
            stale: Vec::new(),
            is_unsettled: false,
        }
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }
}

impl State {
    /// A version for what is written next.
    pub(super) fn version(&mut self, session: u32) -> Result<Version, DeviceError> {
        self.count += 1;
        let random = u64::from_le_bytes(format::random()?);
        Version::new(session, self.count, random)
            .ok_or_else(|| DeviceError::Unsupported("be written so often: mount it again".into()))
    }

    /// Drops everything that was not committed.
    pub(super) fn revert(&mut self) {
        self.buffer.clear();
        self.table.revert();
        self.lost = None;
    }
}

impl Inner {
    /// Refuses requests to a disk that is gone.
    pub(super) fn alive(&self) -> Result<(), DeviceError> {
        match self.gone.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(super) fn may_change(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        if self.read_only {
            return Err(DeviceError::ReadOnly);
        }
        check_range(offset, length, self.header.size)?;
        if self.closed.load(Ordering::Acquire) {
            return Err(DeviceError::Closed);
        }
        self.alive()
    }

    pub(super) fn parts(&self, offset: u64, length: u64) -> impl Iterator<Item = Part> {
        let (object, header) = (u64::from(self.header.object), &self.header);
        let end = offset + length;
        let mut from = offset;
        std::iter::from_fn(move || {
            let (index, at) = (from / object, (from % object) as usize);
            let length = (end - from).min(object - from % object) as usize;
            let start = (from - offset) as usize;
            from += length as u64;
            (length > 0).then(|| Part {
                index,
                range: at..at + length,
                within: start..start + length,
                is_whole: length == header.length(index) as usize,
            })
        })
    }
}
