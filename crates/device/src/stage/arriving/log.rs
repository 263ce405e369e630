//! What is absent of a device, in a file: known after the end of the process, and after a power cut.
//!
//! That blocks are absent is synced at once. That they are there is not: until the next flush it is in the kernel's memory,
//! where the end of a process does not reach it. A power cut does, and takes what was written with it: so after one only that
//! counts which a flush has marked. `docs/format/journal.md`.

use std::ops::Range;
use std::sync::Arc;

use drover_storage::Directory;
use drover_storage::chunk_log::{ChunkLog, ChunkLogError, Record};
use roaring::RoaringBitmap;

const NAME: &str = "absent";

/// States of runs of blocks.
const PRESENT: u8 = 0;
const ABSENT: u8 = 1;
/// So many records before this one are durable in the device.
const MARK: u8 = 2;

/// See the module documentation.
pub(super) struct AbsentLog {
    directory: Arc<dyn Directory>,
    /// The boot of this computer, and the blocks of the device.
    header: Vec<u8>,
    /// None when nothing is absent.
    log: Option<ChunkLog>,
    /// Records in it.
    count: u64,
    /// Blocks that are there, and not durable in the device as far as the log says.
    unmarked: RoaringBitmap,
}

/// What a log says at one moment.
pub(super) struct Said {
    count: u64,
    /// Blocks of which it says that they are there, and not that they are durable.
    unmarked: RoaringBitmap,
}

impl AbsentLog {
    /// Opens the log in a directory; what is absent by it. What an earlier process of this boot has written must be durable by
    /// now.
    pub(super) fn open(
        directory: &Arc<dyn Directory>,
        boot: [u8; 16],
        blocks: u64,
    ) -> Result<(Self, RoaringBitmap), ChunkLogError> {
        let mut header = boot.to_vec();
        header.extend(blocks.to_le_bytes());
        let mut opened = Self {
            directory: Arc::clone(directory),
            header,
            log: None,
            count: 0,
            unmarked: RoaringBitmap::new(),
        };
        let log = match ChunkLog::open(Arc::clone(directory), NAME) {
            Err(e) if e.is_missing() => return Ok((opened, RoaringBitmap::new())),
            log => log?,
        };
        let was = log.header().to_vec();
        let is_of_device = was.len() == opened.header.len() && was[16..] == opened.header[16..];
        let mut records = Vec::new();
        let log = log.replay(|record| {
            records.push(record);
            match is_of_device {
                true => Ok(()),
                false => Err("it is of a device of another size".into()),
            }
        })?;
        opened.log = Some(log);
        opened.count = records.len() as u64;
        let absent = absent(&records, was[..16] == opened.header[..16], blocks);
        match absent.is_empty() {
            true => opened.clear()?,
            // From now on what counts is told by this boot.
            false => {
                let snapshot: Vec<_> = runs(&absent).map(|run| record(ABSENT, &run)).collect();
                opened.count = snapshot.len() as u64;
                if let Some(log) = &mut opened.log {
                    log.rewrite(&opened.header, snapshot)?;
                }
            }
        }
        Ok((opened, absent))
    }

    /// These blocks are absent; durable when this returns.
    pub(super) fn expect(&mut self, runs: &[Range<u32>]) -> Result<(), ChunkLogError> {
        let records: Vec<_> = runs.iter().map(|run| record(ABSENT, run)).collect();
        let log = match self.log.take() {
            Some(log) => log,
            None => ChunkLog::create(Arc::clone(&self.directory), NAME, &self.header)?,
        };
        let log = self.log.insert(log);
        log.append(&records)?;
        self.count += records.len() as u64;
        for run in runs {
            self.unmarked.remove_range(run.clone());
        }
        log.sync()
    }

    /// These blocks were written.
    pub(super) fn present(&mut self, run: &Range<u32>) -> Result<(), ChunkLogError> {
        if let Some(log) = &mut self.log {
            log.append(&[record(PRESENT, run)])?;
            self.count += 1;
            self.unmarked.insert_range(run.clone());
            log.hand_over()?;
        }
        Ok(())
    }

    /// What it says now, unless a flush changes nothing of it. `is_complete` if nothing is absent.
    pub(super) fn said(&self, is_complete: bool) -> Option<Said> {
        let log = self.log.as_ref()?;
        // One that has failed fails each flush.
        let is_news = !self.unmarked.is_empty() || is_complete || log.is_broken();
        is_news.then(|| Said {
            count: self.count,
            unmarked: self.unmarked.clone(),
        })
    }

    /// What was said then is durable in the device. `absent` is absent now.
    pub(super) fn flushed(
        &mut self,
        said: &Said,
        absent: &RoaringBitmap,
    ) -> Result<(), ChunkLogError> {
        self.mark(said.count)?;
        self.unmarked -= &said.unmarked;
        self.shorten(absent);
        Ok(())
    }

    fn mark(&mut self, count: u64) -> Result<(), ChunkLogError> {
        if let Some(log) = &mut self.log {
            let mark = Record {
                first: count,
                state: MARK,
                ..Record::default()
            };
            log.append(&[mark])?;
            self.count += 1;
            log.sync()?;
        }
        Ok(())
    }

    /// Writes anew what it says, if it has grown long.
    fn shorten(&mut self, absent: &RoaringBitmap) {
        if self.log.as_ref().is_some_and(ChunkLog::wants_rewrite) {
            self.rewrite(absent);
        }
    }

    /// Writes anew what it says. `absent` is absent now.
    pub(super) fn rewrite(&mut self, absent: &RoaringBitmap) {
        let Some(log) = &mut self.log else {
            return;
        };
        // After a power cut what is there and not durable is absent again.
        let all = absent | &self.unmarked;
        let all = runs(&all).map(|run| record(ABSENT, &run));
        let there = runs(&self.unmarked).map(|run| record(PRESENT, &run));
        let mut count = 0;
        let snapshot = all.chain(there).inspect(|_| count += 1);
        let rewritten = log.rewrite(&self.header, snapshot);
        // If only its name is not durable, the next sync sees to that.
        if rewritten.is_ok() || log.has_pending_name() {
            self.count = count;
        }
        if let Err(e) = rewritten {
            tracing::warn!("what has not arrived: it was not shortened: {e}");
        }
    }

    /// Nothing is absent, and all is durable.
    pub(super) fn clear(&mut self) -> Result<(), ChunkLogError> {
        if self.log.is_some() {
            // It says the same where a power cut brings it back.
            self.mark(self.count)?;
            (self.log, self.count) = (None, 0);
            self.unmarked.clear();
            if let Err(e) = self.directory.remove(NAME) {
                tracing::warn!("{}: {e}", self.directory.describe(NAME));
            }
        }
        Ok(())
    }
}

fn record(state: u8, run: &Range<u32>) -> Record {
    Record {
        first: u64::from(run.start),
        count: run.end - run.start,
        state,
        mask: 0,
    }
}

/// What is absent by these records.
fn absent(records: &[Record], is_same_boot: bool, blocks: u64) -> RoaringBitmap {
    let marks = records.iter().filter(|record| record.state == MARK);
    let mark = marks.map(|record| record.first).max().unwrap_or(0);
    let mut absent = RoaringBitmap::new();
    for (at, record) in (0..).zip(records) {
        let narrow = |block: u64| u32::try_from(block).unwrap_or(u32::MAX);
        let end = record.first.saturating_add(u64::from(record.count));
        let run = narrow(record.first)..narrow(end.min(blocks));
        match record.state {
            ABSENT => drop(absent.insert_range(run)),
            PRESENT if is_same_boot || at < mark => drop(absent.remove_range(run)),
            _ => {}
        }
    }
    absent
}

/// Runs of blocks.
pub(super) fn runs(blocks: &RoaringBitmap) -> impl Iterator<Item = Range<u32>> + '_ {
    let mut blocks = blocks.iter().peekable();
    std::iter::from_fn(move || {
        let first = blocks.next()?;
        let mut last = first;
        while let Some(next) = blocks.next_if(|next| *next == last + 1) {
            last = next;
        }
        Some(first..last + 1)
    })
}
