//! Disks in Redis, Valkey and what speaks their protocol.

mod connection;
mod reply;

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::DeviceError;
use parking_lot::Mutex;

use self::connection::{Command, Connection, command};
use self::reply::Reply;
use super::address::RedisServer;
use super::format::random;
use super::socket::is_tls;
use super::store::{ChunkStore, Each, Promise, Tag, Wanted};

/// Bytes of the disk in a value: r3map's chunk.
const OBJECT: u32 = 64 << 10;
/// Connections that are kept.
const MAX_IDLE: usize = 8;
/// For a server that has not answered yet: one that is not there is said soon.
const FIRST: Duration = Duration::from_secs(5);
/// For one that has.
const LATER: Duration = Duration::from_secs(60);
/// The first pause before another try; each is twice as long.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest one.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// For the server's disk.
const SETTLE: Duration = Duration::from_secs(50);
/// Bytes of the largest reply but for values: a page of keys, settings.
const MAX_SMALL: usize = 64 << 10;

/// The key that is written before the server is asked to wait for its disk.
const SYNC: &str = "sync";
/// Pages of a listing: some 1000 keys each.
const MAX_PAGES: u32 = 1 << 22;
/// Bytes of a key in a listing.
const MAX_KEY: usize = 4096;

/// Where passwords come from.
const PASSWORDS: &str =
    "the password comes from REDISCLI_AUTH, or from a file: ?password-file=PATH";

/// Writes a value if it has the tag that is expected.
const SWAP: &str = "\
local now = redis.call('HGET', KEYS[1], 'tag')
if (now or '') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'tag', ARGV[2], 'value', ARGV[3])
return 1";

/// Keys with a prefix in a database of a Redis server.
pub struct RedisStore {
    server: RedisServer,
    prefix: String,
    text: String,
    idle: Mutex<Vec<Connection>>,
    has_answered: AtomicBool,
    promise: Promise,
    /// Whether the server can be asked to wait for its disk.
    can_wait: bool,
}

impl RedisStore {
    /// Connects to a server, and asks what it promises. `text` is how it is named in messages.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn connect(server: RedisServer, prefix: &str, text: &str) -> Result<Self, DeviceError> {
        let mut store = RedisStore {
            server,
            prefix: prefix.to_owned(),
            text: text.to_owned(),
            idle: Mutex::new(Vec::new()),
            has_answered: AtomicBool::new(false),
            promise: Promise {
                is_durable: false,
                note: None,
            },
            can_wait: false,
        };
        let settings = ["appendonly", "appendfsync", "maxmemory", "maxmemory-policy"];
        let mut asked: Vec<_> = settings
            .iter()
            .map(|name| command(&["CONFIG", "GET", name]))
            .collect();
        asked.push(command(&["WAITAOF", "0", "0", "1"]));
        let pong = store.patiently(&[command(&["PING"])], MAX_SMALL)?;
        if let Some(Reply::Error(why)) = pong.first() {
            return Err(store.refused(why));
        }
        let replies = store.patiently(&asked, MAX_SMALL)?;
        let setting = |at: usize| {
            let reply = replies.get(at)?;
            reply.elements().get(1)?.text()
        };
        store.can_wait = matches!(replies.last(), Some(Reply::Many(Some(_))));
        store.promise = promise(
            [setting(0), setting(1), setting(2), setting(3)],
            store.can_wait,
        );
        store.can_wait &= setting(0) == Some("yes");
        Ok(store)
    }

    fn key(&self, key: &str) -> String {
        format!("{}:{key}", self.prefix)
    }

    fn away(&self, error: &io::Error) -> DeviceError {
        let text = format!("{}: {error}", self.text);
        match error.kind() {
            io::ErrorKind::PermissionDenied => {
                DeviceError::Unavailable(format!("{text} ({PASSWORDS})"))
            }
            // It says nothing of what is stored. A refusal of TLS may end: certificates are renewed.
            io::ErrorKind::InvalidData if !is_tls(error) => {
                DeviceError::Io(Arc::new(io::Error::other(text)))
            }
            _ => DeviceError::Unavailable(text),
        }
    }

    /// Calls once.
    fn once(&self, commands: &[Command<'_>], most: usize) -> io::Result<Vec<Reply>> {
        let idle = self.idle.lock().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => Connection::open(&self.server)?,
        };
        let replies = connection.call(commands, most)?;
        self.has_answered.store(true, Ordering::Relaxed);
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
        Ok(replies)
    }

    /// Calls until there is an answer, for a bounded time.
    fn patiently(&self, commands: &[Command<'_>], most: usize) -> Result<Vec<Reply>, DeviceError> {
        let limit = match self.has_answered.load(Ordering::Relaxed) {
            true => LATER,
            false => FIRST,
        };
        let (mut began, mut pause) = (None, PAUSE);
        loop {
            let error = match self.once(commands, most) {
                Ok(replies) => match replies.iter().find_map(busy) {
                    None => return Ok(replies),
                    Some(why) => DeviceError::Unavailable(format!("{}: {why}", self.text)),
                },
                Err(error) => {
                    // The others are as old.
                    self.idle.lock().clear();
                    let is_final = matches!(
                        error.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData
                    );
                    let error = self.away(&error);
                    if is_final {
                        return Err(error);
                    }
                    error
                }
            };
            let began = *began.get_or_insert_with(Instant::now);
            if began.elapsed() + pause > limit {
                return Err(error);
            }
            std::thread::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0));
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// An answer that is an error.
    fn refused(&self, why: &str) -> DeviceError {
        let why: String = why.chars().take(300).collect();
        let text = format!("{}: {why}", self.text);
        match why.split(' ').next() {
            Some("OOM") => DeviceError::NoSpace(text),
            Some("NOAUTH" | "NOPERM" | "WRONGPASS") => {
                DeviceError::Unavailable(format!("{text} ({PASSWORDS})"))
            }
            Some("MISCONF") => DeviceError::Unavailable(text),
            Some("MOVED" | "ASK" | "CROSSSLOT") => DeviceError::Unsupported(
                format!("be kept in a cluster of Redis servers ({text})").into(),
            ),
            _ => DeviceError::Io(Arc::new(io::Error::other(text))),
        }
    }

    fn strange(&self) -> DeviceError {
        let text = format!("{}: the server answered something else", self.text);
        DeviceError::Io(Arc::new(io::Error::other(text)))
    }
}

/// Why a server could not do it at the moment.
fn busy(reply: &Reply) -> Option<&str> {
    let Reply::Error(why) = reply else {
        return None;
    };
    let kinds = [
        "LOADING",
        "BUSY",
        "TRYAGAIN",
        "CLUSTERDOWN",
        "MASTERDOWN",
        "READONLY",
    ];
    kinds.contains(&why.split(' ').next()?).then_some(why)
}

/// What a server with these settings promises: `appendonly`, `appendfsync`, `maxmemory`, `maxmemory-policy`.
fn promise(settings: [Option<&str>; 4], can_wait: bool) -> Promise {
    let [append, sync, memory, policy] = settings;
    let lost = match (append, sync) {
        (Some("yes"), Some("always")) => None,
        (Some("yes"), _) if can_wait => None,
        (Some("yes"), Some("everysec")) => Some(
            "a crash of the server loses what was flushed in the second before (appendfsync everysec)",
        ),
        (Some("yes"), _) => Some(
            "a crash of the server's host loses what was flushed shortly before (appendfsync no)",
        ),
        (Some(_), _) => Some(
            "the server keeps the disk in memory (appendonly no): when it restarts, what was flushed is lost",
        ),
        (None, _) => Some("the server does not say whether what was flushed survives its restart"),
    };
    let evicts = match (memory, policy) {
        (Some("0"), _) | (_, None | Some("noeviction")) => None,
        (_, Some(policy)) => Some(format!(
            "the server may evict parts of the disk (maxmemory-policy {policy}), which are errors then"
        )),
    };
    Promise {
        is_durable: lost.is_none(),
        note: match (lost, evicts) {
            (Some(lost), Some(evicts)) => Some(format!("{lost}; {evicts}")),
            (Some(lost), None) => Some(lost.to_owned()),
            (None, evicts) => evicts,
        },
    }
}

impl ChunkStore for RedisStore {
    fn get(&self, wanted: &[Wanted]) -> Each<Option<Bytes>> {
        let commands: Vec<_> = wanted
            .iter()
            .map(|wanted| {
                // The end is the last byte, and an empty value means that there is none.
                let end = wanted.range.end.saturating_sub(1);
                let (key, start) = (self.key(&wanted.key), wanted.range.start.to_string());
                command(&["GETRANGE", &key, &start, &end.to_string()])
            })
            .collect();
        let longest = |wanted: &Wanted| (wanted.range.end - wanted.range.start) as usize;
        let most = wanted.iter().map(longest).max().unwrap_or(0);
        match self.patiently(&commands, most) {
            Ok(replies) => replies
                .into_iter()
                .map(|reply| match reply {
                    Reply::Value(value) => Ok(value.filter(|value| !value.is_empty())),
                    Reply::Error(why) => Err(self.refused(&why)),
                    _ => Err(self.strange()),
                })
                .collect(),
            Err(error) => wanted.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    fn put(&self, values: Vec<(String, Bytes)>) -> Each<()> {
        let commands: Vec<Command<'_>> = values
            .iter()
            .map(|(key, value)| {
                vec![
                    Cow::Borrowed(&b"SET"[..]),
                    Cow::Owned(self.key(key).into_bytes()),
                    Cow::Borrowed(&value[..]),
                ]
            })
            .collect();
        match self.patiently(&commands, MAX_SMALL) {
            Ok(replies) => replies
                .iter()
                .map(|reply| match reply {
                    Reply::Status(_) => Ok(()),
                    Reply::Error(why) => Err(self.refused(why)),
                    _ => Err(self.strange()),
                })
                .collect(),
            Err(error) => values.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    fn remove(&self, keys: &[String]) -> Result<(), DeviceError> {
        if keys.is_empty() {
            return Ok(());
        }
        let mut words = vec!["UNLINK".to_owned()];
        words.extend(keys.iter().map(|key| self.key(key)));
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        match self.patiently(&[command(&words)], MAX_SMALL)?.first() {
            Some(Reply::Number(_)) => Ok(()),
            Some(Reply::Error(why)) => Err(self.refused(why)),
            _ => Err(self.strange()),
        }
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(&str)) -> Result<(), DeviceError> {
        let (pattern, own) = (format!("{}*", self.key(prefix)), self.prefix.len() + 1);
        let mut cursor = "0".to_owned();
        for _ in 0..MAX_PAGES {
            let scan = command(&["SCAN", &cursor, "MATCH", &pattern, "COUNT", "1000"]);
            let replies = self.patiently(&[scan], MAX_KEY)?;
            let reply = replies.first().ok_or_else(|| self.strange())?;
            if let Reply::Error(why) = reply {
                return Err(self.refused(why));
            }
            let [next, keys] = reply.elements() else {
                return Err(self.strange());
            };
            for key in keys.elements() {
                if let Some(key) = key.text().and_then(|key| key.get(own..)) {
                    each(key);
                }
            }
            cursor = next.text().ok_or_else(|| self.strange())?.to_owned();
            if cursor == "0" {
                return Ok(());
            }
        }
        let text = format!("{}: a listing of keys does not end", self.text);
        Err(DeviceError::Io(Arc::new(io::Error::other(text))))
    }

    fn look(&self, key: &str, most: usize) -> Result<Option<(Bytes, Tag)>, DeviceError> {
        let ask = command(&["HMGET", &self.key(key), "tag", "value"]);
        let replies = self.patiently(&[ask], most)?;
        match replies.first() {
            Some(Reply::Error(why)) => Err(self.refused(why)),
            Some(reply) => match reply.elements() {
                [Reply::Value(None), Reply::Value(None)] => Ok(None),
                [tag, Reply::Value(Some(value))] => {
                    let etag = tag.text().map(ToOwned::to_owned);
                    let version = None;
                    Ok(Some((value.clone(), Tag { etag, version })))
                }
                _ => Err(self.strange()),
            },
            None => Err(self.strange()),
        }
    }

    fn swap(&self, key: &str, was: Option<&Tag>, value: Bytes) -> Result<Option<Tag>, DeviceError> {
        let was = was.and_then(|tag| tag.etag.as_deref()).unwrap_or_default();
        let new = format!("{:032x}", u128::from_le_bytes(random()?));
        let mut swap: Command<'_> = command(&["EVAL", SWAP, "1", &self.key(key), was, &new]);
        swap.push(Cow::Borrowed(&value[..]));
        let replies = self.once(&[swap], MAX_SMALL).map_err(|e| {
            self.idle.lock().clear();
            self.away(&e)
        })?;
        match replies.first() {
            Some(Reply::Number(1)) => Ok(Some(Tag {
                etag: Some(new),
                version: None,
            })),
            Some(Reply::Number(0)) => Ok(None),
            Some(reply @ Reply::Error(why)) => match busy(reply) {
                Some(why) => Err(DeviceError::Unavailable(format!("{}: {why}", self.text))),
                None => Err(self.refused(why)),
            },
            _ => Err(self.strange()),
        }
    }

    fn no_tag(&self) -> Tag {
        Tag {
            etag: Some("none".into()),
            version: None,
        }
    }

    fn settle(&self) -> Result<(), DeviceError> {
        if !self.can_wait {
            return Ok(());
        }
        // It waits for writes of its own connection only: so there is one, after all others.
        let limit = SETTLE.as_millis().to_string();
        let write = command(&["SET", &self.key(SYNC), "1"]);
        let wait = command(&["WAITAOF", "1", "0", &limit]);
        let replies = self.patiently(&[write, wait], MAX_SMALL)?;
        match replies.first() {
            Some(Reply::Status(_)) => {}
            Some(Reply::Error(why)) => return Err(self.refused(why)),
            _ => return Err(self.strange()),
        }
        match replies.get(1) {
            Some(Reply::Error(why)) => Err(self.refused(why)),
            Some(reply) => match reply.elements().first() {
                Some(Reply::Number(1..)) => Ok(()),
                Some(Reply::Number(_)) => Err(DeviceError::Unavailable(format!(
                    "{}: the server has not written to its disk in {} s",
                    self.text,
                    SETTLE.as_secs()
                ))),
                _ => Err(self.strange()),
            },
            None => Err(self.strange()),
        }
    }

    fn promise(&self) -> Promise {
        self.promise.clone()
    }

    fn object(&self) -> u32 {
        OBJECT
    }

    fn describe(&self) -> String {
        self.text.clone()
    }
}

#[cfg(test)]
mod tests;
