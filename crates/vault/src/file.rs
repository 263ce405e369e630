//! The file of a snapshot, to be read by offset: what a device is made of.

use std::io;

use drover_core::ReadAt;
use drover_image::Order;

use crate::snapshot::Snapshot;

/// The image file that a snapshot holds, container format and all. `drover_image::VirtualDisk::from_content` makes the
/// guest's disk of it.
pub struct SnapshotFile {
    snapshot: Snapshot,
    /// Start in the file and number of each range of the layout, by start.
    by_file: Vec<(u64, usize)>,
}

impl SnapshotFile {
    /// The file of a snapshot.
    #[must_use]
    pub fn new(snapshot: Snapshot) -> Self {
        let ranges = snapshot.layout().ranges().iter().enumerate();
        let mut by_file: Vec<_> = ranges.map(|(i, r)| (r.file_span().start, i)).collect();
        by_file.sort_unstable();
        SnapshotFile { snapshot, by_file }
    }

    /// The snapshot.
    #[must_use]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The piece at an offset of the file: its offset in the walk, none in a hole, and its length.
    fn piece(&self, offset: u64) -> (Option<u64>, u64) {
        let layout = self.snapshot.layout();
        let next = self.by_file.partition_point(|(start, _)| *start <= offset);
        if let Some(&(start, number)) = next.checked_sub(1).and_then(|i| self.by_file.get(i)) {
            let range = layout.ranges()[number];
            let within = offset - start;
            if within < range.len() {
                let grain = u64::from(range.grain);
                return match range.order {
                    Order::Forward => (Some(range.walk + within), range.len() - within),
                    Order::Reverse => {
                        let number = range.count - 1 - within / grain;
                        let inner = within % grain;
                        (Some(range.walk + number * grain + inner), grain - inner)
                    }
                };
            }
        }
        let end = self
            .by_file
            .get(next)
            .map_or(layout.file_len(), |(start, _)| *start);
        (None, end - offset)
    }
}

impl ReadAt for SnapshotFile {
    fn len(&self) -> u64 {
        self.snapshot.layout().file_len()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if offset >= self.len() || buf.is_empty() {
            return Ok(0);
        }
        let (walk, len) = self.piece(offset);
        let n = usize::try_from(len).unwrap_or(usize::MAX).min(buf.len());
        match walk {
            Some(walk) => self
                .snapshot
                .read_walk(walk, &mut buf[..n])
                .map_err(|error| {
                    let kind = match error.is_damage() {
                        true => io::ErrorKind::InvalidData,
                        false => io::ErrorKind::Other,
                    };
                    io::Error::new(kind, error)
                })?,
            None => buf[..n].fill(0),
        }
        Ok(n)
    }
}
