//! A stream socket: one thread receives, one at a time sends, both at once.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendFlags};

/// What a unix socket holds of what is sent (bytes, but never more than the system allows): a reply of 1 MiB goes in
/// one piece, where the usual 208 KiB make sender and receiver wait for each other by turns.
const SEND_BUFFER: usize = 1 << 20;

/// A stream socket, unix or TCP.
pub(super) struct Socket(OwnedFd);

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        // Without it, it is only slower. TCP finds its own measure.
        let _ = sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER);
        Self(stream.into())
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        // Without them it is only slower, or a dead peer is noticed later.
        let _ = stream.set_nodelay(true);
        let _ = sockopt::set_socket_keepalive(&stream, true);
        Self(stream.into())
    }
}

impl Socket {
    /// How long one receive may wait; then it fails with `WouldBlock`. Zero is taken as the shortest.
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

    /// As many bytes as there is room for, or those that came before the time was up; 0 at the end.
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

    /// Whether there is something to receive, as far as can be told.
    pub(super) fn has_more(&self) -> bool {
        rustix::io::ioctl_fionread(&self.0).is_ok_and(|bytes| bytes > 0)
    }

    /// The receiver sees the end, and what was not yet received may be lost.
    pub(super) fn stop_receiving(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Read);
    }

    /// Nothing more in either direction; whoever waits here wakes.
    pub(super) fn cut(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Both);
    }

    /// Tells the peer that no more comes. What it still sends is thrown away: closing with unread bytes would
    /// reset a TCP connection and with it replies that are on their way.
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
