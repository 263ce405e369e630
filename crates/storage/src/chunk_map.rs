//! A value for each chunk of a device, in little memory, and keeping it in a [chunk log](crate::chunk_log).
//!
//! With [`ChunkMap::save`], the map has what the file records. With [`ChunkMap::set`], it has the current values, and
//! the owner logs those that have changed ([`ChunkMap::take_changed`]): they can be read meanwhile.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Range;

use crate::chunk_log::{ChunkLog, ChunkLogError, Record};

/// Chunks per page.
const PAGE: u64 = 16_384;

/// The value that a [`ChunkMap`] keeps per chunk. A chunk with the default value is not recorded.
pub trait ChunkValue: Copy + Default + Eq {
    /// Bits of a state: a divisor of 64.
    const BITS: u32;

    /// Its encoding in a record: a state of [`ChunkValue::BITS`] bits, which is 0 for the default value only, and a mask.
    fn parts(self) -> (u8, u64);

    /// Decodes the value of a record, if valid.
    fn from_parts(state: u8, mask: u64) -> Option<Self>;
}

/// The values of all chunks, and which of them have changed since they were last taken. Takes memory for pages in which
/// the states differ, and for each mask other than 0.
#[derive(Default)]
pub struct ChunkMap<V> {
    /// A missing page is of the default state, which is 0.
    pages: BTreeMap<u64, Page<V>>,
    /// Masks other than 0, by chunk.
    masks: BTreeMap<u64, u64>,
    /// Changed chunks: run ends by run start. Grows with changes that were not taken.
    changed: BTreeMap<u64, u64>,
    /// Chunks of another state than the default.
    count: u64,
}

/// The states of the chunks of a page.
enum Page<V> {
    /// All the same.
    All(u64),
    /// Packed into words.
    Each(Box<[u64]>, PhantomData<V>),
}

impl<V: ChunkValue> Page<V> {
    const PER_WORD: u64 = 64 / V::BITS as u64;
    /// The bits of the first state in a word.
    const FIRST: u64 = (1 << V::BITS) - 1;

    /// A word of chunks in one state.
    fn word(state: u64) -> u64 {
        u64::MAX / Self::FIRST * state
    }

    /// Where a chunk's state is: the word, and the first bit in it.
    fn place(within: u64) -> (usize, u32) {
        let (word, nth) = (within / Self::PER_WORD, within % Self::PER_WORD);
        (word as usize, nth as u32 * V::BITS)
    }

    fn get(&self, within: u64) -> u64 {
        match self {
            Self::All(state) => *state,
            Self::Each(words, _) => {
                let (word, shift) = Self::place(within);
                words[word] >> shift & Self::FIRST
            }
        }
    }

    fn set(&mut self, within: Range<u64>, state: u64) {
        if let Self::All(all) = self {
            if *all == state {
                return;
            }
            let words = vec![Self::word(*all); (PAGE / Self::PER_WORD) as usize];
            *self = Self::Each(words.into(), PhantomData);
        }
        if let Self::Each(words, _) = self {
            for (word, shift) in within.map(Self::place) {
                words[word] = words[word] & !(Self::FIRST << shift) | state << shift;
            }
        }
    }

    /// End of the run of one state that contains `within`.
    fn run_end(&self, within: u64) -> u64 {
        let Self::Each(words, _) = self else {
            return PAGE;
        };
        let same = Self::word(self.get(within));
        let mut at = within;
        while at < PAGE {
            let (word, shift) = Self::place(at);
            // A bit wherever a chunk's state differs.
            let differ = (words[word] ^ same) >> shift;
            if differ != 0 {
                return at + u64::from(differ.trailing_zeros() / V::BITS);
            }
            at = (at / Self::PER_WORD + 1) * Self::PER_WORD;
        }
        PAGE
    }
}

impl<V: ChunkValue> ChunkMap<V> {
    /// Chunks of another state than the default.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The value of a chunk.
    #[must_use]
    pub fn get(&self, chunk: u64) -> V {
        V::from_parts(self.state(chunk) as u8, self.mask(chunk)).unwrap_or_default()
    }

    fn state(&self, chunk: u64) -> u64 {
        let page = self.pages.get(&(chunk / PAGE));
        page.map_or(0, |page| page.get(chunk % PAGE))
    }

    fn mask(&self, chunk: u64) -> u64 {
        self.masks.get(&chunk).copied().unwrap_or(0)
    }

    /// End of the run that contains `chunk`, at most `end`.
    fn run_end(&self, chunk: u64, end: u64) -> u64 {
        let end = match self.mask(chunk) {
            0 => {
                let mut masks = self.masks.range(chunk..end);
                masks.next().map_or(end, |mask| *mask.0)
            }
            mask => (chunk + 1..end)
                .find(|next| self.mask(*next) != mask)
                .unwrap_or(end),
        };
        let state = self.state(chunk);
        let mut at = chunk;
        while at < end && self.state(at) == state {
            let start = at / PAGE * PAGE;
            at = match self.pages.get(&(at / PAGE)) {
                Some(page) => start + page.run_end(at - start),
                // Up to the next existing page.
                None => match self.pages.range(at / PAGE..).next() {
                    Some((next, _)) => next * PAGE,
                    None => end,
                },
            };
        }
        at.min(end)
    }

    /// The runs of a range, in order; adjacent runs differ in value.
    pub fn runs(&self, chunks: Range<u64>) -> impl Iterator<Item = (Range<u64>, V)> {
        let mut at = chunks.start;
        std::iter::from_fn(move || {
            if at >= chunks.end {
                return None;
            }
            let start = at;
            at = self.run_end(at, chunks.end);
            Some((start..at, self.get(start)))
        })
    }

    /// The runs of all chunks with another value than the default, in order.
    pub fn recorded(&self) -> impl Iterator<Item = (Range<u64>, V)> {
        let last = self.pages.last_key_value();
        self.runs(0..last.map_or(0, |page| (page.0 + 1) * PAGE))
            .filter(|run| run.1 != V::default())
    }

    /// The chunks of a range with the default value.
    #[must_use]
    pub fn unrecorded(&self, chunks: Range<u64>) -> u64 {
        let runs = self.runs(chunks).filter(|run| run.1 == V::default());
        runs.map(|run| run.0.end - run.0.start).sum()
    }

    /// Sets the value of chunks without marking them changed.
    pub fn load(&mut self, chunks: Range<u64>, value: V) {
        let (state, mask) = match value.parts() {
            (0, _) => (0, 0),
            (state, mask) => (u64::from(state), mask),
        };
        debug_assert!(state <= Page::<V>::FIRST);
        let mut at = chunks.start;
        while at < chunks.end {
            let start = at / PAGE * PAGE;
            let end = chunks.end.min(start + PAGE);
            self.count -= end - at - self.unrecorded(at..end);
            while let Some((&chunk, _)) = self.masks.range(at..end).next() {
                self.masks.remove(&chunk);
            }
            if state != 0 {
                self.count += end - at;
            }
            if mask != 0 {
                self.masks.extend((at..end).map(|chunk| (chunk, mask)));
            }
            if end - at == PAGE {
                self.pages.insert(at / PAGE, Page::All(state));
            } else {
                let page = self.pages.entry(at / PAGE).or_insert(Page::All(0));
                page.set(at - start..end - start, state);
            }
            at = end;
        }
    }

    /// Loads a record of a log, if it is about chunks of a device of `device` chunks.
    ///
    /// # Errors
    /// What is wrong with the record, as [`ChunkLog`] reports it.
    pub fn replay(&mut self, record: Record, device: u64) -> Result<(), String> {
        let value = V::from_parts(record.state, record.mask)
            .ok_or_else(|| format!("a chunk in state {}", record.state))?;
        let end = record.first.checked_add(u64::from(record.count));
        let end = end
            .filter(|end| *end <= device)
            .ok_or_else(|| format!("chunks at {} of a device of {device}", record.first))?;
        self.load(record.first..end, value);
        Ok(())
    }

    /// Sets the value of chunks, and marks those changed that had another.
    pub fn set(&mut self, chunks: Range<u64>, value: V) {
        let news: Vec<_> = self
            .runs(chunks)
            .filter(|run| run.1 != value)
            .map(|run| run.0)
            .collect();
        for run in news {
            self.load(run.clone(), value);
            self.mark(run);
        }
    }

    fn mark(&mut self, run: Range<u64>) {
        let (mut start, mut end) = (run.start, run.end);
        while let Some((&from, &to)) = self.changed.range(..=end).next_back()
            && to >= start
        {
            self.changed.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.changed.insert(start, end);
    }

    /// Number of runs that [`ChunkMap::take_changed`] would take, at least.
    #[must_use]
    pub fn changed_runs(&self) -> usize {
        self.changed.len()
    }

    /// Takes the changed runs, with their current values.
    pub fn take_changed(&mut self) -> Vec<Record> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        let runs = changed.flat_map(|(start, end)| self.runs(start..end));
        runs.flat_map(records_of).collect()
    }

    /// Marks chunks changed again whose records were taken but not logged.
    pub fn mark_again(&mut self, records: &[Record]) {
        for record in records {
            self.mark(record.first..record.first + u64::from(record.count));
        }
    }

    /// The records of all chunks with another value than the default.
    pub fn snapshot(&self) -> impl Iterator<Item = Record> {
        self.recorded().flat_map(records_of)
    }

    /// Rewrites a log: its header, `notes`, which are its records that are not about chunks, and the values.
    ///
    /// # Errors
    /// As [`ChunkLog::rewrite`].
    pub fn rewrite(&self, log: &mut ChunkLog, notes: &[Record]) -> Result<(), ChunkLogError> {
        let header = log.header.clone();
        log.rewrite(&header, notes.iter().copied().chain(self.snapshot()))
    }

    /// Records values: durably, or so that they survive a killed process. Values the map has already cost nothing.
    /// `notes` are all current notes, in case the log is rewritten.
    ///
    /// # Errors
    /// [`ChunkLogError`]; the map is unchanged then, unless all that failed was a rewrite that was due.
    pub fn save(
        &mut self,
        log: &mut ChunkLog,
        values: impl Iterator<Item = (u64, V)> + Clone,
        durably: bool,
        notes: &[Record],
    ) -> Result<(), ChunkLogError> {
        let mut news = Self::default();
        for (chunk, value) in values.clone().filter(|new| self.get(new.0) != new.1) {
            news.load(chunk..chunk + 1, value);
            news.mark(chunk..chunk + 1);
        }
        let records = news.take_changed();
        if durably || (log.is_broken() && !records.is_empty()) {
            self.append(log, &records, notes)?;
        } else if !records.is_empty() {
            log.append(&records)?;
            log.hand_over()?;
        }
        for (chunk, value) in values {
            self.load(chunk..chunk + 1, value);
        }
        match log.wants_rewrite() {
            true => self.rewrite(log, notes),
            false => Ok(()),
        }
    }

    /// Appends records durably, without applying those about chunks to the map. A broken log is rewritten first.
    ///
    /// # Errors
    /// [`ChunkLogError`].
    pub fn append(
        &self,
        log: &mut ChunkLog,
        records: &[Record],
        notes: &[Record],
    ) -> Result<(), ChunkLogError> {
        if log.is_broken() {
            self.rewrite(log, notes)?;
        }
        log.append(records)?;
        log.sync()
    }

    /// Gives all chunks of a device of `device` chunks the default value, durably and at once.
    ///
    /// # Errors
    /// [`ChunkLogError`]; the map is unchanged then.
    pub fn clear(
        &mut self,
        log: &mut ChunkLog,
        device: u64,
        notes: &[Record],
    ) -> Result<(), ChunkLogError> {
        let nothing: Vec<_> = records_of((0..device, V::default())).collect();
        self.append(log, &nothing, notes)?;
        *self = Self::default();
        Ok(())
    }
}

/// Splits a run into records of the largest possible count.
fn records_of<V: ChunkValue>((chunks, value): (Range<u64>, V)) -> impl Iterator<Item = Record> {
    const MAX_COUNT: u64 = u32::MAX as u64;
    let (state, mask) = value.parts();
    (chunks.start..chunks.end)
        .step_by(MAX_COUNT as usize)
        .map(move |first| Record {
            first,
            count: (chunks.end - first).min(MAX_COUNT) as u32,
            state,
            mask,
        })
}

#[cfg(test)]
mod tests;
