//! The subset of generic netlink that the kernel's NBD client needs: messages, attributes, a socket with a deadline.
//!
//! Everything is in native byte order, and headers and attributes are aligned to four bytes.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;
const NESTED: u16 = 1 << 15;
const TYPE_MASK: u16 = (1 << 14) - 1;
const REQUEST_ACK: u16 = 0x01 | 0x04;
const KIND_NOOP: u16 = 1;
const KIND_ERROR: u16 = 2;
const KIND_DONE: u16 = 3;

const CONTROLLER: u16 = 0x10;
const CONTROLLER_GET_FAMILY: u8 = 3;
const CONTROLLER_FAMILY_ID: u16 = 1;
const CONTROLLER_FAMILY_NAME: u16 = 2;

/// Maximum length of a reply: a family's description is under 1 KiB, a device's state under 100 bytes.
const MAX_ANSWER: usize = 16 << 10;
/// Datagrams read for one request before the replies are considered invalid.
const MAX_DATAGRAMS: usize = 64;

/// A request being written.
pub(super) struct Request(Vec<u8>);

impl Request {
    pub(super) fn new(family: u16, sequence: u32, command: u8) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend(0u32.to_ne_bytes()); // the length, when it is known
        bytes.extend(family.to_ne_bytes());
        bytes.extend(REQUEST_ACK.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes()); // the kernel fills in who asks
        bytes.extend([command, 1, 0, 0]); // version 1, reserved
        Self(bytes)
    }

    pub(super) fn u32(mut self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes());
        self
    }

    pub(super) fn u64(mut self, kind: u16, value: u64) -> Self {
        self.attribute(kind, &value.to_ne_bytes());
        self
    }

    /// A NUL-terminated string.
    pub(super) fn text(mut self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes);
        self
    }

    /// A nested attribute; `fill` writes its contents.
    pub(super) fn nested(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.0.len();
        self.attribute(kind | NESTED, &[]);
        let mut whole = fill(self);
        whole.set_length(start);
        whole
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let start = self.0.len();
        self.0.extend([0; 2]);
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.set_length(start);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// Attributes written here are a few bytes: device numbers, sockets (at most 64), a name of at most 255 bytes.
    fn set_length(&mut self, start: usize) {
        let length = u16::try_from(self.0.len() - start).unwrap_or(u16::MAX);
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    pub(super) fn bytes(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// The attributes of a reply or of a nested attribute.
#[derive(Clone, Copy)]
pub(super) struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    /// The value of the first attribute of a kind; `None` also if the attributes before it are malformed.
    pub(super) fn find(self, kind: u16) -> Option<&'a [u8]> {
        let mut rest = self.0;
        while rest.len() >= ATTRIBUTE_HEADER {
            let length = usize::from(u16_at(rest, 0)?);
            let value = rest.get(ATTRIBUTE_HEADER..length)?;
            if u16_at(rest, 2)? & TYPE_MASK == kind {
                return Some(value);
            }
            rest = rest.get(length.next_multiple_of(4)..)?;
        }
        None
    }

    pub(super) fn nested(self, kind: u16) -> Option<Self> {
        self.find(kind).map(Self)
    }

    pub(super) fn u8(self, kind: u16) -> Option<u8> {
        self.find(kind)?.first().copied()
    }

    pub(super) fn u16(self, kind: u16) -> Option<u16> {
        u16_at(self.find(kind)?, 0)
    }

    pub(super) fn u32(self, kind: u16) -> Option<u32> {
        u32_at(self.find(kind)?, 0)
    }
}

/// The meaning of one message of a datagram.
pub(super) enum Answer<'a> {
    /// The requested data.
    Data(Attributes<'a>),
    /// The request is complete, with or without an error number.
    End(Result<(), Errno>),
    /// Irrelevant, or for another request.
    Other,
}

/// Splits the first message off a datagram: its meaning for request `sequence`, and the rest. `None` at the end, or if
/// a length is invalid.
pub(super) fn take_message(datagram: &[u8], sequence: u32) -> Option<(Answer<'_>, &[u8])> {
    let length = usize::try_from(u32_at(datagram, 0)?).ok()?;
    let kind = u16_at(datagram, 4)?;
    let body = datagram.get(HEADER..length)?;
    let rest = datagram.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    let answer = match kind {
        _ if u32_at(datagram, 8)? != sequence => Answer::Other,
        KIND_ERROR => {
            let code = u32_at(body, 0)?.cast_signed();
            Answer::End(match code.checked_neg() {
                Some(0) => Ok(()),
                Some(number @ 1..=4095) => Err(Errno::from_raw_os_error(number)),
                _ => Err(Errno::PROTO),
            })
        }
        KIND_DONE => Answer::End(Ok(())),
        KIND_NOOP => Answer::Other,
        _ => Answer::Data(Attributes(body.get(GENERIC_HEADER..)?)),
    };
    Some((answer, rest))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_ne_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

/// A generic netlink socket and the id of one family.
pub(super) struct Connection {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Connection {
    /// Opens a socket and looks the family up.
    ///
    /// # Errors
    /// `ENOENT` if the kernel has no such family; socket errors.
    pub(super) fn open(family: &str, timeout: Duration) -> io::Result<Self> {
        let socket = net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        net::bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
        net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Recv, Some(timeout))?;
        let mut connection = Self {
            socket,
            family: CONTROLLER,
            sequence: 0,
        };
        let id = connection.ask(
            CONTROLLER_GET_FAMILY,
            |request| request.text(CONTROLLER_FAMILY_NAME, family),
            |attributes| attributes.u16(CONTROLLER_FAMILY_ID),
        )?;
        connection.family = id.ok_or(Errno::PROTO)?;
        Ok(connection)
    }

    /// Sends one command and reads until the kernel has completed it; returns what `read` found in the reply.
    ///
    /// # Errors
    /// The kernel's, or `ETIMEDOUT`.
    pub(super) fn ask<T>(
        &mut self,
        command: u8,
        write: impl FnOnce(Request) -> Request,
        read: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> io::Result<Option<T>> {
        self.sequence += 1;
        let request = write(Request::new(self.family, self.sequence, command)).bytes();
        let kernel = netlink::SocketAddrNetlink::new(0, 0);
        rustix::io::retry_on_intr(|| {
            net::sendto(&self.socket, &request, SendFlags::empty(), &kernel)
        })?;
        let mut found = None;
        let mut buffer = vec![0; MAX_ANSWER];
        for _ in 0..MAX_DATAGRAMS {
            let received = rustix::io::retry_on_intr(|| {
                net::recv(&self.socket, buffer.as_mut_slice(), RecvFlags::TRUNC)
            });
            let (_, length) = match received {
                Err(Errno::AGAIN) => return Err(Errno::TIMEDOUT.into()),
                other => other?,
            };
            let mut rest = buffer.get(..length).ok_or(Errno::MSGSIZE)?;
            while let Some((answer, after)) = take_message(rest, self.sequence) {
                match answer {
                    Answer::Data(attributes) => found = found.or_else(|| read(attributes)),
                    Answer::End(result) => return Ok(result.map(|()| found)?),
                    Answer::Other => {}
                }
                rest = after;
            }
        }
        Err(Errno::PROTO.into())
    }
}
