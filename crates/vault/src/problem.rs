//! What can be wrong with a vault, and whether it is with a snapshot.

use std::collections::BTreeSet;

use crate::error::{Result, VaultError};
use crate::names::SnapshotId;
use crate::uses::Uses;
use crate::vault::Vault;

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What, in one line.
    pub what: String,
    /// The snapshots that it affects.
    pub affected: Vec<SnapshotId>,
}

impl Vault {
    /// A snapshot's small objects; what it uses.
    pub(crate) fn check_snapshot(&self, id: &SnapshotId) -> Result<Uses> {
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
}
