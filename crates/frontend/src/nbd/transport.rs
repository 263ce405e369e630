//! The byte stream of a connection, plain or TLS.

use std::io::{self, IoSlice};
use std::sync::Arc;

use super::socket::Socket;
use super::tls::TlsStream;

/// A connection's byte stream.
pub(super) enum Transport {
    Plain(Arc<Socket>),
    Tls(Box<TlsStream>),
}

impl Transport {
    pub(super) fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.socket(),
        }
    }

    /// Some bytes; 0 at the end. For one thread at a time.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.receive(buffer),
            Self::Tls(stream) => stream.receive(buffer),
        }
    }

    /// Some or all bytes of a payload, with few system calls; 0 at the end. For one thread at a time.
    pub(super) fn receive_payload(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.receive_whole(buffer),
            Self::Tls(stream) => stream.receive(buffer),
        }
    }

    /// Whether data is probably available.
    pub(super) fn has_more(&self) -> bool {
        self.socket().has_more()
    }

    /// All of it. For one thread at a time.
    pub(super) fn send(&self, slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.send(slices),
            Self::Tls(stream) => stream.send(slices),
        }
    }

    /// Ends the stream, with notice to the peer.
    pub(super) fn finish(&self) {
        if let Self::Tls(stream) = self {
            stream.close_notify();
        }
        self.socket().finish();
    }
}
