//! Who can open an encrypted vault: a *key* of it is a passphrase, or the content of a file, which unlocks the master
//! key (`docs/format/vault-encryption.md`).

use std::fmt;
use std::time::{Duration, Instant};

use argon2::{Algorithm, Argon2, Params, Version};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use jiff::Timestamp;

use crate::container::SessionId;
use crate::error::{Result, VaultError};
use crate::objects::{Objects, get_at_most, put_own};
use crate::record::{KeyRecord, MAX_RECORD_BYTES, RecordError};
use drover_storage::EnvelopeError;

/// Most keys of a vault.
pub const MAX_KEYS: usize = 16;
/// Most that are read, whoever wrote them.
const MAX_READ: usize = 64;
/// Longest secret in bytes.
pub const MAX_SECRET: usize = 64 << 10;
/// Most memory that a key may ask for, in KiB.
const MAX_KIB: u32 = 256 << 10;
/// Most passes.
const MAX_PASSES: u32 = 4;
/// Longest label in bytes.
pub const MAX_LABEL: usize = 200;
/// Memory of a new key in KiB: 64 MiB, three passes, as RFC 9106 recommends where memory is short.
#[cfg(not(test))]
const KIB: u32 = 64 << 10;
#[cfg(test)]
const KIB: u32 = 64;
const PASSES: u32 = 3;
/// Who removes a key does not act on a mark that is older.
const MAX_MARK_AGE: Duration = Duration::from_secs(3600);
/// Marks of others are void after that.
const MAX_STALE_MARK: Duration = Duration::from_secs(24 * 3600);

/// A passphrase, or the content of a key file.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// A secret, without what ends its last line: a file with a passphrase is the same as the passphrase. None if it is
    /// empty, or too long.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Secret> {
        let end = bytes.iter().rposition(|b| !matches!(b, b'\n' | b'\r'));
        let bytes = &bytes[..end? + 1];
        (bytes.len() <= MAX_SECRET).then(|| Secret(bytes.to_vec()))
    }
}

/// A key of a vault, as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// Its number.
    pub id: SessionId,
    /// What it is called.
    pub label: String,
    /// When it was added, in seconds since 1970.
    pub created: i64,
    /// Whether it is the one that opened the vault.
    pub is_used: bool,
}

/// What an open encrypted vault knows of its keys.
#[derive(Clone)]
pub(crate) struct Unlocked {
    pub(crate) master: [u8; 32],
    /// The key that opened it.
    pub(crate) by: SessionId,
}

fn key(id: SessionId) -> String {
    format!("keys/{id}")
}

/// The mark of one who is about to remove a key.
fn mark(id: SessionId, by: SessionId) -> String {
    format!("{MARKS}/{id}/{by}")
}

const MARKS: &str = "removing";

/// The key that encrypts the master key; none if the parameters are beyond the limits.
fn stretch(secret: &Secret, record: &KeyRecord) -> Option<[u8; 32]> {
    if record.kib > MAX_KIB || record.passes > MAX_PASSES {
        return None;
    }
    let params = Params::new(record.kib, record.passes, 1, Some(32)).ok()?;
    let mut out = [0; 32];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(&secret.0, &record.salt, &mut out)
        .ok()?;
    Some(out)
}

fn cipher(stretched: &[u8; 32]) -> LessSafeKey {
    let key = blake3::derive_key("drover 2026-11 vault key", stretched);
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("a key of 32 bytes"))
}

/// What says that a stretched secret is the right one, and binds the record to its vault.
fn proof(stretched: &[u8; 32], vault: &[u8; 16], id: SessionId, record: &KeyRecord) -> [u8; 32] {
    let key = blake3::derive_key("drover 2026-11 vault key proof", stretched);
    let mut hasher = blake3::Hasher::new_keyed(&key);
    hasher.update(vault);
    hasher.update(&id.0.to_le_bytes());
    hasher.update(&record.created.to_le_bytes());
    hasher.update(&record.wrapped);
    hasher.update(record.label.as_bytes());
    *hasher.finalize().as_bytes()
}

/// The salt is random, so each stretched secret encrypts once.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut out = [0; N];
    aws_lc_rs::rand::fill(&mut out).map_err(|_| VaultError::Worker)?;
    Ok(out)
}

/// A new master key.
pub(crate) fn new_master() -> Result<[u8; 32]> {
    random()
}

/// Stores a key that unlocks `master`.
pub(crate) fn add(
    objects: &dyn Objects,
    vault: &[u8; 16],
    master: &[u8; 32],
    secret: &Secret,
    label: &str,
) -> Result<SessionId> {
    let id = SessionId::random();
    let mut record = KeyRecord {
        vault: *vault,
        label: label.to_owned(),
        created: Timestamp::now().as_second(),
        salt: random()?,
        kib: KIB,
        passes: PASSES,
        wrapped: master.to_vec(),
        proof: [0; 32],
    };
    let stretched = stretch(secret, &record).ok_or(VaultError::Worker)?;
    cipher(&stretched)
        .seal_in_place_append_tag(nonce(), Aad::from(vault), &mut record.wrapped)
        .map_err(|_| VaultError::Worker)?;
    record.proof = proof(&stretched, vault, id, &record);
    put_own(objects, &key(id), record.encode())?;
    Ok(id)
}

/// The records of the keys of a vault; of another one may be left, whose creation was interrupted.
fn records(objects: &dyn Objects, vault: &[u8; 16]) -> Result<Vec<(SessionId, KeyRecord)>> {
    let mut out = Vec::new();
    for object in objects.list("keys")? {
        let id = object.key.split('/').nth(1).and_then(SessionId::parse);
        let Some(id) = id.filter(|_| out.len() < MAX_READ) else {
            continue;
        };
        let Some(bytes) = get_at_most(objects, &object.key, MAX_RECORD_BYTES)? else {
            continue;
        };
        match KeyRecord::decode(&bytes) {
            Ok(record) if record.vault == *vault => out.push((id, record)),
            Ok(_) => {}
            Err(RecordError::Envelope(EnvelopeError::Version)) => {
                return Err(VaultError::Newer {
                    key: object.key,
                    vault: objects.describe(),
                });
            }
            // Another one may do.
            Err(error) => tracing::warn!("the key {id} of the vault is damaged: {error}"),
        }
    }
    out.sort_by_key(|(id, record)| (record.created, *id));
    Ok(out)
}

/// Opens the master key.
pub(crate) fn unlock(objects: &dyn Objects, vault: &[u8; 16], secret: &Secret) -> Result<Unlocked> {
    let mut all = records(objects, vault)?;
    // The usual ones first: what somebody else put there to cost time comes after them.
    all.sort_by_key(|(_, record)| (record.kib, record.passes) != (KIB, PASSES));
    for (id, record) in all {
        let Some(stretched) = stretch(secret, &record) else {
            continue;
        };
        if blake3::Hash::from(proof(&stretched, vault, id, &record))
            != blake3::Hash::from(record.proof)
        {
            continue;
        }
        let mut wrapped = record.wrapped.clone();
        let opened = cipher(&stretched).open_in_place(nonce(), Aad::from(vault), &mut wrapped);
        if let Ok(master) = opened
            && let Ok(master) = <[u8; 32]>::try_from(&*master)
        {
            return Ok(Unlocked { master, by: id });
        }
    }
    Err(VaultError::WrongKey(objects.describe()))
}

/// The keys there are.
pub(crate) fn list(
    objects: &dyn Objects,
    vault: &[u8; 16],
    used: SessionId,
) -> Result<Vec<KeyEntry>> {
    let all = records(objects, vault)?.into_iter();
    Ok(all
        .map(|(id, record)| KeyEntry {
            id,
            label: record.label,
            created: record.created,
            is_used: id == used,
        })
        .collect())
}

/// Removes a key other than `by`, which opened the vault: so one that works is left.
///
/// Others may remove keys at the same time, `by` among them. Each marks the key first, *then* looks for marks: one of
/// two sees the other, and gives way.
pub(crate) fn remove(
    objects: &dyn Objects,
    vault: &[u8; 16],
    id: SessionId,
    by: SessionId,
) -> Result<()> {
    let all = records(objects, vault)?;
    if !all.iter().any(|(found, _)| *found == id) {
        return Err(VaultError::NoKey {
            key: id.to_string(),
            vault: objects.describe(),
        });
    }
    if all.len() == 1 {
        return Err(VaultError::LastKey(objects.describe()));
    }
    if id == by {
        return Err(VaultError::KeyInUse(objects.describe()));
    }
    let mine = mark(id, SessionId::random());
    let marked = Instant::now();
    put_own(objects, &mine, b"mark".to_vec())?;
    let stays = stays(objects, vault, by, &mine);
    if !matches!(stays, Ok(true)) || marked.elapsed() >= MAX_MARK_AGE {
        objects.remove(&mine)?;
        stays?;
        return Err(VaultError::KeyChanges(objects.describe()));
    }
    // After an error it may be removed yet: then the mark stays.
    objects.remove(&key(id))?;
    for object in objects.list(&format!("{MARKS}/{id}"))? {
        objects.remove(&object.key)?;
    }
    Ok(())
}

/// Whether the key `by` is there, and nobody is about to remove it; `mine` is a mark that was just written. Marks that
/// are void are removed.
fn stays(objects: &dyn Objects, vault: &[u8; 16], by: SessionId, mine: &str) -> Result<bool> {
    let marks = objects.list(MARKS)?;
    let Some(now) = marks.iter().find(|o| o.key == mine).map(|o| o.modified_ms) else {
        return Ok(false);
    };
    let mut is_marked = false;
    for object in &marks {
        let age = i128::from(now) - i128::from(object.modified_ms);
        if age >= MAX_STALE_MARK.as_millis() as i128 {
            objects.remove(&object.key)?;
        } else if object.key.split('/').nth(1).and_then(SessionId::parse) == Some(by) {
            is_marked = true;
        }
    }
    Ok(!is_marked && records(objects, vault)?.iter().any(|(id, _)| *id == by))
}
