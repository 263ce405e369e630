//! A batch from an untrusted source. Decoded batches are complete, and encode to the same bytes.
//! Half of the inputs are only the front of a batch, and get digests and proofs of the right length.

use drover_core::Digest;
use drover_teleport::protocol::BATCH_BLOCKS;
use drover_teleport::testing::{Batch, PROOF_BLOCKS};

fn check(bytes: &[u8]) -> bool {
    let Ok(batch) = Batch::decode(bytes) else {
        return false;
    };
    let blocks = batch.data.count() as usize;
    assert!(batch.data.blocks() <= BATCH_BLOCKS && blocks as u64 <= batch.data.blocks());
    assert_eq!((batch.heads.len(), batch.digests.len()), (blocks, blocks));
    assert_eq!(batch.proofs.len(), blocks.div_ceil(PROOF_BLOCKS));
    assert_eq!(batch.data.iter().count(), blocks);
    assert!(batch.digests.iter().all(|d| d.short() == *d));
    assert_eq!(Batch::decode(&batch.encode()).as_ref(), Ok(&batch));
    true
}

pub fn run(data: &[u8]) {
    let Some((&mode, bytes)) = data.split_first() else {
        return;
    };
    if mode & 1 == 0 {
        check(bytes);
        return;
    }
    let mut whole = bytes.to_vec();
    for blocks in 0..=usize::from(mode) {
        let proofs = blocks.div_ceil(PROOF_BLOCKS) * Digest::LEN;
        whole.resize(bytes.len() + blocks * Digest::SHORT_LEN + proofs, 7);
        if check(&whole) {
            return;
        }
    }
}
