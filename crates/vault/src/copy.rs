//! Copies of a vault: what one vault lacks of another is moved, verified, so that each can mend the other.
//!
//! A copy has the id of the vault and, if that is encrypted, its master key; containers keep their numbers. A snapshot
//! is copied in a session of its own, in the order in which one is made (`docs/format/vault.md`), so that collections
//! on both sides may run meanwhile, and an interruption leaves what an interrupted backup leaves. Each vault is
//! compacted by itself: a container that has lost blocks here that a copied snapshot needs gets a next generation with
//! those of both sides.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use crate::commit::{Ended, MAX_ATTEMPTS};
use crate::container::{ContainerId, LocalIds, SessionId};
use crate::error::{Result, VaultError};
use crate::names::{Machine, SnapshotId, claim_key, container_key, dropped_key, hooks_key};
use crate::objects::{Objects, put_own};
use crate::places::Places;
use crate::problem::Problem;
use crate::record::Made;
use crate::sealer::CLAIM_EVERY;
use crate::uses::Uses;
use crate::vault::Vault;
use crate::whole::{Whole, next_generation};

/// How often a container is looked for that is compacted meanwhile, here or there.
const MAX_TRIES: usize = 8;

/// The key of what a vault has that was copied, or is a copy.
const COPIED_KEY: &str = "copied";

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyProgress {
    /// Snapshots that are there.
    pub done_snapshots: u64,
    /// All snapshots.
    pub total_snapshots: u64,
    /// Containers written.
    pub containers: u64,
    /// Bytes written.
    pub moved_bytes: u64,
}

/// What a copy did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Copied {
    /// Snapshots that were copied.
    pub snapshots: u64,
    /// Snapshots that were there already.
    pub there: u64,
    /// Snapshots that were left out, since they were deleted there.
    pub dropped: u64,
    /// Containers written.
    pub containers: u64,
    /// Bytes written.
    pub moved_bytes: u64,
    /// What could not be copied, because it is damaged.
    pub problems: Vec<Problem>,
}

/// What tells snapshots of a vault and its copies apart.
type Twin = (Machine, i64, drover_core::Digest);

fn twin(id: &SnapshotId, record: &Made) -> Twin {
    (id.machine.clone(), id.time, record.root)
}

/// Moves snapshots from one vault to another.
pub(crate) struct Copying<'a> {
    from: &'a Vault,
    to: &'a Vault,
    there: Places,
    here: Places,
    now: CopyProgress,
    progress: &'a mut dyn FnMut(CopyProgress),
}

/// The sessions whose containers are being written: a collection leaves them alone.
struct Claims<'a> {
    vault: &'a Vault,
    own: SessionId,
    others: HashSet<SessionId>,
    said: Instant,
    number: u32,
}

impl<'a> Claims<'a> {
    fn new(vault: &'a Vault) -> Result<Self> {
        Ok(Claims {
            vault,
            own: vault.claim()?,
            others: HashSet::new(),
            said: Instant::now(),
            number: 0,
        })
    }

    fn say(&self, session: SessionId) -> Result<()> {
        let key = claim_key(session, self.number);
        self.vault.put_own(&key, b"claim".to_vec())
    }

    fn add(&mut self, session: SessionId) -> Result<()> {
        match self.others.insert(session) {
            true => self.say(session),
            false => Ok(()),
        }
    }

    /// Says every hour that all of them live.
    fn renew(&mut self) -> Result<()> {
        if self.said.elapsed() < CLAIM_EVERY {
            return Ok(());
        }
        (self.said, self.number) = (Instant::now(), self.number + 1);
        self.say(self.own)?;
        self.others
            .iter()
            .try_for_each(|&session| self.say(session))
    }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        for &session in self.others.iter().chain([&self.own]) {
            // A claim that stays is void after a day.
            let _ = self.vault.release(session);
        }
    }
}

impl Vault {
    /// The copy of this vault on a store, which is created if it does not exist and `create` says so. It has the keys
    /// that this vault has at that time, and is opened by what opened this one.
    ///
    /// # Errors
    /// [`VaultError::NoVault`], [`VaultError::OtherVault`], errors of the stores.
    pub fn copy_on(&self, objects: Arc<dyn Objects>, create: bool) -> Result<Vault> {
        match Vault::record_on(&*objects)? {
            Some(record) if record == *self.record() => {}
            Some(_) => {
                return Err(VaultError::OtherVault {
                    vault: objects.describe(),
                    of: self.place(),
                });
            }
            None if !create => return Err(VaultError::NoVault(objects.describe())),
            None => {
                // Before the vault: without a key it could never be opened.
                for (key, bytes) in self.stored_keys()? {
                    put_own(&*objects, &key, bytes)?;
                }
                self.create_record_on(&*objects)?;
            }
        }
        Ok(self.on(objects))
    }

    /// Whether there are copies of it, or it is one.
    pub(crate) fn has_copies(&self) -> Result<bool> {
        match self.objects.get_range(COPIED_KEY, 0..1) {
            Err(error) if error.is_damage => Ok(true),
            got => Ok(got?.is_some()),
        }
    }

    /// Copies every snapshot that `to`, a copy of this vault, lacks; those that were deleted there only with
    /// `dropped`. Nothing is removed there. If it is interrupted, the next one goes on with what is still missing.
    ///
    /// # Errors
    /// Errors of the stores. A snapshot that is damaged here is left out, and is among the problems.
    pub fn copy(
        &self,
        to: &Vault,
        dropped: bool,
        progress: &mut dyn FnMut(CopyProgress),
    ) -> Result<Copied> {
        to.probe()?;
        // From now on, each remembers what is deleted in it.
        let copied = bytes::Bytes::from_static(b"copied");
        to.objects.create(COPIED_KEY, copied.clone())?;
        if let Err(error) = self.objects.create(COPIED_KEY, copied) {
            // Perhaps one that can only be read.
            tracing::debug!("{error}");
        }
        let (mut entries, damaged) = self.snapshots(None)?;
        // The oldest first: later ones find most of their containers.
        entries.sort_by_key(|entry| entry.id.time);
        let known: HashSet<Twin> = to
            .snapshots(None)?
            .0
            .iter()
            .map(|entry| twin(&entry.id, &entry.record))
            .collect();
        let listed = to.objects.list("dropped")?;
        let gone: HashSet<String> = listed.into_iter().map(|object| object.key).collect();
        let mut copied = Copied::default();
        for id in damaged {
            copied.problems.push(Problem {
                what: format!("the record of {id} is damaged: it is not copied"),
                affected: vec![id],
            });
        }
        let mut copying = Copying::new(self, to, progress)?;
        copying.now.total_snapshots = entries.len() as u64;
        for entry in entries {
            if known.contains(&twin(&entry.id, &entry.record)) {
                copied.there += 1;
            } else {
                let key = dropped_key(&entry.id.machine, entry.id.time, &entry.record.root);
                let was_dropped = gone.contains(&key);
                if was_dropped && !dropped {
                    copied.dropped += 1;
                    copying.now.done_snapshots += 1;
                    continue;
                }
                match copying.snapshot(&entry.id) {
                    Ok(_) => {
                        copied.snapshots += 1;
                        if was_dropped {
                            to.objects.remove(&key)?;
                        }
                    }
                    // Forgotten meanwhile.
                    Err(VaultError::NoSnapshot { .. }) => {}
                    Err(error) if error.is_damage() => copied.problems.push(Problem {
                        what: error.to_string(),
                        affected: vec![entry.id],
                    }),
                    Err(error) => return Err(error),
                }
            }
            copying.now.done_snapshots += 1;
            copying.tell();
        }
        copying.hooks()?;
        copied.containers = copying.now.containers;
        copied.moved_bytes = copying.now.moved_bytes;
        Ok(copied)
    }

    /// What can be read of a container in the newest generation, which was `known` before; none if it is gone, or its
    /// head is damaged.
    fn whole(
        &self,
        machine: &Machine,
        id: ContainerId,
        known: Option<u32>,
    ) -> Result<Option<Whole>> {
        let mut known = known;
        for _ in 0..MAX_TRIES {
            let Some(generation) = known else {
                return Ok(None);
            };
            if let Some(whole) = self.whole_at(machine, id, generation)? {
                return Ok(Some(whole));
            }
            let newest = self
                .containers(Some(machine))?
                .get(machine, id)
                .map(|place| place.0);
            // Compacted meanwhile, else damaged.
            if newest == known {
                return Ok(None);
            }
            known = newest;
        }
        Ok(None)
    }

    /// Writes what `from` has of a container: as it is, or, if this vault has one in generation `here`, as its next
    /// generation with the good blocks of both. All of `must` has to be in it; without that, it has to have more than
    /// before. The generation and its length; none if there is nothing to gain, or another was faster.
    pub(crate) fn bring(
        &self,
        from: &Vault,
        machine: &Machine,
        id: ContainerId,
        (here, there): (Option<u32>, Option<u32>),
        must: Option<&LocalIds>,
    ) -> Result<Option<(u32, u64)>> {
        let theirs = from.whole(machine, id, there)?;
        let mine = self.whole(machine, id, here)?;
        let mut have = mine
            .as_ref()
            .map_or_else(LocalIds::default, |w| w.good.clone());
        let before = have.count();
        if let Some(theirs) = &theirs {
            have.union(&theirs.good);
        }
        let is_enough = match must {
            Some(must) => must.without(&have).count() == 0,
            // What is good, but in an object that is not, is written again.
            None => {
                have.count() > before
                    || mine
                        .as_ref()
                        .is_some_and(|mine| mine.is_salvaged && mine.is_good())
            }
        };
        let name = format!("containers/{}/{id}", machine.component());
        match (&theirs, must) {
            _ if is_enough => {}
            (_, None) => return Ok(None),
            (None, _) => {
                return Err(VaultError::Missing {
                    key: name,
                    vault: from.place(),
                });
            }
            (Some(_), _) => {
                return Err(from.damaged(&name, &"it lacks blocks that a snapshot needs"));
            }
        }
        let (generation, bytes) = match (&theirs, here) {
            (Some(theirs), None) if theirs.is_good() && !theirs.is_salvaged => {
                (theirs.head.generation, theirs.bytes.to_vec())
            }
            _ => {
                let newest = here.max(theirs.as_ref().map(|w| w.head.generation));
                let next = newest
                    .unwrap_or(0)
                    .checked_add(1)
                    .ok_or_else(|| VaultError::TooLarge(name.clone()))?;
                let sources: Vec<&Whole> = mine.iter().chain(&theirs).collect();
                let bytes = next_generation(id, next, &have, &sources).ok_or_else(|| {
                    from.damaged(&name, &"its blocks are others than those of the copy")
                })?;
                (next, bytes)
            }
        };
        let len = bytes.len() as u64;
        let key = container_key(machine, id, generation);
        if !self.objects.create(&key, bytes.into())? {
            return Ok(None);
        }
        if here.is_some() {
            self.remove_generations(machine, id, generation)?;
        }
        Ok(Some((generation, len)))
    }

    /// Brings a snapshot that is damaged here from a copy, and forgets the damaged one; its new id. None if the copy
    /// has it not, or damaged.
    pub(crate) fn repair_snapshot(
        &self,
        id: &SnapshotId,
        copying: &mut Copying<'_>,
    ) -> Result<Option<SnapshotId>> {
        let root = self.any_root(id)?;
        let fits = |other: &crate::Entry| {
            other.id.time == id.time && root.is_none_or(|root| root == other.record.root)
        };
        let there = copying.from.snapshots(Some(&id.machine))?.0;
        let mut fitting = there.into_iter().filter(fits);
        let (Some(theirs), None) = (fitting.next(), fitting.next()) else {
            return Ok(None);
        };
        // An earlier repair may have been interrupted before the damaged one was forgotten.
        let others = self.snapshots(Some(&id.machine))?.0.into_iter();
        let mut mended = None;
        for other in others
            .filter(|o| o.id != *id && twin(&o.id, &o.record) == twin(&theirs.id, &theirs.record))
        {
            match self.check_snapshot(&other.id) {
                Ok(_) => mended = Some(other.id),
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        let mended = match mended {
            Some(mended) => mended,
            None => match copying.snapshot(&theirs.id) {
                Ok(mended) => mended,
                Err(VaultError::NoSnapshot { .. }) => return Ok(None),
                Err(error) if error.is_damage() => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        self.put_own(&id.tombstone(), b"forgotten".to_vec())?;
        Ok(Some(mended))
    }

    /// The root of a snapshot that is damaged, from whatever of it is not.
    fn any_root(&self, id: &SnapshotId) -> Result<Option<drover_core::Digest>> {
        match self.record_of(id) {
            Ok(Some(crate::SnapshotRecord::Made(record))) => return Ok(Some(record.root)),
            Ok(_) => {}
            Err(error) if error.is_damage() => {}
            Err(error) => return Err(error),
        }
        let head = match self.objects.get(&id.recipe()) {
            Err(error) if error.is_damage => None,
            got => got?.and_then(|bytes| crate::RecipeHead::decode(&bytes).ok()),
        };
        Ok(head.map(|(head, _)| head.root()))
    }
}

impl<'a> Copying<'a> {
    pub(crate) fn new(
        from: &'a Vault,
        to: &'a Vault,
        progress: &'a mut dyn FnMut(CopyProgress),
    ) -> Result<Self> {
        Ok(Copying {
            from,
            to,
            there: from.containers(None)?,
            here: to.containers(None)?,
            now: CopyProgress::default(),
            progress,
        })
    }

    fn tell(&mut self) {
        (self.progress)(self.now);
    }

    /// Copies a snapshot; its id there. While that takes, nobody deletes it here.
    fn snapshot(&mut self, id: &SnapshotId) -> Result<SnapshotId> {
        let holder = format!("a copy to {}", self.to.place());
        let _hold = self.from.hold(id, SessionId::random(), &holder)?;
        let uses = self.from.check_snapshot(id)?;
        let snapshot = self.from.open_snapshot(id)?;
        snapshot.check_pages()?;
        for _ in 0..MAX_ATTEMPTS {
            let mut claims = Claims::new(self.to)?;
            let copy = SnapshotId {
                session: claims.own,
                ..id.clone()
            };
            match self.attempt(id, &copy, &uses, snapshot.record(), &mut claims) {
                Ok(()) => return Ok(copy),
                Err(Ended::Failed(error)) => return Err(error),
                Err(Ended::Overtaken) => {
                    self.to.retract(&copy);
                    self.here = self.to.containers(None)?;
                }
            }
        }
        Err(VaultError::Overtaken(MAX_ATTEMPTS))
    }

    fn attempt(
        &mut self,
        id: &SnapshotId,
        copy: &SnapshotId,
        uses: &Uses,
        record: &Made,
        claims: &mut Claims<'_>,
    ) -> Result<(), Ended> {
        let mut generations = HashMap::new();
        for (container, (machine, used)) in &uses.containers {
            claims.renew()?;
            let used = used.bits();
            let generation = self.container(machine, *container, &used, claims)?;
            generations.insert(*container, generation);
        }
        let mut written = 0;
        let of = format!("recipes/{}", id.suffix());
        for object in self.from.objects.list(&of)? {
            let bytes = self.from.objects.get(&object.key)?;
            let bytes = bytes.ok_or_else(|| VaultError::Missing {
                key: object.key.clone(),
                vault: self.from.place(),
            })?;
            let name = object.key.rsplit('/').next().unwrap_or_default();
            let key = format!("recipes/{}/{name}", copy.suffix());
            self.now.moved_bytes += bytes.len() as u64;
            self.to.put_own(&key, bytes.to_vec())?;
            written += 1;
        }
        self.to.commit(copy, written, uses, &generations, record)
    }

    /// Sees to it that a container has blocks there; its generation.
    fn container(
        &mut self,
        machine: &Machine,
        id: ContainerId,
        used: &LocalIds,
        claims: &mut Claims<'_>,
    ) -> Result<u32> {
        for _ in 0..MAX_TRIES {
            let here = self.here.get(machine, id).map(|place| place.0);
            if let Some(generation) = here {
                // Generation 0 has every block that there ever was.
                let has = generation == 0
                    || match self.to.head(machine, id, generation) {
                        Ok(head) => head.is_some_and(|h| used.without(&h.present).count() == 0),
                        Err(error) if error.is_damage() => false,
                        Err(error) => return Err(error),
                    };
                if has {
                    return Ok(generation);
                }
            }
            claims.add(id.session())?;
            let there = self.there.get(machine, id).map(|place| place.0);
            let brought = self
                .to
                .bring(self.from, machine, id, (here, there), Some(used))?;
            if let Some((generation, len)) = brought {
                self.here.insert(machine, id, (generation, len));
                self.now.containers += 1;
                self.now.moved_bytes += len;
                self.tell();
                return Ok(generation);
            }
            // Somebody else has written it.
            let listed = self.to.containers(Some(machine))?;
            match listed.get(machine, id) {
                Some(place) => self.here.insert(machine, id, *place),
                None => self.here.remove(machine, id),
            }
        }
        Err(VaultError::Overtaken(MAX_TRIES as u32))
    }

    /// Copies the hooks of what is there now: without them, a backup reads the heads of all containers.
    fn hooks(&self) -> Result<()> {
        let sessions: BTreeSet<SessionId> =
            self.here.iter().map(|(_, id, _)| id.session()).collect();
        let listed = self.to.objects.list("hooks")?;
        let known: HashSet<String> = listed.into_iter().map(|object| object.key).collect();
        for key in sessions.into_iter().map(hooks_key) {
            if known.contains(&key) {
                continue;
            }
            match self.from.objects.get(&key) {
                Ok(Some(bytes)) => drop(self.to.objects.create(&key, bytes)?),
                Ok(None) => {}
                Err(error) if error.is_damage => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
