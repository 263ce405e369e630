//! The popular blocks of a vault in which machines share nothing else (`--share popular`): those that most machines
//! have, once more in containers of their own, which belong to no machine. They are appended, never moved.
//!
//! How many machines have a block is counted in a table of a fixed size, by a part of its digest. Two blocks in one
//! place are taken for one; then a block may be stored that few have, and nothing else is wrong.

use std::collections::HashSet;

use drover_core::{BLOCK_SIZE, Digest};

use crate::container::{
    ContainerId, GROUP_BYTES, Head, LocalIds, MAX_BLOCKS, Packed, SessionId, assemble,
};
use crate::error::{Result, VaultError};
use crate::names::{Machine, container_key, hooks_key};
use crate::record::{HookRecord, Share};
use crate::sparse::hooks_of;
use crate::vault::Vault;
use crate::whole::Whole;

/// Most places of the table: 64 MiB.
const MAX_PLACES: usize = 1 << 26;
/// Fewest: 4 MiB.
const MIN_PLACES: usize = 1 << 22;
/// Most blocks that are popular, of which their digests' prefixes are kept in memory: 64 GiB of data.
const MAX_POPULAR: usize = 1 << 24;

/// What a job of popular blocks did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Popularized {
    /// Machines.
    pub machines: u64,
    /// Different blocks that they have, nearly.
    pub different_blocks: u64,
    /// Blocks that were popular before.
    pub known_blocks: u64,
    /// Blocks that were added.
    pub added_blocks: u64,
    /// What they take.
    pub stored_bytes: u64,
    /// How many machines at least have a block that was added.
    pub least_machines: u64,
}

/// In how many machines the blocks of a place are.
struct Counts {
    machines: Vec<u8>,
    /// Whether the machine that is being counted has been.
    seen: Vec<u64>,
    shift: u32,
}

impl Counts {
    fn new(blocks: u64) -> Self {
        let places = usize::try_from(blocks.saturating_mul(4))
            .unwrap_or(MAX_PLACES)
            .clamp(MIN_PLACES, MAX_PLACES)
            .next_power_of_two();
        Counts {
            machines: vec![0; places],
            seen: vec![0; places / 64],
            shift: 64 - places.trailing_zeros(),
        }
    }

    fn place(&self, digest: &Digest) -> usize {
        (digest.prefix() >> self.shift) as usize
    }

    fn next_machine(&mut self) {
        self.seen.fill(0);
    }

    fn add(&mut self, digest: &Digest) {
        let place = self.place(digest);
        let (word, bit) = (place / 64, 1 << (place % 64));
        if self.seen[word] & bit == 0 {
            self.seen[word] |= bit;
            self.machines[place] = self.machines[place].saturating_add(1);
        }
    }

    fn of(&self, digest: &Digest) -> u8 {
        self.machines[self.place(digest)]
    }

    fn different(&self) -> u64 {
        self.machines.iter().filter(|&&n| n > 0).count() as u64
    }

    /// The least number of machines with which a block is among the first `budget`, and how many of those that have
    /// just that number there is room for.
    fn threshold(&self, budget: u64) -> (u8, u64) {
        let mut by_number = [0u64; 256];
        self.machines
            .iter()
            .for_each(|&n| by_number[usize::from(n)] += 1);
        let mut left = budget;
        for number in (2..=255u8).rev() {
            let there = by_number[usize::from(number)];
            if there >= left || number == 2 {
                return (number, left.min(there));
            }
            left -= there;
        }
        (2, left)
    }
}

impl Vault {
    /// Stores the blocks that most machines have once more, so that the next backups of all machines find them: the
    /// first `percent` of all different blocks by number of machines, and at least two machines. Those that are popular
    /// already stay. `pause` is called with the length of each container that was read.
    ///
    /// # Errors
    /// [`VaultError::NotPopular`]; errors of the store. Containers that are damaged are passed over.
    pub fn popularize(&self, percent: u8, pause: &mut dyn FnMut(u64)) -> Result<Popularized> {
        if self.record().share != Share::Popular {
            return Err(VaultError::NotPopular(self.place()));
        }
        self.probe()?;
        let session = self.claim()?;
        let done = self.popularize_as(session, percent, pause);
        // A claim that stays is void after a day.
        let _ = self.release(session);
        done
    }

    fn popularize_as(
        &self,
        session: SessionId,
        percent: u8,
        pause: &mut dyn FnMut(u64),
    ) -> Result<Popularized> {
        let popular = Machine::popular();
        let places = self.containers(None)?;
        let mut sorted: Vec<_> = places
            .iter()
            .map(|(machine, id, (generation, size))| (machine, id, *generation, *size))
            .collect();
        sorted.sort_unstable();
        let mut done = Popularized::default();
        let mut chosen: HashSet<u64> = HashSet::new();
        let mut counts = Counts::new(sorted.len() as u64 * MAX_BLOCKS as u64);
        let mut machine = None;
        for (of, id, generation, _) in &sorted {
            let Some(head) = self.sound_head(of, *id, *generation)? else {
                continue;
            };
            if **of == popular {
                chosen.extend(head.digests.iter().map(Digest::prefix));
                continue;
            }
            if machine != Some(*of) {
                machine = Some(*of);
                done.machines += 1;
                counts.next_machine();
            }
            head.digests.iter().for_each(|digest| counts.add(digest));
        }
        done.known_blocks = chosen.len() as u64;
        done.different_blocks = counts.different();
        let budget = (done.different_blocks * u64::from(percent) / 100)
            .saturating_sub(done.known_blocks)
            .min(MAX_POPULAR as u64);
        if budget == 0 {
            return Ok(done);
        }
        let (least, mut of_least) = counts.threshold(budget + done.known_blocks);
        done.least_machines = u64::from(least);
        let mut filling = Filling::new(self, session);
        let mut left = budget;
        for (of, id, generation, size) in &sorted {
            if **of == popular || left == 0 {
                continue;
            }
            let Some(head) = self.sound_head(of, *id, *generation)? else {
                continue;
            };
            let mut wanted = LocalIds::default();
            for (local, digest) in head.present.iter().zip(&head.digests) {
                let number = counts.of(digest);
                let is_popular = number > least || number == least && of_least > 0;
                if left == 0 || !is_popular || !chosen.insert(digest.prefix()) {
                    continue;
                }
                left -= 1;
                of_least -= u64::from(number == least);
                wanted.insert(local);
            }
            if wanted.count() == 0 {
                continue;
            }
            if let Some(whole) = self.whole_at(of, *id, *generation)? {
                done.added_blocks += filling.take(&whole, &wanted)?;
            }
            pause(*size);
        }
        done.stored_bytes = filling.end()?;
        Ok(done)
    }

    /// The head of a container; none if it is damaged or gone.
    fn sound_head(
        &self,
        machine: &Machine,
        id: ContainerId,
        generation: u32,
    ) -> Result<Option<Head>> {
        match self.head(machine, id, generation) {
            Err(error) if error.is_damage() => Ok(None),
            head => head,
        }
    }
}

/// The container of popular blocks that is being filled.
struct Filling<'a> {
    vault: &'a Vault,
    session: SessionId,
    number: u32,
    digests: Vec<Digest>,
    blocks: Vec<u8>,
    hooks: HookRecord,
    stored: u64,
}

impl<'a> Filling<'a> {
    fn new(vault: &'a Vault, session: SessionId) -> Self {
        Filling {
            vault,
            session,
            number: 0,
            digests: Vec::new(),
            blocks: Vec::new(),
            hooks: HookRecord::default(),
            stored: 0,
        }
    }

    /// Takes blocks of a container, those that are good; how many.
    fn take(&mut self, whole: &Whole, wanted: &LocalIds) -> Result<u64> {
        let mut taken = 0;
        let good = wanted.common(&whole.good);
        for (digest, block) in whole.blocks(&good) {
            self.digests.push(digest);
            self.blocks.extend_from_slice(&block);
            taken += 1;
            if self.digests.len() == MAX_BLOCKS {
                self.seal()?;
            }
        }
        Ok(taken)
    }

    fn seal(&mut self) -> Result<()> {
        let id = ContainerId::new(self.session, self.number);
        self.number += 1;
        debug_assert_eq!(self.blocks.len(), self.digests.len() * BLOCK_SIZE);
        let groups: Vec<Packed> = self.blocks.chunks(GROUP_BYTES).map(Packed::new).collect();
        let present = LocalIds::first(self.digests.len());
        let bytes = assemble(id, 0, &self.digests, &present, &groups);
        self.stored += bytes.len() as u64;
        let key = container_key(&Machine::popular(), id, 0);
        self.vault.put_own(&key, bytes)?;
        let tags = hooks_of(&self.digests).collect();
        self.hooks.containers.push((id, tags));
        self.digests.clear();
        self.blocks.clear();
        Ok(())
    }

    /// Writes what is left; the bytes of all.
    fn end(mut self) -> Result<u64> {
        if !self.digests.is_empty() {
            self.seal()?;
        }
        if !self.hooks.containers.is_empty() {
            let hooks = self.hooks.encode();
            self.vault.put_own(&hooks_key(self.session), hooks)?;
        }
        Ok(self.stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// With a table that is large enough: exactly what a map counts, and the first by number of machines.
        #[test]
        fn counts_are_exact_when_there_is_room(
            machines in proptest::collection::vec(proptest::collection::vec(0u64..60, 0..80), 1..9),
            budget in 0u64..40,
        ) {
            let digest = |n: u64| drover_index::digest_block(&n.to_le_bytes().repeat(512));
            let mut counts = Counts::new(1 << 20);
            let mut model = std::collections::BTreeMap::<u64, u8>::new();
            for blocks in &machines {
                counts.next_machine();
                blocks.iter().for_each(|&n| counts.add(&digest(n)));
                let different: std::collections::BTreeSet<_> = blocks.iter().collect();
                different.into_iter().for_each(|&n| *model.entry(n).or_default() += 1);
            }
            model.iter().for_each(|(&n, &count)| assert_eq!(counts.of(&digest(n)), count));
            prop_assert_eq!(counts.different(), model.len() as u64);
            let (least, of_least) = counts.threshold(budget);
            let above = model.values().filter(|&&n| n > least).count() as u64;
            let at = model.values().filter(|&&n| n == least).count() as u64;
            prop_assert!(least >= 2 && above + of_least <= budget && of_least <= at);
            // Nothing popular is left out while there is room.
            let shared = model.values().filter(|&&n| n >= 2).count() as u64;
            prop_assert_eq!(above + of_least, budget.min(shared));
        }
    }
}
