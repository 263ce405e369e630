//! The vault: snapshots of disk images in an object store, deduplicated across all machines.
//!
//! A [`Vault`] stands on [`Objects`], which write once: [`Vault::backup`] makes a snapshot, [`Vault::open_snapshot`]
//! reads one, [`Vault::restore`] writes it to a file, [`Vault::hold`] keeps one, [`Vault::forget`] and
//! [`Vault::collect`] delete, [`Vault::check`] verifies; [`peer`] is a vault at another site. What is stored, and why no crash and no concurrent deletion loses anything, is in
//! `docs/format/vault.md`.
//!
//! What must not live here: the command line, network protocols of its own, unsafe code, and image formats (those are in `image`).
//!
//! ```
//! use drover_vault::{Machine, Vault};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?;
//! std::fs::write(dir.path().join("web.raw"), vec![7; 1 << 20])?;
//! std::fs::create_dir(dir.path().join("vault"))?;
//!
//! let vault = Vault::create(&dir.path().join("vault"))?;
//! let made = vault.backup(&dir.path().join("web.raw"), &Machine::new("web")?, "host", &mut |_| {})?;
//! // 256 blocks, all the same.
//! assert_eq!((made.record.data_bytes, made.record.new_bytes), (1 << 20, 4096));
//!
//! let snapshot = vault.open_snapshot(&made.id)?;
//! vault.restore(&snapshot, &dir.path().join("again.raw"), &mut |_| {})?;
//! assert_eq!(std::fs::read(dir.path().join("again.raw"))?, vec![7; 1 << 20]);
//! # Ok(())
//! # }
//! ```

mod backup;
mod check;
#[cfg(feature = "s3")]
mod cloud;
mod collect;
mod commit;
mod compare;
pub mod container;
mod copy;
mod digester;
mod error;
mod file;
mod forget;
#[cfg(fuzzing)]
pub mod fuzzing;
mod hold;
mod hooks;
mod ids;
mod index;
mod keep;
mod keys;
mod location;
mod lru;
mod many;
mod names;
mod objects;
pub mod peer;
mod places;
mod popular;
mod problem;
mod reader;
mod recipe;
mod record;
mod restore;
mod sealed;
mod sealer;
mod snapshot;
mod source;
mod sparse;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod uses;
mod vault;
mod whole;

pub use backup::{Backup, BackupProgress};
pub use check::{CheckReport, Checking};
#[cfg(feature = "s3")]
pub use cloud::CloudObjects;
pub use collect::{Collected, Stats};
pub use container::{ContainerId, SessionId};
pub use copy::{Copied, CopyProgress};
pub use digester::Digester;
pub use error::{Result, StoreError, VaultError};
pub use file::SnapshotFile;
pub use forget::Forgotten;
pub use hold::{Held, Hold};
pub use ids::Ids;
pub use keep::Keep;
pub use keys::{KeyEntry, MAX_LABEL, MAX_SECRET, Secret};
pub use location::{Ask, Location};
pub use names::{Machine, Reference, SnapshotId};
pub use objects::{Listed, LocalObjects, Objects};
pub use popular::Popularized;
pub use problem::Problem;
pub use recipe::{Page, RecipeError, RecipeHead};
pub use record::{
    Chunking, HolderRecord, HookRecord, KeyRecord, Made, RecordError, Share, SnapshotRecord,
    VaultRecord,
};
pub use restore::{RestoreProgress, Restored};
pub use snapshot::Snapshot;
pub use source::{Since, Source};
pub use uses::{Uses, UsesError};
pub use vault::{Entry, Vault};

/// The sparse index by itself, for whoever measures it.
#[cfg(any(test, feature = "testing"))]
pub mod measured {
    pub use crate::compare::MAX_LIKELY;
    pub use crate::hooks::Ordinal;
    pub use crate::sparse::{Found, List, MAX_CHAMPIONS, SparseIndex, WINDOW_BLOCKS, hooks_of};
    /// Bytes of memory that a container takes, beside its hooks.
    pub const CONTAINER_BYTES: usize = crate::index::KNOWN_BYTES;
}

#[cfg(test)]
mod tests;
