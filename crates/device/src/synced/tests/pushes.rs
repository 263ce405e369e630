//! Pushing epochs.

use super::*;

#[test]
fn a_flush_to_the_remote_is_durable_when_it_returns() {
    let far = Far::new(&random_bytes(1, 500_000));
    let device = Synced::open(options(&FakeDirectory::default(), &far.remote())).unwrap();
    device.write(70_000, &[3; 100_000]).unwrap();
    device
        .write_zeroes(300_000, 50_000, Zeroes::default())
        .unwrap();
    assert!(device.pusher().pending() > 0);
    device.flush().unwrap();
    assert_eq!(device.pusher().pending(), 0);
    assert!(far.bytes() == read_all(device.as_ref()));
    assert_eq!(far.bytes()[70_000..170_000], [3; 100_000]);
    // Nothing new: nothing to send.
    let commits = far.commits.load(Ordering::Acquire);
    device.flush().unwrap();
    assert_eq!(far.commits.load(Ordering::Acquire), commits);
}

#[test]
fn writers_continue_during_a_push_and_the_remote_has_no_later_write_without_the_earlier() {
    let far = Far::new(&vec![0; 40 * CHUNK as usize]);
    let (seen, last) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
    let device = Synced::open(local(&FakeDirectory::default(), &far.remote())).unwrap();
    let (looking, count) = (Arc::clone(&far), Arc::clone(&seen));
    *far.after_commit.lock() = Some(Box::new(move || {
        let bytes = looking.bytes();
        let at = |i: usize| u64::from_le_bytes(bytes[i..i + 8].try_into().unwrap());
        for writer in 0..3 {
            let base = writer * 10 * CHUNK as usize;
            // Each number is written here first, there second.
            let (first, second) = (at(base), at(base + 7 * CHUNK as usize + 4096));
            assert!(first == second || first == second + 1, "{first} {second}");
            count.fetch_max(first, Ordering::AcqRel);
        }
    }));
    std::thread::scope(|scope| {
        for writer in 0..3u64 {
            let (device, far, last) = (&device, &far, &last);
            scope.spawn(move || {
                let base = writer * 10 * u64::from(CHUNK);
                // A push takes as long as it takes on this machine: one of them begins before the last write.
                let is_pushed = || far.commits.load(Ordering::Acquire) > 0;
                let mut number = 0u64;
                while number < 399 || !is_pushed() {
                    number += 1;
                    device.write(base, &number.to_le_bytes()).unwrap();
                    let there = base + 7 * u64::from(CHUNK) + 4096;
                    device.write(there, &number.to_le_bytes()).unwrap();
                    if number.is_multiple_of(16) {
                        device.flush().unwrap();
                    }
                }
                last.fetch_max(number, Ordering::AcqRel);
            });
        }
    });
    device.close(true).unwrap();
    assert_eq!(seen.load(Ordering::Acquire), last.into_inner());
    assert!(far.commits.load(Ordering::Acquire) > 1);
}

#[test]
fn writing_goes_on_offline_and_catches_up_across_a_restart() {
    let far = Far::new(&random_bytes(2, 800_000));
    let directory = FakeDirectory::default();
    let remote = far.remote();
    let device = Synced::open(local(&directory, &remote)).unwrap();
    let mut expected = far.bytes();
    remote.cut("a test");
    for i in 0..20 {
        device.write(i * 8192, &[i as u8 + 1; 8192]).unwrap();
        expected[i as usize * 8192..][..8192].fill(i as u8 + 1);
        device.flush().unwrap();
    }
    assert_eq!(device.pusher().pending(), 20 * 8192);
    assert!(far.bytes() != expected);
    device.close(false).unwrap();
    let device = Synced::open(local(&directory, &far.remote())).unwrap();
    assert_eq!(device.pusher().pending(), 20 * 8192);
    soon("all is pushed", || device.pusher().pending() == 0);
    assert!(far.bytes() == expected);
}

#[test]
fn sixteen_flushes_share_their_epochs() {
    let far = Far::new(&vec![0; 64 * CHUNK as usize]);
    let device = Synced::open(options(&FakeDirectory::default(), &far.remote())).unwrap();
    *far.on_commit.lock() = Some(Box::new(|| {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }));
    std::thread::scope(|scope| {
        for i in 0..16u64 {
            let (device, far) = (&device, &far);
            scope.spawn(move || {
                device.write(i * 4096, &[7; 4096]).unwrap();
                device.flush().unwrap();
                assert_eq!(far.bytes()[i as usize * 4096], 7);
            });
        }
    });
    let commits = far.commits.load(Ordering::Acquire);
    assert!(commits <= 8, "{commits}");
}

#[test]
fn a_refusal_of_the_remote_is_reported_and_retried() {
    let far = Far::new(&[0; 100_000]);
    let device = Synced::open(options(&FakeDirectory::default(), &far.remote())).unwrap();
    *far.on_commit.lock() = Some(Box::new(|| Err(DeviceError::NoSpace("over there".into()))));
    device.write(0, &[1; 5000]).unwrap();
    let result = device.flush();
    assert!(matches!(result, Err(DeviceError::NoSpace(_))), "{result:?}");
    assert!(device.progress().trouble.is_some());
    *far.on_commit.lock() = None;
    device.flush().unwrap();
    assert!(device.progress().trouble.is_none());
    assert_eq!(far.bytes()[..5000], [1; 5000]);
}

#[test]
fn an_image_that_changed_elsewhere_is_never_merged() {
    let far = Far::new(&random_bytes(3, 300_000));
    let directory = FakeDirectory::default();
    let device = Synced::open(local(&directory, &far.remote())).unwrap();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    device.close(true).unwrap();
    // Another writer.
    far.device.write(0, &[9; 4096]).unwrap();
    far.committed
        .store(far.committed().after(1).0, Ordering::Release);
    let device = Synced::open(local(&directory, &far.remote())).unwrap();
    assert!(read_all(device.as_ref()) == far.bytes());
    let remote = far.remote();
    drop(remote);
    device.write(0, &[4; 4096]).unwrap();
    *far.on_commit.lock() = Some(Box::new(|| Err(DeviceError::NoSpace("over there".into()))));
    device.close(false).unwrap();
    far.committed
        .store(far.committed().after(2).0, Ordering::Release);
    let refused = Synced::open(local(&directory, &far.remote()))
        .err()
        .unwrap();
    assert!(matches!(refused, SyncedError::Conflict), "{refused}");
}

#[test]
fn a_commit_whose_answer_was_lost_is_known_again_after_a_crash() {
    let far = Far::new(&[0; 200_000]);
    let directory = killed_before_the_answer(&far);
    let device = Synced::open(local(&directory, &far.remote())).unwrap();
    assert!(read_all(device.as_ref()) == far.bytes());
    device.close(true).unwrap();
    assert_eq!(far.bytes()[..50_000], [1; 50_000]);
}

#[test]
fn nothing_is_written_while_writes_are_held() {
    let far = Far::new(&[0; 200_000]);
    let device = Synced::open(local(&FakeDirectory::default(), &far.remote())).unwrap();
    let push = device.pusher();
    let until = Instant::now() + Duration::from_millis(300);
    let last = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // A front end that was detached while in use.
        scope.spawn(|| {
            for i in 1_u64.. {
                match device.write(i % 40 * 4096, &i.to_le_bytes()) {
                    Ok(()) => last.store(i, Ordering::Release),
                    Err(e) => assert!(matches!(e, DeviceError::Unavailable(_)), "{e}"),
                }
                if Instant::now() > until {
                    break;
                }
            }
        });
        while Instant::now() < until {
            let held = push.hold_writes();
            push.sync().unwrap();
            // What is pushed is all that there is, for as long as writes are held.
            let then = last.load(Ordering::Acquire);
            std::thread::yield_now();
            assert_eq!(push.pending(), 0);
            drop(held);
            while last.load(Ordering::Acquire) == then && Instant::now() < until {
                std::thread::yield_now();
            }
        }
    });
    push.hold_writes().for_good();
    assert!(device.write(0, &[1; 512]).is_err());
    assert!(device.write_zeroes(0, 4096, Zeroes::default()).is_err());
    assert!(device.trim(0, 4096).is_err());
    device.close(true).unwrap();
}
