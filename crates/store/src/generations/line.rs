//! A line of generations, as the log of a map records it.

use drover_net::random_id;
use drover_storage::chunk_log::{ChunkLogError, Record};
use drover_storage::chunk_map::{ChunkMap, ChunkValue};

use super::summary::Summary;
use super::units::{CHUNK, MAX_AGE, MAX_SIZE, Seed, new_tag};
use crate::lease::Identity;
use crate::machine::Generation;

/// Records that are not about chunks. The generations up to `first` are not told apart.
const FLOOR: u8 = 224;
/// Generation `first` has begun; `mask` is its tag.
const GENERATION: u8 = 225;
/// The disk is frozen: the image that `mask` is of.
const FROZEN: u8 = 226;
/// The disk has the contents with version `first` and identity `mask`, and is closed.
const CLOSED: u8 = 227;
/// The same of the contents when it was opened for changes.
const OPEN: u8 = 228;

/// What a disk contains, by what its owner knows without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// Of the image.
    base: u64,
    /// Of the image and the edition of its changes.
    identity: u64,
    /// Grows with each change: for an image, the last committed epoch.
    version: u64,
}

impl Contents {
    /// The contents of an image that is told from others by `base`, with changes of an edition, which grows when there are
    /// others in their place, in a version of theirs.
    #[must_use]
    pub fn new(base: &[u8], edition: u64, version: u64) -> Self {
        let hash = |edition: &[u8]| {
            let mut hasher = blake3::Hasher::new_derive_key("drover 2026-11 generations: contents");
            let hash = hasher.update(edition).update(base).finalize();
            let bytes = hash.as_bytes().first_chunk();
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        Self {
            base: hash(b"base"),
            identity: hash(&edition.to_le_bytes()),
            version,
        }
    }
}

impl From<Identity> for Contents {
    fn from(of: Identity) -> Self {
        Self::new(&of.digest.0, of.edition, of.epoch)
    }
}

/// The contents that a map is of: their identity and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Noted {
    /// Exactly these.
    Closed(u64, u64),
    /// These, or a later version.
    Open(u64, u64),
}

impl Noted {
    pub fn record(self) -> Record {
        match self {
            Self::Closed(identity, version) => note(CLOSED, version, identity),
            Self::Open(identity, version) => note(OPEN, version, identity),
        }
    }
}

/// What is known of the generations of a disk, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Names its line of copies.
    pub seed: Seed,
    /// Its current generation.
    pub generation: Generation,
    /// Whether it must not be written.
    pub frozen: bool,
}

/// The generation of a chunk, less the floor; 0 for one that was never written in this line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Age(u8);

impl ChunkValue for Age {
    const BITS: u32 = 8;

    fn parts(self) -> (u8, u64) {
        (self.0, 0)
    }

    fn from_parts(state: u8, _: u64) -> Option<Self> {
        (state <= MAX_AGE).then_some(Self(state))
    }
}

/// A record that is not about chunks.
pub(super) fn note(state: u8, first: u64, mask: u64) -> Record {
    Record {
        first,
        count: 0,
        state,
        mask,
    }
}

/// The records of chunks with their ages, in order.
pub(super) fn records(chunks: impl IntoIterator<Item = (u64, u8)>) -> Vec<Record> {
    let mut records: Vec<Record> = Vec::new();
    for (chunk, state) in chunks {
        match records.last_mut() {
            Some(last) if last.state == state && last.first + u64::from(last.count) == chunk => {
                last.count += 1;
            }
            _ => records.push(Record {
                first: chunk,
                count: 1,
                state,
                mask: 0,
            }),
        }
    }
    records
}

/// The contents of a map.
pub(super) struct Line {
    seed: Seed,
    pub size: u64,
    /// Generations up to this one are not told apart.
    floor: u64,
    /// The tags of the later ones; the last is the current generation's.
    tags: Vec<u64>,
    ages: ChunkMap<Age>,
    /// The image that is frozen.
    frozen: Option<u64>,
    noted: Option<Noted>,
}

impl Line {
    /// A new line, in its first generation.
    pub fn new(size: u64) -> Self {
        Self {
            seed: Seed(random_id()),
            size,
            floor: 0,
            tags: vec![new_tag()],
            ages: ChunkMap::default(),
            frozen: None,
            noted: None,
        }
    }

    /// The line of a summary, as it was.
    pub fn of_summary(of: &Summary) -> Self {
        let mut line = Self {
            seed: of.seed,
            size: of.size,
            floor: of.floor,
            tags: of.tags.clone(),
            ages: ChunkMap::default(),
            frozen: None,
            noted: None,
        };
        for (chunks, age) in of.chunks() {
            line.ages.load(chunks, Age(age));
        }
        line
    }

    /// The caller's header of the log.
    pub fn header(&self) -> Vec<u8> {
        [&self.seed.0[..], &self.size.to_le_bytes()].concat()
    }

    /// A line of which no record was read yet.
    pub fn of_header(header: &[u8], file: &str) -> Result<Self, ChunkLogError> {
        let parse = || {
            let (seed, size) = header.split_first_chunk()?;
            let size = u64::from_le_bytes(size.try_into().ok()?);
            (size <= MAX_SIZE).then_some((Seed(*seed), size))
        };
        let (seed, size) = parse().ok_or_else(|| ChunkLogError::NotALog {
            file: file.to_owned(),
        })?;
        Ok(Self {
            seed,
            size,
            floor: 0,
            tags: Vec::new(),
            ages: ChunkMap::default(),
            frozen: None,
            noted: None,
        })
    }

    /// Takes a record of the log.
    pub fn replay(&mut self, record: Record) -> Result<(), String> {
        match record.state {
            FLOOR if !self.tags.is_empty() => return Err("a floor after a generation".into()),
            FLOOR if record.first >= u64::MAX / 2 => return Err("a generation beyond all".into()),
            FLOOR => self.floor = record.first,
            GENERATION if record.first != self.generation().0 + 1 => {
                return Err(format!("generation {} out of turn", record.first));
            }
            GENERATION if self.tags.len() >= usize::from(MAX_AGE) => {
                return Err("more generations than a map tells apart".into());
            }
            GENERATION => {
                self.tags.push(record.mask);
                self.frozen = None;
            }
            FROZEN => self.frozen = Some(record.mask),
            CLOSED => self.noted = Some(Noted::Closed(record.mask, record.first)),
            OPEN => self.noted = Some(Noted::Open(record.mask, record.first)),
            age if age > self.age() => return Err("a chunk of a generation to come".into()),
            _ => return self.ages.replay(record, self.size.div_ceil(CHUNK)),
        }
        Ok(())
    }

    /// All records of the line.
    pub fn snapshot(&self) -> Vec<Record> {
        let mut records = vec![note(FLOOR, self.floor, 0)];
        let generations = (self.floor + 1..).zip(&self.tags);
        records.extend(generations.map(|(nth, tag)| note(GENERATION, nth, *tag)));
        records.extend(self.frozen.map(|base| note(FROZEN, 0, base)));
        records.extend(self.noted.map(Noted::record));
        records.extend(self.ages.snapshot());
        records
    }

    /// Whether a crash left it before its first generation.
    pub fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// The current generation.
    pub fn generation(&self) -> Generation {
        Generation(self.floor + self.tags.len() as u64)
    }

    /// The age of what is written now.
    pub fn age(&self) -> u8 {
        self.tags.len() as u8
    }

    pub fn age_of(&self, chunk: u64) -> u8 {
        self.ages.get(chunk).0
    }

    pub fn set(&mut self, chunk: u64, age: u8) {
        self.ages.load(chunk..chunk + 1, Age(age));
    }

    /// Begins the next generation; returns its record. The floor is raised if there are too many.
    pub fn next(&mut self) -> Record {
        if self.tags.len() >= usize::from(MAX_AGE) {
            self.raise_floor();
        }
        self.tags.push(new_tag());
        self.frozen = None;
        note(
            GENERATION,
            self.generation().0,
            self.tags[self.tags.len() - 1],
        )
    }

    /// Forgets half of the generations: chunks written in them count as written in the first that remains.
    fn raise_floor(&mut self) {
        let by = MAX_AGE / 2;
        let mut ages = ChunkMap::default();
        for (chunks, Age(age)) in self.ages.recorded() {
            ages.load(chunks, Age(age.saturating_sub(by).max(1)));
        }
        self.ages = ages;
        self.floor += u64::from(by);
        self.tags.drain(..usize::from(by));
    }

    /// Notes its contents, open for changes; returns the record.
    pub fn opened(&mut self, now: Contents) -> Vec<Record> {
        let noted = Noted::Open(now.identity, now.version);
        self.noted = Some(noted);
        vec![noted.record()]
    }

    /// Notes its contents, closed; returns the records.
    pub fn closed(&mut self, now: Contents) -> Vec<Record> {
        let noted = Noted::Closed(now.identity, now.version);
        self.noted = Some(noted);
        let mut records = match self.frozen {
            Some(_) => self.freeze_as(now),
            None => Vec::new(),
        };
        records.push(noted.record());
        records
    }

    /// Freezes it, with these contents; returns the records.
    pub fn freeze(&mut self, now: Contents) -> Vec<Record> {
        self.frozen = Some(now.base);
        self.closed(now)
    }

    /// Freezes the image that these contents are of, whatever is known of the map; returns the records.
    pub fn freeze_as(&mut self, now: Contents) -> Vec<Record> {
        self.frozen = Some(now.base);
        vec![note(FROZEN, 0, now.base)]
    }

    /// Whether the image with these contents is frozen, whatever was changed in it.
    pub fn is_frozen(&self, now: Contents) -> bool {
        self.frozen == Some(now.base)
    }

    /// Whether it is of a disk with these contents.
    pub fn is_of(&self, size: u64, now: Contents) -> bool {
        self.size == size
            && match self.noted {
                None => false,
                Some(Noted::Closed(identity, version)) => {
                    (identity, version) == (now.identity, now.version)
                }
                Some(Noted::Open(identity, version)) => {
                    identity == now.identity && version <= now.version
                }
            }
    }

    /// Whether it is exactly of a disk with these contents, which is not open for changes.
    pub fn is_closed_as(&self, now: Contents) -> bool {
        self.noted == Some(Noted::Closed(now.identity, now.version))
    }

    /// Takes the place of another line of the same disk at this site.
    pub fn continue_as(&mut self, other: &Line) {
        self.noted = other.noted;
    }

    pub fn about(&self) -> About {
        About {
            seed: self.seed,
            generation: self.generation(),
            frozen: self.frozen.is_some(),
        }
    }

    /// The summary, with the chunks that were written since they were set.
    pub fn summary(&self, written: &dyn Fn(u64) -> bool) -> Summary {
        let mut runs: Vec<(u64, u8)> = Vec::new();
        let mut push = |end, age| match runs.last_mut() {
            Some(last) if last.1 == age => last.0 = end,
            _ => runs.push((end, age)),
        };
        let now = self.age();
        for (chunks, Age(age)) in self.ages.runs(0..self.size.div_ceil(CHUNK)) {
            for chunk in chunks {
                push(chunk + 1, if written(chunk) { now } else { age });
            }
        }
        Summary {
            seed: self.seed,
            size: self.size,
            unit: CHUNK,
            floor: self.floor,
            tags: self.tags.clone(),
            over: self.frozen.is_some(),
            runs,
        }
    }
}
