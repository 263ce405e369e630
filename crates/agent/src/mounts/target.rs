//! Parts of a mount request: targets, listen addresses, prefetch orders.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use drover_core::ImageName;
use drover_device::backend::chunk_store::StoreAddress;
use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_vault::{Location, Reference, SnapshotId};
use serde::{Deserialize, Serialize};

/// What is mounted: an image of a peer (`PEER:NAME`) or of this site (`NAME`), a local disk outside any site
/// (`file:PATH`, `dir:PATH`), an export of an NBD server (`nbd://...`, `nbd+unix://...`), a disk in a store
/// (`s3://...`, `redis://...`, `cassandra://...`), or a snapshot in a vault (`NAME@TIME`, which is parsed as an image of this site).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The peer; `None` for this site.
    pub peer: Option<String>,
    /// The image's name; for a local disk, the last component of its path or of the
    /// name of the export.
    pub image: String,
    /// The local disk; `None` for an image of a site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalDisk>,
    /// The domain of an image of this site; `None` for the default one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

impl Target {
    /// Whether it is an image of this site.
    pub fn is_own(&self) -> bool {
        self.peer.is_none() && self.local.is_none()
    }

    /// The disk, if it is neither an image of a site nor a disk in a store: it is never ahead of what it is in.
    pub fn outside(&self) -> Option<&LocalDisk> {
        let is_stored = |disk: &&LocalDisk| matches!(disk, LocalDisk::Store(_));
        self.local.as_ref().filter(|disk| !is_stored(disk))
    }

    /// The store with the disk, if it is in one.
    pub fn store(&self) -> Option<&StoreAddress> {
        match &self.local {
            Some(LocalDisk::Store(address)) => Some(address),
            _ => None,
        }
    }
}

/// A disk outside any site. But for stores and snapshots, it is served directly: without a cache or a lease. Paths are
/// absolute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LocalDisk {
    /// A raw file or a block device.
    File(PathBuf),
    /// A directory with one file per chunk.
    Dir(PathBuf),
    /// An export of an NBD server.
    Nbd(NbdAddress),
    /// A disk in a store.
    Store(StoreAddress),
    /// A snapshot; what is written is kept beside this site's images.
    Snapshot {
        /// The vault.
        vault: Location,
        /// Which of its snapshots.
        id: SnapshotId,
        /// If the vault is encrypted, the file with its passphrase.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key_file: Option<PathBuf>,
    },
}

impl LocalDisk {
    /// The file or directory; none for an export of a server, or a snapshot.
    pub fn path(&self) -> Option<&Path> {
        match self {
            LocalDisk::File(path) | LocalDisk::Dir(path) => Some(path),
            LocalDisk::Nbd(_) | LocalDisk::Store(_) | LocalDisk::Snapshot { .. } => None,
        }
    }

    /// Whether a cache stands before it, unless the mount is direct: each of its reads takes long.
    pub fn is_cached(&self) -> bool {
        match self {
            LocalDisk::Snapshot { vault, .. } => vault.is_remote(),
            LocalDisk::Store(_) => true,
            LocalDisk::File(_) | LocalDisk::Dir(_) | LocalDisk::Nbd(_) => false,
        }
    }

    /// Its mode in the status of a mount, which is direct or not.
    pub fn mode(&self, direct: bool) -> &'static str {
        match self {
            LocalDisk::File(_) => "file",
            LocalDisk::Dir(_) => "directory",
            LocalDisk::Nbd(_) => "nbd",
            LocalDisk::Store(_) if direct => "direct",
            LocalDisk::Store(_) => "managed",
            LocalDisk::Snapshot { .. } => "snapshot",
        }
    }
}

impl fmt::Display for LocalDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LocalDisk::File(path) => write!(f, "file:{}", path.display()),
            LocalDisk::Dir(path) => write!(f, "dir:{}", path.display()),
            LocalDisk::Nbd(address) => address.fmt(f),
            LocalDisk::Store(address) => address.fmt(f),
            LocalDisk::Snapshot { id, .. } => id.fmt(f),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (peer, image) = match text.split_once(':') {
            Some(("file", path)) => return local(LocalDisk::File, path),
            Some(("dir", path)) => return local(LocalDisk::Dir, path),
            Some(_) if StoreAddress::is_one(text) => return stored(text),
            Some((_, rest)) if rest.starts_with("//") => return nbd(text),
            // A time has colons, but no name of a peer an `@`.
            Some((before, _)) if before.contains('@') && Reference::parse(text).is_some() => {
                (None, text)
            }
            Some((peer, image)) => {
                drover_store::peer_name::check(peer)?;
                (Some(peer.to_owned()), image)
            }
            None => (None, text),
        };
        ImageName::new(image).map_err(|e| {
            format!(
                "{e}; expected PEER:IMAGE, IMAGE, NAME@TIME, file:PATH, dir:PATH, nbd://HOST/EXPORT, s3://BUCKET/DISK, redis://HOST/DATABASE?prefix=DISK or cassandra://HOST/KEYSPACE/DISK"
            )
        })?;
        Ok(Target {
            peer,
            image: image.to_owned(),
            local: None,
            domain: None,
        })
    }
}

/// A local target with an absolute path: the mount daemon runs in another directory.
fn local(kind: fn(PathBuf) -> LocalDisk, path: &str) -> Result<Target, String> {
    let path = std::path::absolute(path).map_err(|e| format!("{path:?} is not a path: {e}"))?;
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| format!("{} names no file or directory", path.display()))?;
    Ok(Target {
        peer: None,
        image: name.to_owned(),
        local: Some(kind(path)),
        domain: None,
    })
}

/// A target in a store.
fn stored(text: &str) -> Result<Target, String> {
    let address: StoreAddress = text.parse().map_err(|e| format!("{e}"))?;
    Ok(Target {
        peer: None,
        image: address.name().to_owned(),
        local: Some(LocalDisk::Store(address)),
        domain: None,
    })
}

/// A target on an NBD server.
fn nbd(text: &str) -> Result<Target, String> {
    let mut address: NbdAddress = text.parse().map_err(|e| format!("{e}"))?;
    if let NbdSocket::Unix(path) = &mut address.socket {
        *path = std::path::absolute(&path).map_err(|e| format!("{path:?} is not a path: {e}"))?;
    }
    let name = address.export.rsplit('/').next().unwrap_or_default();
    let image = match name {
        // An export without a name, or with one that is no file name.
        "" | "." | ".." => "nbd",
        name => name,
    };
    Ok(Target {
        peer: None,
        image: image.to_owned(),
        local: Some(LocalDisk::Nbd(address)),
        domain: None,
    })
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.local, &self.peer, &self.domain) {
            (Some(local), ..) => local.fmt(f),
            (None, Some(peer), _) => write!(f, "{peer}:{}", self.image),
            // Neither of the names can have a slash.
            (None, None, Some(domain)) => write!(f, "{domain}/{}", self.image),
            (None, None, None) => f.write_str(&self.image),
        }
    }
}

/// Where an NBD server listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Listen {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl Listen {
    /// Parses `unix:PATH` or `ADDRESS:PORT`.
    ///
    /// # Errors
    /// A message for the user.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = std::path::absolute(path).map_err(|e| format!("unix: {e}"))?;
            return Ok(Listen::Unix(path));
        }
        let address = text.strip_prefix("tcp:").unwrap_or(text);
        address
            .parse()
            .map(Listen::Tcp)
            .map_err(|_| "expected unix:PATH or ADDRESS:PORT, such as unix:/run/web.sock".into())
    }

    /// Whether it is reachable from this machine only.
    pub fn is_local(&self) -> bool {
        match self {
            Listen::Unix(_) => true,
            Listen::Tcp(address) => address.ip().is_loopback(),
        }
    }

    /// The NBD URI of an export; `tls` applies to TCP only.
    pub fn uri(&self, export: &str, tls: bool) -> String {
        let socket = match self {
            Listen::Unix(path) => NbdSocket::Unix(path.clone()),
            Listen::Tcp(address) => NbdSocket::Tcp(address.ip().to_string(), address.port()),
        };
        let export = export.to_owned();
        let uri = NbdAddress { socket, export }.to_string();
        match uri.strip_prefix("nbd:") {
            Some(rest) if tls => format!("nbds:{rest}"),
            _ => uri,
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
            Listen::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// What to prefetch in the background.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Prefetch {
    /// Nothing.
    None,
    /// What the image's profile says, if its site has one, then the rest in order.
    // As the default was called when there were no profiles: earlier versions can read the record.
    #[serde(rename = "Sequential")]
    Profile,
    /// Everything, in order.
    #[serde(rename = "InOrder")]
    Sequential,
    /// What the profile in this file says, then the rest in order.
    File(PathBuf),
}

impl Prefetch {
    /// Parses `none`, `profile`, `sequential` or a path.
    ///
    /// # Errors
    /// A message for the user.
    pub fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "none" => Prefetch::None,
            "profile" => Prefetch::Profile,
            "sequential" => Prefetch::Sequential,
            path => Prefetch::File(std::path::absolute(path).map_err(|e| e.to_string())?),
        })
    }
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Prefetch::None => f.write_str("none"),
            Prefetch::Profile => f.write_str("profile"),
            Prefetch::Sequential => f.write_str("sequential"),
            Prefetch::File(path) => write!(f, "{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_name_a_peer_or_none() {
        let there: Target = "lyon:web.qcow2".parse().unwrap();
        assert_eq!(there.peer.as_deref(), Some("lyon"));
        assert_eq!(there.to_string(), "lyon:web.qcow2");
        let here: Target = "web.qcow2".parse().unwrap();
        assert_eq!((here.peer, here.image.as_str()), (None, "web.qcow2"));
        for time in ["web@latest", "web@2026-11-20T10:00:00Z"] {
            let snapshot: Target = time.parse().unwrap();
            assert_eq!((snapshot.peer, snapshot.image.as_str()), (None, time));
        }
        let there: Target = "lyon:web@2026-11-20T10:00:00Z".parse().unwrap();
        assert_eq!(there.peer.as_deref(), Some("lyon"));
        for bad in [
            "web@lyon:x.raw",
            "lyon:",
            ":x",
            "lyon:../x",
            "a/b",
            "",
            "ly on:x",
        ] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }

    #[test]
    fn local_disks_are_paths_and_old_records_have_none() {
        let file: Target = "file:/srv/a b.raw".parse().unwrap();
        assert_eq!(file.local, Some(LocalDisk::File("/srv/a b.raw".into())));
        assert_eq!(
            (file.peer.as_deref(), file.image.as_str()),
            (None, "a b.raw")
        );
        assert_eq!(file.to_string(), "file:/srv/a b.raw");
        let dir: Target = "dir:x:y".parse().unwrap();
        let path = std::env::current_dir().unwrap().join("x:y");
        assert_eq!(dir.local, Some(LocalDisk::Dir(path)));
        for bad in ["file:", "dir:/", "dir:.."] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
        let json = serde_json::to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<Target>(&json).unwrap(), file);
        let old = r#"{"peer":"lyon","image":"web.raw"}"#;
        let read: Target = serde_json::from_str(old).unwrap();
        assert_eq!(read, "lyon:web.raw".parse().unwrap());
        assert_eq!(serde_json::to_string(&read).unwrap(), old);
    }

    #[test]
    fn exports_of_nbd_servers_are_targets() {
        for (text, image, shown) in [
            ("nbd://lyon/a/web", "web", "nbd://lyon:10809/a/web"),
            ("nbd+tcp://lyon:7", "nbd", "nbd://lyon:7/"),
            (
                "nbd+unix:///my%20disk?socket=/s",
                "my disk",
                "nbd+unix:///my%20disk?socket=/s",
            ),
            (
                "nbd+unix:///..?socket=/s",
                "nbd",
                "nbd+unix:///..?socket=/s",
            ),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.image.as_str(), &target.peer), (image, &None));
            assert_eq!(target.to_string(), shown);
            let json = serde_json::to_string(&target).unwrap();
            assert_eq!(serde_json::from_str::<Target>(&json).unwrap(), target);
        }
        let relative: Target = "nbd+unix:///?socket=s".parse().unwrap();
        let path = std::env::current_dir().unwrap().join("s");
        assert!(relative.to_string().ends_with(path.to_str().unwrap()));
        for bad in ["nbds://lyon/x", "nbd+unix:///x", "http://lyon/x"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
        // A peer may be called nbd.
        assert!("nbd:web.raw".parse::<Target>().unwrap().local.is_none());
    }

    #[test]
    fn disks_in_stores_are_targets() {
        for (text, image, shown) in [
            ("s3://bucket/a/disk", "disk", "s3://bucket/a/disk"),
            (
                "redis://lyon/3?prefix=vm1",
                "vm1",
                "redis://lyon:6379/3?prefix=vm1",
            ),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.image.as_str(), &target.peer), (image, &None));
            assert_eq!(target.to_string(), shown);
            let json = serde_json::to_string(&target).unwrap();
            assert_eq!(serde_json::from_str::<Target>(&json).unwrap(), target);
        }
        let error = "redis://:hunter2@lyon/3".parse::<Target>().unwrap_err();
        assert!(!error.contains("hunter2"), "{error}");
        // A peer may be called s3.
        assert!("s3:web.raw".parse::<Target>().unwrap().local.is_none());
    }

    #[test]
    fn listen_addresses() {
        assert_eq!(
            Listen::parse("unix:/run/web.sock"),
            Ok(Listen::Unix("/run/web.sock".into()))
        );
        let port = Listen::parse("127.0.0.1:10809").unwrap();
        assert!(port.is_local());
        assert_eq!(port.uri("web", false), "nbd://127.0.0.1:10809/web");
        assert_eq!(port.uri("web", true), "nbds://127.0.0.1:10809/web");
        let socket = Listen::parse("unix:/run/a&b.sock").unwrap();
        assert_eq!(
            socket.uri("my disk?", true),
            "nbd+unix:///my%20disk%3F?socket=/run/a%26b.sock"
        );
        assert!(!Listen::parse("0.0.0.0:10809").unwrap().is_local());
        assert!(Listen::parse("10809").is_err());
    }
}
