//! Holding a snapshot while it is read for long, as a mount does: what it needs stays, whoever forgets it.
//!
//! A holder says so, *then* looks for a tombstone; a collection lists tombstones, *then* looks for holders. One of the
//! two sees the other.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use crate::collect::MAX_SILENCE;
use crate::container::SessionId;
use crate::error::{Result, VaultError};
use crate::names::SnapshotId;
use crate::record::{HolderRecord, SnapshotRecord};
use crate::sealer::CLAIM_EVERY;
use crate::vault::Vault;

/// When a holder that could not say that it lives tries again.
const RETRY_EVERY: Duration = Duration::from_secs(60);

/// Who holds a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The snapshot.
    pub id: SnapshotId,
    /// The holder, as a person knows it.
    pub holder: String,
}

/// A snapshot is held until this is released or dropped. A thread says every hour that the holder lives.
pub struct Hold {
    vault: Vault,
    id: SnapshotId,
    session: SessionId,
    /// Dropped to end the thread.
    renewing: Mutex<Option<(Sender<()>, JoinHandle<()>)>>,
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hold({})", self.id)
    }
}

/// The key of word `n` of a holder.
fn key(id: &SnapshotId, session: SessionId, n: u64) -> String {
    format!("held/{}/{session}/{n}", id.suffix())
}

/// Holder and number of a key.
fn parse(key: &str) -> Option<(SnapshotId, SessionId, u64)> {
    let mut parts = key.strip_prefix("held/")?.split('/').skip(2);
    let session = SessionId::parse(parts.next()?)?;
    let n = parts.next()?.parse().ok()?;
    Some((SnapshotId::of_key(key)?, session, n))
}

impl Vault {
    /// Holds a snapshot: until the end of the hold, or a day after its process was killed, it is not forgotten. `session`
    /// tells holders apart; one that comes again under the same takes over. `holder` is what others are told.
    ///
    /// # Errors
    /// [`VaultError::NoSnapshot`] if it is forgotten; errors of the store.
    pub fn hold(&self, id: &SnapshotId, session: SessionId, holder: &str) -> Result<Hold> {
        let said = HolderRecord {
            holder: holder.to_owned(),
        }
        .encode();
        let before = self.words_of(id, session)?;
        let mut n = before.last().map_or(0, |n| n + 1);
        self.put_own(&key(id, session, n), said.clone())?;
        for old in before {
            self.objects.remove(&key(id, session, old))?;
        }
        // The tombstone before the record: a burial removes the record first.
        let forgotten = self.objects.get(&id.tombstone())?.is_some();
        if forgotten || !matches!(self.record_of(id)?, Some(SnapshotRecord::Made(_))) {
            self.let_go(id, session)?;
            return Err(self.no_snapshot(id));
        }
        let (stop, stopped) = bounded::<()>(0);
        let (vault, its) = (self.clone(), id.clone());
        let renew = move || {
            let mut wait = CLAIM_EVERY;
            while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                let renewed = vault
                    .put_own(&key(&its, session, n + 1), said.clone())
                    .and_then(|()| Ok(vault.objects.remove(&key(&its, session, n))?));
                wait = match renewed {
                    Ok(()) => {
                        n += 1;
                        CLAIM_EVERY
                    }
                    Err(error) => {
                        tracing::warn!("cannot say that {its} is still in use: {error}");
                        RETRY_EVERY
                    }
                };
            }
        };
        let thread = std::thread::Builder::new()
            .name("hold".into())
            .spawn(renew)
            .map_err(|_| VaultError::Worker)?;
        Ok(Hold {
            vault: self.clone(),
            id: id.clone(),
            session,
            renewing: Mutex::new(Some((stop, thread))),
        })
    }

    /// The numbers under which a holder has said that it lives, ascending.
    fn words_of(&self, id: &SnapshotId, session: SessionId) -> Result<BTreeSet<u64>> {
        let listed = self
            .objects
            .list(&format!("held/{}/{session}", id.suffix()))?;
        Ok(listed
            .iter()
            .filter_map(|o| parse(&o.key))
            .map(|(.., n)| n)
            .collect())
    }

    /// Ends a hold, also of a process that is gone.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn let_go(&self, id: &SnapshotId, session: SessionId) -> Result<()> {
        for n in self.words_of(id, session)? {
            self.objects.remove(&key(id, session, n))?;
        }
        Ok(())
    }

    /// The snapshots that are held, and by whom.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn held(&self) -> Result<Vec<Held>> {
        if self.objects.list("held")?.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.store_now_ms()?;
        let silent = |modified: i64| {
            i128::from(now) - i128::from(modified) >= MAX_SILENCE.as_millis() as i128
        };
        let mut held = Vec::new();
        for (id, session, n) in self.holders(silent)?.0 {
            let said = match self.objects.get(&key(&id, session, n)) {
                Err(error) if error.is_damage => None,
                said => said?,
            };
            let said = said.and_then(|bytes| HolderRecord::decode(&bytes).ok());
            let holder = said.map_or_else(|| format!("the session {session}"), |r| r.holder);
            held.push(Held { id, holder });
        }
        Ok(held)
    }

    /// Fails if one of these is held.
    ///
    /// # Errors
    /// [`VaultError::Held`]; errors of the store.
    pub fn check_free(&self, ids: &[SnapshotId]) -> Result<()> {
        match self.held()?.into_iter().find(|held| ids.contains(&held.id)) {
            None => Ok(()),
            Some(held) => Err(VaultError::Held {
                snapshot: held.id.to_string(),
                holder: held.holder,
            }),
        }
    }

    /// The latest word of each holder that lives, and the keys of those that are silent.
    #[allow(clippy::type_complexity)]
    fn holders(
        &self,
        silent: impl Fn(i64) -> bool,
    ) -> Result<(Vec<(SnapshotId, SessionId, u64)>, Vec<String>)> {
        let mut all: BTreeMap<(SnapshotId, SessionId), Vec<(u64, i64, String)>> = BTreeMap::new();
        for object in self.objects.list("held")? {
            if let Some((id, session, n)) = parse(&object.key) {
                let words = all.entry((id, session)).or_default();
                words.push((n, object.modified_ms, object.key));
            }
        }
        let (mut live, mut dead) = (Vec::new(), Vec::new());
        for ((id, session), mut words) in all {
            words.sort();
            match words.iter().all(|(_, modified, _)| silent(*modified)) {
                true => dead.extend(words.into_iter().map(|(.., key)| key)),
                false => {
                    let last = words.last().map_or(0, |(n, ..)| *n);
                    live.push((id, session, last));
                }
            }
        }
        Ok((live, dead))
    }

    /// The snapshots that are held; what silent holders left is removed.
    pub(crate) fn held_ids(&self, silent: impl Fn(i64) -> bool) -> Result<BTreeSet<SnapshotId>> {
        let (live, dead) = self.holders(silent)?;
        dead.iter().try_for_each(|key| self.objects.remove(key))?;
        Ok(live.into_iter().map(|(id, ..)| id).collect())
    }
}

impl Hold {
    /// Ends the hold. What cannot be removed from the vault is void a day later.
    pub fn release(&self) {
        let Some((stop, thread)) = self.renewing.lock().take() else {
            return;
        };
        drop(stop);
        let _ = thread.join();
        if let Err(error) = self.vault.let_go(&self.id, self.session) {
            tracing::warn!(
                "cannot say that {} is not in use any more: {error}",
                self.id
            );
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release();
    }
}
