//! Lost replies, and failures at critical moments.

use super::*;

#[test]
fn a_commit_that_times_out_on_a_link_that_stands_is_asked_for_again() {
    let far = Far::new(&[0; 100_000]);
    let device = Synced::open(options(&FakeDirectory::default(), &far.remote())).unwrap();
    let mut failures = 1;
    *far.on_commit.lock() = Some(Box::new(move || match failures {
        0 => Ok(()),
        _ => {
            failures -= 1;
            Err(DeviceError::Unavailable("no answer in time".into()))
        }
    }));
    device.write(0, &[1; 5000]).unwrap();
    device.flush().unwrap();
    assert_eq!(far.bytes()[..5000], [1; 5000]);
    assert_eq!(far.commits.load(Ordering::Acquire), 1);
}

#[test]
fn a_commit_learned_of_late_is_still_known_when_the_next_is_lost() {
    let far = Far::new(&[0; 200_000]);
    let directory = killed_before_the_answer(&far);
    // Opened without a link: what became of the commit is learned when there is one.
    let remote = far.remote();
    remote.cut("not yet");
    let weak = Arc::downgrade(&remote);
    let lost = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&lost);
    *far.on_commit.lock() = Some(Box::new(move || {
        if let Some(remote) = weak.upgrade() {
            remote.cut("again");
        }
        count.fetch_add(1, Ordering::AcqRel);
        Err(DeviceError::Unavailable("cut".into()))
    }));
    let device = Synced::open(local(&directory, &remote)).unwrap();
    remote.mend();
    device.write(0, &[2; 60_000]).unwrap();
    device.flush().unwrap();
    soon("a commit that is lost", || lost.load(Ordering::Acquire) > 0);
    *far.on_commit.lock() = None;
    remote.mend();
    device.close(true).unwrap();
    assert_eq!(far.bytes()[..60_000], [2; 60_000]);
}

#[test]
fn a_write_during_the_close_is_refused_or_remembered() {
    let size = 64 * CHUNK as usize;
    let far = Far::new(&random_bytes(5, size));
    let directory = FakeDirectory::default();
    for round in 0..5u64 {
        let device = Synced::open(options(&directory, &far.remote())).unwrap();
        assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
        std::thread::scope(|scope| {
            for writer in 0..4u64 {
                let device = &device;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(round * 10 + writer);
                    loop {
                        let at = random.u64(0..size as u64 - 4096);
                        match device.write(at, &[random.u8(..); 4096]) {
                            Ok(()) => {}
                            Err(DeviceError::Closed) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(3));
            device.close(false).unwrap();
        });
        let device = Synced::open(options(&directory, &far.remote())).unwrap();
        device.flush().unwrap();
        assert!(read_all(device.as_ref()) == far.bytes(), "round {round}");
        device.close(true).unwrap();
    }
}

/// Readers that begin while the device closes get an answer at once, not at their deadline.
#[test]
fn no_reader_is_forgotten_by_a_close() {
    let far = Far::new(&random_bytes(6, 64 * CHUNK as usize));
    for round in 0..6u64 {
        let quiet = SyncedOptions {
            prefetch: Order::None,
            give_up_after: Duration::from_secs(600),
            ..options(&FakeDirectory::default(), &far.remote())
        };
        let device = Synced::open(quiet).unwrap();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for reader in 0..4u64 {
                let device = &device;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(round * 10 + reader);
                    while let Ok(()) = {
                        let chunk = random.u64(0..64) * u64::from(CHUNK);
                        device.read(chunk, &mut [0; 100])
                    } {}
                });
            }
            std::thread::sleep(Duration::from_micros(200 * round));
            device.close(false).unwrap();
        });
        // A forgotten one waits for its deadline.
        assert!(began.elapsed() < Duration::from_secs(300));
    }
}

#[test]
fn a_trim_of_everything_takes_memory_by_a_limit() {
    let size = (write::MAX_ZEROED as u64 + 5000) * 4096;
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(size));
    let remote = LocalRemote::new(device, 4096, 1, None).unwrap();
    // Nothing is known to be zero, and nothing can be pushed.
    remote.cut("away");
    let device = Synced::open(local(&FakeDirectory::default(), &remote)).unwrap();
    device.trim(0, size).unwrap();
    let dirty = device.shared.table.lock().dirty.len();
    assert!((write::MAX_ZEROED..write::MAX_ZEROED + 5000).contains(&dirty));
    device.trim(0, size).unwrap();
    assert_eq!(device.shared.table.lock().dirty.len(), dirty);
}

/// A remote whose link comes up, and reports it, while its state is being queried.
struct Rising {
    inner: Arc<LocalRemote>,
    attached: std::sync::atomic::AtomicBool,
}

impl Remote for Rising {
    fn shape(&self) -> Shape {
        self.inner.shape()
    }
    fn read_only(&self) -> bool {
        self.inner.read_only()
    }
    fn attach(&self, local: Weak<dyn Local>) {
        self.inner.attach(local);
        self.attached.store(true, Ordering::Release);
    }
    fn fetch(&self, chunks: Chunks) {
        self.inner.fetch(chunks);
    }
    fn kick(&self) {
        self.inner.kick();
    }
    fn presence(&self, chunks: Chunks, done: crate::remote::PresenceDone) {
        self.inner.presence(chunks, done);
    }
    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: crate::remote::Done) {
        self.inner.push(epoch, changes, done);
    }
    fn staged(&self, epoch: Epoch, from: u64, done: crate::remote::StagedDone) {
        self.inner.staged(epoch, from, done);
    }
    fn commit(&self, epoch: Epoch, covers: u64, done: crate::remote::Done) {
        self.inner.commit(epoch, covers, done);
    }
    fn committed(&self) -> Epoch {
        Remote::committed(self.inner.as_ref())
    }
    fn link(&self) -> Link {
        let before = self.inner.link();
        if self.attached.swap(false, Ordering::AcqRel) {
            let inner = Arc::clone(&self.inner);
            let tell = std::thread::spawn(move || inner.mend());
            // It may have to wait until this look was noted.
            for _ in 0..100 {
                if tell.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        before
    }
    fn traffic(&self) -> crate::remote::Traffic {
        self.inner.traffic()
    }
    fn close(&self, done: crate::remote::Done) {
        self.inner.close(done);
    }
}

#[test]
fn a_link_that_comes_up_while_the_device_opens_is_up() {
    let far = Far::new(&random_bytes(7, 20 * CHUNK as usize));
    let inner = far.remote();
    inner.cut("not yet");
    let attached = false.into();
    let remote = Arc::new(Rising { inner, attached });
    let device = Synced::open(SyncedOptions::new(
        Arc::new(FakeDirectory::default()),
        remote,
        b"image",
    ))
    .unwrap();
    soon("the link is up", || device.shared.is_up());
    device.write(0, &[1; 5000]).unwrap();
    device.close(true).unwrap();
    assert_eq!(far.bytes()[..5000], [1; 5000]);
}

#[test]
fn zeros_over_everything_take_memory_by_a_limit() {
    let size = (write::MAX_ZEROED as u64 + 5000) * 4096;
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(size));
    let remote = LocalRemote::new(device, 4096, 1, None).unwrap();
    // Nothing is known to be zero, and nothing can be pushed.
    remote.cut("away");
    let device = Synced::open(SyncedOptions {
        give_up_after: Duration::from_secs(600),
        ..local(&FakeDirectory::default(), &remote)
    })
    .unwrap();
    let dirty = || device.shared.table.lock().dirty.len();
    std::thread::scope(|scope| {
        let zeros = scope.spawn(|| device.write_zeroes(0, size, Zeroes::default()));
        soon("the limit", || {
            dirty() >= write::MAX_ZEROED || zeros.is_finished()
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!zeros.is_finished() && dirty() < write::MAX_ZEROED + 5000);
        assert_eq!(device.write_cost(size - 4096, 4096), Cost::Network);
        remote.mend();
        zeros.join().unwrap().unwrap();
    });
}

#[test]
fn zeros_that_waited_in_vain_for_memory_alone_are_done() {
    let size = (write::MAX_ZEROED as u64 + 5000) * 4096;
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(size));
    let remote = LocalRemote::new(device, 4096, 1, None).unwrap();
    remote.cut("for good");
    let device = Synced::open(SyncedOptions {
        give_up_after: Duration::from_millis(200),
        ..local(&FakeDirectory::default(), &remote)
    })
    .unwrap();
    device.write_zeroes(0, size, Zeroes::default()).unwrap();
    let mut last = [1; 4096];
    device.read(size - 4096, &mut last).unwrap();
    assert_eq!(last, [0; 4096]);
}
