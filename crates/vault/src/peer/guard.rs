//! What a peer may do with the vault of a site. It adds, and reads what it needs for that; it changes and removes
//! nothing that others have, nor what it has itself added.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use parking_lot::Mutex;

use super::wire::MAX_PUT_BYTES;
use crate::container::{ContainerId, Head, SessionId};
use crate::digester::Digester;
use crate::error::{Result, StoreError};
use crate::objects::{Listed, Objects};
use crate::recipe::RecipeHead;
use crate::record::{HolderRecord, HookRecord, MAX_RECORD_BYTES, Share, SnapshotRecord};
use crate::uses::Uses;
use crate::vault::Vault;

/// Most words of a peer that are remembered, so that it can take them back.
const MAX_OWN: usize = 4096;
/// How far ahead of the site's clock a peer may date a snapshot, in seconds: with dates of its own choice it could have
/// older ones taken for superfluous.
const MAX_AHEAD: i64 = 3600;
/// The longest object that says only that it is there.
const MAX_WORD: u64 = 256;

/// Held while an object is unpacked that may become far larger than what was sent: one at a time, of all peers.
static UNPACKING: Mutex<()> = Mutex::new(());

/// Kinds of objects that are one machine's: the second component of their keys.
const OF_MACHINES: [&str; 7] = [
    "containers",
    "dropped",
    "forgotten",
    "held",
    "recipes",
    "snapshots",
    "uses",
];
/// Other kinds that a peer may read.
const READABLE: [&str; 7] = [
    "claims", "copied", "hooks", "keys", "marks", "probe", "removing",
];

/// What a peer has said in this vault that it may take back: that a session lives, and trials. Of all its connections.
#[derive(Debug, Default)]
pub struct Own(Mutex<HashSet<String>>);

/// The objects of a vault as a peer may use them.
pub struct Guard {
    objects: Arc<dyn Objects>,
    own: Arc<Own>,
    peer: String,
    /// It may use the machines of all.
    is_admin: bool,
    share: Share,
    is_encrypted: bool,
    /// Machines of which it is known whether they are this peer's: that never changes.
    machines: Mutex<HashMap<String, bool>>,
    /// Sessions of which it sees a container, as of the last look.
    sessions: Mutex<HashSet<SessionId>>,
    /// Seconds since 1970.
    clock: fn() -> i64,
}

/// What a machine is to a peer.
enum Whose {
    Its,
    Others,
    Nobodys,
}

impl Guard {
    /// The vault on a store, for a peer with that key. `is_admin`: it may also use machines of others.
    ///
    /// # Errors
    /// [`crate::VaultError::NoVault`], [`crate::VaultError::Newer`], errors of the store.
    pub fn new(
        objects: Arc<dyn Objects>,
        peer: String,
        is_admin: bool,
        own: Arc<Own>,
    ) -> Result<Self> {
        let Some(record) = Vault::record_on(&*objects)? else {
            return Err(crate::VaultError::NoVault(objects.describe()));
        };
        Ok(Guard {
            objects,
            own,
            peer,
            is_admin,
            share: record.share,
            is_encrypted: record.is_encrypted,
            machines: Mutex::default(),
            sessions: Mutex::default(),
            clock: || Timestamp::now().as_second(),
        })
    }

    /// Whether the vault is encrypted: then names in it mean nothing to the site.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// The same with another clock.
    #[cfg(test)]
    pub(crate) fn at(self, clock: fn() -> i64) -> Self {
        Guard { clock, ..self }
    }

    fn refused(&self, doing: &'static str, key: &str, why: &str) -> StoreError {
        StoreError {
            doing,
            key: key.to_owned(),
            vault: self.describe(),
            why: why.to_owned(),
            can_retry: false,
            is_damage: false,
        }
    }

    /// Whose machine that is: the peer's that first wrote something of it.
    fn whose(&self, machine: &str) -> Result<Whose, StoreError> {
        if let Some(&is_its) = self.machines.lock().get(machine) {
            return Ok(if is_its { Whose::Its } else { Whose::Others });
        }
        let whose = match self.objects.get_range(&owner_key(machine), 0..MAX_WORD)? {
            Some(owner) if owner == self.peer.as_bytes() => Whose::Its,
            Some(_) => Whose::Others,
            // Written at the site itself.
            // Written at the site itself, perhaps the first snapshot, which is not complete yet.
            None if self.has_any(machine)? => Whose::Others,
            None => return Ok(Whose::Nobodys),
        };
        let is_its = matches!(whose, Whose::Its);
        let mut machines = self.machines.lock();
        if machines.len() < MAX_OWN {
            machines.insert(machine.to_owned(), is_its);
        }
        Ok(whose)
    }

    /// Whether anything of a machine is there.
    fn has_any(&self, machine: &str) -> Result<bool, StoreError> {
        for kind in ["snapshots", "containers", "recipes", "uses"] {
            if !self.objects.list(&format!("{kind}/{machine}"))?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Fails unless the peer may write for a machine; from then on one that was nobody's is its own.
    fn take(&self, key: &str, machine: &str) -> Result<(), StoreError> {
        let whose = match self.whose(machine)? {
            // It would have what machines have in common.
            Whose::Nobodys if machine == crate::Machine::popular().component() => Whose::Others,
            Whose::Nobodys => {
                let owner = Bytes::from(self.peer.clone().into_bytes());
                self.objects.create(&owner_key(machine), owner)?;
                self.whose(machine)?
            }
            whose => whose,
        };
        match whose {
            Whose::Its => Ok(()),
            _ if self.is_admin => Ok(()),
            _ => Err(self.refused(
                "write",
                key,
                "the vault has a machine of that name of another site; name yours with --as",
            )),
        }
    }

    /// Whether machines of all use each other's blocks. The site cannot tell whether those of an encrypted vault are what
    /// they are said to be, and a peer that was taken over could have written others.
    fn shares_all(&self) -> bool {
        self.share == Share::All && !self.is_encrypted
    }

    /// Whether the peer may read the hooks of a session: that it sees a container of it.
    fn sees_session(&self, session: &str) -> Result<bool, StoreError> {
        let Some(session) = SessionId::parse(session) else {
            return Ok(false);
        };
        if self.is_admin || self.shares_all() || self.sessions.lock().contains(&session) {
            return Ok(true);
        }
        self.learn_sessions()?;
        Ok(self.sessions.lock().contains(&session))
    }

    /// Learns of which sessions the peer sees containers.
    fn learn_sessions(&self) -> Result<(), StoreError> {
        let listed = self.list("containers")?;
        *self.sessions.lock() = listed.iter().filter_map(session_of).collect();
        Ok(())
    }

    /// Whether the peer may read what is a machine's.
    fn sees(&self, kind: &str, machine: &str) -> Result<bool, StoreError> {
        // Else nothing could be found that is there already.
        let is_shared = kind == "containers"
            && (self.shares_all()
                || self.share == Share::Popular
                    && machine == crate::Machine::popular().component());
        Ok(is_shared || self.is_admin || matches!(self.whose(machine)?, Whose::Its))
    }

    fn check_read(&self, doing: &'static str, key: &str) -> Result<bool, StoreError> {
        let mut parts = key.split('/');
        let (kind, second) = (parts.next().unwrap_or_default(), parts.next());
        match second {
            // To whoever asks for all there are none: see `Vault::check_owner`.
            None if kind == "owners" => Ok(false),
            Some(session) if kind == "hooks" => self.sees_session(session),
            _ if key == "vault" || READABLE.contains(&kind) => Ok(true),
            // What is the peer's of it.
            None if OF_MACHINES.contains(&kind) => Ok(true),
            Some(machine) if OF_MACHINES.contains(&kind) => self.sees(kind, machine),
            _ => Err(self.refused(doing, key, "a peer may not read it")),
        }
    }

    /// Fails unless a record is of a snapshot that is complete, and no older than those of its machine.
    fn check_record(&self, key: &str, machine: &str, of: &str) -> Result<(), StoreError> {
        let has = |key: &str| Ok::<_, StoreError>(self.objects.get_range(key, 0..1)?.is_some());
        // An answer may have been lost.
        if has(key)? {
            return Ok(());
        }
        // What is made without would keep collections from knowing what is garbage.
        if !has(&format!("uses/{machine}/{of}"))? || !has(&format!("recipes/{machine}/{of}/head"))?
        {
            return Err(self.refused("write", key, "its recipe and uses are not there"));
        }
        // Else a day that is over could get another last snapshot, for which the good one is deleted.
        let listed = self.objects.list(&format!("snapshots/{machine}"))?;
        let newest = listed
            .iter()
            .filter_map(|object| time_of(&object.key))
            .max();
        match time_of(key) < newest {
            true => Err(self.refused(
                "write",
                key,
                "it is dated before the latest snapshot of its machine; make it again",
            )),
            false => Ok(()),
        }
    }

    /// Fails unless the peer may write that object.
    fn check_write(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let refused = |why: &str| Err(self.refused("write", key, why));
        let len = bytes.len() as u64;
        let parts: Vec<&str> = key.split('/').collect();
        let max = match parts[0] {
            "claims" | "probe" => MAX_WORD,
            "held" | "snapshots" => 2 * MAX_RECORD_BYTES,
            _ => u64::from(MAX_PUT_BYTES),
        };
        if len > max {
            return refused("it is too long for its kind");
        }
        let session = |text: &str| SessionId::parse(text).is_some();
        let snapshot = |text: &str| {
            let parts = text.split_once('-');
            parts.is_some_and(|(time, of)| time.len() == 16 && session(of))
        };
        let number = |text: &str| text.parse::<u64>().is_ok_and(|n| n.to_string() == text);
        let is_fine = match parts[..] {
            ["claims", of, n] => session(of) && number(n),
            ["hooks", of] => session(of),
            ["probe", _] => true,
            // A later generation would hide what others use.
            ["containers", _, file] => file
                .split_once('.')
                .is_some_and(|(id, n)| ContainerId::parse(id).is_some() && n == "0"),
            ["held", _, of, by, n] => snapshot(of) && session(by) && number(n),
            ["recipes", _, of, part] => snapshot(of) && (part == "head" || number(part)),
            ["snapshots" | "uses", _, of] => snapshot(of),
            _ => false,
        };
        if !is_fine {
            return refused("a peer may not write it");
        }
        if let ["snapshots", machine, of] = parts[..] {
            let time = time_of(key);
            let latest = (self.clock)().saturating_add(MAX_AHEAD);
            if time.is_none_or(|time| time.as_second() > latest) {
                return refused("it is dated in the future; see the clocks of both hosts");
            }
            self.check_record(key, machine, of)?;
        }
        // The store of an encrypted vault does not know what it has.
        if !self.is_encrypted
            && let Err(why) = check_content(&parts, bytes)
        {
            return refused(&format!("it is not what its key says: {why}"));
        }
        match OF_MACHINES.contains(&parts[0]) {
            true => self.take(key, parts[1]),
            false => Ok(()),
        }
    }
}

/// The session of a container.
fn session_of(object: &Listed) -> Option<SessionId> {
    let (id, _) = object.key.rsplit_once('/')?.1.split_once('.')?;
    ContainerId::parse(id).map(ContainerId::session)
}

/// When a snapshot was made, by the key of its record.
fn time_of(key: &str) -> Option<Timestamp> {
    let (_, of) = key.rsplit_once('/')?;
    of.split_once('-')?.0.parse().ok()
}

/// Whether an object of a vault that is not encrypted is what its key says.
fn check_content(parts: &[&str], bytes: &[u8]) -> Result<(), String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let _unpacking = match parts[0] {
        "hooks" | "uses" | "recipes" => Some(UNPACKING.lock()),
        _ => None,
    };
    match parts {
        ["containers", _, file] => {
            let head = Head::parse(bytes).map_err(|e| said(&e))?;
            let named = file
                .split_once('.')
                .and_then(|(id, _)| ContainerId::parse(id));
            if Some(head.id) != named || head.generation != 0 {
                return Err("it is another container".into());
            }
            let wrong = head
                .verify(bytes, &Digester::default())
                .map_err(|e| said(&e))?;
            match wrong.len() {
                0 => Ok(()),
                n => Err(format!("{n} of its blocks have another digest")),
            }
        }
        ["hooks", session] => {
            let hooks = HookRecord::decode(bytes).map_err(|e| said(&e))?;
            let session = SessionId::parse(session);
            match session.is_some_and(|session| hooks.is_of(session)) {
                true => Ok(()),
                false => Err("it has hooks of other sessions, or too many".into()),
            }
        }
        ["held", ..] => HolderRecord::decode(bytes).map(drop).map_err(|e| said(&e)),
        ["uses", ..] => Uses::decode(bytes).map(drop).map_err(|e| said(&e)),
        ["recipes", _, _, "head"] => RecipeHead::decode(bytes).map(drop).map_err(|e| said(&e)),
        ["snapshots", ..] => match SnapshotRecord::decode(bytes).map_err(|e| said(&e))? {
            SnapshotRecord::Made(_) => Ok(()),
            SnapshotRecord::Aborted => Err("only a collection gives a snapshot up".into()),
        },
        _ => Ok(()),
    }
}

/// The key that says which peer a machine is of.
fn owner_key(machine: &str) -> String {
    format!("owners/{machine}")
}

impl Objects for Guard {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        self.check_write(key, &bytes)?;
        let is_word = key.starts_with("claims/") || key.starts_with("probe/");
        // Before: an answer may be lost.
        if is_word && self.objects.get_range(key, 0..1)?.is_none() {
            let mut own = self.own.0.lock();
            if own.len() < MAX_OWN {
                own.insert(key.to_owned());
            }
        }
        self.objects.create(key, bytes)
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        self.get_range(key, 0..u64::MAX)
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        match self.check_read("read", key)? {
            true => self.objects.get_range(key, range),
            false => Ok(None),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        if !self.check_read("list", prefix)? {
            return Ok(Vec::new());
        }
        let mut listed = self.objects.list(prefix)?;
        if OF_MACHINES.contains(&prefix) && !self.is_admin {
            let machine_of = |key: &str| key.split('/').nth(1).unwrap_or_default().to_owned();
            let mut seen: HashMap<String, bool> = HashMap::new();
            for object in &listed {
                let machine = machine_of(&object.key);
                if let Entry::Vacant(entry) = seen.entry(machine) {
                    let sees = self.sees(prefix, entry.key())?;
                    entry.insert(sees);
                }
            }
            listed.retain(|object| seen.get(&machine_of(&object.key)) == Some(&true));
        }
        if prefix == "hooks" && !self.is_admin && !self.shares_all() {
            self.learn_sessions()?;
            let sessions = self.sessions.lock();
            listed.retain(|object| {
                let session = object.key.rsplit('/').next().and_then(SessionId::parse);
                session.is_some_and(|session| sessions.contains(&session))
            });
        }
        Ok(listed)
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        let mut parts = key.split('/');
        let (kind, machine) = (parts.next(), parts.next().unwrap_or_default());
        let is_its = match kind {
            Some("held") => self.is_admin || matches!(self.whose(machine)?, Whose::Its),
            _ => self.own.0.lock().contains(key),
        };
        // A request that is repeated, since its answer was lost, finds nothing.
        if !is_its
            && self.check_read("remove", key)?
            && self.objects.get_range(key, 0..1)?.is_none()
        {
            return Ok(());
        }
        if !is_its {
            return Err(self.refused("remove", key, "a peer may not remove it"));
        }
        self.objects.remove(key)?;
        self.own.0.lock().remove(key);
        Ok(())
    }

    fn describe(&self) -> String {
        self.objects.describe()
    }
}
