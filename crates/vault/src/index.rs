//! What a backup knows of the containers there are: their places, and the sparse index over them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use drover_core::Digest;

use crate::container::{ContainerId, Head, MAX_HEAD, SessionId};
use crate::error::{Result, VaultError};
use crate::hooks::Ordinal;
use crate::many;
use crate::names::{Machine, container_key, parse_container_key, parse_mark_key};
use crate::places::Places;
use crate::record::HookRecord;
use crate::sparse::{Found, List, MAX_CHAMPIONS, SparseIndex, hook_entry, hooks_of};
use crate::vault::Vault;

/// Bytes of memory that a container takes in the index, beside its hooks.
pub(crate) const KNOWN_BYTES: usize = size_of::<Known>();

struct Known {
    id: ContainerId,
    machine: u32,
    generation: u32,
    /// A collector is at it, or it cannot be read: no new references.
    excluded: bool,
}

/// The index of a vault, as it was when it was loaded.
pub(crate) struct VaultIndex {
    sparse: SparseIndex,
    known: Vec<Known>,
    machines: Vec<Machine>,
    /// So many of `known` were there when it was loaded: those are in the order of their numbers.
    loaded: usize,
    /// Lists that may still be loaded for single blocks of the window.
    left: usize,
}

impl Vault {
    /// The containers of a machine, or of all.
    pub(crate) fn containers(&self, machine: Option<&Machine>) -> Result<Places> {
        let prefix = match machine {
            Some(machine) => format!("containers/{}", machine.component()),
            None => "containers".to_owned(),
        };
        let mut places = Places::default();
        for object in self.objects.list(&prefix)? {
            let Some((machine, id, generation)) = parse_container_key(&object.key) else {
                continue;
            };
            let place = places.of(&machine, id, || (generation, object.size));
            if place.0 < generation {
                *place = (generation, object.size);
            }
        }
        Ok(places)
    }

    /// The machines of peers, if this is not a peer itself: to those nothing is said of it.
    pub(crate) fn of_peers(&self) -> Result<BTreeSet<Machine>> {
        let listed = self.objects.list("owners")?.into_iter();
        Ok(listed
            .filter_map(|object| Machine::from_component(object.key.split('/').nth(1)?))
            .collect())
    }

    /// Fails if a machine is a peer's, which would see what is written of it, and could add to it.
    pub(crate) fn check_owner(&self, machine: &Machine) -> Result<()> {
        match self.of_peers()?.contains(machine) {
            false => Ok(()),
            true => Err(VaultError::OfPeer {
                machine: machine.to_string(),
                vault: self.place(),
            }),
        }
    }

    /// The containers that collectors have marked.
    pub(crate) fn marked(&self) -> Result<HashSet<ContainerId>> {
        let listed = self.objects.list("marks")?;
        Ok(listed
            .iter()
            .filter_map(|o| parse_mark_key(&o.key))
            .collect())
    }

    /// The head of a container; none if it is gone.
    pub(crate) fn head(
        &self,
        machine: &Machine,
        id: ContainerId,
        generation: u32,
    ) -> Result<Option<Head>> {
        let key = container_key(machine, id, generation);
        let Some(bytes) = self.objects.get_range(&key, 0..MAX_HEAD as u64)? else {
            return Ok(None);
        };
        match Head::parse(&bytes) {
            Ok(head) if head.id == id && head.generation == generation => Ok(Some(head)),
            Ok(_) => Err(self.damaged(&key, &"it is another container")),
            Err(error) => Err(self.damaged(&key, &error)),
        }
    }
}

impl VaultIndex {
    /// Loads the index: from the hooks that sessions left, and from the heads of containers that those do not cover.
    /// Of the containers only those in which the blocks of `machine` are looked for, by `session`. A snapshot refers to a
    /// number only once: of machines that have the same one, as a peer may choose it, none but `machine` is used.
    pub(crate) fn load(vault: &Vault, machine: &Machine, session: SessionId) -> Result<VaultIndex> {
        // First the marks: a container that is marked later is found out at the commit.
        let marked = vault.marked()?;
        let mut index = VaultIndex {
            sparse: SparseIndex::default(),
            known: Vec::new(),
            machines: Vec::new(),
            loaded: 0,
            left: 0,
        };
        let mut by_id = HashMap::new();
        let scope = vault.record().share.scope(machine);
        let listed = match &scope {
            None => vec![vault.containers(None)?],
            Some(machines) => {
                let of = machines.iter().map(|of| vault.containers(Some(of)));
                of.collect::<Result<_>>()?
            }
        };
        let mut places: Vec<_> = listed.iter().flat_map(Places::iter).collect();
        // The site of an encrypted vault cannot tell whether the blocks of peers are what they are said to be.
        let untold = match vault.record().is_encrypted {
            true => vault.of_peers()?,
            false => BTreeSet::new(),
        };
        places.retain(|(of, id, _)| {
            id.session() != session && (*of == machine || !untold.contains(of))
        });
        places.sort_unstable_by_key(|(of, id, _)| (*id, *of != machine));
        for same in places.chunk_by(|a, b| a.1 == b.1) {
            let (of, id, (generation, _)) = same[0];
            if same.len() == 1 || of == machine {
                let ordinal = index.add(id, of, *generation, marked.contains(&id));
                by_id.insert(id, (ordinal, false));
            }
        }
        index.loaded = index.known.len();
        let mut hooks = Vec::new();
        let sessions: HashSet<SessionId> =
            by_id.keys().map(|id: &ContainerId| id.session()).collect();
        let listed = vault.objects.list("hooks")?.into_iter();
        let listed: Vec<(String, SessionId)> = listed
            .filter_map(|object| {
                let of = SessionId::parse(object.key.split('/').nth(1)?)?;
                sessions.contains(&of).then_some((object.key, of))
            })
            .collect();
        let read = |(key, of): &(String, SessionId)| {
            let decoded = match vault.objects.get(key) {
                Ok(None) => return Ok(None),
                Ok(Some(bytes)) => HookRecord::decode(&bytes)
                    .ok()
                    .filter(|hooks| hooks.is_of(*of)),
                Err(error) if error.is_damage => None,
                Err(error) => return Err(error.into()),
            };
            if decoded.is_none() {
                tracing::warn!("the hooks {key} are damaged; reading containers instead");
            }
            Ok(decoded)
        };
        many::for_each(&listed, read, |record| {
            for (id, tags) in record.into_iter().flat_map(|record| record.containers) {
                if let Some((ordinal, covered)) = by_id.get_mut(&id).filter(|(_, covered)| !covered)
                {
                    *covered = true;
                    hooks.extend(tags.into_iter().map(|tag| hook_entry(tag, *ordinal)));
                }
            }
            Ok(())
        })?;
        let mut bare: Vec<Ordinal> = by_id
            .values()
            .filter(|(_, c)| !c)
            .map(|(o, _)| *o)
            .collect();
        bare.sort_unstable();
        for ordinal in bare {
            if let Some(head) = index.read_head(vault, ordinal)? {
                hooks.extend(hooks_of(&head.digests).map(|tag| hook_entry(tag, ordinal)));
            }
        }
        index.sparse.load_hooks(hooks);
        Ok(index)
    }

    fn add(
        &mut self,
        id: ContainerId,
        machine: &Machine,
        generation: u32,
        excluded: bool,
    ) -> Ordinal {
        let known = self.machines.iter().position(|m| m == machine);
        let machine = known.unwrap_or_else(|| {
            self.machines.push(machine.clone());
            self.machines.len() - 1
        }) as u32;
        self.known.push(Known {
            id,
            machine,
            generation,
            excluded,
        });
        Ordinal(self.known.len() as u32 - 1)
    }

    /// Damage of a container costs duplicates, not the backup.
    fn read_head(&mut self, vault: &Vault, ordinal: Ordinal) -> Result<Option<Head>> {
        let known = &mut self.known[ordinal.0 as usize];
        let machine = &self.machines[known.machine as usize];
        match vault.head(machine, known.id, known.generation) {
            Ok(Some(head)) => return Ok(Some(head)),
            Ok(None) => {}
            Err(error) if error.is_damage() => tracing::warn!("{error}"),
            Err(error) => return Err(error),
        }
        known.excluded = true;
        Ok(None)
    }

    /// Adds a container of this session.
    pub(crate) fn add_own(&mut self, id: ContainerId, machine: &Machine, list: List) -> Ordinal {
        let ordinal = self.add(id, machine, 0, false);
        self.sparse.add_hooks(hooks_of(&list.digests), ordinal);
        self.sparse.load(ordinal, Arc::new(list));
        ordinal
    }

    /// A container that was there when the index was loaded, if new references to it may be made.
    pub(crate) fn usable(&self, machine: &Machine, id: ContainerId) -> Option<Ordinal> {
        let loaded = &self.known[..self.loaded];
        let at = loaded.binary_search_by_key(&id, |known| known.id).ok()?;
        let known = &loaded[at];
        let is_usable = !known.excluded && self.machines[known.machine as usize] == *machine;
        is_usable.then_some(Ordinal(at as u32))
    }

    /// Loads what may have the blocks of a window, and what is likely to.
    pub(crate) fn prepare(
        &mut self,
        vault: &Vault,
        window: &[Digest],
        likely: &[Ordinal],
    ) -> Result<()> {
        self.left = MAX_CHAMPIONS;
        let known = &self.known;
        let usable = |o: Ordinal| !known[o.0 as usize].excluded;
        for ordinal in self.sparse.champions(window, usable) {
            self.load_list(vault, ordinal)?;
        }
        for &ordinal in likely {
            if !self.sparse.is_cached(ordinal) {
                self.load_list(vault, ordinal)?;
            }
        }
        Ok(())
    }

    fn load_list(&mut self, vault: &Vault, ordinal: Ordinal) -> Result<()> {
        if let Some(head) = self.read_head(vault, ordinal)? {
            let list = List::new(head.id, head.digests, &head.present);
            self.sparse.load(ordinal, Arc::new(list));
        }
        Ok(())
    }

    /// Where a block of the window is.
    pub(crate) fn find(
        &mut self,
        vault: &Vault,
        digest: &Digest,
        before: Option<Found>,
    ) -> Result<Option<Found>> {
        let found = self.sparse.find(digest, before);
        if found.is_some() || self.left == 0 {
            return Ok(found);
        }
        for ordinal in self.sparse.small_ones(digest) {
            if self.left > 0 && !self.known[ordinal.0 as usize].excluded {
                self.left -= 1;
                self.load_list(vault, ordinal)?;
            }
        }
        Ok(self.sparse.find(digest, None))
    }

    /// The machine and id of a container.
    pub(crate) fn place(&self, ordinal: Ordinal) -> (&Machine, ContainerId) {
        let known = &self.known[ordinal.0 as usize];
        (&self.machines[known.machine as usize], known.id)
    }

    /// The generation of each container whose list may have been used.
    pub(crate) fn generations(&self) -> HashMap<ContainerId, u32> {
        self.known.iter().map(|k| (k.id, k.generation)).collect()
    }

    /// Bytes of memory of what grows with the vault.
    pub(crate) fn bytes(&self) -> usize {
        self.sparse.hook_bytes() + self.known.capacity() * size_of::<Known>()
    }
}
