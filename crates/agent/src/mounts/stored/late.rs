//! A disk in a store that may not have been reached yet, or not now, or never again.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Digest, Extent, ExtentKind, Zeroes, check_range,
};
use drover_device::backend::StoreDevice;
use drover_device::backend::chunk_store::Epochs;
use drover_device::local_remote::{Committer, LocalRemote};
use drover_device::remote::{
    Change, Chunks, Done, Epoch, Link, Local, PresenceDone, Remote, Shape, StagedDone, Traffic,
};
use parking_lot::Mutex;

use super::opening::{Failed, Opening};
use crate::error::one_line;

/// The first pause between attempts to reach a store; each is twice as long.
const AGAIN: Duration = Duration::from_secs(2);
/// The longest one.
const MAX_AGAIN: Duration = Duration::from_secs(20);
/// How often a mount that may have nothing to do looks whether it still has its lease: one small request.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);

fn longer(pause: Duration) -> Duration {
    (pause * 2).clamp(AGAIN, MAX_AGAIN)
}

/// What a cache calls the disk with this number.
pub fn digest(id: [u8; 16]) -> Digest {
    Digest(blake3::hash(&id).into())
}

/// When an error of a store that answered nevertheless takes its link down again.
struct Calm {
    pause: Duration,
    until: Instant,
}

/// A disk whose store may not have been reached yet.
pub struct Late {
    size: u64,
    read_only: bool,
    device: OnceLock<Arc<StoreDevice>>,
    epochs: OnceLock<Epochs>,
    /// Why it is not there.
    why: Mutex<Option<String>>,
    /// What is told when the store cannot be reached, and this for the thread that looks.
    remote: OnceLock<(Weak<LocalRemote>, Weak<Late>)>,
    /// Its cache.
    local: OnceLock<Weak<dyn Local>>,
    /// Why it will never be there again.
    gone: OnceLock<DeviceError>,
    /// The link was taken down, and a thread looks whether it still holds.
    is_down: AtomicBool,
    calm: Mutex<Calm>,
    ended: AtomicBool,
}

impl Late {
    /// An open disk.
    pub fn of(device: Arc<StoreDevice>) -> Late {
        let late = Late::away(
            device.size(),
            device.capabilities().read_only,
            String::new(),
        );
        late.is_here(device);
        late
    }

    /// One whose store cannot be reached.
    pub fn away(size: u64, read_only: bool, why: String) -> Late {
        Late {
            size,
            read_only,
            device: OnceLock::new(),
            epochs: OnceLock::new(),
            why: Mutex::new(Some(why)),
            remote: OnceLock::new(),
            local: OnceLock::new(),
            gone: OnceLock::new(),
            is_down: AtomicBool::new(false),
            calm: Mutex::new(Calm {
                pause: Duration::ZERO,
                until: Instant::now(),
            }),
            ended: AtomicBool::new(false),
        }
    }

    fn is_here(&self, device: Arc<StoreDevice>) {
        let _ = self.epochs.set(Epochs::new(Arc::clone(&device)));
        let _ = self.device.set(device);
        *self.why.lock() = None;
    }

    /// The disk, if it is open.
    pub fn opened(&self) -> Option<&Arc<StoreDevice>> {
        self.device.get()
    }

    /// Why it cannot be used any more, if it cannot.
    pub fn trouble(&self) -> Option<DeviceError> {
        let trouble = || self.device.get().and_then(|device| device.trouble());
        self.gone.get().cloned().or_else(trouble)
    }

    /// The remote of a cache before it.
    pub fn behind(self: &Arc<Self>, remote: &Arc<LocalRemote>) -> Arc<dyn Remote> {
        if let Some(why) = self.why() {
            remote.cut(&why);
        }
        let known = (Arc::downgrade(remote), Arc::downgrade(self));
        let _ = self.remote.set(known);
        Arc::new(Watched {
            remote: Arc::clone(remote),
            late: Arc::clone(self),
        })
    }

    fn why(&self) -> Option<String> {
        self.why.lock().clone()
    }

    /// Nothing more is done for it.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The mount did not begin: nobody will use it.
    pub fn give_up(&self) {
        self.end();
        if let Some(device) = self.device.get()
            && let Err(e) = device.abandon()
        {
            tracing::warn!("the lease was not given back: {e}");
        }
    }

    /// Looks every so often whether its lease is still its own, which an idle disk would hear of at its next request only.
    pub fn watch(self: &Arc<Self>) {
        if self.read_only {
            return;
        }
        let late = Arc::downgrade(self);
        let watching = std::thread::Builder::new().name("store-watch".into());
        let watching = watching.spawn(move || {
            loop {
                std::thread::sleep(LOOK_EVERY);
                let Some(late) = late.upgrade().filter(|late| !late.has_ended()) else {
                    return;
                };
                if let Some(device) = late.opened()
                    && late.seen(device.check()).is_err()
                    && late.trouble().is_some()
                {
                    return;
                }
            }
        });
        if let Err(e) = watching {
            tracing::warn!("{e}");
        }
    }

    /// Opens it when its store can be reached again; tries no more when it is not the disk `image`, or is refused.
    pub fn open_some_time(&self, opening: &Opening, image: Digest, remote: &LocalRemote) {
        let is_it = |id, size| digest(id) == image && size == self.size;
        let mut pause = AGAIN;
        loop {
            std::thread::sleep(pause);
            if self.has_ended() {
                return;
            }
            // Another disk's lease is not taken.
            let opened = match opening.look() {
                Some((id, size)) if !is_it(id, size) => Err(Failed::Finally(opening.is_another())),
                _ => opening.open(),
            };
            let (why, is_final) = match opened {
                Ok(device) if is_it(device.id(), device.size()) => {
                    if self.has_ended() {
                        // Its lease is that of the cache, and stays.
                        return;
                    }
                    self.is_here(Arc::new(device));
                    remote.mend();
                    return;
                }
                Ok(device) => {
                    if let Err(e) = device.abandon() {
                        tracing::warn!("{e}");
                    }
                    (one_line(&opening.is_another()), true)
                }
                Err(Failed::Away(why)) => (why, false),
                Err(Failed::Store(error)) => (one_line(&error), false),
                Err(Failed::Finally(error)) => (one_line(&error), true),
            };
            if self.why().as_ref() != Some(&why) {
                tracing::warn!("{why}");
                *self.why.lock() = Some(why.clone());
                remote.cut(&why);
            }
            if is_final {
                self.lose(DeviceError::Io(Arc::new(io::Error::other(why))));
                return;
            }
            pause = longer(pause);
        }
    }

    /// It is gone for good: its cache stops, as it could acknowledge what no store will ever get.
    fn lose(&self, error: DeviceError) {
        if self.gone.set(error.clone()).is_ok()
            && let Some(local) = self.local.get().and_then(Weak::upgrade)
        {
            local.link(Link::Gone(error));
        }
    }

    /// Passes a result on. If the store could not be reached, its link is down until it can; if it has lost the disk or the
    /// lease, it is gone.
    fn seen<T>(&self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let Err(error) = &result {
            match self.device.get().and_then(|device| device.trouble()) {
                Some(error) => self.lose(error),
                None if error.is_transient() => self.may_be_away(error),
                None => {}
            }
        }
        result
    }

    fn may_be_away(&self, error: &DeviceError) {
        let Some((remote, late)) = self.remote.get() else {
            return;
        };
        let Some(there) = remote.upgrade() else {
            return;
        };
        if Instant::now() < self.calm.lock().until || self.is_down.swap(true, Ordering::AcqRel) {
            return;
        }
        let why = error.to_string();
        tracing::warn!("{why}");
        there.cut(&why);
        let (remote, late) = (Weak::clone(remote), Weak::clone(late));
        let looking = std::thread::Builder::new().name("store-look".into());
        if let Err(e) = looking.spawn(move || look(&late, &remote, why)) {
            tracing::warn!("{e}");
            there.mend();
            self.is_down.store(false, Ordering::Release);
        }
    }

    /// Its store answers. One that does so at once is there, but refuses or fails something: its errors take the link down
    /// more and more rarely.
    fn is_back(&self, was_away: bool, remote: &LocalRemote) {
        {
            let mut calm = self.calm.lock();
            calm.pause = match was_away {
                true => Duration::ZERO,
                false => longer(calm.pause),
            };
            calm.until = Instant::now() + calm.pause;
        }
        remote.mend();
        self.is_down.store(false, Ordering::Release);
    }

    fn device(&self) -> Result<&StoreDevice, DeviceError> {
        let device = self.device.get().map(|device| &**device);
        device.ok_or_else(|| DeviceError::Unavailable(self.why().unwrap_or_default()))
    }

    fn epochs(&self) -> Result<&Epochs, DeviceError> {
        let epochs = self.epochs.get();
        epochs.ok_or_else(|| DeviceError::Unavailable(self.why().unwrap_or_default()))
    }
}

/// Waits until a store answers, and takes its link up then.
fn look(late: &Weak<Late>, remote: &Weak<LocalRemote>, mut why: String) {
    let mut pause = Duration::ZERO;
    loop {
        std::thread::sleep(pause);
        let Some(late) = late.upgrade().filter(|late| !late.has_ended()) else {
            return;
        };
        let Some(device) = late.device.get() else {
            return;
        };
        let reached = device.reach();
        let Some(remote) = remote.upgrade().filter(|_| !late.has_ended()) else {
            return;
        };
        match reached {
            Err(error) if error.is_transient() => {
                let now = error.to_string();
                if now != why {
                    why = now;
                    remote.cut(&why);
                }
            }
            // Another error is met by the next request.
            _ => return late.is_back(pause > Duration::ZERO, &remote),
        }
        pause = longer(pause);
    }
}

impl Committer for Late {
    fn committed(&self) -> Epoch {
        // Asked for only when the link is up.
        self.epochs.get().map_or(Epoch(0), Epochs::committed)
    }

    fn push(&self, epoch: Epoch, changes: &[Change]) -> Result<(), DeviceError> {
        self.seen(self.epochs()?.push(epoch, changes))
    }

    fn commit(&self, epoch: Epoch, covers: u64) -> Result<(), DeviceError> {
        let committed = self.seen(self.epochs()?.commit(epoch, covers));
        if committed.is_ok() {
            let mut calm = self.calm.lock();
            (calm.pause, calm.until) = (Duration::ZERO, Instant::now());
        }
        committed
    }

    fn abandon(&self) -> Result<(), DeviceError> {
        self.epochs.get().map_or(Ok(()), Committer::abandon)
    }
}

impl BlockDevice for Late {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        match self.device.get() {
            Some(device) => device.capabilities(),
            None => Capabilities {
                read_only: self.read_only,
                fast_zeroes: !self.read_only,
                trim: !self.read_only,
                durable: false,
                extents: true,
                alignment: 1,
                preferred: 4096,
                longest: u32::MAX,
            },
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.seen(self.device()?.read(offset, buffer))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.device()?.write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.device()?.write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.device()?.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.device()?.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        match self.device.get() {
            Some(device) => device.extents(offset, length),
            None => {
                check_range(offset, length, self.size)?;
                let kind = ExtentKind::Data;
                Ok(vec![Extent {
                    offset,
                    length,
                    kind,
                }])
            }
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        let device = self.device.get();
        device.map_or(Cost::Network, |device| device.cost(offset, length))
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        let device = self.device.get();
        device.map_or(Cost::Network, |device| device.write_cost(offset, length))
    }
}

/// A [`LocalRemote`] that is gone when its disk is.
struct Watched {
    remote: Arc<LocalRemote>,
    late: Arc<Late>,
}

impl Remote for Watched {
    fn shape(&self) -> Shape {
        self.remote.shape()
    }

    fn read_only(&self) -> bool {
        self.remote.read_only()
    }

    fn attach(&self, local: Weak<dyn Local>) {
        let _ = self.late.local.set(Weak::clone(&local));
        self.remote.attach(local);
    }

    fn fetch(&self, chunks: Chunks) {
        self.remote.fetch(chunks);
    }

    fn kick(&self) {
        self.remote.kick();
    }

    fn presence(&self, chunks: Chunks, done: PresenceDone) {
        self.remote.presence(chunks, done);
    }

    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: Done) {
        self.remote.push(epoch, changes, done);
    }

    fn staged(&self, epoch: Epoch, from: u64, done: StagedDone) {
        self.remote.staged(epoch, from, done);
    }

    fn commit(&self, epoch: Epoch, covers: u64, done: Done) {
        self.remote.commit(epoch, covers, done);
    }

    fn committed(&self) -> Epoch {
        self.remote.committed()
    }

    fn link(&self) -> Link {
        let gone = self.late.gone.get().cloned();
        gone.map_or_else(|| self.remote.link(), Link::Gone)
    }

    fn traffic(&self) -> Traffic {
        self.remote.traffic()
    }

    fn close(&self, done: Done) {
        self.remote.close(done);
    }
}
