//! A model of a disk under a known sequence of writes, which identifies the state a disk is in.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Size of most writes: less than a freeze takes as one.
pub const UNIT: u64 = 1 << 20;
/// Size of the others.
pub const BLOCK: u64 = 4096;
/// Number of regions in which a single block is rewritten repeatedly.
const REGIONS: u64 = 32;
/// Spreads the units: a prime, so that each occurs once.
const STEP: u64 = 1009;

/// The disk is in none of the expected states.
#[derive(Debug)]
pub struct Differs(pub String);

impl fmt::Display for Differs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Differs {}

/// The sequence of writes, numbered from 1.
pub struct Model {
    units: u64,
    /// Offset and length of each write.
    writes: Vec<(u64, u64)>,
    /// For each position, its length and the numbers of the writes to it.
    places: BTreeMap<u64, (u64, Vec<u64>)>,
}

impl Model {
    /// A disk of this many units, all of which are filled, in scattered order.
    pub fn new(units: u64) -> Self {
        let unit = |i: u64| (i * STEP % units * UNIT, UNIT);
        let mut writes = Vec::new();
        for i in 0..units {
            writes.push(unit(i));
            if i % 4 == 3 {
                writes.push(((units + i / 4 % REGIONS) * UNIT, BLOCK));
            }
            if i % 32 == 31 {
                writes.push(unit(i / 2));
            }
        }
        let mut places: BTreeMap<u64, (u64, Vec<u64>)> = BTreeMap::new();
        for (n, &(at, length)) in (1..).zip(&writes) {
            let place = places.entry(at).or_insert((length, Vec::new()));
            place.1.push(n);
        }
        Self {
            units,
            writes,
            places,
        }
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        (self.units + REGIONS) * UNIT
    }

    /// Number of writes.
    pub fn count(&self) -> u64 {
        self.writes.len() as u64
    }

    /// Total bytes of all writes.
    pub fn bytes(&self) -> u64 {
        self.writes.iter().map(|(_, length)| length).sum()
    }

    /// Bytes of the disk that are written at least once.
    pub fn dirty(&self) -> u64 {
        self.places.values().map(|(length, _)| length).sum()
    }

    /// A write: its offset, and random data that begins with its number.
    pub fn write(&self, number: u64) -> (u64, Vec<u8>) {
        let (at, length) = self.writes[number as usize - 1];
        let mut data = vec![0; length as usize];
        fill(number, &mut data);
        (at, data)
    }

    /// The range of numbers in `0..=upto` such that the disk, initially zero, equals the state after that many writes.
    ///
    /// # Errors
    /// [`Differs`] when there is none.
    pub fn state_of(&self, disk: &Path, upto: u64) -> Result<RangeInclusive<u64>> {
        let file = File::open(disk).with_context(|| format!("no disk {}", disk.display()))?;
        let (mut from, mut to) = (0, upto);
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for (&at, (length, numbers)) in &self.places {
            found.resize(*length as usize, 0);
            expected.resize(*length as usize, 0);
            file.read_exact_at(&mut found, at)
                .with_context(|| format!("cannot read {} at {at}", disk.display()))?;
            let number = found
                .first_chunk()
                .map_or(0, |first| u64::from_le_bytes(*first));
            match number {
                0 => expected.fill(0),
                _ => fill(number, &mut expected),
            }
            let known = number == 0 || (number <= upto && numbers.contains(&number));
            if !known || found != expected {
                let what = format!("what is at {at} is none of what was written there");
                return Err(Differs(what).into());
            }
            let next = numbers.iter().find(|n| **n > number);
            from = from.max(number);
            to = to.min(next.map_or(upto, |next| next - 1));
        }
        match from <= to {
            true => Ok(from..=to),
            false => Err(Differs(format!(
                "a mixture: write {from} is there, and write {}, which came before it, is not",
                to + 1
            ))
            .into()),
        }
    }
}

fn fill(number: u64, data: &mut [u8]) {
    fastrand::Rng::with_seed(number).fill(data);
    data[..8].copy_from_slice(&number.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the disk after the given writes.
    fn after(model: &Model, numbers: impl IntoIterator<Item = u64>, path: &Path) {
        let file = File::create(path).unwrap();
        file.set_len(model.size()).unwrap();
        for n in numbers {
            let (at, data) = model.write(n);
            file.write_all_at(&data, at).unwrap();
        }
    }

    #[test]
    fn a_prefix_is_found_and_a_mixture_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        let model = Model::new(40);
        let all = model.count();
        assert_eq!(all, 40 + 10 + 1);
        for upto in [0, 1, 20, all] {
            after(&model, 1..=upto, &path);
            assert_eq!(model.state_of(&path, all).unwrap(), upto..=upto);
        }
        // A write that has not been made yet.
        assert!(model.state_of(&path, all - 1).is_err());
        // One too many, one too few, and a torn one.
        after(&model, (1..=20).chain([22]), &path);
        let error = model.state_of(&path, all).unwrap_err();
        assert!(error.is::<Differs>(), "{error:#}");
        assert!(
            error
                .to_string()
                .contains("write 22 is there, and write 21")
        );
        after(&model, (1..=20).filter(|n| *n != 7), &path);
        assert!(model.state_of(&path, all).is_err());
        after(&model, 1..=20, &path);
        let (at, _) = model.write(3);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[0; 4096], at + 8192).unwrap();
        let error = model.state_of(&path, all).unwrap_err();
        assert!(error.to_string().contains("none of what was written"));
    }

    #[test]
    fn every_unit_is_written_and_some_again() {
        for units in [96, 3072] {
            let model = Model::new(units);
            let whole = model.places.values().filter(|p| p.0 == UNIT).count();
            assert_eq!(whole as u64, units);
            let blocks = model.places.values().filter(|p| p.0 == BLOCK);
            assert!(blocks.count() as u64 >= REGIONS.min(units / 4));
            let again = |p: &&(u64, Vec<u64>)| p.0 == UNIT && p.1.len() > 1;
            assert_eq!(
                model.places.values().filter(again).count() as u64,
                units / 32
            );
        }
    }
}
