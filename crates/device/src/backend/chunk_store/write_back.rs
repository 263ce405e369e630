//! Reading from a store, buffering what is written, and writing the buffer back.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use parking_lot::MutexGuard;

use super::buffer::{MAX_RANGES, Ranges};
use super::format::{self, Version};
use super::inner::{Inner, Part, State};
use super::store::Wanted;

/// Bytes that are sent to the store, or asked of it, in one call.
pub(super) const MAX_BATCH: u64 = 16 << 20;
/// The pause after the store did not take something.
const PAUSE: Duration = Duration::from_secs(1);
/// How often a read is repeated whose object was replaced meanwhile.
const MAX_REREADS: u32 = 64;
/// Losses that are logged; each is an error of its request as well.
const MAX_LOGGED: u32 = 16;

impl Inner {
    /// An object that the store does not have as it was written.
    fn missing(&self, index: u64, what: &str) -> DeviceError {
        let start = index * u64::from(self.header.object);
        let text = format!(
            "{}: the {} bytes at {start} {what}",
            self.store.describe(),
            self.header.length(index)
        );
        DeviceError::Corrupt(text)
    }

    /// Logs a loss.
    fn log(&self, error: &DeviceError) {
        if matches!(error, DeviceError::Corrupt(_))
            && self.logged.fetch_add(1, Ordering::Relaxed) < MAX_LOGGED
        {
            tracing::error!("{error}");
        }
    }

    /// Parts of objects, as they were written with these versions.
    fn fetch(&self, wanted: &[(u64, Version, Range<usize>)]) -> Vec<Result<Fetched, Failed>> {
        let spans: Vec<_> = wanted
            .iter()
            .map(|(index, _, range)| format::span(&self.header, *index, range))
            .collect();
        let keys: Vec<_> = wanted
            .iter()
            .zip(&spans)
            .map(|((index, version, _), span)| Wanted {
                key: format::object_key(*index, *version),
                range: span.stored.clone(),
            })
            .collect();
        let mut answers = self.store.get(&keys).into_iter();
        let decode =
            |((index, version, _), span): (&(u64, Version, Range<usize>), format::Span)| {
                let unanswered =
                    || Err(DeviceError::Unavailable("the store did not answer".into()));
                let bytes = answers.next().unwrap_or_else(unanswered);
                let bytes = bytes.map_err(Failed::Now)?.ok_or_else(|| {
                    Failed::Lost(self.missing(
                        *index,
                        "are missing: the store has lost what it had acknowledged",
                    ))
                })?;
                let mut content = vec![0; span.covers.len()];
                match format::decode_span(
                    &self.header,
                    (*index, *version),
                    &span,
                    &bytes,
                    &mut content,
                ) {
                    true => Ok(Fetched {
                        start: span.covers.start,
                        content,
                    }),
                    false => Err(Failed::Lost(
                        self.missing(*index, "are damaged in the store: their digests differ"),
                    )),
                }
            };
        wanted.iter().zip(spans).map(decode).collect()
    }

    /// Reads parts of objects; those that are in the buffer are copied, the others asked for together.
    pub(super) fn read_parts(
        &self,
        parts: Vec<Part>,
        buffer: &mut [u8],
    ) -> Result<(), DeviceError> {
        let mut left = parts;
        for _ in 0..MAX_REREADS {
            self.alive()?;
            let mut wanted = Vec::new();
            let mut over: Vec<(Part, Known)> = Vec::new();
            {
                let state = self.state.lock();
                for part in left {
                    let to = &mut buffer[part.within.clone()];
                    let (version, slot) =
                        (state.table.get(part.index), state.buffer.get(part.index));
                    if let Some(slot) = slot.filter(|slot| slot.known.has(&part.range)) {
                        to.copy_from_slice(&slot.content[part.range.clone()]);
                        continue;
                    }
                    let known: Vec<_> = slot
                        .into_iter()
                        .flat_map(|slot| {
                            let parts = slot.known.within(&part.range);
                            parts.map(|r| (r.clone(), slot.content[r].to_vec()))
                        })
                        .collect();
                    if version.is_some() {
                        wanted.push((part.index, version, part.range.clone()));
                        over.push((part, known));
                    } else {
                        to.fill(0);
                        lay_over(&part, &known, to);
                    }
                }
            }
            if wanted.is_empty() {
                return Ok(());
            }
            left = Vec::new();
            let mut failure = None;
            for ((part, known), fetched) in over.into_iter().zip(self.fetch(&wanted)) {
                let to = &mut buffer[part.within.clone()];
                match fetched {
                    Ok(fetched) => {
                        let at = part.range.start - fetched.start;
                        to.copy_from_slice(&fetched.content[at..at + part.range.len()]);
                        lay_over(&part, &known, to);
                    }
                    Err(error) => {
                        // It may have been replaced meanwhile, and removed.
                        let was = wanted.iter().find(|(index, ..)| *index == part.index);
                        let now = self.state.lock().table.get(part.index);
                        match was.is_some_and(|(_, version, _)| *version != now) {
                            true => left.push(part),
                            false => failure = Some(error.into()),
                        }
                    }
                }
            }
            if let Some(error) = failure {
                let error = self.explain(error);
                self.log(&error);
                return Err(error);
            }
            if left.is_empty() {
                return Ok(());
            }
        }
        Err(DeviceError::Unavailable(
            "it is written faster than it can be read".into(),
        ))
    }

    pub(super) fn write_part(&self, part: &Part, data: Option<&[u8]>) -> Result<(), DeviceError> {
        let length = self.header.length(part.index) as usize;
        let mut state = self.state.lock();
        loop {
            self.alive()?;
            match state.buffer.get(part.index) {
                Some(slot) if slot.is_busy => self.changed.wait(&mut state),
                Some(slot) if slot.known.count() >= MAX_RANGES && !slot.known.has(&part.range) => {
                    state = self.complete(state, part.index)?;
                }
                Some(_) => break,
                None if state.buffer.bytes() + length as u64 <= self.max_buffer => break,
                None => {
                    if let Some((error, _)) = &state.failed {
                        return Err(error.clone());
                    }
                    self.changed.notify_all();
                    self.changed.wait(&mut state);
                }
            }
        }
        let slot = state.buffer.open(part.index, length);
        let to = &mut Arc::make_mut(&mut slot.content)[part.range.clone()];
        match data {
            Some(data) => to.copy_from_slice(data),
            None => to.fill(0),
        }
        slot.known.add(part.range.clone());
        if state.buffer.bytes() > self.max_buffer / 2 {
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Reads from the store what is not known of an object in the buffer.
    fn complete<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        index: u64,
    ) -> Result<MutexGuard<'a, State>, DeviceError> {
        let version = state.table.get(index);
        let Some(slot) = state.buffer.get_mut(index) else {
            return Ok(state);
        };
        let whole = 0..slot.content.len();
        slot.is_busy = true;
        drop(state);
        let base = match version.is_some() {
            true => self.fetch(&[(index, version, whole.clone())]).pop(),
            false => Some(Ok(Fetched {
                start: 0,
                content: vec![0; whole.len()],
            })),
        };
        let mut state = self.state.lock();
        let mut result = Ok(());
        if let Some(slot) = state.buffer.get_mut(index) {
            slot.is_busy = false;
            match base {
                Some(Ok(base)) => {
                    slot.content = Arc::new(merged(base.content, &slot.content, &slot.known));
                    slot.known.add(whole);
                }
                Some(Err(error)) => result = Err(error.into()),
                None => {}
            }
        }
        self.changed.notify_all();
        result.map(|()| state)
    }

    /// Makes whole objects absent: zeros.
    pub(super) fn clear(&self, index: u64) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        while state.buffer.get(index).is_some_and(|slot| slot.is_busy) {
            self.changed.wait(&mut state);
        }
        self.alive()?;
        state.buffer.remove(index);
        state.table.set(index, Version::NONE);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Writes objects back until there is more room, as long as the disk is open.
    pub(super) fn write_back_always(&self) {
        let mut state = self.state.lock();
        loop {
            if state.closing {
                return;
            }
            let pause = state.failed.as_ref().map(|(_, at)| at.elapsed());
            if let Some(since) = pause.filter(|since| *since < PAUSE) {
                self.changed.wait_for(&mut state, PAUSE - since);
                continue;
            }
            let batch = match state.buffer.bytes() > self.max_buffer / 2 && self.alive().is_ok() {
                true => begin(&mut state, u64::MAX, MAX_BATCH / 2),
                false => Vec::new(),
            };
            if batch.is_empty() {
                self.changed.wait(&mut state);
                continue;
            }
            drop(state);
            let _ = self.write_back(&batch);
            state = self.state.lock();
        }
    }

    /// Writes back all that had been written when it is called.
    pub(super) fn write_back_all(&self) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let count = state.buffer.count();
        while state.buffer.has_of(count) {
            let batch = begin(&mut state, count, MAX_BATCH);
            if batch.is_empty() {
                self.changed.wait(&mut state);
                continue;
            }
            drop(state);
            self.write_back(&batch)?;
            state = self.state.lock();
        }
        Ok(())
    }

    /// Writes objects that [`begin`] has chosen to the store. What can never be completed is dropped, and
    /// flushes fail from then on.
    fn write_back(&self, batch: &[u64]) -> Result<(), DeviceError> {
        let mut slots: Vec<(u64, Arc<Vec<u8>>, Ranges, Version)> = Vec::new();
        {
            let state = self.state.lock();
            for index in batch {
                if let Some(slot) = state.buffer.get(*index) {
                    let version = state.table.get(*index);
                    slots.push((*index, slot.content.clone(), slot.known.clone(), version));
                }
            }
        }
        let is_partial = |content: &[u8], known: &Ranges| !known.has(&(0..content.len()));
        let wanted: Vec<_> = slots
            .iter()
            .filter(|(_, content, known, version)| version.is_some() && is_partial(content, known))
            .map(|(index, content, _, version)| (*index, *version, 0..content.len()))
            .collect();
        let mut bases = match wanted.is_empty() {
            true => Vec::new(),
            false => self.fetch(&wanted),
        }
        .into_iter();
        let mut results: Vec<(u64, Result<Version, Failed>)> = Vec::new();
        let mut puts = Vec::new();
        for (index, content, known, version) in slots {
            let whole = match (is_partial(&content, &known), version.is_some()) {
                (false, _) => content,
                (true, false) => Arc::new(merged(vec![0; content.len()], &content, &known)),
                (true, true) => match bases.next() {
                    Some(Ok(base)) => Arc::new(merged(base.content, &content, &known)),
                    Some(Err(error)) => {
                        results.push((index, Err(error)));
                        continue;
                    }
                    None => continue,
                },
            };
            if whole.iter().all(|byte| *byte == 0) {
                results.push((index, Ok(Version::NONE)));
                continue;
            }
            match self.state.lock().version(self.header.session) {
                Ok(version) => {
                    let bytes = format::encode_object(&self.header, index, version, &whole);
                    puts.push((index, version, bytes));
                }
                Err(error) => results.push((index, Err(Failed::Now(error)))),
            }
        }
        let keys: Vec<_> = puts
            .iter()
            .map(|(index, version, _)| (*index, *version))
            .collect();
        let values = puts
            .into_iter()
            .map(|(index, version, bytes)| (format::object_key(index, version), bytes));
        let values: Vec<_> = values.collect();
        if !values.is_empty() {
            let put = self.store.put(values);
            let put = keys.into_iter().zip(put);
            results.extend(put.map(|((index, version), done)| {
                let done = done.map_err(|error| Failed::Put(error, version));
                (index, done.map(|()| version))
            }));
        }
        self.settle_batch(batch, results)
    }

    /// Notes what became of objects that were written back.
    fn settle_batch(
        &self,
        batch: &[u64],
        results: Vec<(u64, Result<Version, Failed>)>,
    ) -> Result<(), DeviceError> {
        let mut failure = None;
        let mut state = self.state.lock();
        for index in batch {
            if let Some(slot) = state.buffer.get_mut(*index) {
                slot.is_busy = false;
            }
        }
        for (index, result) in results {
            match result {
                Ok(version) => {
                    state.buffer.remove(index);
                    state.table.set(index, version);
                    state.failed = None;
                }
                Err(Failed::Lost(error)) => {
                    // What it stood in is lost, and so is this.
                    self.log(&error);
                    state.buffer.remove(index);
                    state.lost = Some(error);
                }
                Err(error) => {
                    if let Failed::Put(_, version) = error {
                        // It may have arrived, or may arrive yet, after it was removed.
                        state.table.stray(index, version);
                        self.doomed.set_untidy();
                    }
                    let error = DeviceError::from(error);
                    state.failed = Some((error.clone(), Instant::now()));
                    failure = Some(error);
                }
            }
        }
        drop(state);
        self.changed.notify_all();
        match failure {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Chooses objects to be written back: from now on they are busy.
fn begin(state: &mut State, count: u64, most: u64) -> Vec<u64> {
    let batch = state.buffer.oldest(count, most);
    for index in &batch {
        if let Some(slot) = state.buffer.get_mut(*index) {
            slot.is_busy = true;
        }
    }
    batch
}

/// Why an object could not be read or written.
enum Failed {
    /// The store does not have it as it was written, and never will.
    Lost(DeviceError),
    /// It was not answered, or refused.
    Now(DeviceError),
    /// It was not acknowledged that it was written, with this version.
    Put(DeviceError, Version),
}

impl From<Failed> for DeviceError {
    fn from(failed: Failed) -> DeviceError {
        match failed {
            Failed::Lost(error) | Failed::Now(error) | Failed::Put(error, _) => error,
        }
    }
}

/// Bytes of an object that are in the buffer, and where.
type Known = Vec<(Range<usize>, Vec<u8>)>;

/// Whole chunks of an object.
struct Fetched {
    /// Where they begin in the object's part of the disk.
    start: usize,
    content: Vec<u8>,
}

/// `base` with what is known over it.
fn merged(mut base: Vec<u8>, content: &[u8], known: &Ranges) -> Vec<u8> {
    for range in known.within(&(0..content.len())) {
        base[range.clone()].copy_from_slice(&content[range]);
    }
    base
}

fn lay_over(part: &Part, known: &[(Range<usize>, Vec<u8>)], to: &mut [u8]) {
    for (range, bytes) in known {
        let at = range.start - part.range.start;
        to[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
