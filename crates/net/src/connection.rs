//! An open connection, whatever carries it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

use crate::frame::{FrameReader, FrameWriter, MAX_FRAME};
use crate::stream::{Counted, Stream, WireCounters};
use crate::{PeerKey, tls};

/// A connection to a peer: authenticated TLS over TCP, or a Unix socket.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Option<PeerKey>,
    local_user: Option<u32>,
    remote: Arc<str>,
    wire: Arc<WireCounters>,
    max_frame: usize,
    round_trip: Option<Duration>,
}

impl Connection {
    pub(crate) fn tls(
        mut stream: TlsStream<Counted<TcpStream>>,
        peer: PeerKey,
        remote: String,
        max_frame: usize,
    ) -> Self {
        let limit = Some(tls::SEND_BUFFER);
        match &mut stream {
            TlsStream::Client(s) => s.get_mut().1.set_buffer_limit(limit),
            TlsStream::Server(s) => s.get_mut().1.set_buffer_limit(limit),
        }
        let wire = stream.get_ref().0.wire.clone();
        Connection {
            stream: Stream::Tls(Box::new(stream)),
            peer: Some(peer),
            local_user: None,
            remote: remote.into(),
            wire,
            max_frame,
            round_trip: None,
        }
    }

    /// A connection over a Unix socket that is already open; `remote` names the other end.
    #[must_use]
    pub fn from_unix(stream: UnixStream, remote: impl Into<String>) -> Self {
        let wire = Arc::new(WireCounters::default());
        Connection {
            local_user: stream.peer_cred().ok().map(|c| c.uid()),
            stream: Stream::Unix(Counted::new(stream, wire.clone())),
            peer: None,
            remote: remote.into().into(),
            wire,
            max_frame: MAX_FRAME,
            round_trip: None,
        }
    }

    /// Two ends of one connection inside this process, without TLS. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// What the system reports, which is a lack of file descriptors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = UnixStream::pair()?;
        Ok((
            Self::from_unix(a, "one end"),
            Self::from_unix(b, "other end"),
        ))
    }

    /// The key whose possession the other end proved; `None` on a Unix socket.
    #[must_use]
    pub fn peer(&self) -> Option<PeerKey> {
        self.peer
    }

    /// The user at the other end of a Unix socket, as the kernel knows them.
    #[must_use]
    pub fn local_user(&self) -> Option<u32> {
        self.local_user
    }

    /// The other end, for people: an address, or a name and an address.
    #[must_use]
    pub fn remote(&self) -> &str {
        &self.remote
    }

    /// How long the other end took to answer the first packet; `None` where that was not measured:
    /// on the accepting side and on Unix sockets.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    pub(crate) fn with_round_trip(mut self, time: Duration) -> Self {
        self.round_trip = Some(time);
        self
    }

    /// The bytes that crossed the socket; still counts after [`Connection::split`].
    #[must_use]
    pub fn wire(&self) -> Arc<WireCounters> {
        self.wire.clone()
    }

    /// The two directions. They may live in different tasks; the socket closes when both are
    /// dropped (see [`crate::close`] for how to do that without losing bytes).
    ///
    /// A reader takes frames up to [`crate::MAX_FRAME`], but on an accepted TLS connection up to
    /// [`crate::MAX_FRAME_BEFORE_TRUST`] until [`FrameReader::set_max_frame`] says that the
    /// peer's key is a known one.
    #[must_use]
    pub fn split(self) -> (FrameReader, FrameWriter) {
        let (read, write) = tokio::io::split(self.stream);
        (
            FrameReader::new(read, self.remote.clone(), self.max_frame),
            FrameWriter::new(write, self.remote, self.wire),
        )
    }
}
