//! The state that the threads of a region share, and their lock order.
//!
//! Lock order: `pushing`, `evicting`, a stripe, `dirty`, `scratch`; the others (`streams`, `buffers`, `retries`,
//! `order`) are innermost. Only `pushing` is held during device I/O; waiting for it has a deadline.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Capabilities, DeviceError};
use parking_lot::{Condvar, Mutex, RwLock};

use super::dirty::Dirty;
use super::memory::Memory;
use super::options::{MAX_PREFETCH, Options, Stats};
use super::pagemap::Pagemap;
use super::retries::Retries;
use super::scratch::Scratch;
use super::stream::Streams;
use super::table::{PageState, Table};
use super::uffd::Uffd;

/// Locks over the contents: pieces this many apart share one.
const STRIPES: usize = 64;
/// Minimum bytes covered by one lock.
pub(super) const STRIPE: usize = 64 << 10;

pub(super) struct Shared {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) capabilities: Capabilities,
    /// Size of the device in bytes.
    pub(super) size: usize,
    /// Page size in bytes.
    pub(super) page: usize,
    /// The unit of fetching and eviction in bytes: a page, or the device's alignment if that is larger.
    pub(super) unit: usize,
    pub(super) writable: bool,
    pub(super) timeout: Duration,
    /// Memory limit in bytes.
    pub(super) limit: Option<usize>,
    pub(super) memory: Memory,
    pub(super) uffd: Uffd,
    pub(super) pagemap: Option<Pagemap>,
    pub(super) table: Table,
    pub(super) streams: Mutex<Streams>,
    pub(super) buffers: Mutex<Vec<Vec<u8>>>,
    pub(super) dirty: Mutex<Dirty>,
    pub(super) pushing: Mutex<()>,
    pub(super) evicting: Mutex<()>,
    /// For eviction with concurrent writers, where the kernel can move pages.
    pub(super) scratch: Mutex<Option<Scratch>>,
    pub(super) retries: Mutex<Retries>,
    /// Units in order of arrival, for a region with a limit.
    pub(super) order: Mutex<VecDeque<Range<usize>>>,
    /// Number of holders of slices: while there are any, nothing is evicted for the limit.
    pub(super) held: AtomicUsize,
    /// Held by the thread that polls for faults.
    pub(super) leader: Mutex<()>,
    /// Faults being read from the device now.
    pub(super) demand: AtomicUsize,
    pub(super) closed: AtomicBool,
    /// Wakes the leader, to stop or to check the retries.
    pub(super) bell: OwnedFd,
    pub(super) counts: Counts,
    stripes: Vec<RwLock<()>>,
    waiting: AtomicUsize,
    settling: Mutex<()>,
    settled: Condvar,
}

/// The counters behind [`Stats`].
#[derive(Default)]
pub(super) struct Counts {
    pub(super) faults: AtomicU64,
    pub(super) shared: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) zero_bytes: AtomicU64,
    pub(super) resident: AtomicUsize,
    pub(super) failed: AtomicU64,
    pub(super) evicted: AtomicU64,
}

/// The parts of a new region.
pub(super) struct Parts {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) size: usize,
    pub(super) page: usize,
    pub(super) unit: usize,
    pub(super) memory: Memory,
    pub(super) uffd: Uffd,
    pub(super) pagemap: Option<Pagemap>,
    pub(super) bell: OwnedFd,
    pub(super) scratch: Option<Scratch>,
}

impl Shared {
    pub(super) fn new(parts: Parts, options: &Options) -> Self {
        let units = parts.memory.length().div_ceil(parts.unit);
        let pages = match options.writable {
            true => parts.memory.length() / parts.page,
            false => 0,
        };
        // What one reader is given must not evict what another has just received.
        let room = options.limit.map_or(usize::MAX, |limit| limit / 4);
        let prefetch = options.prefetch.min(MAX_PREFETCH).min(room);
        Self {
            capabilities: parts.device.capabilities(),
            device: parts.device,
            size: parts.size,
            page: parts.page,
            unit: parts.unit,
            writable: options.writable,
            timeout: options.timeout,
            limit: options.limit,
            memory: parts.memory,
            uffd: parts.uffd,
            pagemap: parts.pagemap,
            table: Table::new(units),
            streams: Mutex::new(Streams::new(prefetch / parts.unit)),
            buffers: Mutex::default(),
            dirty: Mutex::new(Dirty::new(pages)),
            pushing: Mutex::default(),
            evicting: Mutex::default(),
            scratch: Mutex::new(parts.scratch),
            retries: Mutex::default(),
            order: Mutex::default(),
            held: AtomicUsize::new(0),
            leader: Mutex::default(),
            demand: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            bell: parts.bell,
            counts: Counts::default(),
            stripes: (0..STRIPES).map(|_| RwLock::default()).collect(),
            waiting: AtomicUsize::new(0),
            settling: Mutex::default(),
            settled: Condvar::new(),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Bytes covered by one lock: no unit spans two.
    pub(super) fn stripe_bytes(&self) -> usize {
        self.unit.max(STRIPE)
    }

    /// The lock over the contents at `offset`. Held only while bytes are copied or pages removed.
    pub(super) fn stripe(&self, offset: usize) -> &RwLock<()> {
        &self.stripes[offset / self.stripe_bytes() % STRIPES]
    }

    /// All stripe locks, in order.
    pub(super) fn stripes(&self) -> &[RwLock<()>] {
        &self.stripes
    }

    /// Splits a range into pieces covered by one lock each.
    pub(super) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (stripe, mut at) = (self.stripe_bytes(), range.start);
        std::iter::from_fn(move || {
            let end = (at / stripe + 1).saturating_mul(stripe).min(range.end);
            let piece = at..end;
            at = end;
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The units that a range touches.
    pub(super) fn units(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.unit..range.end.div_ceil(self.unit)
    }

    /// The memory range of some units.
    pub(super) fn bytes(&self, units: &Range<usize>) -> Range<usize> {
        let end = (units.end * self.unit).min(self.memory.length());
        units.start * self.unit..end
    }

    pub(super) fn all_present(&self, mut units: Range<usize>) -> bool {
        units.all(|unit| self.table.state(unit) == PageState::Present)
    }

    /// Ends a claim, and notifies those waiting in [`Shared::wait`].
    pub(super) fn settle(&self, units: Range<usize>, state: PageState) {
        self.table.settle(units, state);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.settling.lock());
            self.settled.notify_all();
        }
    }

    /// Waits while `unit` is busy.
    pub(super) fn wait(&self, unit: usize, deadline: Instant) -> Result<(), DeviceError> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut settling = self.settling.lock();
        let result = loop {
            if self.is_closed() {
                break Err(DeviceError::Closed);
            }
            if self.table.state(unit) != PageState::Busy {
                break Ok(());
            }
            if self.settled.wait_until(&mut settling, deadline).timed_out() {
                break Err(DeviceError::Unavailable(format!(
                    "the device has not given {} bytes at {} for {:?}",
                    self.unit,
                    unit * self.unit,
                    self.timeout
                )));
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Makes all waiters check whether the region is closed.
    pub(super) fn rouse(&self) {
        drop(self.settling.lock());
        self.settled.notify_all();
        self.ring();
    }

    /// Wakes the leader.
    pub(super) fn ring(&self) {
        // This fails only if the counter is full, and then the leader is being woken already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    pub(super) fn stats(&self) -> Stats {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Stats {
            faults: of(&self.counts.faults),
            shared_faults: of(&self.counts.shared),
            device_reads: of(&self.counts.reads),
            bytes_read: of(&self.counts.bytes_read),
            zero_bytes: of(&self.counts.zero_bytes),
            resident_bytes: (self.counts.resident.load(Ordering::Relaxed) * self.unit)
                .min(self.memory.length()) as u64,
            failed_pages: of(&self.counts.failed),
            evicted_bytes: of(&self.counts.evicted),
        }
    }
}
