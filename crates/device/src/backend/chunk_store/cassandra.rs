//! Disks in Cassandra and ScyllaDB: a table for each, a row for each value.

mod connection;
mod frame;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::DeviceError;
use parking_lot::Mutex;

use self::connection::{Call, Connection, Statement};
use self::frame::Answer;
use super::address::CassandraTable;
use super::format::random;
use super::socket::is_tls;
use super::store::{ChunkStore, Each, Promise, Tag, Wanted};

/// Bytes of the disk in a value: r3map's chunk. A row is read as a whole.
const OBJECT: u32 = 64 << 10;
/// Bytes of a value: the largest object of a disk, with the digests of its chunks.
const MAX_VALUE: usize = (4 << 20) + (1 << 16);
/// Connections that are kept.
const MAX_IDLE: usize = 8;
/// For a cluster that has not answered yet: one that is not there is said soon.
const FIRST: Duration = Duration::from_secs(10);
/// For one that has.
const LATER: Duration = Duration::from_secs(60);
/// The first pause before another try; each is twice as long.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest one.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Pages of a listing.
const MAX_PAGES: u32 = 1 << 22;
/// How often a new table is looked for that some servers do not know yet.
const MAX_LOOKS: u32 = 40;

/// Where names and passwords come from.
const PASSWORDS: &str = "the name and the password come from ~/.cassandra/credentials, or the name from the URL and the password from ?password-file=PATH";

/// A table of a cluster.
pub struct CassandraStore {
    table: CassandraTable,
    text: String,
    idle: Mutex<Vec<Connection>>,
    /// The server that is connected to next.
    next: AtomicUsize,
    has_answered: AtomicBool,
    promise: Promise,
    /// How long an answer is waited for.
    later: Duration,
}

impl CassandraStore {
    /// Connects to a cluster, and asks what it promises. `text` is how it is named in messages.
    ///
    /// # Errors
    /// [`DeviceError`]; there is no such keyspace.
    pub fn connect(table: CassandraTable, text: &str) -> Result<Self, DeviceError> {
        let mut store = CassandraStore {
            table,
            text: text.to_owned(),
            idle: Mutex::default(),
            next: AtomicUsize::new(0),
            has_answered: AtomicBool::new(false),
            promise: Promise {
                is_durable: false,
                note: None,
            },
            later: LATER,
        };
        let keyspace = store.table.keyspace.clone();
        let ask = format!(
            "SELECT replication, durable_writes FROM system_schema.keyspaces WHERE keyspace_name = '{keyspace}'"
        );
        let rows = store.query(&ask)?;
        let Some([replication, durable]) = rows.first().map(Vec::as_slice) else {
            return Err(DeviceError::Unsupported(
                format!("use {text}: there is no keyspace {keyspace}, which drover does not make, as its replication is for you to decide: CREATE KEYSPACE {keyspace} WITH replication = {{'class': 'NetworkTopologyStrategy', 'DATACENTER': 3}}").into(),
            ));
        };
        let replication = replication.clone().unwrap_or_default();
        let replication = frame::map(&replication).map_err(|e| store.away(&e))?;
        let durable = durable.as_deref() != Some(&[0]);
        // ScyllaDB has no such table, and Cassandra from version 4 on.
        let ask = "SELECT value FROM system_views.settings WHERE name = 'commitlog_sync'";
        let sync = store.query(ask).ok();
        let sync = sync.and_then(|rows| rows.first()?.first()?.clone());
        let sync = sync.map(|value| String::from_utf8_lossy(&value).into_owned());
        store.promise = promise(&replication, durable, sync.as_deref());
        Ok(store)
    }

    /// The rows of an answer to what needs no table of a disk.
    fn query(&self, text: &str) -> Result<Vec<Vec<Option<Bytes>>>, DeviceError> {
        match self
            .patiently(&mut |connection| Ok(vec![connection.query(text)?]))?
            .pop()
        {
            Some(Answer::Rows(rows, _)) => Ok(rows),
            Some(Answer::Done) => Ok(Vec::new()),
            Some(Answer::Error(code, why)) => Err(self.refused(code, &why)),
            _ => Err(self.strange()),
        }
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

    /// A connection that is kept, or one to the next server that takes one.
    fn connection(&self) -> io::Result<Connection> {
        if let Some(connection) = self.idle.lock().pop() {
            return Ok(connection);
        }
        let hosts = &self.table.hosts;
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "it names no host");
        for nth in 0..hosts.len() {
            match Connection::open(&self.table, &hosts[first.wrapping_add(nth) % hosts.len()]) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Calls once.
    fn once(
        &self,
        call: &mut dyn FnMut(&mut Connection) -> io::Result<Vec<Answer>>,
    ) -> io::Result<Vec<Answer>> {
        let mut connection = self.connection()?;
        let answers = call(&mut connection)?;
        self.has_answered.store(true, Ordering::Relaxed);
        // A statement that the server has forgotten is prepared anew by another connection.
        if !answers
            .iter()
            .any(|a| matches!(a, Answer::Error(UNPREPARED, _)))
        {
            let mut idle = self.idle.lock();
            if idle.len() < MAX_IDLE {
                idle.push(connection);
            }
        }
        Ok(answers)
    }

    /// Calls until there is an answer that is final, for a bounded time.
    fn patiently(
        &self,
        call: &mut dyn FnMut(&mut Connection) -> io::Result<Vec<Answer>>,
    ) -> Result<Vec<Answer>, DeviceError> {
        let mut retries = self.retries();
        loop {
            let error = match self.once(call) {
                Ok(answers) => match answers.iter().find_map(busy) {
                    None => return Ok(answers),
                    Some((code, why)) => self.refused(code, why),
                },
                Err(error) => self.lost(&error)?,
            };
            retries.pause(error)?;
        }
    }

    fn retries(&self) -> Retries {
        Retries {
            limit: match self.has_answered.load(Ordering::Relaxed) {
                true => self.later,
                false => FIRST,
            },
            began: None,
            pause: PAUSE,
        }
    }

    /// A connection was lost: the error if another try may help.
    ///
    /// # Errors
    /// The error if it is final.
    fn lost(&self, error: &io::Error) -> Result<DeviceError, DeviceError> {
        // The others are as old.
        self.idle.lock().clear();
        let is_final = matches!(
            error.kind(),
            io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData
        );
        let error = self.away(error);
        if is_final { Err(error) } else { Ok(error) }
    }

    /// Makes calls of one statement; those that had no final answer are repeated, for a bounded time.
    fn each(&self, calls: Vec<Call>) -> Vec<Result<Answer, DeviceError>> {
        let mut retries = self.retries();
        let mut results: Vec<Option<Answer>> = calls.iter().map(|_| None).collect();
        let mut left: Vec<usize> = (0..calls.len()).collect();
        let mut pending = calls;
        let why = loop {
            if pending.is_empty() {
                break None;
            }
            let error = match self.once(&mut |c| c.call(&pending, MAX_VALUE)) {
                Ok(answers) => {
                    let mut error = None;
                    let (mut again, mut calls) = (Vec::new(), Vec::new());
                    for ((at, call), answer) in left.drain(..).zip(pending.drain(..)).zip(answers) {
                        if let Some((code, why)) = busy(&answer) {
                            error = Some(self.refused(code, why));
                            again.push(at);
                            calls.push(call);
                        } else {
                            results[at] = Some(answer);
                        }
                    }
                    (left, pending) = (again, calls);
                    match error {
                        Some(error) => error,
                        None => break None,
                    }
                }
                Err(error) => match self.lost(&error) {
                    Ok(error) => error,
                    Err(error) => break Some(error),
                },
            };
            if let Err(error) = retries.pause(error) {
                break Some(error);
            }
        };
        let results = results.into_iter().map(|answer| match (answer, &why) {
            (Some(Answer::Error(code, why)), _) => Err(self.refused(code, &why)),
            (Some(answer), _) => Ok(answer),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(self.strange()),
        });
        results.collect()
    }

    /// An answer that is an error.
    fn refused(&self, code: u32, why: &str) -> DeviceError {
        let why: String = why.chars().take(300).collect();
        let text = format!("{}: {why}", self.text);
        match code {
            code if is_busy(code) => DeviceError::Unavailable(text),
            BAD_CREDENTIALS | UNAUTHORIZED => {
                DeviceError::Unavailable(format!("{text} ({PASSWORDS})"))
            }
            _ => DeviceError::Io(Arc::new(io::Error::other(text))),
        }
    }

    fn strange(&self) -> DeviceError {
        let text = format!("{}: the server answered something else", self.text);
        DeviceError::Io(Arc::new(io::Error::other(text)))
    }

    /// Makes the table, and waits until this is known to the servers that are asked.
    fn make_table(&self) -> Result<(), DeviceError> {
        let (keyspace, table) = (&self.table.keyspace, &self.table.table);
        let make = format!(
            "CREATE TABLE IF NOT EXISTS \"{keyspace}\".\"{table}\" (key text PRIMARY KEY, tag text, value blob) WITH comment = 'a disk of drover'"
        );
        self.query(&make)?;
        for _ in 0..MAX_LOOKS {
            let call = Call::new(Statement::Look, vec![Bytes::from_static(b"disk")]);
            match self.each(vec![call]).pop() {
                Some(Err(error)) if is_absent(&error) => std::thread::sleep(PAUSE * 4),
                Some(answer) => return answer.map(drop),
                None => break,
            }
        }
        Err(DeviceError::Unavailable(format!(
            "{}: the servers do not agree on the new table",
            self.text
        )))
    }
}

/// Executes a statement at a server, for tests.
///
/// # Errors
/// Those of the connection, and what the server says against it.
#[cfg(feature = "testing")]
pub fn cassandra_query(host: &str, port: u16, text: &str) -> io::Result<()> {
    let table = CassandraTable {
        hosts: Vec::new(),
        tls: false,
        user: None,
        password_file: None,
        keyspace: String::new(),
        table: String::new(),
    };
    match Connection::open(&table, &(host.to_owned(), port))?.query(text)? {
        Answer::Error(_, why) => Err(io::Error::other(why)),
        _ => Ok(()),
    }
}

/// How often, and for how long, something is tried.
struct Retries {
    limit: Duration,
    began: Option<Instant>,
    pause: Duration,
}

impl Retries {
    /// Waits before another try.
    ///
    /// # Errors
    /// The error, if it is not tried any more.
    fn pause(&mut self, error: DeviceError) -> Result<(), DeviceError> {
        let began = *self.began.get_or_insert_with(Instant::now);
        if began.elapsed() + self.pause > self.limit {
            return Err(error);
        }
        std::thread::sleep(self.pause.mul_f64(0.5 + fastrand::f64() / 2.0));
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        Ok(())
    }
}

const BAD_CREDENTIALS: u32 = 0x0100;
const UNAUTHORIZED: u32 = 0x2100;
const INVALID: u32 = 0x2200;
const UNPREPARED: u32 = 0x2500;

/// Whether an error says that it could not be done at the moment, or perhaps was done: the server failed, too few servers of the
/// row are there, it has too much to do, it starts, or the others have not answered in time.
fn is_busy(code: u32) -> bool {
    matches!(
        code,
        0x0000
            | 0x1000
            | 0x1001
            | 0x1002
            | 0x1003
            | 0x1100
            | 0x1200
            | 0x1300
            | 0x1500
            | 0x1700
            | UNPREPARED
    )
}

fn busy(answer: &Answer) -> Option<(u32, &str)> {
    match answer {
        Answer::Error(code, why) if is_busy(*code) => Some((*code, why)),
        _ => None,
    }
}

/// Whether an error says that there is no such table.
fn is_absent(error: &DeviceError) -> bool {
    let text = error.to_string();
    matches!(error, DeviceError::Io(_))
        && (text.contains("unconfigured table") || text.contains("does not exist"))
}

/// What a keyspace with this replication promises, on servers that write their log as `commitlog_sync` says.
fn promise(replication: &[(String, String)], durable: bool, sync: Option<&str>) -> Promise {
    let copies = replication.iter().filter(|(key, _)| key != "class");
    let copies = copies.filter_map(|(_, copies)| copies.split('/').next()?.parse::<u32>().ok());
    let lost = match sync {
        _ if !durable => Some(
            "the keyspace has no log (durable_writes false): what was written shortly before is lost when a majority of its servers end",
        ),
        Some("batch" | "group") => None,
        Some(_) => Some(
            "a loss of power of a majority of its servers loses what was flushed in the seconds before (commitlog_sync periodic)",
        ),
        None => Some(
            "the servers do not say whether what was flushed survives a loss of power of a majority of them",
        ),
    };
    let single = (copies.sum::<u32>() == 1)
        .then_some("the keyspace keeps one copy (replication factor 1): a server that is lost loses a part of the disk");
    let notes: Vec<&str> = lost.into_iter().chain(single).collect();
    Promise {
        is_durable: lost.is_none(),
        note: (!notes.is_empty()).then(|| notes.join("; ")),
    }
}

fn text(key: &str) -> Bytes {
    Bytes::copy_from_slice(key.as_bytes())
}

impl ChunkStore for CassandraStore {
    fn get(&self, wanted: &[Wanted]) -> Each<Option<Bytes>> {
        let call = |wanted: &Wanted| Call::new(Statement::Get, vec![text(&wanted.key)]);
        let answers = self.each(wanted.iter().map(call).collect());
        let part = |(wanted, answer): (&Wanted, Result<Answer, DeviceError>)| {
            let Answer::Rows(mut rows, _) = answer? else {
                return Err(self.strange());
            };
            let value = rows.pop().and_then(|mut row| row.pop()).flatten();
            Ok(value.map(|value| {
                let length = value.len() as u64;
                let end = wanted.range.end.min(length);
                value.slice(wanted.range.start.min(end) as usize..end as usize)
            }))
        };
        wanted.iter().zip(answers).map(part).collect()
    }

    fn put(&self, values: Vec<(String, Bytes)>) -> Each<()> {
        let calls = values
            .into_iter()
            .map(|(key, value)| Call::new(Statement::Put, vec![text(&key), value]));
        let answers = self.each(calls.collect()).into_iter();
        answers.map(|answer| answer.map(drop)).collect()
    }

    fn remove(&self, keys: &[String]) -> Result<(), DeviceError> {
        let calls = keys
            .iter()
            .map(|key| Call::new(Statement::Remove, vec![text(key)]));
        let mut answers = self.each(calls.collect()).into_iter();
        answers.try_for_each(|answer| answer.map(drop))
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(&str)) -> Result<(), DeviceError> {
        let mut call = Call::new(Statement::List, Vec::new());
        for _ in 0..MAX_PAGES {
            let answer = match self.each(vec![call.clone()]).pop() {
                Some(Err(error)) if is_absent(&error) => return Ok(()),
                Some(answer) => answer?,
                None => return Err(self.strange()),
            };
            let Answer::Rows(rows, next) = answer else {
                return Err(self.strange());
            };
            for row in rows {
                let key = row.into_iter().next().flatten().unwrap_or_default();
                if let Ok(key) = std::str::from_utf8(&key)
                    && key.starts_with(prefix)
                {
                    each(key);
                }
            }
            if next.is_none() {
                return Ok(());
            }
            call.page = next;
        }
        let text = format!("{}: a listing of keys does not end", self.text);
        Err(DeviceError::Io(Arc::new(io::Error::other(text))))
    }

    fn look(&self, key: &str, most: usize) -> Result<Option<(Bytes, Tag)>, DeviceError> {
        let call = Call::new(Statement::Look, vec![text(key)]);
        let rows = match self.each(vec![call]).pop() {
            Some(Err(error)) if is_absent(&error) => return Ok(None),
            Some(answer) => match answer? {
                Answer::Rows(rows, _) => rows,
                _ => return Err(self.strange()),
            },
            None => return Err(self.strange()),
        };
        match rows.into_iter().next().as_deref() {
            None | Some([None, None]) => Ok(None),
            Some([tag, Some(value)]) if value.len() <= most => {
                let tag = tag.as_ref().map(|tag| String::from_utf8_lossy(tag));
                let etag = tag.map(std::borrow::Cow::into_owned);
                let version = None;
                Ok(Some((value.clone(), Tag { etag, version })))
            }
            _ => Err(self.strange()),
        }
    }

    fn swap(&self, key: &str, was: Option<&Tag>, value: Bytes) -> Result<Option<Tag>, DeviceError> {
        let new = format!("{:032x}", u128::from_le_bytes(random()?));
        let call = match was {
            None => Call::new(Statement::Make, vec![text(key), text(&new), value]),
            Some(was) => {
                let was = text(was.etag.as_deref().unwrap_or_default());
                Call::new(Statement::Swap, vec![text(&new), value, text(key), was])
            }
        };
        let calls = [call];
        let mut is_made = false;
        loop {
            let answers = self.once(&mut |c| c.call(&calls, MAX_VALUE)).map_err(|e| {
                self.idle.lock().clear();
                self.away(&e)
            })?;
            match answers.into_iter().next() {
                Some(Answer::Rows(rows, _)) => {
                    // The first column says whether it was done.
                    let first = rows.first().and_then(|row| row.first());
                    return match first.and_then(|applied| applied.as_deref()) {
                        Some([1]) => Ok(Some(Tag {
                            etag: Some(new),
                            version: None,
                        })),
                        Some([0]) => Ok(None),
                        _ => Err(self.strange()),
                    };
                }
                Some(Answer::Error(code, why)) => {
                    let error = self.refused(code, &why);
                    if code != INVALID || !is_absent(&error) {
                        return Err(error);
                    }
                    if was.is_some() {
                        return Ok(None);
                    }
                    if is_made {
                        return Err(error);
                    }
                    self.make_table()?;
                    is_made = true;
                }
                _ => return Err(self.strange()),
            }
        }
    }

    fn no_tag(&self) -> Tag {
        Tag {
            etag: Some("none".into()),
            version: None,
        }
    }

    fn settle(&self) -> Result<(), DeviceError> {
        // A majority has what was acknowledged, as safe as its log is.
        Ok(())
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
