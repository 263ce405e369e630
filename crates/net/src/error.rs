//! Errors of connections, each one line that names the peer or the file.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::{Code, PeerKey, Refusal};

/// Why a connection could not be made or went wrong.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The address is not `HOST:PORT` or its name has no address.
    #[error("cannot find {peer}: {reason}")]
    Resolve {
        /// The peer that was looked for.
        peer: String,
        /// The resolver's message.
        reason: String,
    },
    /// No address of the peer accepted the connection.
    #[error("cannot reach {peer}: {reason}")]
    Unreachable {
        /// The peer that was tried.
        peer: String,
        /// The reason; one per address if there are several.
        reason: String,
    },
    /// The peer proved another key than the pinned one.
    #[error(
        "{peer} is not the site that was paired: it has the key {found}, expected {expected}; \
         if the site was made anew, pair with it again"
    )]
    WrongPeer {
        /// The peer that was tried.
        peer: String,
        /// The pinned key.
        expected: PeerKey,
        /// The key that was proven.
        found: PeerKey,
    },
    /// The TLS handshake failed: not a drover site, no key, another TLS version.
    #[error("no secure connection with {peer}: {reason}")]
    Handshake {
        /// The other end.
        peer: String,
        /// The TLS library's message.
        reason: String,
    },
    /// A timeout.
    #[error("{peer}: {what} took longer than {after:?}")]
    TimedOut {
        /// The other end.
        peer: String,
        /// The operation.
        what: &'static str,
        /// The timeout.
        after: Duration,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {reason}", reason = plain(source))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A Unix socket cannot be created or reached.
    #[error("{path}: {reason}", path = path.display())]
    Local {
        /// The socket's path.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The identity file cannot be used.
    #[error("identity {path}: {reason}", path = path.display())]
    Identity {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The connection broke.
    #[error("connection with {peer} broke while {doing}: {reason}", reason = plain(source))]
    Io {
        /// The other end.
        peer: String,
        /// `reading` or `writing`.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Another connection needed the slot of this one, which was still being set up.
    #[error(
        "{peer}: dropped while it was being set up: too many connections are, most of them from its address"
    )]
    Displaced {
        /// The other end.
        peer: String,
    },
    /// The stream ended without a proper end.
    #[error("connection with {peer} was closed unexpectedly")]
    Truncated {
        /// The other end.
        peer: String,
    },
    /// Something was sent after the end, or into a connection that broke inside a frame.
    #[error("connection with {peer} is no longer open for writing")]
    Closed {
        /// The other end.
        peer: String,
    },
    /// A frame longer than allowed here and now.
    #[error("{peer}: frame of {length} bytes where at most {limit} are allowed")]
    FrameTooLarge {
        /// The other end.
        peer: String,
        /// Its payload's length as claimed.
        length: u64,
        /// The limit.
        limit: usize,
    },
    /// The peer frames its messages in a way we do not know.
    #[error("{peer} speaks wire format {found}, this drover {ours}: upgrade the older of the two")]
    FrameVersion {
        /// The other end.
        peer: String,
        /// Its version of the frame format.
        found: u8,
        /// Ours.
        ours: u8,
    },
    /// A malformed frame, or one with a wrong checksum.
    #[error("{peer}: bad frame: {reason}")]
    FrameCorrupt {
        /// The other end.
        peer: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The two ends have no protocol version in common.
    #[error(
        "{peer} ({software}) speaks protocol {their_min} to {their_max}, this drover {our_min} to \
         {our_max}: upgrade {older}"
    )]
    Version {
        /// The other end.
        peer: String,
        /// Its program and version.
        software: String,
        /// The oldest protocol it speaks.
        their_min: u16,
        /// The newest protocol it speaks.
        their_max: u16,
        /// The oldest protocol we speak.
        our_min: u16,
        /// The newest protocol we speak.
        our_max: u16,
        /// Which end to upgrade.
        older: &'static str,
    },
    /// The first frame was not a drover hello.
    #[error("{peer} did not greet as a drover site: {reason}")]
    Hello {
        /// The other end.
        peer: String,
        /// What was wrong.
        reason: &'static str,
    },
    /// A message that does not decode.
    #[error("malformed {what}: {reason}")]
    Message {
        /// The type that was expected.
        what: &'static str,
        /// What the decoder said.
        reason: String,
    },
    /// The other end refused the request.
    #[error(transparent)]
    Refused(Refusal),
}

impl NetError {
    /// Whether retrying later can help.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            NetError::Refused(Refusal { retry: true, .. })
                | NetError::Resolve { .. }
                | NetError::Unreachable { .. }
                | NetError::TimedOut { .. }
                | NetError::Io { .. }
                | NetError::Displaced { .. }
                | NetError::Truncated { .. }
                | NetError::Closed { .. }
        )
    }

    /// Whether it is a refusal: a wrong or missing key, or a decision of the other end.
    #[must_use]
    pub fn refused(&self) -> bool {
        match self {
            NetError::WrongPeer { .. } | NetError::Handshake { .. } | NetError::Identity { .. } => {
                true
            }
            NetError::Refused(refusal) => refusal.code.is_decision(),
            _ => false,
        }
    }
}

/// An I/O error without the operating system's number and capital.
pub(crate) fn plain(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused".into(),
        io::ErrorKind::ConnectionReset => "connection reset by the other end".into(),
        io::ErrorKind::TimedOut => "timed out".into(),
        _ => {
            let text = e.to_string();
            match text.find(" (os error") {
                Some(at) => text[..at].to_lowercase(),
                None => text,
            }
        }
    }
}

impl From<NetError> for Refusal {
    fn from(error: NetError) -> Self {
        match error {
            NetError::Refused(refusal) => refusal,
            error => Refusal::new(Code::Protocol, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_without_numbers() {
        let e = NetError::Unreachable {
            peer: "lyon at 10.0.0.2:7777".into(),
            reason: plain(&io::Error::from_raw_os_error(111)),
        };
        assert_eq!(
            e.to_string(),
            "cannot reach lyon at 10.0.0.2:7777: connection refused"
        );
        assert_eq!(
            plain(&io::Error::from_raw_os_error(98)),
            "address already in use"
        );
        assert!(e.retryable() && !e.refused());
    }
}
