//! Background fetching (r3map §1.4.5.3): read-ahead for sequential readers, then the configured order. The
//! [`Remote`](crate::remote::Remote) controls how much is in flight: it asks for the next run when it has capacity.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;

use super::order::Order;
use super::shared::Shared;
use super::state::ChunkState;
use crate::remote::{Chunks, Link};

mod plan;

pub use plan::Pull;
use plan::{Follow, PIECE, Piece, Pulling};

/// Presence queries in flight.
const PIECES_UNDER_WAY: usize = 2;
/// Maximum length of the read-ahead list and of the retry list, in runs.
const MAX_RUNS: usize = 256;
/// Sequential readers tracked at a time.
const READERS: usize = 8;
/// Largest forward gap, in bytes, that still counts as sequential.
const GAP: u64 = 256 << 10;
/// Read-ahead window in bytes: initial, and maximum (or twice the link's window).
const AHEAD: u64 = 1 << 20;
const MAX_AHEAD: u64 = 8 << 20;
/// In a cache of limited size: the fraction (1/n) available to read-ahead, and to one reader.
const AHEAD_PART: u64 = 2;
const READER_PART: u64 = 4;
/// Read-ahead chunks unused for this long are no longer protected.
const STALE: Duration = Duration::from_secs(10);

impl Shared {
    pub(super) fn next_pull(&self, most: u64) -> Option<Chunks> {
        if self.is_closed() {
            return None;
        }
        let most = (most / self.geometry.chunk()).clamp(1, 1 << 20);
        let guarded = self
            .cache_limit
            .map_or(0, |_| self.table.lock().guarded.len());
        let mut pull = self.pull.state.lock();
        if let Some(run) = self.next_ahead(&mut pull, most, guarded as u64) {
            return Some(run);
        }
        if pull.paused || !pull.background {
            return None;
        }
        // Background pulling evicts nothing.
        let room = self.cache_limit.map_or(u64::MAX, |limit| {
            limit.saturating_sub(self.states.stored() + self.states.asked())
        });
        let most = most.min(room);
        if most == 0 {
            return None;
        }
        if let Some(run) = self.next_of(&mut pull.lost, most) {
            return Some(run);
        }
        if let Some(run) = self.next_of(&mut pull.first, most) {
            return Some(run);
        }
        self.in_order(&mut pull, most)
            .or_else(|| self.next_of(&mut pull.again, most))
    }

    /// The next read-ahead run: of the reader with the least data ahead of it, then of the hinted ranges.
    fn next_ahead(&self, pull: &mut Pulling, most: u64, guarded: u64) -> Option<Chunks> {
        let wanting = |f: &Follow| f.asked.max(f.next) < f.ahead;
        if pull.ahead.is_empty() && !pull.readers.iter().any(wanting) {
            return None;
        }
        let most = most.min(self.room_ahead(pull, guarded));
        if most == 0 {
            self.pull.wants_room.store(true, Ordering::Release);
            return None;
        }
        let run = loop {
            let readers = pull.readers.iter_mut().filter(|f| wanting(f));
            let Some(reader) = readers.min_by_key(|f| f.asked.saturating_sub(f.next)) else {
                break self.next_of(&mut pull.ahead, most);
            };
            let from = reader.asked.max(reader.next);
            let touched = self.geometry.touched(from, reader.ahead - from);
            match self.claim(touched.start, touched.end, most) {
                None => reader.asked = reader.ahead,
                Some(run) => {
                    reader.asked = self.geometry.start(run.end());
                    break Some(run);
                }
            }
        }?;
        if self.cache_limit.is_some() {
            let now = Instant::now();
            for index in run.first..run.end() {
                self.states.set_ahead(index);
                pull.before_readers.push_back((index, now));
            }
        }
        Some(run)
    }

    /// Number of chunks that may be requested as read-ahead now. In a cache of limited size they must fit beside what
    /// cannot be evicted (dirty chunks, and read-ahead not yet used); used chunks are evicted for them.
    fn room_ahead(&self, pull: &mut Pulling, guarded: u64) -> u64 {
        let Some(limit) = self.cache_limit else {
            return u64::MAX;
        };
        while let Some((index, since)) = pull.before_readers.front() {
            let fits = pull.before_readers.len() as u64 <= limit;
            if fits && self.states.is_ahead(*index) && since.elapsed() < STALE {
                break;
            }
            self.states.not_ahead(*index);
            pull.before_readers.pop_front();
        }
        let ahead = self.states.ahead();
        let must_stay = self.states.stored().saturating_sub(self.states.spare()) + guarded;
        let room = limit.saturating_sub(must_stay + ahead);
        room.min((limit / AHEAD_PART).saturating_sub(ahead))
    }

    /// The next run of a list that still needs fetching; finished entries are dropped.
    fn next_of(&self, list: &mut VecDeque<Chunks>, most: u64) -> Option<Chunks> {
        while let Some(front) = list.front_mut() {
            let Some(run) = self.claim(front.first, front.end(), most) else {
                list.pop_front();
                continue;
            };
            match u32::try_from(front.end() - run.end()) {
                Ok(left) if left > 0 => {
                    *front = Chunks {
                        first: run.end(),
                        count: left,
                    };
                }
                _ => drop(list.pop_front()),
            }
            return Some(run);
        }
        None
    }

    /// The next run in sequential order, as far as zero chunks are known.
    fn in_order(&self, pull: &mut Pulling, most: u64) -> Option<Chunks> {
        let known = pull
            .pieces
            .iter()
            .skip((pull.cursor / PIECE) as usize)
            .take_while(|piece| **piece == Piece::Known)
            .count() as u64;
        let end = ((pull.cursor / PIECE + known) * PIECE).min(self.states.count());
        if pull.cursor >= end {
            return None;
        }
        let run = self.claim(pull.cursor, end, most);
        pull.cursor = run.map_or(end, Chunks::end);
        run
    }

    /// Claims the first unclaimed chunks of a range, as many consecutive ones as possible.
    fn claim(&self, first: u64, end: u64, most: u64) -> Option<Chunks> {
        let mut from = first;
        loop {
            let run = self.states.run(from, end)?;
            let wanted = run.first..run.end().min(run.first + most);
            let count = wanted.clone().take_while(|i| self.states.ask(*i)).count();
            if count > 0 {
                return Some(Chunks {
                    first: run.first,
                    count: count as u32,
                });
            }
            // Another thread claimed it first.
            from = wanted.start + 1;
        }
    }

    /// Schedules a run to be pulled again after the puller has passed it: what was lost with the link before all else, since it came
    /// before all else in the order; what failed otherwise after the rest, since it may fail again.
    pub(super) fn pull_again(&self, chunks: Chunks) {
        // What it says itself may not have been told yet.
        let is_lost = !matches!(self.remote.link(), Link::Up(_));
        let mut pull = self.pull.state.lock();
        if is_lost {
            if let Some(last) = pull.lost.back_mut()
                && last.end() == chunks.first
            {
                last.count += chunks.count;
                return;
            }
            if pull.lost.len() < MAX_RUNS {
                pull.lost.push_back(chunks);
                return;
            }
        }
        match pull.again.len() < MAX_RUNS {
            true => pull.again.push_back(chunks),
            false => pull.cursor = pull.cursor.min(chunks.first),
        }
    }

    /// Hint: this range will be read soon.
    pub(super) fn read_ahead(&self, offset: u64, length: u64) {
        let touched = self.geometry.touched(offset, length);
        let Some(run) = self.states.run(touched.start, touched.end) else {
            return;
        };
        let count = u32::try_from(touched.end - run.first).unwrap_or(u32::MAX);
        {
            let mut pull = self.pull.state.lock();
            if pull.ahead.len() >= MAX_RUNS {
                return;
            }
            pull.ahead.push_back(Chunks {
                first: run.first,
                count,
            });
        }
        self.remote.kick();
    }

    /// Detects and tracks sequential readers.
    pub(super) fn notice_reader(&self, offset: u64, length: u64) {
        if self.states.local() == self.states.count() {
            return;
        }
        let end = offset + length;
        let mut most = MAX_AHEAD.max(self.remote.traffic().window.min(u64::MAX / 4) * 2);
        if let Some(limit) = self.cache_limit {
            most = most.min(limit / READER_PART * self.geometry.chunk());
        }
        let wanted = {
            let mut pull = self.pull.state.lock();
            pull.uses += 1;
            let uses = pull.uses;
            let follows = |f: &&mut Follow| offset >= f.next && offset - f.next <= GAP;
            match pull.readers.iter_mut().find(follows) {
                Some(reader) => {
                    reader.next = end;
                    reader.used = uses;
                    reader.hits += 1;
                    let target = end
                        .saturating_add(reader.window)
                        .min(self.geometry.shape.size);
                    let from = reader.ahead.max(end);
                    // Extend only by a worthwhile amount.
                    let worth = reader.hits >= 2
                        && target > from
                        && (target - from >= reader.window / 4
                            || target == self.geometry.shape.size);
                    if worth {
                        reader.ahead = target;
                        reader.window = (reader.window * 2).min(most);
                    }
                    worth
                }
                None => {
                    if pull.readers.len() >= READERS {
                        let oldest = (0..READERS).min_by_key(|i| pull.readers[*i].used);
                        pull.readers.swap_remove(oldest.unwrap_or(0));
                    }
                    pull.readers.push(Follow {
                        next: end,
                        ahead: end,
                        asked: end,
                        window: AHEAD.min(most),
                        hits: 0,
                        used: uses,
                    });
                    false
                }
            }
        };
        if wanted {
            self.remote.kick();
        }
    }

    /// Queries which chunks of the next pieces are zero.
    pub(super) fn ask_presence(&self) {
        let mut asked = Vec::new();
        {
            let mut pull = self.pull.state.lock();
            let under_way = |p: &&Piece| matches!(**p, Piece::Asked | Piece::Spoiled);
            let mut room =
                PIECES_UNDER_WAY.saturating_sub(pull.pieces.iter().filter(under_way).count());
            for (number, piece) in pull.pieces.iter_mut().enumerate() {
                if room == 0 {
                    break;
                }
                if *piece == Piece::Unknown {
                    *piece = Piece::Asked;
                    room -= 1;
                    asked.push(number as u64);
                }
            }
        }
        for number in asked {
            let first = number * PIECE;
            let chunks = Chunks {
                first,
                count: PIECE.min(self.states.count() - first) as u32,
            };
            let me = self.myself.clone();
            let done = Box::new(move |answer| {
                if let Some(shared) = me.upgrade() {
                    shared.presence(number, answer);
                }
            });
            self.remote.presence(chunks, done);
        }
    }

    /// Restarts requests that failed although the link is up; nothing else would retry them.
    pub(super) fn pull_on(&self) {
        if self.is_up() {
            self.ask_presence();
            self.remote.kick();
        }
    }

    fn presence(&self, number: u64, answer: Result<Vec<Chunks>, DeviceError>) {
        if self.is_closed() {
            return;
        }
        let (first, end) = (
            number * PIECE,
            ((number + 1) * PIECE).min(self.states.count()),
        );
        let again = matches!(&answer, Err(error) if error.is_transient());
        for run in answer.into_iter().flatten() {
            let mut index = run.first.max(first);
            while index < run.end().min(end) {
                index = self.zeros(number, index, run.end().min(end));
            }
        }
        {
            let mut pull = self.pull.state.lock();
            pull.pieces[number as usize] = match again {
                true => Piece::Unknown,
                // Without an answer, or with an outdated one, zero chunks are simply fetched.
                false => Piece::Known,
            };
        }
        // After a transient failure the query is repeated on the next link.
        if !again {
            self.ask_presence();
            self.remote.kick();
        }
    }

    /// Marks as zero the absent chunks of a run under one stripe lock; returns the index after the last.
    fn zeros(&self, number: u64, index: u64, end: u64) -> u64 {
        let (at, take) = self
            .geometry
            .pieces(
                self.geometry.start(index),
                (end - index) * self.geometry.chunk(),
            )
            .next()
            .unwrap_or_default();
        let last = self.geometry.touched(at, take).end.min(end).max(index + 1);
        let _stripe = self.states.write(index);
        // Checked under the lock under which spoiling happens.
        if self.pull.state.lock().pieces[number as usize] != Piece::Asked {
            return end;
        }
        for index in index..last {
            if self.states.get(index) == ChunkState::Absent && !self.states.in_flight(index) {
                self.become_clean(index, ChunkState::Zero, None);
            }
        }
        last
    }

    /// A chunk became absent whose contents at the remote may have changed: a presence answer in flight could be wrong.
    pub(super) fn spoil_presence(&self, index: u64) {
        let mut pull = self.pull.state.lock();
        let piece = &mut pull.pieces[(index / PIECE) as usize];
        if *piece == Piece::Asked {
            *piece = Piece::Spoiled;
        }
    }

    pub(super) fn set_paused(&self, paused: bool) {
        self.pull.state.lock().paused = paused;
        self.remote.kick();
    }

    pub(super) fn set_order(&self, order: &Order) {
        {
            let mut pull = self.pull.state.lock();
            pull.background = !matches!(order, Order::None);
            pull.first = order.first(self.shape()).into();
            pull.lost.clear();
            pull.cursor = 0;
        }
        self.remote.kick();
    }

    /// Waits until every chunk is local; false on timeout.
    pub(super) fn wait_local(&self, time: Duration) -> Result<bool, DeviceError> {
        let deadline = Instant::now() + time;
        let mut pull = self.pull.state.lock();
        loop {
            if self.states.local() == self.states.count() {
                return Ok(true);
            }
            self.alive()?;
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            // Learning of zero chunks wakes nobody, hence the polling.
            let next = deadline.min(now + Duration::from_millis(100));
            self.pull.changed.wait_until(&mut pull, next);
        }
    }
}
