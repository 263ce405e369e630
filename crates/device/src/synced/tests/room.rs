//! Full caches and full disks.

use super::pulls::{Watched, quiet};
use super::*;

fn at(index: u64) -> u64 {
    index * u64::from(CHUNK)
}

fn small(directory: &FakeDirectory, remote: &Arc<LocalRemote>, chunks: u64) -> SyncedOptions {
    SyncedOptions {
        cache_size: Some(at(chunks)),
        sync: Sync::Local,
        ..quiet(directory, remote)
    }
}

/// A device that flushes to its cache and pushes only on request.
fn keeping(directory: &FakeDirectory, remote: &Arc<LocalRemote>) -> Arc<Synced> {
    Synced::open(SyncedOptions {
        sync: Sync::Local,
        push_interval: Duration::from_secs(100),
        ..quiet(directory, remote)
    })
    .unwrap()
}

#[test]
fn a_device_closes_on_a_full_disk_when_all_was_pushed() {
    let bytes = random_bytes(11, 100 * CHUNK as usize);
    let far = Far::new(&bytes);
    // With room that can be made by letting chunks go, and with none at all.
    for full in [false, true] {
        let directory = FakeDirectory::default();
        let device = Synced::open(quiet(&directory, &far.remote())).unwrap();
        read_all(device.as_ref());
        device.write(0, &[5; CHUNK as usize * 2]).unwrap();
        device.flush().unwrap();
        read_all(device.as_ref());
        match full {
            false => directory.set_capacity(Some(directory.used())),
            true => directory.set_faults(|operation, _| {
                let writes = matches!(operation, Operation::Write);
                writes.then_some(std::io::ErrorKind::StorageFull)
            }),
        }
        device.close(true).unwrap();
        directory.set_capacity(None);
        directory.set_faults(|_, _| None);
        let left =
            CacheContents::read(&(Arc::new(directory.clone()) as Arc<dyn Directory>)).unwrap();
        assert_eq!(left.map_or(0, |left| left.dirty), 0);
        // Another writer meanwhile: stale local data must neither block it nor be mistaken for its data.
        far.device.write(at(50), &[9; 4096]).unwrap();
        far.committed
            .store(far.committed().after(1).0, Ordering::Release);
        let device = Synced::open(quiet(&directory, &far.remote())).unwrap();
        assert!(read_all(device.as_ref()) == far.bytes(), "full: {full}");
        device.close(true).unwrap();
    }
}

#[test]
fn what_was_not_pushed_is_not_given_up_on_a_full_disk() {
    let far = Far::new(&random_bytes(12, 40 * CHUNK as usize));
    let directory = FakeDirectory::default();
    let remote = far.remote();
    let device = keeping(&directory, &remote);
    device.write(0, &[5; 4096]).unwrap();
    device.flush().unwrap();
    device.write(at(3), &[6; CHUNK as usize]).unwrap();
    directory.set_faults(|operation, _| {
        (operation == Operation::Write).then_some(std::io::ErrorKind::StorageFull)
    });
    for _ in 0..2 {
        let result = device.close(false);
        assert!(matches!(result, Err(DeviceError::NoSpace(_))), "{result:?}");
    }
    directory.set_faults(|_, _| None);
    drop(device);
    let device = Synced::open(quiet(&directory, &far.remote())).unwrap();
    assert!(device.pusher().pending() >= 4096);
    device.flush().unwrap();
    assert_eq!(far.bytes()[..4096], [5; 4096]);
}

#[test]
fn a_close_that_failed_is_tried_again_and_then_keeps_everything() {
    let far = Far::new(&random_bytes(14, 40 * CHUNK as usize));
    let directory = FakeDirectory::default();
    let remote = far.remote();
    let device = keeping(&directory, &remote);
    // Not flushed: only a close keeps it.
    device.write(at(3), &[6; CHUNK as usize]).unwrap();
    directory.set_faults(|operation, _| {
        (operation == Operation::Write).then_some(std::io::ErrorKind::StorageFull)
    });
    assert!(matches!(device.close(false), Err(DeviceError::NoSpace(_))));
    // The cache stays locked between two attempts.
    let other = Synced::open(quiet(&directory, &far.remote()));
    assert!(other.is_err());
    directory.set_faults(|_, _| None);
    device.close(false).unwrap();
    device.close(false).unwrap();
    let next = Synced::open(quiet(&directory, &far.remote())).unwrap();
    next.flush().unwrap();
    assert_eq!(
        far.bytes()[at(3) as usize..at(4) as usize],
        [6; CHUNK as usize]
    );
}

#[test]
fn a_full_disk_does_not_prevent_a_push() {
    let far = Far::new(&random_bytes(13, 100 * CHUNK as usize));
    let directory = FakeDirectory::default();
    let device = Synced::open(quiet(&directory, &far.remote())).unwrap();
    read_all(device.as_ref());
    device.write(at(1), &[5; CHUNK as usize]).unwrap();
    directory.set_capacity(Some(directory.used()));
    // Many epochs, each with records of its own: clean chunks give way to them.
    for round in 0..30u8 {
        device.write(at(1), &[round; CHUNK as usize]).unwrap();
        device.flush().unwrap();
        assert_eq!(far.bytes()[CHUNK as usize], round);
    }
    device.close(true).unwrap();
}

#[test]
fn an_epoch_whose_end_could_not_be_written_down_is_known_after_the_next_is_lost() {
    let far = Far::new(&[0; 200_000]);
    let directory = FakeDirectory::default();
    let remote = far.remote();
    let device = keeping(&directory, &remote);
    device.write(0, &[1; 5000]).unwrap();
    let disk = directory.clone();
    *far.on_commit.lock() = Some(Box::new(move || {
        disk.set_faults(|operation, file| {
            let writes = operation == Operation::Write && file == "map";
            writes.then_some(std::io::ErrorKind::StorageFull)
        });
        Ok(())
    }));
    device.pusher().sync().unwrap();
    directory.set_faults(|_, _| None);
    // The next commit never gets there.
    *far.on_commit.lock() = Some(Box::new(|| Err(DeviceError::NoSpace("over there".into()))));
    device.write(50_000, &[2; 5000]).unwrap();
    device.pusher().sync().unwrap_err();
    drop(device);
    *far.on_commit.lock() = None;
    let device = Synced::open(quiet(&directory.after_kill(), &far.remote())).unwrap();
    device.flush().unwrap();
    assert_eq!(far.bytes()[..5000], [1; 5000]);
    assert_eq!(far.bytes()[50_000..55_000], [2; 5000]);
}

#[test]
fn a_write_waits_for_the_link_when_the_cache_is_full_of_what_was_not_pushed() {
    let far = Far::new(&random_bytes(14, 200 * CHUNK as usize));
    let remote = far.remote();
    let device = Synced::open(small(&FakeDirectory::default(), &remote, 16)).unwrap();
    remote.cut("a short while");
    for i in 0..16 {
        device.write(at(i), &[i as u8; CHUNK as usize]).unwrap();
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| device.write(at(20), &[20; CHUNK as usize]));
        std::thread::sleep(Duration::from_millis(700));
        assert!(!waiting.is_finished());
        // Missing chunks can still be requested, and cached ones read.
        let mut buffer = [0; 100];
        device.read(at(3), &mut buffer).unwrap();
        assert_eq!(buffer, [3; 100]);
        remote.mend();
        waiting.join().unwrap().unwrap();
    });
    device.close(true).unwrap();
    assert_eq!(far.bytes()[20 * CHUNK as usize..][..100], [20; 100]);
}

#[test]
fn what_a_write_may_wait_for_is_said() {
    for cache_size in [None, Some(at(16))] {
        let far = Far::over(MemoryDevice::new(at(200)));
        let remote = far.remote();
        let device = Synced::open(SyncedOptions {
            cache_size,
            ..small(&FakeDirectory::default(), &remote, 16)
        })
        .unwrap();
        soon("zeros are known", || device.cost(0, at(200)) == Cost::Disk);
        device.write(at(3), &[1; CHUNK as usize]).unwrap();
        assert_eq!(device.write_cost(at(3), 100), Cost::Disk);
        let wait = match cache_size {
            None => Cost::Disk,
            Some(_) => Cost::Network,
        };
        assert_eq!(device.write_cost(at(5), 100), wait);
        assert_eq!(device.write_cost(at(3), at(2)), wait);
        device.close(true).unwrap();
    }
}

#[test]
fn such_a_write_gives_up_in_the_end() {
    let far = Far::new(&random_bytes(14, 200 * CHUNK as usize));
    let remote = far.remote();
    let hasty = SyncedOptions {
        give_up_after: Duration::from_millis(1500),
        ..small(&FakeDirectory::default(), &remote, 16)
    };
    let device = Synced::open(hasty).unwrap();
    remote.cut("for good");
    for i in 0..16 {
        device.write(at(i), &[7; CHUNK as usize]).unwrap();
    }
    let began = Instant::now();
    let error = device.write(at(16), &[7; CHUNK as usize]).unwrap_err();
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1500), "{took:?}");
    assert!(
        matches!(&error, DeviceError::NoSpace(why) if why.contains("for good")),
        "{error}"
    );
    // Twenty parts that must wait do so together, not one after the other, which would be 30 s.
    let began = Instant::now();
    device
        .write(at(20), &vec![7; 160 * CHUNK as usize])
        .unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(25));
}

/// No room that could be made helps it.
#[test]
fn a_write_in_part_fails_when_the_disk_of_a_small_cache_does() {
    let far = Far::new(&vec![1; 200 * CHUNK as usize]);
    let directory = FakeDirectory::default();
    let device = Synced::open(small(&directory, &far.remote(), 16)).unwrap();
    directory.set_faults(|operation, file| {
        (operation == Operation::Write && file == "data").then_some(std::io::ErrorKind::Other)
    });
    let began = Instant::now();
    let error = device.write(at(3) + 10, &[7; 100]).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(15), "{error}");
    assert!(!matches!(error, DeviceError::NoSpace(_)), "{error}");
}

#[test]
fn a_write_longer_than_the_cache_goes_through_it() {
    let far = Far::new(&random_bytes(15, 200 * CHUNK as usize));
    let device = Synced::open(small(&FakeDirectory::default(), &far.remote(), 16)).unwrap();
    device
        .write(at(10) + 100, &vec![8; 100 * CHUNK as usize])
        .unwrap();
    device.close(true).unwrap();
    let from = 10 * CHUNK as usize + 100;
    assert!(far.bytes()[from..from + 100 * CHUNK as usize] == vec![8; 100 * CHUNK as usize]);
}

#[test]
fn a_reader_in_order_is_read_ahead_of_through_a_cache_smaller_than_the_image() {
    const CHUNKS: u64 = 600;
    let bytes = random_bytes(16, CHUNKS as usize * CHUNK as usize);
    let far = Far::new(&bytes);
    for prefetch in [Order::None, Order::Sequential] {
        let watched = Watched::new(&far, Duration::from_millis(4));
        let remote = far.remote_over(Arc::clone(&watched) as _);
        let stored = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&stored);
        let options = SyncedOptions {
            prefetch: prefetch.clone(),
            hooks: Hooks {
                chunk_is_local: Some(Arc::new(move |_| {
                    count.fetch_add(1, Ordering::AcqRel);
                })),
                ..Hooks::default()
            },
            ..small(&FakeDirectory::default(), &remote, 64)
        };
        let device = Synced::open(options).unwrap();
        // Some of it is dirty, and stays here.
        remote.cut("so that it is not pushed");
        for i in 0..8 {
            device.write(at(i * 7), &[1; CHUNK as usize]).unwrap();
        }
        let mut expected = bytes.clone();
        (0..8).for_each(|i| expected[(i * 7) * CHUNK as usize..][..CHUNK as usize].fill(1));
        remote.mend();
        let mut buffer = vec![0; CHUNK as usize];
        for index in 0..CHUNKS {
            device.read(at(index), &mut buffer).unwrap();
            assert!(buffer == expected[index as usize * CHUNK as usize..][..CHUNK as usize]);
            // Each thread of the remote may be inserting one.
            assert!(device.shared.states.stored() <= 64 + 3);
        }
        assert!(watched.was_read_ahead(), "{prefetch:?}");
        let stored = stored.load(Ordering::Acquire);
        let reads: u64 = (0..CHUNKS as usize).map(|i| watched.reads(i)).sum();
        // Nothing is pushed out before it was read. (What is wanted just while it is being put in comes twice.)
        assert!(stored <= CHUNKS * 21 / 20, "{prefetch:?}: {stored}");
        assert!(reads <= CHUNKS * 3 / 2, "{prefetch:?}: {reads} reads");
        device.close(true).unwrap();
    }
}

#[test]
fn readers_that_went_away_do_not_hold_the_cache() {
    let far = Far::new(&vec![1; 2000 * CHUNK as usize]);
    let device = Synced::open(small(&FakeDirectory::default(), &far.remote(), 64)).unwrap();
    let mut buffer = vec![0; CHUNK as usize];
    for reader in 0..12u64 {
        for index in 0..6 {
            device.read(at(reader * 150 + index), &mut buffer).unwrap();
        }
    }
    soon("it reads ahead", || device.shared.states.ahead() > 0);
    assert!(device.shared.states.ahead() <= 32);
    // What others need pushes it out.
    for index in 0..300 {
        device.read(at(index * 6 + 3), &mut buffer).unwrap();
    }
    assert!(device.shared.states.stored() <= 64 + 3);
    assert!(device.shared.states.ahead() <= 32);
}

#[test]
fn what_a_killed_process_had_just_pulled_is_not_pulled_again() {
    let bytes = random_bytes(17, 2_000_000);
    let far = Far::new(&bytes);
    let directory = FakeDirectory::default();
    let device = Synced::open(options(&directory, &far.remote())).unwrap();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    soon("it is written down", || {
        device.shared.table.lock().unlogged.is_empty()
    });
    drop(device);
    let watched = Watched::new(&far, Duration::ZERO);
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(quiet(&directory.after_kill(), &remote)).unwrap();
    assert!(read_all(device.as_ref()) == bytes);
    assert!(watched.order().is_empty(), "{:?}", watched.order());
    drop(device);
    // A power loss may take it; what it leaves is found out to be wrong.
    for seed in 0..5 {
        let device = Synced::open(quiet(&directory.after_crash(seed), &far.remote())).unwrap();
        assert!(read_all(device.as_ref()) == bytes);
    }
}

#[test]
fn a_reader_waits_for_the_background_read_that_is_under_way() {
    let far = Far::new(&vec![1; 64 * CHUNK as usize]);
    let watched = Watched::new(&far, Duration::from_millis(60));
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(options(&FakeDirectory::default(), &remote)).unwrap();
    soon("it pulls", || !watched.order().is_empty());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| device.read(at(5), &mut [0; 100]).unwrap());
        }
    });
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    let twice: Vec<_> = (0..64).filter(|i| watched.reads(*i) != 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

/// While a partial chunk is being pushed, a write to its missing part fails: nothing more is to be pushed then, and no
/// empty epoch is sent.
#[test]
fn a_write_that_changed_nothing_is_not_pushed() {
    let bytes = random_bytes(15, 40 * CHUNK as usize);
    let far = Far::new(&bytes);
    let directory = FakeDirectory::default();
    let remote = far.remote();
    let device = keeping(&directory, &remote);
    device.write(at(3), &[6; 4096]).unwrap();
    let (asked, is_asked) = std::sync::mpsc::channel();
    let (go, gone) = std::sync::mpsc::channel::<()>();
    *far.on_commit.lock() = Some(Box::new(move || {
        let _ = asked.send(());
        let _ = gone.recv_timeout(Duration::from_secs(120));
        Ok(())
    }));
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| device.pusher().sync());
        is_asked.recv_timeout(Duration::from_secs(60)).unwrap();
        let pushing = device.progress().pushing;
        assert_eq!((pushing.bytes, pushing.staged), (4096, 4096));
        directory.set_faults(|operation, _| {
            (operation == Operation::Write).then_some(std::io::ErrorKind::StorageFull)
        });
        let result = device.write(at(3) + 8192, &[7; 4096]);
        assert!(matches!(result, Err(DeviceError::NoSpace(_))), "{result:?}");
        directory.clear_faults();
        drop(go);
        sync.join().unwrap().unwrap();
    });
    *far.on_commit.lock() = None;
    device.pusher().sync().unwrap();
    assert_eq!(device.pusher().pending(), 0);
    assert_eq!(far.commits.load(Ordering::Acquire), 1);
    let mut model = bytes;
    model[at(3) as usize..][..4096].fill(6);
    assert!(far.bytes() == model && read_all(device.as_ref()) == model);
    device.close(true).unwrap();
}
