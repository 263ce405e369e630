//! The rows of each table.

use std::path::PathBuf;

use drover_core::{Digest, ImageName};
use drover_image::Stamp;
use drover_index::ImageId;
use drover_net::PeerKey;
use rusqlite::types::Value;

use super::table::Row;
use crate::catalog::ImageRecord;
use crate::domain;
use crate::grant::Grant;

/// The setting with the next image ID.
pub const NEXT_ID: &str = "next image id";

/// Increment of the counter when it may have been lost.
pub const ID_GAP_AFTER_LOSS: u64 = 1 << 20;

/// The rows of all tables.
#[cfg(feature = "postgres")]
#[derive(Debug, Default)]
pub struct AllRows {
    pub settings: Vec<Setting>,
    pub peers: Vec<Peer>,
    pub tickets: Vec<TicketRow>,
    pub images: Vec<ImageRecord>,
}

/// A named setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Its name.
    pub key: String,
    /// Its value.
    pub value: String,
}

impl Row for Setting {
    const TABLE: &'static str = "settings";
    const COLUMNS: &'static [&'static str] = &["key", "value"];

    fn values(&self) -> Vec<Value> {
        vec![
            Value::Text(self.key.clone()),
            Value::Text(self.value.clone()),
        ]
    }

    fn of(values: &[Value]) -> Option<Self> {
        let [key, value] = values else { return None };
        Some(Setting {
            key: text(key)?,
            value: text(value)?,
        })
    }
}

/// A peer: a site whose key this one knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name here.
    pub name: String,
    /// Its public key, which identifies it.
    pub key: PeerKey,
    /// Its listen addresses, `HOST:PORT`; empty when it does not listen.
    pub addresses: Vec<String>,
    /// When it was paired, in seconds since 1970.
    pub paired_unix: i64,
    /// What it may do here.
    pub grant: Grant,
}

impl Row for Peer {
    const TABLE: &'static str = "peers";
    const COLUMNS: &'static [&'static str] = &[
        "name",
        "key",
        "addresses",
        "paired_unix",
        "rights",
        "domain",
        "quota_bytes",
    ];
    const FIRST: usize = 4;

    fn values(&self) -> Vec<Value> {
        let [rights, domain, quota] = grant_values(&self.grant);
        vec![
            Value::Text(self.name.clone()),
            Value::Text(self.key.to_string()),
            Value::Text(self.addresses.join("\n")),
            Value::Integer(self.paired_unix),
            rights,
            domain,
            quota,
        ]
    }

    fn added() -> Vec<Value> {
        grant_values(&Grant::default()).to_vec()
    }

    fn of(values: &[Value]) -> Option<Self> {
        let [name, key, addresses, paired, grant @ ..] = values else {
            return None;
        };
        Some(Peer {
            name: text(name)?,
            key: text(key)?.parse().ok()?,
            addresses: text(addresses)?.lines().map(String::from).collect(),
            paired_unix: integer(paired)?,
            grant: grant_of(grant)?,
        })
    }
}

/// A ticket made by this site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketRow {
    /// The BLAKE3 hash of its secret, in hexadecimal: the secret itself is not stored.
    pub secret: String,
    /// When it was created, in seconds since 1970.
    pub created_unix: i64,
    /// When it expires.
    pub expires_unix: i64,
    /// The key that redeemed it; empty if none did.
    pub used_by: String,
    /// What the peer that redeems it may do.
    pub grant: Grant,
    /// The name that this peer gets; empty for the one that it proposes.
    pub name: String,
}

impl Row for TicketRow {
    const TABLE: &'static str = "tickets";
    const COLUMNS: &'static [&'static str] = &[
        "secret",
        "created_unix",
        "expires_unix",
        "used_by",
        "rights",
        "domain",
        "quota_bytes",
        "name",
    ];
    const FIRST: usize = 4;

    fn values(&self) -> Vec<Value> {
        let [rights, domain, quota] = grant_values(&self.grant);
        vec![
            Value::Text(self.secret.clone()),
            Value::Integer(self.created_unix),
            Value::Integer(self.expires_unix),
            Value::Text(self.used_by.clone()),
            rights,
            domain,
            quota,
            Value::Text(self.name.clone()),
        ]
    }

    fn added() -> Vec<Value> {
        let [rights, domain, quota] = grant_values(&Grant::default());
        vec![rights, domain, quota, Value::Text(String::new())]
    }

    fn of(values: &[Value]) -> Option<Self> {
        let [secret, created, expires, used, grant @ .., name] = values else {
            return None;
        };
        Some(TicketRow {
            secret: text(secret)?,
            created_unix: integer(created)?,
            expires_unix: integer(expires)?,
            used_by: text(used)?,
            grant: grant_of(grant)?,
            name: text(name)?,
        })
    }
}

impl Row for ImageRecord {
    const TABLE: &'static str = "images";
    const COLUMNS: &'static [&'static str] = &[
        "name",
        "id",
        "path",
        "format",
        "size_bytes",
        "data_bytes",
        "virtual_bytes",
        "digest",
        "stamp",
        "added_unix",
        "peer",
        "external",
        "owner",
        "shared",
    ];
    const FIRST: usize = 12;

    fn values(&self) -> Vec<Value> {
        use std::os::unix::ffi::OsStrExt;
        vec![
            Value::Text(self.name.to_string()),
            Value::Integer(self.id.0 as i64),
            Value::Blob(self.path.as_os_str().as_bytes().to_vec()),
            Value::Text(self.format.clone()),
            Value::Integer(self.size_bytes as i64),
            Value::Integer(self.data_bytes as i64),
            Value::Integer(self.virtual_bytes as i64),
            Value::Text(self.digest.to_string()),
            Value::Text(self.stamp.as_ref().map(stamp_text).unwrap_or_default()),
            Value::Integer(self.added_unix),
            Value::Text(self.from.clone()),
            Value::Integer(i64::from(self.external)),
            Value::Text(self.owner.map(|key| key.to_string()).unwrap_or_default()),
            Value::Text(Vec::from_iter(self.shared.iter().map(ToString::to_string)).join(" ")),
        ]
    }

    fn added() -> Vec<Value> {
        vec![Value::Text(String::new()), Value::Text(String::new())]
    }

    fn of(values: &[Value]) -> Option<Self> {
        use std::os::unix::ffi::OsStringExt;
        let [
            name,
            id,
            path,
            format,
            size,
            data,
            virtual_size,
            digest,
            stamp,
            added,
            peer,
            external,
            owner,
            shared,
        ] = values
        else {
            return None;
        };
        let Value::Blob(path) = path else { return None };
        let stamp = text(stamp)?;
        let owner = text(owner)?;
        Some(ImageRecord {
            name: ImageName::new(text(name)?).ok()?,
            id: ImageId(integer(id)? as u64),
            path: PathBuf::from(std::ffi::OsString::from_vec(path.clone())),
            format: text(format)?,
            size_bytes: integer(size)? as u64,
            data_bytes: integer(data)? as u64,
            virtual_bytes: integer(virtual_size)? as u64,
            digest: text(digest)?.parse::<Digest>().ok()?,
            stamp: if stamp.is_empty() {
                None
            } else {
                Some(parse_stamp(&stamp)?)
            },
            added_unix: integer(added)?,
            from: text(peer)?,
            external: integer(external)? != 0,
            owner: if owner.is_empty() {
                None
            } else {
                Some(owner.parse().ok()?)
            },
            shared: {
                let shared = text(shared)?;
                let keys = shared.split_whitespace().map(|key| key.parse().ok());
                keys.collect::<Option<_>>()?
            },
        })
    }
}

/// The columns of a grant: `rights`, `domain` and `quota_bytes`, which is -1 for none.
fn grant_values(grant: &Grant) -> [Value; 3] {
    let quota = grant.quota_bytes;
    [
        Value::Text(grant.rights.to_string()),
        Value::Text(grant.domain.clone()),
        Value::Integer(quota.map_or(-1, |q| i64::try_from(q).unwrap_or(i64::MAX))),
    ]
}

fn grant_of(values: &[Value]) -> Option<Grant> {
    let [rights, domain, quota] = values else {
        return None;
    };
    Some(Grant {
        domain: domain::check(&text(domain)?).ok()?,
        quota_bytes: match integer(quota)? {
            -1 => None,
            bytes => Some(u64::try_from(bytes).ok()?),
        },
        ..Grant::of(text(rights)?.parse().ok()?)
    })
}

fn stamp_text(s: &Stamp) -> String {
    format!(
        "{}:{}:{}:{}:{}",
        s.device, s.inode, s.size, s.mtime_ns, s.ctime_ns
    )
}

fn parse_stamp(text: &str) -> Option<Stamp> {
    let mut parts = text.split(':');
    let stamp = Stamp {
        device: parts.next()?.parse().ok()?,
        inode: parts.next()?.parse().ok()?,
        size: parts.next()?.parse().ok()?,
        mtime_ns: parts.next()?.parse().ok()?,
        ctime_ns: parts.next()?.parse().ok()?,
    };
    parts.next().is_none().then_some(stamp)
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::Text(t) => Some(t.clone()),
        _ => None,
    }
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::Integer(i) => Some(*i),
        _ => None,
    }
}
