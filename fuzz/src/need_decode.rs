//! Requests of an untrusted destination: ascending, disjoint runs of at most a batch.

use drover_teleport::protocol::BATCH_BLOCKS;
use drover_teleport::testing::Need;

pub fn run(data: &[u8]) {
    let Ok(need) = Need::decode(data) else { return };
    assert!(need.runs.count() <= BATCH_BLOCKS);
    let runs: Vec<_> = need.runs.iter().collect();
    assert!(runs.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0));
    assert!(runs.iter().all(|r| r.1 > 0 && r.0 + r.1 <= 1 << 32));
    assert_eq!(need.runs.blocks().count() as u64, need.runs.count());
    assert_eq!(Need::decode(&need.encode()).as_ref(), Ok(&need));
}
