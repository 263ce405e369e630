//! What is under way on a connection, within limits, and its replies on their way out.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::buffer::Buffer;
use super::counters::Counters;
use super::socket::Transport;
use super::wire;

/// Replies that are sent with one call.
const BATCH: usize = 64;
/// Pieces that are sent with one call; the system takes no more than 1024.
const BATCH_PIECES: usize = 256;

/// Changes that wait for a network beside the requests that may be under way; only their bytes count with those of the rest.
const MOST_PARKED: usize = 4096;

/// How many requests, and how many bytes of theirs, may be under way: from the moment a request is taken off the
/// connection until its reply is on its way.
pub(super) struct Budget {
    used: Mutex<Used>,
    freed: Condvar,
    requests: usize,
    bytes: usize,
}

#[derive(Default)]
struct Used {
    requests: usize,
    parked: usize,
    bytes: usize,
}

impl Budget {
    pub(super) fn new(requests: usize, bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            used: Mutex::default(),
            freed: Condvar::new(),
            requests: requests.max(1),
            bytes,
        })
    }

    fn take(self: &Arc<Self>, used: &mut Used, bytes: usize) -> Option<Permit> {
        // One alone always fits, however long.
        let fits = used.requests < self.requests && used.bytes + bytes <= self.bytes;
        if used.requests + used.parked > 0 && !fits {
            return None;
        }
        used.requests += 1;
        used.bytes += bytes;
        Some(Permit {
            budget: Arc::clone(self),
            bytes,
            parked: false,
        })
    }

    /// Room for a request, if there is some.
    pub(super) fn try_admit(self: &Arc<Self>, bytes: usize) -> Option<Permit> {
        self.take(&mut self.used.lock(), bytes)
    }

    /// Waits for room. Every permit goes back when its request is answered or dropped, so this ends when the device
    /// answers, or fails, one request.
    pub(super) fn admit(self: &Arc<Self>, bytes: usize) -> Permit {
        let mut used = self.used.lock();
        loop {
            if let Some(permit) = self.take(&mut used, bytes) {
                return permit;
            }
            self.freed.wait(&mut used);
        }
    }

    /// Waits until nothing is under way.
    pub(super) fn drain(&self) {
        let mut used = self.used.lock();
        while used.requests + used.parked > 0 {
            self.freed.wait(&mut used);
        }
    }
}

/// Room for one request.
pub(super) struct Permit {
    budget: Arc<Budget>,
    bytes: usize,
    parked: bool,
}

impl Permit {
    /// The request may wait for long: it does not count among the others any more, so that those behind it are read on.
    pub(super) fn park(&mut self) {
        let mut used = self.budget.used.lock();
        if !self.parked && used.parked < MOST_PARKED {
            used.parked += 1;
            used.requests -= 1;
            self.parked = true;
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.budget.used.lock();
        match self.parked {
            true => used.parked -= 1,
            false => used.requests -= 1,
        }
        used.bytes -= self.bytes;
        drop(used);
        self.budget.freed.notify_all();
    }
}

/// A reply, ready to be sent.
pub(super) struct Reply {
    head: Head,
    body: Body,
    _permit: Permit,
}

/// The bytes before a reply's data, without an allocation.
pub(super) struct Head {
    bytes: [u8; Self::MOST],
    length: u8,
}

impl Head {
    const MOST: usize = wire::CHUNK_BYTES + 8;

    pub(super) fn new(parts: &[&[u8]]) -> Self {
        let mut head = Self {
            bytes: [0; Self::MOST],
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
    /// Few bytes that are no data.
    Small(Vec<u8>),
    /// A read.
    Data(Buffer),
    /// A read with holes: heads and data by turns, ranges of the two.
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

    /// How many slices [`Self::slices`] gives.
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

/// Replies that wait to be sent. Whoever flushes sends everybody's, in one call where that is possible; while one
/// thread sends, others leave theirs and go on. So replies never interleave and no thread waits for another.
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

    /// Whether the client takes nothing more: there is no use in doing what else it asked for.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Leaves a reply; [`Self::flush`] sends it.
    pub(super) fn put(&self, reply: Reply) {
        if !self.is_gone() {
            self.state.lock().queue.push_back(reply);
        }
    }

    /// Sends what is there, unless another thread is at it. A client that takes nothing for too long is cut off.
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

/// The time that is left.
pub(super) fn left(deadline: Instant) -> std::time::Duration {
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_counts_requests_and_bytes_and_lets_one_alone_pass() {
        let budget = Budget::new(3, 100);
        let long = budget.try_admit(1000).expect("one alone");
        assert!(budget.try_admit(0).is_none(), "more than the bytes");
        drop(long);
        let some: Vec<Permit> = (0..3).filter_map(|_| budget.try_admit(30)).collect();
        assert_eq!(some.len(), 3);
        assert!(budget.try_admit(1).is_none(), "more than the requests");
        let waiting = {
            let budget = Arc::clone(&budget);
            std::thread::spawn(move || drop(budget.admit(100)))
        };
        drop(some);
        waiting.join().unwrap();
        budget.drain();
    }

    #[test]
    fn what_waits_for_long_keeps_its_bytes_but_no_place_among_the_rest() {
        let budget = Budget::new(2, 100);
        let mut long: Vec<Permit> = (0..9)
            .map(|_| {
                let mut permit = budget.try_admit(10).expect("a place");
                permit.park();
                permit
            })
            .collect();
        let last = budget.try_admit(10).expect("a place");
        assert!(budget.try_admit(1).is_none(), "more than the bytes");
        drop((last, long.pop()));
        let two: Vec<Permit> = (0..3).filter_map(|_| budget.try_admit(1)).collect();
        assert_eq!(two.len(), 2);
        drop((two, long));
        budget.drain();
        let many: Vec<Permit> = (0..MOST_PARKED + 9)
            .map_while(|_| {
                let mut permit = budget.try_admit(0)?;
                permit.park();
                Some(permit)
            })
            .collect();
        assert_eq!(many.len(), MOST_PARKED + 2);
    }
}
