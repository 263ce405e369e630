//! Writes, zeros and trims. A write that covers whole subchunks needs nothing from the remote.

use std::sync::atomic::Ordering;
use std::time::Instant;

use drover_core::DeviceError;

use super::evict::{AT_ONCE, Sparing};
use super::shared::Shared;
use super::state::{ChunkState, Mask};
use super::wait::Outcome;

/// The data of a write.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Data(&'a [u8]),
    /// This many zeros.
    Zeros(u64),
}

impl Source<'_> {
    fn length(self) -> u64 {
        match self {
            Source::Data(data) => data.len() as u64,
            Source::Zeros(length) => length,
        }
    }
}

/// Retries of a write that found no space.
const TRIES: u32 = 4;
/// Fetch rounds for the missing parts before the pusher is asked to make room.
const ROUNDS: u32 = 3;
/// Dirty chunks (about 100 bytes of memory each during a push) above which a trim is skipped and zeroing waits: zeroing
/// a whole large device would take memory proportional to its size.
pub(super) const MAX_ZEROED: usize = 1 << 18;
/// Dirty chunks above which zeroing fails after its wait timed out.
pub(super) const MAX_ZEROED_LATE: usize = 4 * MAX_ZEROED;

impl Shared {
    pub(super) fn write(&self, offset: u64, source: Source<'_>) -> Result<(), DeviceError> {
        self.write_parts(offset, source, true)
    }

    /// `waits`: zeroing waits until there is room to record it.
    fn write_parts(&self, offset: u64, source: Source<'_>, waits: bool) -> Result<(), DeviceError> {
        let mut deadline = None;
        let mut timeout = None;
        for (at, take) in self.parts(offset, source.length()) {
            let part = match source {
                Source::Data(data) => {
                    Source::Data(&data[(at - offset) as usize..(at - offset + take) as usize])
                }
                Source::Zeros(_) => {
                    if waits {
                        self.reserve_zeros(at, take, &mut timeout)?;
                    }
                    Source::Zeros(take)
                }
            };
            self.write_piece(at, part, &mut deadline)?;
        }
        if self.table.lock().dirty_bytes >= self.high_water {
            self.push.wake();
        }
        Ok(())
    }

    /// Splits a range at lock boundaries, and further where a piece would not fit in the cache. A freeze sees each
    /// piece entirely or not at all.
    fn parts(&self, offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
        let geometry = self.geometry;
        let fits = self.cache_limit.map_or(u64::MAX, |limit| limit / 2);
        geometry.pieces(offset, length).flat_map(move |(at, take)| {
            let touched = geometry.touched(at, take);
            let most = match touched.end - touched.start <= fits {
                true => u64::MAX,
                false => fits,
            };
            geometry.small_pieces(at, take, most)
        })
    }

    /// Zeros the whole subchunks of a range; partial ones are left unchanged.
    pub(super) fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let size = self.geometry.shape.size;
        let subchunk = self.geometry.subchunk;
        let from = offset.next_multiple_of(subchunk);
        let to = match offset + length {
            end if end == size => end,
            end => end / subchunk * subchunk,
        };
        // Piece by piece, while there is room to record it: a trim is optional.
        for (at, take) in self.geometry.pieces(from, to.saturating_sub(from)) {
            if self.table.lock().dirty.len() >= MAX_ZEROED {
                self.push.request();
                return Ok(());
            }
            self.write_parts(at, Source::Zeros(take), false)?;
        }
        Ok(())
    }

    /// Zeros occupy no space in the cache, so nothing else bounds the number of chunks dirtied by them: they wait for
    /// the pusher. If it makes no progress within the request timeout, they proceed up to a second, higher limit.
    fn reserve_zeros(
        &self,
        offset: u64,
        length: u64,
        timeout: &mut Option<Instant>,
    ) -> Result<(), DeviceError> {
        let mut touched = self.geometry.touched(offset, length);
        if touched.all(|index| self.states.get(index).zero()) {
            return Ok(());
        }
        loop {
            let dirty = self.table.lock().dirty.len();
            if dirty < MAX_ZEROED {
                return Ok(());
            }
            let deadline = *timeout.get_or_insert_with(|| Instant::now() + self.give_up_after);
            match self.wait_for_room(deadline, false) {
                Err(DeviceError::NoSpace(_)) if dirty < MAX_ZEROED_LATE => return Ok(()),
                result => result?,
            }
        }
    }

    fn write_piece(
        &self,
        offset: u64,
        source: Source<'_>,
        deadline: &mut Option<Instant>,
    ) -> Result<(), DeviceError> {
        let mut tries = 0;
        // Number of completed fetch rounds.
        let mut round = 0;
        loop {
            if round >= ROUNDS {
                // In a small cache fetched chunks may be evicted again before they are used: the pusher must clean more
                // chunks.
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.give_up_after);
                self.wait_for_room(deadline, round > ROUNDS + 6)?;
            }
            let touched = self.geometry.touched(offset, source.length());
            {
                let zeros = matches!(source, Source::Zeros(_));
                let takes = |i: &u64| {
                    !self.states.get(*i).stored() && (!zeros || self.needs_rest(*i, offset, source))
                };
                let new = touched.clone().filter(takes);
                self.reserve(new.count() as u64, &touched, deadline)?;
            }
            let barrier = self.barrier.read();
            // A close waits for the requests past these checks.
            self.alive()?;
            self.may_write()?;
            let stripe = self.states.write(touched.start);
            let missing: Vec<u64> = touched
                .clone()
                .filter(|i| self.needs_rest(*i, offset, source))
                .collect();
            if missing.is_empty() {
                match self.change(offset, source) {
                    Err(DeviceError::NoSpace(why)) if tries < TRIES => {
                        drop(stripe);
                        drop(barrier);
                        tries += 1;
                        if self.evict(AT_ONCE, &touched, Sparing::Nothing) == 0 && !self.forsake() {
                            return Err(DeviceError::NoSpace(why));
                        }
                        continue;
                    }
                    result => return result,
                }
            }
            drop(stripe);
            drop(barrier);
            self.verify(&missing)?;
            let missing: Vec<u64> = missing
                .into_iter()
                .filter(|i| !self.states.get(*i).whole())
                .collect();
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.give_up_after);
            let came = self.await_chunks(&missing, deadline)?;
            round += u32::from(came.len() == missing.len());
            for (_, outcome) in came {
                if let Outcome::Handed(_, error) = outcome {
                    // A cache of limited size will get room; a full or failing disk may not.
                    let is_full = matches!(error, DeviceError::NoSpace(_));
                    tries += u32::from(self.cache_limit.is_none() || !is_full);
                    if tries > TRIES {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Whether a write needs contents of the chunk that are missing or unverified.
    fn needs_rest(&self, index: u64, offset: u64, source: Source<'_>) -> bool {
        let within = self.geometry.within(index, offset, source.length());
        let (touch, cover) = (
            self.geometry.touch(&within),
            self.geometry.cover(index, &within),
        );
        match self.states.get(index) {
            ChunkState::Clean | ChunkState::Zero | ChunkState::Erased | ChunkState::Dirty => false,
            ChunkState::Absent => touch != cover,
            ChunkState::Unverified => cover != self.geometry.all(index),
            ChunkState::Partial => {
                let table = self.table.lock();
                let present = table.present.get(&index).copied().unwrap_or(0);
                touch & !cover & !present != 0
            }
        }
    }

    /// Writes a range of one stripe, which is locked for writing, the barrier shared.
    fn change(&self, offset: u64, source: Source<'_>) -> Result<(), DeviceError> {
        let length = source.length();
        let touched = self.geometry.touched(offset, length);
        let mut changed = Vec::new();
        for index in touched {
            let state = self.states.get(index);
            if state.zero() && matches!(source, Source::Zeros(_)) {
                continue;
            }
            let within = self.geometry.within(index, offset, length);
            self.keep(index, self.geometry.touch(&within))?;
            if state.zero() && self.geometry.cover(index, &within) != self.geometry.all(index) {
                // The file may hold anything where a chunk is known to be zero.
                self.cache
                    .punch(self.geometry.start(index), self.geometry.length(index))?;
            }
            changed.push((index, within));
        }
        if changed.is_empty() {
            return Ok(());
        }
        let written = match source {
            Source::Data(data) => self.cache.write(offset, data),
            Source::Zeros(length) => self.cache.punch(offset, length),
        };
        let mut table = self.table.lock();
        for (index, within) in changed {
            let touch = self.geometry.touch(&within);
            let all = self.geometry.all(index);
            let whole = self.geometry.cover(index, &within) == all;
            let state = self.states.get(index);
            let next = match (&written, source) {
                // Any part of it may have been written: the cached data counts, and differs from the remote.
                (Err(_), _) => match state {
                    ChunkState::Clean | ChunkState::Dirty => Some((ChunkState::Dirty, touch)),
                    ChunkState::Partial => {
                        let present = table.present.get(&index).copied().unwrap_or(0);
                        Some((ChunkState::Partial, touch & present))
                    }
                    // For these, the file is not read, or only after comparing the digest.
                    _ => None,
                },
                (Ok(()), Source::Zeros(_)) if whole => Some((ChunkState::Erased, all)),
                (Ok(()), _) => match state {
                    ChunkState::Absent | ChunkState::Partial => {
                        let present = table.present.entry(index).or_default();
                        *present |= touch;
                        match *present == all {
                            true => Some((ChunkState::Dirty, touch)),
                            false => Some((ChunkState::Partial, touch)),
                        }
                    }
                    _ => Some((ChunkState::Dirty, touch)),
                },
            };
            let Some((next, mask)) = next else { continue };
            if state == ChunkState::Unverified {
                self.unverified.fetch_sub(1, Ordering::AcqRel);
            }
            if next != ChunkState::Partial {
                table.present.remove(&index);
            }
            table.wrote(self.geometry, index, mask);
            self.states.set(index, next);
        }
        written
    }

    /// Saves what the epoch under way still has to read of subchunks that are about to change.
    fn keep(&self, index: u64, touched: Mask) -> Result<(), DeviceError> {
        let keep = self.table.lock().to_keep(index, touched);
        if keep == 0 {
            return Ok(());
        }
        let start = self.geometry.start(index);
        for run in self.geometry.runs(index, keep) {
            let mut at = run.start;
            while at < run.end {
                let to = (at + self.geometry.subchunk).min(run.end);
                let bytes = match self.states.get(index).zero() {
                    true => None,
                    false => {
                        let mut bytes = vec![0; (to - at) as usize];
                        self.cache.read(start + at, &mut bytes)?;
                        Some(bytes)
                    }
                };
                self.copy_before
                    .lock()
                    .keep(start + at, bytes, &self.cache)?;
                at = to;
            }
        }
        if let Some(frozen) = self.table.lock().frozen.get_mut(&index) {
            frozen.kept |= keep;
        }
        Ok(())
    }
}
