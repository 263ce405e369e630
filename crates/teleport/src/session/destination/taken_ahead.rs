//! Takes batches from an old copy of a disk on threads of their own, ahead of the source's word that it skips them: else what
//! the source has to send waits until all that comes before it was copied here.
//!
//! A source skips each batch that it was told of, so nothing else writes to these places of the partial file.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use drover_core::BLOCK_SIZE_U64;
use parking_lot::{Condvar, Mutex};

use super::prepare::ensure_room;
use super::taken::{Known, Taken};
use crate::TeleportError;
use crate::protocol::BATCH_BLOCKS;
use crate::session::literals_in::Incoming;
use crate::site::Site;

/// Threads that read, digest and write.
const THREADS: usize = 2;

/// Batches that were begun, and that nobody has asked for yet: each keeps its digests in memory.
const MAX_AHEAD: usize = 32;

/// The batches of an image that are taken; the threads end when it is dropped.
pub struct TakenAhead {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    known: Arc<Known>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The first batch that nobody has begun with, if it is known.
    next: u64,
    /// Begun, and not asked for.
    ahead: usize,
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
    /// Begins with the first known batch that is at least `from`. The partial file may hold something there (`compare`).
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        site: &Arc<Site>,
        known: Arc<Known>,
        into: Arc<Incoming>,
        compare: bool,
        from: u64,
    ) -> std::io::Result<Self> {
        let state = State {
            next: from,
            ahead: 0,
            done: BTreeMap::new(),
            stopped: false,
        };
        let shared = Arc::new(Shared {
            known,
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

    /// A batch, which is known, when it is in place; they are asked for in ascending order.
    ///
    /// # Errors
    /// When it could not be read or written, or there is no room for it.
    pub fn get(&self, index: u64) -> Result<Taken, TeleportError> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(taken) = state.done.remove(&index) {
                state.ahead -= 1;
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
        while state.ahead >= MAX_AHEAD && !state.stopped {
            self.changed.wait(&mut state);
        }
        if state.stopped {
            return None;
        }
        let index = self.known.have.next_from(state.next)?;
        state.next = index + 1;
        state.ahead += 1;
        Some(index)
    }
}

fn work(site: &Site, shared: &Shared, into: &Incoming, compare: bool) {
    let _panicking = Panicking(shared);
    while let Some(index) = shared.begin() {
        let room = ensure_room(site, BATCH_BLOCKS * BLOCK_SIZE_U64);
        let taken = room.and_then(|()| shared.known.take(index, into, compare));
        shared.state.lock().done.insert(index, taken);
        shared.changed.notify_all();
    }
}
