//! What goes wrong with a server, and what a device says of it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use drover_core::DeviceError;
use drover_core::nbd::{WireError, command, errno, reply};

/// The longest part of a server's message that is shown (bytes).
const MAX_MESSAGE: usize = 512;

/// Why a server's export cannot be opened. Each variant names the server.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// There is no connection to it, or it broke or stalled before the export was open.
    #[error("{server}: {source}")]
    Unreachable {
        /// The server and export.
        server: String,
        /// Why.
        source: io::Error,
    },
    /// It does not keep the protocol.
    #[error("{server}: {source}")]
    Protocol {
        /// The server and export.
        server: String,
        /// What is wrong with what it sent.
        source: WireError,
    },
    /// It refuses.
    #[error("{server}: {why}")]
    Refused {
        /// The server and export.
        server: String,
        /// Why, and the server's own words.
        why: String,
    },
    /// It does not have a metadata context, such as a dirty bitmap.
    #[error("{server}: the server does not offer {context}; export it with that name")]
    NoContext {
        /// The server and export.
        server: String,
        /// The context.
        context: String,
    },
}

impl NbdError {
    /// Whether the same attempt may succeed later: the server was not reached, or went away.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// What ends a negotiation or a connection.
#[derive(Debug)]
pub enum Fault {
    /// The connection broke, or a deadline passed.
    Io(io::Error),
    /// The server does not keep the protocol.
    Wire(WireError),
    /// The server refuses.
    Refused(String),
    /// The server does not have this metadata context.
    NoContext(String),
}

impl Fault {
    /// The error of an attempt to open an export.
    pub fn of(self, server: String) -> NbdError {
        match self {
            Self::Io(source) => NbdError::Unreachable { server, source },
            Self::Wire(source) => NbdError::Protocol { server, source },
            Self::Refused(why) => NbdError::Refused { server, why },
            Self::NoContext(context) => NbdError::NoContext { server, context },
        }
    }

    /// What every request of a connection fails with from now on. It is not transient, as there is no second connection.
    pub fn ended(self, server: &str) -> DeviceError {
        let (kind, why) = match self {
            Self::Wire(error) => (io::ErrorKind::InvalidData, error.to_string()),
            Self::Io(error) => (io::ErrorKind::ConnectionAborted, error.to_string()),
            Self::Refused(why) | Self::NoContext(why) => (io::ErrorKind::ConnectionAborted, why),
        };
        let text = format!("{server}: {why}; the connection has ended, open it again");
        DeviceError::Io(Arc::new(io::Error::new(kind, text)))
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        Self::Io(match error.kind() {
            kind @ (BrokenPipe | ConnectionReset | UnexpectedEof) => {
                io::Error::new(kind, "the server closed the connection")
            }
            _ => error,
        })
    }
}

impl From<WireError> for Fault {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// The error of a server that has said nothing for so long.
pub fn silent(limit: Duration) -> io::Error {
    let text = format!("no answer within {} s", limit.as_secs_f32());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// A server's words, fit to be shown.
fn shown(message: &[u8]) -> String {
    let text = String::from_utf8_lossy(message).replace(char::is_control, " ");
    text[..text.floor_char_boundary(MAX_MESSAGE)].trim().into()
}

/// `why`, with the server's words if it has some.
fn with(why: &str, message: &[u8]) -> String {
    match shown(message) {
        said if said.is_empty() => why.into(),
        said => format!("{why} ({said})"),
    }
}

/// A refused option.
pub fn refused(kind: u32, message: &[u8], export: &str) -> Fault {
    let unknown;
    let why = match kind {
        reply::ERR_UNSUP => "the server is too old: it needs NBD_OPT_GO",
        reply::ERR_TLS_REQD => "the server requires TLS, which is not supported",
        reply::ERR_SHUTDOWN => {
            let why = with("the server is shutting down", message);
            return Fault::Io(io::Error::new(io::ErrorKind::ConnectionAborted, why));
        }
        reply::ERR_UNKNOWN if export.is_empty() => {
            "the server has no default export; name one (`nbdinfo --list` shows them)"
        }
        reply::ERR_UNKNOWN => {
            "the server has no export of this name (`nbdinfo --list` shows those that it has)"
        }
        reply::ERR_POLICY => "the server's configuration does not allow it",
        _ => {
            unknown = format!("the server refused (error {kind:#x})");
            &unknown
        }
    };
    Fault::Refused(with(why, message))
}

/// A request that the server could not do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// One of [`errno`], or another number.
    pub number: u32,
    /// The server's words; may be empty.
    pub message: Vec<u8>,
}

impl Failure {
    /// What the device says of it.
    pub fn of(&self, server: &str, command: u16) -> DeviceError {
        let (what, changes) = match command {
            command::READ => ("read", false),
            command::WRITE => ("write", true),
            command::FLUSH => ("flush", false),
            command::TRIM => ("trim", true),
            command::WRITE_ZEROES => ("write of zeros", true),
            _ => ("block status", false),
        };
        let io = |kind, why: &str| {
            let text = format!("{server}: {what} failed: {}", with(why, &self.message));
            DeviceError::Io(Arc::new(io::Error::new(kind, text)))
        };
        match self.number {
            errno::EPERM if changes => DeviceError::ReadOnly,
            errno::EPERM => io(io::ErrorKind::PermissionDenied, "not permitted"),
            errno::EIO => io(io::ErrorKind::Other, "input or output error"),
            errno::EINVAL => io(io::ErrorKind::InvalidInput, "invalid request"),
            errno::ENOSPC => DeviceError::NoSpace(format!("{server} is full")),
            errno::ENOTSUP => DeviceError::Unsupported(format!("do this {what}").into()),
            errno::ENOMEM => DeviceError::Unavailable(format!("{server} is short of memory")),
            errno::ESHUTDOWN => io(
                io::ErrorKind::ConnectionAborted,
                "the server is shutting down",
            ),
            number => io(io::ErrorKind::Other, &format!("error {number}")),
        }
    }
}
