//! The bytes under the frames: TLS over TCP, or a Unix socket, counted.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

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
    pub(crate) wire: Arc<WireCounters>,
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
