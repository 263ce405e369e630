//! A request, and what the scheduler needs to know about its replies.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use drover_device::remote::{Chunks, Shape};

use super::runs::bytes;
use crate::protocol::{ConnectionKind, Request};

/// A request, and the receiver of its reply.
#[derive(Debug)]
pub struct Job<T> {
    /// The request; its ID is assigned when it is sent.
    pub request: Request,
    /// Its body.
    pub body: Bytes,
    /// The deadline: it fails without a reply by then.
    pub deadline: Duration,
    /// Its chunks have arrived with a wrong digest before.
    pub again: bool,
    /// For a flush: the changes that it makes durable, a mark of [`Unflushed`](super::unflushed::Unflushed).
    pub covers: u64,
    /// It repeats a change that an earlier link has answered.
    pub repeats: bool,
    /// The receiver of the reply.
    pub to: T,
}

impl<T: Default> Job<T> {
    /// A read of a run.
    pub fn read(run: Chunks, background: bool, deadline: Duration) -> Self {
        let request = Request::Read {
            id: 0,
            first: run.first,
            count: run.count,
            background,
        };
        Self::new(request, Bytes::new(), deadline, T::default())
    }
}

impl<T> Job<T> {
    /// A request with its body.
    pub fn new(request: Request, body: Bytes, deadline: Duration, to: T) -> Self {
        Self {
            request,
            body,
            deadline,
            again: false,
            covers: 0,
            repeats: false,
            to,
        }
    }

    /// Whether it is a background read.
    pub fn is_background(&self) -> bool {
        matches!(
            self.request,
            Request::Read {
                background: true,
                ..
            }
        )
    }

    /// Whether it can be repeated on another link: it is idempotent, and its reply means the same.
    pub fn survives(&self) -> bool {
        !matches!(
            self.request,
            Request::Write { .. }
                | Request::Zero { .. }
                | Request::Commit { .. }
                | Request::Close { .. }
                | Request::Staged { .. }
        )
    }

    /// The chunks of a read.
    pub fn chunks(&self) -> Option<Chunks> {
        match self.request {
            Request::Read { first, count, .. } => Some(Chunks { first, count }),
            _ => None,
        }
    }

    /// The kind of connection it needs.
    pub fn connection(&self) -> ConnectionKind {
        match self.request {
            // All on one connection: the site makes overlapping ones in this order.
            _ if self.repeats => ConnectionKind::Front,
            Request::Write { .. } | Request::Zero { .. } | Request::DirectWrite { .. } => {
                ConnectionKind::Push
            }
            Request::Read { .. } | Request::DirectRead { .. } => ConnectionKind::Back,
            _ => ConnectionKind::Front,
        }
    }

    /// Its weight on its connection, in bytes.
    pub fn weight(&self, shape: Shape) -> u64 {
        match self.request {
            Request::Read { count, .. } => bytes(shape, count),
            Request::DirectRead { length, .. } => u64::from(length),
            _ => self.body.len() as u64,
        }
    }
}

/// The head of a reply with chunks, and its size.
#[derive(Clone, Copy, Debug)]
pub struct ChunksReply {
    /// Request ID.
    pub id: u64,
    /// The first chunk.
    pub first: u64,
    /// Number of chunks.
    pub count: u32,
    /// Its payload bytes on the link.
    pub wire: u64,
    /// Echo of the bytes received according to the last credit.
    pub echo: u64,
    /// Whether the site had nothing else to send.
    pub last: bool,
}

/// The range of bytes that a direct change changes.
pub fn changed(request: &Request) -> Option<Range<u64>> {
    let (offset, length) = match *request {
        Request::DirectWrite { offset, length, .. } => (offset, length.into()),
        Request::DirectZero { offset, length, .. } | Request::DirectTrim { offset, length, .. } => {
            (offset, length)
        }
        _ => return None,
    };
    Some(offset..offset.saturating_add(length))
}

/// The same request with another ID.
pub fn with_id(request: &Request, new: u64) -> Request {
    let mut request = request.clone();
    if let Some(id) = request.id_mut() {
        *id = new;
    }
    request
}
