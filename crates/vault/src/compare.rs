//! The latest snapshot of a machine, with which a new one is compared: a segment that is the same at the same place is
//! taken over as it is, without a look into containers; of one that is not, the containers are looked into that have
//! what was there before.

use std::collections::HashMap;

use drover_core::Digest;

use crate::error::{Result, VaultError};
use crate::hooks::Ordinal;
use crate::index::VaultIndex;
use crate::names::Machine;
use crate::recipe::{Placed, SEGMENT_BLOCKS, segment_digest};
use crate::snapshot::Snapshot;
use crate::vault::Vault;

/// Containers of the parent that are looked into for a window, beside those that its hooks name.
pub const MAX_LIKELY: usize = 16;
/// Records that are looked at until there is a snapshot: some were given up, or are damaged.
const MAX_LOOKS: usize = 8;

/// What the parent has at the place of a window.
#[derive(Default)]
pub(crate) struct Compared<'a> {
    /// Of each segment that is the same, its digest and its blocks.
    pub(crate) same: Vec<Option<(Digest, Vec<Placed<'a>>)>>,
    /// The containers that have most blocks of the others.
    pub(crate) likely: Vec<Ordinal>,
}

impl Vault {
    /// The latest snapshot of a machine, if there is one that can be read.
    pub(crate) fn latest(&self, machine: &Machine) -> Result<Option<Snapshot>> {
        let ids = self.live_ids(Some(machine))?;
        for id in ids.iter().rev().take(MAX_LOOKS) {
            match self.open_snapshot(id) {
                Ok(snapshot) => return Ok(Some(snapshot)),
                Err(VaultError::NoSnapshot { .. } | VaultError::Newer { .. }) => {}
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

impl<'a> Compared<'a> {
    /// Compares a window, from a segment on, with a parent that was opened after the index was loaded: what the parent
    /// uses was there then, and is there as long as the parent is. That it is there in the end the commit finds out.
    pub(crate) fn with(
        parent: &'a Snapshot,
        first: u64,
        window: &[Digest],
        index: &VaultIndex,
    ) -> Result<Compared<'a>> {
        let mut same = Vec::new();
        let mut blocks: HashMap<Ordinal, u32> = HashMap::new();
        for (number, digests) in (first..).zip(window.chunks(SEGMENT_BLOCKS)) {
            if number >= parent.segments() {
                same.push(None);
                continue;
            }
            let (digest, runs) = parent.runs(number)?;
            let places = runs.iter().filter_map(|run| {
                let (machine, id, _) = run.place?;
                Some((run.blocks, index.usable(machine, id)))
            });
            let places: Vec<_> = places.collect();
            let are_usable = places.iter().all(|(_, ordinal)| ordinal.is_some());
            if are_usable && digest == segment_digest(digests) {
                same.push(Some((digest, runs)));
                continue;
            }
            for (count, ordinal) in places {
                if let Some(ordinal) = ordinal {
                    *blocks.entry(ordinal).or_default() += count;
                }
            }
            same.push(None);
        }
        let mut likely: Vec<(u32, Ordinal)> = blocks.into_iter().map(|(o, n)| (n, o)).collect();
        likely.sort_unstable_by(|a, b| b.cmp(a));
        likely.truncate(MAX_LIKELY);
        let likely = likely.into_iter().map(|(_, ordinal)| ordinal).collect();
        Ok(Compared { same, likely })
    }
}
