//! Forgetting snapshots, and what that makes free: exactly the blocks that no other snapshot uses.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use drover_core::BLOCK_SIZE_U64;
use parking_lot::RwLock;

use crate::container::ContainerId;
use crate::error::{Result, VaultError};
use crate::ids::Ids;
use crate::many;
use crate::names::{Machine, SnapshotId, dropped_key};
use crate::places::{ByContainer, Places};
use crate::record::{Share, SnapshotRecord};
use crate::uses::Uses;
use crate::vault::Vault;

/// What forgetting snapshots makes free: exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forgotten {
    /// Snapshots.
    pub snapshots: u64,
    /// Bytes of blocks that no other snapshot uses, before compression.
    pub garbage_bytes: u64,
    /// Containers of which nothing is used any more.
    pub dead_containers: u64,
    /// What those take.
    pub dead_bytes: u64,
}

/// The blocks that the snapshots to be forgotten use, less those that others were found to use.
#[derive(Default)]
struct Left {
    blocks: ByContainer<Own>,
    /// Containers with blocks that nobody else was found to use: all that others need to be asked about. A number may
    /// be that of several machines' containers.
    open: HashMap<ContainerId, u32>,
}

/// Of a container.
#[derive(Default)]
struct Own {
    blocks: Ids,
    /// Whether others use it, whatever blocks.
    is_shared: bool,
}

impl Left {
    /// Adds what a snapshot uses that is to be forgotten.
    fn add(&mut self, uses: Uses) {
        for (id, (machine, used)) in uses.containers {
            let own = self.blocks.of(&machine, id, || {
                *self.open.entry(id).or_default() += 1;
                Own::default()
            });
            own.blocks.union(&used);
        }
    }

    /// Takes away what another one uses.
    fn take(&mut self, uses: Uses) {
        for (id, (machine, used)) in uses.containers {
            let Some(own) = self.blocks.get_mut(&machine, id) else {
                continue;
            };
            own.is_shared = true;
            if own.blocks.count() == 0 {
                continue;
            }
            own.blocks.remove(&used);
            if own.blocks.count() == 0
                && let Some(machines) = self.open.get_mut(&id)
            {
                *machines -= 1;
                if *machines == 0 {
                    self.open.remove(&id);
                }
            }
        }
    }
}

impl Vault {
    /// What forgetting `ids` would free.
    ///
    /// # Errors
    /// Damage of what says what other snapshots use; errors of the store.
    pub fn would_free(&self, ids: &[SnapshotId]) -> Result<Forgotten> {
        let chosen: BTreeSet<&SnapshotId> = ids.iter().collect();
        let forgotten = self.ids("forgotten", None)?;
        // Records before uses: they are written last.
        let mut made = self.ids("snapshots", None)?;
        made.retain(|id| !forgotten.contains(id) && !chosen.contains(id));
        let (chosen, mut others): (Vec<_>, Vec<_>) = self
            .users_with(&made)?
            .into_iter()
            .partition(|id| chosen.contains(id));
        others.retain(|id| !forgotten.contains(id));

        let mut left = Left::default();
        // Those without, or with damaged ones, are forgotten all the same: as long as they are there, nothing is freed.
        let read = |id: &SnapshotId| match self.read_uses(id, &|_| true) {
            Err(error) if error.is_damage() && !matches!(error, VaultError::Missing { .. }) => {
                tracing::warn!("{error}");
                Ok(None)
            }
            read => read,
        };
        many::for_each(&chosen, read, |uses| {
            uses.into_iter().for_each(|uses| left.add(uses));
            Ok(())
        })?;

        // Most of it is in other snapshots of the machine. Those of other machines are then asked about what is left.
        let machines: HashSet<&Machine> = ids.iter().map(|id| &id.machine).collect();
        others.sort_by_key(|id| !machines.contains(&id.machine));
        if self.record().share == Share::Nothing {
            // No machine uses what another one has stored.
            others.retain(|id| machines.contains(&id.machine));
        }
        let left = RwLock::new(left);
        let read = |id: &SnapshotId| {
            let open = std::cell::OnceCell::new();
            let wanted = |id| {
                let left = open.get_or_init(|| left.read());
                left.open.contains_key(&id)
            };
            self.read_uses(id, &wanted)
        };
        many::for_each(&others, read, |uses| {
            uses.into_iter().for_each(|uses| left.write().take(uses));
            Ok(())
        })?;
        self.freed(ids.len(), &left.into_inner())
    }

    /// What is left in figures.
    fn freed(&self, snapshots: usize, left: &Left) -> Result<Forgotten> {
        let mut places: BTreeMap<&Machine, Places> = BTreeMap::new();
        let mut freed = Forgotten {
            snapshots: snapshots as u64,
            ..Forgotten::default()
        };
        for (machine, id, own) in left.blocks.iter() {
            freed.garbage_bytes += u64::from(own.blocks.count()) * BLOCK_SIZE_U64;
            if own.is_shared {
                continue;
            }
            let places = match places.entry(machine) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(self.containers(Some(machine))?),
            };
            if let Some((_, size)) = places.get(machine, id) {
                freed.dead_containers += 1;
                freed.dead_bytes += size;
            }
        }
        Ok(freed)
    }

    /// Forgets snapshots: at once they are not listed any more; what they alone used is freed by
    /// [`Vault::collect`], after a grace.
    ///
    /// # Errors
    /// [`VaultError::Held`] if one of them is in use, and as [`Vault::would_free`]; then none is forgotten.
    pub fn forget(&self, ids: &[SnapshotId]) -> Result<Forgotten> {
        self.check_free(ids)?;
        let freed = self.would_free(ids)?;
        // That took a while. Whoever says from now on that he holds one finds the tombstone, or holds it to the end: it
        // is not buried before. A tombstone is never taken back: a collection may be acting on it.
        self.check_free(ids)?;
        let has_copies = self.has_copies()?;
        for id in ids {
            if has_copies {
                self.drop_from_copies(id)?;
            }
            self.put_own(&id.tombstone(), b"forgotten".to_vec())?;
        }
        Ok(freed)
    }

    /// Remembers that a snapshot was deleted here, so that no copy brings it back. One whose record is damaged is
    /// another one to them.
    fn drop_from_copies(&self, id: &SnapshotId) -> Result<()> {
        match self.record_of(id) {
            Ok(Some(SnapshotRecord::Made(made))) => {
                let key = dropped_key(&id.machine, id.time, &made.root);
                self.put_own(&key, b"dropped".to_vec())
            }
            Ok(_) => Ok(()),
            Err(error) if error.is_damage() => Ok(()),
            Err(error) => Err(error),
        }
    }
}
