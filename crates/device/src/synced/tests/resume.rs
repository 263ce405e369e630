//! Interrupted epochs are resumed.

use super::*;
use crate::remote::Remote;

const SIZE: usize = 24 << 20;

/// Pushes only on request.
fn quiet(directory: &FakeDirectory, remote: &Arc<LocalRemote>) -> SyncedOptions {
    SyncedOptions {
        sync: Sync::Local,
        push_interval: Duration::from_secs(1000),
        high_water: u64::MAX,
        prefetch: Order::None,
        give_up_after: Duration::from_secs(120),
        ..options(directory, remote)
    }
}

/// The link is cut when so many bytes have come, and stays down.
fn cut_after(far: &Arc<Far>, remote: &Arc<LocalRemote>, bytes: u64) {
    let (weak, from) = (Arc::downgrade(remote), far.pushed.load(Ordering::Acquire));
    let counting = Arc::downgrade(far);
    *far.on_push.lock() = Some(Box::new(move || {
        let pushed = counting
            .upgrade()
            .map_or(0, |far| far.pushed.load(Ordering::Acquire));
        if let (true, Some(remote)) = (pushed >= from + bytes, weak.upgrade()) {
            remote.cut("a test");
        }
    }));
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

#[test]
fn what_is_staged_is_not_sent_again() {
    let far = Far::new(&vec![0; SIZE]);
    let remote = far.remote();
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    let model = noise(1, SIZE);
    for (at, part) in (0u64..).step_by(1 << 20).zip(model.chunks(1 << 20)) {
        device.write(at, part).unwrap();
    }
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| device.pusher().sync());
        // Several cuts, each a while after the one before.
        for cut in 1..4 {
            cut_after(&far, &remote, 5 << 20);
            if cut > 1 {
                remote.mend();
            }
            soon("a cut", || matches!(remote.link(), Link::Down(_)));
            soon("what is staged", || device.progress().pushing.staged > 0);
            assert_eq!(far.commits.load(Ordering::Acquire), 0);
        }
        *far.on_push.lock() = None;
        remote.mend();
        sync.join().unwrap().unwrap();
    });
    assert!(far.bytes() == model);
    assert_eq!(far.commits.load(Ordering::Acquire), 1, "one epoch");
    assert_eq!(
        far.pushed.load(Ordering::Acquire),
        SIZE as u64,
        "each byte was sent once"
    );
    assert_eq!(device.progress().pushing.failures, 0);
}

#[test]
fn what_is_written_meanwhile_belongs_to_the_next_epoch() {
    let far = Far::new(&vec![0; SIZE]);
    let remote = far.remote();
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    let frozen = noise(2, SIZE);
    device.write(0, &frozen).unwrap();
    cut_after(&far, &remote, 6 << 20);
    let mut seen = Vec::new();
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| device.pusher().sync());
        soon("a cut", || matches!(remote.link(), Link::Down(_)));
        *far.on_push.lock() = None;
        // Over what is there, what was on its way, and what was not; more than is kept in memory.
        let mut now = frozen.clone();
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..2000 {
            let at = random.usize(0..SIZE - 40_000);
            let length = random.usize(1..40_000);
            random.fill(&mut now[at..at + length]);
            match random.u8(0..5) {
                0 => {
                    now[at..at + length].fill(0);
                    let zeroes = Zeroes::default();
                    device
                        .write_zeroes(at as u64, length as u64, zeroes)
                        .unwrap();
                }
                _ => device.write(at as u64, &now[at..at + length]).unwrap(),
            }
        }
        device.flush().unwrap();
        assert!(read_all(device.as_ref()) == now);
        remote.mend();
        sync.join().unwrap().unwrap();
        assert!(far.bytes() == frozen, "the remote is at the frozen state");
        seen = now;
    });
    device.pusher().sync().unwrap();
    assert!(far.bytes() == seen);
    assert_eq!(far.commits.load(Ordering::Acquire), 2);
}

/// The remote loses staged parts in a power failure: they are sent again if possible, else the epoch restarts. The
/// result is never a mixture.
#[test]
fn parts_that_the_remote_lost_are_sent_again_or_the_epoch_restarts() {
    for overwritten in [false, true] {
        let far = Far::new(&vec![0; SIZE]);
        let remote = far.remote();
        let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
        let mut model = noise(4, SIZE);
        device.write(0, &model).unwrap();
        cut_after(&far, &remote, 10 << 20);
        std::thread::scope(|scope| {
            let sync = scope.spawn(|| device.pusher().sync());
            soon("a cut", || matches!(remote.link(), Link::Down(_)));
            *far.on_push.lock() = None;
            if overwritten {
                model[..8 << 20].fill(7);
                device.write(0, &model[..8 << 20]).unwrap();
            }
            far.forget_some(&mut fastrand::Rng::with_seed(5));
            remote.mend();
            sync.join().unwrap().unwrap();
            if !overwritten {
                assert!(far.bytes() == model);
            }
        });
        device.pusher().sync().unwrap();
        assert!(far.bytes() == model, "overwritten: {overwritten}");
    }
}

/// The remote loses staged parts and reports it only at the commit, while the link stays up.
#[test]
fn what_is_missing_at_a_commit_is_sent_again() {
    let far = Far::new(&vec![0; SIZE]);
    let remote = far.remote();
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    let model = noise(8, SIZE);
    device.write(0, &model).unwrap();
    let (forgetful, mut asked) = (Arc::downgrade(&far), 0);
    *far.on_commit.lock() = Some(Box::new(move || {
        asked += 1;
        if asked == 1
            && let Some(far) = forgetful.upgrade()
        {
            far.forget_some(&mut fastrand::Rng::with_seed(6));
        }
        Ok(())
    }));
    device.pusher().sync().unwrap();
    assert!(far.bytes() == model);
    assert_eq!(far.commits.load(Ordering::Acquire), 1);
    let pushed = far.pushed.load(Ordering::Acquire);
    assert!(pushed > SIZE as u64 && pushed < 2 * SIZE as u64, "{pushed}");
}

#[test]
fn a_refusal_for_lack_of_room_loses_nothing_of_the_epoch() {
    let far = Far::new(&vec![0; SIZE]);
    let device = Synced::open(quiet(&FakeDirectory::default(), &far.remote())).unwrap();
    let model = noise(6, SIZE);
    device.write(0, &model).unwrap();
    *far.on_commit.lock() = Some(Box::new(|| Err(DeviceError::NoSpace("over there".into()))));
    for _ in 0..3 {
        let result = device.pusher().sync();
        assert!(matches!(result, Err(DeviceError::NoSpace(_))), "{result:?}");
    }
    let progress = device.progress();
    assert_eq!(progress.pushing.staged, SIZE as u64);
    let why = progress.pushing.why.unwrap().to_string();
    assert!(
        progress.pushing.failures >= 3 && why.contains("over there"),
        "{why}"
    );
    *far.on_commit.lock() = None;
    device.pusher().sync().unwrap();
    assert!(far.bytes() == model);
    assert_eq!(far.pushed.load(Ordering::Acquire), SIZE as u64);
}

/// Preserved bytes of an interrupted epoch fill the cache's disk: the epoch is abandoned, and writes continue.
#[test]
fn an_interrupted_epoch_gives_way_on_a_full_disk() {
    const SIZE: usize = 80 << 20;
    let far = Far::new(&vec![0; SIZE]);
    let remote = far.remote();
    let directory = FakeDirectory::default();
    let device = Synced::open(quiet(&directory, &remote)).unwrap();
    let mut model = noise(7, SIZE);
    device.write(0, &model).unwrap();
    device.flush().unwrap();
    cut_after(&far, &remote, 4 << 20);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| device.pusher().sync());
        soon("a cut", || matches!(remote.link(), Link::Down(_)));
        *far.on_push.lock() = None;
        soon("what is staged", || device.progress().pushing.staged > 0);
        directory.set_faults(|operation, file| {
            let full = operation == Operation::Write && file == "before-write";
            full.then_some(std::io::ErrorKind::StorageFull)
        });
        model.fill(9);
        for at in (0..SIZE).step_by(1 << 20) {
            device.write(at as u64, &model[at..at + (1 << 20)]).unwrap();
        }
        assert_eq!(device.progress().pushing.bytes, 0, "it was given up");
        directory.clear_faults();
        remote.mend();
        sync.join().unwrap().unwrap();
    });
    device.pusher().sync().unwrap();
    assert!(far.bytes() == model);
}
