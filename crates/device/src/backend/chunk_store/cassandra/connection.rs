//! A connection to a server of a cluster.

use std::io::{self, BufReader, Write};
use std::path::PathBuf;

use bytes::Bytes;

use super::frame::{self, Answer, Request, op};
use crate::backend::chunk_store::address::CassandraTable;
use crate::backend::chunk_store::socket::{Stream, small_file};

/// Requests under way on a connection.
const MAX_UNDER_WAY: usize = 128;
/// Bytes of an answer that has no value of the disk.
const MAX_SMALL: usize = 1 << 20;
/// Keys in a page of a listing.
const PAGE: i32 = 1000;

/// How many servers have to answer: a majority of those that have a row.
const QUORUM: u16 = 4;
/// The same, and no conditional write may be under way.
const SERIAL: u16 = 8;

/// What is asked of a disk's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statement {
    /// The value of a key.
    Get,
    /// Writes it.
    Put,
    /// Removes it.
    Remove,
    /// All keys.
    List,
    /// The value of a key that is written by conditions, with its tag.
    Look,
    /// Writes it if there is none.
    Make,
    /// Writes it if it has a tag.
    Swap,
}

impl Statement {
    const ALL: usize = 7;

    fn text(self, table: &str) -> String {
        match self {
            Statement::Get => format!("SELECT value FROM {table} WHERE key = ?"),
            Statement::Put => format!("INSERT INTO {table} (key, value) VALUES (?, ?)"),
            Statement::Remove => format!("DELETE FROM {table} WHERE key = ?"),
            Statement::List => format!("SELECT key FROM {table}"),
            Statement::Look => format!("SELECT tag, value FROM {table} WHERE key = ?"),
            Statement::Make => {
                format!("INSERT INTO {table} (key, tag, value) VALUES (?, ?, ?) IF NOT EXISTS")
            }
            Statement::Swap => {
                format!("UPDATE {table} SET tag = ?, value = ? WHERE key = ? IF tag = ?")
            }
        }
    }
}

/// A statement with its values.
#[derive(Debug, Clone)]
pub struct Call {
    /// The statement.
    pub statement: Statement,
    /// Its values, in order.
    pub values: Vec<Bytes>,
    /// The page of a listing; none for the first.
    pub page: Option<Bytes>,
}

impl Call {
    /// Of these values.
    pub fn new(statement: Statement, values: Vec<Bytes>) -> Call {
        Call {
            statement,
            values,
            page: None,
        }
    }
}

/// A connection; after an error it is of no use.
pub struct Connection {
    stream: BufReader<Stream>,
    table: String,
    prepared: [Option<Bytes>; Statement::ALL],
}

fn denied(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

impl Connection {
    /// Connects to a server, and says who this is.
    ///
    /// # Errors
    /// Those of the connection; `PermissionDenied` with what the server says.
    pub fn open(to: &CassandraTable, (host, port): &(String, u16)) -> io::Result<Connection> {
        let mut connection = Connection {
            stream: BufReader::with_capacity(64 << 10, Stream::open(host, *port, to.tls)?),
            table: format!("\"{}\".\"{}\"", to.keyspace, to.table),
            prepared: Default::default(),
        };
        let startup = Request::new(op::STARTUP, 0).short(1);
        let startup = startup.string(b"CQL_VERSION").string(b"3.0.0");
        let answer = match connection.ask(startup)? {
            Answer::Authenticate => {
                let (user, password) = credentials(to)?;
                let said = [b"\0", user.as_bytes(), b"\0", password.as_bytes()].concat();
                connection.ask(Request::new(op::AUTH_RESPONSE, 0).value(&said))?
            }
            answer => answer,
        };
        match answer {
            Answer::Ready | Answer::Authenticated => Ok(connection),
            Answer::Error(_, why) => Err(denied(&why)),
            _ => Err(strange()),
        }
    }

    /// Asks, and waits for the answer.
    fn ask(&mut self, request: Request) -> io::Result<Answer> {
        let stream = self.stream.get_mut();
        stream.write_all(&request.bytes())?;
        stream.flush()?;
        frame::answer(&frame::read(&mut self.stream, MAX_SMALL)?)
    }

    /// The answer to a statement that is not prepared.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn query(&mut self, text: &str) -> io::Result<Answer> {
        let request = Request::new(op::QUERY, 0).value(text.as_bytes());
        self.ask(request.short(1).byte(0))
    }

    /// Prepares a statement; none if it is prepared, or what the server says against it.
    fn prepare(&mut self, statement: Statement) -> io::Result<Option<Answer>> {
        if self.prepared[statement as usize].is_some() {
            return Ok(None);
        }
        let text = statement.text(&self.table);
        match self.ask(Request::new(op::PREPARE, 0).value(text.as_bytes()))? {
            Answer::Prepared(name) => {
                self.prepared[statement as usize] = Some(name);
                Ok(None)
            }
            Answer::Error(code, why) => Ok(Some(Answer::Error(code, why))),
            _ => Err(strange()),
        }
    }

    /// Sends calls of one statement, many at a time; their answers, in order, have at most `most` bytes.
    ///
    /// # Errors
    /// Those of the connection; any of them may have been done.
    pub fn call(&mut self, calls: &[Call], most: usize) -> io::Result<Vec<Answer>> {
        let Some(first) = calls.first() else {
            return Ok(Vec::new());
        };
        if let Some(refused) = self.prepare(first.statement)? {
            return Ok(calls.iter().map(|_| refused.clone()).collect());
        }
        let mut answers: Vec<Option<Answer>> = calls.iter().map(|_| None).collect();
        // Which call the reply with a number is of.
        let mut under_way: Vec<Option<usize>> = vec![None; MAX_UNDER_WAY.min(calls.len())];
        let (mut sent, mut got) = (0, 0);
        while got < calls.len() {
            let free = under_way.iter().position(Option::is_none);
            if let Some(stream) = free.filter(|_| sent < calls.len()) {
                under_way[stream] = Some(sent);
                let bytes = self.execute(&calls[sent], stream)?;
                self.stream.get_mut().write_all(&bytes)?;
                sent += 1;
                continue;
            }
            self.stream.get_mut().flush()?;
            let frame = frame::read(&mut self.stream, most.saturating_add(MAX_SMALL))?;
            let slot = usize::try_from(frame.stream).ok();
            let slot = slot.and_then(|stream| under_way.get_mut(stream));
            let of = slot.and_then(Option::take).ok_or_else(strange)?;
            answers[of] = Some(frame::answer(&frame)?);
            got += 1;
        }
        answers.into_iter().map(|a| a.ok_or_else(strange)).collect()
    }

    fn execute(&self, call: &Call, stream: usize) -> io::Result<Vec<u8>> {
        let name = self.prepared[call.statement as usize].as_ref();
        let name = name.ok_or_else(strange)?;
        let (is_list, is_look) = (
            call.statement == Statement::List,
            call.statement == Statement::Look,
        );
        let (values, pages, next) = (1, if is_list { 4 } else { 0 }, call.page.is_some());
        let flags = values | pages | if next { 8 } else { 0 };
        let stream = i16::try_from(stream).map_err(|_| strange())?;
        let mut request = Request::new(op::EXECUTE, stream)
            .string(name)
            .short(if is_look { SERIAL } else { QUORUM })
            .byte(flags)
            .short(u16::try_from(call.values.len()).map_err(|_| strange())?);
        for value in &call.values {
            request = request.value(value);
        }
        if is_list {
            request = request.int(PAGE);
        }
        if let Some(page) = &call.page {
            request = request.value(page);
        }
        Ok(request.bytes())
    }
}

fn strange() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the server answered something else",
    )
}

/// The name and the password: from the URL and its file, or from where `cqlsh` looks for them.
fn credentials(to: &CassandraTable) -> io::Result<(String, String)> {
    if let (Some(user), Some(path)) = (&to.user, &to.password_file) {
        let text = small_file(path)?;
        let password = text.lines().next().unwrap_or_default();
        return Ok((user.clone(), password.to_owned()));
    }
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let path = home.unwrap_or_default().join(".cassandra/credentials");
    let text = match small_file(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(denied("the server wants a name and a password"));
        }
        text => text?,
    };
    let value = |key: &str| {
        let mut section = "";
        text.lines().find_map(|line| {
            if let Some(name) = line.trim().strip_prefix('[') {
                section = name.strip_suffix(']').unwrap_or_default();
            }
            let (name, value) = line.split_once('=')?;
            let is_it = section == "PlainTextAuthProvider" && name.trim() == key;
            is_it.then(|| value.trim().to_owned())
        })
    };
    let user = to.user.clone().or_else(|| value("username"));
    match (user, value("password")) {
        (Some(user), Some(password)) => Ok((user, password)),
        _ => Err(denied(&format!(
            "{} has no username and password in [PlainTextAuthProvider]",
            path.display()
        ))),
    }
}
