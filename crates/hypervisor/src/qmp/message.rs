//! Messages of QMP: JSON objects one after the other, cut out of the stream and taken apart.
//!
//! Both are total: any bytes are messages or an error, in time linear in their number and with bounded memory.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::Value;

use crate::error::{ErrorClass, one_line};

/// The longest message that is read, in bytes. The longest of a real QEMU, its schema, has a twentieth of it.
pub const MAX_MESSAGE: usize = 4 << 20;

/// The longest event that is kept, in bytes; a longer one is left out.
pub const MAX_EVENT: usize = 8 << 10;

/// What is not QMP, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAMessage(pub String);

impl fmt::Display for NotAMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Cuts a stream into objects, whether each is a line or (`pretty=on`) many.
#[derive(Debug)]
pub struct Splitter {
    bytes: Vec<u8>,
    /// Where in `bytes` the message begins that is not complete.
    begin: usize,
    /// Up to here `bytes` has been looked at.
    seen: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    limit: usize,
}

impl Splitter {
    /// A stream of which nothing has been read, with messages of at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Splitter {
            bytes: Vec::new(),
            begin: 0,
            seen: 0,
            depth: 0,
            in_string: false,
            escaped: false,
            limit,
        }
    }

    /// More of the stream. Take all messages with [`Self::next`] before the next call.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.begin);
        self.seen -= self.begin;
        self.begin = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete object, or `None` until more has arrived.
    ///
    /// # Errors
    /// [`NotAMessage`] when something else than an object begins, or one is too long. The stream cannot be read on.
    #[expect(clippy::should_implement_trait, reason = "it ends only for now")]
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, NotAMessage> {
        while let Some(&byte) = self.bytes.get(self.seen) {
            if self.depth == 0 {
                self.begin = self.seen;
            }
            match (self.in_string, byte) {
                (true, _) if self.escaped => self.escaped = false,
                (true, b'\\') => self.escaped = true,
                (true, b'"') => self.in_string = false,
                (true, _) => {}
                (false, b'{') => self.depth += 1,
                (false, b' ' | b'\t' | b'\r' | b'\n') if self.depth == 0 => {
                    self.begin += 1;
                }
                (false, _) if self.depth == 0 => return Err(self.something_else()),
                (false, b'}') => self.depth -= 1,
                (false, b'"') => self.in_string = true,
                (false, _) => {}
            }
            self.seen += 1;
            if self.seen - self.begin > self.limit {
                return Err(NotAMessage(format!(
                    "a message is longer than {} bytes",
                    self.limit
                )));
            }
            if self.depth == 0 && self.begin < self.seen {
                let message = self.bytes[self.begin..self.seen].to_vec();
                self.begin = self.seen;
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    fn something_else(&self) -> NotAMessage {
        let text = String::from_utf8_lossy(
            &self.bytes[self.begin..(self.begin + 60).min(self.bytes.len())],
        );
        if text.starts_with("QEMU ") && text.contains("monitor") {
            return NotAMessage("it is QEMU's monitor for people".into());
        }
        NotAMessage(format!("it says {:?}", one_line(&text)))
    }
}

/// A message of QEMU.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The first one.
    Greeting(Greeting),
    /// The answer to the command with this number.
    Reply {
        /// The command's number.
        id: u64,
        /// What it returned, or an error.
        result: Result<Value, (ErrorClass, String)>,
    },
    /// Something happened.
    Event(Event),
}

/// What QEMU says first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Its version.
    pub version: Version,
    /// The distribution's version, or nothing.
    pub package: String,
    /// Whether commands can overtake others.
    pub out_of_band: bool,
}

/// A version of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Version {
    /// As 7 in 7.2.22.
    pub major: u32,
    /// As 2 in 7.2.22.
    pub minor: u32,
    /// As 22 in 7.2.22.
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// Something that happened in QEMU.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// As `STOP`.
    pub name: String,
    /// What the event says, an object, or `null`.
    pub data: Value,
    /// When it happened, by QEMU's host's clock.
    pub at: Option<SystemTime>,
}

#[derive(Deserialize)]
struct Wire {
    #[serde(rename = "QMP")]
    greeting: Option<WireGreeting>,
    #[serde(rename = "return")]
    returned: Option<Value>,
    error: Option<WireError>,
    id: Option<Value>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
    timestamp: Option<WireTime>,
}

#[derive(Deserialize)]
struct WireGreeting {
    version: WireVersion,
    #[serde(default)]
    capabilities: Vec<Value>,
}

#[derive(Deserialize)]
struct WireVersion {
    qemu: Version,
    #[serde(default)]
    package: String,
}

#[derive(Deserialize)]
struct WireError {
    class: String,
    desc: String,
}

#[derive(Deserialize)]
struct WireTime {
    seconds: i64,
    microseconds: i64,
}

/// Takes a message apart.
///
/// # Errors
/// [`NotAMessage`] when it is none of QMP.
pub fn parse(bytes: &[u8]) -> Result<Message, NotAMessage> {
    let wire: Wire =
        serde_json::from_slice(bytes).map_err(|e| NotAMessage(one_line(&e.to_string())))?;
    match wire {
        Wire {
            greeting: Some(greeting),
            returned: None,
            error: None,
            event: None,
            ..
        } => Ok(Message::Greeting(Greeting {
            version: greeting.version.qemu,
            package: one_line(&greeting.version.package),
            out_of_band: greeting.capabilities.iter().any(|one| one == "oob"),
        })),
        Wire {
            event: Some(name),
            greeting: None,
            returned: None,
            error: None,
            data,
            timestamp,
            ..
        } => Ok(Message::Event(Event {
            name,
            data,
            at: timestamp.and_then(|time| time.moment()),
        })),
        Wire {
            greeting: None,
            event: None,
            returned,
            error,
            id,
            ..
        } => {
            let result = match (returned, error) {
                (Some(value), None) => Ok(value),
                (None, Some(error)) => {
                    Err((ErrorClass::from_name(&error.class), one_line(&error.desc)))
                }
                _ => return Err(NotAMessage("a message without a meaning".into())),
            };
            match (id.as_ref().and_then(Value::as_u64), result) {
                (Some(id), result) => Ok(Message::Reply { id, result }),
                (None, Err((_, text))) => {
                    Err(NotAMessage(format!("an error of no command: {text}")))
                }
                (None, Ok(_)) => Err(NotAMessage("an answer to no command".into())),
            }
        }
        _ => Err(NotAMessage("a message with two meanings".into())),
    }
}

impl WireTime {
    /// The moment; QEMU says -1 when it does not know.
    fn moment(&self) -> Option<SystemTime> {
        let since = Duration::from_secs(u64::try_from(self.seconds).ok()?).checked_add(
            Duration::from_micros(u64::try_from(self.microseconds).ok()?),
        )?;
        SystemTime::UNIX_EPOCH.checked_add(since)
    }
}

#[cfg(test)]
mod tests;
