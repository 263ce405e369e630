//! A stream socket on which nothing waits longer than asked: Unix or TCP.

use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, sockopt,
};

use super::address::NbdSocket;

/// Send buffer of a Unix socket (bytes; the system may allow less): a write of 1 MiB fits at once.
const SEND_BUFFER: usize = 1 << 20;
/// Pause between two attempts when a server's queue of connections is full.
const PAUSE: Duration = Duration::from_millis(10);

/// A stream socket: one thread receives, one at a time sends, both at once.
pub struct Socket(OwnedFd);

/// Time left, at least a millisecond, or an error.
fn left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left.max(Duration::from_millis(1))),
    }
}

impl Socket {
    /// Connects.
    ///
    /// # Errors
    /// The system's, with what was being done; `TimedOut` at the deadline.
    pub fn connect(to: &NbdSocket, deadline: Instant) -> io::Result<Self> {
        let connected = match to {
            NbdSocket::Unix(path) => connect_unix(path, deadline),
            NbdSocket::Tcp(host, port) => connect_tcp(host, *port, deadline),
        };
        connected.map(Self).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut => e,
            kind => io::Error::new(kind, format!("cannot connect: {e}")),
        })
    }

    fn wait(&self, flags: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
        loop {
            let limit = match deadline {
                None => None,
                Some(deadline) => Some(Timespec::try_from(left(deadline)?).unwrap_or(Timespec {
                    tv_sec: i64::MAX,
                    tv_nsec: 0,
                })),
            };
            match poll(&mut [PollFd::new(&self.0, flags)], limit.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn receive(&self, buffer: &mut [u8], flags: RecvFlags) -> rustix::io::Result<usize> {
        loop {
            match net::recv(&self.0, &mut *buffer, flags) {
                Ok((count, _)) => return Ok(count),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends all of `slices`.
    ///
    /// # Errors
    /// The system's; `TimedOut` at the deadline: it is then unknown how much was sent.
    pub fn send(&self, mut slices: &mut [IoSlice<'_>], deadline: Instant) -> io::Result<()> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let mut none = SendAncillaryBuffer::default();
            match net::sendmsg(&self.0, slices, &mut none, flags) {
                Ok(count) => IoSlice::advance_slices(&mut slices, count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, Some(deadline))?,
                Err(error) => return Err(error.into()),
            }
            // However slowly the server takes it.
            left(deadline)?;
        }
        Ok(())
    }

    /// Ends both directions, which wakes every thread that waits for it.
    pub fn cut(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Both);
    }
}

/// Receives for as long as it takes; whoever cannot wait cuts the connection.
impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.receive(buffer, RecvFlags::empty())?)
    }
}

/// A socket during the negotiation, which has one deadline.
pub struct Until<'a>(pub &'a Socket, pub Instant);

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.0.wait(PollFlags::IN, Some(self.1))?;
            match self.0.receive(buffer, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => {}
                received => return Ok(received?),
            }
        }
    }
}

impl Write for Until<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.send(&mut [IoSlice::new(buffer)], self.1)?;
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn connect_unix(path: &Path, deadline: Instant) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Failure only costs speed. TCP adapts its buffer itself.
    let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER);
    loop {
        match net::connect(&socket, &address) {
            Ok(()) => break,
            // The server's queue of connections is full.
            Err(Errno::AGAIN) => std::thread::sleep(left(deadline)?.min(PAUSE)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

fn connect_tcp(host: &str, port: u16, deadline: Instant) -> io::Result<OwnedFd> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => {
                // Failure only costs speed, or delays the detection of a dead server.
                let _ = stream.set_nodelay(true);
                let _ = sockopt::set_socket_keepalive(&stream, true);
                return Ok(stream.into());
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}
