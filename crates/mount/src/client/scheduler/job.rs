//! A request, and what the scheduler sees of its answers.

use std::time::Duration;

use bytes::Bytes;
use drover_device::remote::{Chunks, Shape};

use super::runs::bytes;
use crate::protocol::{Ask, ConnectionKind};

/// A request, and whom to tell.
#[derive(Debug)]
pub struct Job<T> {
    /// What is asked; its id is filled in when it is sent.
    pub ask: Ask,
    /// What goes with it.
    pub body: Bytes,
    /// When it is given up.
    pub deadline: Duration,
    /// It has brought a wrong digest before.
    pub again: bool,
    /// Whom to tell.
    pub to: T,
}

impl<T> Job<T> {
    /// Whether nobody waits for it.
    pub fn is_background(&self) -> bool {
        matches!(
            self.ask,
            Ask::Read {
                background: true,
                ..
            }
        )
    }

    /// Whether it can be asked again on another link: it changes nothing, or the same again, and the answer means the same.
    pub fn survives(&self) -> bool {
        !matches!(
            self.ask,
            Ask::Write { .. }
                | Ask::Zero { .. }
                | Ask::Commit { .. }
                | Ask::Close { .. }
                | Ask::Staged { .. }
        )
    }

    /// The chunks of a read.
    pub fn chunks(&self) -> Option<Chunks> {
        match self.ask {
            Ask::Read { first, count, .. } => Some(Chunks { first, count }),
            _ => None,
        }
    }

    /// The kind of connection that it is for.
    pub fn connection(&self) -> ConnectionKind {
        match self.ask {
            Ask::Write { .. } | Ask::Zero { .. } | Ask::DirectWrite { .. } => ConnectionKind::Push,
            Ask::Read { .. } | Ask::DirectRead { .. } => ConnectionKind::Back,
            _ => ConnectionKind::Front,
        }
    }

    /// What it weighs on its connection, in bytes.
    pub fn weight(&self, shape: Shape) -> u64 {
        match self.ask {
            Ask::Read { count, .. } => bytes(shape, count),
            Ask::DirectRead { length, .. } => u64::from(length),
            _ => self.body.len() as u64,
        }
    }
}

/// What an answer with chunks says about itself.
#[derive(Clone, Copy, Debug)]
pub struct ChunksAnswer {
    /// Of the request.
    pub id: u64,
    /// The first chunk.
    pub first: u64,
    /// How many.
    pub count: u32,
    /// Payload bytes that it took on the link.
    pub wire: u64,
    /// What the site had been told to have arrived.
    pub echo: u64,
    /// Nothing else waited to leave.
    pub last: bool,
}

/// The same request with another number.
pub fn with_id(ask: &Ask, new: u64) -> Ask {
    let mut ask = ask.clone();
    if let Some(id) = ask.id_mut() {
        *id = new;
    }
    ask
}
