//! The store that a vault at a peer is: requests over connections that may be lost, repeated until they are answered.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use super::wire::{
    Answer, Ask, Frame, MAX_DATA, MAX_PUT_BYTES, MAX_READ_BYTES, WireError, decode, encode, is_key,
    kind,
};
use crate::error::StoreError;
use crate::objects::{Listed, Objects};

/// Most objects of a list.
const MAX_OBJECTS: usize = 8 << 20;
/// Most bytes of memory of a list.
const MAX_LIST_BYTES: usize = 1 << 30;
/// Connections that are kept for later.
const MAX_IDLE: usize = 2;

/// Why a connection cannot be made, or is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkError {
    /// In one line.
    pub why: String,
    /// Whether another one may do better.
    pub can_retry: bool,
}

impl From<WireError> for LinkError {
    fn from(error: WireError) -> Self {
        LinkError {
            why: error.to_string(),
            can_retry: false,
        }
    }
}

/// A connection to a peer on which its vault is open. Blocking.
pub trait Link: Send {
    /// Sends frames.
    ///
    /// # Errors
    /// That the connection is lost.
    fn send(&mut self, frames: Vec<Frame>) -> Result<(), LinkError>;

    /// The next frame.
    ///
    /// # Errors
    /// That the connection is lost, or nothing comes.
    fn next(&mut self) -> Result<Frame, LinkError>;
}

/// Makes connections to a peer.
pub trait Connect: Send + Sync {
    /// A connection, on which the peer has opened its vault.
    ///
    /// # Errors
    /// When there is none, or the peer refuses.
    fn connect(&self) -> Result<Box<dyn Link>, LinkError>;

    /// What the vault is called, for messages.
    fn describe(&self) -> String;
}

/// How long is waited for a peer.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the first answer ever: a peer that is not there is said soon.
    pub first: Duration,
    /// For an answer of a peer that has answered before.
    pub later: Duration,
    /// The first pause; each is twice as long.
    pub pause: Duration,
    /// The longest one.
    pub max_pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            first: Duration::from_secs(3),
            later: Duration::from_secs(180),
            pause: Duration::from_millis(100),
            max_pause: Duration::from_secs(5),
        }
    }
}

/// The objects of a vault at a peer.
pub struct PeerObjects {
    connect: Box<dyn Connect>,
    idle: Mutex<Vec<Box<dyn Link>>>,
    patience: Patience,
    has_answered: AtomicBool,
}

/// What came of a request.
enum Answered {
    Found(Bytes),
    Listed(Vec<Listed>),
    Said(Answer),
}

impl PeerObjects {
    /// The vault of a peer. Connects when it is used.
    #[must_use]
    pub fn new(connect: Box<dyn Connect>, patience: Patience) -> Self {
        PeerObjects {
            connect,
            idle: Mutex::default(),
            patience,
            has_answered: AtomicBool::new(false),
        }
    }

    fn error(&self, doing: &'static str, key: &str, why: impl Into<String>) -> StoreError {
        StoreError {
            doing,
            key: key.to_owned(),
            vault: self.describe(),
            why: why.into(),
            can_retry: false,
            is_damage: false,
        }
    }

    /// Asks once, on a connection that is there or a new one.
    fn once(&self, ask: &Ask, data: &Bytes) -> Result<Answered, LinkError> {
        let idle = self.idle.lock().pop();
        let mut link = match idle {
            Some(link) => link,
            None => self.connect.connect()?,
        };
        let parts = data
            .chunks(MAX_DATA)
            .map(|part| (kind::DATA, data.slice_ref(part)));
        let frames = std::iter::once(encode(kind::ASK, ask)).chain(parts);
        link.send(frames.collect())?;
        let mut asking = Asking::new(ask);
        let answered = loop {
            let (kind, payload) = link.next()?;
            if let Some(answered) = asking.frame(kind, payload)? {
                break answered;
            }
        };
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(link);
        }
        Ok(answered)
    }

    /// Asks until there is an answer; whether it was asked more than once.
    fn ask(
        &self,
        (doing, key): (&'static str, &str),
        ask: &Ask,
        data: &Bytes,
    ) -> Result<(Answered, bool), StoreError> {
        if !is_key(key) {
            return Err(self.error(doing, key, "it is no key"));
        }
        let limit = match self.has_answered.load(Ordering::Relaxed) {
            true => self.patience.later,
            false => self.patience.first,
        };
        let (mut pause, mut began, mut again) = (self.patience.pause, None, false);
        loop {
            let error = match self.once(ask, data) {
                Ok(Answered::Said(Answer::Failed {
                    why,
                    can_retry,
                    is_damage,
                })) => {
                    self.has_answered.store(true, Ordering::Relaxed);
                    let error = StoreError {
                        can_retry,
                        is_damage,
                        ..self.error(doing, key, clean(&why))
                    };
                    if !can_retry {
                        return Err(error);
                    }
                    error
                }
                Ok(answered) => {
                    self.has_answered.store(true, Ordering::Relaxed);
                    return Ok((answered, again));
                }
                Err(error) if !error.can_retry => {
                    return Err(self.error(doing, key, error.why));
                }
                Err(error) => StoreError {
                    can_retry: true,
                    ..self.error(doing, key, error.why)
                },
            };
            // Those that are kept may have been lost with it.
            self.idle.lock().clear();
            let began = *began.get_or_insert_with(Instant::now);
            if began.elapsed() + pause > limit {
                return Err(error);
            }
            tracing::debug!("{error}; it is tried again");
            std::thread::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0));
            pause = (pause * 2).min(self.patience.max_pause);
            again = true;
        }
    }

    fn strange(&self, doing: &'static str, key: &str) -> StoreError {
        self.error(doing, key, "the peer has answered something else")
    }

    fn part(&self, key: &str, from: u64, len: u32) -> Result<Option<Bytes>, StoreError> {
        let ask = Ask::Read {
            key: key.to_owned(),
            from,
            len,
        };
        match self.ask(("read", key), &ask, &Bytes::new())?.0 {
            Answered::Found(bytes) => Ok(Some(bytes)),
            Answered::Said(Answer::Nothing) => Ok(None),
            _ => Err(self.strange("read", key)),
        }
    }
}

/// A peer's words as one line.
fn clean(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(500)
        .collect()
}

/// The end that asks: frames in, an answer out.
struct Asking {
    /// Of a read: how much was asked for.
    len: usize,
    listed: Option<Vec<Listed>>,
    /// What those take in memory.
    bytes: usize,
    prefix: String,
}

impl Asking {
    fn new(ask: &Ask) -> Self {
        let (len, prefix) = match ask {
            Ask::Read { len, .. } => (*len as usize, None),
            Ask::List { prefix } => (0, Some(prefix)),
            Ask::Create { .. } | Ask::Remove { .. } => (0, None),
        };
        Asking {
            len,
            listed: prefix.map(|_| Vec::new()),
            bytes: 0,
            prefix: prefix.map_or_else(String::new, |prefix| format!("{prefix}/")),
        }
    }

    fn frame(&mut self, kind: u8, payload: Bytes) -> Result<Option<Answered>, WireError> {
        match kind {
            kind::FOUND if payload.len() <= self.len && self.listed.is_none() => {
                Ok(Some(Answered::Found(payload)))
            }
            kind::ANSWER => match (decode::<Answer>(&payload)?, &mut self.listed) {
                (Answer::Some(some), Some(listed)) => {
                    let bytes = some.iter().map(|(key, ..)| key.len() + size_of::<Listed>());
                    self.bytes += bytes.sum::<usize>();
                    let fits = |key: &str| key.starts_with(&self.prefix) && is_key(key);
                    if some.is_empty()
                        || self.bytes > MAX_LIST_BYTES
                        || some.len() > MAX_OBJECTS - listed.len()
                        || some.iter().any(|(key, ..)| !fits(key))
                    {
                        return Err(WireError("a list is wrong, or too long"));
                    }
                    listed.extend(some.into_iter().map(|(key, size, modified_ms)| Listed {
                        key,
                        size,
                        modified_ms,
                    }));
                    Ok(None)
                }
                (Answer::Listed, Some(listed)) => {
                    Ok(Some(Answered::Listed(std::mem::take(listed))))
                }
                (Answer::Some(_) | Answer::Listed, None) => {
                    Err(WireError("it was asked for no list"))
                }
                (answer, _) => Ok(Some(Answered::Said(answer))),
            },
            _ => Err(WireError("a frame is of another kind, or too long")),
        }
    }
}

/// Bytes of a peer, whatever it was asked: for fuzzers.
#[cfg(fuzzing)]
pub fn asking_for_fuzzing(ask: &Ask, frames: &[(u8, Bytes)]) {
    let mut asking = Asking::new(ask);
    for (kind, payload) in frames {
        match asking.frame(*kind, payload.clone()) {
            Ok(None) => {}
            Ok(Some(Answered::Found(bytes))) => assert!(bytes.len() <= asking.len),
            Ok(Some(_)) | Err(_) => return,
        }
    }
}

impl Objects for PeerObjects {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        let len = match u32::try_from(bytes.len()) {
            Ok(len) if len <= MAX_PUT_BYTES => len,
            _ => return Err(self.error("write", key, "it is longer than a peer takes (32 MiB)")),
        };
        let ask = Ask::Create {
            key: key.to_owned(),
            len,
        };
        let (answered, again) = self.ask(("write", key), &ask, &bytes)?;
        match answered {
            // It may be there by the request that was not answered.
            Answered::Said(Answer::Created(false)) if again => {
                let found = self.get_range(key, 0..u64::from(len) + 1)?;
                Ok(found.as_ref() == Some(&bytes))
            }
            Answered::Said(Answer::Created(created)) => Ok(created),
            _ => Err(self.strange("write", key)),
        }
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        self.get_range(key, 0..u64::MAX)
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        let (mut at, mut out) = (range.start, Vec::new());
        loop {
            let wanted = range.end.saturating_sub(at).min(u64::from(MAX_READ_BYTES)) as u32;
            let Some(part) = self.part(key, at, wanted)? else {
                return Ok(None);
            };
            at += part.len() as u64;
            let is_last = (part.len() as u32) < wanted || at >= range.end;
            if is_last && out.is_empty() {
                return Ok(Some(part));
            }
            out.extend_from_slice(&part);
            if out.len() > MAX_GET {
                return Err(self.error("read", key, "it is longer than an object can be"));
            }
            if is_last {
                return Ok(Some(out.into()));
            }
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let ask = Ask::List {
            prefix: prefix.to_owned(),
        };
        match self.ask(("list", prefix), &ask, &Bytes::new())?.0 {
            Answered::Listed(listed) => Ok(listed),
            _ => Err(self.strange("list", prefix)),
        }
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        let ask = Ask::Remove {
            key: key.to_owned(),
        };
        match self.ask(("remove", key), &ask, &Bytes::new())?.0 {
            Answered::Said(Answer::Removed) => Ok(()),
            _ => Err(self.strange("remove", key)),
        }
    }

    fn describe(&self) -> String {
        self.connect.describe()
    }
}

/// The longest object that is read as a whole.
const MAX_GET: usize = 256 << 20;
