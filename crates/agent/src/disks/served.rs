//! One disk in a store that a site serves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Digest, ExtentKind, ImageName};
use drover_device::backend::StoreDevice;
use drover_device::backend::chunk_store::{OpenError, StoreAddress, StoreOptions};
use drover_device::local_remote::Committer;
use drover_mount::server::{Base, WriteThrough};
use drover_net::{Code, Peer, Refusal, Right};
use drover_store::lease::Access;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::record::{Opened, Records, random};
use super::told::Told;
use crate::error::{Result, one_line};
use crate::home::Home;
use crate::rights;
use crate::text::now_unix;

/// Threads for the reads of a disk: each waits for its store.
const THREADS: usize = 16;
/// The first pause between attempts to open one; each is twice as long.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest one.
const MAX_PAUSE: Duration = Duration::from_secs(20);
/// How often it is looked whether it can still be used, as its requests have found.
const GLANCE_EVERY: Duration = Duration::from_secs(1);
/// How often the store is asked whether the lease is still the site's.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long giving a lease back may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(15);

/// A disk in a store under a name of this site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskToServe {
    /// Its name here.
    pub name: ImageName,
    /// Where it is.
    pub store: StoreAddress,
    /// Nobody writes it through this site, which takes no lease.
    pub read_only: bool,
}

/// Of a disk that a site serves, for its own user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub store: String,
    /// Whether nobody writes it through this site.
    pub read_only: bool,
    /// Its size in bytes, once it was opened.
    pub size: Option<u64>,
    /// `open`, `waiting` for its store or for its lease, or `lost` until the site is started again.
    pub state: String,
    /// Why it is not open, or what the store answered last that was an error.
    pub why: Option<String>,
}

/// How opening a disk has ended.
pub enum Tried {
    /// It is open.
    Open,
    /// Not yet: its store does not answer, or somebody else writes it.
    Waits(String),
    /// It never will be.
    Never(String),
}

/// What is known of an open disk.
pub struct About {
    /// What its contents are known by, apart from epochs.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes of it that are not absent.
    pub stored: u64,
    /// Since when it has been open, seconds since 1970.
    pub since_unix: i64,
}

enum State {
    Waits(String),
    Open {
        told: Arc<Told>,
        digest: Digest,
        since_unix: i64,
    },
    /// Its lease was broken, or the store has lost it.
    Lost(String),
    Closed,
}

/// A disk in a store that a site serves.
pub struct ServedDisk {
    disk: DiskToServe,
    records: Records,
    /// For messages.
    site: String,
    state: Mutex<State>,
    /// The site stops.
    stopped: Condvar,
}

impl ServedDisk {
    /// One that is not open yet.
    pub fn new(home: &Home, disk: DiskToServe) -> ServedDisk {
        ServedDisk {
            records: Records::new(home.stores_dir(), &disk.name),
            disk,
            site: home.name(),
            state: Mutex::new(State::Waits("its store has not answered".into())),
            stopped: Condvar::new(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &ImageName {
        &self.disk.name
    }

    /// The kind of its store, for people.
    pub fn kind(&self) -> &'static str {
        self.disk.store.kind()
    }

    /// Opens it, tries again if that may help, and then looks whether it can still be used, until it cannot or is closed.
    /// `tried` is told how the first attempt ended, `lose` when it can no longer be used.
    pub fn serve(&self, tried: &dyn Fn(Tried), lose: &mpsc::Sender<(ImageName, String)>) {
        let name = self.name();
        let mut pause = PAUSE;
        let mut first = Some(tried);
        let mut said = String::new();
        let told = loop {
            match self.open() {
                Ok(told) => {
                    first.take().inspect(|tried| tried(Tried::Open));
                    tracing::info!(disk = %name, store = %self.disk.store, "a disk in a store is served");
                    break told;
                }
                Err(Failed::Waits(why)) => {
                    let tell = first.take();
                    if tell.is_none() && said != why {
                        tracing::warn!(disk = %name, "{why}");
                    }
                    said.clone_from(&why);
                    if !self.becomes(State::Waits(why.clone())) {
                        return;
                    }
                    tell.inspect(|tried| tried(Tried::Waits(why)));
                }
                Err(Failed::Never(why)) => {
                    if first.is_none() {
                        tracing::error!(disk = %name, "{why}");
                    }
                    self.becomes(State::Lost(why.clone()));
                    first.take().inspect(|tried| tried(Tried::Never(why)));
                    return;
                }
            }
            if self.stops_within(pause) {
                return;
            }
            pause = (pause * 2).min(MAX_PAUSE);
        };
        let mut looked = Instant::now();
        while !self.stops_within(GLANCE_EVERY) {
            let device = told.device();
            if device.trouble().is_none() && looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                match device.check() {
                    Ok(()) => told.is_well(),
                    Err(error) => told.note(&error),
                }
            }
            if let Some(error) = device.trouble() {
                let why = error.to_string();
                if self.becomes(State::Lost(why.clone())) {
                    // The site has stopped when nobody hears it.
                    let _ = lose.blocking_send((name.clone(), why));
                }
                return;
            }
        }
    }

    /// Changes what it is, unless it was closed; whether it was changed.
    fn becomes(&self, now: State) -> bool {
        let mut state = self.state.lock();
        let is_open = !matches!(*state, State::Closed);
        if is_open {
            *state = now;
        }
        is_open
    }

    /// Waits; whether it was closed meanwhile.
    fn stops_within(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut state = self.state.lock();
        while !matches!(*state, State::Closed) {
            if self.stopped.wait_until(&mut state, until).timed_out() {
                return matches!(*state, State::Closed);
            }
        }
        true
    }

    /// Opens it once.
    fn open(&self) -> Result<Arc<Told>, Failed> {
        let never = |error: &crate::error::Error| Failed::Never(one_line(error));
        let address = self.disk.store.to_string();
        let store = self.disk.store.store();
        let store = store.map_err(|e| Failed::of(e.into(), &self.disk))?;
        let mut record = self.records.load(&address).map_err(|e| never(&e))?;
        let mut options = StoreOptions::new(record.token, &format!("the site {}", self.site));
        options.read_only = self.disk.read_only;
        let device = StoreDevice::open(store, &options);
        let device = Arc::new(device.map_err(|e| Failed::of(e, &self.disk))?);
        let contents = match self.disk.read_only {
            // As it is now: it does not change while it is open.
            true => [
                &device.id()[..],
                &device.session().to_le_bytes(),
                &device.epoch().0.to_le_bytes(),
            ]
            .concat(),
            false => {
                let random = random().map_err(|e| never(&e))?;
                let now = Opened::next(record.opened, &device, random);
                record.opened = Some(now);
                if let Err(error) = self.records.store(&record) {
                    give_back(&device);
                    return Err(never(&error));
                }
                [&now.disk[..], &now.line].concat()
            }
        };
        let digest = Digest(blake3::hash(&contents).into());
        let told = Arc::new(Told::new(device, self.name().clone()));
        let open = State::Open {
            told: Arc::clone(&told),
            digest,
            since_unix: now_unix(),
        };
        if !self.becomes(open) {
            give_back(told.device());
        }
        Ok(told)
    }

    /// What the server of mounts reads and writes.
    ///
    /// # Errors
    /// [`Refusal`]: it is not open.
    pub fn base(&self) -> Result<Base, Refusal> {
        let (told, digest) = self.opened()?;
        let committer = Arc::clone(&told) as Arc<dyn Committer>;
        let threads = THREADS;
        Ok(Base {
            through: Some(WriteThrough { committer, threads }),
            device: told,
            digest,
            arriving: None,
        })
    }

    /// What its contents are known by, apart from epochs.
    ///
    /// # Errors
    /// As [`ServedDisk::base`].
    pub fn digest(&self) -> Result<Digest, Refusal> {
        Ok(self.opened()?.1)
    }

    fn opened(&self) -> Result<(Arc<Told>, Digest), Refusal> {
        let (name, site) = (self.name(), &self.site);
        match &*self.state.lock() {
            State::Open { told, digest, .. } if told.device().trouble().is_none() => {
                Ok((Arc::clone(told), *digest))
            }
            State::Open { .. } | State::Lost(_) => Err(lost(name, site)),
            State::Waits(_) => {
                let text = format!("{name} is in a store that {site} cannot use at the moment");
                Err(Refusal::new(Code::Unavailable, text))
            }
            State::Closed => {
                let text = format!("{site} is stopping");
                Err(Refusal::new(Code::Unavailable, text))
            }
        }
    }

    /// Checks that a peer, which may read, may use it so.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn allow(&self, peer: &Peer, access: Access) -> Result<(), Refusal> {
        let (name, site) = (self.name(), &self.site);
        match access {
            Access::ReadOnly => Ok(()),
            Access::ReadWrite => {
                rights::must_have(peer, Right::Write, site)?;
                if self.disk.read_only {
                    let text = format!("{site} serves {name} for reading only: mount it read-only");
                    return Err(Refusal::new(Code::Denied, text));
                }
                Ok(())
            }
            Access::Standby => {
                let text = format!(
                    "{name} is a disk in a store: its lease cannot be handed over; unmount it where it is written, and then mount it here"
                );
                Err(Refusal::new(Code::Unsupported, text))
            }
        }
    }

    /// What is known of it; none if it is not open.
    pub fn about(&self) -> Option<About> {
        let (told, digest, since_unix) = match &*self.state.lock() {
            State::Open {
                told,
                digest,
                since_unix,
            } => (Arc::clone(told), *digest, *since_unix),
            _ => return None,
        };
        let device = told.device();
        Some(About {
            digest,
            size: device.size(),
            stored: stored(device),
            since_unix,
        })
    }

    /// For the site's own user.
    pub fn status(&self) -> DiskStatus {
        let (state, why, size) = match &*self.state.lock() {
            State::Waits(why) => ("waiting", Some(why.clone()), None),
            State::Open { told, .. } => ("open", told.last(), Some(told.device().size())),
            State::Lost(why) => ("lost", Some(why.clone()), None),
            State::Closed => ("closed", None, None),
        };
        DiskStatus {
            name: self.name().to_string(),
            store: self.disk.store.to_string(),
            read_only: self.disk.read_only,
            size,
            state: state.to_owned(),
            why,
        }
    }

    /// Gives the lease back, as far as the store answers soon.
    pub fn close(&self) {
        let was = std::mem::replace(&mut *self.state.lock(), State::Closed);
        self.stopped.notify_all();
        if let State::Open { told, .. } = was {
            give_back(told.device());
        }
    }
}

/// What a mount is told whose disk the site can no longer use.
pub fn lost(name: &ImageName, site: &str) -> Refusal {
    let text = format!(
        "{site} can no longer use {name}: it has lost the write lease that it had in the disk's store, or the store has lost the disk"
    );
    Refusal::new(Code::Lost, text)
}

/// Gives a lease back; what was not committed is dropped. Waits for [`RELEASE_LIMIT`] at most.
fn give_back(device: &Arc<StoreDevice>) {
    if device.capabilities().read_only || device.trouble().is_some() {
        return;
    }
    let (done, is_done) = std::sync::mpsc::channel();
    let device = Arc::clone(device);
    let giving = std::thread::Builder::new().name("served-disk-end".into());
    let giving = giving.spawn(move || done.send(device.abandon()));
    match giving.map(|_| is_done.recv_timeout(RELEASE_LIMIT)) {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(e))) => tracing::warn!("the lease was not given back: {e}"),
        Ok(Err(_)) => tracing::warn!("the lease was not given back: the store does not answer"),
        Err(e) => tracing::warn!("the lease was not given back: {e}"),
    }
}

/// Bytes that are not absent.
fn stored(device: &StoreDevice) -> u64 {
    let (mut at, mut stored) = (0, 0);
    while at < device.size() {
        let Ok(runs) = device.extents(at, device.size() - at) else {
            break;
        };
        let data = runs.iter().filter(|run| run.kind == ExtentKind::Data);
        stored += data.map(|run| run.length).sum::<u64>();
        match runs.last() {
            Some(last) => at = last.end(),
            None => break,
        }
    }
    stored
}

impl Opened {
    /// The record of a disk that was opened now, after `before`. If the lease was its own, or nobody has had it since, it has
    /// what this site knows.
    fn next(before: Option<Opened>, device: &StoreDevice, random: [u8; 16]) -> Opened {
        let (disk, session) = (device.id(), device.session());
        let is_next = |before: &Opened| {
            before.disk == disk && (device.is_resumed() || before.session + 1 == session)
        };
        let line = before.filter(is_next).map_or(random, |before| before.line);
        Opened {
            disk,
            session,
            line,
        }
    }
}

/// Why a disk was not opened.
enum Failed {
    Waits(String),
    Never(String),
}

impl Failed {
    fn of(error: OpenError, disk: &DiskToServe) -> Failed {
        let store = &disk.store;
        match &error {
            OpenError::Absent(_) => Failed::Never(format!(
                "{error}; `drover export '{store}' --size SIZE --nbd unix:/run/new.sock` makes one, as mount and attach do"
            )),
            OpenError::Held { .. } => Failed::Waits(format!(
                "{error}; if that is gone for good, `drover mounts break '{store}'` ends its lease"
            )),
            OpenError::Store(drover_core::DeviceError::Unsupported(_)) => {
                Failed::Never(error.to_string())
            }
            // What a store refuses today it may not refuse tomorrow.
            OpenError::Store(_) => Failed::Waits(error.to_string()),
            _ => Failed::Never(error.to_string()),
        }
    }
}
