//! The generations of a disk as a peer is told of them, and what two copies of a disk differ in.

use std::ops::Range;

use super::units::{CHUNK, MAX_AGE, MAX_SIZE, Seed, new_tag};
use crate::machine::Generation;

/// Upper bound on an encoded summary, in bytes. What does not fit is told in larger units.
pub const MAX_SUMMARY_BYTES: usize = 1 << 20;

const VERSION: u8 = 1;
/// What names of dirty bitmaps begin with.
const BITMAP: &str = "drover-";
/// Bytes before the tags.
const FIXED: usize = 1 + 16 + 8 + 8 + 1 + 1 + 1;
const MAX_FLOOR: u64 = u64::MAX / 2;

/// The generations of a copy of a disk at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Names its line of copies.
    pub seed: Seed,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Bytes that a run counts in: a power of two, at least [`CHUNK`].
    pub(super) unit: u64,
    /// Generations up to this one are not told apart.
    pub(super) floor: u64,
    /// The tags of the later ones, up to the current one.
    pub(super) tags: Vec<u64>,
    /// Whether the last generation has ended: nothing is written in it any more.
    pub over: bool,
    /// The end of each run in units, and its age: its generation less the floor, or 0 if it was never written.
    pub(super) runs: Vec<(u64, u8)>,
}

/// How a copy of a disk, *this* one, differs from another. Ranges are in bytes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// This one has all that the other has, and what was written to these ranges later; none: they are the same.
    Newer {
        /// The last generation that both have.
        since: Generation,
        /// What to send.
        ranges: Vec<Range<u64>>,
    },
    /// The other has all that this one has, and what was written to these ranges later: this is an old copy.
    Older {
        /// The last generation that both have.
        since: Generation,
        /// What this one lacks.
        ranges: Vec<Range<u64>>,
    },
    /// Both were written since they were one disk: two machines of one origin. Elsewhere than in these ranges they are the same.
    Branch {
        /// The last generation that both have.
        since: Generation,
        /// What either has written since.
        ranges: Vec<Range<u64>>,
    },
    /// Only digests can tell.
    Unknown(NotComparable),
}

/// Why generations say nothing about two copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotComparable {
    /// They are of different origin.
    #[error("the disks are not copies of one another")]
    OtherSeed,
    /// One was grown or shrunk.
    #[error("the disks have different sizes")]
    OtherSize,
    /// They have no generation in common, or not any more.
    #[error("the disks parted too many generations ago")]
    NothingCommon,
}

/// Why bytes are no summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SummaryError {
    /// Of a later version of drover.
    #[error("a summary of generations of version {0}; update drover at this site")]
    Version(u8),
    /// Damaged, or made up.
    #[error("a damaged summary of generations")]
    Damaged,
}

impl Summary {
    /// The current generation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        Generation(self.floor + self.tags.len() as u64)
    }

    /// The name of a dirty bitmap which records what is written after the last generation, which is over. It says all that
    /// [`Summary::since`] needs.
    #[must_use]
    pub fn bitmap_name(&self) -> Option<String> {
        let tag = self.tags.last().filter(|_| self.over)?;
        Some(format!(
            "{BITMAP}{}-{}-{tag:016x}",
            self.seed,
            self.generation().0
        ))
    }

    /// The generations of a disk of `size` bytes to which nothing but these ranges was written since a generation was over; the
    /// name of the bitmap that recorded that says which ([`Summary::bitmap_name`]). None for bitmaps with other names.
    #[must_use]
    pub fn since(bitmap: &str, size: u64, written: &[Range<u64>]) -> Option<Self> {
        let (seed, generation, tag) = parse_bitmap(bitmap)?;
        if size > MAX_SIZE {
            return None;
        }
        let mut runs = Vec::new();
        for range in written.iter().filter(|range| range.start < range.end) {
            let first = range.start / CHUNK;
            let last = range.end.min(size).div_ceil(CHUNK);
            let done = runs.last().map_or(0, |run: &(u64, u8)| run.0);
            if first > done {
                push(&mut runs, first, 1);
            }
            if last > done.max(first) {
                push(&mut runs, last, 2);
            }
        }
        let chunks = size.div_ceil(CHUNK);
        if runs.last().map_or(0, |run| run.0) < chunks {
            push(&mut runs, chunks, 1);
        }
        Some(Self {
            seed,
            size,
            unit: CHUNK,
            floor: generation - 1,
            // A copy that was written elsewhere since has another.
            tags: vec![tag, new_tag()],
            over: false,
            runs,
        })
    }

    /// As of the end of the last generation that has ended, if nothing was written since.
    #[must_use]
    pub fn at_end(mut self) -> Option<Self> {
        if self.over {
            return Some(self);
        }
        let now = self.tags.len() as u8;
        if self.tags.len() < 2 || self.runs.iter().any(|run| run.1 == now) {
            return None;
        }
        self.tags.pop();
        self.over = true;
        Some(self)
    }

    /// The runs of chunks, and their ages.
    pub(super) fn chunks(&self) -> impl Iterator<Item = (Range<u64>, u8)> {
        let (unit, chunks) = (self.unit / CHUNK, self.size.div_ceil(CHUNK));
        let mut start = 0;
        self.runs.iter().map(move |(end, age)| {
            let run = start..(end * unit).min(chunks);
            start = run.end;
            (run, *age)
        })
    }

    /// The byte ranges written in a later generation than `generation`, in order.
    #[must_use]
    pub fn newer_than(&self, generation: Generation) -> Vec<Range<u64>> {
        let newer = |age: u8| age > 0 && self.floor + u64::from(age) > generation.0;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (chunks, _) in self.chunks().filter(|(_, age)| newer(*age)) {
            let bytes = chunks.start * CHUNK..(chunks.end * CHUNK).min(self.size);
            match ranges.last_mut() {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => ranges.push(bytes),
            }
        }
        ranges
    }

    /// Compares this copy with another.
    #[must_use]
    pub fn compare(&self, other: &Self) -> Comparison {
        if self.seed != other.seed {
            return Comparison::Unknown(NotComparable::OtherSeed);
        }
        if self.size != other.size {
            return Comparison::Unknown(NotComparable::OtherSize);
        }
        let Some(since) = self.common(other) else {
            return Comparison::Unknown(NotComparable::NothingCommon);
        };
        let (ours, theirs) = (self.newer_than(since), other.newer_than(since));
        match (ours.is_empty(), theirs.is_empty()) {
            (_, true) => Comparison::Newer {
                since,
                ranges: ours,
            },
            (true, false) => Comparison::Older {
                since,
                ranges: theirs,
            },
            (false, false) => Comparison::Branch {
                since,
                ranges: union(ours, theirs),
            },
        }
    }

    /// The last generation that ended in both: up to its end they are the same disk.
    fn common(&self, other: &Self) -> Option<Generation> {
        let ended = |of: &Self| of.generation().0 - u64::from(!of.over);
        let first = self.floor.max(other.floor) + 1;
        let last = ended(self).min(ended(other));
        let tag = |of: &Self, nth: u64| of.tags.get((nth - of.floor - 1) as usize).copied();
        let same = |nth: &u64| tag(self, *nth) == tag(other, *nth);
        (first..=last).rev().find(same).map(Generation)
    }

    /// Encodes it in at most [`MAX_SUMMARY_BYTES`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let bytes = self.encode_all();
        if bytes.len() <= MAX_SUMMARY_BYTES {
            return bytes;
        }
        self.coarser().encode()
    }

    fn encode_all(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend(self.seed.0);
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(self.floor.to_le_bytes());
        bytes.push(self.unit.trailing_zeros() as u8);
        bytes.push(u8::from(self.over));
        bytes.push(self.tags.len() as u8);
        self.tags
            .iter()
            .for_each(|tag| bytes.extend(tag.to_le_bytes()));
        let mut start = 0;
        for (end, age) in &self.runs {
            put_number(&mut bytes, end - start);
            bytes.push(*age);
            start = *end;
        }
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    /// In units of twice the size: each of the latest generation in it.
    pub(super) fn coarser(&self) -> Self {
        let mut runs: Vec<(u64, u8)> = Vec::new();
        let mut start = 0;
        for (end, age) in &self.runs {
            // The first unit may be shared with runs before.
            let (first, last) = (start / 2, end.div_ceil(2));
            let mut from = first;
            if let Some((done, before)) = runs.last().copied()
                && done > first
            {
                from = done;
                if *age > before {
                    runs.pop();
                    let begin = runs.last().map_or(0, |run| run.0);
                    if first > begin {
                        push(&mut runs, first, before);
                    }
                    push(&mut runs, done, *age);
                }
            }
            if last > from {
                push(&mut runs, last, *age);
            }
            start = *end;
        }
        Self {
            unit: self.unit * 2,
            runs,
            tags: self.tags.clone(),
            ..*self
        }
    }

    /// Decodes what a peer has sent.
    ///
    /// # Errors
    /// [`SummaryError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, SummaryError> {
        match bytes.first() {
            Some(&VERSION) => parse(bytes).ok_or(SummaryError::Damaged),
            Some(version) => Err(SummaryError::Version(*version)),
            None => Err(SummaryError::Damaged),
        }
    }
}

fn parse(bytes: &[u8]) -> Option<Summary> {
    if bytes.len() > MAX_SUMMARY_BYTES {
        return None;
    }
    let (body, sum) = bytes.split_last_chunk()?;
    if u32::from_le_bytes(*sum) != checksum(body) && !cfg!(fuzzing) {
        return None;
    }
    let (fixed, mut rest) = body.split_first_chunk::<FIXED>()?;
    let number = |at: usize| {
        fixed[at..]
            .first_chunk()
            .map(|bytes| u64::from_le_bytes(*bytes))
    };
    let mut seed = [0; 16];
    seed.copy_from_slice(&fixed[1..17]);
    let (size, floor) = (number(17)?, number(25)?);
    let unit = 1u64.checked_shl(fixed[33].into())?;
    let tag_count = fixed[35];
    let fine = size <= MAX_SIZE
        && floor < MAX_FLOOR
        && (CHUNK..=MAX_SIZE).contains(&unit)
        && fixed[34] <= 1
        && (1..=MAX_AGE).contains(&tag_count);
    if !fine {
        return None;
    }
    let mut tags = Vec::with_capacity(tag_count.into());
    for _ in 0..tag_count {
        let (tag, after) = rest.split_first_chunk()?;
        tags.push(u64::from_le_bytes(*tag));
        rest = after;
    }
    let units = size.div_ceil(unit);
    let mut runs: Vec<(u64, u8)> = Vec::new();
    let mut at = 0u64;
    while !rest.is_empty() {
        let count = take_number(&mut rest)?;
        let (&age, after) = rest.split_first()?;
        rest = after;
        at = at.checked_add(count).filter(|end| *end <= units)?;
        let again = runs.last().is_some_and(|last| last.1 == age);
        if count == 0 || age > tag_count || again {
            return None;
        }
        runs.push((at, age));
    }
    (at == units).then_some(Summary {
        seed: Seed(seed),
        size,
        unit,
        floor,
        tags,
        over: fixed[34] == 1,
        runs,
    })
}

/// Seed, generation and tag in the name of a bitmap.
fn parse_bitmap(name: &str) -> Option<(Seed, u64, u64)> {
    let mut parts = name.strip_prefix(BITMAP)?.split('-');
    let (seed, generation, tag) = (parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, length| {
        text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    if parts.next().is_some() || !is_hex(seed, 32) || !is_hex(tag, 16) {
        return None;
    }
    let generation = generation
        .parse()
        .ok()
        .filter(|n| (1..MAX_FLOOR).contains(n))?;
    let seed = u128::from_str_radix(seed, 16).ok()?;
    let tag = u64::from_str_radix(tag, 16).ok()?;
    Some((Seed(seed.to_be_bytes()), generation, tag))
}

/// Appends a run, or lengthens the last one.
fn push(runs: &mut Vec<(u64, u8)>, end: u64, age: u8) {
    match runs.last_mut() {
        Some(last) if last.1 == age => last.0 = end,
        _ => runs.push((end, age)),
    }
}

/// Merges two lists of ranges, each in order.
fn union(a: Vec<Range<u64>>, b: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut all = a;
    all.extend(b);
    all.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in all {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// A number in its shortest form.
fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..63).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return (byte != 0 || shift == 0).then_some(number);
        }
    }
    None
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}
