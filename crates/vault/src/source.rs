//! What a snapshot is made of: an image, and what of it is known not to have changed.

use std::ops::Range;
use std::path::{Path, PathBuf};

use drover_core::BLOCK_SIZE_U64;
use drover_image::{Conversion, Outgoing, open_for_sending};

use crate::error::{Result, VaultError};
use crate::names::SnapshotId;
use crate::recipe::SEGMENT_BLOCKS;
use crate::snapshot::Snapshot;
use crate::vault::Vault;

const SEGMENT: u64 = SEGMENT_BLOCKS as u64 * BLOCK_SIZE_U64;

/// What a snapshot is made of.
#[derive(Debug)]
pub struct Source {
    /// What is read.
    pub image: Outgoing,
    /// Where it is, as the snapshot's record says it.
    pub from: String,
    /// An earlier snapshot of it, if there is one, and what was written since.
    pub since: Option<Since>,
}

/// What was written to a disk since a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Since {
    /// The snapshot.
    pub parent: SnapshotId,
    /// Bytes of the walk that may differ from it, in any order. All others are the same.
    pub written: Vec<Range<u64>>,
}

impl Source {
    /// A file at rest.
    ///
    /// # Errors
    /// Errors of the image.
    pub fn file(path: &Path) -> Result<Source> {
        let image = match open_for_sending(path, Conversion::AsIs) {
            Err(error) if error.opaque_helps() => {
                let mut image = open_for_sending(path, Conversion::Opaque)?;
                let note = format!("{error}; stored in the order of the file");
                image.notes.insert(0, note);
                image
            }
            opened => opened?,
        };
        Ok(Source {
            image,
            from: path.display().to_string(),
            since: None,
        })
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(&self.from)
    }
}

/// The segments that are taken from a parent without being read.
#[derive(Default)]
pub(crate) struct Unchanged {
    parent: Option<Snapshot>,
    /// Their numbers, in order.
    segments: Vec<Range<u64>>,
}

impl Unchanged {
    /// What can be taken from the parent: nothing, if that was forgotten, is damaged, or is of a disk of another size.
    /// The index has to be loaded before: what is there in a container then is there now, as long as the parent is.
    pub(crate) fn of(source: &Source, vault: &Vault) -> Result<Unchanged> {
        let none = Unchanged::default();
        let Some(since) = &source.since else {
            return Ok(none);
        };
        if !vault
            .live_ids(Some(&since.parent.machine))?
            .contains(&since.parent)
        {
            return Ok(none);
        }
        let parent = match vault.open_snapshot(&since.parent) {
            Ok(parent) => parent,
            Err(VaultError::NoSnapshot { .. }) => return Ok(none),
            Err(error) if error.is_damage() => return Ok(none),
            Err(error) => return Err(error),
        };
        let layout = &source.image.layout;
        if parent.recipe().layout != layout.encode() {
            return Ok(none);
        }
        let walk = layout.walk_blocks() * BLOCK_SIZE_U64;
        Ok(Unchanged {
            parent: Some(parent),
            segments: untouched(&since.written, walk),
        })
    }

    /// The unchanged segments from this one on, if it is one.
    pub(crate) fn from(&self, segment: u64) -> Option<Range<u64>> {
        let n = self.segments.partition_point(|run| run.end <= segment);
        let run = self.segments.get(n)?;
        run.contains(&segment).then_some(segment..run.end)
    }

    /// The first unchanged segment from this one on.
    pub(crate) fn next(&self, segment: u64) -> Option<u64> {
        let n = self.segments.partition_point(|run| run.end <= segment);
        self.segments.get(n).map(|run| run.start.max(segment))
    }

    pub(crate) fn parent(&self) -> Option<&Snapshot> {
        self.parent.as_ref()
    }
}

/// The segments of a walk in which nothing was written.
fn untouched(written: &[Range<u64>], walk: u64) -> Vec<Range<u64>> {
    let mut touched: Vec<Range<u64>> = written
        .iter()
        .filter(|range| !range.is_empty())
        .map(|range| range.start / SEGMENT..range.end.div_ceil(SEGMENT))
        .collect();
    touched.sort_unstable_by_key(|range| range.start);
    let (mut out, mut at, end) = (Vec::new(), 0, walk.div_ceil(SEGMENT));
    for range in touched {
        if at < range.start.min(end) {
            out.push(at..range.start.min(end));
        }
        at = at.max(range.end);
    }
    if at < end {
        out.push(at..end);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untouched_segments_are_those_without_a_written_byte() {
        let mut rng = fastrand::Rng::with_seed(61);
        for _ in 0..500 {
            let segments = rng.u64(0..40);
            let walk = (segments * SEGMENT).saturating_sub(rng.u64(0..SEGMENT / 4096) * 4096);
            let written: Vec<_> = (0..rng.usize(0..8))
                .map(|_| {
                    let from = rng.u64(0..walk + 2 * SEGMENT);
                    from..from + rng.u64(0..3 * SEGMENT)
                })
                .collect();
            let found = untouched(&written, walk);
            let is_found = |n: u64| found.iter().any(|run| run.contains(&n));
            for n in 0..walk.div_ceil(SEGMENT) {
                let segment = n * SEGMENT..(n + 1) * SEGMENT;
                let touched = written
                    .iter()
                    .any(|w| !w.is_empty() && w.start < segment.end && segment.start < w.end);
                assert_eq!(is_found(n), !touched, "{n} of {written:?}");
            }
            assert!(found.iter().all(|run| run.end <= walk.div_ceil(SEGMENT)));
        }
    }
}
