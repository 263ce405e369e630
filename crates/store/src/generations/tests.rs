#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]

use std::collections::BTreeMap;

use drover_core::{BlockDevice, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_device::testing::{Call, Probe};
use drover_storage::{FakeDirectory, Operation};
use proptest::prelude::*;

use super::*;

mod moves;

const CHUNKS: u64 = 150;
/// The last chunk is short.
const SIZE: u64 = CHUNKS * CHUNK - 5000;

fn contents(version: u64) -> Contents {
    Contents::new(b"disk", 1, version)
}

fn open_at(directory: &FakeDirectory, version: u64) -> Generations {
    Generations::open(Arc::new(directory.clone()), SIZE, contents(version)).unwrap()
}

fn write(map: &Generations, chunks: std::ops::Range<u64>) {
    let (offset, end) = (chunks.start * CHUNK + 17, (chunks.end * CHUNK).min(SIZE));
    drop(map.before_write(offset, end - offset).unwrap());
}

/// The generation of each chunk.
fn generations(map: &Generations) -> Vec<u64> {
    let summary = map.summary().unwrap();
    let floor = summary.floor;
    let each = summary.chunks().flat_map(|(chunks, age)| {
        let generation = if age == 0 { 0 } else { floor + u64::from(age) };
        chunks.map(move |_| generation)
    });
    each.collect()
}

fn ranges(chunks: &[std::ops::Range<u64>]) -> Vec<std::ops::Range<u64>> {
    let bytes = |c: &std::ops::Range<u64>| c.start * CHUNK..(c.end * CHUNK).min(SIZE);
    chunks.iter().map(bytes).collect()
}

/// A copy of a disk at a site, which was opened for writing.
fn successor(of: &Generations) -> Generations {
    let summary = of.summary().unwrap().at_end().unwrap();
    let bytes = summary.encode();
    let summary = Summary::decode(&bytes).unwrap();
    let directory = Arc::new(FakeDirectory::default());
    let map = Generations::succeed(directory, SIZE, &summary, contents(0)).unwrap();
    map.begin(contents(0)).unwrap();
    map
}

fn first() -> Generations {
    let map = open_at(&FakeDirectory::default(), 0);
    map.begin(contents(0)).unwrap();
    map
}

fn compare(a: &Generations, b: &Generations) -> Comparison {
    a.summary().unwrap().compare(&b.summary().unwrap())
}

#[test]
fn a_disk_that_comes_home_by_two_sites_brings_what_they_wrote() {
    let a = first();
    write(&a, 0..100);
    a.freeze(contents(1)).unwrap();
    assert!(matches!(
        a.before_write(0, 1),
        Err(GenerationsError::Frozen)
    ));
    let b = successor(&a);
    assert_eq!(b.about().seed, a.about().seed);
    assert_eq!(b.about().generation, Generation(2));
    let same = Comparison::Newer {
        since: Generation(1),
        ranges: vec![],
    };
    assert_eq!(compare(&b, &a), same);
    write(&b, 3..5);
    write(&b, 149..150);
    b.freeze(contents(1)).unwrap();
    let c = successor(&b);
    write(&c, 4..6);
    c.freeze(contents(1)).unwrap();
    let newer = |since, chunks: &[_]| Comparison::Newer {
        since: Generation(since),
        ranges: ranges(chunks),
    };
    assert_eq!(compare(&c, &a), newer(1, &[3..6, 149..150]));
    assert_eq!(compare(&c, &b), newer(2, &[4..6]));
    let older = Comparison::Older {
        since: Generation(1),
        ranges: ranges(&[3..6, 149..150]),
    };
    assert_eq!(compare(&a, &c), older);
    // At home again it is the same line, three moves on.
    let home = successor(&c);
    assert_eq!(home.about().generation, Generation(4));
    write(&home, 0..1);
    assert_eq!(compare(&home, &b), newer(2, &[0..1, 4..6]));
}

#[test]
fn two_copies_that_were_both_written_are_a_branch() {
    let a = first();
    write(&a, 0..10);
    a.freeze(contents(1)).unwrap();
    let b = successor(&a);
    write(&b, 2..3);
    a.thaw().unwrap();
    // Thawed, but not written: still an old copy.
    assert_eq!(
        compare(&b, &a),
        Comparison::Newer {
            since: Generation(1),
            ranges: ranges(&[2..3])
        }
    );
    a.begin(contents(1)).unwrap();
    write(&a, 2..5);
    assert_eq!(a.about().generation, b.about().generation);
    let branch = Comparison::Branch {
        since: Generation(1),
        ranges: ranges(&[2..5]),
    };
    assert_eq!(compare(&b, &a), branch);
    assert_eq!(compare(&a, &b), branch);
    // However often they move on.
    a.track().unwrap();
    write(&a, 70..71);
    assert_eq!(
        compare(&a, &b),
        Comparison::Branch {
            since: Generation(1),
            ranges: ranges(&[2..5, 70..71])
        }
    );
}

#[test]
fn a_copy_is_made_of_a_disk_that_goes_on() {
    let a = first();
    write(&a, 0..10);
    assert_eq!(a.summary().unwrap().at_end(), None, "it may be written on");
    a.track().unwrap();
    let b = successor(&a);
    assert_eq!(b.about().generation, Generation(2));
    write(&b, 1..2);
    assert!(matches!(compare(&b, &a), Comparison::Newer { .. }));
    write(&a, 1..2);
    assert!(matches!(compare(&b, &a), Comparison::Branch { .. }));
}

#[test]
fn other_disks_sizes_and_old_generations_are_not_compared() {
    let (a, b) = (first(), first());
    let unknown = Comparison::Unknown;
    assert_eq!(compare(&a, &b), unknown(NotComparable::OtherSeed));
    let mut grown = a.summary().unwrap();
    grown.size += CHUNK;
    let compared = grown.compare(&a.summary().unwrap());
    assert_eq!(compared, unknown(NotComparable::OtherSize));
    // The copy of a file with its map, made behind drover's back: the last generation has not ended in either.
    let copied = a.summary().unwrap();
    assert_eq!(
        copied.compare(&copied),
        unknown(NotComparable::NothingCommon)
    );
    a.freeze(contents(1)).unwrap();
    let b = successor(&a);
    for _ in 0..3 * u32::from(units::MAX_AGE) {
        b.track().unwrap();
    }
    assert_eq!(compare(&b, &a), unknown(NotComparable::NothingCommon));
}

#[test]
fn what_was_written_too_long_ago_counts_as_newer_rather_than_older() {
    let directory = FakeDirectory::default();
    let map = open_at(&directory, 0);
    map.begin(contents(0)).unwrap();
    let mut model = vec![0u64; CHUNKS as usize];
    for generation in 1..=450 {
        let chunk = generation * 7 % 100;
        write(&map, chunk..chunk + 1);
        model[chunk as usize] = generation;
        assert_eq!(map.track().unwrap(), Generation(generation + 1));
    }
    map.close(contents(1)).unwrap();
    drop(map);
    let map = open_at(&directory, 1);
    let floor = map.summary().unwrap().floor;
    assert!(floor > 200 && floor < 400);
    for (found, model) in generations(&map).into_iter().zip(model) {
        let expected = if model == 0 { 0 } else { model.max(floor + 1) };
        assert_eq!(found, expected);
    }
}

#[test]
fn a_chunk_costs_one_record_per_generation() {
    let directory = FakeDirectory::default();
    let map = open_at(&directory, 0);
    map.begin(contents(0)).unwrap();
    let length = || directory.bytes(FILE_NAME).unwrap().len();
    write(&map, 0..1);
    let before = (directory.steps(), length());
    for chunk in 0..64 {
        for _ in 0..10 {
            write(&map, chunk..chunk + 1);
        }
    }
    assert_eq!((directory.steps(), length()), before);
    write(&map, 64..65);
    assert!(length() > before.1);
    map.track().unwrap();
    let before = length();
    write(&map, 0..1);
    assert!(length() > before);
}

#[test]
fn a_map_is_believed_only_of_its_contents() {
    let directory = FakeDirectory::default();
    let map = open_at(&directory, 5);
    map.begin(contents(5)).unwrap();
    write(&map, 1..2);
    let seed = map.about().seed;
    drop(map);
    // Killed while open: of any later version, and of no earlier one.
    assert_eq!(open_at(&directory.after_kill(), 5).about().seed, seed);
    assert_eq!(open_at(&directory.after_kill(), 9).about().seed, seed);
    assert_ne!(open_at(&directory.after_kill(), 4).about().seed, seed);
    let map = open_at(&directory, 7);
    map.begin(contents(7)).unwrap();
    map.close(contents(8)).unwrap();
    assert!(matches!(
        map.before_write(0, 1),
        Err(GenerationsError::Closed)
    ));
    drop(map);
    // Closed: of exactly that version.
    assert_eq!(open_at(&directory.after_kill(), 8).about().seed, seed);
    for version in [7, 9] {
        assert_ne!(open_at(&directory.after_kill(), version).about().seed, seed);
    }
    let other = Contents::new(b"another", 1, 8);
    let open = |size, now| {
        let directory = Arc::new(directory.after_kill());
        Generations::open(directory, size, now)
            .unwrap()
            .about()
            .seed
    };
    assert_ne!(open(SIZE, other), seed);
    assert_ne!(open(SIZE + 1, contents(8)), seed);
    assert_eq!(open(SIZE, contents(8)), seed);
    // The same disk under another name.
    let map = open_at(&directory, 8);
    map.rename(other).unwrap();
    drop(map);
    assert_eq!(open(SIZE, other), seed);
    assert_ne!(open(SIZE, contents(8)), seed);
}

#[test]
fn a_frozen_disk_stays_frozen_whatever_becomes_of_its_contents() {
    let directory = FakeDirectory::default();
    let map = open_at(&directory, 0);
    map.freeze(contents(3)).unwrap();
    assert!(matches!(
        map.begin(contents(3)),
        Err(GenerationsError::Frozen)
    ));
    assert!(matches!(map.track(), Err(GenerationsError::Frozen)));
    let seed = map.about().seed;
    drop(map);
    for seed in 0..20 {
        let crashed: Arc<dyn Directory> = Arc::new(directory.after_crash(seed));
        assert!(look(crashed, contents(99)).unwrap().unwrap().frozen);
    }
    let map = open_at(&directory, 99);
    assert!(map.is_frozen() && map.summary().is_none());
    assert!(matches!(
        map.begin(contents(99)),
        Err(GenerationsError::Frozen)
    ));
    // Under another name it is the same disk, and of another image nothing is known.
    map.thaw().unwrap();
    map.begin(contents(99)).unwrap();
    assert_ne!(map.about().seed, seed, "a new line");
    map.freeze(contents(99)).unwrap();
    let merged = Contents::new(b"merged", 2, 0);
    map.rename(merged).unwrap();
    assert!(map.is_frozen());
    let look = |now| look(Arc::new(directory.after_kill()), now).unwrap();
    assert!(look(merged).unwrap().frozen);
    assert!(look(Contents::new(b"merged", 5, 7)).unwrap().frozen);
    assert_eq!(look(contents(99)), None);
    drop(map);
    let map = Generations::open(
        Arc::new(directory.clone()),
        SIZE,
        Contents::new(b"merged", 5, 7),
    );
    let map = map.unwrap();
    assert!(map.is_frozen() && map.summary().is_none());
    map.rename(Contents::new(b"again", 0, 0)).unwrap();
    assert!(look(Contents::new(b"again", 1, 1)).unwrap().frozen);
    map.thaw().unwrap();
    map.rename(contents(99)).unwrap();
    drop(map);
    assert!(!open_at(&directory, 99).is_frozen());
}

#[test]
fn a_map_that_cannot_be_kept_is_removed_and_the_disk_is_written_on() {
    for operation in [Operation::Sync, Operation::Write] {
        let directory = FakeDirectory::default();
        let map = open_at(&directory, 0);
        map.begin(contents(0)).unwrap();
        write(&map, 0..1);
        directory.set_faults(move |this, name| {
            (this == operation && name == FILE_NAME).then_some(io::ErrorKind::StorageFull)
        });
        write(&map, 100..101);
        assert_eq!(map.summary(), None);
        assert_eq!(directory.after_crash(1).bytes(FILE_NAME), None);
        // Nothing at all can be done.
        let directory = FakeDirectory::default();
        let map = open_at(&directory, 0);
        map.begin(contents(0)).unwrap();
        directory.set_faults(|_, _| Some(io::ErrorKind::Other));
        assert!(map.before_write(0, 1).is_err());
        directory.clear_faults();
        // A log whose sync failed is written anew.
        write(&map, 0..1);
        map.freeze(contents(2)).unwrap();
        drop(map);
        let again = open_at(&directory.after_crash(7), 2);
        assert!(again.is_frozen());
        assert_eq!(generations(&again)[..2], [1, 0]);
    }
}

#[test]
fn a_damaged_map_is_refused() {
    let directory = FakeDirectory::default();
    let map = open_at(&directory, 0);
    map.freeze(contents(0)).unwrap();
    assert!(matches!(
        Generations::open(Arc::new(directory.clone()), SIZE, contents(0)),
        Err(GenerationsError::Busy(_))
    ));
    drop(map);
    directory.edit(FILE_NAME, |bytes| bytes[70] ^= 1);
    let opened = Generations::open(Arc::new(directory.clone()), SIZE, contents(0));
    assert!(matches!(opened, Err(GenerationsError::Log(_))));
    forget(&directory).unwrap();
    assert!(!open_at(&directory, 0).is_frozen());
}

#[test]
fn the_device_records_every_kind_of_change_and_refuses_them_when_frozen() {
    let map = Arc::new(open_at(&FakeDirectory::default(), 0));
    map.begin(contents(0)).unwrap();
    let probe = Arc::new(Probe::able(SIZE));
    let device = Recorded::new(probe.clone());
    device.write(70 * CHUNK, &[1]).unwrap();
    device.record(map.clone());
    assert_eq!(device.capabilities(), probe.capabilities());
    assert_eq!(device.size(), SIZE);
    device.write(CHUNK - 1, &[1; 2]).unwrap();
    device.trim(10 * CHUNK, CHUNK).unwrap();
    device.write_zeroes(SIZE - 1, 1, Zeroes::default()).unwrap();
    device.write(20 * CHUNK, &[]).unwrap();
    device.write(SIZE, &[1]).unwrap_err();
    device.trim(30 * CHUNK, SIZE).unwrap_err();
    device.read(40 * CHUNK, &mut [0; 10]).unwrap();
    device.flush().unwrap();
    device.extents(0, 10).unwrap();
    device.prefetch(0, 10).unwrap();
    let written = ranges(&[0..2, 10..11, CHUNKS - 1..CHUNKS]);
    assert_eq!(map.newer_than(Generation(0)).unwrap(), written);
    assert_eq!(
        probe.calls()[1..4],
        [
            Call::Write(CHUNK - 1, 2),
            Call::Trim(10 * CHUNK, CHUNK),
            Call::Zero(SIZE - 1, 1, Zeroes::default())
        ]
    );
    map.freeze(contents(1)).unwrap();
    let calls = probe.calls().len();
    let refused = [
        device.write(0, &[1]),
        device.trim(0, 1),
        device.write_zeroes(0, 1, Zeroes::default()),
    ];
    for refused in refused {
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("drover mounts break"), "{text}");
    }
    assert_eq!(probe.calls().len(), calls);
    device.read(0, &mut [0]).unwrap();
    let plain = Recorded::new(MemoryDevice::new(SIZE));
    plain.write(0, &[1]).unwrap();
}

#[test]
fn a_generation_begins_only_between_changes() {
    let map = Arc::new(first());
    let writing = map.before_write(0, 1).unwrap();
    let tracking = {
        let map = map.clone();
        std::thread::spawn(move || map.track().unwrap())
    };
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!tracking.is_finished());
    drop(writing);
    assert_eq!(tracking.join().unwrap(), Generation(2));
    assert_eq!(map.newer_than(Generation(1)).unwrap(), []);
}

#[test]
fn many_writers_share_the_syncs() {
    const WRITERS: u64 = 8;
    let directory = FakeDirectory::default();
    let size = WRITERS * 40 * REGION;
    let map = Generations::open(Arc::new(directory.clone()), size, contents(0)).unwrap();
    map.begin(contents(0)).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let map = &map;
            scope.spawn(move || {
                for region in 0..40 {
                    let offset = (region * WRITERS + writer) * REGION + writer * CHUNK;
                    drop(map.before_write(offset, 1).unwrap());
                }
            });
        }
    });
    let written = map.newer_than(Generation(0)).unwrap();
    let bytes: u64 = written.iter().map(|range| range.end - range.start).sum();
    assert_eq!(bytes, WRITERS * 40 * CHUNK);
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Track,
    Reopen,
    Kill,
    FreezeAndThaw,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..CHUNKS, 1..5u64).prop_map(|(first, count)| Step::Write(first, count)),
        1 => (0..CHUNKS, 1..CHUNKS).prop_map(|(first, count)| Step::Write(first, count)),
        2 => Just(Step::Track),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
        1 => Just(Step::FreezeAndThaw),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    /// Against a plain list: exact, but for what a killed process had recorded in advance.
    #[test]
    fn a_map_is_a_list_of_generations(steps in steps()) {
        let directory = FakeDirectory::default();
        let mut map = open_at(&directory, 0);
        map.begin(contents(0)).unwrap();
        let seed = map.about().seed;
        let (mut now, mut version) = (1u64, 0);
        let mut model = [0u64; CHUNKS as usize];
        for step in steps {
            match step {
                Step::Write(first, count) => {
                    let end = (first + count).min(CHUNKS);
                    write(&map, first..end);
                    model[first as usize..end as usize].fill(now);
                    version += 1;
                }
                Step::Track => {
                    map.track().unwrap();
                    now += 1;
                }
                Step::Reopen => {
                    map.close(contents(version)).unwrap();
                    drop(map);
                    map = open_at(&directory, version);
                    map.begin(contents(version)).unwrap();
                }
                Step::Kill => {
                    drop(map);
                    map = open_at(&directory, version);
                    map.begin(contents(version)).unwrap();
                    let found = generations(&map);
                    for (model, found) in model.iter_mut().zip(found) {
                        prop_assert!(found == *model || found == now, "{found}, not {model}");
                        *model = found;
                    }
                }
                Step::FreezeAndThaw => {
                    map.freeze(contents(version)).unwrap();
                    map.thaw().unwrap();
                    map.begin(contents(version)).unwrap();
                    now += 1;
                }
            }
            prop_assert_eq!(&generations(&map)[..], &model[..]);
            prop_assert_eq!(map.about().generation, Generation(now));
        }
        prop_assert_eq!(map.about().seed, seed);
        let summary = map.summary().unwrap();
        for since in 0..=now {
            let newer = map.newer_than(Generation(since)).unwrap();
            let is_newer = |chunk: u64| newer.iter().any(|range| range.contains(&(chunk * CHUNK)));
            for (chunk, generation) in model.iter().enumerate() {
                prop_assert_eq!(is_newer(chunk as u64), *generation > since);
            }
        }
        prop_assert_eq!(Summary::decode(&summary.encode()).unwrap(), summary);
    }

    /// The power fails at any moment: no chunk that may have been written has an older generation than its write.
    #[test]
    fn no_write_goes_unrecorded(steps in steps(), cut in 0..250u64, sector in 0..1000u64) {
        let directory = FakeDirectory::new(512, sector);
        let mut map = open_at(&directory, 0);
        // What the disk may hold: written chunks, and their generations.
        let mut written: BTreeMap<u64, u64> = BTreeMap::new();
        let (mut least, mut most, mut version) = (1, 1, 0);
        let mut is_frozen = None;
        directory.cut_power_at(directory.steps() + cut);
        let mut is_on = map.begin(contents(0)).is_ok();
        for step in steps {
            if !is_on {
                break;
            }
            let done = match step {
                Step::Write(first, count) => {
                    let end = (first + count).min(CHUNKS);
                    let writing = map.before_write(first * CHUNK, 1.max((end - first) * CHUNK - 5000));
                    if writing.is_ok() {
                        // At the disk from here on, flushed or not.
                        written.extend((first..end).map(|chunk| (chunk, least)));
                        version += 1;
                    }
                    writing.map(drop)
                }
                Step::Track => {
                    most = least + 1;
                    map.track().map(drop).inspect(|()| least += 1)
                }
                Step::Reopen | Step::Kill => {
                    let closed = match step {
                        Step::Reopen => map.close(contents(version)),
                        _ => Ok(()),
                    };
                    drop(map);
                    let opened = Generations::open(Arc::new(directory.clone()), SIZE, contents(version));
                    match opened {
                        Ok(opened) => map = opened,
                        Err(_) => {
                            prop_assert!(directory.is_off());
                            map = first_of_nothing();
                            is_on = false;
                        }
                    }
                    closed.and_then(|()| match is_on {
                        true => map.begin(contents(version)),
                        false => Ok(()),
                    })
                }
                Step::FreezeAndThaw => {
                    is_frozen = None;
                    let frozen = map.freeze(contents(version));
                    if frozen.is_ok() {
                        is_frozen = Some(true);
                    }
                    most = least + 1;
                    frozen.and_then(|()| {
                        is_frozen = None;
                        map.thaw()?;
                        least += 1;
                        is_frozen = Some(false);
                        map.begin(contents(version))
                    })
                }
            };
            is_on &= done.is_ok() && !directory.is_off();
        }
        let crashed = directory.after_crash(sector);
        let opened = open_at(&crashed, version);
        if let Some(frozen) = is_frozen {
            prop_assert_eq!(opened.is_frozen(), frozen);
        }
        // A map that was lost with the power is of another line, and says nothing.
        if opened.about().seed == map.about().seed {
            let found = generations(&opened);
            for (chunk, generation) in written {
                let found = found[chunk as usize];
                prop_assert!(found >= generation && found <= most, "{chunk}: {found}, not {generation}");
            }
        }
    }

    /// In larger units, each has the latest generation in it.
    #[test]
    fn a_long_summary_is_told_in_larger_units(ages in proptest::collection::vec(0..4u8, 1..300)) {
        let mut runs: Vec<(u64, u8)> = Vec::new();
        for (chunk, age) in (1..).zip(&ages) {
            match runs.last_mut() {
                Some(last) if last.1 == *age => last.0 = chunk,
                _ => runs.push((chunk, *age)),
            }
        }
        let mut summary = first().summary().unwrap();
        summary.size = ages.len() as u64 * CHUNK;
        summary.tags = vec![1, 2, 3, 4];
        summary.runs = runs;
        let mut expected = ages;
        while expected.len() > 1 {
            summary = summary.coarser();
            expected = expected.chunks(2).map(|two| two.iter().copied().max().unwrap()).collect();
            let mut found = Vec::new();
            let mut at = 0;
            for (end, age) in &summary.runs {
                prop_assert!(*end > at);
                found.extend((at..*end).map(|_| *age));
                at = *end;
            }
            prop_assert_eq!(&found, &expected);
            let bytes = summary.encode();
            prop_assert_eq!(&Summary::decode(&bytes).unwrap(), &summary);
        }
    }
}

fn first_of_nothing() -> Generations {
    open_at(&FakeDirectory::default(), 0)
}

#[test]
fn a_summary_is_bounded_and_damage_is_noticed() {
    let mut summary = first().summary().unwrap();
    summary.size = 4 << 40;
    summary.tags = vec![7; 200];
    let chunks = summary.size / CHUNK;
    summary.runs = (1..=chunks)
        .map(|end| (end, (end % 2) as u8 * 200))
        .collect();
    let bytes = summary.encode();
    assert!(bytes.len() <= MAX_SUMMARY_BYTES);
    let told = Summary::decode(&bytes).unwrap();
    assert_eq!(told.unit, 2 * CHUNK);
    assert_eq!(told.newer_than(Generation(199)), [0..summary.size]);
    let good = first().summary().unwrap().encode();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(Summary::decode(&bad).is_err(), "byte {at}");
        assert!(Summary::decode(&good[..at]).is_err(), "cut at {at}");
    }
    assert_eq!(Summary::decode(&[2, 0]), Err(SummaryError::Version(2)));
}
