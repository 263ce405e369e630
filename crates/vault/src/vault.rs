//! A vault as a whole: creating, opening, listing.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;

use crate::container::SessionId;
use crate::digester::Digester;
use crate::error::{Result, VaultError};
use crate::keys::{self, KeyEntry, Secret, Unlocked};
use crate::many;
use crate::names::{Machine, Reference, SnapshotId};
use crate::objects::{LocalObjects, Objects, get_at_most, put_own};
use crate::record::{
    Chunking, MAX_RECORD_BYTES, Made, RecordError, Share, SnapshotRecord, VaultRecord,
};
use crate::sealed::{Keys, SealedObjects};
use drover_storage::EnvelopeError;

/// The key of the vault's own record.
const VAULT_KEY: &str = "vault";
/// What a vault has before its record: all that is left in a directory when its creation is interrupted.
const FIRST: [&str; 3] = [".unfinished", "keys", "probe"];
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
    /// The objects, readable: of an encrypted vault decrypted.
    pub(crate) objects: Arc<dyn Objects>,
    pub(crate) digester: Digester,
    record: VaultRecord,
    /// Of an encrypted vault: the objects as they are stored, and what opened it.
    sealed: Option<(Arc<dyn Objects>, Unlocked)>,
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
        Vault::create_on(Vault::empty(directory)?)
    }

    /// The store in a directory, which is created if necessary, and is empty.
    pub(crate) fn empty(directory: &Path) -> Result<Arc<dyn Objects>> {
        let fail = |doing| {
            move |source| VaultError::File {
                doing,
                path: directory.to_path_buf(),
                source,
            }
        };
        std::fs::create_dir_all(directory).map_err(fail("create"))?;
        if directory.join(VAULT_KEY).is_file() {
            return Err(VaultError::Exists(directory.display().to_string()));
        }
        for entry in std::fs::read_dir(directory).map_err(fail("read"))? {
            let name = entry.map_err(fail("read"))?.file_name();
            if !FIRST.iter().any(|first| name == *first) {
                return Err(VaultError::NotEmpty(directory.display().to_string()));
            }
        }
        Ok(Arc::new(LocalObjects::open(directory)?))
    }

    /// Opens the vault in a directory.
    ///
    /// # Errors
    /// [`VaultError::NoVault`], [`VaultError::Newer`], errors of the store.
    pub fn open(directory: &Path) -> Result<Vault> {
        Vault::open_on(Vault::existing(directory)?)
    }

    /// The store in a directory that exists.
    pub(crate) fn existing(directory: &Path) -> Result<Arc<dyn Objects>> {
        if !directory.is_dir() {
            return Err(VaultError::NoVault(directory.display().to_string()));
        }
        Ok(Arc::new(LocalObjects::open(directory)?))
    }

    /// Creates a vault on a store.
    ///
    /// # Errors
    /// [`VaultError::Exists`], [`VaultError::Unconditional`], errors of the store.
    pub fn create_on(objects: Arc<dyn Objects>) -> Result<Vault> {
        Vault::create_shared_on(objects, Share::All, None)
    }

    /// Creates a vault on a store in which duplicates are looked for as `share` says; with a secret, an encrypted one,
    /// whose first key is called so.
    ///
    /// # Errors
    /// As [`Vault::create_on`].
    pub fn create_shared_on(
        objects: Arc<dyn Objects>,
        share: Share,
        secret: Option<(&Secret, &str)>,
    ) -> Result<Vault> {
        let record = new_record(share, secret.is_some());
        let Some((secret, label)) = secret else {
            create_record(&*objects, &record)?;
            return Ok(Vault::plain(objects, record));
        };
        let master = keys::new_master()?;
        if get_at_most(&*objects, VAULT_KEY, 0)?.is_some() {
            return Err(VaultError::Exists(objects.describe()));
        }
        // Before the vault: without a key it could never be opened.
        let by = keys::add(&*objects, &record.id, &master, secret, label)?;
        create_record(&*objects, &record)?;
        Ok(Vault::encrypted(objects, record, Unlocked { master, by }))
    }

    /// Creates an encrypted vault on a store, with a first key.
    ///
    /// # Errors
    /// As [`Vault::create_on`].
    pub fn create_encrypted_on(
        objects: Arc<dyn Objects>,
        secret: &Secret,
        label: &str,
    ) -> Result<Vault> {
        Vault::create_shared_on(objects, Share::All, Some((secret, label)))
    }

    /// Opens the vault on a store.
    ///
    /// # Errors
    /// [`VaultError::NoVault`], [`VaultError::Newer`], [`VaultError::Encrypted`], errors of the store.
    pub fn open_on(objects: Arc<dyn Objects>) -> Result<Vault> {
        let place = objects.describe();
        Vault::open_with(objects, &mut || Err(VaultError::Encrypted(place.clone())))
    }

    /// Opens the vault on a store; if it is encrypted, with the secret that is asked for then.
    ///
    /// # Errors
    /// As [`Vault::open_on`]; those of `ask`; [`VaultError::WrongKey`].
    pub fn open_with(
        objects: Arc<dyn Objects>,
        ask: &mut dyn FnMut() -> Result<Secret>,
    ) -> Result<Vault> {
        let Some(record) = Vault::record_on(&*objects)? else {
            return Err(VaultError::NoVault(objects.describe()));
        };
        if !record.is_encrypted {
            return Ok(Vault::plain(objects, record));
        }
        let unlocked = keys::unlock(&*objects, &record.id, &ask()?)?;
        Ok(Vault::encrypted(objects, record, unlocked))
    }

    /// The record of the vault on a store, if there is one.
    pub(crate) fn record_on(objects: &dyn Objects) -> Result<Option<VaultRecord>> {
        let Some(bytes) = get_at_most(objects, VAULT_KEY, MAX_RECORD_BYTES)? else {
            return Ok(None);
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
        Ok(Some(record))
    }

    /// Writes the record of this vault to the store of a copy.
    pub(crate) fn create_record_on(&self, objects: &dyn Objects) -> Result<()> {
        create_record(objects, &self.record)
    }

    /// The same vault on another store.
    pub(crate) fn on(&self, objects: Arc<dyn Objects>) -> Vault {
        match &self.sealed {
            None => Vault::plain(objects, self.record.clone()),
            Some((_, unlocked)) => Vault::encrypted(objects, self.record.clone(), unlocked.clone()),
        }
    }

    /// The keys of an encrypted vault, as they are stored.
    pub(crate) fn stored_keys(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let Some((objects, _)) = &self.sealed else {
            return Ok(Vec::new());
        };
        let mut keys = Vec::new();
        for listed in objects.list("keys")? {
            if let Some(bytes) = get_at_most(&**objects, &listed.key, MAX_RECORD_BYTES)? {
                keys.push((listed.key, bytes.to_vec()));
            }
        }
        Ok(keys)
    }

    fn plain(objects: Arc<dyn Objects>, record: VaultRecord) -> Vault {
        Vault {
            objects,
            digester: Digester::default(),
            record,
            sealed: None,
        }
    }

    fn encrypted(objects: Arc<dyn Objects>, record: VaultRecord, unlocked: Unlocked) -> Vault {
        let keys = Keys::derive(&unlocked.master);
        Vault {
            digester: Digester::keyed(keys.digests()),
            objects: Arc::new(SealedObjects::new(objects.clone(), keys)),
            record,
            sealed: Some((objects, unlocked)),
        }
    }

    fn unlocked(&self) -> Result<&(Arc<dyn Objects>, Unlocked)> {
        self.sealed
            .as_ref()
            .ok_or_else(|| VaultError::NoKeys(self.place()))
    }

    /// Adds a key: from now on this secret opens the vault as well.
    ///
    /// # Errors
    /// [`VaultError::NoKeys`], [`VaultError::ManyKeys`], [`VaultError::LongLabel`], errors of the store.
    pub fn add_key(&self, secret: &Secret, label: &str) -> Result<SessionId> {
        let (objects, unlocked) = self.unlocked()?;
        if label.len() > keys::MAX_LABEL {
            return Err(VaultError::LongLabel {
                len: label.len(),
                max: keys::MAX_LABEL,
            });
        }
        if self.keys()?.len() >= keys::MAX_KEYS {
            return Err(VaultError::ManyKeys {
                vault: self.place(),
                max: keys::MAX_KEYS,
            });
        }
        keys::add(&**objects, &self.record.id, &unlocked.master, secret, label)
    }

    /// The keys of the vault, the oldest first.
    ///
    /// # Errors
    /// [`VaultError::NoKeys`], errors of the store.
    pub fn keys(&self) -> Result<Vec<KeyEntry>> {
        let (objects, unlocked) = self.unlocked()?;
        keys::list(&**objects, &self.record.id, unlocked.by)
    }

    /// Removes a key other than the one that opened this vault: its secret no longer opens the vault.
    ///
    /// # Errors
    /// [`VaultError::NoKey`], [`VaultError::LastKey`], [`VaultError::KeyInUse`], [`VaultError::KeyChanges`],
    /// [`VaultError::NoKeys`], errors of the store.
    pub fn remove_key(&self, id: SessionId) -> Result<()> {
        let (objects, unlocked) = self.unlocked()?;
        keys::remove(&**objects, &self.record.id, id, unlocked.by)
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
        let ids = self.live_ids(machine)?;
        let read = |id: &SnapshotId| Ok((id.clone(), self.record_of(id)));
        many::for_each(&ids, read, |(id, found)| {
            match found {
                Ok(Some(SnapshotRecord::Made(record))) => entries.push(Entry {
                    id,
                    record: *record,
                }),
                // Aborted, or forgotten since it was listed.
                Ok(_) => {}
                Err(error) if error.is_damage() => damaged.push(id),
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        entries.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        damaged.sort_unstable();
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

    /// The snapshot of a machine that a session made, if it is there.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn of_session(&self, machine: &Machine, session: SessionId) -> Result<Option<SnapshotId>> {
        let ids = self.live_ids(Some(machine))?;
        Ok(ids.into_iter().find(|id| id.session == session))
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
        unprobe(&*self.objects, &key);
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

fn new_record(share: Share, is_encrypted: bool) -> VaultRecord {
    let mut id = [0; 16];
    fastrand::fill(&mut id);
    VaultRecord {
        id,
        created: Timestamp::now().as_second(),
        chunking: Chunking::Fixed4K,
        share,
        is_encrypted,
    }
}

fn create_record(objects: &dyn Objects, record: &VaultRecord) -> Result<()> {
    probe(objects)?;
    match objects.create(VAULT_KEY, record.encode().into())? {
        true => Ok(()),
        false => Err(VaultError::Exists(objects.describe())),
    }
}

fn probe(objects: &dyn Objects) -> Result<()> {
    let key = format!("probe/{}", SessionId::random());
    let first = objects.create(&key, Bytes::from_static(b"first"))?;
    let second = objects.create(&key, Bytes::from_static(b"second"))?;
    let kept = objects.get(&key)?;
    unprobe(objects, &key);
    match first && !second && kept.as_deref() == Some(b"first") {
        true => Ok(()),
        false => Err(VaultError::Unconditional(objects.describe())),
    }
}

/// Removes what was only to see what a store does. Who may not delete leaves it to a collection.
fn unprobe(objects: &dyn Objects, key: &str) {
    if let Err(error) = objects.remove(key) {
        tracing::debug!("{error}");
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
