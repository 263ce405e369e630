//! The requests in flight on a connection, within limits, and its queue of replies.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::buffer::Buffer;
use super::counters::Counters;
use super::transport::Transport;
use super::wire;
use crate::budget::Permit;

/// Maximum replies sent with one call.
const BATCH: usize = 64;
/// Maximum slices sent with one call; the kernel takes no more than 1024.
const BATCH_PIECES: usize = 256;

/// A reply, ready to be sent.
pub(super) struct Reply {
    head: Head,
    body: Body,
    _permit: Permit,
}

/// The bytes before a reply's data, stored inline.
pub(super) struct Head {
    bytes: [u8; Self::CAPACITY],
    length: u8,
}

impl Head {
    const CAPACITY: usize = wire::CHUNK_BYTES + 8;

    pub(super) fn new(parts: &[&[u8]]) -> Self {
        let mut head = Self {
            bytes: [0; Self::CAPACITY],
            length: 0,
        };
        for part in parts {
            let at = usize::from(head.length);
            head.bytes[at..at + part.len()].copy_from_slice(part);
            head.length += part.len() as u8;
        }
        head
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// What follows the head.
pub(super) enum Body {
    Nothing,
    /// A few bytes of metadata.
    Small(Vec<u8>),
    /// A read.
    Data(Buffer),
    /// A read with holes: chunk headers and data alternating, as ranges of the two buffers.
    Sparse {
        heads: Vec<u8>,
        data: Buffer,
        pieces: Vec<(Range<usize>, Range<usize>)>,
    },
}

impl Reply {
    pub(super) fn new(head: Head, body: Body, permit: Permit) -> Self {
        Self {
            head,
            body,
            _permit: permit,
        }
    }

    /// The number of slices that [`Self::slices`] yields.
    fn pieces(&self) -> usize {
        1 + match &self.body {
            Body::Nothing => 0,
            Body::Small(_) | Body::Data(_) => 1,
            Body::Sparse { pieces, .. } => 2 * pieces.len(),
        }
    }

    fn slices<'a>(&'a self, mut give: impl FnMut(&'a [u8])) {
        give(self.head.bytes());
        match &self.body {
            Body::Nothing => {}
            Body::Small(bytes) => give(bytes),
            Body::Data(data) => give(data),
            Body::Sparse {
                heads,
                data,
                pieces,
            } => {
                for (head, range) in pieces {
                    give(&heads[head.clone()]);
                    give(&data[range.clone()]);
                }
            }
        }
    }
}

/// Replies waiting to be sent. A thread that flushes sends those of all threads, in one call if possible; meanwhile
/// others queue theirs and move on. So replies never interleave and no thread waits for another.
pub(super) struct Outbox {
    transport: Arc<Transport>,
    counters: Arc<Counters>,
    state: Mutex<State>,
    gone: AtomicBool,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Reply>,
    sending: bool,
}

impl Outbox {
    pub(super) fn new(transport: Arc<Transport>, counters: Arc<Counters>) -> Self {
        Self {
            transport,
            counters,
            state: Mutex::default(),
            gone: AtomicBool::new(false),
        }
    }

    /// Whether the client has gone: its remaining requests need not be executed.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Queues a reply; [`Self::flush`] sends it.
    pub(super) fn put(&self, reply: Reply) {
        if !self.is_gone() {
            self.state.lock().queue.push_back(reply);
        }
    }

    /// Sends the queued replies, unless another thread is doing so. A client that accepts nothing for too long is
    /// disconnected.
    pub(super) fn flush(&self) {
        let mut batch = Vec::new();
        let mut state = self.state.lock();
        if state.sending || state.queue.is_empty() {
            return;
        }
        state.sending = true;
        while !self.is_gone() && !state.queue.is_empty() {
            let mut pieces = 0;
            while let Some(next) = state.queue.front() {
                pieces += next.pieces();
                if batch.len() == BATCH || (pieces > BATCH_PIECES && !batch.is_empty()) {
                    break;
                }
                batch.extend(state.queue.pop_front());
            }
            parking_lot::MutexGuard::unlocked(&mut state, || {
                let sent = self.send(&batch);
                batch.clear();
                if let Err(error) = sent {
                    tracing::debug!(%error, "nbd: a client is gone");
                    self.transport.socket().cut();
                    self.gone.store(true, Ordering::Release);
                }
            });
        }
        // What is left when the client is gone.
        let left = std::mem::take(&mut state.queue);
        state.sending = false;
        drop(state);
        drop(left);
    }

    fn send(&self, batch: &[Reply]) -> std::io::Result<()> {
        let mut slices = Vec::with_capacity(BATCH * 2);
        let mut bytes = 0;
        for reply in batch {
            reply.slices(|slice| {
                bytes += slice.len();
                slices.push(IoSlice::new(slice));
            });
        }
        for part in slices.chunks_mut(BATCH_PIECES) {
            self.transport.send(part)?;
        }
        self.counters
            .sent_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// The remaining time.
pub(super) fn left(deadline: Instant) -> std::time::Duration {
    deadline.saturating_duration_since(Instant::now())
}
