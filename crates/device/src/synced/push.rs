//! Pushing epochs (r3map §1.4.5.4, made consistent): the dirty set is frozen at an instant, sent while writers
//! continue, and committed at the remote atomically. So the remote always holds a state that the device really had.
//!
//! An interrupted epoch stays frozen and is resumed: the remote reports what of it is staged, and only the rest is
//! sent. An epoch that is refused, or of which nothing is staged when the link is lost, is given up: its chunks are
//! dirty again and part of the next epoch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{DeviceError, Digest};
use parking_lot::{Condvar, Mutex};

use super::options::Sync;
use super::shared::Shared;
use super::state::ChunkState;
use crate::remote::{Change, Epoch, Link};

mod read;
mod turns;

use read::{GIVEN_UP, Reader};
use turns::Phase;
pub use turns::Push;

/// Minimum limit of pushed bytes in flight. The limit is twice the remote's window, so that its next requests are
/// always queued.
const UNDER_WAY: u64 = 8 << 20;
/// Maximum of that limit.
const MAX_UNDER_WAY: u64 = 64 << 20;
/// Longest sleep of the pusher's thread between two checks of the clock.
const TICK: Duration = Duration::from_millis(250);
/// Delay before a commit is retried that failed while the link stayed up.
const COMMIT_AGAIN: Duration = Duration::from_secs(1);

/// What happens to an epoch whose push failed.
enum Failed {
    /// It is resumed later.
    Later(DeviceError),
    /// It is abandoned; its contents go into a new epoch.
    Anew(DeviceError),
}

impl Failed {
    /// For an error of the remote: it keeps what is staged when the link is lost or its disk is full.
    fn there(error: DeviceError) -> Self {
        match error.is_transient() || matches!(error, DeviceError::NoSpace(_)) {
            true => Self::Later(error),
            false => Self::Anew(error),
        }
    }
}

/// Parts of an epoch that are in flight.
#[derive(Default)]
struct Flight {
    bytes: Mutex<(u64, Option<DeviceError>)>,
    changed: Condvar,
}

impl Shared {
    /// Bytes not committed at the remote.
    pub(super) fn unpushed_bytes(&self) -> u64 {
        let table = self.table.lock();
        table.dirty_bytes + table.frozen_bytes
    }

    pub(super) fn flush(&self) -> Result<(), DeviceError> {
        if self.read_only {
            return Ok(());
        }
        if self.sync == Sync::Remote {
            return self.push_and_wait();
        }
        if self.is_due(self.push_interval) && self.is_up() {
            self.freeze();
        }
        self.save(false)?;
        match self.push.state.lock().unreported.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Pushes everything written before the call to the remote, after asking the layers above to flush.
    pub(super) fn push_all(&self) -> Result<(), DeviceError> {
        if let Some(hook) = &self.hooks.before_sync {
            hook();
        }
        match self.read_only {
            true => Ok(()),
            false => self.push_and_wait(),
        }
    }

    fn push_and_wait(&self) -> Result<(), DeviceError> {
        let deadline = Instant::now() + self.give_up_after;
        let mut state = self.push.state.lock();
        let ticket = match (self.table.lock().dirty.is_empty(), state.phase) {
            (true, Phase::Idle) => return Ok(()),
            (true, Phase::Frozen) => {
                if state.refused.as_ref().is_some_and(|r| r.0 >= state.covered) {
                    // Retried once for the new caller.
                    state.wanted += 1;
                    state.covered = state.wanted;
                }
                state.covered
            }
            _ => {
                state.wanted += 1;
                state.wanted
            }
        };
        self.push.changed.notify_all();
        loop {
            if state.done >= ticket {
                return Ok(());
            }
            if let Some((upto, error)) = &state.refused
                && *upto >= ticket
            {
                return Err(error.clone());
            }
            self.alive()?;
            if self
                .push
                .changed
                .wait_until(&mut state, deadline)
                .timed_out()
            {
                return Err(DeviceError::Unavailable(format!(
                    "the writes are kept here, but were not pushed to the remote site within {} s",
                    self.give_up_after.as_secs()
                )));
            }
        }
    }

    fn is_due(&self, interval: Duration) -> bool {
        let dirty = self.table.lock().dirty_bytes;
        let state = self.push.state.lock();
        let calm = state.not_before.is_none_or(|t| Instant::now() >= t);
        state.phase == Phase::Idle
            && dirty > 0
            && calm
            && (state.last_freeze.elapsed() >= interval || dirty >= self.high_water)
    }

    /// Freezes the dirty set into an epoch, unless one is frozen. There is one on return.
    fn freeze(&self) {
        let mut state = self.push.state.lock();
        while state.phase == Phase::Freezing {
            self.push.changed.wait(&mut state);
        }
        if state.phase == Phase::Frozen {
            return;
        }
        state.phase = Phase::Freezing;
        // Any write that returned before one of these tickets was taken has released the barrier. The epoch gets a
        // ticket of its own, for callers that arrive while it is in flight and have nothing to add.
        state.wanted += 1;
        let covered = state.wanted;
        drop(state);
        {
            let _barrier = self.barrier.write();
            self.table.lock().freeze();
        }
        let generation = self.table.lock().generation;
        let mut state = self.push.state.lock();
        state.phase = Phase::Frozen;
        (state.epoch, state.generation) = (None, generation);
        state.covered = covered;
        state.last_freeze = Instant::now();
        state.requested = false;
        self.push.changed.notify_all();
    }

    /// The pusher's thread.
    pub(super) fn keep_pushed(&self) {
        while !self.is_closed() {
            if !self.wait_for_work() {
                let frozen = self.push.state.lock().phase == Phase::Frozen;
                if frozen && !self.is_up() && self.table.lock().there_bytes == 0 {
                    // Nothing is lost, and writers must not preserve old bytes for as long as the link is down.
                    self.give_up(DeviceError::Unavailable("the link is down".into()));
                }
                continue;
            }
            self.freeze();
            match self.push_frozen() {
                Ok(()) => {}
                Err(Failed::Later(error)) => self.put_off(error),
                Err(Failed::Anew(error)) => self.give_up(error),
            }
        }
    }

    /// Whether there is something to push now; returns within a tick in any case.
    fn wait_for_work(&self) -> bool {
        let gone = self.alive().is_err();
        let due = !gone && self.is_due(self.push_interval * 2);
        let mut state = self.push.state.lock();
        let asked = state.wanted > state.done.max(state.refused.as_ref().map_or(0, |r| r.0));
        let calm = state.not_before.is_none_or(|t| Instant::now() >= t);
        let goes_on = state.phase == Phase::Frozen && calm;
        let wanted = asked || due || goes_on || state.requested;
        if wanted && !gone && self.is_up() {
            return true;
        }
        if !self.is_closed() {
            self.push.changed.wait_for(&mut state, TICK);
        }
        false
    }

    /// Sends the parts of the frozen set that the remote lacks, and commits it.
    fn push_frozen(&self) -> Result<(), Failed> {
        let generation = self.push.state.lock().generation;
        let given_up = || Failed::Anew(DeviceError::Unavailable(GIVEN_UP.into()));
        {
            let table = self.table.lock();
            if table.generation != generation {
                return Err(given_up());
            }
            if table.frozen.is_empty() {
                drop(table);
                // Requested although nothing was dirty.
                self.over(Ok(()));
                return Ok(());
            }
        }
        let link = self.link.lock().clone();
        let Link::Up(link) = link else {
            let why = DeviceError::Unavailable("the link is down".into());
            return Err(Failed::Later(why));
        };
        let epoch = self.epoch_to_push(link)?;
        std::thread::scope(|scope| {
            // The remote must not commit what a crash here would forget: the map must record it as dirty before the
            // commit.
            let save = || {
                self.save(false)?;
                self.with_room(|| self.saver.intend(epoch))
            };
            let saving = std::thread::Builder::new()
                .name("synced-epoch".into())
                .spawn_scoped(scope, save);
            let sent = self.send(epoch, generation);
            let saved = match saving {
                Ok(thread) => thread.join().unwrap_or(Err(DeviceError::Closed)),
                Err(_) => save(),
            };
            sent.and(saved.map_err(Failed::Anew))
        })?;
        if !matches!(*self.link.lock(), Link::Up(now) if now == link) {
            let why = DeviceError::Unavailable("the link was cut".into());
            return Err(Failed::Later(why));
        }
        if self.table.lock().generation != generation {
            return Err(given_up());
        }
        let covers = self.table.lock().frozen_bytes;
        self.commit(epoch, covers, link).map_err(Failed::there)?;
        self.finish(epoch);
        Ok(())
    }

    /// The number of the current epoch. A resumed epoch keeps its number and what the remote has staged of it. A new
    /// number is above all earlier ones, including abandoned epochs: the remote may still have one of them staged.
    fn epoch_to_push(&self, link: u64) -> Result<Epoch, Failed> {
        let (epoch, asked_on) = {
            let state = self.push.state.lock();
            (state.epoch, state.asked_on)
        };
        let mut theirs = Epoch(0);
        if epoch.is_some() || asked_on != link {
            theirs = self.ask_staged(epoch)?;
        }
        let mut state = self.push.state.lock();
        state.asked_on = link;
        if let Some(epoch) = epoch {
            return Ok(epoch);
        }
        let last = state.last.max(self.remote.committed()).max(theirs);
        state.last = last.after(random());
        state.epoch = Some(state.last);
        Ok(state.last)
    }

    /// Asks the remote which epoch is staged, and which parts of the current one: those need not be sent.
    fn ask_staged(&self, epoch: Option<Epoch>) -> Result<Epoch, Failed> {
        let size = self.geometry.shape.size;
        // Without a current epoch, only the number of the staged one matters.
        let mut from = epoch.map_or(size, |_| 0);
        loop {
            let ask = |done| self.remote.staged(epoch.unwrap_or_default(), from, done);
            let page = self.wait_for_answer(ask).map_err(Failed::there)?;
            let is_other = Some(page.epoch) != epoch;
            let mut table = self.table.lock();
            for (offset, length) in page.runs.into_iter().filter(|_| !is_other) {
                let length = length.min(size.saturating_sub(offset));
                table.see(self.geometry, offset, length);
            }
            if !is_other && page.end < size {
                if page.end <= from {
                    let why = "the remote site repeats itself when listing what is staged";
                    return Err(Failed::Anew(DeviceError::Corrupt(why.into())));
                }
                from = page.end;
                continue;
            }
            if !table.believe(self.geometry) {
                let why = "the remote site lost part of an epoch";
                return Err(Failed::Anew(DeviceError::Unavailable(why.into())));
            }
            return Ok(page.epoch);
        }
    }

    /// Abandons the current epoch if its preserved bytes occupy space on a full disk; returns whether it did.
    pub(super) fn forsake(&self) -> bool {
        let _barrier = self.barrier.write();
        if !self.copy_before.lock().takes_room() {
            return false;
        }
        tracing::info!("a push is restarted, to free the space it takes on the cache's disk");
        self.table.lock().thaw(self.geometry);
        self.copy_before.lock().clear();
        true
    }

    fn send(&self, epoch: Epoch, generation: u64) -> Result<(), Failed> {
        let flight = Arc::new(Flight::default());
        let mut reader = Reader::new(self, generation);
        let limit = self
            .remote
            .traffic()
            .push_window
            .saturating_mul(2)
            .clamp(UNDER_WAY, MAX_UNDER_WAY);
        let result = loop {
            let changes = match reader.next() {
                Ok(Some(changes)) => changes,
                Ok(None) => break self.land(&flight, 0).map_err(Failed::there),
                Err(error) => break Err(Failed::Anew(error)),
            };
            let bytes: u64 = changes.iter().map(weight).sum();
            if let Err(error) = self.land(&flight, limit.saturating_sub(bytes)) {
                break Err(Failed::there(error));
            }
            flight.bytes.lock().0 += bytes;
            let runs: Vec<_> = changes.iter().map(|c| (c.offset(), c.covers())).collect();
            let (landing, shared) = (Arc::clone(&flight), self.myself.clone());
            let done = Box::new(move |result: Result<(), DeviceError>| {
                if let (Ok(()), Some(shared)) = (&result, shared.upgrade()) {
                    let mut table = shared.table.lock();
                    for (offset, length) in runs {
                        table.staged(shared.geometry, generation, offset, length);
                    }
                }
                let mut state = landing.bytes.lock();
                state.0 -= bytes;
                if let Err(error) = result {
                    state.1.get_or_insert(error);
                }
                landing.changed.notify_all();
            });
            self.remote.push(epoch, changes, done);
        };
        if result.is_err() {
            // None of it may be in flight when it is resumed or another epoch begins.
            let _ = self.land(&flight, 0);
        }
        result
    }

    /// Waits until at most `most` bytes are in flight.
    fn land(&self, flight: &Flight, most: u64) -> Result<(), DeviceError> {
        let mut state = flight.bytes.lock();
        while state.0 > most {
            if self.is_closed() {
                return Err(DeviceError::Closed);
            }
            flight.changed.wait_for(&mut state, TICK);
        }
        match &state.1 {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Commits an epoch. If the reply is lost with the link, the remote's committed epoch tells the outcome once it is
    /// back; if it is lost otherwise, the commit is repeated, which is idempotent. If the epoch is still staged then,
    /// the commit failed: the remote lacks part of it.
    fn commit(&self, epoch: Epoch, covers: u64, link: u64) -> Result<(), DeviceError> {
        let size = self.geometry.shape.size;
        loop {
            let commit = |done| self.remote.commit(epoch, covers, done);
            let Err(error) = self.wait_for_answer(commit) else {
                return Ok(());
            };
            if !error.is_transient() {
                return Err(error);
            }
            let answered = Instant::now();
            loop {
                self.alive()?;
                let now = self.link.lock().clone();
                match now {
                    Link::Up(now) if now > link => {
                        return match self.remote.committed() == epoch {
                            true => Ok(()),
                            false => Err(error),
                        };
                    }
                    Link::Up(_) if answered.elapsed() >= COMMIT_AGAIN => break,
                    _ => self.pause_for_link(),
                }
            }
            let staged = self.wait_for_answer(|done| self.remote.staged(epoch, size, done));
            if staged.is_ok_and(|page| page.epoch == epoch) {
                return Err(error);
            }
            tracing::info!(%error, "a commit is sent again");
        }
    }

    fn wait_for_answer<T: Send + 'static>(
        &self,
        ask: impl FnOnce(Box<dyn FnOnce(Result<T, DeviceError>) + Send>),
    ) -> Result<T, DeviceError> {
        let (sender, answer) = std::sync::mpsc::channel();
        ask(Box::new(move |result| {
            let _ = sender.send(result);
        }));
        loop {
            match answer.recv_timeout(TICK) {
                Ok(result) => return result,
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(DeviceError::Unavailable(
                        "the remote site did not reply".into(),
                    ));
                }
                Err(_) if self.is_closed() => return Err(DeviceError::Closed),
                Err(_) => {}
            }
        }
    }

    /// The epoch is committed: chunks not written again since are clean.
    fn finish(&self, epoch: Epoch) {
        let first = || self.table.lock().frozen.keys().next().copied();
        while let Some(index) = first() {
            self.settle(index);
        }
        self.copy_before.lock().clear();
        {
            let mut table = self.table.lock();
            (table.frozen_bytes, table.there_bytes) = (0, 0);
        }
        // If this record is lost, the intent still identifies the epoch as ours.
        let result = self.with_room(|| self.saver.agree(epoch));
        // That it need not be pushed again may be entered in the map early.
        self.saver.pulled(1);
        self.over(Ok(()));
        if let Err(error) = result {
            tracing::warn!(%error, "the cache's map cannot be written");
        }
    }

    /// Removes one chunk from the committed epoch.
    fn settle(&self, index: u64) {
        let _stripe = self.states.write(index);
        let state = self.states.get(index);
        {
            let mut table = self.table.lock();
            table.frozen.remove(&index);
            if table.unpushed(index) != 0 {
                return;
            }
            table.guarded.insert(index);
        }
        match state {
            ChunkState::Erased => self.become_clean(index, ChunkState::Zero, None),
            ChunkState::Dirty => match self.cache.chunk(index) {
                Ok(bytes) => {
                    let digest = Digest(blake3::hash(&bytes).into());
                    self.become_clean(index, ChunkState::Clean, Some(digest));
                }
                Err(error) => {
                    // An unreadable chunk can be fetched: the remote has it now.
                    tracing::warn!(index, %error, "a chunk of the cache cannot be read");
                    self.become_clean(index, ChunkState::Absent, None);
                    self.spoil_presence(index);
                }
            },
            ChunkState::Partial if !self.states.in_flight(index) => {
                self.become_clean(index, ChunkState::Absent, None);
                self.spoil_presence(index);
                self.pull_again(crate::remote::Chunks {
                    first: index,
                    count: 1,
                });
            }
            _ => {}
        }
    }

    /// Abandons the epoch: its contents are dirty again.
    fn give_up(&self, error: DeviceError) {
        {
            // No writer may be between deciding to preserve bytes and doing so.
            let _barrier = self.barrier.write();
            self.table.lock().thaw(self.geometry);
            self.copy_before.lock().clear();
        }
        let transient = error.is_transient();
        match transient {
            true => tracing::info!(%error, "a push is restarted"),
            false => tracing::warn!(%error, "a push was refused"),
        }
        self.over(Err(error));
        if transient {
            self.pause_for_link();
        }
    }

    /// Keeps the epoch frozen, to be resumed later.
    fn put_off(&self, error: DeviceError) {
        let transient = error.is_transient();
        {
            let mut state = self.push.state.lock();
            state.requested = false;
            state.failed(&error);
            if !transient {
                tracing::warn!(%error, "a push was refused and is retried later");
                // The refusal concerns every waiter.
                let upto = state.wanted;
                state.refuse(upto, error);
            }
            self.push.changed.notify_all();
        }
        if transient {
            self.pause_for_link();
        }
    }

    fn over(&self, result: Result<(), DeviceError>) {
        let mut state = self.push.state.lock();
        state.phase = Phase::Idle;
        state.requested = false;
        if let Err(error) = &result {
            state.failed(error);
        }
        match result {
            Ok(()) => {
                state.done = state.covered;
                state.refused = None;
                state.not_before = None;
                state.unreported = None;
                (state.failures, state.why) = (0, None);
            }
            // Waiters keep waiting: it is retried.
            Err(error) if error.is_transient() => {}
            Err(error) => {
                let upto = state.covered;
                state.refuse(upto, error);
            }
        }
        if state.failures > 0 {
            // Ask again what the remote has staged before the next attempt.
            state.asked_on = 0;
        }
        self.push.changed.notify_all();
    }

    /// The epoch the remote has committed.
    pub(super) fn epoch(&self) -> Epoch {
        self.remote.committed()
    }
}

/// The bytes a change counts for while in flight.
fn weight(change: &Change) -> u64 {
    match change {
        Change::Write(_, bytes) => bytes.len() as u64 + 64,
        Change::Zero(..) => 64,
    }
}

fn random() -> u32 {
    let mut bytes = [0; 4];
    // Without randomness the number still most likely differs from the epochs of others.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u32::from_le_bytes(bytes)
}
