//! Where the bytes of a file are in its walk: the inverse of a layout.

use std::ops::Range;

use drover_core::BLOCK_SIZE_U64;
use drover_image::{GrainRange, Layout, Order};

/// The ranges of a layout in the order of the file.
pub(super) struct Places(Vec<u32>);

impl Places {
    pub fn new(layout: &Layout) -> Self {
        // A layout of more ranges would take more memory than one may.
        let count = u32::try_from(layout.ranges().len()).unwrap_or(u32::MAX);
        let mut order: Vec<u32> = (0..count).collect();
        order.sort_by_key(|i| layout.ranges()[*i as usize].file_span().start);
        Places(order)
    }

    /// The blocks of the walk with bytes of a range of the file, ascending; holes have none.
    pub fn blocks(&self, layout: &Layout, bytes: Range<u64>) -> Vec<u64> {
        let range = |i: &u32| &layout.ranges()[*i as usize];
        let first = self
            .0
            .partition_point(|i| range(i).file_span().end <= bytes.start);
        let mut out = Vec::new();
        for range in self.0[first..].iter().map(range) {
            let span = range.file_span();
            if span.start >= bytes.end {
                break;
            }
            of_range(
                range,
                span.start.max(bytes.start)..span.end.min(bytes.end),
                &mut out,
            );
        }
        out.sort_unstable();
        out.dedup();
        out
    }
}

/// The blocks of bytes that are inside a range.
fn of_range(range: &GrainRange, bytes: Range<u64>, out: &mut Vec<u64>) {
    let mut push = |walk: u64, length: u64| {
        let (first, last) = (walk / BLOCK_SIZE_U64, (walk + length - 1) / BLOCK_SIZE_U64);
        out.extend(first..=last);
    };
    if range.order == Order::Forward || range.count == 1 {
        let at = bytes.start - range.file_span().start;
        push(range.walk + at, bytes.end - bytes.start);
        return;
    }
    let grain = u64::from(range.grain);
    let (start, mut at) = (range.file_span().start, bytes.start);
    while at < bytes.end {
        let nth = (at - start) / grain;
        let inner = (at - start) % grain;
        let length = (grain - inner).min(bytes.end - at);
        // The last grain of the walk is the first of the file.
        push(range.walk + (range.count - 1 - nth) * grain + inner, length);
        at += length;
    }
}

#[cfg(test)]
mod tests {
    use drover_image::RangeKind;
    use proptest::prelude::*;

    use super::*;

    /// Ranges of either order, in a shuffled order of the file, with holes.
    fn layouts() -> impl Strategy<Value = Layout> {
        let range = (
            1u64..6,
            any::<bool>(),
            prop::sample::select(vec![512u32, 4096, 8192]),
            0u64..3,
        );
        (prop::collection::vec(range, 1..8), any::<u64>()).prop_map(|(parts, seed)| {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut file = 0;
            let mut placed: Vec<(u64, u64, bool, u32)> = Vec::new();
            for (count, reverse, grain, hole) in parts {
                file += hole * 4096;
                placed.push((file, count, reverse, grain));
                file += count * u64::from(grain);
                file = file.next_multiple_of(4096);
            }
            random.shuffle(&mut placed);
            let mut walk = 0;
            let mut ranges = Vec::new();
            for (at, count, reverse, grain) in placed {
                let last = at + (count - 1) * u64::from(grain);
                ranges.push(GrainRange {
                    walk,
                    file: if reverse { last } else { at },
                    grain,
                    count,
                    order: if reverse {
                        Order::Reverse
                    } else {
                        Order::Forward
                    },
                    kind: RangeKind::Data,
                });
                walk = (walk + count * u64::from(grain)).next_multiple_of(4096);
            }
            Layout::new(file, 4096, ranges).unwrap()
        })
    }

    proptest! {
        #[test]
        fn every_byte_is_found_in_the_block_that_the_layout_puts_it_in(layout in layouts(), from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
            let length = layout.file_len() as usize + 1;
            let (a, b) = (from.index(length) as u64, to.index(length) as u64);
            let (a, b) = (a.min(b), a.max(b));
            let found = Places::new(&layout).blocks(&layout, a..b);
            let mut expected = Vec::new();
            for piece in layout.pieces(0, layout.walk_blocks() * BLOCK_SIZE_U64) {
                let Some(file) = piece.file else { continue };
                let (start, end) = (file.max(a), (file + piece.len).min(b));
                if start < end {
                    let walk = piece.walk + start - file;
                    expected.extend(walk / BLOCK_SIZE_U64..=(walk + end - start - 1) / BLOCK_SIZE_U64);
                }
            }
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(found, expected);
        }
    }
}
