//! Freeing what nothing uses any more. Backups go on meanwhile.
//!
//! The order of operations is what makes it safe, see `docs/format/vault.md`: a collector marks a container, *then*
//! reads what snapshots use; a backup writes what it uses, *then* reads marks. One of the two sees the other.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

use drover_core::BLOCK_SIZE_U64;

use crate::container::{ContainerId, LocalIds, SessionId};
use crate::error::{Result, VaultError};
use crate::ids::Ids;
use crate::index::KNOWN_BYTES;
use crate::many;
use crate::names::{Machine, SnapshotId, container_key, mark_key, parse_container_key};
use crate::places::ByContainer;
use crate::record::{HookRecord, SnapshotRecord};
use crate::sparse::{HOOK_BYTES, hooks_of};
use crate::uses::Uses;
use crate::vault::Vault;
use crate::whole::next_generation;

/// A session that has not said for so long that it lives is taken for dead.
pub const MAX_SILENCE: Duration = Duration::from_secs(24 * 3600);
/// A collector does not act on marks that are older: it lives shorter than its marks.
const MAX_MARK_AGE: Duration = Duration::from_secs(3600);
/// Marks of collectors that did not end properly are void after that.
const MAX_STALE_MARK: Duration = Duration::from_secs(7 * 24 * 3600);
/// Popular blocks that nothing uses are kept for so long: backups of other machines may still find them.
const MAX_UNPOPULAR: Duration = Duration::from_secs(30 * 24 * 3600);
/// Containers that are marked at once.
const MAX_MARKED: usize = 256;

/// What a collection did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Collected {
    /// Forgotten snapshots whose last objects were removed.
    pub snapshots: u64,
    /// Interrupted backups that were given up.
    pub aborted: u64,
    /// Containers removed as a whole.
    pub removed: u64,
    /// Containers written again without their garbage.
    pub compacted: u64,
    /// Bytes freed in the store.
    pub freed_bytes: u64,
    /// Unfinished writes removed.
    pub swept: u64,
}

/// How full a vault is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Machines that have snapshots.
    pub machines: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Bytes of the disks' non-zero blocks, summed over the snapshots.
    pub data_bytes: u64,
    /// Containers.
    pub containers: u64,
    /// What they take.
    pub container_bytes: u64,
    /// What everything else takes: recipes, uses, hooks, records.
    pub metadata_bytes: u64,
    /// Blocks that snapshots use, each counted once, in bytes.
    pub used_bytes: u64,
    /// Blocks stored that no snapshot uses, in bytes.
    pub garbage_bytes: u64,
    /// Blocks that are stored for all machines, since many have them, in bytes.
    pub popular_bytes: u64,
    /// Hooks of the sparse index.
    pub hooks: u64,
    /// Memory that the index takes in a backup, beside at most 16 MiB whatever the vault holds.
    pub index_bytes: u64,
}

/// What is used of each container.
type InUse = ByContainer<Ids>;

impl Vault {
    /// What snapshots use; `Missing` or damage of one is an error: nothing may be freed then.
    pub(crate) fn uses_of(&self, id: &SnapshotId) -> Result<Option<Uses>> {
        let key = id.uses();
        match self.objects.get(&key)? {
            None => Ok(None),
            Some(bytes) => match Uses::decode(&bytes) {
                Ok(uses) => Ok(Some(uses)),
                Err(error) => Err(self.damaged(&key, &error)),
            },
        }
    }

    /// Every snapshot, made or under way, that says what it uses. A snapshot that does not although it was made is an
    /// error: what it needs could be taken for garbage.
    fn users(&self) -> Result<BTreeSet<SnapshotId>> {
        // Records first: they are written last.
        let made = self.live_ids(None)?;
        self.users_with(&made)
    }

    /// The same, if these are the snapshots that must say what they use.
    pub(crate) fn users_with<'a>(
        &self,
        made: impl IntoIterator<Item = &'a SnapshotId>,
    ) -> Result<BTreeSet<SnapshotId>> {
        let users = self.ids("uses", None)?;
        for id in made.into_iter().filter(|id| !users.contains(id)) {
            if !matches!(self.record_of(id)?, None | Some(SnapshotRecord::Aborted)) {
                // Forgotten and buried since it was listed?
                if !self.live_ids(Some(&id.machine))?.contains(id) {
                    continue;
                }
                return Err(VaultError::Missing {
                    key: id.uses(),
                    vault: self.place(),
                });
            }
        }
        Ok(users)
    }

    /// Adds everything that snapshots use to `in_use`.
    fn add_uses(&self, ids: &BTreeSet<SnapshotId>, in_use: &mut InUse) -> Result<()> {
        let ids: Vec<&SnapshotId> = ids.iter().collect();
        let read = |id: &&SnapshotId| self.read_uses(id, &|_| true);
        many::for_each(&ids, read, |uses| {
            for (container, (machine, used)) in uses.into_iter().flat_map(|uses| uses.containers) {
                in_use.of(&machine, container, Ids::default).union(&used);
            }
            Ok(())
        })
    }

    /// What a snapshot that was listed uses of some containers; none if it was removed meanwhile.
    pub(crate) fn read_uses(
        &self,
        id: &SnapshotId,
        wanted: &dyn Fn(ContainerId) -> bool,
    ) -> Result<Option<Uses>> {
        let key = id.uses();
        let Some(bytes) = self.objects.get(&key)? else {
            return self.check_gone(id).map(|()| None);
        };
        let uses = Uses::decode_of(&bytes, wanted);
        uses.map(Some).map_err(|error| self.damaged(&key, &error))
    }

    /// Fails unless a snapshot that was said to have uses, and has none, was removed meanwhile.
    fn check_gone(&self, id: &SnapshotId) -> Result<()> {
        let is_made = !matches!(self.record_of(id)?, None | Some(SnapshotRecord::Aborted));
        let machine = Some(&id.machine);
        // What is listed still is there, whatever the store says to a read.
        match self.ids("uses", machine)?.contains(id)
            || is_made && self.live_ids(machine)?.contains(id)
        {
            false => Ok(()),
            true => Err(VaultError::Missing {
                key: id.uses(),
                vault: self.place(),
            }),
        }
    }

    pub(crate) fn remove_recipe(&self, id: &SnapshotId) -> Result<()> {
        for object in self.objects.list(&format!("recipes/{}", id.suffix()))? {
            self.objects.remove(&object.key)?;
        }
        Ok(())
    }

    /// Frees space: what snapshots used that were forgotten at least `grace` ago, and what interrupted backups left.
    /// Containers of which nothing is used are removed, those that are at least half garbage written again. `pause`
    /// is called between containers, so that a caller can limit the rate.
    ///
    /// # Errors
    /// Damage of what says what snapshots use (then nothing is freed); errors of the store.
    pub fn collect(&self, grace: Duration, pause: &mut dyn FnMut(u64)) -> Result<Collected> {
        self.probe()?;
        let now = self.store_now_ms()?;
        let older = |modified: i64, than: Duration| {
            i128::from(now) - i128::from(modified) >= than.as_millis() as i128
        };
        let mut done = Collected::default();
        let silent = |modified| older(modified, MAX_SILENCE);
        self.bury(&mut done, |modified| older(modified, grace), silent)?;
        let live = self.claims(silent)?;
        self.abort(&mut done, &live, silent)?;
        self.drop_superseded()?;

        // Containers first, then claims, then uses: a session claims before it writes, and releases after its uses are
        // there.
        let places = self.containers(None)?;
        let claims = self.claims(silent)?;
        let mut seen = self.users()?;
        let mut in_use = InUse::default();
        self.add_uses(&seen, &mut in_use)?;
        let stale = self.stale_marks(|modified| older(modified, MAX_STALE_MARK))?;

        let young = self.young_popular(|modified| older(modified, MAX_UNPOPULAR))?;
        let mut candidates: Vec<(&Machine, ContainerId)> = Vec::new();
        for (machine, id, (generation, _)) in places.iter() {
            let used = in_use.get(machine, id).map_or(0, Ids::count);
            if claims.contains(&id.session()) || machine.is_popular() && young.contains(&id) {
                continue;
            }
            if used == 0 || self.half_dead(machine, id, *generation, used)? {
                candidates.push((machine, id));
            }
        }
        let collector = SessionId::random();
        for batch in candidates.chunks(MAX_MARKED) {
            let marked = Instant::now();
            for &(_, id) in batch {
                self.put_own(&mark_key(id, collector), b"mark".to_vec())?;
            }
            // A backup whose uses are not in this list reads marks after it, and finds these.
            let listed = self.users()?;
            let new: BTreeSet<_> = listed.difference(&seen).cloned().collect();
            self.add_uses(&new, &mut in_use)?;
            seen.extend(new);
            for &(machine, id) in batch {
                if marked.elapsed() >= MAX_MARK_AGE {
                    break;
                }
                let Some((generation, size)) = places.get(machine, id) else {
                    continue;
                };
                let used = in_use.get(machine, id).map(Ids::bits).unwrap_or_default();
                let freed = match used.count() {
                    0 => {
                        // What another collection writes or leaves of it meanwhile, the next one finds.
                        self.objects
                            .remove(&container_key(machine, id, *generation))?;
                        done.removed += 1;
                        *size
                    }
                    _ => match self.rewrite(machine, id, *generation, &used)? {
                        Some(now) => {
                            done.compacted += 1;
                            size.saturating_sub(now)
                        }
                        None => 0,
                    },
                };
                done.freed_bytes += freed;
                pause(*size);
            }
            for &(_, id) in batch {
                self.objects.remove(&mark_key(id, collector))?;
            }
        }
        stale.iter().try_for_each(|key| self.objects.remove(key))?;
        for probe in self.objects.list("probe")? {
            if silent(probe.modified_ms) {
                self.objects.remove(&probe.key)?;
            }
        }
        self.drop_hooks()?;
        done.swept = self.objects.sweep(MAX_SILENCE)?;
        Ok(done)
    }

    /// Removes the objects of snapshots that were forgotten long enough ago, the tombstone last.
    fn bury(
        &self,
        done: &mut Collected,
        due: impl Fn(i64) -> bool,
        silent: impl Fn(i64) -> bool,
    ) -> Result<()> {
        let forgotten = self.objects.list("forgotten")?;
        // Only now: one who does not find the tombstone has said before that he holds the snapshot.
        let held = self.held_ids(silent)?;
        for object in forgotten {
            let Some(id) = SnapshotId::of_key(&object.key)
                .filter(|id| due(object.modified_ms) && !held.contains(id))
            else {
                continue;
            };
            self.objects.remove(&id.record())?;
            self.remove_recipe(&id)?;
            self.objects.remove(&id.uses())?;
            self.objects.remove(&object.key)?;
            done.snapshots += 1;
        }
        Ok(())
    }

    /// Gives up backups that were interrupted. Whoever creates the record first decides: the collector, or a backup
    /// that lives after all.
    fn abort(
        &self,
        done: &mut Collected,
        live: &HashSet<SessionId>,
        due: impl Fn(i64) -> bool,
    ) -> Result<()> {
        let old: BTreeSet<SnapshotId> = ["uses", "recipes"]
            .map(|kind| self.objects.list(kind))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .flatten()
            .filter(|o| due(o.modified_ms))
            .filter_map(|o| SnapshotId::of_key(&o.key))
            .filter(|id| !live.contains(&id.session))
            .collect();
        // Tombstones before records: they go last.
        let forgotten = self.ids("forgotten", None)?;
        let records = self.ids("snapshots", None)?;
        for id in old {
            let aborted = match records.contains(&id) {
                false if forgotten.contains(&id) => continue,
                false => {
                    let record = SnapshotRecord::Aborted.encode();
                    self.objects.create(&id.record(), record.into())?;
                    matches!(self.record_of(&id)?, Some(SnapshotRecord::Aborted))
                }
                true => match self.record_of(&id) {
                    Ok(record) => record == Some(SnapshotRecord::Aborted),
                    Err(error) if error.is_damage() => false,
                    Err(error) => return Err(error),
                },
            };
            if aborted {
                self.objects.remove(&id.uses())?;
                self.remove_recipe(&id)?;
                done.aborted += 1;
            }
        }
        Ok(())
    }

    /// Sessions that live; claims of others are removed.
    fn claims(&self, due: impl Fn(i64) -> bool) -> Result<HashSet<SessionId>> {
        let mut latest: BTreeMap<SessionId, i64> = BTreeMap::new();
        for object in self.objects.list("claims")? {
            let session = object.key.split('/').nth(1).and_then(SessionId::parse);
            if let Some(session) = session {
                let time = latest.entry(session).or_insert(i64::MIN);
                *time = object.modified_ms.max(*time);
            }
        }
        let mut live = HashSet::new();
        for (session, modified) in latest {
            match due(modified) {
                true => self.release(session)?,
                false => drop(live.insert(session)),
            }
        }
        Ok(live)
    }

    /// Containers of popular blocks that are not old yet.
    fn young_popular(&self, is_old: impl Fn(i64) -> bool) -> Result<HashSet<ContainerId>> {
        let prefix = format!("containers/{}", Machine::popular().component());
        let listed = self.objects.list(&prefix)?.into_iter();
        Ok(listed
            .filter(|object| !is_old(object.modified_ms))
            .filter_map(|object| parse_container_key(&object.key))
            .map(|(_, id, _)| id)
            .collect())
    }

    fn stale_marks(&self, due: impl Fn(i64) -> bool) -> Result<Vec<String>> {
        let listed = self.objects.list("marks")?;
        let stale = listed.into_iter().filter(|o| due(o.modified_ms));
        Ok(stale.map(|o| o.key).collect())
    }

    /// Whether at least half of a container's blocks are garbage.
    fn half_dead(
        &self,
        machine: &Machine,
        id: ContainerId,
        generation: u32,
        used: u32,
    ) -> Result<bool> {
        // No container has more blocks than that, so most need not be read.
        if used * 2 > crate::container::MAX_BLOCKS as u32 {
            return Ok(false);
        }
        match self.head(machine, id, generation) {
            Ok(Some(head)) => Ok(used * 2 <= head.digests.len() as u32),
            Ok(None) => Ok(false),
            Err(error) if error.is_damage() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes generations that an interrupted compaction left: a newer one is there.
    fn drop_superseded(&self) -> Result<()> {
        let newest = self.containers(None)?;
        for object in self.objects.list("containers")? {
            if let Some((machine, id, generation)) = parse_container_key(&object.key)
                && newest
                    .get(&machine, id)
                    .is_some_and(|place| generation < place.0)
            {
                self.objects.remove(&object.key)?;
            }
        }
        Ok(())
    }

    /// Removes the generations of a container before this one.
    pub(crate) fn remove_generations(
        &self,
        machine: &Machine,
        id: ContainerId,
        below: u32,
    ) -> Result<()> {
        let listed = self
            .objects
            .list(&format!("containers/{}", machine.component()))?;
        for object in listed {
            if let Some((_, found, generation)) = parse_container_key(&object.key)
                && found == id
                && generation < below
            {
                self.objects.remove(&object.key)?;
            }
        }
        Ok(())
    }

    /// Writes a container again with the blocks in use only, under the same ids; its new length. None when it cannot
    /// be read or has no garbage.
    fn rewrite(
        &self,
        machine: &Machine,
        id: ContainerId,
        generation: u32,
        used: &LocalIds,
    ) -> Result<Option<u64>> {
        let Some(whole) = self.whole_at(machine, id, generation)? else {
            return Ok(None);
        };
        let present = whole.head.present.common(used);
        // What is damaged stays as it is: `check` speaks of it.
        if !whole.is_good()
            || used.without(&present).count() > 0
            || present.count() * 2 > whole.head.digests.len() as u32
        {
            return Ok(None);
        }
        let next = generation
            .checked_add(1)
            .ok_or_else(|| VaultError::TooLarge(id.to_string()))?;
        let Some(bytes) = next_generation(id, next, &present, &[&whole]) else {
            return Ok(None);
        };
        let len = bytes.len() as u64;
        // Another collector may have written it, from what it saw in use; then that one is right as well, but it may
        // have kept less than is in use now: nothing is removed unless it is ours.
        if !self
            .objects
            .create(&container_key(machine, id, next), bytes.into())?
        {
            return Ok(None);
        }
        self.objects
            .remove(&container_key(machine, id, generation))?;
        Ok(Some(len))
    }

    /// Removes the hooks of sessions that have no container left.
    fn drop_hooks(&self) -> Result<()> {
        let places = self.containers(None)?;
        let live: HashSet<SessionId> = places.iter().map(|(_, id, _)| id.session()).collect();
        let claims = self.claims(|_| false)?;
        for object in self.objects.list("hooks")? {
            let session = object.key.split('/').nth(1).and_then(SessionId::parse);
            if session.is_some_and(|s| !live.contains(&s) && !claims.contains(&s)) {
                self.objects.remove(&object.key)?;
            }
        }
        Ok(())
    }

    /// How full the vault is.
    ///
    /// # Errors
    /// Damage of what says what snapshots use; errors of the store.
    pub fn stats(&self) -> Result<Stats> {
        let (entries, _) = self.snapshots(None)?;
        let machines: HashSet<&Machine> = entries.iter().map(|e| &e.id.machine).collect();
        let mut stats = Stats {
            machines: machines.len() as u64,
            snapshots: entries.len() as u64,
            data_bytes: entries.iter().map(|e| e.record.data_bytes).sum(),
            ..Stats::default()
        };
        let mut in_use = InUse::default();
        self.add_uses(&entries.iter().map(|e| e.id.clone()).collect(), &mut in_use)?;
        for kind in [
            "snapshots",
            "recipes",
            "uses",
            "hooks",
            "forgotten",
            "dropped",
            "claims",
            "held",
            "marks",
        ] {
            let listed = self.objects.list(kind)?;
            stats.metadata_bytes += listed.iter().map(|o| o.size).sum::<u64>();
        }
        for (machine, id, &(generation, size)) in self.containers(None)?.iter() {
            stats.containers += 1;
            stats.container_bytes += size;
            let used = in_use.get(machine, id).map_or(0, Ids::count);
            stats.used_bytes += u64::from(used) * BLOCK_SIZE_U64;
            if let Ok(Some(head)) = self.head(machine, id, generation) {
                let blocks = head.digests.len() as u64;
                match machine.is_popular() {
                    true => stats.popular_bytes += blocks * BLOCK_SIZE_U64,
                    false => {
                        let garbage = blocks.saturating_sub(u64::from(used));
                        stats.garbage_bytes += garbage * BLOCK_SIZE_U64;
                    }
                }
                stats.hooks += hooks_of(&head.digests).count() as u64;
            }
        }
        stats.index_bytes = stats.hooks * HOOK_BYTES as u64 + stats.containers * KNOWN_BYTES as u64;
        Ok(stats)
    }

    /// The tags of hooks of a session, for tests and checks.
    #[doc(hidden)]
    pub fn hooks_of(&self, session: SessionId) -> Result<Option<HookRecord>> {
        let key = crate::names::hooks_key(session);
        let bytes = self.objects.get(&key)?;
        Ok(bytes.and_then(|b| HookRecord::decode(&b).ok()))
    }
}
