//! Chunks that arrive: they are stored in the cache, and requests that wait for them are woken.

use std::sync::atomic::Ordering::Relaxed;

use drover_core::{DeviceError, Digest};

use super::shared::Shared;
use super::state::ChunkState;
use super::wait::{Outcome, Waiting};
use crate::remote::{Chunks, Content, Fetched};

/// What became of a chunk that arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Stored,
    /// What is here already is newer.
    Newer,
    /// There is no room for it, or it is not what it should be.
    Refused,
}

impl Shared {
    pub(super) fn take_in(&self, chunks: Vec<Fetched>) {
        if self.is_closed() {
            return;
        }
        let mut pulled = 0;
        for Fetched { index, content } in chunks {
            // What nobody asked for may be older than what is here.
            if index >= self.states.count() || !self.states.in_flight(index) {
                continue;
            }
            let length = self.geometry.length(index);
            let (taken, waiting, outcome) = self.take_one(index, content);
            self.states.answered(index);
            if taken == Taken::Refused {
                self.states.not_ahead(index);
            }
            pulled += length;
            self.waits.tell_those(index, waiting, outcome);
            if taken == Taken::Stored {
                self.tell_local(index);
            }
        }
        self.saver.pulled(pulled);
        if self.states.local() == self.states.count() {
            self.pull.wake();
        }
    }

    /// Puts a chunk where it belongs. Says who waits for it, and what they are to be told: they are taken down while the
    /// chunk counts as asked for and so is not evicted, hence none of them comes after a write that is not in it.
    fn take_one(&self, index: u64, content: Content) -> (Taken, Waiting, Outcome) {
        if matches!(&content, Content::Data(bytes, _) if bytes.len() as u64 != self.geometry.length(index))
        {
            let error = DeviceError::Corrupt(format!("chunk {index} arrived with a wrong length"));
            let waiting = self.waits.take(index);
            return (Taken::Refused, waiting, Outcome::Failed(error));
        }
        let room = self.make_room(index);
        // Nobody writes to a chunk that is handed out between the look and the taking down.
        if let Err(error) = room
            && let _stripe = self.states.read(index)
            && self.states.get(index) == ChunkState::Absent
        {
            let waiting = self.waits.take(index);
            return (Taken::Refused, waiting, Outcome::Handed(content, error));
        }
        // If there was no room, it has been written to meanwhile, and has its own.
        match self.store(index, &content) {
            Ok(held) => {
                if matches!(held, Some(Content::Data(..))) {
                    self.no_room.store(false, Relaxed);
                }
                let taken = match held {
                    Some(_) => Taken::Stored,
                    None => Taken::Newer,
                };
                (taken, self.waits.take(index), Outcome::Here(held))
            }
            Err(error) => {
                if matches!(error, DeviceError::NoSpace(_)) {
                    self.no_room.store(true, Relaxed);
                }
                let _stripe = self.states.read(index);
                let outcome = match self.states.get(index) {
                    ChunkState::Absent => Outcome::Handed(content, error),
                    // Without what was written to it here, it must not be used.
                    _ => Outcome::Failed(error),
                };
                (Taken::Refused, self.waits.take(index), outcome)
            }
        }
    }

    /// Room for a chunk that arrives: what somebody waits for may push out what nobody uses, the rest may not.
    fn make_room(&self, index: u64) -> Result<(), DeviceError> {
        match self.waits.any(index) {
            _ if self.states.get(index).stored() => Ok(()),
            true => self.evict_for(1, &(index..index + 1)),
            false if !self.is_full(1) => Ok(()),
            false if self.states.is_ahead(index) => self.evict_for_ahead(index),
            false => Err(DeviceError::NoSpace("the cache is full".into())),
        }
    }

    /// Puts a chunk in its place, and says what it holds there; none when there was something newer.
    fn store(&self, index: u64, content: &Content) -> Result<Option<Content>, DeviceError> {
        let _stripe = self.states.write(index);
        // It may come twice: the second may be older than what is here, and after a close the files are another's.
        if self.is_closed() || !self.states.in_flight(index) {
            return Ok(None);
        }
        match (self.states.get(index), content) {
            (ChunkState::Absent, Content::Zero) => {
                self.become_clean(index, ChunkState::Zero, None);
                Ok(Some(Content::Zero))
            }
            (ChunkState::Absent, Content::Data(bytes, digest)) => {
                self.cache.write(self.geometry.start(index), bytes)?;
                self.become_clean(index, ChunkState::Clean, Some(*digest));
                Ok(Some(content.clone()))
            }
            (ChunkState::Partial, _) => {
                self.fill_up(index, content)?;
                // What was written here before is part of it, and may be newer than what came.
                let bytes = self.cache.chunk(index)?;
                let digest = Digest(blake3::hash(&bytes).into());
                Ok(Some(Content::Data(bytes.into(), digest)))
            }
            _ => Ok(None),
        }
    }

    /// The stripe's write lock is held.
    pub(super) fn become_clean(&self, index: u64, state: ChunkState, digest: Option<Digest>) {
        let mut table = self.table.lock();
        table.present.remove(&index);
        table.settled(index, digest);
        self.states.set(index, state);
    }

    /// Adds to a partial chunk what it does not have.
    fn fill_up(&self, index: u64, content: &Content) -> Result<(), DeviceError> {
        let here = self.table.lock().present.get(&index).copied().unwrap_or(0);
        let start = self.geometry.start(index);
        for run in self.geometry.runs(index, self.geometry.all(index) & !here) {
            match content {
                Content::Zero => self.cache.punch(start + run.start, run.end - run.start)?,
                Content::Data(bytes, _) => self.cache.write(
                    start + run.start,
                    &bytes[run.start as usize..run.end as usize],
                )?,
            }
        }
        let mut table = self.table.lock();
        table.present.remove(&index);
        if table.unpushed(index) != 0 {
            table.unlogged.remove(&index);
            table.unlogged_dirty.insert(index);
            self.states.set(index, ChunkState::Dirty);
            return Ok(());
        }
        table.guarded.insert(index);
        drop(table);
        // All that was written here is at the far side already.
        let bytes = self.cache.chunk(index)?;
        self.become_clean(
            index,
            ChunkState::Clean,
            Some(Digest(blake3::hash(&bytes).into())),
        );
        Ok(())
    }

    pub(super) fn not_coming(&self, chunks: Chunks, error: &DeviceError) {
        for index in chunks.first..chunks.end().min(self.states.count()) {
            if !self.states.answered(index) {
                continue;
            }
            self.states.not_ahead(index);
            self.settle_partial(index);
            let again = Chunks {
                first: index,
                count: 1,
            };
            if self.waits.must_demand(index) && self.states.ask(index) {
                // It failed as background work; somebody waits for it now.
                self.waits.demand(index);
                self.remote.fetch(again);
                continue;
            }
            self.waits.tell(index, Outcome::Failed(error.clone()));
            if error.is_transient() {
                self.pull_again(again);
            }
        }
    }

    /// A partial chunk with nothing left to push is as good as absent once no fetch of it is under way.
    pub(super) fn settle_partial(&self, index: u64) {
        if self.states.get(index) != ChunkState::Partial {
            return;
        }
        let _stripe = self.states.write(index);
        let mut table = self.table.lock();
        if self.states.get(index) == ChunkState::Partial
            && !self.states.in_flight(index)
            && table.unpushed(index) == 0
        {
            table.present.remove(&index);
            table.guarded.insert(index);
            table.settled(index, None);
            self.states.set(index, ChunkState::Absent);
            drop(table);
            self.spoil_presence(index);
        }
    }
}
