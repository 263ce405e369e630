//! The line of a disk of which one state after another is copied elsewhere.

use std::ops::Range;

use super::line::Line;
use super::summary::Summary;
use super::units::CHUNK;

/// The generations of a disk that is copied again and again, in memory: each state that is copied ends a generation.
///
/// ```
/// use drover_store::generations::{CHUNK, Comparison, Points};
///
/// let mut points = Points::new(4 * CHUNK);
/// let first = points.point();
/// points.written(CHUNK + 1..CHUNK + 2);
/// let Comparison::Newer { ranges, .. } = points.point().compare(&first) else { panic!() };
/// assert_eq!(ranges, [CHUNK..2 * CHUNK]);
/// ```
pub struct Points(Line);

impl Points {
    /// A disk of `size` bytes, of which nothing was copied yet.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self(Line::new(size))
    }

    /// This range of bytes was written since the last state that was copied, or may have been.
    pub fn written(&mut self, range: Range<u64>) {
        let end = range.end.min(self.0.size);
        if range.start < end {
            let age = self.0.age();
            (range.start / CHUNK..end.div_ceil(CHUNK)).for_each(|chunk| self.0.set(chunk, age));
        }
    }

    /// A state that is about to be copied: the generation is over.
    pub fn point(&mut self) -> Summary {
        let mut summary = self.0.summary(&|_| false);
        summary.over = true;
        self.0.next();
        summary
    }
}
