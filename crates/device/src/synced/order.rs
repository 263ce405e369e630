//! The order in which chunks are pulled.

use std::collections::HashSet;
use std::ops::Range;

use crate::remote::{Chunks, Shape};

/// What is pulled in the background.
#[derive(Clone, Debug, Default)]
pub enum Order {
    /// Nothing but demand fetches and read-ahead for sequential readers.
    None,
    /// First the places that are read early on any disk (both ends, where partition tables are), then the rest in
    /// order.
    #[default]
    Sequential,
    /// These first, then as [`Order::Sequential`].
    List(Vec<Chunks>),
}

/// Maximum number of runs in an order; what follows them comes with the rest.
pub const MAX_RUNS: usize = 1 << 20;

impl Order {
    /// The chunks of byte ranges, such as those of a profile, in that order, each chunk once. What is outside of the device is
    /// left out.
    #[must_use]
    pub fn of_ranges(ranges: &[Range<u64>], shape: Shape) -> Self {
        let mut seen = HashSet::new();
        let mut runs: Vec<Chunks> = Vec::new();
        let inside =
            |range: &Range<u64>| run(shape, range.start, range.end.saturating_sub(range.start));
        for index in ranges
            .iter()
            .filter_map(inside)
            .flat_map(|run| run.first..run.end())
        {
            let full = runs.len() >= MAX_RUNS;
            match runs.last_mut() {
                _ if !seen.insert(index) => {}
                Some(run) if run.end() == index => run.count += 1,
                _ if full => break,
                _ => runs.push(Chunks {
                    first: index,
                    count: 1,
                }),
            }
        }
        Self::List(runs)
    }

    /// The runs pulled before the rest, in this order.
    pub(super) fn first(&self, shape: Shape) -> Vec<Chunks> {
        let mut runs: Vec<Chunks> = match self {
            Self::None => return Vec::new(),
            Self::Sequential => Vec::new(),
            Self::List(list) => {
                let inside = |c: &&Chunks| c.count > 0 && c.first < shape.chunks();
                let cut = |c: &Chunks| Chunks {
                    first: c.first,
                    count: u64::from(c.count).min(shape.chunks() - c.first) as u32,
                };
                list.iter().filter(inside).map(cut).collect()
            }
        };
        // Partition tables and their backup at the end, boot records, superblocks of ext4, xfs and btrfs in a first
        // partition at 1 MiB.
        let places = [
            (0, 1 << 20),
            (shape.size.saturating_sub(1 << 20), 1 << 20),
            (1 << 20, 256 << 10),
            (65 << 20, 64 << 10),
        ];
        runs.extend(places.iter().filter_map(|(o, l)| run(shape, *o, *l)));
        runs
    }
}

/// The chunks that a byte range touches.
fn run(shape: Shape, offset: u64, length: u64) -> Option<Chunks> {
    let end = offset.saturating_add(length).min(shape.size);
    if offset >= end {
        return None;
    }
    let chunk = u64::from(shape.chunk);
    let first = offset / chunk;
    Some(Chunks {
        first,
        count: u32::try_from((end - 1) / chunk + 1 - first).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a list of ranges")]
    fn ranges_become_chunks_once_and_joined() {
        let shape = Shape {
            size: 10_000_000,
            chunk: 65536,
        };
        let of = |ranges: &[Range<u64>]| match Order::of_ranges(ranges, shape) {
            Order::List(runs) => Vec::from_iter(runs.iter().map(|run| (run.first, run.count))),
            _ => panic!("a list"),
        };
        let chunk = 65536;
        let ranges = [
            5 * chunk + 4096..6 * chunk + 1,
            6 * chunk + 8192..8 * chunk,
            0..4096,
            4096..8192,
            5 * chunk..9 * chunk,
        ];
        assert_eq!(of(&ranges), [(5, 3), (0, 1), (8, 1)]);
        assert_eq!(of(&[9_999_999..u64::MAX]), [(152, 1)]);
        assert_eq!(of(&[10_000_000..u64::MAX, 9..9]), []);
    }
}
