//! Encoding of a plan: in the destination's log, and from a remote teleporter.

use drover_index::{ImageId, Origin, Plan, PlanRun, SequenceStore, Via};

use drover_core::{CompactIndex, put_varint};

use super::{Malformed, Reader};
use crate::protocol::BATCH_BLOCKS;

/// The ways in which a run can be matched, by their number on the wire.
const VIAS: [Via; 7] = [
    Via::Literal,
    Via::C0,
    Via::C1,
    Via::C2,
    Via::Anchor,
    Via::Aligned,
    Via::Repeat,
];

/// Encodes a plan.
#[must_use]
pub fn encode_plan(plan: &Plan) -> Vec<u8> {
    let mut out = Vec::with_capacity(plan.runs.len() * 6 + 8);
    put_varint(&mut out, plan.runs.len() as u64);
    for run in &plan.runs {
        put_varint(&mut out, u64::from(run.count));
        let via = VIAS.iter().position(|v| *v == run.via).unwrap_or(0) as u8;
        match run.origin {
            Origin::Literal => out.push(via << 2),
            Origin::Image { image, first } => {
                out.push(via << 2 | 1);
                put_varint(&mut out, image.0);
                put_varint(&mut out, first.0);
            }
            Origin::Sequence { first } => {
                out.push(via << 2 | 2);
                put_varint(&mut out, first);
            }
        }
    }
    put_varint(&mut out, plan.stores.len() as u64);
    for s in &plan.stores {
        put_varint(&mut out, s.first);
        put_varint(&mut out, s.from.0);
        put_varint(&mut out, u64::from(s.count));
    }
    out
}

/// Decodes a plan for `blocks` data blocks.
///
/// # Errors
/// When the bytes are not exactly one plan for that many blocks.
pub fn decode_plan(bytes: &[u8], blocks: u64) -> Result<Plan, Malformed> {
    let mut r = Reader::new(bytes, "plan");
    let n = r.at_most(BATCH_BLOCKS)?;
    let mut runs = Vec::with_capacity(n as usize);
    let mut left = blocks;
    for _ in 0..n {
        let count = r.at_most(left)?;
        if count == 0 {
            return Err(r.malformed());
        }
        left -= count;
        let tag = r.byte()?;
        let via = *VIAS.get(usize::from(tag >> 2)).ok_or(r.malformed())?;
        let origin = match tag & 3 {
            0 => Origin::Literal,
            1 => Origin::Image {
                image: ImageId(r.varint()?),
                first: CompactIndex(r.at_most(1 << 40)?),
            },
            2 => Origin::Sequence {
                first: r.at_most(1 << 40)?,
            },
            _ => return Err(r.malformed()),
        };
        runs.push(PlanRun {
            count: count as u32,
            origin,
            via,
        });
    }
    if left != 0 {
        return Err(r.malformed());
    }
    let n = r.at_most(BATCH_BLOCKS)?;
    let mut stores = Vec::with_capacity(n as usize);
    for _ in 0..n {
        let first = r.at_most(1 << 40)?;
        let from = CompactIndex(r.at_most(1 << 40)?);
        let count = r.at_most(BATCH_BLOCKS)? as u32;
        stores.push(SequenceStore { first, from, count });
    }
    r.end()?;
    Ok(Plan { runs, stores })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_run() -> impl Strategy<Value = PlanRun> {
        let origin = prop_oneof![
            Just(Origin::Literal),
            (any::<u64>(), 0u64..1 << 40).prop_map(|(i, first)| Origin::Image {
                image: ImageId(i),
                first: CompactIndex(first),
            }),
            (0u64..1 << 40).prop_map(|first| Origin::Sequence { first }),
        ];
        (1u32..20, origin, 0usize..VIAS.len()).prop_map(|(count, origin, via)| PlanRun {
            count,
            origin,
            via: VIAS[via],
        })
    }

    proptest! {
        #[test]
        fn there_and_back(
            runs in prop::collection::vec(any_run(), 0..50),
            stores in prop::collection::vec((0u64..1 << 40, 0u64..1 << 40, 0u32..129), 0..10),
        ) {
            let blocks = runs.iter().map(|r| u64::from(r.count)).sum();
            let stores = stores.into_iter().map(|(first, from, count)| SequenceStore { first, from: CompactIndex(from), count }).collect();
            let plan = Plan { runs, stores };
            let bytes = encode_plan(&plan);
            prop_assert!(decode_plan(&bytes, blocks + 1).is_err());
            prop_assert_eq!(decode_plan(&bytes, blocks), Ok(plan));
        }

        #[test]
        fn rubbish_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode_plan(&bytes, 30);
        }
    }
}
