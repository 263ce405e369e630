//! A stream socket: one thread receives, one at a time sends, both at once.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendFlags};

/// Send buffer of a Unix socket (bytes; the system may allow less): a 1 MiB reply fits at once, where the default of
/// 208 KiB makes sender and receiver wait for each other in turns.
const SEND_BUFFER: usize = 1 << 20;

/// A stream socket, unix or TCP.
pub(super) struct Socket(OwnedFd);

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        // Failure only costs speed. TCP adapts its buffer itself.
        let _ = sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER);
        Self(stream.into())
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        // Failure only costs speed, or delays the detection of a dead peer.
        let _ = stream.set_nodelay(true);
        let _ = sockopt::set_socket_keepalive(&stream, true);
        Self(stream.into())
    }
}

impl Socket {
    /// How long one receive may wait; then it fails with `WouldBlock`. Zero means the minimum.
    pub(super) fn receive_within(&self, limit: Duration) -> io::Result<()> {
        self.limit(Timeout::Recv, limit)
    }

    /// How long one send may make no progress; then it fails with `WouldBlock`.
    pub(super) fn send_within(&self, limit: Duration) -> io::Result<()> {
        self.limit(Timeout::Send, limit)
    }

    fn limit(&self, which: Timeout, limit: Duration) -> io::Result<()> {
        let limit = limit.max(Duration::from_millis(1));
        Ok(sockopt::set_socket_timeout(&self.0, which, Some(limit))?)
    }

    /// Some bytes; 0 at the end.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive_with(buffer, RecvFlags::empty())
    }

    fn receive_with(&self, buffer: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        loop {
            match net::recv(&self.0, &mut *buffer, flags) {
                Ok((count, _)) => return Ok(count),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// As many bytes as fit, or those received before the timeout; 0 at the end.
    pub(super) fn receive_whole(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive_with(buffer, RecvFlags::WAITALL)
    }

    /// All of it.
    pub(super) fn send(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let mut none = SendAncillaryBuffer::default();
            match net::sendmsg(&self.0, slices, &mut none, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut slices, count),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether data is probably available.
    pub(super) fn has_more(&self) -> bool {
        rustix::io::ioctl_fionread(&self.0).is_ok_and(|bytes| bytes > 0)
    }

    /// The receiver sees end of stream; unreceived data may be lost.
    pub(super) fn stop_receiving(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Read);
    }

    /// Shuts down both directions, which wakes blocked threads.
    pub(super) fn cut(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Both);
    }

    /// Ends the sending direction, and discards what the peer still sends: closing with unread bytes would reset a TCP
    /// connection, and lose replies in flight.
    pub(super) fn finish(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Write);
        let mut scrap = [0; 16 << 10];
        for _ in 0..64 {
            match net::recv(&self.0, &mut scrap, RecvFlags::DONTWAIT) {
                Ok((1.., _)) => {}
                _ => break,
            }
        }
    }
}
