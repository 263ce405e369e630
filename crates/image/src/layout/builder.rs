//! Builds a layout from the runs that a parser finds, in bounded memory.

use std::ops::Range;

use drover_core::BLOCK_SIZE_U64;

use super::{GrainRange, Layout, LayoutError, Order, RangeKind, forward_grain};

/// Why the runs do not form a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuildError {
    /// Too many ranges.
    TooManyRanges,
    /// Two guest runs overlap in the file, first at this byte.
    Overlap(u64),
    /// A guest run overlaps, from this byte on, a table of this name.
    OverTable(u64, &'static str),
}

/// A range under construction.
#[derive(Debug, Clone, Copy)]
struct Draft {
    walk: u64,
    /// The file offset of the first chunk.
    file: u64,
    len: u64,
    /// The length of each chunk of a reverse range; zero for a forward one.
    step: u64,
    /// Has one chunk so far: the direction is still open.
    single: bool,
    kind: RangeKind,
}

/// Takes guest runs in guest order, omits the file's holes, and adds the rest of the file as metadata.
pub(crate) struct LayoutBuilder<'a> {
    file_len: u64,
    /// The data runs of the file (no holes), sorted and disjoint.
    present: &'a [Range<u64>],
    table_grain: u32,
    max_ranges: usize,
    drafts: Vec<Draft>,
    walk_end: u64,
    /// The end of the last run, as a guest offset (for metadata, a file offset).
    key_end: Option<u64>,
}

impl<'a> LayoutBuilder<'a> {
    pub(crate) fn new(
        file_len: u64,
        present: &'a [Range<u64>],
        table_grain: u32,
        max_ranges: usize,
    ) -> Self {
        LayoutBuilder {
            file_len,
            present,
            table_grain: table_grain.max(1),
            max_ranges,
            drafts: Vec::new(),
            walk_end: 0,
            key_end: None,
        }
    }

    /// Adds guest bytes `[guest, guest+len)` stored at `file`, omitting what lies in a hole or beyond the end of the
    /// file. Runs MUST come in guest order.
    pub(crate) fn data(&mut self, guest: u64, file: u64, len: u64) -> Result<(), BuildError> {
        let end = file.saturating_add(len).min(self.file_len);
        let first = self.present.partition_point(|r| r.end <= file);
        for run in &self.present[first..] {
            if run.start >= end {
                break;
            }
            let (from, to) = (run.start.max(file), run.end.min(end));
            self.push(guest + (from - file), from, to - from, RangeKind::Data)?;
        }
        Ok(())
    }

    fn push(&mut self, key: u64, file: u64, len: u64, kind: RangeKind) -> Result<(), BuildError> {
        if len == 0 {
            return Ok(());
        }
        let walk = match self.key_end {
            Some(end) if key >= end && key / BLOCK_SIZE_U64 == (end - 1) / BLOCK_SIZE_U64 => {
                self.walk_end + (key - end)
            }
            _ => self.walk_end.next_multiple_of(BLOCK_SIZE_U64) + key % BLOCK_SIZE_U64,
        };
        let joined = walk == self.walk_end
            && self
                .drafts
                .last_mut()
                .is_some_and(|last| last.kind == kind && last.join(file, len));
        if !joined {
            if self.drafts.len() >= self.max_ranges {
                return Err(BuildError::TooManyRanges);
            }
            self.drafts.push(Draft {
                walk,
                file,
                len,
                step: 0,
                single: true,
                kind,
            });
        }
        self.walk_end = walk + len;
        self.key_end = Some(key.saturating_add(len));
        Ok(())
    }

    /// Adds the bytes that no guest run covered, in file order, and finishes the layout. `tables` are the spans that no
    /// guest run may overlap, sorted and disjoint.
    pub(crate) fn finish(
        mut self,
        tables: &[(u64, u64, &'static str)],
    ) -> Result<Layout, BuildError> {
        let mut spans: Vec<(u64, u64)> = self.drafts.iter().map(Draft::span).collect();
        spans.sort_unstable();
        if let Some(w) = spans.windows(2).find(|w| w[0].1 > w[1].0) {
            return Err(BuildError::Overlap(w[1].0));
        }
        for &(from, to) in &spans {
            let next = tables.partition_point(|t| t.1 <= from);
            if let Some(t) = tables.get(next).filter(|t| t.0 < to) {
                return Err(BuildError::OverTable(t.0.max(from), t.2));
            }
        }
        self.key_end = None;
        let mut spans = spans.into_iter().peekable();
        for run in self.present {
            let (mut at, end) = (run.start, run.end.min(self.file_len));
            // Data is always within present runs, so each span is in exactly one of them.
            while let Some((from, to)) = spans.next_if(|s| s.0 < end) {
                self.push(at, at, from - at, RangeKind::Metadata)?;
                at = to;
            }
            self.push(at, at, end.saturating_sub(at), RangeKind::Metadata)?;
        }
        let grain = self.table_grain;
        let ranges: Vec<GrainRange> = self.drafts.into_iter().map(|d| d.close(grain)).collect();
        Layout::new(self.file_len, grain, ranges).map_err(|e| match e {
            LayoutError::Overlap => BuildError::Overlap(0),
            // Everything else is excluded above; a walk past 2^64 has too many ranges first.
            _ => BuildError::TooManyRanges,
        })
    }
}

impl Draft {
    /// Appends the next chunk of the walk, if it is adjacent in the file on either side.
    fn join(&mut self, file: u64, len: u64) -> bool {
        if self.step == 0 && file == self.file + self.len {
            self.len += len;
            self.single = false;
            return true;
        }
        let step = if self.single { self.len } else { self.step };
        // The last chunk taken lies at `file - (len - step)`; this one must end there.
        let reverse = step != 0
            && step == len
            && step <= u64::from(u32::MAX)
            && self.file.checked_sub(self.len) == Some(file);
        if reverse {
            self.step = step;
            self.len += len;
            self.single = false;
        }
        reverse
    }

    fn span(&self) -> (u64, u64) {
        let end = self.file + if self.step == 0 { self.len } else { self.step };
        (end - self.len, end)
    }

    fn close(self, native: u32) -> GrainRange {
        let (grain, order) = if self.step == 0 {
            (forward_grain(self.len, native), Order::Forward)
        } else {
            // Checked when the range turned reverse.
            (u32::try_from(self.step).unwrap_or(1), Order::Reverse)
        };
        GrainRange {
            walk: self.walk,
            file: self.file,
            grain,
            count: self.len / u64::from(grain),
            order,
            kind: self.kind,
        }
    }
}
