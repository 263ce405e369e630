//! Pieces of plans.

use drover_index::Via;
use drover_store::sequences::From;

use crate::protocol::Matched;

/// The same origin, advanced by `by` blocks.
pub(super) fn advanced(from: From, by: u32) -> From {
    let by = u64::from(by);
    match from {
        From::Literal => From::Literal,
        From::Image { image, first } => From::Image {
            image,
            first: first + by,
        },
        From::Own { first } => From::Own { first: first + by },
        From::Sequence { first } => From::Sequence { first: first + by },
    }
}

/// Counts reused blocks by what found them.
pub(super) fn count_via(matched: &mut Matched, via: Via, blocks: u64) {
    match via {
        Via::C0 => matched.c0 += blocks,
        Via::C1 => matched.c1 += blocks,
        Via::C2 => matched.c2 += blocks,
        Via::Anchor => matched.anchor += blocks,
        Via::Aligned => matched.aligned += blocks,
        Via::Repeat => matched.repeat += blocks,
        Via::Literal => {}
    }
}
