//! Writes the new file of a merge: the disk as mounts see it, raw or as qcow2.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, ExtentKind, ReadAt, is_zero};
use drover_mount::server::View;
use rustix::fs::{FallocateFlags, fallocate, ioctl_ficlone};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Result};

/// How much of the disk is mapped at a time.
const WINDOW: u64 = 1 << 30;

/// Copy buffer size.
const SLAB: usize = 1 << 20;

/// Zero runs of this length are left as holes.
const GRAIN: usize = BLOCK_SIZE;

/// qcow2 cluster size: each cluster is either allocated or absent.
const CLUSTER: u64 = 64 << 10;

/// Upper bound on data runs that are tracked; everything after the last is one run.
const MAX_RUNS: usize = 1 << 20;

/// A format that drover writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// The disk, byte for byte.
    Raw,
    /// A qcow2 image without backing file.
    Qcow2,
}

/// Progress callback, with the bytes done; an error cancels the work.
pub type Progress<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// The content of the new file.
pub struct Part {
    view: View,
    data: Vec<Range<u64>>,
    /// The layout as a qcow2 file, when that is the format.
    qcow2: Option<Arc<dyn ReadAt>>,
}

impl Part {
    /// Computes what a file of that format will contain.
    ///
    /// # Errors
    /// When the disk cannot be read, or is too large for the format.
    pub fn new(view: View, to: Target) -> Result<Part> {
        let data = match to {
            Target::Raw => data_of(&view, GRAIN as u64)?,
            Target::Qcow2 => data_of(&view, CLUSTER)?,
        };
        let qcow2 = match to {
            Target::Raw => None,
            Target::Qcow2 => Some(drover_image::qcow2_of(Arc::new(view.clone()), &data)?),
        };
        Ok(Part { view, data, qcow2 })
    }

    /// Upper bound on the space the file takes when it shares no extents.
    pub fn room(&self) -> u64 {
        match &self.qcow2 {
            Some(content) => content.len(),
            None => self.data.iter().map(|run| run.end - run.start).sum(),
        }
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.qcow2.as_ref().map_or(self.view.len(), |c| c.len())
    }

    /// Writes the file. `progress` receives the position reached in the file.
    ///
    /// # Errors
    /// When the disk cannot be read, the file cannot be written, or `progress` cancels.
    pub fn write(&self, file: &File, path: &Path, progress: &mut Progress<'_>) -> Result<()> {
        file.set_len(self.len())
            .with_context(|| format!("cannot write {}", path.display()))?;
        match &self.qcow2 {
            Some(content) => copy(content, 0..content.len(), file, path, progress, false)?,
            None => {
                for run in &self.data {
                    copy(&self.view, run.clone(), file, path, progress, false)?;
                }
            }
        }
        progress(self.len())
    }

    /// Writes the file as a reflink of the raw file `base` plus the changes, so that only the changes take space. False
    /// when the file system cannot share extents.
    ///
    /// # Errors
    /// As [`Part::write`].
    pub fn write_over(
        &self,
        base: &Path,
        file: &File,
        path: &Path,
        progress: &mut Progress<'_>,
    ) -> Result<bool> {
        let cannot = || format!("cannot write {}", path.display());
        let old = File::open(base).with_context(|| format!("cannot read {}", base.display()))?;
        if self.qcow2.is_some() || old.metadata()?.len() != self.len() {
            return Ok(false);
        }
        if ioctl_ficlone(file, &old).is_err() {
            return Ok(false);
        }
        let mut at = 0;
        while at < self.len() {
            let window = at..(at + WINDOW).min(self.len());
            for (bytes, zeros) in self.view.changes_in(window.clone()) {
                match zeros {
                    true => punch(file, &bytes).with_context(cannot)?,
                    false => copy(&self.view, bytes, file, path, progress, true)?,
                }
            }
            at = window.end;
            progress(at)?;
        }
        Ok(true)
    }
}

/// Makes a range read as zeros.
fn punch(file: &File, bytes: &Range<u64>) -> std::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let length = bytes.end - bytes.start;
    if fallocate(file, flags, bytes.start, length).is_ok() {
        return Ok(());
    }
    let zeros = vec![0; SLAB.min(length as usize)];
    let mut at = bytes.start;
    while at < bytes.end {
        let n = zeros.len().min((bytes.end - at) as usize);
        file.write_all_at(&zeros[..n], at)?;
        at += n as u64;
    }
    Ok(())
}

/// Copies a range; unless `zeros` are written too, leaves holes for long runs of them.
fn copy(
    from: &dyn ReadAt,
    range: Range<u64>,
    file: &File,
    path: &Path,
    progress: &mut Progress<'_>,
    zeros: bool,
) -> Result<()> {
    let wanted = |grain: &[u8]| zeros || !is_zero(grain);
    let mut slab = vec![0; SLAB];
    let mut at = range.start;
    while at < range.end {
        progress(at)?;
        let n = slab.len().min((range.end - at) as usize);
        from.read_exact_at(&mut slab[..n], at)
            .context("cannot read the disk")?;
        let mut from = 0;
        while from < n {
            let run = slab[from..n]
                .chunks(GRAIN)
                .take_while(|grain| wanted(grain));
            let length: usize = run.map(<[u8]>::len).sum();
            file.write_all_at(&slab[from..from + length], at + from as u64)
                .with_context(|| format!("cannot write {}", path.display()))?;
            from += length;
            let zeros = slab[from..n]
                .chunks(GRAIN)
                .take_while(|grain| !wanted(grain));
            from += zeros.map(<[u8]>::len).sum::<usize>();
        }
        at += n as u64;
    }
    Ok(())
}

/// The data runs of the disk, in whole grains.
fn data_of(view: &View, grain: u64) -> Result<Vec<Range<u64>>> {
    let end = view.len();
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < end {
        let extents = view
            .extents(at, (end - at).min(WINDOW))
            .context("cannot read the disk")?;
        for extent in extents.iter().filter(|e| e.kind == ExtentKind::Data) {
            let start = extent.offset - extent.offset % grain;
            let stop = extent.end().next_multiple_of(grain).min(end);
            match runs.last_mut() {
                Some(last) if start <= last.end => last.end = last.end.max(stop),
                _ => runs.push(start..stop),
            }
        }
        if runs.len() >= MAX_RUNS
            && let Some(last) = runs.last_mut()
        {
            last.end = end;
            break;
        }
        let next = extents.last().map_or(end, drover_core::Extent::end);
        // A range that the device does not describe counts as data.
        if next <= at {
            runs.push(at..end);
            break;
        }
        at = next;
    }
    Ok(runs)
}
