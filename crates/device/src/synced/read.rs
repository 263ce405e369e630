//! Reads: local chunks take one lock and one `pread` per run; others are fetched first.

use std::time::Instant;

use drover_core::{DeviceError, check_range};

use super::shared::Shared;
use super::state::ChunkState;
use super::wait::{Outcome, Ticket};
use crate::remote::{Chunks, Content};

/// Chunks fetched for this request, kept because in a small cache they may be evicted before the retry, or may not have
/// fitted at all.
#[derive(Default)]
pub(super) struct Handed {
    chunks: Vec<(u64, Content)>,
}

impl Handed {
    fn get(&self, index: u64) -> Option<&Content> {
        self.chunks.iter().find(|c| c.0 == index).map(|c| &c.1)
    }
}

/// Outcome of one attempt to read.
enum ReadStep {
    Done,
    /// These chunks are only at the remote.
    Missing(Vec<u64>),
    /// These chunks must be compared with their digests.
    Unverified(Vec<u64>),
}

impl Shared {
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let length = buffer.len() as u64;
        check_range(offset, length, self.geometry.shape.size)?;
        self.alive()?;
        if length == 0 {
            return Ok(());
        }
        self.notice_reader(offset, length);
        let mut deadline = None;
        for (at, take) in self.geometry.pieces(offset, length) {
            let part = &mut buffer[(at - offset) as usize..(at - offset + take) as usize];
            self.read_piece(at, part, &mut deadline)?;
        }
        if self.pull.has_room() {
            self.remote.kick();
        }
        Ok(())
    }

    fn read_piece(
        &self,
        offset: u64,
        buffer: &mut [u8],
        deadline: &mut Option<Instant>,
    ) -> Result<(), DeviceError> {
        let mut handed = Handed::default();
        loop {
            match self.try_read(offset, buffer, &handed)? {
                ReadStep::Done => return Ok(()),
                ReadStep::Unverified(chunks) => self.verify(&chunks)?,
                ReadStep::Missing(chunks) => {
                    let deadline =
                        *deadline.get_or_insert_with(|| Instant::now() + self.give_up_after);
                    for (index, outcome) in self.await_chunks(&chunks, deadline)? {
                        if let Outcome::Here(Some(content)) | Outcome::Handed(content, _) = outcome
                        {
                            handed.chunks.retain(|c| c.0 != index);
                            handed.chunks.push((index, content));
                        }
                    }
                }
            }
        }
    }

    /// Reads a range under one lock, if all of it is local.
    fn try_read(
        &self,
        offset: u64,
        buffer: &mut [u8],
        handed: &Handed,
    ) -> Result<ReadStep, DeviceError> {
        let length = buffer.len() as u64;
        let touched = self.geometry.touched(offset, length);
        let _stripe = self.states.read(touched.start);
        let (mut missing, mut unverified) = (Vec::new(), Vec::new());
        for index in touched.clone() {
            match self.states.get(index) {
                ChunkState::Clean | ChunkState::Zero | ChunkState::Erased | ChunkState::Dirty => {}
                ChunkState::Unverified => unverified.push(index),
                ChunkState::Partial if self.has(index, offset, length) => {}
                _ if handed.get(index).is_some() => {}
                ChunkState::Absent | ChunkState::Partial => missing.push(index),
            }
        }
        if !missing.is_empty() {
            return Ok(ReadStep::Missing(missing));
        }
        if !unverified.is_empty() {
            return Ok(ReadStep::Unverified(unverified));
        }
        // Adjacent chunks in the file are read in one call.
        let mut run: Option<(u64, u64)> = None;
        for index in touched {
            let within = self.geometry.within(index, offset, length);
            let from = self.geometry.start(index) + within.start - offset;
            let to = self.geometry.start(index) + within.end - offset;
            if self.states.mark(index) {
                self.pull.made_room();
            }
            let state = self.states.get(index);
            let plain = match state {
                ChunkState::Zero | ChunkState::Erased => Some(&Content::Zero),
                ChunkState::Absent => handed.get(index),
                ChunkState::Partial if !self.has(index, offset, length) => handed.get(index),
                _ => None,
            };
            match plain {
                None => run = Some((run.map_or(from, |r| r.0), to)),
                Some(content) => {
                    self.read_run(offset, buffer, run.take())?;
                    let part = &mut buffer[from as usize..to as usize];
                    match content {
                        Content::Zero => part.fill(0),
                        Content::Data(bytes, _) => {
                            part.copy_from_slice(
                                &bytes[within.start as usize..within.end as usize],
                            );
                        }
                    }
                    if state == ChunkState::Partial {
                        self.read_present(index, &within, part)?;
                    }
                }
            }
        }
        self.read_run(offset, buffer, run)?;
        Ok(ReadStep::Done)
    }

    fn read_run(
        &self,
        offset: u64,
        buffer: &mut [u8],
        run: Option<(u64, u64)>,
    ) -> Result<(), DeviceError> {
        match run {
            Some((from, to)) => self
                .cache
                .read(offset + from, &mut buffer[from as usize..to as usize]),
            None => Ok(()),
        }
    }

    /// Whether a partial chunk holds everything the range needs.
    fn has(&self, index: u64, offset: u64, length: u64) -> bool {
        let within = self.geometry.within(index, offset, length);
        let wanted = self.geometry.touch(&within);
        let table = self.table.lock();
        wanted & !table.present.get(&index).copied().unwrap_or(0) == 0
    }

    /// Overlays the local subchunks of a partial chunk on the fetched contents.
    fn read_present(
        &self,
        index: u64,
        within: &std::ops::Range<u64>,
        part: &mut [u8],
    ) -> Result<(), DeviceError> {
        let present = self.table.lock().present.get(&index).copied().unwrap_or(0);
        let start = self.geometry.start(index);
        for run in self.geometry.runs(index, present) {
            let (from, to) = (run.start.max(within.start), run.end.min(within.end));
            if from < to {
                let range = (from - within.start) as usize..(to - within.start) as usize;
                self.cache.read(start + from, &mut part[range])?;
            }
        }
        Ok(())
    }

    /// Waits until chunks have arrived, requesting those that are not in flight. Holds no lock while waiting.
    pub(super) fn await_chunks(
        &self,
        chunks: &[u64],
        deadline: Instant,
    ) -> Result<Vec<(u64, Outcome)>, DeviceError> {
        let tickets: Vec<Ticket> = chunks.iter().map(|i| self.waits.join(*i)).collect();
        // Checked after joining: stopping the device wakes only those who have joined.
        if let Err(error) = self.alive() {
            tickets.into_iter().for_each(|t| self.waits.leave(t));
            return Err(error);
        }
        let mut asked: Vec<Chunks> = Vec::new();
        let mut coming = Vec::new();
        for ticket in tickets {
            let index = ticket.index;
            if !self.states.ask(index) && !self.states.in_flight(index) {
                self.waits.leave(ticket);
                continue;
            }
            // A chunk in flight in the background is requested again, which raises its priority.
            if self.waits.demand(index) {
                match asked.last_mut() {
                    Some(run) if run.end() == index => run.count += 1,
                    _ => asked.push(Chunks {
                        first: index,
                        count: 1,
                    }),
                }
            }
            coming.push(ticket);
        }
        for run in asked {
            self.remote.fetch(run);
        }
        let mut outcomes = Vec::new();
        let mut failure = None;
        for ticket in coming {
            let index = ticket.index;
            // Every ticket is waited on or left: a leaked count would never drop to zero.
            let end = match failure {
                None => deadline,
                Some(_) => Instant::now(),
            };
            match self.waits.wait(ticket, end) {
                Some(Outcome::Failed(error)) => failure = Some(error),
                Some(outcome) => outcomes.push((index, outcome)),
                None if failure.is_none() => failure = Some(self.too_late(index)),
                None => {}
            }
        }
        self.alive()?;
        match failure {
            Some(error) if error.is_transient() && Instant::now() < deadline => {
                self.pause_for_link();
                Ok(outcomes)
            }
            Some(error) => Err(error),
            None => Ok(outcomes),
        }
    }

    fn too_late(&self, index: u64) -> DeviceError {
        DeviceError::Unavailable(format!(
            "chunk {index} did not arrive within {} s{}",
            self.give_up_after.as_secs(),
            self.why_down()
        ))
    }

    /// A suffix for error messages that says why the link is down.
    pub(super) fn why_down(&self) -> String {
        match &*self.link.lock() {
            crate::remote::Link::Down(why) => format!(": the link is down ({why})"),
            _ => String::new(),
        }
    }

    /// Waits briefly, or until the link changes, before a request is retried.
    pub(super) fn pause_for_link(&self) {
        let mut link = self.link.lock();
        if !self.is_closed() {
            self.link_changed
                .wait_for(&mut link, std::time::Duration::from_millis(100));
        }
    }

    /// Compares chunks with their digests after an unclean shutdown; mismatches are fetched again. Only writes that
    /// were never flushed can be lost this way.
    pub(super) fn verify(&self, chunks: &[u64]) -> Result<(), DeviceError> {
        for index in chunks {
            let _stripe = self.states.write(*index);
            if self.states.get(*index) != ChunkState::Unverified {
                continue;
            }
            let digest = self.cache.digest(*index)?;
            let bytes = self.cache.chunk(*index)?;
            let mut table = self.table.lock();
            match *blake3::hash(&bytes).as_bytes() == digest.0 {
                // The map records it as clean already.
                true => self.states.set(*index, ChunkState::Clean),
                false => {
                    tracing::debug!(index, "a chunk of the cache does not match its digest");
                    table.settled(*index, None);
                    self.states.set(*index, ChunkState::Absent);
                }
            }
            self.unverified
                .fetch_sub(1, std::sync::atomic::Ordering::AcqRel);
        }
        Ok(())
    }
}
