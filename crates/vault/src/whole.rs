//! Containers that are read whole, and new generations of them.

use bytes::Bytes;
use drover_core::{BLOCK_SIZE, Digest};

use crate::container::{
    ContainerId, GROUP_BLOCKS, GROUP_BYTES, Head, LocalIds, MAX_HEAD, Packed, assemble,
};
use crate::digester::Digester;
use crate::error::Result;
use crate::names::{Machine, container_key};
use crate::vault::Vault;

/// A head that cannot be read with all that may belong to it is read in steps of so many bytes.
const HEAD_STEP: usize = 64 << 10;

/// A container, whole, and which of its blocks are what its head says.
pub(crate) struct Whole {
    pub(crate) head: Head,
    pub(crate) bytes: Bytes,
    pub(crate) good: LocalIds,
    /// It cannot be read as a whole: `bytes` has the groups that can be read, and nothing else.
    pub(crate) is_salvaged: bool,
}

impl Whole {
    /// Verifies every block. One that has not the length that its head says has no good block.
    pub(crate) fn new(head: Head, bytes: Bytes, digester: &Digester) -> Whole {
        let mut good = LocalIds::default();
        if let Ok(wrong) = head.verify(&bytes, digester) {
            let mut wrong = wrong.into_iter().peekable();
            for (at, local) in head.present.iter().enumerate() {
                match wrong.peek() == Some(&at) {
                    true => drop(wrong.next()),
                    false => good.insert(local),
                }
            }
        }
        Whole {
            head,
            bytes,
            good,
            is_salvaged: false,
        }
    }

    /// Whether all of it is good.
    pub(crate) fn is_good(&self) -> bool {
        self.good == self.head.present
    }

    /// The digests and contents of blocks that are good.
    pub(crate) fn blocks(&self, wanted: &LocalIds) -> Vec<(Digest, Vec<u8>)> {
        let mut out = Vec::new();
        let mut unpacked: Option<(usize, Vec<u8>)> = None;
        for local in wanted.iter() {
            let at = self.head.present.rank(local);
            let group = at / GROUP_BLOCKS;
            if unpacked.as_ref().is_none_or(|(known, _)| *known != group) {
                unpacked = self.group(group).map(|raw| (group, raw));
            }
            if let Some((_, raw)) = &unpacked {
                let from = at % GROUP_BLOCKS * BLOCK_SIZE;
                out.push((self.digest(local), raw[from..from + BLOCK_SIZE].to_vec()));
            }
        }
        out
    }

    /// The blocks of a group, if they can be unpacked.
    fn group(&self, group: usize) -> Option<Vec<u8>> {
        let span = self.head.span(group, group);
        let packed = self.bytes.get(span.start as usize..span.end as usize)?;
        self.head.unpack(group, packed).ok()
    }

    /// The digest of a block that is there.
    fn digest(&self, local: u16) -> Digest {
        self.head.digests[self.head.present.rank(local)]
    }
}

/// Blocks of a container as its next generation: each from the first of `sources` that has it good. None if one is in
/// none of them, if there are none at all, or if two sources have different blocks under one id.
pub(crate) fn next_generation(
    id: ContainerId,
    generation: u32,
    wanted: &LocalIds,
    sources: &[&Whole],
) -> Option<Vec<u8>> {
    let mut digests = Vec::new();
    let mut blocks = Vec::with_capacity(wanted.count() as usize * BLOCK_SIZE);
    let mut unpacked: Vec<Option<(usize, Vec<u8>)>> = sources.iter().map(|_| None).collect();
    for local in wanted.iter() {
        let mut having = (0..sources.len()).filter(|&n| sources[n].good.contains(local));
        let number = having.next()?;
        let digest = sources[number].digest(local);
        if having.any(|n| sources[n].digest(local) != digest) {
            return None;
        }
        let (source, unpacked) = (sources[number], &mut unpacked[number]);
        let at = source.head.present.rank(local);
        let group = at / GROUP_BLOCKS;
        if unpacked.as_ref().is_none_or(|(known, _)| *known != group) {
            *unpacked = Some((group, source.group(group)?));
        }
        let from = at % GROUP_BLOCKS * BLOCK_SIZE;
        let (_, raw) = unpacked.as_ref()?;
        blocks.extend_from_slice(&raw[from..from + BLOCK_SIZE]);
        digests.push(digest);
    }
    let groups: Vec<Packed> = blocks.chunks(GROUP_BYTES).map(Packed::new).collect();
    (!digests.is_empty()).then(|| assemble(id, generation, &digests, wanted, &groups))
}

impl Vault {
    /// A container in a generation; none if it is gone, or its head is damaged. Of one that cannot be read as a whole, what can be read.
    pub(crate) fn whole_at(
        &self,
        machine: &Machine,
        id: ContainerId,
        generation: u32,
    ) -> Result<Option<Whole>> {
        let key = container_key(machine, id, generation);
        let head = match self.head(machine, id, generation) {
            Err(error) if error.is_damage() => self.head_in_steps(&key, id, generation)?,
            head => head?,
        };
        let Some(head) = head else {
            return Ok(None);
        };
        match self.objects.get(&key) {
            Ok(None) => Ok(None),
            Ok(Some(bytes)) if bytes.len() as u64 == head.container_len() => {
                Ok(Some(Whole::new(head, bytes, &self.digester)))
            }
            Ok(Some(_)) => self.salvaged(&key, head),
            Err(error) if error.is_damage => self.salvaged(&key, head),
            Err(error) => Err(error.into()),
        }
    }

    /// The head of a container of which something near the head is damaged; none if the head is, or if it is gone.
    fn head_in_steps(&self, key: &str, id: ContainerId, generation: u32) -> Result<Option<Head>> {
        for end in (HEAD_STEP..MAX_HEAD).step_by(HEAD_STEP) {
            let bytes = match self.objects.get_range(key, 0..end as u64) {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Ok(None),
                Err(error) if error.is_damage => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            if let Ok(head) = Head::parse(&bytes) {
                return Ok((head.id == id && head.generation == generation).then_some(head));
            }
        }
        Ok(None)
    }

    /// The groups of a container that can be read; in place of the others are zeros. None if it is gone.
    fn salvaged(&self, key: &str, head: Head) -> Result<Option<Whole>> {
        // A head is only read if its groups are no longer than their blocks.
        let mut bytes = vec![0; head.container_len() as usize];
        for group in 0..head.groups() {
            let span = head.span(group, group);
            let place = &mut bytes[span.start as usize..span.end as usize];
            match self.objects.get_range(key, span) {
                Ok(Some(part)) if part.len() == place.len() => place.copy_from_slice(&part),
                // Cut off.
                Ok(Some(_)) => {}
                Ok(None) => return Ok(None),
                Err(error) if error.is_damage => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(Whole {
            is_salvaged: true,
            ..Whole::new(head, bytes.into(), &self.digester)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A container of these blocks; of `bad` groups a bit is flipped.
    fn whole(ids: &[u16], bad: &[usize]) -> Whole {
        let mut present = LocalIds::default();
        let mut blocks = Vec::new();
        for &id in ids {
            present.insert(id);
            let mut block = vec![0; BLOCK_SIZE];
            fastrand::Rng::with_seed(u64::from(id)).fill(&mut block[..2000]);
            blocks.extend_from_slice(&block);
        }
        let mut digests = Vec::new();
        drover_index::digest_blocks(&blocks, &mut digests);
        let groups: Vec<_> = blocks.chunks(GROUP_BYTES).map(Packed::new).collect();
        let mut bytes = assemble(ContainerId(5), 2, &digests, &present, &groups);
        let head = Head::parse(&bytes).unwrap();
        for &group in bad.iter().filter(|&&group| group < groups.len()) {
            bytes[head.span(group, group).start as usize + 3] ^= 1;
        }
        Whole::new(head, bytes.into(), &Digester::default())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// What two damaged copies have together, and nothing else, is in the next generation, under the same ids.
        #[test]
        fn copies_complete_each_other(
            mine in proptest::collection::btree_set(0u16..300, 1..150),
            theirs in proptest::collection::btree_set(0u16..300, 1..150),
            bad in proptest::collection::btree_set(0usize..5, 0..3),
            bad_there in proptest::collection::btree_set(0usize..5, 0..3),
        ) {
            let ids = |set: &std::collections::BTreeSet<u16>| set.iter().copied().collect::<Vec<_>>();
            let list = |set: &std::collections::BTreeSet<usize>| set.iter().copied().collect::<Vec<_>>();
            let one = whole(&ids(&mine), &list(&bad));
            let other = whole(&ids(&theirs), &list(&bad_there));
            let good = |set: &std::collections::BTreeSet<u16>, bad: &std::collections::BTreeSet<usize>| {
                let kept = set.iter().enumerate().filter(|(at, _)| !bad.contains(&(at / GROUP_BLOCKS)));
                kept.map(|(_, &id)| id).collect::<std::collections::BTreeSet<u16>>()
            };
            let model: Vec<u16> = good(&mine, &bad).union(&good(&theirs, &bad_there)).copied().collect();
            let mut wanted = one.good.clone();
            wanted.union(&other.good);
            prop_assert_eq!(wanted.iter().collect::<Vec<_>>(), model.clone());
            match next_generation(ContainerId(5), 3, &wanted, &[&one, &other]) {
                None => prop_assert!(model.is_empty()),
                Some(bytes) => {
                    let head = Head::parse(&bytes).unwrap();
                    prop_assert_eq!(head.generation, 3);
                    let again = Whole::new(head, bytes.into(), &Digester::default());
                    prop_assert!(again.is_good());
                    prop_assert_eq!(&again.head.present, &wanted);
                    let clean = whole(&model, &[]);
                    prop_assert_eq!(&again.head.digests, &clean.head.digests);
                }
            }
            // One more than there is.
            wanted.insert(4000);
            prop_assert_eq!(next_generation(ContainerId(5), 3, &wanted, &[&one, &other]), None);
        }
    }
}
