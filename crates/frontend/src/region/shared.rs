//! The state that the threads of a region share, and their lock order.
//!
//! Lock order: `pushing`, `evicting`, a stripe, `dirty`, `scratch`; the others (`streams`, `buffers`, `retries`, `order`) are
//! taken last and alone. Only `pushing` is held while the device works; who waits for it does so with a deadline.

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

/// Locks over the content: pieces of the region that are this many apart share one.
const STRIPES: usize = 64;
/// The least bytes of a piece that one lock covers.
pub(super) const STRIPE: usize = 64 << 10;

pub(super) struct Shared {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) capabilities: Capabilities,
    /// Bytes of the device.
    pub(super) size: usize,
    /// Bytes of a page.
    pub(super) page: usize,
    /// Bytes that come and go together: a page, or the device's alignment if that is more.
    pub(super) unit: usize,
    pub(super) writable: bool,
    pub(super) timeout: Duration,
    /// Bytes that may be in memory.
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
    /// For eviction beside writers, where the kernel can move pages.
    pub(super) scratch: Mutex<Option<Scratch>>,
    pub(super) retries: Mutex<Retries>,
    /// Units in the order in which they came, for a region with a limit.
    pub(super) order: Mutex<VecDeque<Range<usize>>>,
    /// Who has the content in hand as a slice: nothing is evicted for the limit.
    pub(super) held: AtomicUsize,
    /// Who polls for faults: one thread at a time.
    pub(super) leader: Mutex<()>,
    /// Faults that the device works for now.
    pub(super) demand: AtomicUsize,
    pub(super) closed: AtomicBool,
    /// Wakes the leader: to stop, or to look at the retries again.
    pub(super) bell: OwnedFd,
    pub(super) counts: Counts,
    stripes: Vec<RwLock<()>>,
    waiting: AtomicUsize,
    settling: Mutex<()>,
    settled: Condvar,
}

/// What [`Stats`] is made of.
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

/// What a region is made with.
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
        // What one reader is given must not drive out what another one just got.
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

    /// Bytes that one lock covers: no unit lies in two.
    pub(super) fn stripe_bytes(&self) -> usize {
        self.unit.max(STRIPE)
    }

    /// The lock over the content at `offset`. Held only while bytes are copied or pages taken away.
    pub(super) fn stripe(&self, offset: usize) -> &RwLock<()> {
        &self.stripes[offset / self.stripe_bytes() % STRIPES]
    }

    /// All of them, in order.
    pub(super) fn stripes(&self) -> &[RwLock<()>] {
        &self.stripes
    }

    /// The pieces of a range that one lock covers each.
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

    /// The bytes of memory that units take.
    pub(super) fn bytes(&self, units: &Range<usize>) -> Range<usize> {
        let end = (units.end * self.unit).min(self.memory.length());
        units.start * self.unit..end
    }

    pub(super) fn all_present(&self, mut units: Range<usize>) -> bool {
        units.all(|unit| self.table.state(unit) == PageState::Present)
    }

    /// Ends what a claim began, and tells who waits for it in [`Shared::wait`].
    pub(super) fn settle(&self, units: Range<usize>, state: PageState) {
        self.table.settle(units, state);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.settling.lock());
            self.settled.notify_all();
        }
    }

    /// Waits while somebody is at `unit`.
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

    /// Tells whoever waits to look whether the region is closed.
    pub(super) fn rouse(&self) {
        drop(self.settling.lock());
        self.settled.notify_all();
        self.ring();
    }

    /// Wakes the leader.
    pub(super) fn ring(&self) {
        // It cannot fail but for a full counter, and then the bell rings already.
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
