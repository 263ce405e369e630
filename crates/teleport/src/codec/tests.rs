//! The example bytes in `docs/format/wire.md`.

use drover_core::{CompactIndex, Digest, Head};
use drover_index::{ImageId, Origin, Plan, PlanRun, SequenceStore, Via};
use drover_net::{Code, Refusal, encode};
use drover_store::DataBits;

use super::*;
use crate::matching::{encode_answer, encode_event};
use crate::teleporter::{Answer, Event, ImageEvent};

fn sample_batch() -> Batch {
    let mut data = DataBits::new(3);
    (0..3).for_each(|i| data.set(i));
    let full: Vec<Digest> = (1..4).map(|n| Digest([n; 32])).collect();
    Batch::new(0, data, vec![Head::Strong, Head::Weak, Head::No], &full)
}

#[test]
fn a_batch() {
    let mut expected = vec![0, 3, 1, 3, 1, 0, 1, 1];
    let mut digests = Vec::new();
    for n in 1..4 {
        expected.extend([n; 12]);
        digests.extend([n; 32]);
    }
    expected.extend(blake3::hash(&digests).as_bytes());
    assert_eq!(sample_batch().encode(), expected);
}

#[test]
fn proofs_are_of_64_blocks_each() {
    let full: Vec<Digest> = (0..130).map(|n| Digest([n; 32])).collect();
    let bytes: Vec<u8> = full.iter().flat_map(|d| d.0).collect();
    let by_hand = bytes
        .chunks(64 * 32)
        .map(|c| Digest(*blake3::hash(c).as_bytes()));
    assert_eq!(proofs_of(&full), by_hand.collect::<Vec<_>>());
    assert_eq!(proofs_of(&full).len(), 3);
    assert_eq!(proofs_of(&[]), []);
}

#[test]
fn runs_and_what_has_them() {
    let runs: Runs = [5, 6, 7, 300].into_iter().collect();
    let bytes = [2, 5, 3, 0xa4, 2, 1];
    assert_eq!(Need { runs: runs.clone() }.encode(), bytes);
    let header = LiteralHeader {
        slot: 200,
        packing: Packing::ZstdMore,
        runs,
    };
    assert_eq!(header.encode(), [&[0xc8, 1, 3][..], &bytes].concat());
}

#[test]
fn a_plan_and_what_has_it() {
    let run = |count, origin, via| PlanRun { count, origin, via };
    let image = Origin::Image {
        image: ImageId(7),
        first: CompactIndex(104),
    };
    let plan = Plan {
        runs: vec![
            run(4, Origin::Literal, Via::Literal),
            run(3, image, Via::C0),
            run(3, Origin::Sequence { first: 40 }, Via::C2),
        ],
        stores: vec![SequenceStore {
            first: 5,
            from: CompactIndex(6),
            count: 2,
        }],
    };
    let bytes = [3, 4, 0, 3, 5, 7, 104, 3, 14, 40, 1, 5, 6, 2];
    assert_eq!(encode_plan(&plan), bytes);
    let answer = encode_answer(&Ok(Answer::Plan(plan)));
    assert_eq!(answer, [&[1][..], &bytes].concat());
    assert_eq!(encode_answer(&Ok(Answer::Done)), [0]);
    let refusal = Refusal::new(Code::Failed, "no");
    assert_eq!(
        encode_answer(&Err(refusal.clone())),
        [&[2], encode(&refusal).as_slice()].concat()
    );
}

#[test]
fn events_for_a_teleporter() {
    use ImageEvent::*;
    for (n, what) in [Begin, Finish, Abort, Forget, Reindex]
        .into_iter()
        .enumerate()
    {
        let event = Event::Image(ImageId(300), what);
        assert_eq!(encode_event(&event), [n as u8, 0xac, 2]);
    }
    let batch = std::sync::Arc::new(sample_batch());
    let bytes = batch.encode();
    let event = Event::Match(ImageId(1), batch.clone());
    assert_eq!(encode_event(&event), [&[5, 1][..], &bytes].concat());
    let event = Event::Record(ImageId(1), batch);
    assert_eq!(encode_event(&event), [&[6, 1][..], &bytes].concat());
}

#[test]
fn control_messages() {
    use crate::protocol::*;
    use drover_net::encode;
    let open = crate::services::OpenSession {
        images: 300,
        session: [9; 16],
    };
    assert_eq!(encode(&open), [&[0xac, 2][..], &[9; 16]].concat());
    assert_eq!(
        encode(&End {
            digest: Digest([4; 32])
        }),
        [4; 32]
    );
    let accept = Accept {
        resume_batch: 1,
        resumed_blocks: 2,
        open_batches: 1,
    };
    assert_eq!(encode(&accept), [1, 2, 1]);
    let refusal = drover_net::Refusal::new(drover_net::Code::NoSpace, "no");
    assert_eq!(encode(&refusal), [10, 2, b'n', b'o', 0]);
    let give_up = GiveUp {
        discard: true,
        message: String::new(),
    };
    assert_eq!(encode(&give_up), [1, 0]);
}
