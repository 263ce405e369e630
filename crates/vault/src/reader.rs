//! Reading blocks out of containers, each verified, with small caches.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use drover_core::BLOCK_SIZE;
use parking_lot::Mutex;

use crate::container::{ContainerId, GROUP_BLOCKS, Head, MAX_HEAD};
use crate::digester::Digester;
use crate::error::{Result, VaultError};
use crate::lru::Lru;
use crate::names::{Machine, container_key, parse_container_key};
use crate::objects::Objects;

/// Heads that are kept, of 140 KiB.
const MAX_HEADS: usize = 64;
/// Groups that are kept, of 128 KiB.
const MAX_GROUPS: usize = 128;
/// How often a container is looked for again that was compacted meanwhile.
const MAX_TRIES: usize = 3;

/// A group: container, generation, number.
type GroupKey = (ContainerId, u32, usize);

pub(crate) struct Reader {
    objects: Arc<dyn Objects>,
    digester: Digester,
    /// The generation of each container, as far as known.
    generations: Mutex<HashMap<ContainerId, u32>>,
    heads: Mutex<Lru<ContainerId, Arc<Head>>>,
    groups: Mutex<Lru<GroupKey, Arc<Vec<u8>>>>,
}

impl Reader {
    pub(crate) fn new(objects: Arc<dyn Objects>, digester: Digester) -> Self {
        Reader {
            objects,
            digester,
            generations: Mutex::new(HashMap::new()),
            heads: Mutex::new(Lru::new(MAX_HEADS)),
            groups: Mutex::new(Lru::new(MAX_GROUPS)),
        }
    }

    pub(crate) fn digester(&self) -> &Digester {
        &self.digester
    }

    fn missing(&self, machine: &Machine, id: ContainerId) -> VaultError {
        VaultError::Missing {
            key: format!("containers/{}/{id}", machine.component()),
            vault: self.objects.describe(),
        }
    }

    fn damaged(&self, key: &str, why: &dyn std::fmt::Display) -> VaultError {
        VaultError::Damaged {
            key: key.to_owned(),
            vault: self.objects.describe(),
            why: why.to_string(),
        }
    }

    /// Learns the containers of a machine.
    fn learn(&self, machine: &Machine) -> Result<()> {
        let listed = self
            .objects
            .list(&format!("containers/{}", machine.component()))?;
        let mut generations = self.generations.lock();
        for (_, id, generation) in listed.iter().filter_map(|o| parse_container_key(&o.key)) {
            let known = generations.entry(id).or_insert(generation);
            *known = generation.max(*known);
        }
        Ok(())
    }

    /// The head of a container.
    pub(crate) fn head(&self, machine: &Machine, id: ContainerId) -> Result<Arc<Head>> {
        if let Some(head) = self.heads.lock().get(&id) {
            return Ok(head);
        }
        for _ in 0..MAX_TRIES {
            let known = self.generations.lock().get(&id).copied();
            let generation = match known {
                Some(generation) => generation,
                None => {
                    self.learn(machine)?;
                    let known = self.generations.lock().get(&id).copied();
                    known.ok_or_else(|| self.missing(machine, id))?
                }
            };
            let key = container_key(machine, id, generation);
            let Some(bytes) = self.objects.get_range(&key, 0..MAX_HEAD as u64)? else {
                self.forget(id);
                continue;
            };
            let head = Head::parse(&bytes).map_err(|e| self.damaged(&key, &e))?;
            if head.id != id || head.generation != generation {
                return Err(self.damaged(&key, &"it is another container"));
            }
            let head = Arc::new(head);
            self.heads.lock().put(id, head.clone());
            return Ok(head);
        }
        Err(self.missing(machine, id))
    }

    fn forget(&self, id: ContainerId) {
        self.generations.lock().remove(&id);
        self.heads.lock().remove(&id);
    }

    /// Copies blocks of one container: pairs of a local id and where the block goes in `out`, in blocks.
    pub(crate) fn blocks(
        &self,
        machine: &Machine,
        id: ContainerId,
        wanted: &[(u16, usize)],
        out: &mut [u8],
    ) -> Result<()> {
        for _ in 0..MAX_TRIES {
            if self.try_blocks(machine, id, wanted, out)? {
                return Ok(());
            }
            self.forget(id);
        }
        Err(self.missing(machine, id))
    }

    /// Whether the container is still where it was.
    fn try_blocks(
        &self,
        machine: &Machine,
        id: ContainerId,
        wanted: &[(u16, usize)],
        out: &mut [u8],
    ) -> Result<bool> {
        let head = self.head(machine, id)?;
        let key = container_key(machine, id, head.generation);
        let mut by_group: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for &(local, to) in wanted {
            let at = head.position(local).ok_or_else(|| {
                self.damaged(
                    &key,
                    &format!("it lacks block {local}, which a snapshot needs"),
                )
            })?;
            by_group
                .entry(at / GROUP_BLOCKS)
                .or_default()
                .push((at % GROUP_BLOCKS, to));
        }
        let needed: Vec<usize> = by_group.keys().copied().collect();
        let mut have: HashMap<usize, Arc<Vec<u8>>> = HashMap::new();
        {
            let mut groups = self.groups.lock();
            for &group in &needed {
                if let Some(blocks) = groups.get(&(id, head.generation, group)) {
                    have.insert(group, blocks);
                }
            }
        }
        let absent: Vec<usize> = needed
            .iter()
            .copied()
            .filter(|g| !have.contains_key(g))
            .collect();
        for run in absent.chunk_by(|a, b| a + 1 == *b) {
            let (first, last) = (run[0], run[run.len() - 1]);
            let span = head.span(first, last);
            let Some(bytes) = self.objects.get_range(&key, span.clone())? else {
                return Ok(false);
            };
            for &group in run {
                let place = head.span(group, group);
                let bytes = bytes
                    .get((place.start - span.start) as usize..(place.end - span.start) as usize)
                    .ok_or_else(|| self.damaged(&key, &"it is cut off"))?;
                let blocks = Arc::new(self.unpack(&head, &key, group, bytes)?);
                self.groups
                    .lock()
                    .put((id, head.generation, group), blocks.clone());
                have.insert(group, blocks);
            }
        }
        for (group, places) in by_group {
            let blocks = &have[&group];
            for (from, to) in places {
                out[to * BLOCK_SIZE..(to + 1) * BLOCK_SIZE]
                    .copy_from_slice(&blocks[from * BLOCK_SIZE..(from + 1) * BLOCK_SIZE]);
            }
        }
        Ok(true)
    }

    /// The blocks of a group, with the digests that the head says.
    fn unpack(&self, head: &Head, key: &str, group: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        let blocks = head
            .unpack(group, bytes)
            .map_err(|e| self.damaged(key, &e))?;
        let mut digests = Vec::with_capacity(GROUP_BLOCKS);
        self.digester.blocks(&blocks, &mut digests);
        let first = group * GROUP_BLOCKS;
        match head.digests[first..].starts_with(&digests) {
            true => Ok(blocks),
            false => Err(self.damaged(key, &format!("group {group} has another content"))),
        }
    }
}
