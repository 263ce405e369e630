//! What can go wrong in a vault.

use std::io;
use std::path::PathBuf;

use drover_image::ImageError;

/// The store of a vault does not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {key} in the vault {vault}: {why}")]
pub struct StoreError {
    /// The operation: `read`, `write`, `list`, `remove`.
    pub doing: &'static str,
    /// The object.
    pub key: String,
    /// Where the vault is.
    pub vault: String,
    /// What the store said.
    pub why: String,
    /// Whether it may work later.
    pub can_retry: bool,
    /// Whether the object is damaged.
    pub is_damage: bool,
}

/// Errors of this crate, each one line.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// The object store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An object is damaged, or of another kind.
    #[error("the object {key} of the vault {vault} is damaged: {why}")]
    Damaged {
        /// The object.
        key: String,
        /// Where the vault is.
        vault: String,
        /// What is wrong with it.
        why: String,
    },
    /// An object that must be there is missing.
    #[error("the object {key} of the vault {vault} is missing")]
    Missing {
        /// The object.
        key: String,
        /// Where the vault is.
        vault: String,
    },
    /// Written by a newer version.
    #[error(
        "{key} in the vault {vault} was written by a newer version of drover; update drover on this host"
    )]
    Newer {
        /// The object.
        key: String,
        /// Where the vault is.
        vault: String,
    },
    /// There is no vault.
    #[error("there is no vault at {0}; create one with `drover vault init`")]
    NoVault(String),
    /// There is one already.
    #[error("there is a vault at {0} already")]
    Exists(String),
    /// The directory has other content.
    #[error("{0} is not empty and not a vault")]
    NotEmpty(String),
    /// The store ignores the condition of a conditional write.
    #[error(
        "the store of the vault {0} overwrites objects although it is told not to; a vault needs a store with conditional writes"
    )]
    Unconditional(String),
    /// A peer has a machine of that name in the vault.
    #[error("the vault {vault} has a machine {machine} of a peer; name yours with --as")]
    OfPeer {
        /// The machine.
        machine: String,
        /// Where the vault is.
        vault: String,
    },
    /// The store has not what it said it wrote.
    #[error(
        "the store of the vault {0} has not what it said it had written; no snapshot was made, try again"
    )]
    Unwritten(String),
    /// It has no popular blocks.
    #[error(
        "in the vault {0} machines do not share popular blocks; that is chosen when a vault is created: `drover vault init --share popular`"
    )]
    NotPopular(String),
    /// It is no copy of the vault.
    #[error(
        "the vault {vault} is another one, and no copy of {of}; a copy is made by `drover vault copy` in an empty place"
    )]
    OtherVault {
        /// Where it is.
        vault: String,
        /// What it was to be a copy of.
        of: String,
    },
    /// The vault is encrypted, and no secret was given.
    #[error("the vault {0} is encrypted: its passphrase or a key file is needed")]
    Encrypted(String),
    /// It is not, although it was.
    #[error(
        "the vault {0} is not encrypted, but it should be: somebody may have put another one in its place"
    )]
    NotEncrypted(String),
    /// It has no keys.
    #[error("the vault {0} is not encrypted, so it has no keys")]
    NoKeys(String),
    /// The secret opens nothing.
    #[error("this is not a passphrase or key file of the vault {0}")]
    WrongKey(String),
    /// No such key.
    #[error("the vault {vault} has no key {key}; `drover vault key list` shows them")]
    NoKey {
        /// What was asked for.
        key: String,
        /// Where the vault is.
        vault: String,
    },
    /// It would be lost.
    #[error(
        "this is the last key of the vault {0}: without one nothing in it can be read; add another one first"
    )]
    LastKey(String),
    /// Without another one nobody knows that one works.
    #[error(
        "this key has just opened the vault {0}; to remove it, open the vault with another one"
    )]
    KeyInUse(String),
    /// Two remove keys at once.
    #[error(
        "another command is removing the key that opened the vault {0}; nothing was removed, see `drover vault key list` and try again"
    )]
    KeyChanges(String),
    /// No more.
    #[error("the vault {vault} has {max} keys, the most it can have; remove one first")]
    ManyKeys {
        /// Where the vault is.
        vault: String,
        /// How many there can be.
        max: usize,
    },
    /// Its label is too long.
    #[error("the label of the key has {len} bytes; {max} are the most")]
    LongLabel {
        /// How long it is.
        len: usize,
        /// How long it can be.
        max: usize,
    },
    /// The secret cannot be had.
    #[error("{0}")]
    NoSecret(String),
    /// No object store that can be used.
    #[error("{url} cannot be used as a vault: {why}")]
    Unsupported {
        /// What was given.
        url: String,
        /// Why.
        why: String,
    },
    /// No snapshot matches.
    #[error("there is no snapshot {wanted} in the vault {vault}{hint}")]
    NoSnapshot {
        /// What was asked for.
        wanted: String,
        /// Where the vault is.
        vault: String,
        /// What there is instead, as the end of the sentence.
        hint: String,
    },
    /// It cannot be forgotten.
    #[error(
        "{snapshot} is in use, mounted as {holder}; it is not forgotten before that ends (`drover unmount`)"
    )]
    Held {
        /// The snapshot.
        snapshot: String,
        /// Who uses it.
        holder: String,
    },
    /// Several snapshots match.
    #[error("{wanted} is ambiguous; it could be {candidates}")]
    Ambiguous {
        /// What was asked for.
        wanted: String,
        /// All that match, separated by commas.
        candidates: String,
    },
    /// The text names no snapshot.
    #[error(
        "{0:?} does not name a snapshot; NAME@latest, NAME@2026-11-20 or NAME@2026-11-20T10:00:00Z does"
    )]
    BadReference(String),
    /// The image cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The image was changed while it was read.
    #[error("{0} was changed while it was read; no snapshot was made")]
    Changed(PathBuf),
    /// A file of the host cannot be read or written.
    #[error("cannot {doing} {path}: {source}")]
    File {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Deletions took what the snapshot refers to, again and again.
    #[error(
        "deletions removed blocks that the snapshot refers to, {0} times in a row; no snapshot was made, try again"
    )]
    Overtaken(u32),
    /// Beyond a limit.
    #[error("{0} is beyond what a vault holds")]
    TooLarge(String),
    /// The content of a block is not what the snapshot says.
    #[error(
        "{what} of the vault {vault} does not have the content that its snapshot says; `drover vault check --full` lists what is affected"
    )]
    Wrong {
        /// Which block, in which object.
        what: String,
        /// Where the vault is.
        vault: String,
    },
    /// A worker thread ended unexpectedly.
    #[error("a worker thread ended unexpectedly; this is a bug")]
    Worker,
}

/// The result of operations of this crate.
pub type Result<T, E = VaultError> = std::result::Result<T, E>;

impl VaultError {
    /// Whether the same may succeed later.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        match self {
            VaultError::Store(error) => error.can_retry,
            VaultError::Image(error) => error.can_retry(),
            VaultError::Changed(_) | VaultError::Overtaken(_) | VaultError::Unwritten(_) => true,
            _ => false,
        }
    }

    /// Whether something in the vault is damaged or lost.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            VaultError::Store(error) => error.is_damage,
            VaultError::Damaged { .. } | VaultError::Missing { .. } | VaultError::Wrong { .. } => {
                true
            }
            _ => false,
        }
    }
}
