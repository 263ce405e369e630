//! Direct changes that the site has answered and not flushed: it forgets them when its process is killed or its host
//! loses power, and a later flush does not know of them. So they are kept here, and repeated on every new link before
//! anything else is sent.
//!
//! Repeating them is safe although the site may have kept them: they are repeated all, in the order of their replies,
//! apart from those that later ones undo. Those that overlap are never in flight together
//! ([`RemoteDevice`](crate::direct::RemoteDevice)), so that is the order in which they were made; and nobody else has
//! written since, or the link is not opened: the edition of the lease would have changed.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use drover_core::BLOCK_SIZE_U64;

use super::job::changed;
use crate::protocol::Request;

/// What a change without a body counts for, in bytes: its memory.
const CHANGE_COST: u64 = 128;

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Unflushed {
    changes: VecDeque<Change>,
    /// Bytes of memory that they take.
    bytes: u64,
    /// How many there ever were.
    made: u64,
    /// How many of them this link is still to be sent, and how many it has not answered yet.
    unsent: usize,
    unanswered: usize,
    /// The fewest that were unanswered on any link since all of them were last repeated.
    fewest: Option<usize>,
}

#[derive(Debug)]
struct Change {
    /// How many were made before it.
    number: u64,
    request: Request,
    body: Bytes,
}

impl Change {
    fn cost(&self) -> u64 {
        self.body.len() as u64 + CHANGE_COST
    }

    /// The bytes whose content it determines, whatever they were before.
    fn determines(&self, size: u64) -> Range<u64> {
        let Some(range) = changed(&self.request) else {
            return 0..0;
        };
        match self.request {
            // The rest stays as it is.
            Request::DirectTrim { .. } => {
                let end = match range.end == size {
                    true => size,
                    false => range.end / BLOCK_SIZE_U64 * BLOCK_SIZE_U64,
                };
                range.start.next_multiple_of(BLOCK_SIZE_U64)..end
            }
            _ => range,
        }
    }
}

impl Unflushed {
    /// Bytes of memory that they take.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The site has made a change.
    pub fn made(&mut self, request: &Request, body: &Bytes) {
        let mut request = request.clone();
        if let Request::DirectZero { only_fast, .. } = &mut request {
            // It was fast, and has to be made again in any case.
            *only_fast = false;
        }
        let change = Change {
            number: self.made,
            request,
            body: body.clone(),
        };
        self.made += 1;
        self.bytes += change.cost();
        self.changes.push_back(change);
    }

    /// What a flush requested now makes durable: to be passed to [`Unflushed::flushed`].
    pub fn mark(&self) -> u64 {
        self.made
    }

    /// A flush has succeeded.
    pub fn flushed(&mut self, mark: u64) {
        while let Some(change) = self.changes.pop_front_if(|change| change.number < mark) {
            self.bytes -= change.cost();
        }
    }

    /// A new link begins to a device of this size in bytes: all are to be repeated, apart from those that later ones
    /// undo. (What is written and trimmed may take space that is no longer there.)
    pub fn repeat(&mut self, size: u64) {
        let mut later = Ranges::default();
        let mut kept = VecDeque::with_capacity(self.changes.len());
        while let Some(change) = self.changes.pop_back() {
            let range = changed(&change.request).unwrap_or_default();
            if later.contain(&range) {
                self.bytes -= change.cost();
                continue;
            }
            later.add(change.determines(size));
            kept.push_front(change);
        }
        self.changes = kept;
        self.unsent = self.changes.len();
        self.unanswered = self.unsent;
    }

    /// Whether some are not repeated yet, so that nothing else may be sent.
    pub fn is_repeating(&self) -> bool {
        self.unanswered > 0
    }

    /// The next one to repeat.
    pub fn next(&self) -> Option<(&Request, &Bytes)> {
        let change = self.changes.get(self.changes.len() - self.unsent)?;
        Some((&change.request, &change.body))
    }

    /// It was sent.
    pub fn sent(&mut self) {
        self.unsent -= 1;
    }

    /// The site has made one again. Returns whether no link has come as far before: a link that is lost again and again
    /// makes no progress.
    pub fn repeated(&mut self) -> bool {
        self.unanswered -= 1;
        let farther = self.fewest.is_none_or(|fewest| self.unanswered < fewest);
        if farther {
            self.fewest = Some(self.unanswered).filter(|unanswered| *unanswered > 0);
        }
        farther
    }
}

/// A union of ranges: disjoint ones that do not touch, by their start.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn contain(&self, range: &Range<u64>) -> bool {
        let before = self.0.range(..=range.start).next_back();
        range.is_empty() || before.is_some_and(|(_, end)| range.end <= *end)
    }

    fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((from, to)) = self.0.range(..=end).next_back()
            && *to >= start
        {
            let from = *from;
            (start, end) = (start.min(from), end.max(*to));
            self.0.remove(&from);
        }
        self.0.insert(start, end);
    }
}
