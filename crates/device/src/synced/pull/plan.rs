//! State that the puller shares with readers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::super::order::Order;
use super::super::state::Geometry;
use crate::remote::Chunks;

/// Chunks per presence query.
pub(super) const PIECE: u64 = 1 << 16;

/// What is known about the zero chunks of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Unknown,
    Asked,
    /// Queried, but the answer may predate the remote's current contents.
    Spoiled,
    Known,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Follow {
    pub(super) next: u64,
    /// End of the range to read ahead...
    pub(super) ahead: u64,
    /// ...and end of the part already requested.
    pub(super) asked: u64,
    pub(super) window: u64,
    pub(super) hits: u32,
    pub(super) used: u64,
}

pub(super) struct Pulling {
    pub(super) paused: bool,
    pub(super) background: bool,
    pub(super) ahead: VecDeque<Chunks>,
    /// Asked for, and lost with the link.
    pub(super) lost: VecDeque<Chunks>,
    pub(super) first: VecDeque<Chunks>,
    /// Position of the sequential pull.
    pub(super) cursor: u64,
    pub(super) again: VecDeque<Chunks>,
    pub(super) pieces: Vec<Piece>,
    pub(super) readers: Vec<Follow>,
    pub(super) uses: u64,
    /// In a cache of limited size: chunks requested as read-ahead, and when; includes some that were read since.
    pub(super) before_readers: VecDeque<(u64, Instant)>,
}

/// The puller.
pub struct Pull {
    pub(super) state: Mutex<Pulling>,
    pub(super) changed: Condvar,
    /// Set when read-ahead found no room; cleared once there is some.
    pub(super) wants_room: AtomicBool,
    pub(super) has_room: AtomicBool,
}

impl Pull {
    pub fn new(geometry: Geometry, order: Order) -> Self {
        let shape = geometry.shape;
        let pieces = shape.chunks().div_ceil(PIECE) as usize;
        Self {
            state: Mutex::new(Pulling {
                paused: false,
                background: !matches!(order, Order::None),
                ahead: VecDeque::new(),
                lost: VecDeque::new(),
                first: order.first(shape).into(),
                cursor: 0,
                again: VecDeque::new(),
                pieces: vec![Piece::Unknown; pieces],
                readers: Vec::new(),
                uses: 0,
                before_readers: VecDeque::new(),
            }),
            changed: Condvar::new(),
            wants_room: AtomicBool::new(false),
            has_room: AtomicBool::new(false),
        }
    }

    /// A read-ahead chunk was used and may be evicted now.
    pub fn made_room(&self) {
        if self.wants_room.swap(false, Ordering::AcqRel) {
            self.has_room.store(true, Ordering::Release);
        }
    }

    /// Whether to announce that read-ahead has room again; true once.
    pub fn has_room(&self) -> bool {
        self.has_room.load(Ordering::Relaxed) && self.has_room.swap(false, Ordering::AcqRel)
    }

    pub fn wake(&self) {
        let _state = self.state.lock();
        self.changed.notify_all();
    }
}
