//! The small objects: the vault itself, the record of a snapshot, the hooks of what a session stored
//! (`docs/format/vault.md`).

use std::cell::RefCell;
use std::io::Read;

use drover_core::Digest;
use drover_storage::{Envelope, EnvelopeError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zstd::bulk::Decompressor;

use crate::container::{ContainerId, MAX_BLOCKS, SessionId};
use crate::names::Machine;

/// Most bytes of a record.
pub const MAX_RECORD_BYTES: u64 = 64 << 10;
/// Most bytes of a session's hooks.
pub const MAX_HOOKS_BYTES: u64 = 64 << 20;

const VAULT: Envelope = Envelope {
    magic: *b"DRVRVLT\0",
    version: 1,
    max_bytes: MAX_RECORD_BYTES,
};
/// Of an encrypted vault, which earlier versions cannot read.
const ENCRYPTED_VAULT: Envelope = Envelope {
    version: 2,
    ..VAULT
};
/// Of a vault in which machines do not share all, which earlier versions cannot read.
const SHARED_VAULT: Envelope = Envelope {
    version: 3,
    ..VAULT
};
/// The same, encrypted.
const ENCRYPTED_SHARED_VAULT: Envelope = Envelope {
    version: 4,
    ..VAULT
};
const KEY: Envelope = Envelope {
    magic: *b"DRVRKEY\0",
    version: 1,
    max_bytes: MAX_RECORD_BYTES,
};
const SNAPSHOT: Envelope = Envelope {
    magic: *b"DRVRSNP\0",
    version: 1,
    max_bytes: MAX_RECORD_BYTES,
};
const HOOKS: Envelope = Envelope {
    magic: *b"DRVRHKS\0",
    version: 1,
    max_bytes: MAX_HOOKS_BYTES,
};

const HOLDER: Envelope = Envelope {
    magic: *b"DRVRHLD\0",
    version: 1,
    max_bytes: MAX_RECORD_BYTES,
};

/// Why bytes are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Of another kind, or damaged.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
    /// Not what the version says.
    #[error("it contradicts itself")]
    Malformed,
}

fn decode<T: DeserializeOwned>(kind: Envelope, bytes: &[u8]) -> Result<T, RecordError> {
    match postcard::take_from_bytes(kind.open(bytes)?) {
        Ok((value, [])) => Ok(value),
        _ => Err(RecordError::Malformed),
    }
}

/// Of so many bytes, room is made at once.
const MAX_AT_ONCE: usize = 1 << 20;

thread_local! {
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The bytes of one zstd frame, if they are `raw`; memory grows with what is there, not with what is claimed.
pub(crate) fn unpack(packed: &[u8], raw: usize) -> Option<Vec<u8>> {
    if raw <= MAX_AT_ONCE {
        // Many small ones are read at once: what a decompressor needs is made once a thread.
        let bytes = DECOMPRESSOR.with_borrow_mut(|kept| {
            let decompressor = match kept.take() {
                Some(decompressor) => kept.insert(decompressor),
                None => kept.insert(Decompressor::new().ok()?),
            };
            decompressor.decompress(packed, raw).ok()
        })?;
        return (bytes.len() == raw).then_some(bytes);
    }
    let mut bytes = Vec::new();
    let decoder = zstd::stream::Decoder::new(packed).ok()?.single_frame();
    decoder.take(raw as u64 + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() == raw).then_some(bytes)
}

/// A body in the envelope of each kind.
#[cfg(fuzzing)]
pub(crate) fn seal_all_for_fuzzing(body: &[u8]) -> [Vec<u8>; 7] {
    [
        VAULT,
        ENCRYPTED_VAULT,
        SHARED_VAULT,
        KEY,
        SNAPSHOT,
        HOOKS,
        HOLDER,
    ]
    .map(|kind| kind.seal(body))
}

fn encode<T: Serialize>(kind: Envelope, value: &T) -> Vec<u8> {
    kind.seal(&postcard::to_stdvec(value).expect("plain data can be encoded"))
}

/// How blocks are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Chunking {
    /// Blocks of 4 KiB.
    Fixed4K,
}

/// Where duplicates are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Share {
    /// In all machines of the vault.
    All,
    /// In the same machine, and in the blocks that many machines have ([`crate::Vault::popularize`]).
    Popular,
    /// In the same machine only.
    Nothing,
}

impl Share {
    /// The machines in whose containers the blocks of one are looked for; none for all.
    #[must_use]
    pub fn scope(self, machine: &Machine) -> Option<Vec<Machine>> {
        match self {
            Share::All => None,
            Share::Popular => Some(vec![machine.clone(), Machine::popular()]),
            Share::Nothing => Some(vec![machine.clone()]),
        }
    }

    /// As a user says it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Share::All => "all",
            Share::Popular => "popular",
            Share::Nothing => "none",
        }
    }
}

/// The object `vault`: what a vault is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VaultRecord {
    /// A random number.
    pub id: [u8; 16],
    /// When it was created, in seconds since 1970.
    pub created: i64,
    /// How blocks are cut.
    pub chunking: Chunking,
    /// Where duplicates are looked for.
    pub share: Share,
    /// Whether everything else in it is encrypted. Stored as the version.
    #[serde(skip)]
    pub is_encrypted: bool,
}

impl VaultRecord {
    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let kind = match (self.share, self.is_encrypted) {
            (Share::All, false) => VAULT,
            (Share::All, true) => ENCRYPTED_VAULT,
            (_, false) => SHARED_VAULT,
            (_, true) => ENCRYPTED_SHARED_VAULT,
        };
        encode(kind, self)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let kinds = [
            (VAULT, false, true),
            (ENCRYPTED_VAULT, true, true),
            (SHARED_VAULT, false, false),
            (ENCRYPTED_SHARED_VAULT, true, false),
        ];
        for (kind, is_encrypted, shares_all) in kinds {
            match decode::<VaultRecord>(kind, bytes) {
                Err(RecordError::Envelope(EnvelopeError::Version)) => {}
                Ok(record) if (record.share == Share::All) != shares_all => {
                    return Err(RecordError::Malformed);
                }
                Ok(record) => {
                    return Ok(VaultRecord {
                        is_encrypted,
                        ..record
                    });
                }
                Err(error) => return Err(error),
            }
        }
        Err(RecordError::Envelope(EnvelopeError::Version))
    }
}

/// What became of an attempt to make a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotRecord {
    /// It was made.
    Made(Box<Made>),
    /// A collector gave it up for dead before that.
    Aborted,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// The file it was made of.
    pub source: String,
    /// The host that made it.
    pub host: String,
    /// The file's format.
    pub format: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// Bytes of the blocks that are not zero.
    pub data_bytes: u64,
    /// Bytes of those that no snapshot had before.
    pub new_bytes: u64,
    /// What those take in containers, compressed.
    pub stored_bytes: u64,
    /// The digest that proves every block.
    pub root: Digest,
}

impl SnapshotRecord {
    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(SNAPSHOT, self)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        decode(SNAPSHOT, bytes)
    }
}

/// The hooks of the containers that a session wrote: a cache of what their heads say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookRecord {
    /// Each container, and the tags of its hooks.
    pub containers: Vec<(ContainerId, Vec<u32>)>,
}

impl HookRecord {
    /// Whether they are what a session left: of its own containers, and no more than those have blocks.
    #[must_use]
    pub fn is_of(&self, session: SessionId) -> bool {
        let mut containers = self.containers.iter();
        containers.all(|(id, tags)| id.session() == session && tags.len() <= MAX_BLOCKS)
    }

    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(HOOKS, self)
    }

    /// Reads hooks.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        decode(HOOKS, bytes)
    }
}

/// A key of an encrypted vault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// The vault that it is of.
    pub vault: [u8; 16],
    /// What a person calls it.
    pub label: String,
    /// When it was added, in seconds since 1970.
    pub created: i64,
    /// Of the secret, for Argon2id.
    pub salt: [u8; 16],
    /// Memory of Argon2id, in KiB.
    pub kib: u32,
    /// Its passes.
    pub passes: u32,
    /// The master key, encrypted.
    pub wrapped: Vec<u8>,
    /// That the secret is the right one.
    pub proof: [u8; 32],
}

impl KeyRecord {
    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(KEY, self)
    }

    /// Reads a key.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        decode(KEY, bytes)
    }
}

/// Who holds a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderRecord {
    /// As a person knows it.
    pub holder: String,
}

impl HolderRecord {
    /// The bytes that are stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(HOLDER, self)
    }

    /// Reads a holder.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        decode(HOLDER, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn records_and_back() {
        let record = SnapshotRecord::Made(Box::new(Made {
            source: "/srv/web.qcow2".into(),
            host: "lyon".into(),
            format: "qcow2".into(),
            file_bytes: 1,
            disk_bytes: 2,
            data_bytes: 3,
            new_bytes: 4,
            stored_bytes: 5,
            root: Digest([7; 32]),
        }));
        for record in [record, SnapshotRecord::Aborted] {
            let bytes = record.encode();
            assert_eq!(SnapshotRecord::decode(&bytes), Ok(record));
            for at in 0..bytes.len() {
                let mut bad = bytes.clone();
                bad[at] ^= 4;
                assert!(SnapshotRecord::decode(&bad).is_err());
            }
        }
    }

    #[test]
    fn vaults_and_back() {
        for share in [Share::All, Share::Popular, Share::Nothing] {
            for is_encrypted in [false, true] {
                let record = VaultRecord {
                    id: [3; 16],
                    created: 9,
                    chunking: Chunking::Fixed4K,
                    share,
                    is_encrypted,
                };
                let bytes = record.encode();
                // What earlier versions can read has the version that they know.
                assert_eq!(bytes[8] <= 2, share == Share::All);
                assert_eq!(VaultRecord::decode(&bytes), Ok(record.clone()));
                // Of a version that does not fit, or a newer one.
                let body = postcard::to_stdvec(&record).unwrap();
                let wrong = if share == Share::All {
                    SHARED_VAULT
                } else {
                    VAULT
                };
                assert_eq!(
                    VaultRecord::decode(&wrong.seal(&body)),
                    Err(RecordError::Malformed)
                );
                let newer = Envelope {
                    version: 5,
                    ..VAULT
                }
                .seal(&body);
                assert_eq!(
                    VaultRecord::decode(&newer),
                    Err(RecordError::Envelope(EnvelopeError::Version))
                );
            }
        }
    }

    proptest! {
        #[test]
        fn hostile_records(body in proptest::collection::vec(any::<u8>(), 0..80)) {
            for kind in [VAULT, ENCRYPTED_VAULT, SHARED_VAULT, ENCRYPTED_SHARED_VAULT, KEY, SNAPSHOT, HOOKS, HOLDER] {
                let bytes = kind.seal(&body);
                let _ = (VaultRecord::decode(&bytes), SnapshotRecord::decode(&bytes), HookRecord::decode(&bytes));
                let _ = (HolderRecord::decode(&bytes), KeyRecord::decode(&bytes));
            }
        }
    }
}
