//! Replies of the transmission phase: a parser of what a server sends, over any stream.
//!
//! Nothing is allocated that a request did not ask for, and a reply is accepted only whole: every byte of a read comes
//! exactly once.

use std::collections::HashMap;
use std::io::Read;

use drover_core::nbd::{
    CHUNK_BYTES, Fields, MAX_STRING, Request, SIMPLE_BYTES, SIMPLE_REPLY, STRUCTURED_REPLY,
    WireError, chunk, command,
};
use roaring::RoaringBitmap;

use super::error::{Failure, Fault};

/// Maximum extents in a reply, of all contexts: QEMU sends at most 128 Ki for each context, nbdkit 1 Mi.
const MAX_EXTENTS: usize = 2 << 20;
/// Maximum size of the extents of a reply (bytes).
pub const MAX_STATUS_BYTES: u64 = MAX_EXTENTS as u64 * 8;
/// Maximum length of an error chunk (bytes): numbers and a message.
const MAX_ERROR: u32 = MAX_STRING as u32 + 64;

/// The extents of one context: its number, and lengths with flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The server's number of the context.
    pub id: u32,
    /// Lengths, none of them zero, and flags: at least one.
    pub runs: Vec<(u32, u32)>,
}

/// What a request gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// Of a read: as long as was asked for.
    pub data: Vec<u8>,
    /// Of a block status: at most one for each context.
    pub status: Vec<Status>,
}

/// The end of a request.
pub type Outcome = Result<Content, Failure>;

/// A reply of which more chunks come.
#[derive(Default)]
struct Partial {
    content: Content,
    /// Bytes of a read that have come, from its offset.
    filled: RoaringBitmap,
    failure: Option<Failure>,
}

/// The replies of one connection.
pub struct Replies {
    structured: bool,
    /// The numbers of the contexts.
    contexts: Vec<u32>,
    partial: HashMap<u64, Partial>,
}

/// The head of a chunk.
struct Chunk {
    flags: u16,
    kind: u16,
    length: u32,
}

fn malformed(what: &'static str) -> Fault {
    Fault::Wire(WireError::Malformed(what))
}

impl Replies {
    /// The replies of a connection with or without structured replies, and with these contexts.
    pub fn new(structured: bool, contexts: Vec<u32>) -> Self {
        Self {
            structured,
            contexts,
            partial: HashMap::new(),
        }
    }

    /// Reads a reply or a chunk of one; `find` knows the requests in flight. Returns a request that is done, by its
    /// cookie.
    pub fn next(
        &mut self,
        input: &mut impl Read,
        find: impl FnOnce(u64) -> Option<Request>,
    ) -> Result<Option<(u64, Outcome)>, Fault> {
        let mut head = [0; SIMPLE_BYTES];
        input.read_exact(&mut head)?;
        let mut fields = Fields(&head);
        let magic = fields.u32();
        // The error of a simple reply; flags and kind of a chunk.
        let (Some(word), Some(cookie)) = (fields.u32(), fields.u64()) else {
            return Err(malformed("reply"));
        };
        let find = || find(cookie).ok_or(malformed("reply: to no request"));
        match magic {
            Some(SIMPLE_REPLY) => {
                let request = find()?;
                if self.partial.contains_key(&cookie) {
                    return Err(malformed("reply: simple after chunks"));
                }
                self.simple(input, &request, word)
                    .map(|outcome| Some((cookie, outcome)))
            }
            Some(STRUCTURED_REPLY) if self.structured => {
                let mut length = [0; CHUNK_BYTES - SIMPLE_BYTES];
                input.read_exact(&mut length)?;
                let chunk = Chunk {
                    flags: (word >> 16) as u16,
                    kind: word as u16,
                    length: u32::from_be_bytes(length),
                };
                let request = find()?;
                let mut partial = self.partial.remove(&cookie).unwrap_or_default();
                partial.chunk(input, &request, &chunk, &self.contexts)?;
                if chunk.flags & chunk::DONE != 0 {
                    return Ok(Some((cookie, partial.end(&request)?)));
                }
                self.partial.insert(cookie, partial);
                Ok(None)
            }
            _ => Err(WireError::Magic("reply").into()),
        }
    }

    fn simple(
        &self,
        input: &mut impl Read,
        request: &Request,
        error: u32,
    ) -> Result<Outcome, Fault> {
        if error != 0 {
            return Ok(Err(Failure {
                number: error,
                message: Vec::new(),
            }));
        }
        let mut content = Content::default();
        match request.command {
            command::READ if !self.structured => {
                content.data = vec![0; request.length as usize];
                input.read_exact(&mut content.data)?;
            }
            command::READ | command::BLOCK_STATUS => {
                return Err(malformed("reply: simple instead of structured"));
            }
            _ => {}
        }
        Ok(Ok(content))
    }
}

impl Partial {
    fn chunk(
        &mut self,
        input: &mut impl Read,
        request: &Request,
        chunk: &Chunk,
        contexts: &[u32],
    ) -> Result<(), Fault> {
        let length = chunk.length;
        match (chunk.kind, request.command) {
            (chunk::NONE, _) if length == 0 && chunk.flags & chunk::DONE != 0 => Ok(()),
            (chunk::OFFSET_DATA, command::READ) if length > 8 => {
                let offset = array(input).map(u64::from_be_bytes)?;
                let range = self.fill(request, offset, length - 8)?;
                Ok(input.read_exact(&mut self.content.data[range])?)
            }
            (chunk::OFFSET_HOLE, command::READ) if length == 12 => {
                let offset = array(input).map(u64::from_be_bytes)?;
                let length = array(input).map(u32::from_be_bytes)?;
                // What was not there yet is zeros.
                self.fill(request, offset, length).map(drop)
            }
            (chunk::BLOCK_STATUS, command::BLOCK_STATUS)
                if length % 8 == 4 && self.has_room(length / 8) =>
            {
                let id = array(input).map(u32::from_be_bytes)?;
                let had = self.content.status.iter().any(|status| status.id == id);
                if had || !contexts.contains(&id) {
                    return Err(malformed("block status: of another context"));
                }
                let runs = runs(input, length / 8)?;
                self.content.status.push(Status { id, runs });
                Ok(())
            }
            (kind, _) if kind & chunk::ERRORS != 0 && (6..=MAX_ERROR).contains(&length) => {
                let mut data = vec![0; length as usize];
                input.read_exact(&mut data)?;
                let mut fields = Fields(&data);
                let failure = match (fields.u32(), fields.u16()) {
                    (Some(number @ 1..), Some(count)) => fields
                        .bytes(usize::from(count))
                        .map(|message| (number, message)),
                    _ => None,
                };
                let (number, message) = failure.ok_or(malformed("error"))?;
                self.failure.get_or_insert(Failure {
                    number,
                    message: message.into(),
                });
                Ok(())
            }
            _ => Err(malformed("chunk of a reply")),
        }
    }

    /// Whether `count` more extents, at least one, are not too many.
    fn has_room(&self, count: u32) -> bool {
        let had: usize = self.content.status.iter().map(|s| s.runs.len()).sum();
        count > 0 && had + count as usize <= MAX_EXTENTS
    }

    /// The place of `length` bytes at `offset` of the device in the data of a read, where nothing has come yet.
    fn fill(
        &mut self,
        request: &Request,
        offset: u64,
        length: u32,
    ) -> Result<std::ops::Range<usize>, Fault> {
        let outside = malformed("chunk of a read: outside of it, or sent twice");
        let from = offset
            .checked_sub(request.offset)
            .and_then(|from| u32::try_from(from).ok());
        let to = from.and_then(|from| from.checked_add(length));
        let (Some(from), Some(to @ 1..)) = (from, to) else {
            return Err(outside);
        };
        if length == 0
            || to > request.length
            || self.filled.insert_range(from..to) != u64::from(length)
        {
            return Err(outside);
        }
        if self.content.data.is_empty() {
            self.content.data = vec![0; request.length as usize];
        }
        Ok(from as usize..to as usize)
    }

    fn end(self, request: &Request) -> Result<Outcome, Fault> {
        if let Some(failure) = self.failure {
            return Ok(Err(failure));
        }
        let whole = match request.command {
            command::READ => self.filled.len() == u64::from(request.length),
            command::BLOCK_STATUS => !self.content.status.is_empty(),
            _ => true,
        };
        match whole {
            true => Ok(Ok(self.content)),
            false => Err(malformed("reply: something is missing")),
        }
    }
}

fn array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn runs(input: &mut impl Read, count: u32) -> Result<Vec<(u32, u32)>, Fault> {
    let mut runs = Vec::new();
    let mut buffer = [0; 8 << 10];
    let mut left = count as usize * 8;
    while left > 0 {
        let part = &mut buffer[..left.min(8 << 10)];
        input.read_exact(part)?;
        left -= part.len();
        let (pairs, _) = part.as_chunks::<8>();
        runs.extend(pairs.iter().map(|[a, b, c, d, e, f, g, h]| {
            let length = u32::from_be_bytes([*a, *b, *c, *d]);
            (length, u32::from_be_bytes([*e, *f, *g, *h]))
        }));
    }
    match runs.iter().any(|(length, _)| *length == 0) {
        true => Err(malformed("block status: an empty extent")),
        false => Ok(runs),
    }
}
