//! Collecting written pages from the kernel.

use std::ops::Range;

use drover_core::DeviceError;

use super::dirty::Dirty;
use super::shared::Shared;
use super::table::PageState;

impl Shared {
    /// Collects what was written in `range` (bytes) since the last scan.
    pub(super) fn harvest(
        &self,
        dirty: &mut Dirty,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        let Some(pagemap) = self.pagemap.as_ref().filter(|_| self.writable) else {
            return Ok(());
        };
        if self.is_closed() {
            return Err(DeviceError::Closed);
        }
        let addresses = self.memory.address(range.start)..self.memory.address(range.end);
        let base = self.memory.address(0);
        pagemap
            .written(addresses, |run| {
                let pages = (run.start - base) / self.page..(run.end - base) / self.page;
                self.note(dirty, pages);
            })
            .map_err(|error| DeviceError::from(std::io::Error::from(error)))
    }

    fn note(&self, dirty: &mut Dirty, pages: Range<usize>) {
        let units = self.units(&(pages.start * self.page..pages.end * self.page));
        for unit in units {
            // Poisoned pages look dirty.
            if self.table.state(unit) == PageState::Failed {
                continue;
            }
            let bytes = self.bytes(&(unit..unit + 1));
            let inside =
                pages.start.max(bytes.start / self.page)..pages.end.min(bytes.end / self.page);
            dirty.marked.set(inside.clone());
            dirty.unpushed.set(inside);
        }
    }

    /// Makes a failed unit busy and absent, for another attempt. False if another thread has done so.
    pub(super) fn unpoison(&self, unit: usize) -> Result<bool, DeviceError> {
        let _dirty = self.dirty.lock();
        if self.is_closed() {
            return Err(DeviceError::Closed);
        }
        if !self.table.claim_failed(unit) {
            return Ok(false);
        }
        self.discard(unit..unit + 1);
        Ok(true)
    }
}
