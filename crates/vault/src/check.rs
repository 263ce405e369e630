//! Verifying a vault: what is there, and whether it is what it should be.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::container::{ContainerId, Head, LocalIds};
use crate::digester::Digester;
use crate::error::{Result, VaultError};
use crate::names::{Machine, SnapshotId, container_key};
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

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What, in one line.
    pub what: String,
    /// The snapshots that it affects.
    pub affected: Vec<SnapshotId>,
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
}

/// A container that snapshots use: its machine, and who uses what.
struct Used {
    machine: Machine,
    by: Vec<(usize, LocalIds)>,
}

impl Vault {
    /// Checks the vault. `progress` gets the bytes of containers that are done, and of all.
    ///
    /// # Errors
    /// Errors of the store; damage is not an error but a [`Problem`].
    pub fn check(&self, how: Checking, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
        let mut report = CheckReport::default();
        let (entries, damaged) = self.snapshots(None)?;
        for id in damaged {
            report.problems.push(Problem {
                what: format!("the record of {id} is damaged: it cannot be restored"),
                affected: vec![id],
            });
        }
        let ids: Vec<SnapshotId> = entries.into_iter().map(|e| e.id).collect();
        report.snapshots = ids.len() as u64;
        let mut used: BTreeMap<ContainerId, Used> = BTreeMap::new();
        for (number, id) in ids.iter().enumerate() {
            let found = self.check_snapshot(id);
            let uses = problem(&mut report, found, || vec![id.clone()])?;
            for (container, (machine, bits)) in uses.unwrap_or_default().containers {
                let entry = used.entry(container).or_insert_with(|| Used {
                    machine,
                    by: Vec::new(),
                });
                entry.by.push((number, bits));
            }
        }
        let places = self.containers(None)?;
        let size = |id: &ContainerId| places.get(id).map_or(0, |place| place.2);
        let total = used.keys().map(size).sum();
        let mut done = 0;
        for (id, used) in &used {
            let whole = match how {
                Checking::Full => true,
                Checking::Sample(one_in) => fastrand::u32(..one_in.max(1)) == 0,
            };
            self.check_container(*id, used, &places, whole, &ids, &mut report)?;
            done += size(id);
            progress(done, total);
        }
        if how == Checking::Full {
            self.check_segments(&ids, &mut report)?;
        }
        Ok(report)
    }

    /// A snapshot's small objects; what it uses.
    fn check_snapshot(&self, id: &SnapshotId) -> Result<Uses> {
        let snapshot = self.open_snapshot(id)?;
        let uses = self.uses_of(id)?.ok_or_else(|| VaultError::Missing {
            key: id.uses(),
            vault: self.place(),
        })?;
        let listed: BTreeSet<_> = snapshot.recipe().containers.iter().map(|c| c.1).collect();
        match uses.containers.keys().eq(listed.iter()) {
            true => Ok(uses),
            false => Err(self.damaged(&id.uses(), &"it does not fit its recipe")),
        }
    }

    fn check_container(
        &self,
        id: ContainerId,
        used: &Used,
        places: &HashMap<ContainerId, (Machine, u32, u64)>,
        whole: bool,
        ids: &[SnapshotId],
        report: &mut CheckReport,
    ) -> Result<()> {
        report.containers += 1;
        let all = || used.by.iter().map(|(n, _)| ids[*n].clone()).collect();
        let Some((_, generation, _)) = places.get(&id) else {
            let key = format!("containers/{}/{id}", used.machine.component());
            let missing = VaultError::Missing {
                key,
                vault: self.place(),
            };
            report.problems.push(Problem {
                what: missing.to_string(),
                affected: all(),
            });
            return Ok(());
        };
        let key = container_key(&used.machine, id, *generation);
        let found = self.head(&used.machine, id, *generation);
        let Some(Some(head)) = problem(report, found, all)? else {
            return Ok(());
        };
        let mut bad: BTreeSet<u16> = BTreeSet::new();
        for (_, bits) in &used.by {
            bad.extend(bits.without(&head.present).iter());
        }
        if whole {
            let bytes = match self.objects.get(&key) {
                // Of an encrypted vault: nothing of it can be read as a whole.
                Err(error) if error.is_damage => bytes::Bytes::new(),
                got => got?.unwrap_or_default(),
            };
            report.read += 1;
            report.read_bytes += bytes.len() as u64;
            bad.extend(wrong_blocks(&head, &bytes, &self.digester));
        }
        if !bad.is_empty() {
            let hit = |bits: &LocalIds| bad.iter().any(|&local| bits.contains(local));
            let affected: Vec<SnapshotId> = used
                .by
                .iter()
                .filter(|(_, bits)| hit(bits))
                .map(|(n, _)| ids[*n].clone())
                .collect();
            report.problems.push(Problem {
                what: format!("{} blocks of {key} are damaged or missing", bad.len()),
                affected,
            });
        }
        Ok(())
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
            problem(report, checked, || vec![id.clone()])?;
        }
        Ok(())
    }
}

/// The local ids of blocks that cannot be read.
fn wrong_blocks(head: &Head, bytes: &[u8], digester: &Digester) -> Vec<u16> {
    let locals: Vec<u16> = head.present.iter().collect();
    match head.verify(bytes, digester) {
        Ok(wrong) => wrong
            .into_iter()
            .filter_map(|at| locals.get(at).copied())
            .collect(),
        Err(_) => locals,
    }
}

/// Damage becomes a problem; other errors stay errors.
fn problem<T>(
    report: &mut CheckReport,
    found: Result<T>,
    affected: impl FnOnce() -> Vec<SnapshotId>,
) -> Result<Option<T>> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_damage() => {
            report.problems.push(Problem {
                what: error.to_string(),
                affected: affected(),
            });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
