//! Managed devices over memory, with remotes that are slow, cut off and observed, and a cache disk that loses power.

use std::collections::HashSet;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Capabilities, Cost, Digest, Extent, Zeroes};

use super::*;
use crate::backend::MemoryDevice;
use crate::local_remote::{Committer, LocalRemote};
use crate::remote::{Change, Chunks, Epoch, Local, Remote, Shape, Staged};
use drover_storage::{Directory, FakeDirectory, Operation};

mod crash;
mod former;
mod losses;
mod pulls;
mod pushes;
mod resume;
mod room;

const CHUNK: u32 = 16 << 10;

type BeforeCommit = Box<dyn FnMut() -> Result<(), DeviceError> + Send>;

/// A remote whose committed states a test can inspect: an epoch is applied completely or not at all.
pub struct Far {
    pub device: Arc<MemoryDevice>,
    staged: Mutex<(Epoch, Vec<Change>)>,
    committed: AtomicU64,
    /// How many commits there were.
    pub commits: AtomicU64,
    /// Some staged parts were lost, and the device has not queried the rest yet.
    forgot: AtomicBool,
    /// Bytes that were pushed.
    pub pushed: AtomicU64,
    /// What to do when part of an epoch has come, before it is answered.
    pub on_push: Mutex<Option<Box<dyn FnMut() + Send>>>,
    /// What to do before a commit, or an error to give instead.
    pub on_commit: Mutex<Option<BeforeCommit>>,
    /// What to do after one.
    pub after_commit: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl Far {
    pub fn new(bytes: &[u8]) -> Arc<Self> {
        Self::over(MemoryDevice::from_bytes(bytes))
    }

    pub fn over(device: MemoryDevice) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::new(device),
            staged: Mutex::default(),
            committed: AtomicU64::new(0),
            commits: AtomicU64::new(0),
            forgot: AtomicBool::new(false),
            pushed: AtomicU64::new(0),
            on_push: Mutex::default(),
            on_commit: Mutex::default(),
            after_commit: Mutex::default(),
        })
    }

    /// Its program starts anew, and forgets some of what was staged, as after a power loss.
    pub fn forget_some(&self, random: &mut fastrand::Rng) {
        let mut staged = self.staged.lock();
        staged.1.retain(|_| random.bool());
        self.forgot.store(true, Ordering::Release);
    }

    /// Whether so many bytes of the device are staged of an epoch.
    fn has(&self, staged: &(Epoch, Vec<Change>), epoch: Epoch, covers: u64) -> bool {
        let parts = staged.1.iter().filter(|_| staged.0 == epoch);
        let blocks: HashSet<u64> = parts
            .flat_map(|part| (part.offset()..part.offset() + part.covers()).step_by(4096))
            .collect();
        let size = self.device.size();
        let bytes: u64 = blocks.iter().map(|at| 4096.min(size - at)).sum();
        bytes == covers
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.device.size() as usize];
        self.device.read(0, &mut bytes).unwrap();
        bytes
    }

    pub fn remote(self: &Arc<Self>) -> Arc<LocalRemote> {
        let device: Arc<dyn BlockDevice> = Arc::clone(&self.device) as _;
        self.remote_over(device)
    }

    /// Reads through `device`, which is on top of this remote's.
    pub fn remote_over(self: &Arc<Self>, device: Arc<dyn BlockDevice>) -> Arc<LocalRemote> {
        LocalRemote::new(device, CHUNK, 3, Some(Arc::clone(self) as _)).unwrap()
    }
}

impl Committer for Far {
    fn committed(&self) -> Epoch {
        Epoch(self.committed.load(Ordering::Acquire))
    }

    fn push(&self, epoch: Epoch, changes: &[Change]) -> Result<(), DeviceError> {
        assert!(epoch > self.committed());
        let mut staged = self.staged.lock();
        assert!(epoch >= staged.0, "{epoch:?} after {:?}", staged.0);
        if staged.0 != epoch {
            *staged = (epoch, Vec::new());
        }
        for change in changes {
            let end = change.offset() + change.covers();
            assert!(change.offset() % 4096 == 0 && change.covers() > 0);
            assert!(end % 4096 == 0 || end == self.device.size(), "{change:?}");
        }
        staged.1.extend_from_slice(changes);
        drop(staged);
        let bytes: u64 = changes.iter().map(Change::covers).sum();
        self.pushed.fetch_add(bytes, Ordering::AcqRel);
        if let Some(then) = self.on_push.lock().as_mut() {
            then();
        }
        Ok(())
    }

    fn staged(&self, epoch: Epoch, from: u64) -> Result<Staged, DeviceError> {
        const MAX_RUNS: usize = 5;
        let staged = self.staged.lock();
        self.forgot.store(false, Ordering::Release);
        let mut runs: Vec<(u64, u64)> = match staged.0 == epoch {
            true => staged.1.iter().map(|c| (c.offset(), c.covers())).collect(),
            false => Vec::new(),
        };
        runs.sort_unstable();
        runs.retain(|run| run.0 + run.1 > from);
        let more = runs.get(MAX_RUNS).map(|run| run.0);
        runs.truncate(MAX_RUNS);
        let end = more.unwrap_or(self.device.size());
        Ok(Staged {
            epoch: staged.0,
            runs,
            end,
        })
    }

    fn commit(&self, epoch: Epoch, covers: u64) -> Result<(), DeviceError> {
        if let Some(first) = self.on_commit.lock().as_mut() {
            first()?;
        }
        let mut staged = self.staged.lock();
        assert!(epoch > self.committed());
        if covers == 0 {
            // As a site does.
            return Err(DeviceError::Unavailable("nothing is staged".into()));
        }
        if !self.has(&staged, epoch, covers) {
            assert!(self.forgot.load(Ordering::Acquire), "not what it should be");
            return Err(DeviceError::Unavailable("some is missing".into()));
        }
        if staged.0 == epoch {
            for change in std::mem::take(&mut staged.1) {
                match change {
                    Change::Write(offset, bytes) => self.device.write(offset, &bytes)?,
                    Change::Zero(offset, length) => {
                        self.device
                            .write_zeroes(offset, length, Zeroes::default())?;
                    }
                }
            }
        }
        self.committed.store(epoch.0, Ordering::Release);
        self.commits.fetch_add(1, Ordering::AcqRel);
        if let Some(after) = self.after_commit.lock().as_mut() {
            after();
        }
        Ok(())
    }
}

pub fn options(directory: &FakeDirectory, remote: &Arc<LocalRemote>) -> SyncedOptions {
    SyncedOptions {
        give_up_after: Duration::from_secs(20),
        ..SyncedOptions::new(
            Arc::new(directory.clone()),
            Arc::clone(remote) as _,
            b"image",
        )
    }
}

pub fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; length];
    // Zeros here and there, as on disks.
    for part in bytes.chunks_mut(4096) {
        if random.u8(0..4) != 0 {
            random.fill(part);
        }
    }
    bytes
}

pub fn read_all(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0; device.size() as usize];
    device.read(0, &mut bytes).unwrap();
    bytes
}

/// Options of a device whose flushes wait for the cache only.
pub fn local(directory: &FakeDirectory, remote: &Arc<LocalRemote>) -> SyncedOptions {
    SyncedOptions {
        sync: Sync::Local,
        push_interval: Duration::from_millis(5),
        ..options(directory, remote)
    }
}

/// What a crash leaves of a cache whose first commit (50,000 bytes of 1) got no answer.
pub fn killed_before_the_answer(far: &Arc<Far>) -> FakeDirectory {
    let directory = FakeDirectory::default();
    let remote = far.remote();
    let device = Synced::open(local(&directory, &remote)).unwrap();
    let weak = Arc::downgrade(&remote);
    *far.on_commit.lock() = Some(Box::new(move || {
        if let Some(remote) = weak.upgrade() {
            remote.cut("for good");
        }
        Ok(())
    }));
    device.write(0, &[1; 50_000]).unwrap();
    device.flush().unwrap();
    soon("a commit", || far.commits.load(Ordering::Acquire) == 1);
    drop(device);
    remote.close(Box::new(|_| {}));
    *far.on_commit.lock() = None;
    directory.after_kill()
}

/// Waits for something that happens soon.
pub fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < deadline, "not within 60 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn it_keeps_the_contract() {
    for sync in [Sync::Remote, Sync::Local] {
        crate::testing::contract(&|size| {
            let far = Far::new(&vec![0; size as usize]);
            let options = SyncedOptions {
                sync,
                push_interval: Duration::from_millis(20),
                ..options(&FakeDirectory::default(), &far.remote())
            };
            Box::new(Synced::open(options).unwrap())
        });
    }
}

#[test]
fn it_keeps_the_contract_with_hardly_any_cache() {
    crate::testing::contract(&|size| {
        let far = Far::new(&vec![0; size as usize]);
        let options = SyncedOptions {
            cache_size: Some(1),
            sync: Sync::Local,
            push_interval: Duration::from_millis(5),
            ..options(&FakeDirectory::default(), &far.remote())
        };
        Box::new(Synced::open(options).unwrap())
    });
}

#[test]
fn a_cache_of_another_image_is_refused_and_left_alone() {
    let far = Far::new(&random_bytes(1, 100_000));
    let directory = FakeDirectory::default();
    let device = Synced::open(options(&directory, &far.remote())).unwrap();
    let locked = Synced::open(options(&directory, &far.remote()))
        .err()
        .unwrap();
    assert!(matches!(locked, SyncedError::InUse { .. }), "{locked}");
    device.write(0, &[7; 5000]).unwrap();
    device.close(false).unwrap();
    let before = directory.bytes("map").unwrap();
    let other = SyncedOptions {
        identity: b"another".to_vec(),
        ..options(&directory, &far.remote())
    };
    let refused = Synced::open(other).err().unwrap();
    assert!(
        matches!(refused, SyncedError::OtherImage { .. }),
        "{refused}"
    );
    let longer = Far::new(&[0; 100_001]);
    let refused = Synced::open(options(&directory, &longer.remote()))
        .err()
        .unwrap();
    assert!(
        matches!(refused, SyncedError::OtherImage { .. }),
        "{refused}"
    );
    assert_eq!(directory.bytes("map").unwrap(), before);
    let again = Synced::open(options(&directory, &far.remote())).unwrap();
    let mut buffer = [0; 5000];
    again.read(0, &mut buffer).unwrap();
    assert_eq!(buffer, [7; 5000]);
}

#[test]
fn after_the_close_there_is_nothing_more() {
    let far = Far::new(&[0; 100_000]);
    let device = Synced::open(options(&FakeDirectory::default(), &far.remote())).unwrap();
    device.write(10, &[1; 100]).unwrap();
    device.close(true).unwrap();
    assert_eq!(far.bytes()[10..110], [1; 100]);
    let results = [
        device.read(0, &mut [0; 10]),
        device.write(0, &[1]),
        device.flush(),
        device.trim(0, 10),
        device.extents(0, 10).map(drop),
    ];
    for result in results {
        assert!(matches!(result, Err(DeviceError::Closed)), "{result:?}");
    }
}
