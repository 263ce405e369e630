use std::io;

use fastrand::Rng;

use super::*;
use drover_core::DeviceError;

use crate::{FakeDirectory, HostDirectory, Operation};

fn record(n: u64) -> Record {
    Record {
        first: n.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        count: n as u32 + 1,
        state: n as u8,
        mask: !n,
    }
}

fn records(range: std::ops::Range<u64>) -> Vec<Record> {
    range.map(record).collect()
}

fn shared(fake: &FakeDirectory) -> Arc<dyn Directory> {
    Arc::new(fake.clone())
}

fn create(fake: &FakeDirectory) -> ChunkLog {
    ChunkLog::create(shared(fake), "log", b"whose").unwrap()
}

/// Opens and replays.
fn open(directory: Arc<dyn Directory>) -> Result<(ChunkLog, Vec<Record>), ChunkLogError> {
    let opened = ChunkLog::open(directory, "log")?;
    assert_eq!(opened.header(), b"whose");
    let mut found = Vec::new();
    let log = opened.replay(|record| {
        found.push(record);
        Ok(())
    })?;
    Ok((log, found))
}

fn contents(fake: &FakeDirectory) -> Vec<Record> {
    open(shared(fake)).unwrap().1
}

#[test]
fn what_was_appended_is_there_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let host: Arc<dyn Directory> = Arc::new(HostDirectory::open(dir.path()).unwrap());
    let missing = ChunkLog::open(Arc::clone(&host), "log").err().unwrap();
    assert!(missing.is_missing(), "{missing}");
    let mut log = ChunkLog::create(Arc::clone(&host), "log", b"whose").unwrap();
    let mut at = 0;
    for count in [1, 0, 7, 2040, 1, 2048, 5000, 3] {
        log.append(&records(at..at + count)).unwrap();
        at += count;
        if count < 7 {
            log.sync().unwrap();
        }
    }
    log.sync().unwrap();
    let bytes = log.bytes();
    drop(log);
    let (mut log, found) = open(Arc::clone(&host)).unwrap();
    assert!(found == records(0..at));
    assert_eq!(log.bytes(), bytes);
    log.append(&records(at..at + 10)).unwrap();
    log.sync().unwrap();
    let (_, found) = open(Arc::clone(&host)).unwrap();
    assert!(found == records(0..at + 10));
    let mut read = Vec::new();
    let opened = ChunkLog::open(host, "log").unwrap();
    let each = |record| {
        read.push(record);
        Ok(())
    };
    opened.read(each).unwrap();
    assert!(read == found);
}

#[test]
fn headers_have_a_limit_and_come_back() {
    let fake = FakeDirectory::default();
    for length in [0, 1, 3, 4, 5, 4095, MAX_HEADER] {
        let header = vec![7; length];
        let mut log = ChunkLog::create(shared(&fake), "log", &header).unwrap();
        log.append(&[record(1)]).unwrap();
        log.sync().unwrap();
        let opened = ChunkLog::open(shared(&fake), "log").unwrap();
        assert_eq!(opened.header(), header);
        let mut log = opened.replay(|_| Ok(())).unwrap();
        log.rewrite(b"another", [record(2)]).unwrap();
        assert_eq!(
            ChunkLog::open(shared(&fake), "log").unwrap().header(),
            b"another"
        );
    }
    let error = ChunkLog::create(shared(&fake), "log", &[0; MAX_HEADER + 1])
        .err()
        .unwrap();
    assert!(
        matches!(error, ChunkLogError::HeaderTooLong { .. }),
        "{error}"
    );
    assert_eq!(fake.list().unwrap(), ["log"]);
}

#[test]
fn a_log_much_longer_than_its_snapshot_wants_to_be_rewritten() {
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    let mut n = 0;
    let mut grow = |log: &mut ChunkLog| {
        let before = log.bytes();
        while !log.wants_rewrite() {
            log.append(&records(n..n + 1000)).unwrap();
            n += 1000;
        }
        log.bytes() - before
    };
    assert!(grow(&mut log) > 1 << 20);
    log.rewrite(b"whose", records(0..30_000)).unwrap();
    assert!(!log.wants_rewrite());
    let snapshot = log.bytes();
    drop(log);
    // It is still known how long the snapshot was.
    let (mut log, found) = open(shared(&fake)).unwrap();
    assert!(found == records(0..30_000));
    assert!(grow(&mut log) >= 3 * snapshot);
}

/// Appends, syncs and rewrites by a seed, the power failing in one of the steps; what is found must be what was there
/// at the last sync and some first part of what came behind it, or a rewrite that was under way.
fn run_until_power_fails(fake: &FakeDirectory, rng: &mut Rng) -> Vec<Vec<Record>> {
    let mut possible: Vec<Vec<Record>> = Vec::new();
    let mut appended = Vec::new();
    let mut n = 0;
    let Ok(mut log) = ChunkLog::create(shared(fake), "log", b"whose") else {
        return possible;
    };
    possible.push(Vec::new());
    for _ in 0..12 {
        match rng.u8(0..8) {
            0..4 => {
                let count = [1, 3, 900, 2500][rng.usize(0..4)];
                for n in n..n + count {
                    appended.push(record(n));
                    possible.push(appended.clone());
                }
                if log.append(&records(n..n + count)).is_err() {
                    return possible;
                }
                n += count;
            }
            4..7 => {
                if log.sync().is_err() {
                    return possible;
                }
                possible = vec![appended.clone()];
            }
            _ => {
                let snapshot = records(n..n + rng.u64(0..3000));
                possible.push(snapshot.clone());
                if log.rewrite(b"whose", snapshot.iter().copied()).is_err() {
                    return possible;
                }
                appended = snapshot;
                possible = vec![appended.clone()];
            }
        }
    }
    possible
}

#[test]
fn the_power_may_fail_at_any_step() {
    for seed in 0..6 {
        let whole = FakeDirectory::new([512, 4096][seed as usize % 2], seed);
        run_until_power_fails(&whole, &mut Rng::with_seed(seed));
        for step in 0..whole.steps() {
            let fake = FakeDirectory::new([512, 4096][seed as usize % 2], seed);
            fake.cut_power_at(step);
            let possible = run_until_power_fails(&fake, &mut Rng::with_seed(seed));
            assert!(fake.is_off());
            for crash in 0..4 {
                let after = fake.after_crash(crash);
                let said = format!("seed {seed}, step {step}, crash {crash}");
                let found = match open(shared(&after)) {
                    Ok((mut log, found)) => {
                        // What was found is durable now, and the log can be appended to.
                        log.append(&[record(1 << 40)]).unwrap();
                        log.sync().unwrap();
                        let mut again = found.clone();
                        again.push(record(1 << 40));
                        let later = contents(&after.after_crash(crash));
                        assert!(later == again, "{said}: it did not stay");
                        found
                    }
                    Err(error) if error.is_missing() && possible.is_empty() => continue,
                    Err(error) => panic!("{said}: {error}"),
                };
                // A crash before the first name was durable finds an empty log as well.
                let fine = possible.contains(&found) || (possible.is_empty() && found.is_empty());
                assert!(fine, "{said}: {} records", found.len());
            }
        }
    }
}

#[test]
fn a_full_disk_takes_back_what_did_not_fit() {
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    log.append(&records(0..100)).unwrap();
    log.sync().unwrap();
    fake.set_capacity(Some(fake.used() + 60_000));
    log.append(&records(100..110)).unwrap();
    let error = log.append(&records(1000..9000)).unwrap_err();
    assert!(matches!(DeviceError::from(error), DeviceError::NoSpace(_)));
    assert!(!log.is_broken());
    log.append(&records(110..120)).unwrap();
    log.sync().unwrap();
    assert!(contents(&fake.after_crash(1)) == records(0..120));
    // A sync for which there is no room keeps what it could not write.
    fake.set_capacity(Some(0));
    log.append(&records(120..300)).unwrap();
    assert!(log.sync().is_err() && !log.is_broken());
    assert!(log.rewrite(b"whose", records(0..5000)).is_err());
    fake.set_capacity(None);
    log.sync().unwrap();
    assert!(contents(&fake.after_crash(2)) == records(0..300));
    assert_eq!(fake.list().unwrap(), ["log"]);
}

#[test]
fn after_a_failed_sync_only_a_rewrite_helps() {
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    log.append(&records(0..100)).unwrap();
    log.sync().unwrap();
    log.append(&records(100..200)).unwrap();
    fake.set_faults(|operation, _| (operation == Operation::Sync).then_some(io::ErrorKind::Other));
    assert!(log.sync().is_err());
    fake.clear_faults();
    for result in [log.sync(), log.append(&records(0..1))] {
        assert!(
            matches!(result, Err(ChunkLogError::Broken { .. })),
            "{result:?}"
        );
    }
    assert!(log.is_broken());
    log.rewrite(b"whose", records(0..200)).unwrap();
    log.append(&records(200..201)).unwrap();
    log.sync().unwrap();
    for seed in 0..20 {
        assert!(contents(&fake.after_crash(seed)) == records(0..201));
    }
}

#[test]
fn a_name_that_is_not_durable_holds_up_the_next_sync() {
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    log.append(&records(0..10)).unwrap();
    log.sync().unwrap();
    fake.set_faults(|operation, _| {
        (operation == Operation::SyncDirectory).then_some(io::ErrorKind::Other)
    });
    assert!(log.rewrite(b"whose", records(0..5)).is_err());
    log.append(&records(5..6)).unwrap();
    assert!(log.sync().is_err(), "a crash could leave the old file");
    fake.clear_faults();
    log.sync().unwrap();
    for seed in 0..20 {
        assert!(contents(&fake.after_crash(seed)) == records(0..6));
    }
}

/// A header, and frames of 10, 20 and 30 records, each synced before the next.
fn three_frames() -> (Vec<u8>, [usize; 4]) {
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    let mut ends = [log.bytes() as usize; 4];
    for (nth, range) in [0..10, 10..30, 30..60].into_iter().enumerate() {
        log.append(&records(range)).unwrap();
        log.sync().unwrap();
        ends[nth + 1] = log.bytes() as usize;
    }
    (fake.bytes("log").unwrap(), ends)
}

#[test]
fn a_tail_cut_anywhere_ends_the_replay_at_the_last_whole_frame() {
    let (bytes, ends) = three_frames();
    for length in 0..bytes.len() {
        let fake = FakeDirectory::default();
        fake.put("log", &bytes[..length]);
        match open(shared(&fake)) {
            Ok((log, found)) => {
                let frames = ends.iter().filter(|end| **end <= length).count();
                assert!(found == records(0..[0, 10, 30][frames - 1]), "{length}");
                assert_eq!(log.bytes(), ends[frames - 1] as u64);
                assert_eq!(fake.bytes("log").unwrap().len(), ends[frames - 1]);
            }
            Err(ChunkLogError::NotALog { .. }) => assert!(length < 8, "{length}"),
            Err(ChunkLogError::Corrupt { .. }) => assert!(length < ends[0], "{length}"),
            Err(error) => panic!("{length}: {error}"),
        }
    }
}

#[test]
fn a_damaged_byte_is_found_wherever_it_is() {
    let (bytes, ends) = three_frames();
    for at in 0..bytes.len() {
        let fake = FakeDirectory::default();
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        fake.put("log", &damaged);
        let before = fake.bytes("log");
        match open(shared(&fake)) {
            // Nothing stands behind the last frame that says it was on disk: a torn tail.
            Ok((_, found)) if at >= ends[2] => assert!(found == records(0..30), "{at}"),
            // Padding.
            Ok((_, found)) => assert!(at < ends[0] && found == records(0..60), "{at}"),
            Err(ChunkLogError::NotALog { .. }) => assert!(at < 8),
            Err(ChunkLogError::Version { .. }) => assert!((8..12).contains(&at)),
            Err(error @ ChunkLogError::Corrupt { .. }) => {
                assert!(at < ends[2], "{at}: {error}");
                assert!(error.to_string().contains("fake/log is damaged"), "{error}");
                assert_eq!(fake.bytes("log"), before, "a damaged file was changed");
            }
            Err(error) => panic!("{at}: {error}"),
        }
    }
    // Where the snapshot is, also the last frame counts.
    let fake = FakeDirectory::default();
    create(&fake).rewrite(b"whose", records(0..60)).unwrap();
    let bytes = fake.bytes("log").unwrap();
    for at in [bytes.len() - 1, ends[0]] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fake.put("log", &damaged);
        let error = open(shared(&fake)).err().unwrap();
        assert!(matches!(error, ChunkLogError::Corrupt { .. }), "{error}");
    }
    fake.put("log", &bytes[..bytes.len() - 1]);
    assert!(matches!(
        open(shared(&fake)),
        Err(ChunkLogError::Corrupt { .. })
    ));
}

#[test]
fn frames_that_came_to_disk_out_of_order_are_no_damage() {
    // The second and third frame were written after the first was synced; the second is lost.
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    log.append(&records(0..10)).unwrap();
    log.sync().unwrap();
    let end = log.bytes() as usize;
    log.append(&records(10..5000)).unwrap();
    let mut bytes = fake.bytes("log").unwrap();
    assert!(bytes.len() > end + 60_000, "two frames");
    bytes[end..end + 512].fill(0);
    fake.put("log", &bytes);
    assert!(contents(&fake) == records(0..10));
}

#[test]
fn what_the_caller_cannot_use_is_damage() {
    let fake = FakeDirectory::default();
    let mut log = create(&fake);
    log.append(&records(0..3)).unwrap();
    log.sync().unwrap();
    let opened = ChunkLog::open(shared(&fake), "log").unwrap();
    let error = opened
        .replay(|_| Err("no such state".into()))
        .err()
        .unwrap();
    assert!(error.to_string().contains("no such state"), "{error}");
}

#[test]
fn what_was_taken_back_does_not_come_back() {
    for seed in 0..60 {
        let fake = FakeDirectory::default();
        let mut log = create(&fake);
        log.sync().unwrap();
        fake.set_capacity(Some(fake.used() + 120_000));
        // Two frames are written, the third does not fit.
        assert!(log.append(&records(10_000..20_000)).is_err());
        // One as long takes the place of the first.
        log.append(&records(0..FRAME_RECORDS as u64)).unwrap();
        let found = contents(&fake.after_crash(seed));
        let fine = found.is_empty() || found == records(0..FRAME_RECORDS as u64);
        assert!(fine, "seed {seed}: {} records", found.len());
    }
}
