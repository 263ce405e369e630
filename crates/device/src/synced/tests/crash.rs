//! Random histories of a device, from seeds: requests, flushes, link failures, refusals of the remote, a small cache,
//! and a cache disk that loses power at any step. Compared with two models: the permitted contents of each sector after a
//! crash, and the permitted states of the remote.

use std::collections::HashMap;

use super::*;
use crate::remote::Remote;

const CHUNKS: usize = 40;
const SIZE: usize = CHUNKS * CHUNK as usize - 5000;
const SECTOR: usize = 512;

/// The states that the device had, by their digests, and the last seen state of the remote.
#[derive(Default)]
struct History {
    states: HashMap<[u8; 32], u64>,
    count: u64,
    /// The remote never returns to an earlier one.
    at: u64,
    /// Until the state after a crash has been looked at, commits wait here to be judged.
    unjudged: Option<Vec<[u8; 32]>>,
    wrong: Option<String>,
}

impl History {
    fn add(&mut self, state: &[u8]) {
        self.count += 1;
        self.states.insert(blake3::hash(state).into(), self.count);
    }

    fn committed(&mut self, state: &[u8]) {
        let digest = blake3::hash(state).into();
        match &mut self.unjudged {
            Some(unjudged) => unjudged.push(digest),
            None => self.judge(digest),
        }
    }

    fn judge(&mut self, digest: [u8; 32]) {
        match self.states.get(&digest) {
            None => self.wrong = Some("the remote is at a state that never existed".into()),
            Some(number) if *number < self.at => self.wrong = Some("the remote went back".into()),
            Some(number) => self.at = *number,
        }
    }
}

struct Life {
    random: fastrand::Rng,
    far: Arc<Far>,
    history: Arc<Mutex<History>>,
    sync: Sync,
    small: bool,
    directory: FakeDirectory,
    remote: Arc<LocalRemote>,
    device: Option<Arc<Synced>>,
    model: Vec<u8>,
    /// For every sector what it may hold after a crash: what it held at the last flush and since.
    versions: Vec<Vec<Vec<u8>>>,
}

impl Life {
    fn new(seed: u64, sync: Sync) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut model = random_bytes(seed, SIZE);
        model[3 * CHUNK as usize..6 * CHUNK as usize].fill(0);
        let far = Far::new(&model);
        let directory = FakeDirectory::new(SECTOR as u32, seed);
        let remote = far.remote();
        let small = random.bool();
        let mut life = Self {
            random,
            far,
            history: Arc::default(),
            sync,
            small,
            directory,
            remote,
            device: None,
            model,
            versions: Vec::new(),
        };
        life.settled();
        life.open();
        life
    }

    fn open(&mut self) {
        let options = SyncedOptions {
            sync: self.sync,
            cache_size: self.small.then_some(1),
            push_interval: Duration::from_millis(self.random.u64(1..30)),
            high_water: [4096, 100_000, 1 << 30][self.random.usize(0..3)],
            // Longer than a series of refusals of the remote can delay a request.
            give_up_after: Duration::from_secs(120),
            prefetch: match self.random.bool() {
                true => Order::None,
                false => Order::Sequential,
            },
            ..options(&self.directory, &self.remote)
        };
        self.device = Synced::open(options).map(Some).unwrap_or_else(|error| {
            assert!(self.directory.is_off(), "{error}");
            None
        });
    }

    /// What is there now is there for good.
    fn settled(&mut self) {
        self.versions = self
            .model
            .chunks(SECTOR)
            .map(|s| vec![s.to_vec()])
            .collect();
        self.history.lock().add(&self.model);
    }

    fn device(&self) -> Arc<Synced> {
        Arc::clone(self.device.as_ref().expect("open"))
    }

    fn range(&mut self, unit: usize) -> std::ops::Range<usize> {
        let from = self.random.usize(0..SIZE / unit) * unit;
        let most = [unit, 3 * unit, 50_000 / unit * unit][self.random.usize(0..3)].max(unit);
        from..(from + self.random.usize(1..=most / unit) * unit).min(SIZE)
    }

    /// Gives a range new content in all models, before the device knows.
    fn will_be(&mut self, range: &std::ops::Range<usize>, bytes: &[u8]) {
        self.model[range.clone()].copy_from_slice(bytes);
        for sector in range.start / SECTOR..range.end.div_ceil(SECTOR) {
            let end = ((sector + 1) * SECTOR).min(SIZE);
            self.versions[sector].push(self.model[sector * SECTOR..end].to_vec());
        }
        self.history.lock().add(&self.model);
    }

    fn change(&mut self) {
        let unit = [1, SECTOR, 4096, 4096, CHUNK as usize][self.random.usize(0..5)];
        let range = self.range(unit);
        let device = self.device();
        let before = self.model[range.clone()].to_vec();
        let (offset, length) = (range.start as u64, range.len() as u64);
        let result = match self.random.u8(0..6) {
            0 => {
                self.will_be(&range, &vec![0; range.len()]);
                device.write_zeroes(offset, length, Zeroes::default())
            }
            1 if unit >= 4096 => {
                self.will_be(&range, &vec![0; range.len()]);
                device.trim(offset, length)
            }
            _ => {
                let bytes: Vec<u8> = (0..range.len()).map(|_| self.random.u8(..)).collect();
                self.will_be(&range, &bytes);
                device.write(offset, &bytes)
            }
        };
        match result {
            Ok(()) => {}
            Err(_) if self.directory.is_off() => {}
            Err(error) if self.is_refused(&error) => self.will_be(&range, &before),
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether a write failed because a small cache is full of dirty chunks that the remote refuses. The link is never
    /// down for as long as writes wait.
    fn is_refused(&self, error: &DeviceError) -> bool {
        self.small && matches!(error, DeviceError::NoSpace(why) if why.contains("cannot be pushed"))
    }

    fn look(&mut self) {
        let range = self.range(1);
        let mut buffer = vec![0xA5; range.len()];
        match self.device().read(range.start as u64, &mut buffer) {
            Ok(()) => assert!(buffer == self.model[range.clone()], "{range:?} differs"),
            Err(error) => assert!(self.directory.is_off(), "{error}"),
        }
    }

    fn flush(&mut self) {
        let result = match self.random.u8(0..4) {
            0 => self.device().pusher().sync(),
            _ => self.device().flush(),
        };
        match result {
            Ok(()) if self.sync == Sync::Remote && !self.directory.is_off() => {
                let far = self.far.bytes();
                let differ = (0..SIZE).find(|i| far[*i] != self.model[*i]);
                let chunk = differ.map(|i| (i / CHUNK as usize) as u64);
                assert!(
                    differ.is_none(),
                    "a flush did not reach the remote: {differ:?} of chunk {chunk:?}, {:?}",
                    chunk.map(|i| self.device().shared.states.get(i)),
                );
                self.settled();
            }
            Ok(()) => self.settled_locally(),
            Err(error) => {
                let expected = self.directory.is_off()
                    || matches!(&error, DeviceError::NoSpace(why) if why == "over there");
                assert!(expected, "{error}");
            }
        }
    }

    /// With local sync, also a flush to the remote: it includes a local flush.
    fn settled_locally(&mut self) {
        // A write that failed because of the power may be there or not: a flush of nothing says nothing about it.
        if self.directory.is_off() {
            return;
        }
        self.settled();
    }

    /// The link goes down while requests that need nothing of it go on, and comes back.
    fn cut(&mut self) {
        self.remote.cut("a test");
        if self.random.u8(0..3) == 0 {
            self.far.forget_some(&mut self.random.fork());
        }
        let (remote, delay) = (Arc::clone(&self.remote), self.random.u64(0..30));
        // A small cache may need the link.
        let mender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(delay));
            remote.mend();
        });
        for _ in 0..self.random.usize(0..6) {
            let range = self.range(4096);
            let bytes = vec![self.random.u8(..); range.len()];
            if range.end.is_multiple_of(4096) || range.end == SIZE {
                let before = self.model[range.clone()].to_vec();
                self.will_be(&range, &bytes);
                let result = self.device().write(range.start as u64, &bytes);
                match result {
                    Err(error) if self.is_refused(&error) => self.will_be(&range, &before),
                    result => assert!(result.is_ok() || self.directory.is_off(), "{result:?}"),
                }
            }
            if self.sync == Sync::Local && self.random.bool() {
                self.flush_offline();
            }
        }
        mender.join().unwrap();
    }

    fn flush_offline(&mut self) {
        let result = self.device().flush();
        match result {
            Ok(()) => self.settled_locally(),
            Err(error) => assert!(
                self.directory.is_off() || matches!(error, DeviceError::NoSpace(_)),
                "{error}"
            ),
        }
    }

    /// The remote refuses some commits, and the link is cut around others, and around some parts of epochs.
    fn make_commits_fail(&mut self) {
        let mut random = self.random.fork();
        let remote = Arc::downgrade(&self.remote);
        *self.far.on_push.lock() = Some(Box::new(move || {
            if let (0, Some(remote)) = (random.u8(0..12), remote.upgrade()) {
                remote.cut("at a push");
                remote.mend();
            }
        }));
        let mut random = self.random.fork();
        let remote = Arc::downgrade(&self.remote);
        *self.far.on_commit.lock() = Some(Box::new(move || match random.u8(0..8) {
            0 => Err(DeviceError::NoSpace("over there".into())),
            1 => {
                // The commit counts, but its answer is lost.
                if let Some(remote) = remote.upgrade() {
                    remote.cut("at a commit");
                    remote.mend();
                }
                Ok(())
            }
            _ => Ok(()),
        }));
    }

    /// Power is lost, or the process is killed, and everything begins again from what is on disk.
    fn crash(&mut self, kill: bool) {
        if let Some(device) = self.device.take() {
            // Stops the threads; whatever they were at comes to its end or fails.
            drop(device);
        }
        // The remote accepts nothing more from a dead connection.
        self.remote.close(Box::new(|_| {}));
        self.directory = match kill {
            true => self.directory.after_kill(),
            false => self.directory.after_crash(self.random.u64(..)),
        };
        self.remote = self.far.remote();
        self.make_commits_fail();
        self.history.lock().unjudged = Some(Vec::new());
        self.open();
        let now = read_all(self.device().as_ref());
        for (sector, (found, versions)) in now.chunks(SECTOR).zip(&self.versions).enumerate() {
            assert!(
                versions.iter().any(|v| v == found),
                "sector {sector} (chunk {}) holds what it never held since the last flush",
                sector * SECTOR / CHUNK as usize,
            );
        }
        self.model = now;
        self.settled();
        let mut history = self.history.lock();
        for digest in history.unjudged.take().unwrap_or_default() {
            history.judge(digest);
        }
    }

    fn run(mut self, steps: usize) {
        let (history, far) = (Arc::clone(&self.history), Arc::clone(&self.far));
        *self.far.after_commit.lock() = Some(Box::new(move || {
            history.lock().committed(&far.bytes());
        }));
        self.make_commits_fail();
        for _ in 0..steps {
            if self.directory.is_off() {
                self.crash(false);
            }
            match self.random.u8(0..40) {
                0 => {
                    self.crash(true);
                }
                1 => {
                    let step = self.directory.steps() + self.random.u64(0..60);
                    self.directory.cut_power_at(step);
                }
                2 => self.cut(),
                3 => {
                    if self.device().close(self.random.bool()).is_ok() {
                        self.remote = self.far.remote();
                        self.make_commits_fail();
                        self.device = None;
                        self.settled_locally();
                        self.open();
                    }
                }
                4..8 => self.flush(),
                8..18 => self.look(),
                _ => self.change(),
            }
            if let Some(wrong) = &self.history.lock().wrong {
                panic!("{wrong}");
            }
        }
        if self.directory.is_off() {
            self.crash(false);
        }
        *self.far.on_commit.lock() = None;
        *self.far.on_push.lock() = None;
        let mut was_refused = false;
        while let Err(error) = self.device().pusher().sync() {
            let is_refused = matches!(&error, DeviceError::NoSpace(why) if why == "over there");
            // A commit that was under way may have been refused before, and only one is at a time.
            if is_refused && !std::mem::replace(&mut was_refused, true) {
                continue;
            }
            assert!(self.directory.is_off(), "{error}");
            self.crash(false);
            was_refused = false;
            *self.far.on_commit.lock() = None;
            *self.far.on_push.lock() = None;
        }
        assert!(self.far.bytes() == self.model);
        *self.far.after_commit.lock() = None;
    }
}

fn live(sync: Sync, seeds: std::ops::Range<u64>, steps: usize) {
    for seed in seeds {
        let result = std::panic::catch_unwind(|| Life::new(seed, sync).run(steps));
        if let Err(panic) = result {
            eprintln!("{sync:?}, seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// How many lives: more of them with `DROVER_LIVES`.
fn lives() -> u64 {
    let given = std::env::var("DROVER_LIVES").ok();
    given.and_then(|n| n.parse().ok()).unwrap_or(6)
}

#[test]
fn nothing_flushed_is_lost_and_the_remote_is_always_in_an_earlier_state_with_local_flushes() {
    live(Sync::Local, 0..lives(), 250);
}

#[test]
fn nothing_flushed_is_lost_and_the_remote_is_always_in_an_earlier_state_with_remote_flushes() {
    live(Sync::Remote, 1000..1000 + lives(), 250);
}
