//! `BATCH`: which blocks of 8 MiB of the walk hold data, which of those are heads, their short digests for matching,
//! and proofs of their full digests.
//!
//! Digests are most of what crosses the link for a known image, so only 12 bytes of each are sent. The receiver
//! digests every block in place anyway: one proof for each [`PROOF_BLOCKS`] of them, over the full digests, shows
//! that all are correct.

use drover_core::{BlockIndex, Digest, Head, put_varint};
use drover_store::DataBits;

use super::{Malformed, Reader};
use crate::protocol::BATCH_BLOCKS;

/// Number of data blocks that share a proof.
pub const PROOF_BLOCKS: usize = 64;

/// The proofs of data blocks with these full digests: for each [`PROOF_BLOCKS`] of them, the BLAKE3 of their
/// concatenated digests.
#[must_use]
pub fn proofs_of(digests: &[Digest]) -> Vec<Digest> {
    let proof = |group: &[Digest]| {
        let mut h = blake3::Hasher::new();
        for digest in group {
            h.update(&digest.0);
        }
        Digest(*h.finalize().as_bytes())
    };
    digests.chunks(PROOF_BLOCKS).map(proof).collect()
}

/// One batch of an image's walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Its index: it holds the blocks from `index * BATCH_BLOCKS`.
    pub index: u64,
    /// Which of its blocks hold data.
    pub data: DataBits,
    /// Whether each data block is a head, in order.
    pub heads: Vec<Head>,
    /// The short digest of each data block, in order.
    pub digests: Vec<Digest>,
    /// The proofs of the data blocks.
    pub proofs: Vec<Digest>,
}

impl Batch {
    /// Creates a batch of data blocks with these full digests.
    #[must_use]
    pub fn new(index: u64, data: DataBits, heads: Vec<Head>, full: &[Digest]) -> Self {
        debug_assert_eq!(data.count(), full.len() as u64);
        let digests = full.iter().map(Digest::short).collect();
        Batch {
            index,
            data,
            heads,
            digests,
            proofs: proofs_of(full),
        }
    }

    /// The first block of the walk in this batch.
    #[must_use]
    pub fn first_block(&self) -> u64 {
        self.index * BATCH_BLOCKS
    }

    /// The runs of blocks of the walk at these positions of the batch, which ascend.
    #[must_use]
    pub fn runs_at(&self, positions: &[u64]) -> Vec<(BlockIndex, u64)> {
        let mut out: Vec<(BlockIndex, u64)> = Vec::new();
        for position in positions {
            let block = self.first_block() + position;
            match out.last_mut() {
                Some((first, n)) if first.0 + *n == block => *n += 1,
                _ => out.push((BlockIndex(block), 1)),
            }
        }
        out
    }

    /// Encodes it for the wire and the log.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.digests.len() * (Digest::SHORT_LEN + 2) + 64);
        put_varint(&mut out, self.index);
        put_varint(&mut out, self.data.blocks());
        let runs = self.data.runs();
        put_varint(&mut out, runs.len() as u64);
        runs.iter().for_each(|&r| put_varint(&mut out, r));
        for kind in [Head::Strong, Head::Weak] {
            let places = || {
                self.heads
                    .iter()
                    .enumerate()
                    .filter(move |(_, h)| **h == kind)
            };
            put_varint(&mut out, places().count() as u64);
            let mut last = 0;
            for (i, _) in places() {
                put_varint(&mut out, i as u64 - last);
                last = i as u64;
            }
        }
        self.digests
            .iter()
            .for_each(|d| out.extend_from_slice(&d.0[..Digest::SHORT_LEN]));
        self.proofs.iter().for_each(|d| out.extend_from_slice(&d.0));
        out
    }

    /// Decodes a batch.
    ///
    /// # Errors
    /// When the bytes are not exactly one batch.
    pub fn decode(bytes: &[u8]) -> Result<Batch, Malformed> {
        let mut r = Reader::new(bytes, "batch");
        let index = r.at_most(u64::from(u32::MAX))?;
        let blocks = r.at_most(BATCH_BLOCKS)?;
        let runs = r.at_most(BATCH_BLOCKS + 1)?;
        let runs = (0..runs)
            .map(|_| r.varint())
            .collect::<Result<Vec<_>, _>>()?;
        let data = DataBits::from_runs(blocks, &runs).ok_or(r.malformed())?;
        if blocks == 0 {
            return Err(r.malformed());
        }
        let count = data.count();
        let mut heads = vec![Head::No; count as usize];
        for kind in [Head::Strong, Head::Weak] {
            let n = r.at_most(count)?;
            let mut at = 0u64;
            for k in 0..n {
                let step = r.at_most(count)?;
                at += step;
                let repeated = k > 0 && step == 0;
                match heads.get_mut(at as usize) {
                    Some(h @ Head::No) if !repeated => *h = kind,
                    _ => return Err(r.malformed()),
                }
            }
        }
        let short = r.take(count as usize * Digest::SHORT_LEN)?;
        let (short, _) = short.as_chunks::<{ Digest::SHORT_LEN }>();
        let digests = short.iter().map(from_short).collect();
        let proofs = r.take((count as usize).div_ceil(PROOF_BLOCKS) * Digest::LEN)?;
        let proofs = proofs.as_chunks().0.iter().map(|p| Digest(*p)).collect();
        r.end()?;
        Ok(Batch {
            index,
            data,
            heads,
            digests,
            proofs,
        })
    }
}

fn from_short(bytes: &[u8; Digest::SHORT_LEN]) -> Digest {
    let mut out = [0; Digest::LEN];
    out[..Digest::SHORT_LEN].copy_from_slice(bytes);
    Digest(out)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        pub(crate) fn any_batch()(
            index in 0u64..1000,
            kinds in prop::collection::vec((any::<bool>(), 0u8..3, any::<[u8; 32]>()), 1..300),
        ) -> Batch {
            let mut data = DataBits::new(kinds.len() as u64);
            let (mut heads, mut digests) = (Vec::new(), Vec::new());
            for (i, (is_data, head, digest)) in kinds.into_iter().enumerate() {
                if is_data {
                    data.set(i as u64);
                    heads.push([Head::No, Head::Weak, Head::Strong][head as usize]);
                    digests.push(Digest(digest));
                }
            }
            Batch::new(index, data, heads, &digests)
        }
    }

    proptest! {
        #[test]
        fn there_and_back(b in any_batch()) {
            prop_assert_eq!(Batch::decode(&b.encode()), Ok(b));
        }

        #[test]
        fn rubbish_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Batch::decode(&bytes);
        }

        #[test]
        fn a_cut_batch_is_refused(b in any_batch(), cut in 1usize..40) {
            let e = b.encode();
            prop_assert!(Batch::decode(&e[..e.len() - cut.min(e.len())]).is_err());
        }
    }
}
