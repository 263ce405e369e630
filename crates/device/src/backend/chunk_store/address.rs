//! Where a disk in a store is, as a person writes it. A URL has no passwords: other users of a host see what is typed.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of a URL.
const MAX_URL: usize = 1024;
/// The port of a Redis server.
const REDIS_PORT: u16 = 6379;
/// The port of a Cassandra server.
const CASSANDRA_PORT: u16 = 9042;
/// Servers of a cluster that are named, at most.
const MAX_HOSTS: usize = 8;
/// Bytes of a name in Cassandra: that of a keyspace, and of a table, which is a disk's.
const MAX_CASSANDRA_NAME: usize = 48;
/// The prefix of keys in Redis, if none is named.
const REDIS_PREFIX: &str = "drover";

/// The store and place of a disk: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`,
/// `redis://[USER@]HOST[:PORT][/DATABASE][?prefix=PREFIX][&password-file=PATH]` (`rediss:` by TLS), or
/// `cassandra://[USER@]HOST[:PORT][,HOST[:PORT]...]/KEYSPACE/DISK[?password-file=PATH]` (`cassandras:` by TLS).
///
/// ```
/// use drover_device::backend::chunk_store::StoreAddress;
///
/// let disk: StoreAddress = "redis://lyon/3?prefix=vm1".parse()?;
/// assert_eq!((disk.to_string(), disk.name()), ("redis://lyon:6379/3?prefix=vm1".into(), "vm1"));
/// assert!("redis://:secret@lyon/3".parse::<StoreAddress>().is_err());
/// # Ok::<(), drover_device::backend::chunk_store::AddressError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum StoreAddress {
    /// A prefix in an object store, as a URL.
    Objects(String),
    /// Keys with a prefix in a database of a Redis server.
    Redis(RedisServer, String),
    /// A table of Cassandra or ScyllaDB.
    Cassandra(CassandraTable),
}

/// A table in a cluster of Cassandra or ScyllaDB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CassandraTable {
    /// Some of its servers, with their ports; IPv6 addresses without brackets. Any of them answers for all.
    pub hosts: Vec<(String, u16)>,
    /// Whether they are spoken to by TLS.
    pub tls: bool,
    /// The user; none for that of the credentials' file, if there is one.
    pub user: Option<String>,
    /// A file with the password; none for that of the credentials' file.
    pub password_file: Option<PathBuf>,
    /// The keyspace.
    pub keyspace: String,
    /// The table, of a disk's name.
    pub table: String,
}

/// Where a Redis server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisServer {
    /// Its name or address; an IPv6 address without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether it is spoken to by TLS.
    pub tls: bool,
    /// The database.
    pub database: u32,
    /// The user; none for the default one.
    pub user: Option<String>,
    /// A file with the password; none for that of the environment, if there is one.
    pub password_file: Option<PathBuf>,
}

/// Why a text is no address of a disk in a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{scheme}: not the URL of a disk in a store: {why}")]
pub struct AddressError {
    scheme: String,
    why: &'static str,
}

impl StoreAddress {
    /// Whether a text begins as such a URL.
    #[must_use]
    pub fn is_one(text: &str) -> bool {
        let schemes = [
            "s3",
            "gs",
            "az",
            "redis",
            "rediss",
            "cassandra",
            "cassandras",
        ];
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        scheme.is_some_and(|scheme| schemes.contains(&scheme))
    }

    /// The last part of its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            StoreAddress::Objects(url) => url.rsplit('/').next().unwrap_or(url),
            StoreAddress::Redis(_, prefix) => {
                let last = prefix.rsplit([':', '/']).next();
                last.unwrap_or(prefix)
            }
            StoreAddress::Cassandra(table) => &table.table,
        }
    }

    /// The kind of its store, for people.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            StoreAddress::Objects(url) if url.starts_with("gs:") => "gs",
            StoreAddress::Objects(url) if url.starts_with("az:") => "az",
            StoreAddress::Objects(_) => "s3",
            StoreAddress::Redis(..) => "redis",
            StoreAddress::Cassandra(_) => "cassandra",
        }
    }
}

impl FromStr for StoreAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
        let parsed = match scheme {
            _ if text.len() > MAX_URL || text.chars().any(char::is_control) => {
                Err("it is too long, or has control characters")
            }
            "s3" | "gs" | "az" => in_bucket(scheme, rest),
            "redis" | "rediss" => in_redis(rest, scheme == "rediss"),
            "cassandra" | "cassandras" => in_cassandra(rest, scheme == "cassandras"),
            _ => Err(
                "expected s3://BUCKET/DISK, redis://HOST/DATABASE?prefix=DISK or cassandra://HOST/KEYSPACE/DISK",
            ),
        };
        // Not the whole text, which may have a password all the same.
        parsed.map_err(|why| AddressError {
            scheme: scheme.chars().take(16).collect(),
            why,
        })
    }
}

const NO_SECRETS: &str = "a password or key in a URL is seen by other users of this host: object stores find theirs in the environment or ~/.aws/credentials, Redis in REDISCLI_AUTH, Cassandra in ~/.cassandra/credentials, or both in ?password-file=PATH";

fn in_bucket(scheme: &str, rest: &str) -> Result<StoreAddress, &'static str> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_end_matches('/');
    if bucket.contains('@') {
        return Err(NO_SECRETS);
    }
    if bucket.is_empty() || prefix.is_empty() {
        return Err("it names no bucket, or no disk in it: BUCKET/DISK");
    }
    let fine = |part: &str| {
        let usual = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(usual)
    };
    match fine(bucket) && prefix.split('/').all(fine) {
        true => Ok(StoreAddress::Objects(format!(
            "{scheme}://{bucket}/{prefix}"
        ))),
        false => Err("the name of a disk consists of a-z, A-Z, 0-9, `-`, `_`, `.` and `/`"),
    }
}

fn user_and_hosts(authority: &str) -> Result<(Option<String>, &str), &'static str> {
    match authority.rsplit_once('@') {
        Some((user, _)) if user.contains(':') => Err(NO_SECRETS),
        Some(("", hosts)) => Ok((None, hosts)),
        Some((user, hosts)) => Ok((Some(user.to_owned()), hosts)),
        None => Ok((None, authority)),
    }
}

fn host_and_port(text: &str, usual_port: u16) -> Result<(String, u16), &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("an address lacks its bracket")?;
            (host, port.strip_prefix(':'))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let usual = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    if host.is_empty() || !host.chars().all(usual) {
        return Err("it names no host");
    }
    let port = match port {
        Some(port) => port.parse().map_err(|_| "its port is none")?,
        None => usual_port,
    };
    Ok((host.to_owned(), port))
}

fn in_cassandra(rest: &str, tls: bool) -> Result<StoreAddress, &'static str> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut parts = path.split('/');
    let (user, hosts) = user_and_hosts(parts.next().unwrap_or_default())?;
    let hosts = hosts
        .split(',')
        .map(|host| host_and_port(host, CASSANDRA_PORT))
        .collect::<Result<Vec<_>, _>>()?;
    if hosts.len() > MAX_HOSTS {
        return Err("it names too many hosts: some of a cluster's are enough");
    }
    let (keyspace, table) = (parts.next(), parts.next());
    let (Some(keyspace), Some(table), None) = (keyspace, table, parts.next()) else {
        return Err("it names no keyspace, or no disk in it: HOST/KEYSPACE/DISK");
    };
    let is_name = |name: &str| {
        let usual = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        (1..=MAX_CASSANDRA_NAME).contains(&name.len()) && name.chars().all(usual)
    };
    if !is_name(keyspace) || !is_name(table) {
        return Err(
            "names of keyspaces and disks in Cassandra have at most 48 of a-z, 0-9 and `_`",
        );
    }
    let mut password_file = None;
    for parameter in query.split('&').filter(|part| !part.is_empty()) {
        match parameter.split_once('=') {
            Some(("password-file", path)) => {
                password_file = Some(std::path::absolute(path).map_err(|_| "its file is none")?);
            }
            _ => return Err("its parameter is `password-file`"),
        }
    }
    Ok(StoreAddress::Cassandra(CassandraTable {
        hosts,
        tls,
        user,
        password_file,
        keyspace: keyspace.to_owned(),
        table: table.to_owned(),
    }))
}

fn in_redis(rest: &str, tls: bool) -> Result<StoreAddress, &'static str> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = path.split_once('/').unwrap_or((path, ""));
    let (user, host) = user_and_hosts(authority)?;
    let (host, port) = host_and_port(host, REDIS_PORT)?;
    let database = match database {
        "" => 0,
        number => number.parse().map_err(|_| "a database is a number")?,
    };
    let (mut prefix, mut password_file) = (REDIS_PREFIX.to_owned(), None);
    for parameter in query.split('&').filter(|part| !part.is_empty()) {
        match parameter.split_once('=') {
            Some(("prefix", value)) => prefix = value.to_owned(),
            Some(("password-file", path)) => {
                password_file = Some(std::path::absolute(path).map_err(|_| "its file is none")?);
            }
            _ => return Err("its parameters are `prefix` and `password-file`"),
        }
    }
    let usual = |c: char| c.is_ascii_alphanumeric() || "-._:/".contains(c);
    // Patterns of keys have other characters, and a file on this host may be named after it.
    let name = prefix.rsplit([':', '/']).next().unwrap_or_default();
    if !prefix.chars().all(usual) || matches!(name, "" | "." | "..") {
        return Err(
            "a prefix consists of a-z, A-Z, 0-9, `-`, `_`, `.`, `:` and `/`, and ends in a name",
        );
    }
    let server = RedisServer {
        host,
        port,
        tls,
        database,
        user,
        password_file,
    };
    Ok(StoreAddress::Redis(server, prefix))
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreAddress::Objects(url) => f.write_str(url),
            StoreAddress::Redis(server, prefix) => {
                let scheme = if server.tls { "rediss" } else { "redis" };
                let hosts = [(server.host.clone(), server.port)];
                write_authority(f, scheme, server.user.as_deref(), &hosts)?;
                write!(f, "/{}?prefix={prefix}", server.database)?;
                match &server.password_file {
                    Some(path) => write!(f, "&password-file={}", path.display()),
                    None => Ok(()),
                }
            }
            StoreAddress::Cassandra(table) => {
                let scheme = if table.tls { "cassandras" } else { "cassandra" };
                write_authority(f, scheme, table.user.as_deref(), &table.hosts)?;
                write!(f, "/{}/{}", table.keyspace, table.table)?;
                match &table.password_file {
                    Some(path) => write!(f, "?password-file={}", path.display()),
                    None => Ok(()),
                }
            }
        }
    }
}

fn write_authority(
    f: &mut fmt::Formatter<'_>,
    scheme: &str,
    user: Option<&str>,
    hosts: &[(String, u16)],
) -> fmt::Result {
    write!(f, "{scheme}://")?;
    if let Some(user) = user {
        write!(f, "{user}@")?;
    }
    for (nth, (host, port)) in hosts.iter().enumerate() {
        let comma = if nth > 0 { "," } else { "" };
        match host.contains(':') {
            true => write!(f, "{comma}[{host}]:{port}")?,
            false => write!(f, "{comma}{host}:{port}")?,
        }
    }
    Ok(())
}

impl TryFrom<String> for StoreAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<StoreAddress> for String {
    fn from(address: StoreAddress) -> String {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_shown_as_they_are_read() {
        for (text, shown, name, kind) in [
            ("s3://bucket/a/disk/", "s3://bucket/a/disk", "disk", "s3"),
            ("gs://b/d", "gs://b/d", "d", "gs"),
            (
                "redis://lyon",
                "redis://lyon:6379/0?prefix=drover",
                "drover",
                "redis",
            ),
            (
                "rediss://me@[::1]:7/3?prefix=vms:web&password-file=/run/x",
                "rediss://me@[::1]:7/3?prefix=vms:web&password-file=/run/x",
                "web",
                "redis",
            ),
            (
                "cassandra://lyon,[::1]:9043/vms/web_1",
                "cassandra://lyon:9042,[::1]:9043/vms/web_1",
                "web_1",
                "cassandra",
            ),
            (
                "cassandras://me@lyon/vms/web?password-file=/run/x",
                "cassandras://me@lyon:9042/vms/web?password-file=/run/x",
                "web",
                "cassandra",
            ),
        ] {
            let address: StoreAddress = text.parse().unwrap();
            assert!(StoreAddress::is_one(text));
            assert_eq!(
                (address.to_string().as_str(), address.name(), address.kind()),
                (shown, name, kind)
            );
            assert_eq!(shown.parse(), Ok(address));
        }
        for bad in [
            "s3://bucket",
            "s3:///disk",
            "s3://b/../x",
            "s3://b/a b",
            "s3://key:secret@b/x",
            "redis://",
            "redis://h:x",
            "redis://h/x",
            "redis://h/-1",
            "redis://h?prefix=",
            "redis://h?prefix=a*",
            "redis://h?prefix=..",
            "redis://h?db=3",
            "redis://:hunter2@h/0",
            "redis://me:hunter2@h/0",
            "cassandra://h/ks",
            "cassandra://h/ks/a/b",
            "cassandra://h/ks/a-b",
            "cassandra://h/ks/A",
            "cassandra://h,/ks/a",
            "cassandra://a,b,c,d,e,f,g,h,i/ks/a",
            "cassandra://h/ks/a?prefix=x",
            "cassandra://me:hunter2@h/ks/a",
            "ftp://x/y",
            "s3://b/x\n",
        ] {
            let error = bad.parse::<StoreAddress>().unwrap_err().to_string();
            assert!(
                !error.contains("hunter2") && !error.contains('\n'),
                "{error}"
            );
        }
        assert!(!StoreAddress::is_one("nbd://lyon/x") && !StoreAddress::is_one("s3:web"));
    }
}
