//! From a target to a device: an image over the network with or without a cache, one of this site, or a local disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError, Digest, ImageName};
use drover_device::builder::{Managed, Stack};
use drover_device::remote::{Chunks, Link, Remote, Shape};
use drover_device::synced::{Order, PullHandle, Pushing, Sync, SyncedOptions};
use drover_mount::MountError;
use drover_mount::client::{self, Client, Connector};
use drover_mount::direct::RemoteDevice;
use drover_mount::protocol::{MAX_SIZE, Opened};
use drover_net::Code;
use drover_storage::HostDirectory;
use drover_store::lease::{Access, MountId};
use tokio::runtime::Handle;

use super::connector::PeerConnector;
use super::left::{Keeps, Untold};
use super::record::{How, Place, Record, SyncMode};
use super::site_images::OwnConnector;
use super::status::DiskStatus;
use super::target::{Prefetch, Target};
use super::{known, local};
use crate::error::{Context, Error, Result, bail, msg};
use crate::home::Home;
use crate::remote::find_peer;
use crate::site;
use crate::text::bytes;

/// How long the other site may take to be there at the start.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// And when there is a cache, so that the mount can begin without it.
const OFFLINE_LIMIT: Duration = Duration::from_secs(3);

/// How long a request that nothing here can answer waits for a site.
const DIRECT_LIMIT: Duration = Duration::from_secs(20);

/// How long pushing may make no progress before an unmount gives it up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes on the link that count as progress: more than what keeps it alive.
const PROGRESS: u64 = 16 << 10;

/// How often is looked whether pushing goes on.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long saying goodbye may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// A disk that is open.
pub struct Disk {
    target: Target,
    mode: &'static str,
    device: Arc<dyn BlockDevice>,
    kind: Kind,
    closed: AtomicBool,
    /// The site had refused to go on before it was closed.
    gone: AtomicBool,
}

enum Kind {
    /// A file or directory of this machine, which no site knows; locked until it is closed.
    Local(local::Lock),
    /// Everything goes to the other site, or to this one for its own images.
    Direct(Arc<Client>),
    /// A cache is in front of the other site.
    Managed {
        managed: Managed,
        client: Arc<Client>,
        record: Option<PathBuf>,
    },
}

/// How the bytes of a target are reached, in a word.
pub fn mode(image: &Target, how: &How) -> &'static str {
    match (&image.local, &image.peer, how.direct) {
        (Some(local), _, _) => local.mode(),
        (None, None, _) => "own",
        (None, Some(_), true) => "direct",
        (None, Some(_), false) => "managed",
    }
}

/// Finds out early what cannot be.
///
/// # Errors
/// A peer that is not known, an order that cannot be read, or written later.
pub fn check(home: &Home, images: &[Target], how: &How) -> Result<()> {
    if let Prefetch::File(path) = &how.prefetch {
        read_order(path)?;
    }
    if let Some(directory) = how.record.as_deref().and_then(Path::parent)
        && !directory.is_dir()
    {
        bail!(
            "cannot record the order of reads: there is no directory {}",
            directory.display()
        );
    }
    let catalog = site::open_catalog(home)?;
    for image in images {
        if let Some(disk) = &image.local {
            local::check(home, &catalog, disk, how)?;
        } else if let Some(peer) = &image.peer {
            find_peer(&catalog, peer)?;
        }
    }
    Ok(())
}

impl Disk {
    /// Opens the image with number `index` of a mount; when the other site cannot be reached, from what is here.
    ///
    /// # Errors
    /// What stands in the way, for a person.
    pub async fn open(
        home: &Home,
        place: &Place,
        record: &Record,
        index: usize,
        image: &Target,
    ) -> Result<Disk> {
        Disk::open_by(home, place, record, index, image, true).await
    }

    /// The same, but only when the site can be reached unless `offline`.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub async fn open_by(
        home: &Home,
        place: &Place,
        record: &Record,
        index: usize,
        image: &Target,
        offline: bool,
    ) -> Result<Disk> {
        let how = &record.how;
        let mode = mode(image, how);
        if let Some(disk) = &image.local {
            let (home, disk, how) = (home.clone(), disk.clone(), how.clone());
            let open = move || local::open(&home, &disk, &how);
            let (device, lock) = tokio::task::spawn_blocking(open).await??;
            return Ok(Disk::new(image, mode, device, Kind::Local(lock)));
        }
        let (connector, site): (Arc<dyn Connector>, _) = match &image.peer {
            None => (Arc::new(OwnConnector::new(home).await?), Vec::new()),
            Some(peer) => {
                let peer = find_peer(&site::open_catalog(home)?, peer)?;
                let key = peer.key.0.to_vec();
                (Arc::new(PeerConnector::new(home.identity()?, peer)), key)
            }
        };
        let access = match how.read_only {
            true => Access::ReadOnly,
            false => Access::ReadWrite,
        };
        let mut options = client::Options::new(ImageName::new(&image.image)?, access);
        options.chunk = how.chunk;
        options.mount = mount_id(record, index);
        options.note = format!("{} at {}", place.name(), home.name());
        options.window = how.window;
        options.first_contact = CONNECT_LIMIT;
        if mode != "managed" {
            options.give_up = DIRECT_LIMIT;
            let client = Client::open(&Handle::current(), connector, options).await;
            let client = Arc::new(client.map_err(|e| unopened(e, image))?);
            let stack = Stack::over(RemoteDevice::new(Arc::clone(&client))).build()?;
            return Ok(Disk::new(image, mode, stack.device, Kind::Direct(client)));
        }
        options.give_up = how.give_up_after;
        let mut left = place.left(index)?;
        let before = remembered(place, index);
        if let Some(found) = &left
            && found.image.is_none()
            && (found.dirty == 0 || before.is_err())
        {
            // It does not say of which image it is.
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
            (e, Some(unread)) if left.is_some() => {
                e.context(format!("cannot mount offline ({unread:#})"))
            }
            (e, _) => e,
        });
        let client = Arc::new(client?);
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
                open_cache(&client, &how, &place.cache(index), identity, was_of)
            };
            match open() {
                Ok((device, managed)) => {
                    let record = how.record;
                    Ok((
                        device,
                        Kind::Managed {
                            managed,
                            client,
                            record,
                        },
                    ))
                }
                Err(e) => {
                    // The right to write stays only with what is to be pushed: nobody could give it back later.
                    // What belongs to an image that is no more never can be.
                    if dirty == 0 || replaced {
                        close_client(&client);
                    }
                    Err(e)
                }
            }
        })
        .await?;
        let (device, kind) = opened?;
        Ok(Disk::new(image, mode, device, kind))
    }

    fn new(image: &Target, mode: &'static str, device: Arc<dyn BlockDevice>, kind: Kind) -> Disk {
        Disk {
            target: image.clone(),
            mode,
            device,
            kind,
            closed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        }
    }

    /// A local disk over any device, locked by a file.
    #[cfg(test)]
    pub fn local(image: &Target, device: Arc<dyn BlockDevice>, lock: std::fs::File) -> Disk {
        Disk::new(image, "file", device, Kind::Local(local::Lock::File(lock)))
    }

    /// The device to show.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.device)
    }

    /// How it is.
    pub fn status(&self) -> DiskStatus {
        let mut status = DiskStatus {
            image: self.target.to_string(),
            mode: self.mode.into(),
            read_only: self.device.capabilities().read_only,
            size: self.device.size(),
            ..DiskStatus::default()
        };
        match &self.kind {
            Kind::Local(_) => {
                status.local = status.size;
                status.link = "up".into();
            }
            Kind::Direct(client) => fill_traffic(&mut status, client.as_ref()),
            Kind::Managed {
                managed, client, ..
            } => {
                fill_traffic(&mut status, client.as_ref());
                let progress = managed.synced.progress();
                let chunk = u64::from(client.shape().chunk);
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
        }
        status
    }

    /// Bytes that the other site does not have.
    pub fn dirty(&self) -> u64 {
        match &self.kind {
            Kind::Local(_) | Kind::Direct(_) => 0,
            Kind::Managed { managed, .. } => managed.push.pending(),
        }
    }

    /// The link to the site that has the image; none for a local disk.
    fn client(&self) -> Option<&Client> {
        match &self.kind {
            Kind::Local(_) => None,
            Kind::Direct(client) | Kind::Managed { client, .. } => Some(client),
        }
    }

    /// The set of writes that is on its way to the other site.
    fn pushing(&self) -> Option<Pushing> {
        match &self.kind {
            Kind::Local(_) | Kind::Direct(_) => None,
            Kind::Managed { managed, .. } => Some(managed.synced.progress().pushing),
        }
    }

    /// Bytes that have left for the other site.
    pub fn sent(&self) -> u64 {
        self.client().map_or(0, |client| client.traffic().sent)
    }

    /// What the site keeps for this disk, which is closed, as it could not be told so.
    pub fn untold(&self) -> Option<Untold> {
        let keeps = match (self.client()?.was_released(), &self.gone) {
            (true, _) => return None,
            (_, gone) if gone.load(Ordering::Acquire) => Keeps::Unknown,
            _ if self.device.capabilities().read_only => Keeps::Read,
            _ => Keeps::Write,
        };
        Some(Untold {
            site: self.target.peer.clone(),
            image: self.target.image.clone(),
            keeps,
        })
    }

    /// Waits until the other site has everything that was written.
    ///
    /// # Errors
    /// Why it has not, at the latest after `limit`, or when nothing has moved for [`PATIENCE`] (but a site that has all
    /// of an epoch, and makes it durable, is waited for while the link is up), or as soon as `give_up` is set. What was not pushed is still here.
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
            Kind::Direct(_) => Ok(self.device.flush()?),
            Kind::Managed { .. } if self.device.capabilities().read_only => Ok(()),
            Kind::Managed {
                managed, client, ..
            } => {
                let pusher = managed.push.clone();
                let (say, hear) = std::sync::mpsc::channel();
                std::thread::Builder::new()
                    .name("push".into())
                    .spawn(move || say.send(pusher.sync()))?;
                self.wait_for_push(client, &hear, limit, give_up)
            }
        }
    }

    /// Whether it is a file or directory of this machine.
    pub fn is_local(&self) -> bool {
        matches!(self.kind, Kind::Local(_))
    }

    /// Makes what was written to a file or directory of this machine durable.
    ///
    /// # Errors
    /// When writes may be lost. It cannot be tried again: the kernel may have dropped them.
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
        client: &Client,
        hear: &Receiver<Result<(), DeviceError>>,
        limit: Option<Duration>,
        give_up: &AtomicBool,
    ) -> Result<()> {
        let began = Instant::now();
        let (mut seen, mut moved) = ((self.dirty(), self.sent()), began);
        loop {
            match hear.recv_timeout(LOOK_EVERY) {
                // Then nothing is left to push, whatever the link's state.
                Ok(Err(e)) if self.dirty() == 0 => {
                    tracing::info!("{}: {e}", self.target);
                    return Ok(());
                }
                Ok(done) => return Ok(done?),
                Err(RecvTimeoutError::Disconnected) => bail!("the push ended without a result"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = (self.dirty(), self.sent());
            let link = client.link();
            let seals = matches!(link, Link::Up(_)) && self.pushing().is_some_and(|p| is_there(&p));
            if seals || now.0 < seen.0 || now.1 > seen.1 + PROGRESS {
                (seen, moved) = (now, Instant::now());
            }
            let link = match link {
                Link::Up(_) => String::new(),
                Link::Down(why) => format!("; {why}"),
                Link::Gone(error) => format!("; {error}"),
            };
            if give_up.load(Ordering::Acquire) {
                bail!("another unmount has overtaken this one");
            }
            if moved.elapsed() > PATIENCE {
                bail!("no progress for {} s{link}", PATIENCE.as_secs());
            }
            if let Some(limit) = limit
                && began.elapsed() > limit
            {
                bail!("not complete within {} s{link}", limit.as_secs());
            }
        }
    }

    /// Closes it. The right to write goes back to the site unless something is still to be pushed there. Closed again,
    /// what could not be kept the first time is tried once more.
    ///
    /// # Errors
    /// When what is here cannot be kept.
    pub fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return match &self.kind {
                Kind::Local(_) | Kind::Direct(_) => Ok(()),
                Kind::Managed { managed, .. } => Ok(managed.synced.close(false)?),
            };
        }
        let gone = |client: &Client| matches!(client.link(), Link::Gone(_));
        if self.client().is_some_and(gone) {
            self.gone.store(true, Ordering::Release);
        }
        match &self.kind {
            Kind::Local(lock) => lock.release(),
            Kind::Direct(client) => close_client(client),
            Kind::Managed {
                managed, record, ..
            } => {
                // The order is only of use for a faster next time: no reason to keep a mount from ending.
                if let Some(path) = record
                    && let Err(e) = write_order(&managed.pull, path)
                {
                    tracing::warn!("{e:#}");
                }
                managed.synced.close(false)?;
            }
        }
        Ok(())
    }

    /// Closes it without keeping what was written and not pushed, and gives the right to write back.
    pub fn discard(&self) {
        if let Err(e) = self.close() {
            tracing::warn!("{}: {e:#}", self.target);
        }
        if let Kind::Managed { client, .. } = &self.kind {
            close_client(client);
        }
    }
}

/// Whether the other site has all of the set that is on its way, and has only to make it count.
fn is_there(pushing: &Pushing) -> bool {
    pushing.bytes > 0 && pushing.staged == pushing.bytes
}

/// What the site said the last time; none when it was never asked.
fn remembered(place: &Place, index: usize) -> Result<Option<Opened>> {
    let known = known::read(&place.known(index));
    if let Err(e) = &known {
        tracing::warn!("{e:#}");
    }
    known
}

/// Takes a cache away that does not say of which image it is, as those of former versions, and that nothing else says it of.
fn forget_former(place: &Place, index: usize, dirty: u64, why: Option<&Error>) -> Result<()> {
    let cache = place.cache(index);
    if dirty > 0 {
        let why = why.map(|e| format!(" ({e:#})")).unwrap_or_default();
        bail!(
            "{} was written by an earlier version of drover and has {} that were not pushed, of an unknown image{why}; push them with that version, or discard them with `drover unmount {} --discard`",
            cache.display(),
            bytes(dirty),
            place.name()
        );
    }
    tracing::info!(
        "{}: the cache was written by an earlier version and is replaced by an empty one",
        place.name()
    );
    place.remove_cache(index)
}

/// Takes a cache away that is of another image or was cut otherwise.
fn begin_anew(place: &Place, index: usize, dirty: u64) -> Result<()> {
    let cache = place.cache(index);
    if dirty > 0 {
        bail!(
            "the image was replaced at the other site, or --chunk has changed, and {} of {} that were not pushed belong to the old image; `drover unmount {} --discard` discards them",
            bytes(dirty),
            cache.display(),
            place.name()
        );
    }
    tracing::info!(
        "{}: the cache is of another image and is replaced by an empty one",
        place.name()
    );
    place.remove_cache(index)
}

/// Says of an image that could not be opened what can be done.
fn unopened(error: MountError, image: &Target) -> Error {
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

/// Opens the cache of an image, and begins to pull.
fn open_cache(
    client: &Arc<Client>,
    how: &How,
    cache: &Path,
    identity: Vec<u8>,
    was_of: Option<Digest>,
) -> Result<(Arc<dyn BlockDevice>, Managed)> {
    let shape = client.shape();
    let prefetch = match &how.prefetch {
        Prefetch::None => Order::None,
        Prefetch::Sequential => Order::Sequential,
        Prefetch::File(path) => {
            let text = read_order(path)?;
            Order::parse(&text, shape).with_context(|| format!("{}", path.display()))?
        }
    };
    let directory = HostDirectory::open_or_create(cache)
        .with_context(|| format!("cannot open {}", cache.display()))?;
    let remote = Arc::clone(client) as Arc<dyn Remote>;
    let mut options = SyncedOptions::new(Arc::new(directory), remote, &identity);
    options.sync = match how.sync {
        SyncMode::Local => Sync::Local,
        SyncMode::Remote => Sync::Remote,
    };
    options.image = client.identity().digest;
    options.former = was_of;
    options.cache_size = how.cache_size;
    options.prefetch = prefetch;
    options.push_interval = how.push_interval;
    options.give_up_after = how.give_up_after;
    options.record_order = how.record.is_some();
    let stack = Stack::managed(options).build()?;
    let managed = stack.managed.context("a managed device has no handles")?;
    Ok((stack.device, managed))
}

fn read_order(path: &Path) -> Result<String> {
    std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the prefetch order {}", path.display()))
}

/// The chunks that a disk without a cache needs first: asked for with the open, before its size is known.
fn wanted(how: &How) -> Vec<u64> {
    let any = Shape {
        size: MAX_SIZE,
        chunk: how.chunk,
    };
    let first = match &how.prefetch {
        // What readers ask for only, and that is not known.
        Prefetch::None => Vec::new(),
        Prefetch::Sequential => vec![Chunks { first: 0, count: 8 }],
        // Whoever opens the cache says what is wrong with it.
        Prefetch::File(path) => match read_order(path) {
            Ok(text) => match Order::parse(&text, any) {
                Ok(Order::List(runs)) => runs,
                _ => Vec::new(),
            },
            Err(_) => Vec::new(),
        },
    };
    let chunks = first.iter().flat_map(|run| run.first..run.end());
    chunks.take(MAX_WANTED).collect()
}

/// More are not asked for with an open.
const MAX_WANTED: usize = 8;

/// Writes the order in which chunks were first read.
fn write_order(pull: &PullHandle, path: &Path) -> Result<()> {
    let text = pull.recorded_text().unwrap_or_default();
    drover_storage::atomic_replace(path, text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The mount's number for one of its images.
fn mount_id(record: &Record, index: usize) -> MountId {
    let mut id = record.id;
    // Leases are of images: two images of one mount need no two secrets, only two numbers.
    id[15] ^= u8::try_from(index).unwrap_or(u8::MAX);
    MountId(id)
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

/// Says goodbye to the site, for as long as that may take, and gives the right to write back.
fn close_client(client: &Client) {
    let (say, hear) = std::sync::mpsc::channel();
    client.close(Box::new(move |result| {
        let _ = say.send(result);
    }));
    match hear.recv_timeout(CLOSE_LIMIT) {
        Ok(Ok(())) => {}
        // See `Disk::untold`.
        Ok(Err(e)) => tracing::warn!("the site was not told that the mount has ended: {e}"),
        Err(_) => tracing::warn!("the site was not told that the mount has ended: no answer"),
    }
}

/// Takes the directory of a mount that never came to be away, unless something is in it that nobody else has, or that
/// was there `before`.
pub fn forget_if_empty(place: &Place, record: &Record, before: bool) {
    let Ok(Some(_kept)) = place.keep() else {
        return;
    };
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
