//! Arriving chunks: they are stored in the cache, and the requests waiting for them are woken.

use std::sync::atomic::Ordering::Relaxed;

use drover_core::{DeviceError, Digest};

use super::shared::Shared;
use super::state::ChunkState;
use super::wait::{Outcome, Waiting};
use crate::remote::{Chunks, Content, Fetched};

/// What happened to a chunk that arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Stored,
    /// The local contents are newer.
    Newer,
    /// There is no room for it, or its contents are invalid.
    Refused,
}

impl Shared {
    pub(super) fn take_in(&self, chunks: Vec<Fetched>) {
        if self.is_closed() {
            return;
        }
        let mut pulled = 0;
        for Fetched { index, content } in chunks {
            // Chunks that were not requested may be older than the local ones.
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

    /// Stores a chunk. Returns its waiters and their outcome: they are collected while the chunk counts as in flight
    /// and so cannot be evicted, hence none of them joined after a write that the outcome lacks.
    fn take_one(&self, index: u64, content: Content) -> (Taken, Waiting, Outcome) {
        if matches!(&content, Content::Data(bytes, _) if bytes.len() as u64 != self.geometry.length(index))
        {
            let error = DeviceError::Corrupt(format!("chunk {index} arrived with a wrong length"));
            let waiting = self.waits.take(index);
            return (Taken::Refused, waiting, Outcome::Failed(error));
        }
        let room = self.make_room(index);
        // Nobody writes to a chunk that is handed out between this check and collecting the waiters.
        if let Err(error) = room
            && let _stripe = self.states.read(index)
            && self.states.get(index) == ChunkState::Absent
        {
            let waiting = self.waits.take(index);
            return (Taken::Refused, waiting, Outcome::Handed(content, error));
        }
        // If there was no room, it has been written to meanwhile and occupies its own space.
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
                    // Without the local writes it must not be used.
                    _ => Outcome::Failed(error),
                };
                (Taken::Refused, self.waits.take(index), outcome)
            }
        }
    }

    /// Makes room for an arriving chunk: one with waiters may evict unused chunks, others may not.
    fn make_room(&self, index: u64) -> Result<(), DeviceError> {
        match self.waits.any(index) {
            _ if self.states.get(index).stored() => Ok(()),
            true => self.evict_for(1, &(index..index + 1)),
            false if !self.is_full(1) => Ok(()),
            false if self.states.is_ahead(index) => self.evict_for_ahead(index),
            false => Err(DeviceError::NoSpace("the cache is full".into())),
        }
    }

    /// Stores a chunk and returns its final contents; none when the local ones are newer.
    fn store(&self, index: u64, content: &Content) -> Result<Option<Content>, DeviceError> {
        let _stripe = self.states.write(index);
        // It may arrive twice, the second time older than the local contents; after a close the files may belong to
        // another process.
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
                // The local writes are part of it, and may be newer than what arrived.
                let bytes = self.cache.chunk(index)?;
                let digest = Digest(blake3::hash(&bytes).into());
                Ok(Some(Content::Data(bytes.into(), digest)))
            }
            _ => Ok(None),
        }
    }

    /// The caller holds the stripe's write lock.
    pub(super) fn become_clean(&self, index: u64, state: ChunkState, digest: Option<Digest>) {
        let mut table = self.table.lock();
        table.present.remove(&index);
        table.settled(index, digest);
        self.states.set(index, state);
    }

    /// Adds the missing subchunks to a partial chunk.
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
        // All local writes are at the remote already.
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

    /// A partial chunk with nothing left to push becomes absent once no fetch of it is in flight.
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
