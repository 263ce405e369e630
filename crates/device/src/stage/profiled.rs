//! A stage that records what is read for the first time, for the profile of an image (vmflock §3.4).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use drover_core::{BLOCK_SIZE_U64, BlockDevice, Cost, DeviceError};
use parking_lot::Mutex;

use super::gated::{Entry, Gate, Gated, Operation, Request};

/// Upper bound on the blocks of a recording: 512 MiB of a disk. What is read after them is not recorded.
pub const MAX_FIRST_READS: usize = 1 << 17;

/// Upper bound on the groups of blocks of which it is known whether they were used: 64 GiB of a disk in one piece.
const MAX_GROUPS: usize = 1 << 18;

/// Blocks of a group.
const GROUP: u64 = 64;

/// The first read of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstRead {
    /// The block of the disk.
    pub block: u64,
    /// When, in milliseconds since the recording began.
    pub at_ms: u32,
}

/// A recording.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    /// The first reads, in order. A block that was overwritten before it was read is not among them: it is not needed from the image.
    pub reads: Vec<FirstRead>,
    /// Blocks that were overwritten before they were read.
    pub written_first: u64,
    /// How long it took, in milliseconds.
    pub lasted_ms: u64,
    /// A limit was reached: later reads are missing.
    pub is_cut: bool,
}

struct Running {
    began: Instant,
    /// A bit for each block of a group that was read or overwritten.
    used: HashMap<u64, u64>,
    so_far: Recording,
}

struct Recorder {
    /// Whether there is something to do: looked at by every request.
    is_on: AtomicBool,
    running: Mutex<Option<Running>>,
}

/// A device whose first reads can be recorded. It costs nothing that can be measured while they are not.
pub type Profiled<D> = Gated<D, ProfileGate>;

/// The gate of a [`Profiled`] device.
pub struct ProfileGate(Arc<Recorder>);

/// Starts and ends recordings.
#[derive(Clone)]
pub struct ProfileHandle(Arc<Recorder>);

impl<D: BlockDevice> Profiled<D> {
    /// Puts the stage over `inner`; nothing is recorded yet.
    pub fn new(inner: D) -> (Self, ProfileHandle) {
        let recorder = Arc::new(Recorder {
            is_on: AtomicBool::new(false),
            running: Mutex::new(None),
        });
        let gate = ProfileGate(Arc::clone(&recorder));
        (Self::with_gate(inner, gate), ProfileHandle(recorder))
    }
}

impl Gate for ProfileGate {
    type Pass<'a> = ();

    fn enter(&self, request: &Request) -> Result<Entry<()>, DeviceError> {
        if self.0.is_on.load(Ordering::Relaxed) {
            self.0.note(request);
        }
        Ok(Entry::Pass(()))
    }

    fn leave(&self, (): ()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn cost(&self, inner: Cost) -> Cost {
        inner
    }
}

impl Recorder {
    fn note(&self, request: &Request) {
        let end = request.offset.saturating_add(request.length);
        let touched = request.offset / BLOCK_SIZE_U64..end.div_ceil(BLOCK_SIZE_U64);
        let whole = request.offset.div_ceil(BLOCK_SIZE_U64)..end / BLOCK_SIZE_U64;
        let mut running = self.running.lock();
        let Some(running) = running.as_mut() else {
            return;
        };
        match request.operation {
            Operation::Read => running.read(touched),
            operation if operation.changes() => running.overwritten(whole),
            _ => {}
        }
        if running.so_far.is_cut {
            self.is_on.store(false, Ordering::Relaxed);
        }
    }
}

impl Running {
    fn read(&mut self, blocks: Range<u64>) {
        let mut at_ms = None;
        for (group, mask) in groups(blocks) {
            let Some(new) = self.mark(group, mask) else {
                return;
            };
            for bit in (0..GROUP).filter(|bit| new >> bit & 1 == 1) {
                if self.so_far.reads.len() >= MAX_FIRST_READS {
                    self.so_far.is_cut = true;
                    return;
                }
                let at_ms = *at_ms.get_or_insert_with(|| {
                    u32::try_from(self.began.elapsed().as_millis()).unwrap_or(u32::MAX)
                });
                let block = group * GROUP + bit;
                self.so_far.reads.push(FirstRead { block, at_ms });
            }
        }
    }

    fn overwritten(&mut self, blocks: Range<u64>) {
        for (group, mask) in groups(blocks) {
            let Some(new) = self.mark(group, mask) else {
                return;
            };
            self.so_far.written_first += u64::from(new.count_ones());
        }
    }

    /// Marks blocks of a group as used; returns those that were not. `None` when there is no room for the group.
    fn mark(&mut self, group: u64, mask: u64) -> Option<u64> {
        if self.used.len() >= MAX_GROUPS && !self.used.contains_key(&group) {
            self.so_far.is_cut = true;
            return None;
        }
        let used = self.used.entry(group).or_default();
        let new = mask & !*used;
        *used |= mask;
        Some(new)
    }
}

/// The groups that a range of blocks touches, each with a bit for every block of the range.
fn groups(blocks: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let (start, end) = (blocks.start, blocks.end.max(blocks.start));
    let last = end.div_ceil(GROUP);
    (start / GROUP..last).filter_map(move |group| {
        let from = start.max(group * GROUP) - group * GROUP;
        let to = end.min((group + 1) * GROUP).saturating_sub(group * GROUP);
        let below = |n: u64| match n {
            GROUP => u64::MAX,
            n => (1 << n) - 1,
        };
        (from < to).then(|| (group, below(to) & !below(from)))
    })
}

impl ProfileHandle {
    /// Begins a recording; false if one is going on.
    #[must_use]
    pub fn start(&self) -> bool {
        let mut running = self.0.running.lock();
        if running.is_some() {
            return false;
        }
        *running = Some(Running {
            began: Instant::now(),
            used: HashMap::new(),
            so_far: Recording::default(),
        });
        self.0.is_on.store(true, Ordering::Relaxed);
        true
    }

    /// Ends the recording and returns it; `None` if none is going on.
    #[must_use]
    pub fn stop(&self) -> Option<Recording> {
        let running = self.0.running.lock().take()?;
        self.0.is_on.store(false, Ordering::Relaxed);
        Some(running.done())
    }

    /// The blocks read so far and the milliseconds since the recording began; `None` if none is going on.
    #[must_use]
    pub fn progress(&self) -> Option<(u64, u64)> {
        let running = self.0.running.lock();
        let running = running.as_ref()?;
        Some((running.so_far.reads.len() as u64, running.lasted_ms()))
    }
}

impl Running {
    fn lasted_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn done(self) -> Recording {
        Recording {
            lasted_ms: self.lasted_ms(),
            ..self.so_far
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_core::Zeroes;
    use proptest::prelude::*;

    use super::*;
    use crate::backend::MemoryDevice;

    const SIZE: u64 = 300 * BLOCK_SIZE_U64;

    fn blocks(recording: &Recording) -> Vec<u64> {
        recording.reads.iter().map(|read| read.block).collect()
    }

    #[test]
    fn first_reads_are_recorded_in_order_and_what_is_overwritten_first_is_not() {
        let (device, handle) = Profiled::new(MemoryDevice::new(SIZE));
        device.read(0, &mut [0; 8192]).unwrap();
        assert_eq!((handle.progress(), handle.stop()), (None, None));
        assert!(handle.start() && !handle.start());
        device.read(64 * 4096 - 1, &mut [0; 2]).unwrap();
        device.read(4096, &mut [0; 8192]).unwrap();
        device.read(0, &mut [0; 3 * 4096]).unwrap();
        // The second is overwritten, the first and the third in part.
        device.write(10 * 4096 + 1, &[1; 2 * 4096]).unwrap();
        device
            .write_zeroes(20 * 4096, 4096, Zeroes::default())
            .unwrap();
        device.trim(21 * 4096, 4096).unwrap();
        device.prefetch(30 * 4096, 4096).unwrap();
        device.read(10 * 4096, &mut [0; 12 * 4096]).unwrap();
        assert_eq!(handle.progress().unwrap().0, 14);
        let recording = handle.stop().unwrap();
        let expected = [63, 64, 1, 2, 0, 10].into_iter().chain(12..20);
        assert_eq!(blocks(&recording), Vec::from_iter(expected));
        assert_eq!(recording.written_first, 3);
        assert!(!recording.is_cut);
        // The next one begins with nothing.
        assert!(handle.start());
        device.read(4096, &mut [0; 1]).unwrap();
        assert_eq!(blocks(&handle.stop().unwrap()), [1]);
    }

    #[test]
    fn a_recording_ends_at_its_limit() {
        let size = (MAX_FIRST_READS as u64 + 100) * BLOCK_SIZE_U64;
        let (device, handle) = Profiled::new(MemoryDevice::new(size));
        assert!(handle.start());
        let mut buffer = vec![0; 1 << 20];
        for at in (0..size).step_by(1 << 20) {
            let length = (size - at).min(1 << 20) as usize;
            device.read(at, &mut buffer[..length]).unwrap();
        }
        let recording = handle.stop().unwrap();
        assert_eq!(recording.reads.len(), MAX_FIRST_READS);
        assert!(recording.is_cut);
    }

    proptest! {
        #[test]
        fn it_is_the_list_of_first_uses(
            requests in proptest::collection::vec((any::<bool>(), 0..SIZE, 1..200_000_u64), 0..30),
        ) {
            let (device, handle) = Profiled::new(MemoryDevice::new(SIZE));
            prop_assert!(handle.start());
            let (mut used, mut expected) = (Vec::new(), Vec::new());
            for (is_read, at, length) in requests {
                let length = length.min(SIZE - at);
                let end = at + length;
                if is_read {
                    device.read(at, &mut vec![0; length as usize]).unwrap();
                    let touched = at / 4096..end.div_ceil(4096);
                    expected.extend(touched.clone().filter(|block| !used.contains(block)));
                    used.extend(touched);
                } else {
                    device.write(at, &vec![1; length as usize]).unwrap();
                    used.extend(at.div_ceil(4096)..end / 4096);
                }
            }
            prop_assert_eq!(blocks(&handle.stop().unwrap()), expected);
        }
    }
}
