//! Writing dirty pages back to the device.

use std::ops::Range;
use std::time::{Duration, Instant};

use drover_core::DeviceError;

use super::shared::Shared;

/// The longest single write to the device, in bytes.
const MAX_WRITE: usize = 1 << 20;
/// Maximum bytes copied aside while writers are paused; beyond this the device is written during the pause.
const SNAPSHOT: usize = 64 << 20;

/// The result of a push.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// Bytes written to the device.
    pub bytes: u64,
    /// Number of writes.
    pub writes: u64,
    /// How long writers were paused.
    pub paused: Duration,
}

/// Runs of pages being pushed. Those not written become unpushed again on drop.
struct Taken<'a> {
    shared: &'a Shared,
    runs: std::collections::VecDeque<Range<usize>>,
}

impl Taken<'_> {
    fn bytes(&self) -> usize {
        let pages: usize = self.runs.iter().map(Range::len).sum();
        pages * self.shared.page
    }

    /// The pages up to `end` are on the device.
    fn pushed(&mut self, end: usize) {
        let mut dirty = self.shared.dirty.lock();
        while let Some(run) = self.runs.front_mut().filter(|run| run.start < end) {
            let done = run.start..run.end.min(end);
            dirty.pushing.clear(done.clone());
            run.start = done.end;
            if run.start == run.end {
                self.runs.pop_front();
            }
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        let mut dirty = self.shared.dirty.lock();
        for run in self.runs.drain(..) {
            dirty.pushing.clear(run.clone());
            dirty.unpushed.set(run);
        }
    }
}

/// Calls `resume` once, also when the work in between fails or panics.
struct Paused<F: FnOnce()> {
    since: Instant,
    resume: Option<F>,
}

impl<F: FnOnce()> Paused<F> {
    fn end(mut self) -> Duration {
        if let Some(resume) = self.resume.take() {
            resume();
        }
        self.since.elapsed()
    }
}

impl<F: FnOnce()> Drop for Paused<F> {
    fn drop(&mut self) {
        if let Some(resume) = self.resume.take() {
            resume();
        }
    }
}

impl Shared {
    /// One push at a time.
    pub(super) fn push(&self) -> Result<Pushed, DeviceError> {
        let _turn = self.turn()?;
        let mut pushed = Pushed::default();
        self.write_back(&mut self.take()?, &mut pushed)?;
        self.device.flush()?;
        Ok(pushed)
    }

    pub(super) fn push_with(
        &self,
        pause: impl FnOnce(),
        resume: impl FnOnce(),
    ) -> Result<Pushed, DeviceError> {
        let _turn = self.turn()?;
        let mut pushed = Pushed::default();
        // Most pages are written while the writers run: the pause covers only what they write meanwhile.
        self.write_back(&mut self.take()?, &mut pushed)?;
        let since = Instant::now();
        pause();
        let paused = Paused {
            since,
            resume: Some(resume),
        };
        let mut taken = self.take()?;
        if taken.bytes() <= SNAPSHOT {
            let mut copies = Vec::with_capacity(taken.runs.len());
            for range in self.writes(&taken.runs) {
                let mut copy = vec![0; range.len()];
                self.copy_out(range.clone(), &mut copy)?;
                copies.push((range, copy));
            }
            pushed.paused = paused.end();
            for (range, copy) in copies {
                self.write_one(&range, &copy, &mut taken, &mut pushed)?;
            }
        } else {
            self.write_back(&mut taken, &mut pushed)?;
            pushed.paused = paused.end();
        }
        self.device.flush()?;
        Ok(pushed)
    }

    /// The right to push.
    pub(super) fn turn(&self) -> Result<parking_lot::MutexGuard<'_, ()>, DeviceError> {
        if !self.writable {
            return Err(DeviceError::ReadOnly);
        }
        self.pushing.try_lock_for(self.timeout).ok_or_else(|| {
            let timeout = self.timeout;
            DeviceError::Unavailable(format!("another push has been under way for {timeout:?}"))
        })
    }

    /// Takes everything written and not pushed.
    fn take(&self) -> Result<Taken<'_>, DeviceError> {
        let mut dirty = self.dirty.lock();
        self.harvest(&mut dirty, 0..self.memory.length())?;
        Ok(Taken {
            shared: self,
            runs: dirty.begin_push().into(),
        })
    }

    fn write_back(&self, taken: &mut Taken<'_>, pushed: &mut Pushed) -> Result<(), DeviceError> {
        let mut buffer = Vec::new();
        for range in self.writes(&taken.runs) {
            buffer.resize(range.len(), 0);
            // Taken before they are copied: the next scan sees later writes.
            self.copy_out(range.clone(), &mut buffer)?;
            self.write_one(&range, &buffer, taken, pushed)?;
        }
        Ok(())
    }

    fn write_one(
        &self,
        range: &Range<usize>,
        bytes: &[u8],
        taken: &mut Taken<'_>,
        pushed: &mut Pushed,
    ) -> Result<(), DeviceError> {
        // Before the write: if the pages are evicted and fetched again, they must not be taken for holes.
        for unit in self.units(range) {
            self.table.has_data(unit);
        }
        let inside = &bytes[..range.end.min(self.size) - range.start];
        self.device.write(range.start as u64, inside)?;
        pushed.bytes += inside.len() as u64;
        pushed.writes += 1;
        taken.pushed(range.end / self.page);
        Ok(())
    }

    /// The writes (byte ranges, in order, whole units) that transfer runs of pages to the device.
    fn writes(&self, runs: &std::collections::VecDeque<Range<usize>>) -> Vec<Range<usize>> {
        let mut whole: Vec<Range<usize>> = Vec::new();
        for run in runs {
            let units = self.units(&(run.start * self.page..run.end * self.page));
            let range = self.bytes(&units);
            match whole.last_mut() {
                Some(last) if last.end >= range.start => last.end = range.end,
                _ => whole.push(range),
            }
        }
        let longest = MAX_WRITE.min(self.capabilities.longest as usize);
        let longest = (longest / self.unit).max(1) * self.unit;
        whole
            .into_iter()
            .flat_map(|range| {
                range
                    .clone()
                    .step_by(longest)
                    .map(move |at| at..(at + longest).min(range.end))
            })
            .collect()
    }
}
