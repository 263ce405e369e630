//! The task of a connection: the only one that reads from its socket and writes to it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::message::{Greeting, MAX_EVENT, Message, NotAMessage, Splitter, parse};
use super::state::State;
use crate::error::{HypervisorError, plain};

/// Bytes that are read at a time.
const PIECE: usize = 64 << 10;

/// A command on its way.
#[derive(Debug)]
pub struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// Goes with the first byte.
    descriptor: Option<OwnedFd>,
}

impl Outgoing {
    pub fn new(bytes: Vec<u8>, descriptor: Option<OwnedFd>) -> Self {
        Outgoing {
            bytes,
            sent: 0,
            descriptor,
        }
    }

    /// Writes what the socket takes; true when all is written.
    fn write(&mut self, socket: &UnixStream) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptor = self.descriptor.as_ref().map(|fd| [fd.as_fd()]);
        if let Some(descriptor) = &descriptor {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptor));
        }
        let rest = [IoSlice::new(&self.bytes[self.sent..])];
        let count = socket.try_io(Interest::WRITABLE, || {
            Ok(sendmsg(socket, &rest, &mut ancillary, SendFlags::NOSIGNAL)?)
        })?;
        self.sent += count;
        self.descriptor = None;
        Ok(self.sent == self.bytes.len())
    }
}

/// Reads until the greeting is complete.
pub async fn greeting(
    socket: &UnixStream,
    splitter: &mut Splitter,
    name: &str,
) -> Result<Greeting, HypervisorError> {
    let not_qmp = |reason: String| HypervisorError::NotQmp {
        socket: name.to_owned(),
        reason,
    };
    let mut buffer = vec![0; PIECE];
    loop {
        match splitter.next() {
            Ok(Some(message)) => {
                return match parse(&message) {
                    Ok(Message::Greeting(greeting)) => Ok(greeting),
                    Ok(_) => Err(not_qmp("it does not begin with a greeting".into())),
                    Err(e) => Err(not_qmp(e.to_string())),
                };
            }
            Ok(None) => {}
            Err(e) => return Err(not_qmp(e.to_string())),
        }
        match read(socket, splitter, &mut buffer).await {
            Ok(0) => {
                return Err(not_qmp(
                    "it closed the connection without a greeting".into(),
                ));
            }
            Ok(_) => {}
            Err(e) => return Err(not_qmp(plain(&e))),
        }
    }
}

async fn read(
    socket: &UnixStream,
    splitter: &mut Splitter,
    buffer: &mut [u8],
) -> io::Result<usize> {
    loop {
        socket.readable().await?;
        match socket.try_read(buffer) {
            Ok(count) => {
                splitter.push(&buffer[..count]);
                return Ok(count);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
}

/// Runs until the other end closes, says what is not QMP, or no handle is left.
pub async fn drive(
    socket: UnixStream,
    mut splitter: Splitter,
    mut queue: mpsc::Receiver<Outgoing>,
    state: Arc<State>,
) {
    let closed = |reason: String| HypervisorError::Closed {
        socket: state.socket().to_owned(),
        reason,
    };
    let mut buffer = vec![0; PIECE];
    let mut writing: Option<Outgoing> = None;
    let error = loop {
        if let Err(e) = take(&mut splitter, &state) {
            break HypervisorError::Malformed {
                socket: state.socket().to_owned(),
                reason: e.to_string(),
            };
        }
        tokio::select! {
            next = queue.recv(), if writing.is_none() => match next {
                Some(outgoing) => writing = Some(outgoing),
                None => break closed("it was no longer used".into()),
            },
            done = write(&socket, &mut writing), if writing.is_some() => {
                if let Err(e) = done {
                    break closed(plain(&e));
                }
            }
            count = read(&socket, &mut splitter, &mut buffer) => match count {
                Ok(0) => break closed("it has probably ended".into()),
                Ok(_) => {}
                Err(e) => break closed(plain(&e)),
            },
        }
    };
    tracing::debug!(%error, "the QMP connection is over");
    state.end(error);
}

/// Writes all that there is to write. What was written is remembered where this is cancelled.
async fn write(socket: &UnixStream, writing: &mut Option<Outgoing>) -> io::Result<()> {
    while let Some(outgoing) = writing {
        socket.writable().await?;
        match outgoing.write(socket) {
            Ok(true) => *writing = None,
            Ok(false) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Hands out all messages that are complete.
fn take(splitter: &mut Splitter, state: &State) -> Result<(), NotAMessage> {
    while let Some(bytes) = splitter.next()? {
        match parse(&bytes)? {
            Message::Reply { id, result } => {
                if !state.answer(id, result) {
                    return Err(NotAMessage("an answer to no command".into()));
                }
            }
            Message::Event(event) if bytes.len() <= MAX_EVENT => state.happened(event),
            Message::Event(event) => tracing::debug!(event.name, "a long event is left out"),
            Message::Greeting(_) => return Err(NotAMessage("a second greeting".into())),
        }
    }
    Ok(())
}
