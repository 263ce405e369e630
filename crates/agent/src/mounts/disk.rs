//! Opens a target as a block device: an image over the network, with or without a cache, an image of this site, or a
//! local disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError, ImageName};
use drover_device::builder::{Managed, Stack};
use drover_device::remote::{Link, Remote};
use drover_device::stage::{ProfileHandle, Profiled};
use drover_device::synced::{NoWrites, Pushing};
use drover_migrate::Movable;
use drover_mount::MountError;
use drover_mount::client::{self, Client, Connector};
use drover_mount::direct::RemoteDevice;
use drover_net::{Code, DEFAULT_DOMAIN};
use drover_store::lease::{Access, MountId, term_text};
use tokio::runtime::Handle;

use super::connector::PeerConnector;
use super::control::HandTo;
use super::lease::Lease;
use super::left::{Keeps, Unnotified};
use super::profiling::{self, Coming};
use super::record::{How, Place, Record};
use super::site_images::OwnConnector;
use super::snapshots::Holder;
use super::status::DiskStatus;
use super::stored::{self, Stored};
use super::target::Target;
use super::{known, launches, local, nearby};
use crate::error::{Context, Error, Result, bail, msg};
use crate::home::Home;
use crate::machines::may_be_written;
use crate::site;
use crate::site::find_peer;
use crate::text::bytes;

mod cache;

pub(super) use cache::open_cache;
use cache::{begin_anew, forget_former, remembered, wanted};

/// Timeout of the first connection to the other site.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// The same when there is a cache, with which the mount can start offline.
const OFFLINE_LIMIT: Duration = Duration::from_secs(3);

/// How long a request waits for the link when there is no cache.
const DIRECT_LIMIT: Duration = Duration::from_secs(20);

/// How long a push may make no progress before an unmount gives up.
const PUSH_STALL_LIMIT: Duration = Duration::from_secs(30);

/// Bytes sent on the link that count as progress: more than keep-alive traffic.
const PROGRESS: u64 = 16 << 10;

/// Interval at which a waiter checks the progress of a push.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// An open disk.
pub struct Disk {
    target: Target,
    mode: &'static str,
    device: Arc<dyn BlockDevice>,
    /// Set for an image of this site that is mounted for writing.
    movable: Option<Arc<Movable>>,
    kind: Kind,
    closed: AtomicBool,
    /// The link was permanently down ([`Link::Gone`]) before the disk was closed.
    gone: AtomicBool,
    /// For calls about its lease.
    lease: Option<Lease>,
    /// Records what is read of it first.
    profile: ProfileHandle,
}

enum Kind {
    /// A local file or directory, an NBD server's export, or a snapshot, outside any site; locked until it is closed.
    Local(local::Lock),
    /// A disk in a store, with or without a cache.
    Stored(Stored),
    /// No cache: every request goes to the site that has the image.
    Direct(Arc<Client>),
    /// A cache in front of the other site.
    Managed {
        managed: Managed,
        client: Arc<Client>,
    },
}

/// The mode of a target, as in [`DiskStatus::mode`].
pub fn mode(image: &Target, how: &How) -> &'static str {
    match (&image.local, &image.peer, how.direct) {
        (Some(local), _, _) => local.mode(how.direct),
        (None, None, _) => "own",
        (None, Some(_), true) => "direct",
        (None, Some(_), false) => "managed",
    }
}

/// Checks the targets and options before anything is created.
///
/// # Errors
/// For an unknown peer, a profile that cannot be read or written, or a local disk that is refused.
pub fn check(home: &Home, images: &[Target], how: &How) -> Result<()> {
    profiling::check(how)?;
    for image in images {
        if let Some(disk) = &image.local {
            local::check(home, disk, how)?;
        } else if let Some(peer) = &image.peer {
            find_peer(&site::open_catalog(home)?, peer)?;
        } else {
            home_of(home, image)?;
        }
    }
    Ok(())
}

/// The home with an image of this site: that of its domain.
pub(super) fn home_of(home: &Home, image: &Target) -> Result<Home> {
    home.domain(image.domain.as_deref().unwrap_or(DEFAULT_DOMAIN))
}

impl Disk {
    /// Opens the target at `index` of a mount's record; if `offline`, from its cache when the other site is unreachable.
    ///
    /// # Errors
    /// When it cannot be opened, with a message for the user.
    pub async fn open(
        home: &Home,
        place: &Place,
        record: &Record,
        index: usize,
        image: &Target,
        offline: bool,
    ) -> Result<Disk> {
        let how = &record.how;
        let mode = mode(image, how);
        if let Some(address) = image.store() {
            let (address, record) = (address.clone(), record.clone());
            let (mount, cache) = (mount_id(&record, index), place.cache(index));
            let open = move || stored::open(&address, &record, mount, &cache, offline);
            let (device, stored) = tokio::task::spawn_blocking(open).await??;
            return Ok(Disk::new(image, mode, device, Kind::Stored(stored)));
        }
        if let Some(disk) = &image.local {
            let (home, disk, how) = (home.clone(), disk.clone(), how.clone());
            let mount = Holder::new(&record.name, mount_id(record, index));
            let cache = place.cache(index);
            let open = move || local::open(&home, &disk, &how, &mount, &cache);
            let (device, lock) = tokio::task::spawn_blocking(open).await??;
            return Ok(Disk::new(image, mode, device, Kind::Local(lock)));
        }
        let mut coming = Coming::none();
        let (connector, site): (Arc<dyn Connector>, _) = match &image.peer {
            None => {
                let of = home_of(home, image)?;
                if !how.read_only {
                    // Also for the mount that holds its write lease.
                    let name = ImageName::new(&image.image)?;
                    may_be_written(&of.disks(), &name, None).map_err(Error::Refused)?;
                }
                let own = OwnConnector::new(&of).await?;
                (Arc::new(own), Vec::new())
            }
            Some(peer) => {
                let peer = find_peer(&site::open_catalog(home)?, peer)?;
                let key = peer.key.0.to_vec();
                if mode == "managed" {
                    coming = Coming::ask(home, &peer, image, how);
                }
                (Arc::new(PeerConnector::new(home.identity()?, peer)), key)
            }
        };
        let lease = Lease::new(&connector, image, mount_id(record, index))?;
        let access = match how.read_only {
            true => Access::ReadOnly,
            false => Access::ReadWrite,
        };
        let mut options = client::Options::new(ImageName::new(&image.image)?, access);
        options.chunk = how.chunk;
        options.mount = mount_id(record, index);
        options.note = format!("{} at {}", place.name(), home.name());
        options.term = how.lease.map(|term| term.as_secs());
        options.window = how.window;
        options.first_contact = CONNECT_LIMIT;
        if mode != "managed" {
            options.give_up = DIRECT_LIMIT;
            if how.launch {
                launches::hold(&mut options);
            }
            let client = Client::open(&Handle::current(), Arc::clone(&connector), options).await;
            let client = Arc::new(client.map_err(|e| unopened(e, image))?);
            let stack = match image.is_own() {
                true => {
                    let (of, mount) = (home_of(home, image)?, mount_id(record, index));
                    Stack::over(nearby::device(&of, &connector, image, mount, &client)?)
                }
                false => Stack::over(RemoteDevice::new(Arc::clone(&client))),
            };
            let stack = stack.build()?;
            let lease = Some(lease);
            if !image.is_own() || how.read_only {
                let disk = Disk::new(image, mode, stack.device, Kind::Direct(client));
                return Ok(Disk { lease, ..disk });
            }
            let (device, movable) = drover_migrate::track(stack.device);
            let disk = Disk::new(image, mode, device, Kind::Direct(client));
            let movable = Some(Arc::new(movable));
            return Ok(Disk {
                movable,
                lease,
                ..disk
            });
        }
        options.give_up = how.give_up_after;
        let mut left = place.left(index)?;
        let before = remembered(place, index);
        if let Some(found) = &left
            && found.image.is_none()
            && (found.dirty == 0 || before.is_err())
        {
            // Its image is unknown.
            forget_former(place, index, found.dirty, before.as_ref().err())?;
            left = None;
        }
        let (before, unread) = match before {
            Ok(before) => (before, None),
            Err(e) => (None, Some(e)),
        };
        let was_of = left.as_ref().and_then(|left| {
            let known = before.as_ref().map(|known| known.identity.digest);
            left.image.or(known)
        });
        if offline
            && !record.handing_over
            && let (Some(left), Some(known)) = (&left, &before)
            && was_of == Some(known.identity.digest)
            && left.shape == known.shape()
            && known.chunk == how.chunk
            && known.read_only == how.read_only
        {
            options.known = Some(known.clone());
            options.first_contact = OFFLINE_LIMIT;
        }
        if left.is_none() {
            options.wanted = wanted(how);
        }
        let client = Client::open(&Handle::current(), connector, options).await;
        let client = client.map_err(|e| match (unopened(e, image), &unread) {
            (e, _) if record.handing_over => e.context(format!(
                "the write lease of {} was being handed over when this mount ended, and only the site knows whether it was",
                image.image
            )),
            (e, Some(unread)) if left.is_some() => {
                e.context(format!("cannot mount offline ({unread:#})"))
            }
            (e, _) => e,
        });
        let client = Arc::new(client?);
        let profile = match client.was_reached() {
            true => coming.soon().await,
            false => None,
        };
        let identity = [site.as_slice(), b"\n", image.image.as_bytes()].concat();
        let (how, place) = (how.clone(), place.clone());
        let opened = tokio::task::spawn_blocking(move || -> Result<_> {
            let dirty = left.as_ref().map_or(0, |left| left.dirty);
            let now = client.identity().digest;
            let replaced = client.was_reached() && was_of.is_some_and(|digest| digest != now);
            let open = || -> Result<_> {
                if client.was_reached() {
                    if replaced || left.is_some_and(|left| left.shape != client.shape()) {
                        begin_anew(&place, index, dirty)?;
                    }
                    known::write(&place.known(index), client.opened())?;
                }
                let cache = place.cache(index);
                open_cache(&client, &how, profile.as_ref(), &cache, identity, was_of)
            };
            match open() {
                Ok((device, managed)) => Ok((device, Kind::Managed { managed, client })),
                Err(e) => {
                    // Keep the lease only for dirty data that can still be pushed: without it, no later unmount would
                    // release the lease. Dirty data of a replaced image can never be pushed.
                    if dirty == 0 || replaced {
                        close_client(&client);
                    }
                    Err(e)
                }
            }
        })
        .await?;
        let (device, kind) = opened?;
        if let Kind::Managed { managed, client } = &kind {
            let (pull, shape) = (managed.pull.clone(), client.shape());
            coming.later(move |profile| pull.set_order(&profiling::order(&profile, shape)));
        }
        let lease = Some(lease);
        Ok(Disk {
            lease,
            ..Disk::new(image, mode, device, kind)
        })
    }

    fn new(image: &Target, mode: &'static str, device: Arc<dyn BlockDevice>, kind: Kind) -> Disk {
        let (device, profile) = profiled(device);
        Disk {
            profile,
            target: image.clone(),
            mode,
            device,
            movable: None,
            kind,
            closed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            lease: None,
        }
    }

    /// A local disk over any device, locked by a file.
    #[cfg(test)]
    pub fn local(image: &Target, device: Arc<dyn BlockDevice>, lock: std::fs::File) -> Disk {
        Disk::new(image, "file", device, Kind::Local(local::Lock::File(lock)))
    }

    /// What is mounted.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The handle that moves it to another site, if it can move.
    pub fn movable(&self) -> Option<Arc<Movable>> {
        self.movable.clone()
    }

    /// Hands its write lease over to a mount that stands by, or checks that this is possible, see [`Lease::hand_over`]. It is
    /// pushed by then.
    ///
    /// # Errors
    /// When it stays, or it is not known whether it does.
    pub fn hand_over(&self, to: HandTo, commit: bool) -> Result<String> {
        match &self.lease {
            Some(lease) if !self.device.capabilities().read_only => {
                let link = || self.client().map_or(0, Client::latest_link);
                lease.hand_over(to, commit, &link)
            }
            _ => bail!(
                "{} has no write lease that could be handed over",
                self.target
            ),
        }
    }

    /// Refuses what a front end that was detached while in use still writes to its cache.
    pub fn hold_writes(&self) -> Option<NoWrites> {
        match &self.kind {
            Kind::Local(_) | Kind::Direct(_) => None,
            Kind::Managed { managed, .. } => Some(managed.push.hold_writes()),
            Kind::Stored(stored) => stored.managed().map(|managed| managed.push.hold_writes()),
        }
    }

    /// Whether its write lease was handed over.
    pub fn was_handed_over(&self) -> bool {
        self.lease.as_ref().is_some_and(Lease::was_handed_over)
    }

    /// Whether it was handed over to another site: nothing is left to write here.
    fn has_moved(&self) -> bool {
        self.movable
            .as_ref()
            .is_some_and(|movable| movable.is_closed())
    }

    /// The block device.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.device)
    }

    /// Records what is read of it first.
    pub fn profile(&self) -> &ProfileHandle {
        &self.profile
    }

    /// Its status.
    pub fn status(&self) -> DiskStatus {
        let mut status = DiskStatus {
            image: self.target.to_string(),
            mode: self.mode.into(),
            read_only: self.device.capabilities().read_only,
            size: self.device.size(),
            profiled: self.profile.progress().map(|(blocks, _)| blocks),
            ..DiskStatus::default()
        };
        match &self.kind {
            Kind::Local(lock) => {
                status.local = lock.local().unwrap_or(status.size);
                status.link = lock
                    .trouble()
                    .map_or("up".into(), |error| error.to_string());
            }
            Kind::Direct(client) => fill_traffic(&mut status, client.as_ref()),
            Kind::Managed { managed, client } => {
                fill_traffic(&mut status, client.as_ref());
                fill_progress(&mut status, managed, u64::from(client.shape().chunk));
            }
            Kind::Stored(stored) => {
                stored.fill(&mut status);
                if let Some(managed) = stored.managed() {
                    fill_progress(&mut status, managed, stored.chunk());
                }
            }
        }
        status
    }

    /// What the user should know about it when it is mounted: that its site grants a shorter lease, or what its store does
    /// not promise.
    pub fn note(&self, how: &How) -> Option<String> {
        if let Kind::Stored(stored) = &self.kind {
            let note = stored.note().filter(|_| !how.read_only)?;
            return Some(format!("{}: {note}", self.target));
        }
        let client = self.client().filter(|client| client.was_reached())?;
        let granted = client.opened().term?;
        if Some(granted) == how.lease.map(|term| term.as_secs()) {
            return None;
        }
        let site = self.target.peer.as_deref().unwrap_or("this site");
        Some(format!(
            "{site} limits leases: when this mount has been out of contact for {}, another mount may take its write lease of {}",
            term_text(granted),
            self.target.image
        ))
    }

    /// Dirty bytes: not yet pushed to the other site.
    pub fn dirty(&self) -> u64 {
        match &self.kind {
            Kind::Local(_) | Kind::Direct(_) => 0,
            Kind::Managed { managed, .. } => managed.push.pending(),
            Kind::Stored(stored) => stored.managed().map_or(0, |managed| managed.push.pending()),
        }
    }

    /// The client of the site that has the image; `None` for a local disk.
    fn client(&self) -> Option<&Client> {
        match &self.kind {
            Kind::Local(_) | Kind::Stored(_) => None,
            Kind::Direct(client) | Kind::Managed { client, .. } => Some(client),
        }
    }

    /// The push in progress; `None` without a cache.
    fn pushing(&self) -> Option<Pushing> {
        match &self.kind {
            Kind::Local(_) | Kind::Direct(_) => None,
            Kind::Managed { managed, .. } => Some(managed.synced.progress().pushing),
            Kind::Stored(stored) => stored.managed().map(|m| m.synced.progress().pushing),
        }
    }

    /// Bytes sent to the other site.
    pub fn sent(&self) -> u64 {
        match &self.kind {
            Kind::Stored(stored) => stored.sent(),
            _ => self.client().map_or(0, |client| client.traffic().sent),
        }
    }

    /// Whether the other site can be reached.
    fn link(&self) -> Option<Link> {
        match &self.kind {
            Kind::Stored(stored) => Some(stored.link()),
            _ => self.client().map(Client::link),
        }
    }

    /// After [`Disk::close`]: the lease that may remain, if the site could not be notified.
    pub fn unnotified(&self) -> Option<Unnotified> {
        if let Kind::Stored(stored) = &self.kind {
            return stored.keeps_lease().then(|| Unnotified {
                site: Some(self.target.to_string()),
                domain: None,
                image: self.target.image.clone(),
                keeps: Keeps::Write,
            });
        }
        let keeps = match (self.client()?.was_released(), &self.gone) {
            (true, _) => return None,
            _ if self.was_handed_over() => return None,
            (_, gone) if gone.load(Ordering::Acquire) => Keeps::Unknown,
            _ if self.device.capabilities().read_only => Keeps::Read,
            _ => Keeps::Write,
        };
        Some(Unnotified {
            site: self.target.peer.clone(),
            domain: self.target.domain.clone(),
            image: self.target.image.clone(),
            keeps,
        })
    }

    /// Pushes all dirty data to the other site and waits until that is done.
    ///
    /// # Errors
    /// When the push fails, takes longer than `limit`, or makes no progress for [`PUSH_STALL_LIMIT`] (except while a
    /// site that has all data of an epoch makes it durable and the link is up), or as soon as `give_up` is set. Data
    /// that was not pushed is still in the cache.
    pub fn push(&self, limit: Option<Duration>, give_up: &AtomicBool) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return match self.dirty() {
                0 => Ok(()),
                n => bail!("{} can no longer be pushed by this process", bytes(n)),
            };
        }
        match &self.kind {
            // See `Disk::flush_local`.
            Kind::Local(_) => Ok(()),
            Kind::Direct(_) if self.has_moved() => Ok(()),
            Kind::Direct(_) => Ok(self.device.flush()?),
            Kind::Managed { .. } | Kind::Stored(_) if self.device.capabilities().read_only => {
                Ok(())
            }
            Kind::Managed { managed, .. } => self.push_managed(managed, limit, give_up),
            Kind::Stored(stored) => match stored.managed() {
                Some(managed) => self.push_managed(managed, limit, give_up),
                None => Ok(self.device.flush()?),
            },
        }
    }

    fn push_managed(
        &self,
        managed: &Managed,
        limit: Option<Duration>,
        give_up: &AtomicBool,
    ) -> Result<()> {
        let pusher = managed.push.clone();
        let (result, done) = std::sync::mpsc::channel();
        std::thread::Builder::new()
            .name("push".into())
            .spawn(move || result.send(pusher.sync()))?;
        self.wait_for_push(&done, limit, give_up)
    }

    /// Whether it is a local file or directory.
    pub fn is_local(&self) -> bool {
        matches!(self.kind, Kind::Local(_))
    }

    /// Makes writes to a local file or directory durable; does nothing for an image.
    ///
    /// # Errors
    /// When writes may be lost. A retry does not help: the kernel may have dropped them.
    pub fn flush_local(&self) -> Result<()> {
        match &self.kind {
            Kind::Local(_) if !self.closed.load(Ordering::Acquire) => self
                .device
                .flush()
                .with_context(|| format!("{}: the last writes may be lost", self.target)),
            _ => Ok(()),
        }
    }

    fn wait_for_push(
        &self,
        done: &Receiver<Result<(), DeviceError>>,
        limit: Option<Duration>,
        give_up: &AtomicBool,
    ) -> Result<()> {
        let began = Instant::now();
        let (mut seen, mut moved) = ((self.dirty(), self.sent()), began);
        loop {
            match done.recv_timeout(POLL_INTERVAL) {
                // Nothing is left to push, so an error of the link does not matter.
                Ok(Err(e)) if self.dirty() == 0 => {
                    tracing::info!("{}: {e}", self.target);
                    return Ok(());
                }
                Ok(result) => return Ok(result?),
                Err(RecvTimeoutError::Disconnected) => bail!("the push ended without a result"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = (self.dirty(), self.sent());
            let link = self.link();
            let sealing =
                matches!(link, Some(Link::Up(_))) && self.pushing().is_some_and(|p| is_staged(&p));
            if sealing || now.0 < seen.0 || now.1 > seen.1 + PROGRESS {
                (seen, moved) = (now, Instant::now());
            }
            let link = match link {
                None | Some(Link::Up(_)) => String::new(),
                Some(Link::Down(why)) => format!("; {why}"),
                Some(Link::Gone(error)) => format!("; {error}"),
            };
            if give_up.load(Ordering::Acquire) {
                bail!("another unmount has overtaken this one");
            }
            if moved.elapsed() > PUSH_STALL_LIMIT {
                bail!("no progress for {} s{link}", PUSH_STALL_LIMIT.as_secs());
            }
            if let Some(limit) = limit
                && began.elapsed() > limit
            {
                bail!("not complete within {} s{link}", limit.as_secs());
            }
        }
    }

    /// Closes the disk, and releases the lease unless dirty data is left to push. Closing again retries to save the
    /// cache, if that failed.
    ///
    /// # Errors
    /// When the cache cannot be saved.
    pub fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return match &self.kind {
                Kind::Local(_) | Kind::Direct(_) => Ok(()),
                Kind::Managed { managed, .. } => Ok(managed.synced.close(false)?),
                Kind::Stored(stored) => stored.close(false),
            };
        }
        let gone = |client: &Client| matches!(client.link(), Link::Gone(_));
        if self.client().is_some_and(gone) {
            self.gone.store(true, Ordering::Release);
        }
        match &self.kind {
            Kind::Local(lock) => lock.release(),
            Kind::Direct(client) => close_client(client),
            Kind::Managed { managed, .. } => managed.synced.close(false)?,
            Kind::Stored(stored) => stored.close(false)?,
        }
        Ok(())
    }

    /// Whether the store that it is in has lost it.
    pub fn is_lost(&self) -> bool {
        matches!(&self.kind, Kind::Stored(stored) if stored.is_lost())
    }

    /// Closes the disk without regard to dirty data, and releases the lease.
    pub fn discard(&self) {
        if let Err(e) = self.close() {
            tracing::warn!("{}: {e:#}", self.target);
        }
        match &self.kind {
            Kind::Managed { client, .. } => close_client(client),
            Kind::Stored(stored) => {
                if let Err(e) = stored.close(true) {
                    tracing::warn!("{}: {e:#}", self.target);
                }
            }
            Kind::Local(_) | Kind::Direct(_) => {}
        }
    }
}

/// Whether the other site has staged all data of the push in progress and only has to commit it.
fn is_staged(pushing: &Pushing) -> bool {
    pushing.bytes > 0 && pushing.staged == pushing.bytes
}

/// The error for an image that cannot be opened, with the way out.
pub(super) fn unopened(error: MountError, image: &Target) -> Error {
    match error {
        MountError::Refused(refusal) if refusal.code == Code::NotFound => {
            Error::no_image(image.peer.as_deref(), &image.image)
        }
        MountError::Unreachable(why) => {
            let site = image.peer.as_deref().unwrap_or("this site");
            msg!(
                "cannot open {} at {site} ({why}); check that `drover serve` is running there and can read the image, then try again",
                image.image
            )
        }
        other => other.into(),
    }
}

/// Lets first reads of a device be recorded, above all else.
fn profiled(device: Arc<dyn BlockDevice>) -> (Arc<dyn BlockDevice>, ProfileHandle) {
    let (stage, handle) = Profiled::new(device);
    (Arc::new(stage), handle)
}

/// The identifier under which the mount leases the image at `index`.
pub(super) fn mount_id(record: &Record, index: usize) -> MountId {
    let mut id = record.id;
    // Each image needs its own identifier, but not its own secret.
    id[15] ^= u8::try_from(index).unwrap_or(u8::MAX);
    MountId(id)
}

fn fill_progress(status: &mut DiskStatus, managed: &Managed, chunk: u64) {
    let progress = managed.synced.progress();
    status.local = (progress.local * chunk).min(status.size);
    status.dirty = progress.dirty_bytes;
    status.seconds_left = progress.seconds_left;
    status.epoch = progress.epoch.count();
    status.pushing = progress.pushing.bytes;
    status.pushed = progress.pushing.staged;
    status.push_failures = progress.pushing.failures;
    status.push_error = progress.pushing.why.map(|e| e.to_string());
    status.trouble = progress.trouble.map(|e| e.to_string());
}

fn fill_traffic(status: &mut DiskStatus, remote: &dyn Remote) {
    let traffic = remote.traffic();
    status.in_flight = traffic.in_flight;
    status.received = traffic.received;
    status.sent = traffic.sent;
    status.rate = traffic.rate;
    status.link = match remote.link() {
        Link::Up(_) => "up".into(),
        Link::Down(why) => why,
        Link::Gone(error) => error.to_string(),
    };
}

/// Closes the session with the site, which releases the lease.
fn close_client(client: &Client) {
    if let Err(e) = client.close_now() {
        // See `Disk::unnotified`.
        tracing::warn!("could not notify the site that the mount has ended: {e}");
    }
}

/// Removes the directory of a mount that failed to start, unless it holds dirty data or the mount existed `before`.
pub fn forget_if_empty(place: &Place, record: &Record, before: bool) {
    let Ok(Some(_kept)) = place.keep() else {
        return;
    };
    // Of one that stood by, which may have got the lease meanwhile.
    let before = before || place.standby().exists();
    match place.dirty(record.images.len()) {
        Ok(0) if !before => {
            if let Err(e) = place.remove() {
                tracing::warn!("{e:#}");
            }
        }
        Ok(_) => {}
        Err(e) => tracing::warn!("{}: {e:#}", place.name()),
    }
}
