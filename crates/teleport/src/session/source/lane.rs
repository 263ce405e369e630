//! Several senders of one flock: each takes the next image from what they have in common.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::session::SendItem;

/// A sender's part in the sending of a flock.
#[derive(Clone)]
pub struct Lane {
    /// The number of the flock.
    pub flock: [u8; 16],
    /// Whether the others are still sent when an image cannot be.
    pub goes_on: bool,
    /// Images that no sender has taken yet.
    pub queue: Arc<Mutex<VecDeque<SendItem>>>,
}

impl Lane {
    /// Takes the next image.
    pub fn next(&self) -> Option<SendItem> {
        self.queue.lock().pop_front()
    }

    /// Number of images that nobody has taken.
    pub fn waiting(&self) -> usize {
        self.queue.lock().len()
    }
}
