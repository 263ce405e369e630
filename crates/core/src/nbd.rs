//! The NBD protocol's bytes (the NBD project's `doc/proto.md`), for the server in `frontend` and the client in `device`:
//! numbers, and what both ends read and write.
//!
//! Parsers take a peer's input, check every length before reading on, and never allocate more than the input.

/// The TCP port of servers.
pub const PORT: u16 = 10809;

/// `NBDMAGIC`, at the start of a connection.
pub const GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, at the start of every option.
pub const OPTION: u64 = 0x4948_4156_454f_5054;
/// Magic of a reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Magic of a request.
pub const REQUEST: u32 = 0x2560_9513;
/// Magic of a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Magic of a chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Maximum read or write (bytes): what the protocol guarantees without negotiation.
pub const MAX_REQUEST: u32 = 32 << 20;
/// The coarsest alignment that the protocol allows (bytes).
pub const COARSEST_ALIGNMENT: u32 = 64 << 10;

/// Maximum length of a name, description, context or message (bytes).
pub const MAX_STRING: usize = 4096;
/// Length of a request (bytes).
pub const REQUEST_BYTES: usize = 28;
/// Length of an option's header (bytes).
pub const OPTION_BYTES: usize = 16;
/// Length of a simple reply's header (bytes).
pub const SIMPLE_BYTES: usize = 16;
/// Length of a chunk's header (bytes).
pub const CHUNK_BYTES: usize = 20;

/// Flags of the greeting and of the client's reply.
pub mod handshake {
    /// The negotiation continues after a refused option.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// No 124 zero bytes after `EXPORT_NAME`.
    pub const NO_ZEROES: u32 = 2;
}

/// Options.
pub mod option {
    /// Chooses an export and ends the negotiation; old style.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the negotiation.
    pub const ABORT: u32 = 2;
    /// Lists the exports.
    pub const LIST: u32 = 3;
    /// Changes to TLS.
    pub const STARTTLS: u32 = 5;
    /// Asks about an export.
    pub const INFO: u32 = 6;
    /// Asks about an export and begins transmission.
    pub const GO: u32 = 7;
    /// Asks for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod reply {
    /// The option is done.
    pub const ACK: u32 = 1;
    /// An export of the list.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context and its id.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// Not allowed by the server's configuration.
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    /// Invalid option data.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// TLS is required first.
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    /// Unknown export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = 1 << 31 | 7;
    /// The client must ask for block sizes.
    pub const ERR_BLOCK_SIZE_REQD: u32 = 1 << 31 | 8;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Information types of `INFO` and `GO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Name of the export.
    pub const NAME: u16 = 1;
    /// Text about the export.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export.
pub mod transmission {
    /// The flags are valid; always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The flag `FUA` is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag `DF` is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// Connections see each other's writes, and a flush covers all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The flag `FAST_ZERO` is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests.
pub mod command {
    /// Reads a range.
    pub const READ: u16 = 0;
    /// Writes a range.
    pub const WRITE: u16 = 1;
    /// Ends the connection.
    pub const DISCONNECT: u16 = 2;
    /// Makes completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Discards a range.
    pub const TRIM: u16 = 4;
    /// Reads a range ahead, without a reply of data.
    pub const CACHE: u16 = 5;
    /// Writes zeros to a range.
    pub const WRITE_ZEROES: u16 = 6;
    /// Asks for the extents of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod flag {
    /// The write is durable before the reply.
    pub const FUA: u16 = 1;
    /// Zeros stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The data of a read comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeros only if faster than writing them.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of a structured reply.
pub mod chunk {
    /// Nothing; ends a reply.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// A hole at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// The flag of all kinds of errors.
    pub const ERRORS: u16 = 1 << 15;
    /// An error number and a message.
    pub const ERROR: u16 = ERRORS | 1;
    /// The flag of the last chunk.
    pub const DONE: u16 = 1;
}

/// `base:allocation`: flags of an extent.
pub mod allocation {
    /// Name of the context.
    pub const NAME: &str = "base:allocation";
    /// The context id chosen by the server.
    pub const ID: u32 = 1;
    /// The extent takes no space.
    pub const HOLE: u32 = 1;
    /// The extent reads as zeros.
    pub const ZERO: u32 = 2;
}

/// Errors of requests.
pub mod errno {
    /// Not permitted: the export is read-only.
    pub const EPERM: u32 = 1;
    /// Input or output error.
    pub const EIO: u32 = 5;
    /// No memory.
    pub const ENOMEM: u32 = 12;
    /// Invalid request.
    pub const EINVAL: u32 = 22;
    /// No space left.
    pub const ENOSPC: u32 = 28;
    /// Not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is shutting down.
    pub const ESHUTDOWN: u32 = 108;
}

/// The peer's input is not NBD; the connection cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A wrong magic number.
    #[error("this is not NBD: no {0} magic")]
    Magic(&'static str),
    /// A field is too long or truncated, or bytes are left over.
    #[error("malformed {0}")]
    Malformed(&'static str),
}

/// Reads big-endian numbers and counted bytes from a peer's input; what is not there is `None`.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// The next number of 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next number of 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next number of 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A name: counted, at most [`MAX_STRING`] long, UTF-8 without NUL.
    pub fn string(&mut self) -> Option<&'a str> {
        let count = self.u32()? as usize;
        if count > MAX_STRING {
            return None;
        }
        name(self.bytes(count)?)
    }
}

/// A name or a context, if valid: UTF-8 without NUL, at most [`MAX_STRING`] long.
#[must_use]
pub fn name(bytes: &[u8]) -> Option<&str> {
    if bytes.len() > MAX_STRING || bytes.contains(&0) {
        return None;
    }
    std::str::from_utf8(bytes).ok()
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Of [`flag`].
    pub flags: u16,
    /// One of [`command`], or an unknown one.
    pub command: u16,
    /// Identifies the reply to the client.
    pub cookie: u64,
    /// Start of the range (bytes).
    pub offset: u64,
    /// Length of the range (bytes).
    pub length: u32,
}

impl Request {
    /// Reads one.
    ///
    /// # Errors
    /// [`WireError::Magic`].
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let magic = fields.u32();
        let parsed = (|| {
            Some(Self {
                flags: fields.u16()?,
                command: fields.u16()?,
                cookie: fields.u64()?,
                offset: fields.u64()?,
                length: fields.u32()?,
            })
        })();
        match parsed {
            Some(request) if magic == Some(REQUEST) => Ok(request),
            _ => Err(WireError::Magic("request")),
        }
    }

    /// Bytes of payload that follow.
    #[must_use]
    pub fn payload(&self) -> u32 {
        match self.command {
            command::WRITE => self.length,
            _ => 0,
        }
    }

    /// Whether `flag` is set.
    #[must_use]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Its encoding, as a client sends it.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// Appends a reply to an option.
pub fn option_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_REPLY.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(length as u32).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// A simple reply; `error` is 0 or one of [`errno`].
#[must_use]
pub fn simple_reply(cookie: u64, error: u32) -> [u8; SIMPLE_BYTES] {
    let mut bytes = [0; SIMPLE_BYTES];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The head of a chunk of a structured reply with `length` bytes of data.
#[must_use]
pub fn chunk_head(cookie: u64, kind: u16, done: bool, length: u32) -> [u8; CHUNK_BYTES] {
    let mut bytes = [0; CHUNK_BYTES];
    let flags = if done { chunk::DONE } else { 0 };
    bytes[..4].copy_from_slice(&STRUCTURED_REPLY.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&length.to_be_bytes());
    bytes
}
