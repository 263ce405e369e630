//! Buffered receiving of what a client sends, with few system calls.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::outbox::left;
use super::transport::Transport;
use super::wire::REQUEST_BYTES;

/// Bytes received at a time, other than into a payload.
const BUFFER: usize = 64 << 10;
/// After a payload of this length the next one is likely to be as long: then only enough for a header is received, so
/// that the payload goes straight to its buffer (bytes).
const LONG: usize = 64 << 10;

/// A buffered receiver.
pub(super) struct Input {
    transport: Arc<Transport>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// How much to receive for the next header (bytes).
    portion: usize,
}

/// Whether a complete request header is available.
pub(super) enum Next {
    Header([u8; REQUEST_BYTES]),
    More,
}

impl Input {
    pub(super) fn new(transport: Arc<Transport>) -> Self {
        Self {
            transport,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            portion: BUFFER,
        }
    }

    /// Bytes received and not consumed yet.
    pub(super) fn rest(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Whether the client has sent more than was consumed.
    pub(super) fn has_more(&self) -> bool {
        self.start < self.end || self.transport.has_more()
    }

    /// Takes a request header if it is complete.
    pub(super) fn next(&mut self) -> Next {
        match self.rest().first_chunk() {
            Some(header) => {
                let header = *header;
                self.start += REQUEST_BYTES;
                self.portion = BUFFER;
                Next::Header(header)
            }
            None => Next::More,
        }
    }

    /// Receives more; false at the end of the stream. A client may idle indefinitely (`idle` is called now and then),
    /// but not stop in the middle of a request.
    pub(super) fn fill(&mut self, stall: Duration, idle: impl Fn()) -> io::Result<bool> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let since = Instant::now();
        loop {
            let room = self.end..self.portion;
            match self.transport.receive(&mut self.buffer[room]) {
                Ok(0) if self.end > 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.end += count;
                    return Ok(count > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.end == 0 {
                        idle();
                    } else if since.elapsed() >= stall {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes what is buffered already.
    fn drain(&mut self, out: &mut [u8]) -> usize {
        let count = out.len().min(self.end - self.start);
        out[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
        self.start += count;
        count
    }

    /// Receives a request's payload. `wait` is called before this blocks.
    pub(super) fn payload(
        &mut self,
        out: &mut [u8],
        stall: Duration,
        wait: impl Fn(),
    ) -> io::Result<()> {
        if out.len() >= LONG {
            self.portion = REQUEST_BYTES;
        }
        let mut done = self.drain(out);
        if done < out.len() {
            wait();
        }
        let mut since = Instant::now();
        while done < out.len() {
            match self.transport.receive_payload(&mut out[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    done += count;
                    since = Instant::now();
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if since.elapsed() >= stall => return Err(io::ErrorKind::TimedOut.into()),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Discards a payload.
    pub(super) fn skip_stalling(
        &mut self,
        count: u32,
        stall: Duration,
        wait: impl Fn(),
    ) -> io::Result<()> {
        let mut scrap = [0; 16 << 10];
        let mut left = count as usize;
        while left > 0 {
            let part = left.min(scrap.len());
            self.payload(&mut scrap[..part], stall, &wait)?;
            left -= part;
        }
        Ok(())
    }

    /// Receives bytes of a handshake, which has an overall deadline.
    pub(super) fn exactly(&mut self, out: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut done = self.drain(out);
        while done < out.len() {
            if self.start == self.end {
                self.start = 0;
                self.end = 0;
            }
            let time = left(deadline);
            if time.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.transport.socket().receive_within(time)?;
            match self.transport.receive(&mut self.buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.end = count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            done += self.drain(&mut out[done..]);
        }
        Ok(())
    }

    /// Discards bytes of a handshake.
    pub(super) fn skip(&mut self, count: u32, deadline: Instant) -> io::Result<()> {
        let mut scrap = [0; 4096];
        let mut left = count as usize;
        while left > 0 {
            let part = left.min(scrap.len());
            self.exactly(&mut scrap[..part], deadline)?;
            left -= part;
        }
        Ok(())
    }
}
