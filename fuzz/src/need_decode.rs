//! What an untrusted destination asks for, ascending, disjoint runs of at most a batch, and which batches it says it has.

use drover_teleport::protocol::BATCH_BLOCKS;
use drover_teleport::testing::{Have, Need, Want};

pub fn run(data: &[u8]) {
    if let Ok(have) = Have::decode(data) {
        assert!(have.batches.count() <= 1 << 21);
        for (first, n) in have.batches.iter() {
            assert!(have.has(first) && have.has(first + n - 1) && !have.has(first + n));
            assert!(first == 0 || !have.has(first - 1));
        }
        let again = Have::decode(&have.encode()).expect("what was encoded");
        assert!(
            again
                .batches
                .iter()
                .zip(have.batches.iter())
                .all(|(a, b)| a == b)
        );
    }
    if let Ok(want) = Want::decode(data) {
        assert!(want.runs.count() <= BATCH_BLOCKS);
        assert_eq!(Want::decode(&want.encode()).as_ref(), Ok(&want));
    }
    let Ok(need) = Need::decode(data) else { return };
    assert!(need.runs.count() <= BATCH_BLOCKS);
    let runs: Vec<_> = need.runs.iter().collect();
    assert!(runs.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0));
    assert!(runs.iter().all(|r| r.1 > 0 && r.0 + r.1 <= 1 << 32));
    assert_eq!(need.runs.blocks().count() as u64, need.runs.count());
    assert_eq!(Need::decode(&need.encode()).as_ref(), Ok(&need));
}
