//! Which blocks of which containers a snapshot uses (`docs/format/vault-uses.md`): what deletion goes by.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drover_core::{put_varint, take_varint};
use drover_storage::{Envelope, EnvelopeError};
use roaring::RoaringBitmap;

use crate::container::{ContainerId, MAX_BLOCKS};
use crate::ids::Ids;
use crate::names::Machine;
use crate::recipe::MAX_CONTAINERS;
use crate::record::unpack;

/// Most bytes before compression.
pub const MAX_USES_BYTES: usize = 256 << 20;

const KIND: Envelope = Envelope {
    magic: *b"DRVRUSE\0",
    version: 1,
    max_bytes: MAX_USES_BYTES as u64,
};

/// Why bytes are no uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UsesError {
    /// Of another kind, or damaged.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
    /// Fields that contradict each other.
    #[error("it contradicts itself")]
    Malformed,
}

/// The blocks that a snapshot uses, by container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Uses {
    /// The machine of each container, and which blocks.
    pub containers: BTreeMap<ContainerId, (Arc<Machine>, Ids)>,
    machines: BTreeSet<Arc<Machine>>,
}

impl Uses {
    /// Adds a block.
    pub fn insert(&mut self, machine: &Machine, id: ContainerId, local: u16) {
        self.of(machine, id).insert(local);
    }

    /// What is used of a container.
    fn of(&mut self, machine: &Machine, id: ContainerId) -> &mut Ids {
        let machines = &mut self.machines;
        let mut own = || match machines.get(machine) {
            Some(known) => known.clone(),
            None => {
                let new = Arc::new(machine.clone());
                machines.insert(new.clone());
                new
            }
        };
        let entry = self.containers.entry(id);
        &mut entry.or_insert_with(|| (own(), Ids::default())).1
    }

    /// Bytes of memory it takes, without what its maps take.
    #[cfg(test)]
    fn memory(&self) -> usize {
        let fixed = size_of::<(ContainerId, Arc<Machine>)>();
        let used = self.containers.values();
        used.map(|(_, used)| fixed + used.memory()).sum()
    }

    /// Adds consecutive blocks.
    pub fn insert_run(&mut self, machine: &Machine, id: ContainerId, local: u16, blocks: u32) {
        self.of(machine, id).insert_run(local, blocks as u16);
    }

    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let machines: Vec<&Arc<Machine>> = self.machines.iter().collect();
        let mut body = Vec::new();
        put_varint(&mut body, machines.len() as u64);
        for machine in &machines {
            put_varint(&mut body, machine.as_str().len() as u64);
            body.extend_from_slice(machine.as_str().as_bytes());
        }
        put_varint(&mut body, self.containers.len() as u64);
        let mut last = 0;
        for (id, (machine, used)) in &self.containers {
            put_varint(&mut body, id.0 - last);
            last = id.0;
            let owner = machines.binary_search(&machine).unwrap_or_default();
            put_varint(&mut body, owner as u64);
            let mut bits = RoaringBitmap::from_sorted_iter(used.bits().iter().map(u32::from))
                .unwrap_or_default();
            bits.optimize();
            put_varint(&mut body, bits.serialized_size() as u64);
            bits.serialize_into(&mut body).expect("memory takes all");
        }
        let mut out = Vec::new();
        put_varint(&mut out, body.len() as u64);
        out.extend(zstd::bulk::compress(&body, 3).unwrap_or_default());
        KIND.seal(&out)
    }

    /// Reads uses.
    ///
    /// # Errors
    /// [`UsesError`].
    pub fn decode(bytes: &[u8]) -> Result<Uses, UsesError> {
        Uses::decode_of(bytes, &|_| true)
    }

    /// Reads what is used of some containers; the rest is passed over.
    ///
    /// # Errors
    /// [`UsesError`].
    pub fn decode_of(
        bytes: &[u8],
        wanted: &dyn Fn(ContainerId) -> bool,
    ) -> Result<Uses, UsesError> {
        let mut rest = KIND.open(bytes)?;
        let raw = take_varint(&mut rest)
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n <= MAX_USES_BYTES)
            .ok_or(UsesError::Malformed)?;
        let body = unpack(rest, raw).ok_or(UsesError::Malformed)?;
        decode_body(&body, wanted).ok_or(UsesError::Malformed)
    }
}

/// A body in its envelope.
#[cfg(fuzzing)]
pub(crate) fn uses_for_fuzzing(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_varint(&mut out, body.len() as u64);
    out.extend(zstd::bulk::compress(body, 1).unwrap_or_default());
    KIND.seal(&out)
}

fn decode_body(mut rest: &[u8], wanted: &dyn Fn(ContainerId) -> bool) -> Option<Uses> {
    let rest = &mut rest;
    let count = take_varint(rest).filter(|&n| n <= rest.len() as u64)?;
    let mut machines = Vec::new();
    for _ in 0..count {
        let name = take(rest)?;
        machines.push(Machine::try_from(String::from_utf8(name.to_vec()).ok()?).ok()?);
    }
    let count = take_varint(rest).filter(|&n| n <= MAX_CONTAINERS as u64)?;
    let mut uses = Uses::default();
    let mut last = 0u64;
    for number in 0..count {
        let step = take_varint(rest).filter(|&step| number == 0 || step > 0)?;
        last = last.checked_add(step)?;
        let machine = machines.get(usize::try_from(take_varint(rest)?).ok()?)?;
        let mut bytes = take(rest)?;
        if !wanted(ContainerId(last)) {
            continue;
        }
        let bits = RoaringBitmap::deserialize_from(&mut bytes).ok()?;
        let fits = bytes.is_empty() && bits.max().is_some_and(|max| (max as usize) < MAX_BLOCKS);
        fits.then_some(())?;
        let used = uses.of(machine, ContainerId(last));
        let mut left = bits.iter();
        while let Some(run) = left.next_range() {
            used.insert_run(*run.start() as u16, (run.end() - run.start() + 1) as u16);
        }
    }
    rest.is_empty().then_some(uses)
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let n = usize::try_from(take_varint(rest)?).ok()?;
    let (front, tail) = rest.split_at_checked(n)?;
    *rest = tail;
    Some(front)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A disk of 4 GiB without duplicates, and one of the same blocks in runs of 17 in between others.
    #[test]
    fn a_container_of_a_snapshot_takes_little_memory() {
        let machine = Machine::new("web").unwrap();
        let (mut whole, mut runs) = (Uses::default(), Uses::default());
        for container in 0..256u64 {
            for local in 0..MAX_BLOCKS as u16 {
                whole.insert(&machine, ContainerId(container), local);
                if local % 170 < 17 {
                    runs.insert(&machine, ContainerId(container), local);
                }
            }
        }
        println!(
            "{} and {} bytes a container",
            whole.memory() / 256,
            runs.memory() / 256
        );
        assert!(whole.memory() / 256 <= 100 && runs.memory() / 256 <= 250);
        assert_eq!(Uses::decode(&runs.encode()).unwrap(), runs);
    }

    proptest! {
        #[test]
        fn uses_and_back(blocks in proptest::collection::vec((0u64..9, 0u16..4096, 0u8..3), 0..400)) {
            let mut uses = Uses::default();
            for (id, local, machine) in blocks {
                uses.insert(&Machine::new(format!("m{machine}")).unwrap(), ContainerId(id << 40), local);
            }
            let bytes = uses.encode();
            let some = Uses::decode_of(&bytes, &|id| id.0 >> 40 < 4).unwrap();
            let wanted = uses.containers.iter().filter(|(id, _)| id.0 >> 40 < 4);
            prop_assert!(some.containers.iter().eq(wanted));
            prop_assert_eq!(Uses::decode(&bytes).unwrap(), uses);
            prop_assert!(Uses::decode(&bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn hostile_uses_are_refused(body in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut out = Vec::new();
            put_varint(&mut out, body.len() as u64);
            out.extend(zstd::bulk::compress(&body, 1).unwrap());
            let _ = Uses::decode(&KIND.seal(&out));
        }
    }
}
