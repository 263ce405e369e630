//! A durable value for each chunk of a device: a [chunk log](crate::chunk_log) and its contents in memory, from which
//! the log is rewritten when it has grown long.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use crate::chunk_log::{ChunkLog, ChunkLogError, Opened, Record};

/// Records with this state or above are notes: not about chunks, and interpreted by their owner.
pub const FIRST_NOTE: u8 = 64;

/// The value that a [`ChunkMap`] keeps per chunk.
pub trait ChunkValue: Copy {
    /// Its encoding in a record: a state below [`FIRST_NOTE`], and a mask. Both are 0 for a chunk without a value.
    fn parts(self) -> (u8, u64);

    /// Decodes a value, if valid.
    fn from_parts(state: u8, mask: u64) -> Option<Self>;
}

/// The values of all chunks. Takes a byte of memory per chunk, and more for each with a mask other than 0.
pub struct ChunkMap<V> {
    log: ChunkLog,
    header: Vec<u8>,
    states: Vec<u8>,
    masks: BTreeMap<u64, u64>,
    values: PhantomData<V>,
}

impl<V: ChunkValue> ChunkMap<V> {
    /// Wraps a log just created with this header, for this many chunks.
    #[must_use]
    pub fn new(log: ChunkLog, header: Vec<u8>, chunks: u64) -> Self {
        Self {
            log,
            header,
            states: states(chunks),
            masks: BTreeMap::new(),
            values: PhantomData,
        }
    }

    /// Replays a log; `each` sees every record, including the notes. `header` replaces the log's own at the next
    /// rewrite.
    ///
    /// # Errors
    /// As [`Opened::replay`]; [`ChunkLogError::Corrupt`] for an invalid chunk or value, and where `each` rejects a
    /// record with a reason.
    pub fn replay(
        opened: Opened,
        header: Vec<u8>,
        chunks: u64,
        mut each: impl FnMut(&Record) -> Result<(), String>,
    ) -> Result<Self, ChunkLogError> {
        let mut states = states(chunks);
        let mut masks = BTreeMap::new();
        let log = opened.replay(|record| {
            each(&record)?;
            if record.state >= FIRST_NOTE {
                return Ok(());
            }
            if V::from_parts(record.state, record.mask).is_none() {
                return Err(format!("a chunk in state {}", record.state));
            }
            let end = record.first.checked_add(u64::from(record.count));
            let end = end
                .filter(|end| *end <= chunks)
                .ok_or_else(|| format!("chunks at {} of a device of {chunks}", record.first))?;
            for index in record.first..end {
                set(&mut states, &mut masks, index, (record.state, record.mask));
            }
            Ok(())
        })?;
        Ok(Self {
            log,
            header,
            states,
            masks,
            values: PhantomData,
        })
    }

    /// The value of a chunk, as recorded in the file.
    #[must_use]
    pub fn get(&self, index: u64) -> Option<V> {
        let mask = self.masks.get(&index).copied().unwrap_or(0);
        V::from_parts(*self.states.get(index as usize)?, mask)
    }

    /// The chunks with a value, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, V)> {
        let mut masks = self.masks.iter().peekable();
        let there = (0u64..).zip(&self.states).filter(|chunk| *chunk.1 != 0);
        there.filter_map(move |(index, state)| {
            while masks.next_if(|mask| *mask.0 < index).is_some() {}
            let mask = masks.next_if(|mask| *mask.0 == index);
            Some((
                index,
                V::from_parts(*state, mask.map_or(0, |mask| *mask.1))?,
            ))
        })
    }

    /// Records values: durably, or so that they survive a killed process. Values the file has already cost nothing.
    /// `notes` are all current notes, in case the file is rewritten.
    ///
    /// # Errors
    /// [`ChunkLogError`]; the map is unchanged then.
    pub fn save(
        &mut self,
        values: impl Iterator<Item = (u64, V)> + Clone,
        durably: bool,
        notes: &[Record],
    ) -> Result<(), ChunkLogError> {
        let mut records: Vec<Record> = Vec::new();
        for (index, value) in values.clone() {
            let known = self.masks.get(&index).copied().unwrap_or(0);
            if (self.states[index as usize], known) != value.parts() {
                push(&mut records, index, value.parts());
            }
        }
        if durably || (self.log.is_broken() && !records.is_empty()) {
            self.append(&records, notes)?;
        } else if !records.is_empty() {
            self.log.append(&records)?;
            self.log.hand_over()?;
        }
        for (index, value) in values {
            set(&mut self.states, &mut self.masks, index, value.parts());
        }
        match self.log.wants_rewrite() {
            true => self.rewrite(notes),
            false => Ok(()),
        }
    }

    /// Appends records durably, without applying those about chunks to the map. A broken log is rewritten first.
    ///
    /// # Errors
    /// [`ChunkLogError`].
    pub fn append(&mut self, records: &[Record], notes: &[Record]) -> Result<(), ChunkLogError> {
        if self.log.is_broken() {
            self.rewrite(notes)?;
        }
        self.log.append(records)?;
        self.log.sync()
    }

    /// Clears the values of all chunks, durably.
    ///
    /// # Errors
    /// [`ChunkLogError`]; the map is unchanged then.
    pub fn clear(&mut self, notes: &[Record]) -> Result<(), ChunkLogError> {
        let count = u32::try_from(self.states.len()).unwrap_or(u32::MAX);
        let nothing = Record {
            count,
            ..Record::default()
        };
        self.append(&[nothing], notes)?;
        self.states.fill(0);
        self.masks.clear();
        Ok(())
    }

    /// Rewrites the file: the notes, and the values of the chunks.
    ///
    /// # Errors
    /// As [`ChunkLog::rewrite`].
    pub fn rewrite(&mut self, notes: &[Record]) -> Result<(), ChunkLogError> {
        let mut records = notes.to_vec();
        for (index, value) in self.iter() {
            push(&mut records, index, value.parts());
        }
        self.log.rewrite(&self.header, records)
    }
}

fn states(chunks: u64) -> Vec<u8> {
    vec![0; usize::try_from(chunks).unwrap_or(usize::MAX)]
}

fn set(states: &mut [u8], masks: &mut BTreeMap<u64, u64>, index: u64, (state, mask): (u8, u64)) {
    states[index as usize] = state;
    match mask {
        0 => masks.remove(&index),
        mask => masks.insert(index, mask),
    };
}

/// Adds a chunk's record, or extends the last one.
fn push(records: &mut Vec<Record>, index: u64, (state, mask): (u8, u64)) {
    match records.last_mut() {
        Some(last)
            if last.first + u64::from(last.count) == index
                && (last.state, last.mask) == (state, mask)
                && last.count < u32::MAX =>
        {
            last.count += 1;
        }
        _ => records.push(Record {
            first: index,
            count: 1,
            state,
            mask,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fastrand::Rng;

    use super::*;
    use crate::FakeDirectory;

    /// A generation, as chunks of a migrated machine have.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Generation(u32);

    impl ChunkValue for Generation {
        fn parts(self) -> (u8, u64) {
            (u8::from(self.0 > 0), u64::from(self.0))
        }

        fn from_parts(state: u8, mask: u64) -> Option<Self> {
            let fine = state < 2;
            fine.then_some(Self(u32::try_from(mask).ok()?))
        }
    }

    const NOTE: Record = Record {
        first: 7,
        count: 1,
        state: FIRST_NOTE,
        mask: 0,
    };

    fn open(fake: &FakeDirectory) -> (ChunkMap<Generation>, u32) {
        let opened = ChunkLog::open(Arc::new(fake.clone()), "map").unwrap();
        let mut notes = 0;
        let map = ChunkMap::replay(opened, b"header".to_vec(), 100, |record| {
            notes += u32::from(record.state == FIRST_NOTE);
            Ok(())
        });
        (map.unwrap(), notes)
    }

    /// Whatever is lost, each chunk has a value that it was given, at least as new as the last durable one.
    #[test]
    fn what_was_saved_durably_is_there_after_a_crash() {
        for seed in 0..300 {
            let mut rng = Rng::with_seed(seed);
            let fake = FakeDirectory::new(512, seed);
            let log = ChunkLog::create(Arc::new(fake.clone()), "map", b"header").unwrap();
            let mut map = ChunkMap::new(log, b"header".to_vec(), 100);
            map.append(&[NOTE], &[NOTE]).unwrap();
            let (mut now, mut durable, mut clearing) = ([0; 100], [0; 100], false);
            fake.cut_power_at(fake.steps() + rng.u64(1..60));
            for generation in 1.. {
                let first = rng.u64(0..100);
                let run = first..rng.u64(first..=100);
                let durably = rng.bool();
                let values = run.clone().map(|index| (index, Generation(generation)));
                let what = rng.u8(0..10);
                clearing = what == 1;
                let saved = match what {
                    0 => map.rewrite(&[NOTE]),
                    1 => map.clear(&[NOTE]).inspect(|()| now.fill(0)),
                    _ => map.save(values, durably, &[NOTE]).inspect(|()| {
                        now[run.start as usize..run.end as usize].fill(generation);
                        if durably {
                            durable = now;
                        }
                    }),
                };
                match saved {
                    Ok(()) => {
                        for (index, value) in map.iter() {
                            assert_eq!(value.0, now[index as usize], "seed {seed}");
                            assert_eq!(map.get(index), Some(value));
                        }
                        if now == [0; 100] {
                            durable = now;
                        }
                    }
                    Err(_) => break,
                }
            }
            let (map, notes) = open(&fake.after_crash(seed));
            assert_eq!(notes, 1, "seed {seed}");
            for index in 0..100 {
                let found = map.get(index).unwrap().0;
                let least = durable[index as usize];
                assert!(
                    found >= least || clearing && found == 0,
                    "seed {seed}: {found} < {least}"
                );
            }
        }
    }

    /// A disk with fake syncs can lose what it acknowledged. The result is refused, or is what the map held at some
    /// moment: no chunk has a value that it never had.
    #[test]
    fn under_syncs_that_lie_no_value_is_made_up() {
        let (mut older, mut refused) = (0, 0);
        for seed in 0..300 {
            let mut rng = Rng::with_seed(seed);
            let fake = FakeDirectory::new(512, seed);
            let log = ChunkLog::create(Arc::new(fake.clone()), "map", b"header").unwrap();
            let mut map = ChunkMap::new(log, b"header".to_vec(), 100);
            let mut held = vec![[0; 100]];
            let lies_from = rng.u32(1..20);
            for generation in 1..rng.u32(20..60) {
                if generation == lies_from {
                    fake.let_syncs_lie();
                }
                let run = rng.u64(0..50)..rng.u64(50..=100);
                let values = run.clone().map(|index| (index, Generation(generation)));
                map.save(values, true, &[]).unwrap();
                let mut now = held[held.len() - 1];
                now[run.start as usize..run.end as usize].fill(generation);
                held.push(now);
                if rng.u8(0..20) == 0 {
                    map.rewrite(&[]).unwrap();
                }
            }
            let opened = ChunkLog::open(Arc::new(fake.after_crash(seed)), "map");
            let found = opened.and_then(|opened| {
                ChunkMap::<Generation>::replay(opened, b"header".to_vec(), 100, |_| Ok(()))
            });
            match found {
                Ok(map) => {
                    let found: Vec<u32> = (0..100).map(|i| map.get(i).unwrap().0).collect();
                    let moment = held.iter().rposition(|then| then[..] == found);
                    let moment = moment.unwrap_or_else(|| panic!("seed {seed}: {found:?}"));
                    assert!(
                        moment + 1 >= lies_from as usize,
                        "seed {seed}: before the lie"
                    );
                    older += u32::from(moment + 1 < held.len());
                }
                Err(error) => {
                    let read = !matches!(error, ChunkLogError::Io { .. });
                    assert!(read, "seed {seed}: {error}");
                    refused += 1;
                }
            }
        }
        assert!(older > 0 && refused > 0, "{older} older, {refused} refused");
    }

    #[test]
    fn values_and_chunks_that_cannot_be_are_damage() {
        for (record, what) in [
            (
                Record {
                    state: 9,
                    count: 1,
                    ..Record::default()
                },
                "a chunk in state 9",
            ),
            (
                Record {
                    first: 99,
                    count: 2,
                    state: 1,
                    mask: 1,
                },
                "chunks at 99 of a device of 100",
            ),
        ] {
            let fake = FakeDirectory::default();
            let mut log = ChunkLog::create(Arc::new(fake.clone()), "map", b"header").unwrap();
            log.append(&[record]).unwrap();
            log.sync().unwrap();
            let opened = ChunkLog::open(Arc::new(fake), "map").unwrap();
            let map = ChunkMap::<Generation>::replay(opened, Vec::new(), 100, |_| Ok(()));
            let said = map.map(drop).unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        }
    }
}
