//! A plan from a separate teleporter: covers its batch exactly, and encodes to the same bytes.

use drover_teleport::protocol::BATCH_BLOCKS;
use drover_teleport::testing::{decode_answer, encode_answer};
use drover_teleport::testing::{decode_plan, encode_plan};

pub fn run(data: &[u8]) {
    let [a, b, bytes @ ..] = data else { return };
    let blocks = u64::from(u16::from_le_bytes([*a, *b])) % (BATCH_BLOCKS + 1);
    if let Ok(plan) = decode_plan(bytes, blocks) {
        let covered: u64 = plan.runs.iter().map(|r| u64::from(r.count)).sum();
        assert_eq!(covered, blocks);
        assert!(plan.runs.iter().all(|r| r.count > 0));
        assert_eq!(decode_plan(&encode_plan(&plan), blocks).as_ref(), Ok(&plan));
        assert!(decode_plan(&encode_plan(&plan), blocks + 1).is_err());
    }
    if let Ok(answer) = decode_answer(bytes, blocks) {
        assert_eq!(decode_answer(&encode_answer(&answer), blocks), Ok(answer));
    }
}
