//! An open connection, whatever carries it.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

use crate::frame::{FrameReader, FrameWriter, MAX_FRAME};
use crate::{PeerKey, tls};

/// Bytes on the socket, encryption and handshake included.
#[derive(Debug, Default)]
pub struct WireCounters {
    /// Bytes handed to the kernel.
    pub sent: AtomicU64,
    /// Bytes taken from the kernel.
    pub received: AtomicU64,
    /// See [`crate::FrameWriter::keep_little_unsent`]; taken by the stream at its next write.
    pub(crate) keep_little_unsent: AtomicBool,
}

impl WireCounters {
    /// Bytes sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// Bytes received so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }
}

/// Bytes that the kernel takes beyond what the path takes now, and that TLS holds before it, where little is to stand
/// there: a large frame.
const LITTLE_UNSENT: u32 = 32 << 10;
const LITTLE_HELD: usize = 64 << 10;

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

/// What carries the frames.
pub(crate) enum Stream {
    Tls(Box<TlsStream<Counted<TcpStream>>>),
    Unix(Counted<UnixStream>),
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stream::Tls(_) => "Tls",
            Stream::Unix(_) => "Unix",
        })
    }
}

/// Passes a call on to whichever stream this is.
macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Tls(s) => {
                let $stream = Pin::new(s.as_mut());
                $call
            }
            Stream::Unix(s) => {
                let $stream = Pin::new(s);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, s => s.poll_read(cx, buf))
    }
}

impl Stream {
    /// Does what [`crate::FrameWriter::keep_little_unsent`] asked for.
    fn obey(&mut self) {
        let Stream::Tls(tls) = self else { return };
        let counted = tls.get_ref().0;
        if !counted.wire.keep_little_unsent.swap(false, Relaxed) {
            return;
        }
        // Without it things only wait longer.
        let _ = SockRef::from(&counted.io).set_tcp_notsent_lowat(LITTLE_UNSENT);
        let limit = Some(LITTLE_HELD);
        match tls.as_mut() {
            TlsStream::Client(s) => s.get_mut().1.set_buffer_limit(limit),
            TlsStream::Server(s) => s.get_mut().1.set_buffer_limit(limit),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.obey();
        either!(self, s => s.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.obey();
        either!(self, s => s.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, s => s.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, s => s.poll_shutdown(cx))
    }
}

/// A socket that counts its bytes.
#[derive(Debug)]
pub(crate) struct Counted<S> {
    io: S,
    wire: Arc<WireCounters>,
}

impl<S> Counted<S> {
    pub(crate) fn new(io: S, wire: Arc<WireCounters>) -> Self {
        Counted { io, wire }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.io).poll_read(cx, buf);
        let n = buf.filled().len() - before;
        self.wire.received.fetch_add(n as u64, Relaxed);
        result
    }
}

impl<S: AsyncWrite + Unpin> Counted<S> {
    fn count(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(n)) = &result {
            self.wire.sent.fetch_add(*n as u64, Relaxed);
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(cx, buf);
        self.count(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.count(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
