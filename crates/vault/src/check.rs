//! Verifying a vault: what is there, and whether it is what it should be.

use std::collections::BTreeSet;

use crate::container::ContainerId;
use crate::copy::Copying;
use crate::error::{Result, VaultError};
use crate::ids::Ids;
use crate::names::{Machine, SnapshotId, container_key};
use crate::places::{ByContainer, Places};
use crate::problem::Problem;
use crate::uses::Uses;
use crate::vault::Vault;

/// How thorough a check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checking {
    /// Every object is there and its head is right; of the containers, one in so many is read whole.
    Sample(u32),
    /// Every block is read and verified.
    Full,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// Snapshots checked.
    pub snapshots: u64,
    /// Containers checked.
    pub containers: u64,
    /// Of those, containers read whole.
    pub read: u64,
    /// Bytes read of containers.
    pub read_bytes: u64,
    /// Everything that is wrong.
    pub problems: Vec<Problem>,
    /// What was wrong, and is right again.
    pub repaired: Vec<Problem>,
}

/// A container that snapshots use: its machine, and who uses what.
struct Used {
    machine: Machine,
    by: Vec<(usize, Ids)>,
}

impl Vault {
    /// Checks the vault. `progress` gets the bytes of containers that are done, and of all.
    ///
    /// # Errors
    /// Errors of the store; damage is not an error but a [`Problem`].
    pub fn check(&self, how: Checking, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
        self.check_and_repair(how, None, progress)
    }

    /// As [`Vault::check`]; what is damaged or lost here and good in `copy`, a copy of this vault, is replaced: a
    /// container by its next generation, a snapshot by the copy's, which then has another number of a session.
    ///
    /// # Errors
    /// As [`Vault::check`], and errors of the copy's store.
    pub fn check_and_repair(
        &self,
        how: Checking,
        copy: Option<&Vault>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CheckReport> {
        let mut report = CheckReport::default();
        let mut silent = |_| {};
        let mut copying = match copy {
            Some(copy) => {
                self.probe()?;
                Some(Copying::new(copy, self, &mut silent)?)
            }
            None => None,
        };
        let (entries, damaged) = self.snapshots(None)?;
        let mut ids: Vec<SnapshotId> = entries.into_iter().map(|e| e.id).collect();
        let all = damaged.into_iter().map(|id| (id, true));
        let all: Vec<_> = ids.drain(..).map(|id| (id, false)).chain(all).collect();
        let mut used: ByContainer<Used> = ByContainer::default();
        for (id, is_damaged) in all {
            let checked = match is_damaged {
                true => Err(self.damaged(&id.record(), &"the snapshot cannot be restored")),
                false => self.check_snapshot(&id).and_then(|uses| match how {
                    Checking::Full => self.open_snapshot(&id)?.check_pages().map(|()| uses),
                    Checking::Sample(_) => Ok(uses),
                }),
            };
            let Some((id, uses)) = self.mend_snapshot(id, checked, &mut copying, &mut report)?
            else {
                continue;
            };
            let number = ids.len();
            ids.push(id);
            for (container, (machine, bits)) in uses.containers {
                let entry = used.of(&machine, container, || Used {
                    machine: (*machine).clone(),
                    by: Vec::new(),
                });
                entry.by.push((number, bits));
            }
        }
        report.snapshots = ids.len() as u64;
        let mut places = self.containers(None)?;
        let mut sizes = ByContainer::default();
        for (machine, id, place) in places.iter() {
            sizes.insert(machine, id, place.1);
        }
        let size = |machine: &Machine, id| sizes.get(machine, id).copied().unwrap_or(0);
        let total = used.iter().map(|(machine, id, _)| size(machine, id)).sum();
        let mut done = 0;
        for (machine, id, used) in used.iter() {
            let whole = match how {
                Checking::Full => true,
                Checking::Sample(one_in) => fastrand::u32(..one_in.max(1)) == 0,
            };
            report.containers += 1;
            let found = self.check_container(id, used, &places, whole, &ids, &mut report)?;
            if let Some(found) = found {
                self.mend_container(id, used, copy, &mut places, &ids, found, &mut report)?;
            }
            done += size(machine, id);
            progress(done, total);
        }
        if how == Checking::Full {
            self.check_segments(&ids, &mut report)?;
        }
        Ok(report)
    }

    /// What a snapshot uses, if it is right, or right again under another id.
    fn mend_snapshot(
        &self,
        id: SnapshotId,
        checked: Result<Uses>,
        copying: &mut Option<Copying<'_>>,
        report: &mut CheckReport,
    ) -> Result<Option<(SnapshotId, Uses)>> {
        let before = report.problems.len();
        if let Some(uses) = problem(&mut report.problems, checked, || vec![id.clone()])? {
            return Ok(Some((id, uses)));
        }
        let Some(copying) = copying else {
            return Ok(None);
        };
        let Some(mended) = self.repair_snapshot(&id, copying)? else {
            return Ok(None);
        };
        report.repaired.extend(report.problems.drain(before..));
        let checked = self.check_snapshot(&mended);
        let uses = problem(&mut report.problems, checked, || vec![mended.clone()])?;
        Ok(uses.map(|uses| (mended, uses)))
    }

    /// Replaces a container by what is good of it here and in a copy.
    #[allow(
        clippy::too_many_arguments,
        reason = "what a check knows of a container"
    )]
    fn mend_container(
        &self,
        id: ContainerId,
        used: &Used,
        copy: Option<&Vault>,
        places: &mut Places,
        ids: &[SnapshotId],
        found: Problem,
        report: &mut CheckReport,
    ) -> Result<()> {
        let here = places.get(&used.machine, id).map(|place| place.0);
        let brought = match copy {
            None => None,
            Some(copy) => {
                let there = copy.containers(Some(&used.machine))?;
                let there = there.get(&used.machine, id).map(|p| p.0);
                self.bring(copy, &used.machine, id, (here, there), None)?
            }
        };
        let Some((generation, len)) = brought else {
            report.problems.push(found);
            return Ok(());
        };
        places.insert(&used.machine, id, (generation, len));
        let left = self.check_container(id, used, places, true, ids, report)?;
        report.repaired.push(found);
        report.problems.extend(left);
        Ok(())
    }

    /// What is wrong with a container, if anything is.
    fn check_container(
        &self,
        id: ContainerId,
        used: &Used,
        places: &Places,
        whole: bool,
        ids: &[SnapshotId],
        report: &mut CheckReport,
    ) -> Result<Option<Problem>> {
        let all = |what: VaultError| Problem {
            what: what.to_string(),
            affected: used.by.iter().map(|(n, _)| ids[*n].clone()).collect(),
        };
        let missing = || VaultError::Missing {
            key: format!("containers/{}/{id}", used.machine.component()),
            vault: self.place(),
        };
        let Some((generation, _)) = places.get(&used.machine, id) else {
            return Ok(Some(all(missing())));
        };
        let key = container_key(&used.machine, id, *generation);
        let head = match self.head(&used.machine, id, *generation) {
            Ok(Some(head)) => head,
            // It was listed: compacted, or removed, since.
            Ok(None) => {
                let now = self.containers(Some(&used.machine))?;
                return match now.get(&used.machine, id) {
                    Some(place) if place.0 != *generation => {
                        self.check_container(id, used, &now, whole, ids, report)
                    }
                    _ => Ok(Some(all(missing()))),
                };
            }
            // Of an encrypted vault, a head is read with what is stored beside it: the head alone may be good.
            Err(error) if error.is_damage() => {
                match self.whole_at(&used.machine, id, *generation)? {
                    Some(whole) => whole.head,
                    None => return Ok(Some(all(error))),
                }
            }
            Err(error) => return Err(error),
        };
        let mut bad: BTreeSet<u16> = BTreeSet::new();
        for (_, bits) in &used.by {
            bad.extend(bits.bits().without(&head.present).iter());
        }
        if whole {
            let present = head.present.clone();
            let whole = self.whole_at(&used.machine, id, *generation)?;
            report.read += 1;
            report.read_bytes += whole.as_ref().map_or(0, |whole| whole.bytes.len() as u64);
            let is_salvaged = whole.as_ref().is_some_and(|whole| whole.is_salvaged);
            let good = whole.map(|whole| whole.good).unwrap_or_default();
            bad.extend(present.without(&good).iter());
            if is_salvaged && bad.is_empty() {
                return Ok(Some(all(
                    self.damaged(&key, &"it has more, or less, than its blocks")
                )));
            }
        }
        if bad.is_empty() {
            return Ok(None);
        }
        let hit = |bits: &Ids| {
            let bits = bits.bits();
            bad.iter().any(|&local| bits.contains(local))
        };
        let affected = used.by.iter().filter(|(_, bits)| hit(bits));
        Ok(Some(Problem {
            what: format!("{} blocks of {key} are damaged or missing", bad.len()),
            affected: affected.map(|(n, _)| ids[*n].clone()).collect(),
        }))
    }

    /// That the digests in containers are those that the roots prove.
    fn check_segments(&self, ids: &[SnapshotId], report: &mut CheckReport) -> Result<()> {
        let known: BTreeSet<SnapshotId> = report
            .problems
            .iter()
            .flat_map(|p| p.affected.clone())
            .collect();
        for id in ids.iter().filter(|id| !known.contains(id)) {
            let checked = self.open_snapshot(id).and_then(|snapshot| {
                (0..snapshot.segments()).try_for_each(|n| snapshot.segment(n).map(drop))
            });
            problem(&mut report.problems, checked, || vec![id.clone()])?;
        }
        Ok(())
    }
}

/// Damage becomes a problem; other errors stay errors.
fn problem<T>(
    problems: &mut Vec<Problem>,
    found: Result<T>,
    affected: impl FnOnce() -> Vec<SnapshotId>,
) -> Result<Option<T>> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_damage() => {
            problems.push(Problem {
                what: error.to_string(),
                affected: affected(),
            });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
