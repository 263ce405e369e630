//! The end of making a snapshot, whatever it is made from: it is there with its record, and only if all it refers to
//! stays. The order is in `docs/format/vault.md`.

use std::collections::HashMap;

use crate::container::{ContainerId, SessionId};
use crate::error::{Result, VaultError};
use crate::names::{SnapshotId, claim_key};
use crate::record::{Made, SnapshotRecord};
use crate::uses::Uses;
use crate::vault::Vault;

/// How often a snapshot is tried when deletions interfere.
pub(crate) const MAX_ATTEMPTS: u32 = 3;

/// Why an attempt ended without a snapshot.
pub(crate) enum Ended {
    /// A collector was faster.
    Overtaken,
    Failed(VaultError),
}

impl<E: Into<VaultError>> From<E> for Ended {
    fn from(error: E) -> Self {
        Ended::Failed(error.into())
    }
}

impl Vault {
    /// A new session, which says that it lives.
    pub(crate) fn claim(&self) -> Result<SessionId> {
        loop {
            let session = SessionId::random();
            let key = claim_key(session, 0);
            if self
                .objects
                .create(&key, bytes::Bytes::from_static(b"claim"))?
            {
                return Ok(session);
            }
        }
    }

    pub(crate) fn release(&self, session: SessionId) -> Result<()> {
        for claim in self.objects.list(&format!("claims/{session}"))? {
            self.objects.remove(&claim.key)?;
        }
        Ok(())
    }

    /// Makes a snapshot whose recipe was written, as `objects` objects. `generations` are those of the containers whose
    /// lists were used. A store that has said it wrote something, and has not, is found out.
    pub(crate) fn commit(
        &self,
        id: &SnapshotId,
        objects: u32,
        uses: &Uses,
        generations: &HashMap<ContainerId, u32>,
        record: &Made,
    ) -> Result<(), Ended> {
        // From here on collectors see what the snapshot uses; they may have begun before.
        self.put_own(&id.uses(), uses.encode())?;
        let recipe = self.objects.list(&format!("recipes/{}", id.suffix()))?;
        let is_written =
            recipe.len() == objects as usize && self.ids("uses", Some(&id.machine))?.contains(id);
        if !is_written {
            return Err(VaultError::Unwritten(self.place()).into());
        }
        if !self.all_live(uses, generations)? {
            return Err(Ended::Overtaken);
        }
        let made = SnapshotRecord::Made(Box::new(record.clone()));
        let created = self.objects.create(&id.record(), made.encode().into());
        match (created, self.record_of(id)) {
            // Perhaps an answer was lost.
            (_, Ok(Some(found))) if found == made => Ok(()),
            // A collector took the session for dead.
            (_, Ok(Some(_))) => Err(Ended::Overtaken),
            (Ok(_), Ok(None)) => Err(VaultError::Unwritten(self.place()).into()),
            (Ok(_), Err(error)) => Err(error.into()),
            (Err(error), _) => Err(error.into()),
        }
    }

    /// Whether every container that the snapshot refers to is there to stay. Collectors that mark one from now on will
    /// see the snapshot's uses.
    fn all_live(&self, uses: &Uses, generations: &HashMap<ContainerId, u32>) -> Result<bool> {
        let marked = self.marked()?;
        let places = self.containers(None)?;
        for (id, (machine, used)) in &uses.containers {
            if marked.contains(id) {
                return Ok(false);
            }
            match places.get(machine, *id) {
                None => return Ok(false),
                Some((generation, _)) if generations.get(id) == Some(generation) => {}
                // Compacted since its list was read.
                Some((generation, _)) => match self.head(machine, *id, *generation)? {
                    Some(head) if used.are_in(&head.present) => {}
                    _ => return Ok(false),
                },
            }
        }
        Ok(true)
    }

    /// Takes back what an attempt wrote, but for containers. What stays, since this host may not delete, a collection
    /// takes back a day later.
    pub(crate) fn retract(&self, id: &SnapshotId) {
        let removed = self.objects.remove(&id.uses());
        if let Err(error) = removed
            .map_err(VaultError::from)
            .and_then(|()| self.remove_recipe(id))
        {
            tracing::debug!("{error}");
        }
    }
}
