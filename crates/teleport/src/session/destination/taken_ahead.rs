//! Takes batches from an old copy of a disk on threads of their own, ahead of the source's word that it skips them: else what
//! the source has to send waits until all that comes before it was copied here.
//!
//! A source skips each batch that it was told of, so nothing else writes to these places of the partial file. Who reads the image
//! while it arrives has what was taken at once; a batch that is waited for is taken before the others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;

use drover_core::BLOCK_SIZE_U64;
use parking_lot::{Condvar, Mutex};

use super::prepare::ensure_room;
use super::taken::{Known, Taken};
use crate::TeleportError;
use crate::partials::Partial;
use crate::protocol::BATCH_BLOCKS;
use crate::session::literals_in::Incoming;
use crate::site::Site;

/// Threads that read, digest and write.
const THREADS: usize = 2;

/// Batches that were begun in their turn, and that nobody has asked for yet: each keeps its digests in memory.
const MAX_AHEAD: usize = 32;

/// The same of those that were begun before their turn. A reader that waits for more asks again.
const MAX_EARLY: usize = 32;

/// The batches of an image that are taken; the threads end when it is dropped.
pub struct TakenAhead {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    known: Arc<Known>,
    partial: Arc<Partial>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The first batch that was not begun in its turn, if it is known.
    next: u64,
    /// Begun in their turn, and not asked for.
    ahead: usize,
    /// To be begun before their turn.
    urgent: BTreeSet<u64>,
    /// Begun before their turn, and not asked for.
    early: BTreeSet<u64>,
    done: BTreeMap<u64, Result<Taken, TeleportError>>,
    stopped: bool,
}

/// Ends the wait for the batch of a thread that panics.
struct Panicking<'a>(&'a Shared);

impl Drop for Panicking<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

impl TakenAhead {
    /// Begins with the first known batch that is at least `from`. The partial file may hold something there (`compare`); `partial` is
    /// told what is in place.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        site: &Arc<Site>,
        known: Arc<Known>,
        into: Arc<Incoming>,
        partial: Arc<Partial>,
        compare: bool,
        from: u64,
    ) -> std::io::Result<Self> {
        let state = State {
            next: from,
            ..State::default()
        };
        let shared = Arc::new(Shared {
            known,
            partial,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut taken = Self {
            shared,
            threads: Vec::new(),
        };
        let runtime = tokio::runtime::Handle::try_current().ok();
        for _ in 0..THREADS {
            let (site, shared, into) = (site.clone(), taken.shared.clone(), into.clone());
            let runtime = runtime.clone();
            let body = move || {
                // Making room may ask a teleporter on another machine.
                let _entered = runtime.as_ref().map(|r| r.enter());
                work(&site, &shared, &into, compare);
            };
            let thread = std::thread::Builder::new().name("take".into());
            taken.threads.push(thread.spawn(body)?);
        }
        Ok(taken)
    }

    /// A known batch is waited for: it is taken before others that were not begun.
    pub fn hurry(&self, index: u64) {
        if self.shared.state.lock().hurry(index) {
            self.shared.changed.notify_all();
        }
    }

    /// A batch, which is known, when it is in place; they are asked for in ascending order.
    ///
    /// # Errors
    /// When it could not be read or written, or there is no room for it.
    pub fn get(&self, index: u64) -> Result<Taken, TeleportError> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(taken) = state.done.remove(&index) {
                state.asked(index);
                self.shared.changed.notify_all();
                return taken;
            }
            if state.stopped {
                return Err(TeleportError::Stopped);
            }
            self.shared.changed.wait(&mut state);
        }
    }
}

impl Drop for TakenAhead {
    fn drop(&mut self) {
        self.shared.stop();
        self.threads.drain(..).for_each(|t| drop(t.join()));
    }
}

impl Shared {
    fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// The next batch to take; waits until it may be begun. `None` at the end.
    fn begin(&self) -> Option<u64> {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return None;
            }
            match state.begin(|from| self.known.have.next_from(from)) {
                Begin::Batch(index) => return Some(index),
                Begin::End => return None,
                Begin::Later => self.changed.wait(&mut state),
            }
        }
    }
}

enum Begin {
    Batch(u64),
    /// When more were asked for.
    Later,
    /// All were begun.
    End,
}

impl State {
    /// Whether a batch is to be begun before its turn that was not.
    fn hurry(&mut self, index: u64) -> bool {
        let is_begun = index < self.next || self.early.contains(&index);
        !is_begun && self.early.len() + self.urgent.len() < MAX_EARLY && self.urgent.insert(index)
    }

    /// A batch that was begun is asked for; all before it were.
    fn asked(&mut self, index: u64) {
        match self.early.remove(&index) {
            true => self.next = self.next.max(index + 1),
            false => self.ahead -= 1,
        }
    }

    /// What is to be begun now; `next` finds the first known batch that is at least this one.
    fn begin(&mut self, next: impl Fn(u64) -> Option<u64>) -> Begin {
        if let Some(index) = self.urgent.pop_first() {
            self.early.insert(index);
            return Begin::Batch(index);
        }
        while let Some(index) = next(self.next) {
            if self.early.contains(&index) {
                self.next = index + 1;
                continue;
            }
            if self.ahead >= MAX_AHEAD {
                return Begin::Later;
            }
            self.next = index + 1;
            self.ahead += 1;
            return Begin::Batch(index);
        }
        Begin::End
    }
}

fn work(site: &Site, shared: &Shared, into: &Incoming, compare: bool) {
    let _panicking = Panicking(shared);
    while let Some(index) = shared.begin() {
        let room = ensure_room(site, BATCH_BLOCKS * BLOCK_SIZE_U64);
        let taken = room.and_then(|()| shared.known.take(index, into, compare));
        if let Ok(Taken { batch, .. }) = &taken {
            let first = batch.first_block();
            let blocks = first..first + batch.data.blocks();
            shared.partial.ahead(blocks);
        }
        shared.state.lock().done.insert(index, taken);
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_begun_once_and_those_that_are_waited_for_first() {
        for seed in 0..200 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let last = rng.u64(1..200);
            let known: BTreeSet<u64> = (0..last).filter(|_| rng.u8(..4) > 0).collect();
            let next = |from: u64| known.range(from..).next().copied();
            let mut state = State::default();
            let mut begun = BTreeSet::new();
            let mut asked = known.iter().copied().peekable();
            let mut ended = false;
            while let Some(wanted) = asked.peek().copied() {
                match rng.u8(..3) {
                    0 => {
                        let index = rng.u64(..last);
                        // As the driver does: known, and not asked for.
                        if known.contains(&index) && index >= wanted {
                            state.hurry(index);
                        }
                    }
                    1 => {
                        let first = state.urgent.first().copied();
                        match state.begin(next) {
                            Begin::Batch(index) => {
                                assert!(known.contains(&index) && begun.insert(index));
                                assert!(first.is_none_or(|first| first == index), "seed {seed}");
                            }
                            // Then the next one that is asked for was begun.
                            Begin::Later => assert!(begun.contains(&wanted), "seed {seed}"),
                            Begin::End => {
                                assert_eq!(begun, known, "seed {seed}");
                                ended = true;
                            }
                        }
                    }
                    _ if begun.contains(&wanted) => {
                        state.asked(wanted);
                        asked.next();
                    }
                    _ => {}
                }
                assert!(state.ahead <= MAX_AHEAD && state.early.len() <= MAX_EARLY);
                assert!(!ended || state.urgent.is_empty(), "nobody would begin it");
            }
        }
    }
}
