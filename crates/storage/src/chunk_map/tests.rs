use std::io;
use std::sync::Arc;

use fastrand::Rng;

use super::*;
use crate::{FakeDirectory, Operation};

/// A generation, as chunks of a migrated machine have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Generation(u32);

impl ChunkValue for Generation {
    const BITS: u32 = 1;

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
    state: 64,
    mask: 0,
};

fn create(fake: &FakeDirectory) -> (ChunkLog, ChunkMap<Generation>) {
    let log = ChunkLog::create(Arc::new(fake.clone()), "map", b"header").unwrap();
    (log, ChunkMap::default())
}

/// The values in the log of 100 chunks, and how many notes it has.
fn open(fake: &FakeDirectory) -> Result<(ChunkMap<Generation>, u32), ChunkLogError> {
    let opened = ChunkLog::open(Arc::new(fake.clone()), "map")?;
    assert_eq!(opened.header(), b"header");
    let (mut map, mut notes) = (ChunkMap::<Generation>::default(), 0);
    opened.replay(|record| match record == NOTE {
        true => {
            notes += 1;
            Ok(())
        }
        false => map.replay(record, 100),
    })?;
    Ok((map, notes))
}

/// Whatever is lost, each chunk has a value that it was given, at least as new as the last durable one.
#[test]
fn what_was_saved_durably_is_there_after_a_crash() {
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let fake = FakeDirectory::new(512, seed);
        let (mut log, mut map) = create(&fake);
        map.append(&mut log, &[NOTE], &[NOTE]).unwrap();
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
                0 => map.rewrite(&mut log, &[NOTE]),
                1 => map.clear(&mut log, 100, &[NOTE]).inspect(|()| now.fill(0)),
                _ => map.save(&mut log, values, durably, &[NOTE]).inspect(|()| {
                    now[run.start as usize..run.end as usize].fill(generation);
                    if durably {
                        durable = now;
                    }
                }),
            };
            match saved {
                Ok(()) => {
                    let mut found = [0; 100];
                    for (run, value) in map.recorded() {
                        assert!(value.0 > 0, "seed {seed}");
                        found[run.start as usize..run.end as usize].fill(value.0);
                    }
                    assert_eq!(found, now, "seed {seed}");
                    assert!((0..100).all(|index| map.get(index).0 == now[index as usize]));
                    if now == [0; 100] {
                        durable = now;
                    }
                }
                Err(_) => break,
            }
        }
        let (map, notes) = open(&fake.after_crash(seed)).unwrap();
        assert_eq!(notes, 1, "seed {seed}");
        for index in 0..100 {
            let found = map.get(index).0;
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
        let (mut log, mut map) = create(&fake);
        let mut held = vec![[0; 100]];
        let lies_from = rng.u32(1..20);
        for generation in 1..rng.u32(20..60) {
            if generation == lies_from {
                fake.let_syncs_lie();
            }
            let run = rng.u64(0..50)..rng.u64(50..=100);
            let values = run.clone().map(|index| (index, Generation(generation)));
            map.save(&mut log, values, true, &[]).unwrap();
            let mut now = held[held.len() - 1];
            now[run.start as usize..run.end as usize].fill(generation);
            held.push(now);
            if rng.u8(0..20) == 0 {
                map.rewrite(&mut log, &[]).unwrap();
            }
        }
        match open(&fake.after_crash(seed)) {
            Ok((map, _)) => {
                let found: Vec<u32> = (0..100).map(|i| map.get(i).0).collect();
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
        (
            Record {
                first: u64::MAX,
                count: 2,
                state: 1,
                mask: 1,
            },
            "of a device of 100",
        ),
    ] {
        let fake = FakeDirectory::default();
        let (mut log, map) = create(&fake);
        map.append(&mut log, &[record], &[]).unwrap();
        let said = open(&fake).map(drop).unwrap_err().to_string();
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn a_failed_save_changes_nothing_and_a_broken_log_is_rewritten_before_the_next() {
    let fake = FakeDirectory::default();
    let (mut log, mut map) = create(&fake);
    let values = |generation| (20..50).map(move |index| (index, Generation(generation)));
    map.save(&mut log, values(1), true, &[]).unwrap();
    fake.set_faults(|operation, name| {
        (operation == Operation::Sync && name == "map").then_some(io::ErrorKind::Other)
    });
    assert!(map.save(&mut log, values(2), true, &[]).is_err());
    fake.clear_faults();
    assert!(log.is_broken() && log.wants_rewrite());
    assert!(map.recorded().eq([(20..50, Generation(1))]));
    map.save(&mut log, values(3).take(10), true, &[NOTE])
        .unwrap();
    assert!(!log.is_broken());
    let expected = [(20..30, Generation(3)), (30..50, Generation(1))];
    assert!(map.recorded().eq(expected.clone()));
    let (map, notes) = open(&fake.after_crash(1)).unwrap();
    assert!(map.recorded().eq(expected) && notes == 1);
}

/// Any state of so many bits, and any mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Any<const BITS: u32>(u8, u64);

impl<const BITS: u32> ChunkValue for Any<BITS> {
    const BITS: u32 = BITS;

    fn parts(self) -> (u8, u64) {
        (self.0, self.1)
    }

    fn from_parts(state: u8, mask: u64) -> Option<Self> {
        (u64::from(state) < 1 << BITS).then_some(Self(state, mask))
    }
}

fn check_against_a_vector<const BITS: u32>(masks: &[u64]) {
    for seed in 0..8 {
        let mut rng = Rng::with_seed(seed);
        let chunks = PAGE * 3 + 100;
        let mut map = ChunkMap::<Any<BITS>>::default();
        let mut model = vec![Any::default(); chunks as usize];
        let mut logged = model.clone();
        for _ in 0..60 {
            let start = match rng.bool() {
                true => rng.u64(0..=chunks),
                false => rng.u64(0..=3) * PAGE,
            };
            let most = [3, 100, PAGE, chunks][rng.usize(0..4)];
            let end = (start + rng.u64(0..=most)).min(chunks);
            let value = match [0, 1, (1 << BITS) - 1][rng.usize(0..3)] {
                0 => Any::default(),
                state => Any(state as u8, masks[rng.usize(0..masks.len())]),
            };
            map.set(start..end, value);
            model[start as usize..end as usize].fill(value);
            if rng.u8(0..5) == 0 {
                let records = map.take_changed();
                if rng.bool() {
                    map.mark_again(&records);
                    assert_eq!(map.take_changed(), records, "seed {seed}");
                }
                for record in records {
                    let end = record.first as usize + record.count as usize;
                    logged[record.first as usize..end].fill(Any(record.state, record.mask));
                }
                assert!(logged == model, "seed {seed}: what changed");
            }
            let (from, to) = (rng.u64(0..=chunks), rng.u64(0..=chunks));
            let mut at = from;
            let mut last = None;
            for (run, value) in map.runs(from..to) {
                assert!(
                    run.start == at && run.end > at && last != Some(value),
                    "seed {seed}"
                );
                let run = run.start as usize..run.end as usize;
                assert!(model[run.clone()].iter().all(|other| *other == value));
                (at, last) = (run.end as u64, Some(value));
            }
            assert_eq!(at, to.max(from), "seed {seed}");
            let count = model.iter().filter(|value| value.0 > 0).count() as u64;
            assert_eq!(map.count(), count, "seed {seed}");
        }
        let mut again = ChunkMap::<Any<BITS>>::default();
        for record in map.snapshot() {
            assert!(record.state > 0, "seed {seed}: a default in a snapshot");
            again.replay(record, chunks).unwrap();
        }
        assert_eq!(again.count(), map.count(), "seed {seed}");
        for (chunk, value) in (0..).zip(&model) {
            assert_eq!(again.get(chunk), *value, "seed {seed}: chunk {chunk}");
        }
    }
}

#[test]
fn it_is_like_a_vector_of_values() {
    check_against_a_vector::<2>(&[0]);
    check_against_a_vector::<4>(&[0, 1, u64::MAX]);
    check_against_a_vector::<8>(&[0, 0, 7]);
}

#[test]
fn what_is_marked_again_is_taken_again() {
    let mut map = ChunkMap::default();
    map.set(10..20, Any::<2>(1, 0));
    map.set(20..25, Any(2, 0));
    map.set(12..14, Any(1, 0));
    let records = map.take_changed();
    assert_eq!(records.len(), 2, "{records:?}");
    assert!(map.take_changed().is_empty());
    map.mark(11..13);
    map.mark(13..22);
    let runs: Vec<_> = map
        .take_changed()
        .iter()
        .map(|r| (r.first, r.count))
        .collect();
    assert_eq!(runs, [(11, 9), (20, 2)]);
}

#[test]
fn a_trimmed_device_takes_little_memory() {
    let mut map = ChunkMap::default();
    let chunks = 1 << 34;
    map.set(0..chunks, Any::<2>(2, 0));
    assert!(map.pages.values().all(|p| matches!(p, Page::All(_))));
    assert_eq!(map.take_changed().len(), 5, "runs of at most u32::MAX");
    assert_eq!(map.snapshot().count(), 5);
    assert_eq!(map.count(), chunks);
}
