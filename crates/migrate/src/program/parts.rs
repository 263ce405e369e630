//! What a program consists of, as its seeder sees it, and what of it is left to send.

use std::ops::Range;
use std::sync::Arc;

use drover_core::{BlockDevice, DeviceError, ExtentKind};
use drover_device::stage::TrackHandle;
use drover_frontend::region::{Region, RegionDevice};
use roaring::RoaringBitmap;

use super::protocol::{BLOCK, Left, MAX_RUNS, PartOffer};

/// Says what was written.
pub trait Changes: Send + Sync + 'static {
    /// What was written since the last call, or since the beginning: byte ranges. No write is lost between two calls.
    ///
    /// # Errors
    /// When that is not known.
    fn take(&self) -> Result<Vec<Range<u64>>, DeviceError>;
}

impl Changes for TrackHandle {
    fn take(&self) -> Result<Vec<Range<u64>>, DeviceError> {
        Ok(TrackHandle::take(self).runs().collect())
    }
}

/// The kernel's write tracking.
struct RegionChanges(Arc<Region>);

impl Changes for RegionChanges {
    fn take(&self) -> Result<Vec<Range<u64>>, DeviceError> {
        self.0.dirty_since_mark(true)
    }
}

/// A region or a device of a program.
#[derive(Clone)]
pub struct Part {
    pub(super) name: String,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) changes: Arc<dyn Changes>,
}

impl Part {
    /// A writable memory region. Its marks ([`Region::dirty_since_mark`]) are the seeder's during the move.
    #[must_use]
    pub fn region(name: impl Into<String>, region: Arc<Region>) -> Self {
        Self {
            name: name.into(),
            device: Arc::new(RegionDevice::new(Arc::clone(&region))),
            changes: Arc::new(RegionChanges(region)),
        }
    }

    /// A device whose changes are tracked, such as a [`Tracked`](drover_device::stage::Tracked) one with its handle.
    #[must_use]
    pub fn device(
        name: impl Into<String>,
        device: Arc<dyn BlockDevice>,
        changes: impl Changes,
    ) -> Self {
        Self {
            name: name.into(),
            device,
            changes: Arc::new(changes),
        }
    }

    pub(super) fn offer(&self) -> PartOffer {
        PartOffer {
            name: self.name.clone(),
            size: self.device.size(),
        }
    }
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = self.device.size();
        f.debug_struct("Part")
            .field("name", &self.name)
            .field("size", &size)
            .finish_non_exhaustive()
    }
}

/// Blocks of each part that are to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    sets: Vec<RoaringBitmap>,
    sizes: Vec<u64>,
}

fn narrow(block: u64) -> u32 {
    u32::try_from(block).unwrap_or(u32::MAX)
}

impl Blocks {
    /// None of these parts.
    pub(super) fn none(parts: &[Part]) -> Self {
        Self::none_of(parts.iter().map(|part| part.device.size()).collect())
    }

    /// None of parts of these sizes.
    pub(crate) fn none_of(sizes: Vec<u64>) -> Self {
        Self {
            sets: vec![RoaringBitmap::new(); sizes.len()],
            sizes,
        }
    }

    /// Adds what the other end says it lacks; false if there is no such part, or it is smaller.
    pub(crate) fn add_named(&mut self, left: &Left) -> bool {
        let Some(size) = self.sizes.get(left.part as usize).copied() else {
            return false;
        };
        left.runs.iter().all(|(first, count)| {
            let start = u64::from(*first) * BLOCK;
            let end = start + u64::from(*count) * BLOCK;
            let is_inside = *count > 0 && end < size.saturating_add(BLOCK);
            if is_inside {
                self.add(left.part as usize, start..end);
            }
            is_inside
        })
    }

    /// Adds all that is not zero.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn add_data(&mut self, parts: &[Part]) -> Result<(), (usize, DeviceError)> {
        for (index, part) in parts.iter().enumerate() {
            let size = part.device.size();
            let mut at = 0;
            while at < size {
                let length = (size - at).min(1 << 30);
                let extents = part.device.extents(at, length);
                for extent in extents.map_err(|error| (index, error))? {
                    if extent.kind == ExtentKind::Data {
                        self.add(index, at..extent.end());
                    }
                    at = extent.end();
                }
            }
        }
        Ok(())
    }

    /// Adds what was written since the last time.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn add_changes(&mut self, parts: &[Part]) -> Result<(), (usize, DeviceError)> {
        for (index, part) in parts.iter().enumerate() {
            for range in part.changes.take().map_err(|error| (index, error))? {
                self.add(index, range);
            }
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, part: usize, range: Range<u64>) {
        let blocks = narrow(range.start / BLOCK)..narrow(range.end.div_ceil(BLOCK));
        self.sets[part].insert_range(blocks);
    }

    /// How many bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.sets.iter().map(|set| set.len() * BLOCK).sum()
    }

    /// The bytes of one part, as runs.
    pub(crate) fn ranges(&self, part: usize) -> Vec<Range<u64>> {
        let runs = runs(&self.sets[part]);
        runs.map(|(first, count)| self.bytes_of(part, first, count))
            .collect()
    }

    fn bytes_of(&self, part: usize, first: u32, count: u32) -> Range<u64> {
        let end = (u64::from(first) + u64::from(count)) * BLOCK;
        u64::from(first) * BLOCK..end.min(self.sizes[part])
    }

    /// The frames that name them.
    pub(crate) fn named(&self) -> Vec<Left> {
        let mut frames = Vec::new();
        for (part, set) in self.sets.iter().enumerate() {
            let all: Vec<_> = runs(set).collect();
            frames.extend(all.chunks(MAX_RUNS).map(|runs| Left {
                part: part as u32,
                runs: runs.to_vec(),
            }));
        }
        frames
    }

    /// Takes out a run of at most `longest` bytes, at `cursor` (a part and a block) or behind it, else from the beginning.
    pub(crate) fn take_next(
        &mut self,
        cursor: &mut (usize, u32),
        longest: u64,
    ) -> Option<(usize, Range<u64>)> {
        let count = self.sets.len();
        let (start, from) = *cursor;
        // The part of the cursor twice: from the cursor on, and at last before it.
        for step in 0..=count {
            let part = (start + step) % count.max(1);
            let least = if step == 0 { from } else { 0 };
            let Some(first) = self.sets.get(part)?.range(least..).next() else {
                continue;
            };
            let end = first.saturating_add(narrow(longest / BLOCK).max(1));
            let absent = |block: &u32| self.sets[part].contains(*block);
            let end = (first..end).take_while(absent).last()? + 1;
            self.sets[part].remove_range(first..end);
            *cursor = (part, end);
            return Some((part, self.bytes_of(part, first, end - first)));
        }
        None
    }

    /// Takes out what is in a range: nothing of what was taken before, which is on its way.
    pub(crate) fn take_range(&mut self, part: usize, range: Range<u64>) -> Vec<Range<u64>> {
        let blocks = narrow(range.start / BLOCK)..narrow(range.end.div_ceil(BLOCK));
        let mut found = RoaringBitmap::new();
        found.insert_range(blocks);
        found &= &self.sets[part];
        self.sets[part] -= &found;
        runs(&found)
            .map(|(first, count)| self.bytes_of(part, first, count))
            .collect()
    }
}

/// The runs of a set.
fn runs(set: &RoaringBitmap) -> impl Iterator<Item = (u32, u32)> + '_ {
    let mut blocks = set.iter().peekable();
    std::iter::from_fn(move || {
        let first = blocks.next()?;
        let mut last = first;
        while let Some(next) = blocks.next_if(|next| *next == last + 1) {
            last = next;
        }
        Some((first, last - first + 1))
    })
}

#[cfg(test)]
mod tests {
    use drover_device::backend::MemoryDevice;
    use drover_device::stage::Tracked;

    use super::*;

    #[test]
    fn what_is_left_is_given_out_once_and_what_is_waited_for_first() {
        let (device, handle) = Tracked::new(MemoryDevice::new(64 * BLOCK + 5), 4096);
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        let parts = [
            Part::device("a", Arc::clone(&device), handle.clone()),
            Part::device("b", Arc::clone(&device), handle),
        ];
        let mut left = Blocks::none(&parts);
        left.add(0, 0..10 * BLOCK);
        left.add(1, 3 * BLOCK..64 * BLOCK + 5);
        let names: u32 = left
            .named()
            .iter()
            .flat_map(|left| &left.runs)
            .map(|r| r.1)
            .sum();
        assert_eq!(names, 10 + 62);
        let wanted = left.take_range(1, 60 * BLOCK..64 * BLOCK + 5);
        assert_eq!(wanted, vec![60 * BLOCK..64 * BLOCK + 5]);
        // It is on its way, however often it is asked for.
        assert!(left.take_range(1, 63 * BLOCK..64 * BLOCK).is_empty());
        let mut cursor = (1, 50);
        let mut seen = Vec::new();
        while let Some((part, range)) = left.take_next(&mut cursor, 4 * BLOCK) {
            assert!(range.end - range.start <= 4 * BLOCK);
            seen.push((part, range));
        }
        assert_eq!(seen[0], (1, 50 * BLOCK..54 * BLOCK));
        assert_eq!(seen[3], (0, 0..4 * BLOCK));
        let sent: u64 = seen.iter().map(|(_, range)| range.end - range.start).sum();
        assert_eq!(sent, (10 + 57) * BLOCK);
        assert_eq!(left.bytes(), 0);
    }
}
