//! The sending direction.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncWriteExt, WriteHalf};
use tokio::time::{Instant, sleep_until, timeout};

use super::{END, HELLO, Header, MAX_FRAME, PING, RESERVED_KINDS, corrupt};
use crate::stream::{Stream, WireCounters};
use crate::{NetError, RateLimit};

/// Payloads up to this are batched; longer ones are written without a copy.
const SMALL: usize = 16 << 10;
/// Batched frames are written at this many bytes, or when flushed.
const GATHER: usize = 64 << 10;
/// Maximum slices in one write.
const SLICES: usize = 16;

/// Frames to a peer.
///
/// A sent frame may still be in a buffer: call [`FrameWriter::flush`] before waiting for a reply to it.
#[derive(Debug)]
pub struct FrameWriter {
    out: Out,
    /// Whole frames that were not written yet, at most [`GATHER`] and a small frame.
    gathered: BytesMut,
    max_frame: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// A frame was begun and not completed, so that nothing can follow it.
    Broken,
    /// The end frame is in the buffer or sent.
    Ending,
    Ended,
}

impl FrameWriter {
    pub(crate) fn new(io: WriteHalf<Stream>, peer: Arc<str>, wire: Arc<WireCounters>) -> Self {
        FrameWriter {
            out: Out {
                io,
                peer,
                wire,
                stall_timeout: None,
                rate: None,
                last_write: Instant::now(),
            },
            gathered: BytesMut::new(),
            max_frame: MAX_FRAME,
            state: State::Open,
        }
    }

    /// Sends a frame of a kind below 0xf0. Waits only for room in the socket, never for the
    /// peer's answer.
    ///
    /// Dropping the future of a payload above 16 KiB breaks the connection for writing: half a
    /// frame may have left.
    ///
    /// # Errors
    /// [`NetError::FrameTooLarge`], [`NetError::FrameCorrupt`] for a reserved kind (in both
    /// cases nothing was sent), [`NetError::Closed`], [`NetError::TimedOut`] for a peer that
    /// takes nothing, or that the connection broke.
    pub async fn send(&mut self, kind: u8, payload: &[u8]) -> Result<(), NetError> {
        self.send_vectored(kind, &[payload]).await
    }

    /// The same with a payload in parts.
    ///
    /// # Errors
    /// As [`FrameWriter::send`].
    pub async fn send_vectored(&mut self, kind: u8, parts: &[&[u8]]) -> Result<(), NetError> {
        if RESERVED_KINDS.contains(&kind) {
            return Err(corrupt(&self.out.peer, "its kind is reserved"));
        }
        self.write_frame(kind, parts).await
    }

    pub(crate) async fn send_hello(&mut self, payload: &[u8]) -> Result<(), NetError> {
        self.write_frame(HELLO, &[payload]).await
    }

    /// Sends an empty frame, to show the peer that this end is alive, and flushes. Cancel safe.
    ///
    /// # Errors
    /// As [`FrameWriter::send`].
    pub async fn ping(&mut self) -> Result<(), NetError> {
        self.write_frame(PING, &[]).await?;
        self.flush().await
    }

    /// Pings whenever nothing was written for `every`, until that fails: to be selected against
    /// the wait for something to send. Cancel safe.
    pub async fn ping_when_idle(&mut self, every: Duration) -> NetError {
        loop {
            sleep_until(self.out.last_write + every).await;
            if let Err(e) = self.ping().await {
                return e;
            }
        }
    }

    /// From now on at most some 100 KiB are queued before the network path, and [`FrameWriter::flush`] waits until the
    /// path accepts the rest: urgent data can overtake what was not sent yet. (Otherwise the kernel buffers megabytes,
    /// which is better for throughput alone.) No effect on a Unix socket.
    pub fn keep_little_unsent(&mut self) {
        self.out.wire.keep_little_unsent.store(true, Relaxed);
    }

    /// Hands everything that was sent to the kernel. Cancel safe.
    ///
    /// # Errors
    /// As [`FrameWriter::send`].
    pub async fn flush(&mut self) -> Result<(), NetError> {
        if self.state == State::Broken {
            return Err(self.closed());
        }
        self.write_gathered().await?;
        self.out.flush().await
    }

    /// Ends this direction: what was sent is flushed, the peer's reader will yield `None` after
    /// it. Doing it twice is harmless.
    ///
    /// # Errors
    /// As [`FrameWriter::send`].
    pub async fn finish(&mut self) -> Result<(), NetError> {
        match self.state {
            State::Open => {
                let end = Header::make(END, &[]);
                self.gathered.extend_from_slice(&end);
                self.state = State::Ending;
            }
            State::Ending => {}
            State::Ended => return Ok(()),
            State::Broken => return Err(self.closed()),
        }
        self.flush().await?;
        // close_notify, then the socket's own end.
        self.out.shutdown().await?;
        self.state = State::Ended;
        Ok(())
    }

    /// Sends no faster than `rate` permits, including encryption overhead; `None`, the default, is unlimited.
    pub fn set_rate(&mut self, rate: Option<Arc<RateLimit>>) {
        let base = self.out.wire.sent();
        self.out.rate = rate.map(|limit| Metered {
            limit,
            granted: 0,
            paid: base,
        });
    }

    /// Fails when the peer accepts no byte for this long; `None`, the default, waits forever.
    pub fn set_stall_timeout(&mut self, limit: Option<Duration>) {
        self.out.stall_timeout = limit;
    }

    /// Allows payloads up to `bytes`, which the peer's reader must allow too.
    pub fn set_max_frame(&mut self, bytes: usize) {
        self.max_frame = bytes.min(u32::MAX as usize);
    }

    /// The other end, for people.
    #[must_use]
    pub fn peer_text(&self) -> &str {
        &self.out.peer
    }

    async fn write_frame(&mut self, kind: u8, parts: &[&[u8]]) -> Result<(), NetError> {
        if self.state != State::Open {
            return Err(self.closed());
        }
        let length: usize = parts.iter().map(|p| p.len()).sum();
        if length > self.max_frame {
            return Err(NetError::FrameTooLarge {
                peer: self.out.peer.to_string(),
                length: length as u64,
                limit: self.max_frame,
            });
        }
        if self.gathered.len() >= GATHER {
            self.write_gathered().await?;
        }
        let header = Header::make(kind, parts);
        if length <= SMALL {
            self.gathered.extend_from_slice(&header);
            for part in parts {
                self.gathered.extend_from_slice(part);
            }
            return Ok(());
        }
        self.state = State::Broken;
        self.gathered.extend_from_slice(&header);
        self.out.write_all(&self.gathered, parts).await?;
        self.gathered.clear();
        self.state = State::Open;
        Ok(())
    }

    async fn write_gathered(&mut self) -> Result<(), NetError> {
        while !self.gathered.is_empty() {
            let n = self.out.write(&[&self.gathered], 0).await?;
            self.gathered.advance(n);
        }
        self.gathered.clear();
        Ok(())
    }

    fn closed(&self) -> NetError {
        NetError::Closed {
            peer: self.out.peer.to_string(),
        }
    }
}

/// The socket, with everything that slows it down.
#[derive(Debug)]
struct Out {
    io: WriteHalf<Stream>,
    peer: Arc<str>,
    wire: Arc<WireCounters>,
    stall_timeout: Option<Duration>,
    rate: Option<Metered>,
    last_write: Instant,
}

/// What of a limit was asked for and used.
#[derive(Debug)]
struct Metered {
    limit: Arc<RateLimit>,
    /// Bytes granted and not yet written.
    granted: usize,
    /// What the socket's counter may say without anything being owed.
    paid: u64,
}

impl Out {
    async fn write_all(&mut self, first: &[u8], rest: &[&[u8]]) -> Result<(), NetError> {
        let mut all = Vec::with_capacity(1 + rest.len());
        all.push(first);
        all.extend_from_slice(rest);
        let mut todo = all.as_mut_slice();
        let mut skip = 0;
        while let Some(part) = todo.first() {
            if skip == part.len() {
                skip = 0;
                todo = &mut todo[1..];
                continue;
            }
            let mut n = self.write(todo, skip).await?;
            while n > 0 {
                let left = todo[0].len() - skip;
                if n < left {
                    skip += n;
                    break;
                }
                n -= left;
                skip = 0;
                todo = &mut todo[1..];
            }
        }
        Ok(())
    }

    /// Writes some bytes of `parts` without the first `skip` of them, as many as the limit and
    /// the socket allow. There is at least one.
    async fn write(&mut self, parts: &[&[u8]], skip: usize) -> Result<usize, NetError> {
        let mut allowed = usize::MAX;
        if let Some(metered) = &mut self.rate {
            if metered.granted == 0 {
                // What encryption added since the last time.
                let sent = self.wire.sent();
                metered.limit.charge(sent.saturating_sub(metered.paid));
                metered.paid = metered.paid.max(sent);
                let wanted = parts.iter().map(|p| p.len()).sum::<usize>() - skip;
                let ask = metered.limit.chunk().min(wanted);
                metered.limit.acquire(ask as u64).await;
                metered.granted = ask;
                metered.paid += ask as u64;
            }
            allowed = metered.granted;
        }
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut used = 0;
        let mut left = allowed;
        for (i, part) in parts.iter().enumerate() {
            let part = if i == 0 { &part[skip..] } else { part };
            if used == SLICES || left == 0 {
                break;
            }
            if !part.is_empty() {
                let take = part.len().min(left);
                slices[used] = IoSlice::new(&part[..take]);
                used += 1;
                left -= take;
            }
        }
        let write = self.io.write_vectored(&slices[..used]);
        let n = within(self.stall_timeout, &self.peer, write).await?;
        if n == 0 {
            return Err(broke(&self.peer, io::ErrorKind::WriteZero.into()));
        }
        if let Some(metered) = &mut self.rate {
            metered.granted -= n;
        }
        self.last_write = Instant::now();
        Ok(n)
    }

    async fn flush(&mut self) -> Result<(), NetError> {
        within(self.stall_timeout, &self.peer, self.io.flush()).await
    }

    async fn shutdown(&mut self) -> Result<(), NetError> {
        within(self.stall_timeout, &self.peer, self.io.shutdown()).await
    }
}

async fn within<T>(
    limit: Option<Duration>,
    peer: &str,
    what: impl Future<Output = io::Result<T>>,
) -> Result<T, NetError> {
    let result = match limit {
        None => what.await,
        Some(limit) => match timeout(limit, what).await {
            Ok(result) => result,
            Err(_) => {
                return Err(NetError::TimedOut {
                    peer: peer.to_owned(),
                    what: "taking what is sent to it",
                    after: limit,
                });
            }
        },
    };
    result.map_err(|source| broke(peer, source))
}

fn broke(peer: &str, source: io::Error) -> NetError {
    NetError::Io {
        peer: peer.to_owned(),
        doing: "writing",
        source,
    }
}
