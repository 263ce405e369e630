//! Reads and background fetching.

use super::*;
use crate::remote::Chunks;

/// Counts reads of each chunk, and makes them slow.
pub struct Watched {
    inner: Arc<MemoryDevice>,
    reads: Vec<AtomicU64>,
    /// Reads now, and most at a time.
    now: AtomicU64,
    peak: AtomicU64,
    calls: AtomicU64,
    order: Mutex<Vec<u64>>,
    delay: Mutex<Duration>,
    broken: Mutex<Option<DeviceError>>,
}

impl Watched {
    pub fn new(far: &Far, delay: Duration) -> Arc<Self> {
        let chunks = far.device.size().div_ceil(u64::from(CHUNK));
        Arc::new(Self {
            inner: Arc::clone(&far.device),
            reads: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
            now: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            order: Mutex::default(),
            delay: Mutex::new(delay),
            broken: Mutex::default(),
        })
    }

    pub fn order(&self) -> Vec<u64> {
        self.order.lock().clone()
    }

    /// Whether reads were requested while earlier ones were in flight.
    pub fn was_read_ahead(&self) -> bool {
        let chunks: u64 = (0..self.reads.len()).map(|i| self.reads(i)).sum();
        self.peak.load(Ordering::Acquire) > 1 || self.calls.load(Ordering::Acquire) < chunks / 2
    }

    pub fn reads(&self, chunk: usize) -> u64 {
        self.reads[chunk].load(Ordering::Acquire)
    }
}

impl BlockDevice for Watched {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let chunk = u64::from(CHUNK);
        for index in offset / chunk..(offset + buffer.len() as u64).div_ceil(chunk) {
            self.reads[index as usize].fetch_add(1, Ordering::AcqRel);
            self.order.lock().push(index);
        }
        self.calls.fetch_add(1, Ordering::AcqRel);
        let now = self.now.fetch_add(1, Ordering::AcqRel) + 1;
        self.peak.fetch_max(now, Ordering::AcqRel);
        let delay = *self.delay.lock();
        std::thread::sleep(delay);
        self.now.fetch_sub(1, Ordering::AcqRel);
        match &*self.broken.lock() {
            Some(error) => Err(error.clone()),
            None => self.inner.read(offset, buffer),
        }
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.inner.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.inner.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.inner.extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.write_cost(offset, length)
    }
}

pub fn quiet(directory: &FakeDirectory, remote: &Arc<LocalRemote>) -> SyncedOptions {
    SyncedOptions {
        prefetch: Order::None,
        ..options(directory, remote)
    }
}

#[test]
fn sixteen_readers_of_a_chunk_share_one_fetch() {
    let bytes = random_bytes(3, 10 * CHUNK as usize);
    let far = Far::new(&bytes);
    let watched = Watched::new(&far, Duration::from_millis(50));
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    std::thread::scope(|scope| {
        for reader in 0..16 {
            let (device, bytes) = (&device, &bytes);
            scope.spawn(move || {
                let from = 5 * CHUNK as usize + reader * 100;
                let mut buffer = [0; 300];
                device.read(from as u64, &mut buffer).unwrap();
                assert_eq!(buffer, bytes[from..from + 300]);
            });
        }
    });
    assert_eq!(watched.reads(5), 1);
    assert_eq!(watched.reads(0), 0);
}

#[test]
fn everything_comes_and_is_not_fetched_again_after_a_restart() {
    let bytes = random_bytes(4, 3_000_001);
    let far = Far::new(&bytes);
    let directory = FakeDirectory::default();
    let heard = Arc::new(AtomicU64::new(0));
    let hear = Arc::clone(&heard);
    let with_hook = SyncedOptions {
        hooks: Hooks {
            chunk_is_local: Some(Arc::new(move |_| {
                hear.fetch_add(1, Ordering::AcqRel);
            })),
            ..Hooks::default()
        },
        ..options(&directory, &far.remote())
    };
    let device = Synced::open(with_hook).unwrap();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    let progress = device.progress();
    assert_eq!(progress.local, progress.chunks);
    assert_eq!(progress.seconds_left, Some(0.0));
    assert!(heard.load(Ordering::Acquire) > 100);
    device.close(false).unwrap();
    drop(device);
    let watched = Watched::new(&far, Duration::ZERO);
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(options(&directory, &remote)).unwrap();
    remote.cut("a test");
    assert!(read_all(&device) == bytes);
    assert!(watched.order.lock().is_empty());
    device.close(false).unwrap();
}

#[test]
fn a_process_that_was_killed_finds_its_chunks_verified() {
    let bytes = random_bytes(5, 2_000_000);
    let far = Far::new(&bytes);
    let directory = FakeDirectory::default();
    let device = Synced::open(options(&directory, &far.remote())).unwrap();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    device.shared.save(true).unwrap();
    soon("it is written down", || {
        device.shared.table.lock().unlogged.is_empty()
    });
    drop(device);
    let after = directory.after_kill();
    // One chunk is not what it was.
    let index = (0..).find(|i| bytes[i * CHUNK as usize] != 0).unwrap();
    let mut data = after.bytes("data").unwrap();
    data[index * CHUNK as usize] ^= 1;
    after.put("data", &data);
    let watched = Watched::new(&far, Duration::ZERO);
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(options(&after, &remote)).unwrap();
    assert!(read_all(&device) == bytes);
    // A chunk that is read just while it is requested in the background may arrive twice.
    let order = watched.order();
    assert!(!order.is_empty(), "what was changed is not seen");
    assert!(order.iter().all(|i| *i == index as u64), "{order:?}");
}

#[test]
fn zeros_are_never_fetched() {
    let mut bytes = vec![0; 300 * CHUNK as usize];
    bytes[200 * CHUNK as usize..201 * CHUNK as usize].fill(1);
    let sparse = MemoryDevice::new(bytes.len() as u64);
    sparse
        .write(200 * u64::from(CHUNK), &[1; CHUNK as usize])
        .unwrap();
    let far = Far::over(sparse);
    let watched = Watched::new(&far, Duration::ZERO);
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    soon("zeros are known", || device.progress().local > 290);
    device.write(100 * u64::from(CHUNK) + 5, &[9; 10]).unwrap();
    assert!(watched.order.lock().is_empty());
    bytes[100 * CHUNK as usize + 5..][..10].fill(9);
    assert!(read_all(&device) == bytes);
    assert!(
        watched.order.lock().len() <= 4,
        "{:?}",
        watched.order.lock()
    );
    device.flush().unwrap();
    assert!(far.bytes() == bytes);
}

#[test]
fn a_list_comes_first_and_a_pause_holds() {
    let far = Far::new(&vec![1; 400 * CHUNK as usize]);
    let watched = Watched::new(&far, Duration::from_millis(2));
    let remote = LocalRemote::new(
        Arc::clone(&watched) as _,
        CHUNK,
        1,
        Some(Arc::clone(&far) as _),
    )
    .unwrap();
    let list = vec![
        Chunks {
            first: 301,
            count: 3,
        },
        Chunks {
            first: 17,
            count: 1,
        },
    ];
    let with_list = SyncedOptions {
        prefetch: Order::List(list),
        ..options(&FakeDirectory::default(), &remote)
    };
    let device = Synced::open(with_list).unwrap();
    soon("the list is here", || watched.order.lock().len() > 4);
    assert_eq!(watched.order.lock()[..4], [301, 302, 303, 17]);
    device.puller().pause();
    std::thread::sleep(Duration::from_millis(20));
    let before = watched.order.lock().len();
    assert!(!device.puller().wait(Duration::from_millis(30)).unwrap());
    assert_eq!(watched.order.lock().len(), before);
    device.puller().resume();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
}

#[test]
fn what_a_list_has_first_comes_first_after_a_cut_too() {
    let far = Far::new(&vec![1; 400 * CHUNK as usize]);
    let watched = Watched::new(&far, Duration::from_secs(1));
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let list = [301, 17, 250, 90, 333, 120, 399, 60];
    let runs = list.map(|first| Chunks { first, count: 1 });
    let with_list = SyncedOptions {
        prefetch: Order::List(runs.into()),
        ..options(&FakeDirectory::default(), &remote)
    };
    let device = Synced::open(with_list).unwrap();
    soon("some of it is under way", || !watched.order().is_empty());
    // It is lost.
    remote.cut("a test");
    *watched.delay.lock() = Duration::from_millis(2);
    soon("it is known", || !device.shared.is_up());
    std::thread::sleep(Duration::from_millis(50));
    watched.order.lock().clear();
    remote.mend();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    let order = watched.order();
    assert!(list.contains(&order[0]), "{order:?}");
    let rest = order.iter().skip_while(|i| list.contains(*i));
    let late: Vec<_> = rest.filter(|i| list.contains(*i)).collect();
    assert!(late.is_empty(), "{late:?} of {order:?}");
}

#[test]
fn a_reader_in_order_is_read_ahead_of() {
    let far = Far::new(&vec![1; 600 * CHUNK as usize]);
    let watched = Watched::new(&far, Duration::ZERO);
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    let mut buffer = vec![0; CHUNK as usize];
    for index in 100..106 {
        device.read(index * u64::from(CHUNK), &mut buffer).unwrap();
    }
    soon("chunks ahead are here", || watched.reads(150) == 1);
    assert_eq!(watched.reads(50), 0);
}

#[test]
fn an_error_is_one_request_s_and_a_cut_only_waits() {
    let bytes = random_bytes(8, 50 * CHUNK as usize);
    let far = Far::new(&bytes);
    let watched = Watched::new(&far, Duration::ZERO);
    let remote = far.remote_over(Arc::clone(&watched) as _);
    let device = Synced::open(quiet(&FakeDirectory::default(), &remote)).unwrap();
    *watched.broken.lock() = Some(DeviceError::Corrupt("a wrong digest".into()));
    let chunk = (0..50).find(|i| bytes[i * CHUNK as usize] != 0).unwrap();
    let at = (chunk * CHUNK as usize) as u64;
    let mut buffer = [0; 100];
    let result = device.read(at, &mut buffer);
    assert!(matches!(result, Err(DeviceError::Corrupt(_))), "{result:?}");
    *watched.broken.lock() = None;
    remote.cut("a test");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut buffer = [0; 100];
            device.read(at, &mut buffer).map(|()| buffer)
        });
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waiting.is_finished());
        remote.mend();
        assert_eq!(
            waiting.join().unwrap().unwrap(),
            bytes[at as usize..][..100]
        );
    });
}

#[test]
fn a_read_gives_up_in_the_end() {
    let far = Far::new(&random_bytes(8, 50 * CHUNK as usize));
    let remote = far.remote();
    let hasty = SyncedOptions {
        give_up_after: Duration::from_millis(50),
        ..quiet(&FakeDirectory::default(), &remote)
    };
    let device = Synced::open(hasty).unwrap();
    remote.cut("a test");
    let chunk = (0..50)
        .find(|i| !device.shared.states.get(*i).whole())
        .unwrap();
    let result = device.read(chunk * u64::from(CHUNK), &mut [0; 10]);
    assert!(
        matches!(result, Err(DeviceError::Unavailable(_))),
        "{result:?}"
    );
}

#[test]
fn a_full_disk_still_serves_reads_and_tells_writers() {
    let bytes = random_bytes(9, 200 * CHUNK as usize);
    let far = Far::new(&bytes);
    let directory = FakeDirectory::default();
    let device = Synced::open(quiet(&directory, &far.remote())).unwrap();
    device.write(0, &[5; 1000]).unwrap();
    device.flush().unwrap();
    directory.set_capacity(Some(directory.used()));
    let mut expected = bytes.clone();
    expected[..1000].fill(5);
    assert!(read_all(&device) == expected);
    // What was clean may have been given up for it; beyond that there is no room.
    let results: Vec<_> = (0..200u64)
        .map(|i| device.write(i * u64::from(CHUNK), &[6; CHUNK as usize]))
        .collect();
    assert!(
        results
            .iter()
            .any(|r| matches!(r, Err(DeviceError::NoSpace(_))))
    );
    for (i, result) in results.iter().enumerate() {
        let range = i * CHUNK as usize..(i + 1) * CHUNK as usize;
        let mut now = vec![0; CHUNK as usize];
        device.read(range.start as u64, &mut now).unwrap();
        if result.is_ok() {
            expected[range.clone()].fill(6);
            assert!(now == expected[range], "{i}");
        } else {
            let either = now
                .iter()
                .zip(&expected[range])
                .all(|(n, e)| n == e || *n == 6);
            assert!(either, "{i}");
        }
    }
}
