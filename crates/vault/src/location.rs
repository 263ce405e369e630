//! Where a vault is, as a person writes it.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::keys::Secret;
use crate::objects::Objects;
use crate::record::Share;
use crate::vault::Vault;

/// A directory, a prefix in an object store: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, or that
/// of a peer: `PEER:`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Location {
    /// A directory. Its path is UTF-8.
    Directory(PathBuf),
    /// The URL of a bucket, or of a prefix in it.
    Store(String),
    /// The vault of the peer of this name. Whoever knows the peers opens it: [`crate::peer`].
    Peer(String),
}

/// What ends the name of a peer.
const PEER: char = ':';

impl Location {
    /// The same from wherever it is read: with an absolute path.
    ///
    /// # Errors
    /// When there is no working directory.
    pub fn absolute(self) -> std::io::Result<Location> {
        Ok(match self {
            Location::Directory(path) => Location::Directory(std::path::absolute(path)?),
            other @ (Location::Store(_) | Location::Peer(_)) => other,
        })
    }

    /// Creates a vault there; with a secret, an encrypted one, whose first key is called `label`.
    ///
    /// # Errors
    /// As [`Vault::create`]; [`crate::VaultError::Unsupported`].
    pub fn create(&self, share: Share, secret: Option<(&Secret, &str)>) -> Result<Vault> {
        let objects = match self {
            Location::Directory(path) => Vault::empty(path)?,
            other => other.objects()?,
        };
        Vault::create_shared_on(objects, share, secret)
    }

    /// The store there, as it is.
    ///
    /// # Errors
    /// [`crate::VaultError::NoVault`] if there is no such directory; [`crate::VaultError::Unsupported`], also for that of a peer.
    pub fn objects(&self) -> Result<Arc<dyn Objects>> {
        match self {
            Location::Directory(path) => Vault::existing(path),
            Location::Store(url) => objects(url),
            Location::Peer(name) => Err(crate::VaultError::Unsupported {
                url: self.to_string(),
                why: format!("it is a peer's vault: run the command at {name}"),
            }),
        }
    }

    /// Whether each read takes long: the vault is at the other end of a network.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        !matches!(self, Location::Directory(_))
    }

    /// Opens the vault there; `ask` is asked for a secret if it is encrypted.
    ///
    /// # Errors
    /// As [`Vault::open_with`]; [`crate::VaultError::Unsupported`].
    pub fn open(&self, ask: &mut Ask<'_>) -> Result<Vault> {
        Vault::open_with(self.objects()?, ask)
    }
}

impl Location {
    /// The copy of a vault there; if it does not exist, it is created if `create` says so.
    ///
    /// # Errors
    /// As [`Vault::copy_on`]; [`crate::VaultError::NotEmpty`], [`crate::VaultError::Unsupported`].
    pub fn copy_of(&self, vault: &Vault, create: bool) -> Result<Vault> {
        let objects = match self {
            Location::Store(_) | Location::Peer(_) => self.objects()?,
            Location::Directory(path) => match Vault::existing(path) {
                Ok(objects) if Vault::record_on(&*objects)?.is_some() => objects,
                _ if create => Vault::empty(path)?,
                existing => existing?,
            },
        };
        vault.copy_on(objects, create)
    }
}

/// What is asked for the secret of an encrypted vault.
pub type Ask<'a> = dyn FnMut() -> Result<Secret> + 'a;

#[cfg(feature = "s3")]
fn objects(url: &str) -> Result<Arc<dyn Objects>> {
    Ok(Arc::new(crate::cloud::CloudObjects::open(url)?))
}

#[cfg(not(feature = "s3"))]
fn objects(url: &str) -> Result<Arc<dyn Objects>> {
    Err(crate::VaultError::Unsupported {
        url: url.to_owned(),
        why: "this drover was built without object stores (feature s3)".into(),
    })
}

impl From<String> for Location {
    fn from(text: String) -> Self {
        // One prefix has one text.
        let trimmed = text.trim_end_matches('/');
        match text.contains("://") {
            true if trimmed.contains("://") => Location::Store(trimmed.to_owned()),
            true => Location::Store(text),
            false => match text.strip_suffix(PEER) {
                Some(name) if !name.is_empty() && !name.contains('/') => {
                    Location::Peer(name.to_owned())
                }
                _ => Location::Directory(text.into()),
            },
        }
    }
}

impl FromStr for Location {
    type Err = Infallible;
    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.to_owned().into())
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        Location::Directory(path.to_path_buf())
    }
}

impl From<Location> for String {
    fn from(location: Location) -> String {
        location.to_string()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Directory(path) => path.display().fmt(f),
            Location::Store(url) => f.write_str(url),
            Location::Peer(name) => write!(f, "{name}{PEER}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_urls() {
        let location = |text: &str| text.parse::<Location>().unwrap();
        assert_eq!(location("a:b"), Location::Directory("a:b".into()));
        let store = location("s3://bucket/a/b");
        assert_eq!(store.clone().absolute().unwrap(), store);
        assert_eq!(store.to_string(), "s3://bucket/a/b");
        assert_eq!(location("s3://bucket/a/b//"), store);
        assert_eq!(location("s3://bucket/").to_string(), "s3://bucket");
        assert_eq!(location("s3://").to_string(), "s3://");
        let peer = location("lyon:");
        assert_eq!(peer, Location::Peer("lyon".into()));
        assert_eq!(location(&peer.to_string()), peer);
        assert!(peer.open(&mut || panic!()).is_err());
        for directory in [":", "a/b:", "./lyon:", "/lyon:"] {
            assert_eq!(location(directory), Location::Directory(directory.into()));
        }
        let relative = location("store").absolute().unwrap();
        assert!(relative.to_string().starts_with('/'));
        for url in ["ftp://x/y", "s3://", "s3://a/../b"] {
            assert!(location(url).open(&mut || panic!()).is_err(), "{url}");
        }
    }
}
