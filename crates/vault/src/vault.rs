//! A vault as a whole: creating, opening, listing.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;

use crate::container::SessionId;
use crate::error::{Result, VaultError};
use crate::names::{Machine, Reference, SnapshotId};
use crate::objects::{LocalObjects, Objects};
use crate::record::{Chunking, Made, RecordError, Share, SnapshotRecord, VaultRecord};
use drover_storage::EnvelopeError;

/// The key of the vault's own record.
const VAULT_KEY: &str = "vault";
/// Snapshots that an error lists at most.
const MAX_CANDIDATES: usize = 5;

/// A snapshot in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Which.
    pub id: SnapshotId,
    /// What its record says.
    pub record: Made,
}

/// A vault; see the crate's documentation. Any number of processes, on any number of hosts, may use one at once.
#[derive(Clone)]
pub struct Vault {
    pub(crate) objects: Arc<dyn Objects>,
    record: VaultRecord,
}

impl std::fmt::Debug for Vault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vault({})", self.objects.describe())
    }
}

impl Vault {
    /// Creates a vault in a directory, which is created if necessary and must be empty.
    ///
    /// # Errors
    /// [`VaultError::Exists`], [`VaultError::NotEmpty`], errors of the host and the store.
    pub fn create(directory: &Path) -> Result<Vault> {
        let fail = |doing| {
            move |source| VaultError::File {
                doing,
                path: directory.to_path_buf(),
                source,
            }
        };
        std::fs::create_dir_all(directory).map_err(fail("create"))?;
        let mut entries = std::fs::read_dir(directory).map_err(fail("read"))?;
        if directory.join(VAULT_KEY).is_file() {
            return Err(VaultError::Exists(directory.display().to_string()));
        }
        if entries.next().is_some() {
            return Err(VaultError::NotEmpty(directory.display().to_string()));
        }
        Vault::create_on(Arc::new(LocalObjects::open(directory)?))
    }

    /// Opens the vault in a directory.
    ///
    /// # Errors
    /// [`VaultError::NoVault`], [`VaultError::Newer`], errors of the store.
    pub fn open(directory: &Path) -> Result<Vault> {
        if !directory.is_dir() {
            return Err(VaultError::NoVault(directory.display().to_string()));
        }
        Vault::open_on(Arc::new(LocalObjects::open(directory)?))
    }

    /// Creates a vault on a store.
    ///
    /// # Errors
    /// [`VaultError::Exists`], [`VaultError::Unconditional`], errors of the store.
    pub fn create_on(objects: Arc<dyn Objects>) -> Result<Vault> {
        let mut id = [0; 16];
        fastrand::fill(&mut id);
        let record = VaultRecord {
            id,
            created: Timestamp::now().as_second(),
            chunking: Chunking::Fixed4K,
            share: Share::All,
        };
        probe(&*objects)?;
        if !objects.create(VAULT_KEY, record.encode().into())? {
            return Err(VaultError::Exists(objects.describe()));
        }
        Ok(Vault { objects, record })
    }

    /// Opens the vault on a store.
    ///
    /// # Errors
    /// [`VaultError::NoVault`], [`VaultError::Newer`], errors of the store.
    pub fn open_on(objects: Arc<dyn Objects>) -> Result<Vault> {
        let Some(bytes) = objects.get(VAULT_KEY)? else {
            return Err(VaultError::NoVault(objects.describe()));
        };
        let record = VaultRecord::decode(&bytes).map_err(|error| match error {
            RecordError::Envelope(EnvelopeError::Version) => VaultError::Newer {
                key: VAULT_KEY.into(),
                vault: objects.describe(),
            },
            error => VaultError::Damaged {
                key: VAULT_KEY.into(),
                vault: objects.describe(),
                why: error.to_string(),
            },
        })?;
        Ok(Vault { objects, record })
    }

    /// What the vault is.
    #[must_use]
    pub fn record(&self) -> &VaultRecord {
        &self.record
    }

    /// Where it is.
    #[must_use]
    pub fn place(&self) -> String {
        self.objects.describe()
    }

    /// The snapshots, of one machine or all, by machine and time. Records that are damaged are not among them: their
    /// ids are the second value.
    ///
    /// # Errors
    /// Errors of the store; [`VaultError::Newer`].
    pub fn snapshots(&self, machine: Option<&Machine>) -> Result<(Vec<Entry>, Vec<SnapshotId>)> {
        let (mut entries, mut damaged) = (Vec::new(), Vec::new());
        for id in self.live_ids(machine)? {
            match self.record_of(&id) {
                Ok(Some(SnapshotRecord::Made(record))) => entries.push(Entry {
                    id,
                    record: *record,
                }),
                // Aborted, or forgotten since it was listed.
                Ok(_) => {}
                Err(error) if error.is_damage() => damaged.push(id),
                Err(error) => return Err(error),
            }
        }
        Ok((entries, damaged))
    }

    /// The ids of records that are not forgotten, sorted. Among them are aborted ones.
    pub(crate) fn live_ids(&self, machine: Option<&Machine>) -> Result<Vec<SnapshotId>> {
        let forgotten = self.ids("forgotten", machine)?;
        let mut ids = self.ids("snapshots", machine)?;
        ids.retain(|id| !forgotten.contains(id));
        Ok(ids.into_iter().collect())
    }

    /// The snapshots that have an object of a kind.
    pub(crate) fn ids(
        &self,
        kind: &str,
        machine: Option<&Machine>,
    ) -> Result<BTreeSet<SnapshotId>> {
        let prefix = match machine {
            Some(machine) => format!("{kind}/{}", machine.component()),
            None => kind.to_owned(),
        };
        let listed = self.objects.list(&prefix)?;
        Ok(listed
            .iter()
            .filter_map(|o| SnapshotId::of_key(&o.key))
            .collect())
    }

    /// The record of a snapshot, if there is one.
    pub(crate) fn record_of(&self, id: &SnapshotId) -> Result<Option<SnapshotRecord>> {
        let key = id.record();
        let Some(bytes) = self.objects.get(&key)? else {
            return Ok(None);
        };
        match SnapshotRecord::decode(&bytes) {
            Ok(record) => Ok(Some(record)),
            Err(RecordError::Envelope(EnvelopeError::Version)) => Err(self.newer(&key)),
            Err(error) => Err(self.damaged(&key, &error)),
        }
    }

    /// The one snapshot that a person means.
    ///
    /// # Errors
    /// [`VaultError::NoSnapshot`], [`VaultError::Ambiguous`], errors of the store.
    pub fn find(&self, wanted: &Reference) -> Result<Entry> {
        let (mut entries, _) = self.snapshots(Some(&wanted.machine))?;
        if wanted.which == "latest" {
            return entries.pop().ok_or_else(|| self.none(wanted, &[]));
        }
        let (fitting, others): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|e| wanted.matches(&e.id));
        match <[Entry; 1]>::try_from(fitting) {
            Ok([entry]) => Ok(entry),
            Err(none) if none.is_empty() => Err(self.none(wanted, &others)),
            Err(several) => Err(VaultError::Ambiguous {
                wanted: wanted.to_string(),
                candidates: candidates(&several),
            }),
        }
    }

    fn none(&self, wanted: &Reference, others: &[Entry]) -> VaultError {
        let hint = match others {
            [] => String::new(),
            others => format!("; there are {}", candidates(others)),
        };
        VaultError::NoSnapshot {
            wanted: wanted.to_string(),
            vault: self.place(),
            hint,
        }
    }

    pub(crate) fn no_snapshot(&self, id: &SnapshotId) -> VaultError {
        VaultError::NoSnapshot {
            wanted: id.to_string(),
            vault: self.place(),
            hint: String::new(),
        }
    }

    /// Every machine that has snapshots.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn machines(&self) -> Result<BTreeSet<Machine>> {
        Ok(self
            .live_ids(None)?
            .into_iter()
            .map(|id| id.machine)
            .collect())
    }

    pub(crate) fn damaged(&self, key: &str, why: &dyn std::fmt::Display) -> VaultError {
        VaultError::Damaged {
            key: key.to_owned(),
            vault: self.place(),
            why: why.to_string(),
        }
    }

    pub(crate) fn newer(&self, key: &str) -> VaultError {
        VaultError::Newer {
            key: key.to_owned(),
            vault: self.place(),
        }
    }

    /// Writes an object whose key belongs to this session alone: if it exists, an answer was lost.
    pub(crate) fn put_own(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        put_own(&*self.objects, key, bytes)
    }

    /// A new object's time, by the clock of the store.
    pub(crate) fn store_now_ms(&self) -> Result<i64> {
        let key = format!("probe/{}", SessionId::random());
        self.objects.create(&key, Bytes::from_static(b"probe"))?;
        let listed = self.objects.list("probe")?;
        self.objects.remove(&key)?;
        listed
            .iter()
            .find(|o| o.key == key)
            .map(|o| o.modified_ms)
            .ok_or_else(|| VaultError::Missing {
                key,
                vault: self.place(),
            })
    }

    /// Refuses a store that overwrites what it must not.
    pub(crate) fn probe(&self) -> Result<()> {
        probe(&*self.objects)
    }
}

pub(crate) fn put_own(objects: &dyn Objects, key: &str, bytes: Vec<u8>) -> Result<()> {
    let bytes = Bytes::from(bytes);
    if objects.create(key, bytes.clone())? || objects.get(key)?.as_ref() == Some(&bytes) {
        return Ok(());
    }
    Err(VaultError::Damaged {
        key: key.to_owned(),
        vault: objects.describe(),
        why: "it exists with another content".into(),
    })
}

fn probe(objects: &dyn Objects) -> Result<()> {
    let key = format!("probe/{}", SessionId::random());
    let first = objects.create(&key, Bytes::from_static(b"first"))?;
    let second = objects.create(&key, Bytes::from_static(b"second"))?;
    let kept = objects.get(&key)?;
    objects.remove(&key)?;
    match first && !second && kept.as_deref() == Some(b"first") {
        true => Ok(()),
        false => Err(VaultError::Unconditional(objects.describe())),
    }
}

/// Snapshots as a list for a message. Two of the same second are told apart by their sessions.
fn candidates(entries: &[Entry]) -> String {
    let mut seen = HashSet::new();
    let twice: HashSet<i64> = entries
        .iter()
        .filter(|e| !seen.insert(e.id.time))
        .map(|e| e.id.time)
        .collect();
    let shown = entries.iter().rev().take(MAX_CANDIDATES);
    let mut names: Vec<String> = shown
        .map(|e| match twice.contains(&e.id.time) {
            true => format!("{}@{} (of {})", e.id.machine, e.id.session, e.id.when()),
            false => e.id.to_string(),
        })
        .collect();
    if entries.len() > MAX_CANDIDATES {
        names.push(format!("{} more", entries.len() - MAX_CANDIDATES));
    }
    names.join(", ")
}
