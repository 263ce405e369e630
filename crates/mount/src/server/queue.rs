//! The request queue of a connection at the site, and the order of execution.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use drover_net::{Code, Refusal};

use super::unit::{Effect, Unit, changes};
use crate::protocol::{MAX_ASKED, MAX_ASKED_BYTES, MAX_DIRECT, MAX_READ, MAX_UNIT, Request};

/// Maximum background units of a connection executing or waiting for the link.
const BACK_UNITS: usize = 8;

/// Maximum foreground units of a connection executing or waiting for the link.
const FRONT_UNITS: usize = 64;

/// Maximum changes among them, so that reads of the connection do not queue behind more.
const CHANGE_UNITS: usize = 8;

/// Bytes of replies waiting for the link beyond which no more are produced: the same again for foreground replies, so
/// that background ones without credit do not block them.
const MAX_READY: u64 = 4 << 20;

/// Bytes being read for replies beyond which no more work is started: the same again for foreground work.
const MAX_WORKING: u64 = 8 << 20;

/// A connection's requests.
#[derive(Debug, Default)]
pub struct Queue {
    front: VecDeque<Entry>,
    back: VecDeque<Entry>,
    /// Changes; they count as foreground.
    changes: VecDeque<Entry>,
    pending: HashMap<u64, PendingRequest>,
    body_bytes: usize,
    front_units: usize,
    back_units: usize,
    /// Changes being executed, which count in [`Queue::front_units`].
    change_units: usize,
    front_ready: u64,
    back_ready: u64,
    front_working: u64,
    back_working: u64,
}

/// A request that is not completely answered.
#[derive(Debug)]
struct PendingRequest {
    /// Outstanding replies: chunks of a read, otherwise one.
    replies: u32,
    /// A background read promoted to a foreground one.
    urgent: bool,
}

#[derive(Debug)]
struct Entry {
    request: Request,
    body: Bytes,
    /// For a read: its remaining part.
    next: u64,
    left: u32,
}

impl Queue {
    /// Queues a request.
    ///
    /// # Errors
    /// [`Code::Protocol`] for one that is too large, or one too many: a well-behaved mount sends neither.
    pub fn admit(&mut self, request: Request, body: Bytes, chunk: u32) -> Result<(), Refusal> {
        let bad = |text: &str| Err(Refusal::new(Code::Protocol, text));
        let Some(id) = request.id() else {
            return Ok(());
        };
        if self.pending.len() >= MAX_ASKED || self.body_bytes + body.len() > MAX_ASKED_BYTES {
            return bad("too many requests in flight");
        }
        if id == 0 || self.pending.contains_key(&id) {
            return bad("a request with an ID that is in use");
        }
        if !body.is_empty()
            && !matches!(request, Request::Write { .. } | Request::DirectWrite { .. })
        {
            return bad("a body on a request that takes none");
        }
        let (mut next, mut left, mut background) = (0, 0, false);
        match &request {
            Request::Read {
                first,
                count,
                background: b,
                ..
            } => {
                if *count == 0 || (*count > 1 && *count > MAX_READ / chunk) {
                    return bad("a read beyond the maximum length");
                }
                (next, left, background) = (*first, *count, *b);
            }
            Request::DirectRead { length, .. } if *length > MAX_DIRECT => {
                return bad("a direct read beyond the maximum length");
            }
            Request::Write { length, .. } | Request::DirectWrite { length, .. }
                if *length > MAX_DIRECT || body.len() > *length as usize =>
            {
                return bad("a write beyond the maximum length");
            }
            _ => {}
        }
        let pending = PendingRequest {
            replies: left.max(1),
            urgent: false,
        };
        self.pending.insert(id, pending);
        self.body_bytes += body.len();
        let entry = Entry {
            request,
            body,
            next,
            left,
        };
        if background {
            self.back.push_back(entry);
        } else if changes(&entry.request) {
            self.changes.push_back(entry);
        } else {
            self.front.push_back(entry);
        }
        Ok(())
    }

    /// Promotes a background read to a foreground one. For its parts that are executing or waiting for the link, see
    /// [`Queue::promote`].
    pub fn hurry(&mut self, id: u64) {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.urgent = true;
        }
        let at = self.back.iter().position(|e| e.request.id() == Some(id));
        if let Some(entry) = at.and_then(|at| self.back.remove(at)) {
            self.front.push_back(entry);
        }
    }

    /// The next unit of work and whether it is a foreground one. Background units are about `unit` bytes long.
    pub fn take(&mut self, chunk: u32, unit: u64) -> Option<(Unit, bool)> {
        if self.front_units < FRONT_UNITS
            && self.front_ready < MAX_READY
            && self.front_working < MAX_WORKING
            && let Some(unit) = Self::cut(&mut self.front, u64::from(MAX_UNIT), chunk)
        {
            self.front_units += 1;
            self.front_working += Effect::of(&unit, chunk).weight();
            self.forget(&unit);
            return Some((unit, true));
        }
        // Their replies are short.
        if self.front_units < FRONT_UNITS
            && self.change_units < CHANGE_UNITS
            && let Some(unit) = Self::cut(&mut self.changes, u64::from(MAX_UNIT), chunk)
        {
            self.front_units += 1;
            self.change_units += 1;
            self.forget(&unit);
            return Some((unit, true));
        }
        if self.back_units < BACK_UNITS
            && self.back_ready < MAX_READY
            && self.back_working < MAX_WORKING
            && let Some(unit) = Self::cut(&mut self.back, unit, chunk)
        {
            self.back_units += 1;
            self.back_working += Effect::of(&unit, chunk).weight();
            return Some((unit, false));
        }
        None
    }

    fn forget(&mut self, unit: &Unit) {
        if let Unit::Other(_, body) = unit {
            self.body_bytes -= body.len();
        }
    }

    fn cut(queue: &mut VecDeque<Entry>, unit: u64, chunk: u32) -> Option<Unit> {
        let entry = queue.front_mut()?;
        if let Request::Read { id, .. } = entry.request {
            let most = (unit.min(u64::from(MAX_UNIT)) / u64::from(chunk)).max(1) as u32;
            let count = most.min(entry.left);
            let first = entry.next;
            entry.next = entry.next.saturating_add(u64::from(count));
            entry.left -= count;
            if entry.left == 0 {
                queue.pop_front();
            }
            return Some(Unit::Read { id, first, count });
        }
        let entry = queue.pop_front()?;
        Some(Unit::Other(entry.request, entry.body))
    }

    /// Whether this background read was promoted.
    pub fn is_urgent(&self, id: u64) -> bool {
        self.pending.get(&id).is_some_and(|pending| pending.urgent)
    }

    /// Counts a background unit, with this many bytes waiting for the link, as foreground from now on.
    pub fn promote(&mut self, bytes: u64) {
        self.back_units -= 1;
        self.back_ready -= bytes;
        self.front_units += 1;
        self.front_ready += bytes;
    }

    /// A unit, taken with this priority, has stopped executing; its reply weighs at most `weight`.
    pub fn worked(&mut self, weight: u64, front: bool) {
        match front {
            true => self.front_working -= weight,
            false => self.back_working -= weight,
        }
    }

    /// A change has stopped executing.
    pub fn changed(&mut self) {
        self.change_units -= 1;
    }

    /// A unit was executed; its reply of this many bytes waits for the link.
    pub fn made(&mut self, bytes: u64, front: bool) {
        *self.ready(front) += bytes;
    }

    fn ready(&mut self, front: bool) -> &mut u64 {
        if front {
            &mut self.front_ready
        } else {
            &mut self.back_ready
        }
    }

    /// An unsolicited reply, the end of the connection, waits for the link.
    pub fn made_unasked(&mut self, bytes: u64) {
        self.front_units += 1;
        self.front_ready += bytes;
    }

    /// Whether a request still expects replies: not after an error.
    pub fn is_pending(&self, id: u64) -> bool {
        self.pending.contains_key(&id)
    }

    /// A reply to `id` of this many bytes was sent or dropped. It counts as `replies` of the pending ones, or as all of
    /// them if it was an error.
    pub fn left(&mut self, bytes: u64, front: bool, id: u64, replies: Option<u32>) {
        *self.ready(front) -= bytes;
        if front {
            self.front_units -= 1;
        } else {
            self.back_units -= 1;
        }
        let Some(pending) = self.pending.get_mut(&id) else {
            return;
        };
        pending.replies = replies.map_or(0, |replies| pending.replies.saturating_sub(replies));
        if pending.replies == 0 {
            self.pending.remove(&id);
            if replies.is_none() {
                self.front.retain(|e| e.request.id() != Some(id));
                self.back.retain(|e| e.request.id() != Some(id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::Kind;
    use super::*;

    const CHUNK: u32 = 4 << 20;

    fn read(id: u64, background: bool) -> Request {
        Request::Read {
            id,
            first: id,
            count: 1,
            background,
        }
    }

    #[test]
    fn background_replies_without_credit_do_not_delay_foreground_ones() {
        let mut queue = Queue::default();
        for id in 1..=4 {
            queue.admit(read(id, true), Bytes::new(), CHUNK).unwrap();
        }
        let mut made = 0;
        while let Some((unit, front)) = queue.take(CHUNK, 1 << 20) {
            assert!(matches!(unit, Unit::Read { .. }) && !front);
            queue.made(u64::from(CHUNK), false);
            made += 1;
        }
        assert_eq!(made, 1, "four MiB that wait are enough");
        queue.admit(read(9, false), Bytes::new(), CHUNK).unwrap();
        let unit = Unit::Read {
            id: 9,
            first: 9,
            count: 1,
        };
        assert_eq!(queue.take(CHUNK, 1 << 20), Some((unit, true)));
    }

    #[test]
    fn no_more_is_read_at_once_than_eight_mebibytes() {
        let mut queue = Queue::default();
        for id in 1..=50 {
            queue.admit(read(id, false), Bytes::new(), CHUNK).unwrap();
        }
        for _ in 0..2 {
            assert!(queue.take(CHUNK, 1 << 20).is_some_and(|(_, front)| front));
        }
        assert_eq!(queue.take(CHUNK, 1 << 20), None);
        queue.worked(u64::from(CHUNK), true);
        assert!(queue.take(CHUNK, 1 << 20).is_some());
    }

    #[test]
    fn reads_do_not_stand_behind_changes_of_their_connection() {
        let mut queue = Queue::default();
        for id in 1..=100 {
            let request = Request::DirectTrim {
                id,
                offset: 0,
                length: 1,
            };
            queue.admit(request, Bytes::new(), CHUNK).unwrap();
        }
        for _ in 0..CHANGE_UNITS {
            let (unit, front) = queue.take(CHUNK, 1 << 20).unwrap();
            assert!(front && unit.kind(front) == Kind::Change);
        }
        assert_eq!(queue.take(CHUNK, 1 << 20), None);
        queue.admit(read(200, false), Bytes::new(), CHUNK).unwrap();
        let (unit, _) = queue.take(CHUNK, 1 << 20).unwrap();
        assert_eq!(unit.kind(true), Kind::Front);
        queue.worked(0, true);
        queue.changed();
        assert!(
            queue
                .take(CHUNK, 1 << 20)
                .is_some_and(|(unit, _)| unit.changes())
        );
    }

    #[test]
    fn an_urgent_read_goes_first_and_an_error_ends_all_of_a_request() {
        let chunk = 64 << 10;
        let mut queue = Queue::default();
        for id in 1..=3 {
            let request = Request::Read {
                id,
                first: 16 * id,
                count: 16,
                background: true,
            };
            queue.admit(request, Bytes::new(), chunk).unwrap();
        }
        queue.hurry(3);
        queue.hurry(77);
        let (unit, front) = queue.take(chunk, 64 << 10).unwrap();
        assert!(
            front
                && matches!(
                    unit,
                    Unit::Read {
                        id: 3,
                        count: 4,
                        ..
                    }
                )
        );
        queue.made(100, true);
        queue.left(100, true, 3, None);
        assert!(!queue.is_pending(3), "an error is all that it gets");
        let (unit, front) = queue.take(chunk, 64 << 10).unwrap();
        assert!(
            !front
                && matches!(
                    unit,
                    Unit::Read {
                        id: 1,
                        count: 1,
                        ..
                    }
                )
        );
        queue.made(50, false);
        queue.left(50, false, 1, Some(1));
        assert!(queue.is_pending(1), "fifteen chunks are to come");
        let again = queue.admit(read(1, true), Bytes::new(), chunk);
        assert_eq!(again.unwrap_err().code, Code::Protocol);
    }
}
