//! The messages about the objects of a peer's vault, and the end that serves: frames in, tasks out, answers in frames.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::StoreError;
use crate::objects::{Listed, Objects};

/// Kinds of frames, beyond those of a call.
pub mod kind {
    /// What is asked for.
    pub const ASK: u8 = 0x10;
    /// A part of an object that is written.
    pub const DATA: u8 = 0x11;
    /// The answer, or a part of a list.
    pub const ANSWER: u8 = 0x12;
    /// The answer to a read: the bytes.
    pub const FOUND: u8 = 0x13;
}

/// The longest object that is written through a peer.
pub const MAX_PUT_BYTES: u32 = 32 << 20;
/// Most bytes that are read at once.
pub const MAX_READ_BYTES: u32 = 2 << 20;
/// Most bytes of a part of an object that is written.
pub(super) const MAX_DATA: usize = 1 << 20;
/// The longest key.
const MAX_KEY: usize = 1024;
/// The longest message that is no part of an object.
const MAX_MESSAGE: usize = 3 << 20;
/// Objects in a part of a list.
const MAX_LISTED: usize = 2048;
/// The longest reason of a failure.
const MAX_WHY: usize = 500;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// To write an object, unless its key exists. Its bytes follow.
    Create {
        /// Its key.
        key: String,
        /// Its length.
        len: u32,
    },
    /// Part of an object.
    Read {
        /// Its key.
        key: String,
        /// Where the part begins.
        from: u64,
        /// How long it is at most.
        len: u32,
    },
    /// The objects below a prefix.
    List {
        /// Whole components of a key.
        prefix: String,
    },
    /// To remove an object.
    Remove {
        /// Its key.
        key: String,
    },
}

/// What is answered. Bytes that were read come in a frame of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Whether it was written.
    Created(bool),
    /// There is no such object.
    Nothing,
    /// Some of a list: key, length, when it was written.
    Some(Vec<(String, u64, i64)>),
    /// All of the list has been said.
    Listed,
    /// It is removed, or was not there.
    Removed,
    /// It was not done, or may have been.
    Failed {
        /// Why.
        why: String,
        /// Whether it may work later.
        can_retry: bool,
        /// Whether the object is damaged.
        is_damage: bool,
    },
}

/// A frame: its kind, and its payload.
pub type Frame = (u8, Bytes);

/// The other end broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the other end of a vault's connection broke the protocol: {0}")]
pub struct WireError(pub &'static str);

pub(super) fn encode(kind: u8, message: &impl Serialize) -> Frame {
    let bytes = postcard::to_allocvec(message).expect("a message of plain types");
    (kind, bytes.into())
}

/// A message, with nothing after it.
pub(super) fn decode<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, WireError> {
    if payload.len() > MAX_MESSAGE {
        return Err(WireError("a message is too long"));
    }
    match postcard::take_from_bytes(payload) {
        Ok((message, [])) => Ok(message),
        _ => Err(WireError("a message cannot be read")),
    }
}

/// What is to be done for the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Task {
    /// [`Objects::create`].
    Create(String, Bytes),
    /// [`Objects::get_range`].
    Read(String, Range<u64>),
    /// [`Objects::list`].
    List(String),
    /// [`Objects::remove`].
    Remove(String),
}

/// The end that serves. One task at a time: the next frame is read when the answer was sent.
#[derive(Debug, Default)]
pub struct Serving {
    coming: Option<(String, usize, Vec<u8>)>,
}

impl Serving {
    /// Takes a frame; a task when one is complete.
    ///
    /// # Errors
    /// When the other end breaks the protocol: the connection ends.
    pub fn frame(&mut self, kind: u8, payload: &[u8]) -> Result<Option<Task>, WireError> {
        match (kind, self.coming.take()) {
            (kind::ASK, None) => self.ask(decode(payload)?),
            (kind::DATA, Some((key, len, mut bytes))) => {
                if payload.is_empty() || payload.len() > len - bytes.len() {
                    return Err(WireError("a part of an object is empty, or too long"));
                }
                bytes.extend_from_slice(payload);
                Ok(self.go_on(key, len, bytes))
            }
            _ => Err(WireError("a frame comes at the wrong time")),
        }
    }

    /// Bytes that are still to come of an object.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.coming
            .as_ref()
            .map_or(0, |(_, len, bytes)| len - bytes.len())
    }

    fn go_on(&mut self, key: String, len: usize, bytes: Vec<u8>) -> Option<Task> {
        if bytes.len() == len {
            return Some(Task::Create(key, bytes.into()));
        }
        self.coming = Some((key, len, bytes));
        None
    }

    fn ask(&mut self, ask: Ask) -> Result<Option<Task>, WireError> {
        let (Ask::Create { key, .. }
        | Ask::Read { key, .. }
        | Ask::List { prefix: key }
        | Ask::Remove { key }) = &ask;
        if !is_key(key) {
            return Err(WireError("a key is none"));
        }
        match ask {
            Ask::Create { len, .. } if len > MAX_PUT_BYTES => {
                Err(WireError("an object is too long"))
            }
            // Nothing is reserved for what may never come.
            Ask::Create { key, len } => Ok(self.go_on(key, len as usize, Vec::new())),
            Ask::Read { len, .. } if len > MAX_READ_BYTES => {
                Err(WireError("a part of an object is too long"))
            }
            Ask::Read { key, from, len } => {
                let end = from.saturating_add(u64::from(len));
                Ok(Some(Task::Read(key, from..end)))
            }
            Ask::List { prefix } => Ok(Some(Task::List(prefix))),
            Ask::Remove { key } => Ok(Some(Task::Remove(key))),
        }
    }
}

/// Whether a text can be a key, or whole components of one: no store is asked for another.
pub(super) fn is_key(key: &str) -> bool {
    let is_part = |part: &str| {
        let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'=');
        !part.is_empty() && !part.starts_with('.') && part.bytes().all(fine)
    };
    key.len() <= MAX_KEY && key.split('/').all(is_part)
}

impl Task {
    /// Does it; the frames of the answer.
    #[must_use]
    pub fn run(self, objects: &dyn Objects) -> Vec<Frame> {
        let answered = match self {
            Task::Create(key, bytes) => objects
                .create(&key, bytes)
                .map(|created| vec![encode(kind::ANSWER, &Answer::Created(created))]),
            Task::Read(key, range) => objects.get_range(&key, range).map(|found| match found {
                Some(bytes) => vec![(kind::FOUND, bytes)],
                None => vec![encode(kind::ANSWER, &Answer::Nothing)],
            }),
            Task::List(prefix) => objects.list(&prefix).map(|listed| list(&listed)),
            Task::Remove(key) => objects
                .remove(&key)
                .map(|()| vec![encode(kind::ANSWER, &Answer::Removed)]),
        };
        answered.unwrap_or_else(|error| vec![failed(&error)])
    }
}

fn list(listed: &[Listed]) -> Vec<Frame> {
    let some = |some: &[Listed]| {
        let some = some.iter().map(|o| (o.key.clone(), o.size, o.modified_ms));
        encode(kind::ANSWER, &Answer::Some(some.collect()))
    };
    let mut frames: Vec<Frame> = listed.chunks(MAX_LISTED).map(some).collect();
    frames.push(encode(kind::ANSWER, &Answer::Listed));
    frames
}

/// The answer that something is not permitted.
#[must_use]
pub fn refused(why: &str) -> Frame {
    failed(&StoreError {
        doing: "write",
        key: String::new(),
        vault: String::new(),
        why: why.to_owned(),
        can_retry: false,
        is_damage: false,
    })
}

/// Whether an answer says that an object was written.
#[must_use]
pub fn says_created(answer: &[Frame]) -> bool {
    answer == [encode(kind::ANSWER, &Answer::Created(true))]
}

/// The answer that something was not done. Where the vault is, is nobody's business.
fn failed(error: &StoreError) -> Frame {
    let line = error.why.chars();
    let why: String = line
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_WHY)
        .collect();
    encode(
        kind::ANSWER,
        &Answer::Failed {
            why,
            can_retry: error.can_retry,
            is_damage: error.is_damage,
        },
    )
}
