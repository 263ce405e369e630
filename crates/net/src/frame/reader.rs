//! The receiving direction.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, ReadHalf};
use tokio::time::timeout;

use super::{END, Frame, HEADER_LEN, HELLO, Header, PING, PONG, RESERVED_KINDS, corrupt};
use crate::NetError;
use crate::stream::Stream;

/// Minimum bytes per read, so that many small frames cost few reads.
const READ_AHEAD: usize = 16 << 10;

/// Payloads up to this are copied: a few bytes that a caller keeps must not keep a whole buffer alive.
const TINY: usize = 1 << 10;

/// How long the socket's end may lag behind the end frame.
const END_LINGER: Duration = Duration::from_secs(5);

/// Frames from a peer.
#[derive(Debug)]
pub struct FrameReader {
    io: ReadHalf<Stream>,
    peer: Arc<str>,
    buffer: BytesMut,
    /// The header of the frame whose payload is being collected.
    header: Option<Header>,
    max_frame: usize,
    idle_timeout: Option<Duration>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The end frame was read, the socket's end not yet.
    Ending,
    Ended,
}

impl FrameReader {
    pub(crate) fn new(io: ReadHalf<Stream>, peer: Arc<str>, max_frame: usize) -> Self {
        FrameReader {
            io,
            peer,
            buffer: BytesMut::new(),
            header: None,
            max_frame,
            idle_timeout: None,
            state: State::Open,
        }
    }

    /// The next frame; `None` when the peer finished its direction. Pings are swallowed. Cancel
    /// safe: a frame that was half read when the future was dropped is read on by the next call.
    ///
    /// # Errors
    /// [`NetError::Truncated`] when the stream was cut, [`NetError::FrameTooLarge`],
    /// [`NetError::FrameVersion`] or [`NetError::FrameCorrupt`] for what should not have been
    /// sent, [`NetError::TimedOut`] after silence, or that the connection broke. After an error
    /// the connection is of no more use.
    pub async fn next(&mut self) -> Result<Option<Frame>, NetError> {
        match self.next_raw().await? {
            Some(frame) if RESERVED_KINDS.contains(&frame.kind) => {
                Err(corrupt(&self.peer, "unexpected kind"))
            }
            other => Ok(other),
        }
    }

    /// The longest payload taken.
    #[must_use]
    pub fn max_frame(&self) -> usize {
        self.max_frame
    }

    /// Takes payloads up to `bytes` from the next frame on.
    pub fn set_max_frame(&mut self, bytes: usize) {
        self.max_frame = bytes;
    }

    /// Fails when no byte arrives for this long; `None`, the default, waits forever.
    pub fn set_idle_timeout(&mut self, limit: Option<Duration>) {
        self.idle_timeout = limit;
    }

    /// The other end, for people.
    #[must_use]
    pub fn peer_text(&self) -> &str {
        &self.peer
    }

    /// Like [`FrameReader::next`], and yields the hello as well.
    pub(crate) async fn next_raw(&mut self) -> Result<Option<Frame>, NetError> {
        loop {
            match self.state {
                State::Open => {}
                State::Ending => {
                    self.drain().await?;
                    return Ok(None);
                }
                State::Ended => return Ok(None),
            }
            let header = match self.header {
                Some(header) => header,
                None => {
                    self.fill(HEADER_LEN).await?;
                    let mut bytes = [0u8; HEADER_LEN];
                    self.buffer.copy_to_slice(&mut bytes);
                    let header = Header::parse(&bytes, self.max_frame, &self.peer)?;
                    self.header = Some(header);
                    header
                }
            };
            self.fill(header.length).await?;
            self.header = None;
            let payload = if header.length <= TINY {
                let copy = Bytes::copy_from_slice(&self.buffer[..header.length]);
                self.buffer.advance(header.length);
                copy
            } else {
                self.buffer.split_to(header.length).freeze()
            };
            if !header.matches(&payload) {
                return Err(corrupt(&self.peer, "its checksum is wrong"));
            }
            match header.kind {
                PING | PONG => {}
                END => self.state = State::Ending,
                kind if kind == HELLO || !RESERVED_KINDS.contains(&kind) => {
                    return Ok(Some(Frame { kind, payload }));
                }
                _ => return Err(corrupt(&self.peer, "its kind is unknown")),
            }
        }
    }

    /// Reads until `want` bytes are in the buffer.
    async fn fill(&mut self, want: usize) -> Result<(), NetError> {
        while self.buffer.len() < want {
            // A long frame is read to its end and not beyond, so that its buffer can be handed
            // out whole and nothing has to be moved.
            let missing = want - self.buffer.len();
            let room = missing.max(READ_AHEAD);
            self.buffer.reserve(room);
            let mut into = (&mut self.buffer).limit(room);
            let read = self.io.read_buf(&mut into);
            let result = match self.idle_timeout {
                None => read.await,
                Some(limit) => match timeout(limit, read).await {
                    Ok(result) => result,
                    Err(_) => {
                        return Err(NetError::TimedOut {
                            peer: self.peer.to_string(),
                            what: "a sign of life",
                            after: limit,
                        });
                    }
                },
            };
            match result {
                Ok(0) => return Err(self.cut()),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(self.cut()),
                Err(source) => {
                    return Err(NetError::Io {
                        peer: self.peer.to_string(),
                        doing: "reading",
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    fn cut(&self) -> NetError {
        NetError::Truncated {
            peer: self.peer.to_string(),
        }
    }

    /// After the end frame only the socket's end follows. It is awaited because a socket that
    /// is dropped before it was read empty is reset, and takes our own last bytes with it.
    async fn drain(&mut self) -> Result<(), NetError> {
        let rest = async {
            if self.buffer.is_empty() {
                self.buffer.reserve(READ_AHEAD);
                // However the socket ends now, everything that was sent has been read.
                let _ = self.io.read_buf(&mut self.buffer).await;
            }
        };
        let _ = timeout(END_LINGER, rest).await;
        if !self.buffer.is_empty() {
            return Err(corrupt(&self.peer, "data after the end"));
        }
        self.state = State::Ended;
        self.buffer = BytesMut::new();
        Ok(())
    }
}
