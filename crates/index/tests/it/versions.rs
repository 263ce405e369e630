//! Files of earlier versions are readable.
//!
//! `fixtures/version-1` was written by version 1 of the hash files: images 1 and 2 with files 1, 2 and 3 were
//! sent and forgotten, so that only the sequence cache has their blocks; image 3 with files 4 and 5 is complete,
//! image 4 was interrupted.

use std::fs;
use std::path::PathBuf;

use drover_core::Digest;
use drover_index::{ImageId, Matcher, MatcherConfig, Origin, Repair};
use drover_storage::{Directory, FakeDirectory};

use crate::library::{Image, tiny};

const SEQUENCES: [(u64, u64); 3] = [(1, 300), (2, 5), (3, 200)];
const WHOLE: [(u64, u64); 2] = [(4, 300), (5, 77)];

fn config() -> MatcherConfig {
    MatcherConfig {
        c2_bytes: 4 << 10,
        sequence_limit: 100,
        ..tiny()
    }
}

fn fixture() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", "version-1"]
        .iter()
        .collect()
}

/// The fixture, durable.
fn old() -> FakeDirectory {
    let storage = FakeDirectory::default();
    for entry in fs::read_dir(fixture()).unwrap() {
        let entry = entry.unwrap();
        let bytes = fs::read(entry.path()).unwrap();
        storage.put(entry.file_name().to_str().unwrap(), &bytes);
    }
    storage
}

/// The digests of slots as version 1 wrote them.
fn old_slots() -> Vec<Digest> {
    let bytes = fs::read(fixture().join("seq.hash")).unwrap();
    let (digests, _) = bytes.as_chunks();
    digests.iter().map(|d| Digest(*d)).collect()
}

/// How many blocks of the files are matched, each where it is.
fn matched(m: &mut Matcher, files: &[(u64, u64)]) -> (u64, u64) {
    let slots = old_slots();
    let whole = Image::of(&WHOLE).digests;
    let image = Image::of(files);
    let mut cursor = m.begin(ImageId(100)).unwrap();
    let plan = m.batch(&mut cursor, &image.digests, &image.heads).unwrap();
    m.abort(cursor);
    let (mut at, mut images, mut sequences) = (0, 0, 0);
    for run in &plan.runs {
        for k in 0..u64::from(run.count) {
            let digest = image.digests[at];
            at += 1;
            match run.origin {
                Origin::Literal => {}
                Origin::Image { image, first } => {
                    assert_eq!((image, whole[(first.0 + k) as usize]), (ImageId(3), digest));
                    images += 1;
                }
                Origin::Sequence { first } => {
                    assert_eq!(slots[(first + k) as usize], digest.short());
                    sequences += 1;
                }
            }
        }
    }
    (images, sequences)
}

fn check(m: &mut Matcher, what: &str) {
    assert_eq!(matched(m, &WHOLE), (377, 0), "{what}");
    assert_eq!(matched(m, &SEQUENCES), (0, 505), "{what}");
}

#[test]
fn an_index_of_version_1_matches_as_before() {
    let storage = old();
    let (mut m, report) = Matcher::open(storage.clone(), config()).unwrap();
    assert!(report.converted && !report.from_snapshot);
    assert_eq!(report.interrupted, [ImageId(4)]);
    assert_eq!(report.repairs, [Repair::SequencesRebuilt]);
    assert_eq!(report.reindexed, [ImageId(3)]);
    assert_eq!(m.images().len(), 1);
    check(&mut m, "converted");
    m.persist().unwrap();
    drop(m);
    let (mut m, report) = Matcher::open(storage.clone(), config()).unwrap();
    assert!(report.from_snapshot && !report.converted, "{report:?}");
    check(&mut m, "opened again");
    let names = storage.list().unwrap();
    assert!(!names.iter().any(|n| n.starts_with("convert")), "{names:?}");
}

#[test]
fn the_power_fails_at_any_moment_of_a_conversion() {
    let whole = old();
    let from = whole.steps();
    Matcher::open(whole.clone(), config()).unwrap();
    for at in from..whole.steps() {
        for seed in 0..4 {
            let storage = old();
            storage.cut_power_at(at);
            Matcher::open(storage.clone(), config())
                .map(|_| ())
                .unwrap_err();
            let after = storage.after_crash(at * 4 + seed);
            let (mut m, report) = Matcher::open(after.clone(), config()).unwrap();
            let what = format!("cut at {at}, seed {seed}: {report:?}");
            let harmless = |r: &Repair| *r == Repair::SequencesRebuilt;
            assert!(report.repairs.iter().all(harmless), "{what}");
            check(&mut m, &what);
            let names = after.list().unwrap();
            assert!(!names.iter().any(|n| n.starts_with("convert")), "{what}");
        }
    }
}

/// A full disk keeps no index from being opened.
#[test]
fn what_there_is_no_room_to_convert_goes() {
    let gone = |name: &str| Repair::NoRoomToConvert(name.into());
    let image = gone("img-0000000000000003.hash");
    // What goes first makes room for what comes then, unless there was too little before.
    for (too_much, repairs, found) in [
        (0, vec![image.clone(), Repair::SequencesRebuilt], 505),
        (12_000, vec![image, gone("seq.hash")], 0),
    ] {
        let storage = old();
        storage.set_capacity(Some(storage.used() - too_much));
        let (mut m, report) = Matcher::open(storage.clone(), config()).unwrap();
        storage.set_capacity(None);
        assert_eq!((report.images, report.repairs), (vec![], repairs));
        assert_eq!(matched(&mut m, &WHOLE), (0, 0));
        assert_eq!(matched(&mut m, &SEQUENCES), (0, found));
    }
}

#[test]
fn damage_of_version_1_costs_what_is_damaged() {
    for (name, at, kept) in [
        ("img-0000000000000003.hash", 4096 + 7, (377 - 128, 505)),
        ("img-0000000000000003.side", 64 + 40 + 3, (377 - 128, 505)),
        ("seq.hash", 4096 * 2 + 7, (377, 505 - 128)),
        ("seq.side", 64 + 2 * 64 + 17, (377, 505 - 128)),
    ] {
        let storage = old();
        storage.edit(name, |b| b[at] ^= 0x10);
        let (mut m, report) = Matcher::open(storage, config()).unwrap();
        assert!(report.converted);
        assert_eq!(report.repairs.len(), 2, "{name}: {report:?}");
        let found = (matched(&mut m, &WHOLE).0, matched(&mut m, &SEQUENCES).1);
        assert!(found.0 >= kept.0 && found.1 >= kept.1, "{name}: {found:?}");
        assert!(found != (377, 505), "{name}");
    }
    // A file that is cut is as if it were not there.
    for name in ["img-0000000000000003.hash", "seq.hash"] {
        let storage = old();
        storage.edit(name, |b| b.truncate(5000));
        let (_, report) = Matcher::open(storage, config()).unwrap();
        assert!(!report.repairs.is_empty(), "{name}");
    }
}

#[test]
fn what_cannot_be_read_of_version_1_costs_no_more_than_itself() {
    for (name, bad, kept) in [
        ("img-0000000000000003.hash", 4096..4608, (377 - 128, 505)),
        ("img-0000000000000003.side", 110..120, (377 - 128, 505)),
        ("seq.hash", 8192..8704, (377, 505 - 128)),
        ("seq.side", 200..210, (377, 505 - 128)),
    ] {
        let storage = old();
        storage.set_unreadable(name, bad);
        let (mut m, report) = Matcher::open(storage, config()).unwrap();
        assert!(report.converted);
        assert!(!report.repairs.is_empty(), "{name}");
        let found = (matched(&mut m, &WHOLE).0, matched(&mut m, &SEQUENCES).1);
        assert!(found.0 >= kept.0 && found.1 >= kept.1, "{name}: {found:?}");
    }
}
