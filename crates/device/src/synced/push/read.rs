//! Reading the chunks of a frozen epoch, as changes of a suitable size.

use std::ops::Range;

use bytes::Bytes;
use drover_core::DeviceError;

use super::super::shared::Shared;
use super::super::state::Mask;
use crate::remote::Change;

/// Maximum bytes of one change, and of one request.
const MAX_BYTES: usize = 1 << 20;
/// Maximum changes in one request.
const MAX_CHANGES: usize = 1024;

/// Why an epoch ended before it was sent completely.
pub const GIVEN_UP: &str = "the epoch was abandoned to free its space";

pub struct Reader<'a> {
    shared: &'a Shared,
    /// Generation of the epoch.
    generation: u64,
    /// The next chunk to visit.
    at: u64,
    /// Adjacent bytes that may still grow.
    run: Option<(u64, Vec<u8>)>,
    /// Adjacent zeros that may still grow: offset and length.
    zeros: Option<(u64, u64)>,
    ready: Vec<Change>,
    bytes: usize,
}

impl<'a> Reader<'a> {
    pub fn new(shared: &'a Shared, generation: u64) -> Self {
        Self {
            shared,
            generation,
            at: 0,
            run: None,
            zeros: None,
            ready: Vec::new(),
            bytes: 0,
        }
    }

    /// The next chunk not fully staged at the remote, with its missing subchunks.
    fn missing(&mut self) -> Option<(u64, Mask)> {
        let table = self.shared.table.lock();
        let mut rest = table.frozen.range(self.at..);
        let (index, frozen) = rest.find(|(_, f)| f.mask & !f.there != 0)?;
        self.at = index + 1;
        Some((*index, frozen.mask & !frozen.there))
    }

    /// The changes of the next request; none at the end.
    pub fn next(&mut self) -> Result<Option<Vec<Change>>, DeviceError> {
        while self.bytes < MAX_BYTES && self.ready.len() < MAX_CHANGES {
            match self.missing() {
                Some((index, mask)) => self.chunk(index, mask)?,
                None => {
                    self.end_run();
                    self.end_zeros();
                    break;
                }
            }
        }
        self.bytes = 0;
        let ready = std::mem::take(&mut self.ready);
        Ok((!ready.is_empty()).then_some(ready))
    }

    /// Reads frozen subchunks of a chunk.
    fn chunk(&mut self, index: u64, mask: Mask) -> Result<(), DeviceError> {
        let shared = self.shared;
        let geometry = shared.geometry;
        let _stripe = shared.states.read(index);
        let kept = shared.table.lock().frozen.get(&index).map_or(0, |f| f.kept);
        let zero = shared.states.get(index).zero();
        let start = geometry.start(index);
        let mut buffer = Vec::new();
        for (part, is_kept) in [(mask & kept, true), (mask & !kept, false)] {
            for run in geometry.runs(index, part) {
                if !is_kept && zero {
                    continue;
                }
                buffer.resize((run.end as usize).max(buffer.len()), 0);
                let range = run.start as usize..run.end as usize;
                if !is_kept {
                    shared.cache.read(start + run.start, &mut buffer[range])?;
                    continue;
                }
                for subchunk in subchunks(&run, geometry.subchunk) {
                    let part = &mut buffer[subchunk.start as usize..subchunk.end as usize];
                    shared
                        .copy_before
                        .lock()
                        .get(start + subchunk.start, part)?;
                }
            }
        }
        if shared.table.lock().generation != self.generation {
            // Writers no longer preserve old bytes for this epoch.
            return Err(DeviceError::Unavailable(GIVEN_UP.into()));
        }
        for run in geometry.runs(index, mask) {
            for subchunk in subchunks(&run, geometry.subchunk) {
                let range = subchunk.start as usize..subchunk.end as usize;
                match buffer.get(range) {
                    Some(bytes) if bytes.iter().any(|b| *b != 0) => {
                        self.add(start + subchunk.start, bytes);
                    }
                    _ => self.add_zeros(start + subchunk.start, subchunk.end - subchunk.start),
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, offset: u64, bytes: &[u8]) {
        self.end_zeros();
        let fits = |run: &(u64, Vec<u8>)| {
            run.0 + run.1.len() as u64 == offset && run.1.len() + bytes.len() <= MAX_BYTES
        };
        match &mut self.run {
            Some(run) if fits(run) => run.1.extend_from_slice(bytes),
            _ => {
                self.end_run();
                self.run = Some((offset, bytes.to_vec()));
            }
        }
    }

    fn add_zeros(&mut self, offset: u64, length: u64) {
        self.end_run();
        match &mut self.zeros {
            Some(run) if run.0 + run.1 == offset => run.1 += length,
            _ => {
                self.end_zeros();
                self.zeros = Some((offset, length));
            }
        }
    }

    fn end_run(&mut self) {
        if let Some((offset, bytes)) = self.run.take() {
            self.bytes += bytes.len();
            self.ready.push(Change::Write(offset, Bytes::from(bytes)));
        }
    }

    fn end_zeros(&mut self) {
        if let Some((offset, length)) = self.zeros.take() {
            self.ready.push(Change::Zero(offset, length));
        }
    }
}

fn subchunks(run: &Range<u64>, subchunk: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let run = run.clone();
    (run.start..run.end)
        .step_by(subchunk as usize)
        .map(move |at| at..(at + subchunk).min(run.end))
}
