//! A mount that stands by: it fills its cache while another mount writes the image, and begins when that hands its write lease
//! over.
//!
//! No program sees the disk before: what is in the cache is of many moments, never of one. The site ends a generation before the
//! first chunk is read, and says in the end what was written since: those chunks are dropped, and the others are the disk's.
//! `docs/decisions/0041-a-lease-is-handed-over.md`.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Capabilities, ImageName};
use drover_device::builder::Managed;
use drover_device::remote::{Epoch, Link, Remote};
use drover_device::stage::{Awaited, AwaitedHandle};
use drover_device::synced::drop_chunks;
use drover_mount::client::{self, Client, Connector};
use drover_mount::protocol::{KEEP_ALIVE, LeaseSeen};
use drover_net::service::{Exchange, Handler, Services};
use drover_net::{Code, DEFAULT_DOMAIN, Peer, PeerKey, Refusal};
use drover_storage::{Directory, Envelope, HostDirectory};
use drover_store::generations::{MAX_SUMMARY_BYTES, Summary};
use drover_store::lease::Access;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::connector::PeerConnector;
use super::control::{self, GetStatus, StopHow};
use super::disk::{CONNECT_LIMIT, mount_id, open_cache, unopened};
use super::front;
use super::lease::Lease;
use super::left::Left;
use super::record::{HeirOf, Place, Record, boot};
use super::status::{DiskStatus, MountState, Status};
use crate::error::{Context, Error, Result, bail, msg, one_line};
use crate::home::Home;
use crate::notice::notice;
use crate::site::{self, find_peer};
use crate::text::{bytes, now_unix};

/// How often a mount that stands by looks at its link, and at its user.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often it asks the site, whose word may have been lost.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// How often it tells how far it is.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// How long a site may not know a mount whose link is up, before that is believed.
const UNKNOWN_LIMIT: Duration = KEEP_ALIVE.dead_after.saturating_mul(2);

/// The pause before a call is made again.
const AGAIN: Duration = Duration::from_millis(250);

/// How long the reply to whoever ended it may take.
const REPLY_LIMIT: Duration = Duration::from_secs(5);

/// The summary of generations when the cache began (`docs/format/mount-known.md`).
const FORMAT: Envelope = Envelope {
    magic: *b"DRVRSBY\0",
    version: 1,
    max_bytes: MAX_SUMMARY_BYTES as u64 + 64,
};

/// How long requests wait for the lease.
const EARLY_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// A front end that is up before its mount has the lease: requests wait.
pub struct Early {
    shown: front::Shown,
    comes: AwaitedHandle,
}

impl Early {
    /// Makes the front end of a mount whose disk has this size.
    fn make(record: &Record, size: u64, capabilities: Capabilities) -> Result<Early> {
        let (device, comes) = Awaited::of(size, capabilities, EARLY_LIMIT)?;
        let shown = front::Shown::early(record, Arc::new(device))?;
        Ok(Early { shown, comes })
    }

    /// The disk is here: the requests that waited go to it.
    ///
    /// # Errors
    /// When it is another one than was seen before.
    pub fn arrive(self, device: Arc<dyn BlockDevice>) -> Result<front::Shown> {
        let Early { shown, comes } = self;
        if !comes.is_for(&*device) {
            Early { shown, comes }.give_up();
            bail!("the disk has another size or other properties than when the mount stood by");
        }
        comes.arrive(device)?;
        Ok(shown)
    }

    /// It does not come.
    pub fn give_up(self) {
        // First the connections: a hypervisor makes new ones, and asks again. An error it would pass on to its machine.
        self.shown.cut();
        self.comes.give_up();
        end_early(self.shown);
    }
}

fn end_early(shown: front::Shown) {
    if let Err(unended) = shown.end(true) {
        tracing::warn!("the front end of a mount that stood by: {}", unended.1);
    }
}

/// Stands by until the mount has the write lease, with a cache that has nothing older than the disk; then the record says that it is a
/// mount like others. `waiting` is called with the bytes that are here, and those of the disk; `is_up` once, when the front end of one
/// that is the heir of a site is up. That front end is returned.
///
/// # Errors
/// When it cannot stand by any more, or was told to end. The cache stays, unless it was unmounted.
pub async fn stand_by(
    home: &Home,
    place: &Place,
    record: &mut Record,
    waiting: &impl Fn(u64, u64) -> Result<()>,
    is_up: impl FnOnce(&front::Shown, &Record) -> Result<()>,
    stopped: &mut watch::Receiver<bool>,
) -> Result<Option<Early>> {
    record.process = std::process::id();
    record.since_unix = now_unix();
    record.boot = boot();
    place.write(record)?;
    let waits = Waits::new(home, place, record)?;
    let socket = place.socket();
    let mut services = Services::new(Refusal::new(
        Code::Unsupported,
        "this mount only stands by: it does not support this request yet",
    ));
    let shown = Arc::new(Shown::new(&waits));
    services.handle::<GetStatus>(Requests(Arc::clone(&shown)));
    services.handle::<StopHow>(Requests(Arc::clone(&shown)));
    let own = super::own(home.identity()?.key(), DEFAULT_DOMAIN);
    let listens = control::listen(&socket, own, services)?;
    let mut front = EarlyFront::new(&waits.record, is_up);
    let got = waits.wait(&shown, waiting, &mut front, stopped).await;
    if let Err(End::Unmounted(left)) = &got {
        shown.left.lock().replace(left.clone());
        shown.ended.notify_waiters();
        let _ = timeout(REPLY_LIMIT, shown.replied.notified()).await;
    }
    listens.abort();
    // Its socket is gone then.
    let _ = listens.await;
    let got = match got {
        Ok(()) => {
            record.how.standby = false;
            place.write(record)
        }
        Err(End::Failed(e)) => Err(e),
        Err(End::Unmounted(_)) => Err(msg!("{} was unmounted while it stood by", place.name())),
    };
    match (got, front.early) {
        (Ok(()), early) => Ok(early),
        (Err(e), early) => {
            if let Some(early) = early {
                early.give_up();
            }
            Err(e)
        }
    }
}

/// The front end of a mount that is the heir of a site, once it is up.
struct EarlyFront<'a, F> {
    record: &'a Record,
    is_up: Option<F>,
    early: Option<Early>,
}

impl<'a, F: FnOnce(&front::Shown, &Record) -> Result<()>> EarlyFront<'a, F> {
    fn new(record: &'a Record, is_up: F) -> Self {
        let is_wanted = record.how.heir_of.is_some();
        Self {
            record,
            is_up: is_wanted.then_some(is_up),
            early: None,
        }
    }

    /// The mount stands by: makes the front end, unless it is up or not wanted.
    fn begin(&mut self, device: &dyn BlockDevice) -> Result<()> {
        let Some(is_up) = self.is_up.take() else {
            return Ok(());
        };
        // The cache is read-only as long as it stands by.
        let writable = Capabilities {
            read_only: false,
            fast_zeroes: true,
            trim: true,
            ..device.capabilities()
        };
        let early = self
            .early
            .insert(Early::make(self.record, device.size(), writable)?);
        is_up(&early.shown, self.record)
    }
}

/// Why a mount stands by no more, without the lease.
enum End {
    Failed(Error),
    Unmounted(Left),
}

impl<E: Into<Error>> From<E> for End {
    fn from(e: E) -> End {
        End::Failed(e.into())
    }
}

/// A mount that stands by.
struct Waits {
    place: Place,
    record: Record,
    connector: Arc<dyn Connector>,
    lease: Lease,
    options: client::Options,
    /// Of the cache, as for any mount.
    identity: Vec<u8>,
    /// Whether a mount had the write lease when the site was last asked.
    had_writer: AtomicBool,
}

/// How its waiting ended.
enum Waited {
    /// It holds the lease.
    Held,
    /// The site did not record what was written when it began, and does now: the cache begins anew.
    Again,
}

impl Waits {
    fn new(home: &Home, place: &Place, record: &Record) -> Result<Waits> {
        let [image] = record.images.as_slice() else {
            bail!("a mount of several images cannot stand by: mount each of them alone");
        };
        let Some(peer) = &image.peer else {
            bail!("{image} is not an image of a peer: nothing stands by for it");
        };
        let peer = find_peer(&site::open_catalog(home)?, peer)?;
        let identity = [&peer.key.0[..], b"\n", image.image.as_bytes()].concat();
        let connector: Arc<dyn Connector> = Arc::new(PeerConnector::new(home.identity()?, peer));
        let (how, mount) = (&record.how, mount_id(record, 0));
        let mut options = client::Options::new(ImageName::new(&image.image)?, Access::Standby);
        options.chunk = how.chunk;
        options.mount = mount;
        options.note = format!("{} at {}", place.name(), home.name());
        options.term = how.lease.map(|term| term.as_secs());
        options.window = how.window;
        options.first_contact = CONNECT_LIMIT;
        options.give_up = how.give_up_after;
        Ok(Waits {
            lease: Lease::new(&connector, image, mount)?,
            place: place.clone(),
            record: record.clone(),
            connector,
            options,
            identity,
            had_writer: AtomicBool::new(true),
        })
    }

    async fn wait(
        &self,
        shown: &Shown,
        waiting: &impl Fn(u64, u64) -> Result<()>,
        front: &mut EarlyFront<'_, impl FnOnce(&front::Shown, &Record) -> Result<()>>,
        stopped: &mut watch::Receiver<bool>,
    ) -> Result<(), End> {
        loop {
            let connector = Arc::clone(&self.connector);
            let client = Client::open(&Handle::current(), connector, self.options.clone()).await;
            let client = Arc::new(client.map_err(|e| unopened(e, &self.record.images[0]))?);
            let opened = self.begin(&client).await;
            let began = match opened {
                Ok(began) => began,
                Err(e) => {
                    self.close(&client, None).await;
                    return Err(End::Failed(e));
                }
            };
            let (managed, is_known) = match began {
                Began::Standing(device, managed, is_known) => {
                    if let Err(e) = front.begin(&*device) {
                        self.close(&client, Some(managed)).await;
                        return Err(End::Failed(e));
                    }
                    (managed, is_known)
                }
                Began::Held => {
                    self.close(&client, None).await;
                    return Ok(());
                }
            };
            let waited = self
                .until_held(&client, &managed, is_known, shown, waiting, stopped)
                .await;
            self.close(&client, Some(managed)).await;
            match waited {
                Ok(Waited::Held) => return Ok(self.take_over(stopped).await?),
                Ok(Waited::Again) => {
                    remove(&self.place)?;
                    self.place.remove_cache(0)?;
                }
                Err(Stop::Failed(e)) => return Err(End::Failed(e)),
                Err(Stop::Asked(how)) => return Err(End::Unmounted(self.unmounted(how).await)),
            }
        }
    }

    /// Asks the site for a point from which on it tells what is written, and opens the cache, in which nothing is older.
    async fn begin(&self, client: &Arc<Client>) -> Result<Began> {
        let seen = self.lease.look(true).await?;
        let place = self.place.clone();
        let stood_by = place.standby().exists();
        if seen.held {
            self.check_giver(&seen)?;
        }
        if seen.held && !stood_by {
            // A mount like others, that was told to stand by after its process had died.
            return Ok(Began::Held);
        }
        self.heard_of(&seen);
        let held = seen.held;
        let (client, record, identity) =
            (client.clone(), self.record.clone(), self.identity.clone());
        let open = move || -> Result<Began> {
            bring_up(&place, &record, &seen, stood_by)?;
            if held {
                remove(&place)?;
                return Ok(Began::Held);
            }
            write(&place, seen.generations.as_deref())?;
            client.agree(Epoch(seen.identity.epoch));
            let (device, managed) =
                open_cache(&client, &record.how, None, &place.cache(0), identity, None)?;
            Ok(Began::Standing(device, managed, seen.generations.is_some()))
        };
        tokio::task::spawn_blocking(open).await?
    }

    /// Says so, once, when there is nobody who could hand the lease over.
    fn heard_of(&self, seen: &LeaseSeen) {
        let had_writer = self.had_writer.swap(seen.has_writer, Ordering::Relaxed);
        if had_writer && !seen.has_writer {
            notice(&format!("{}: {}", self.place.name(), self.in_vain()));
        }
    }

    fn in_vain(&self) -> String {
        format!(
            "no mount has {} open for writing, so none can hand it over; end this one and mount it without --standby to write it now",
            self.record.images[0]
        )
    }

    async fn until_held(
        &self,
        client: &Client,
        managed: &Managed,
        is_known: bool,
        shown: &Shown,
        waiting: &impl Fn(u64, u64) -> Result<()>,
        stopped: &mut watch::Receiver<bool>,
    ) -> Result<Waited, Stop> {
        let (mut asked, mut reported) = (Instant::now(), None::<Instant>);
        let mut unknown_since = None::<Instant>;
        let mut link = client.link();
        loop {
            if *stopped.borrow_and_update() {
                return Err(Stop::Failed(Error::msg("stopped while it stood by")));
            }
            if let Some(how) = *shown.stop.borrow() {
                return Err(Stop::Asked(how));
            }
            if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                let disk = self.status(client, managed);
                waiting(disk.local, disk.size).map_err(Stop::Failed)?;
                *shown.disk.lock() = disk;
                reported = Some(Instant::now());
            }
            let now = client.link();
            if let Link::Gone(e) = &now {
                return Err(Stop::Failed(e.clone().into()));
            }
            // The site ends the connections of a mount that has got the lease.
            let has_changed = !is_same(&link, &now);
            if has_changed || asked.elapsed() >= ASK_EVERY {
                unknown_since = unknown_since.filter(|_| !has_changed);
                (link, asked) = (now, Instant::now());
                match self.lease.look(!is_known).await {
                    Ok(seen) if seen.held => return Ok(Waited::Held),
                    Ok(seen) if !is_known && seen.generations.is_some() => {
                        return Ok(Waited::Again);
                    }
                    Ok(seen) => {
                        self.heard_of(&seen);
                        unknown_since = None;
                    }
                    Err(e) if e.code() == Some(Code::Denied) => return Err(Stop::Failed(e)),
                    // It was restarted, perhaps, and the link is about to learn of it.
                    Err(e) if is_refused_for_good(&e) && matches!(link, Link::Up(_)) => {
                        let since = *unknown_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= UNKNOWN_LIMIT {
                            return Err(Stop::Failed(e));
                        }
                    }
                    // The link may be down.
                    Err(e) => tracing::debug!("{}: {}", self.place.name(), one_line(&e)),
                }
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// The lease is this mount's: drops from its cache what was written since it began.
    async fn take_over(&self, stopped: &mut watch::Receiver<bool>) -> Result<()> {
        let seen = loop {
            match self.lease.look(true).await {
                Ok(seen) => break seen,
                Err(e) if matches!(e.code(), None | Some(Code::Unavailable | Code::Busy)) => {
                    tracing::info!("{}: {}", self.place.name(), one_line(&e));
                }
                Err(e) => return Err(e),
            }
            if *stopped.borrow_and_update() {
                bail!("stopped: it has the write lease, and goes on when it is mounted again");
            }
            sleep(AGAIN).await;
        };
        if !seen.held {
            bail!("the write lease was handed over to this mount, and revoked at once");
        }
        self.check_giver(&seen)?;
        let (place, record) = (self.place.clone(), self.record.clone());
        tokio::task::spawn_blocking(move || {
            bring_up(&place, &record, &seen, true)?;
            remove(&place)
        })
        .await?
    }

    fn check_giver(&self, seen: &LeaseSeen) -> Result<()> {
        match is_from(self.record.how.heir_of, seen.from) {
            true => Ok(()),
            false => bail!(
                "the write lease of {} came from another site than the machine whose disk it is: revoke it there with `drover mounts break`",
                self.record.images[0]
            ),
        }
    }

    /// Closes what is open. The site is told that this mount does not stand by any more; a lease that it has got stays.
    async fn close(&self, client: &Arc<Client>, managed: Option<Managed>) {
        let client = Arc::clone(client);
        let close = move || {
            let closed = match managed {
                Some(managed) => managed.synced.close(false),
                None => client.close_now(),
            };
            if let Err(e) = closed {
                tracing::info!("a mount that stood by: {e}");
            }
        };
        let _ = tokio::task::spawn_blocking(close).await;
    }

    /// It was unmounted: removes it, unless it may have got the lease.
    async fn unmounted(&self, how: StopHow) -> Left {
        let keep = |text: String| {
            let unmounted = Record {
                unmounted: true,
                ..self.record.clone()
            };
            if let Err(e) = self.place.write(&unmounted) {
                tracing::warn!("{e:#}");
            }
            Left::here(text)
        };
        let began = Instant::now();
        let seen = loop {
            match self.lease.look(false).await {
                // Its connections may not have ended there yet.
                Ok(seen) if !seen.held && began.elapsed() < REPLY_LIMIT => sleep(AGAIN).await,
                seen => break seen,
            }
        };
        match seen {
            Err(e) if e.code() == Some(Code::OutOfOrder) => {}
            Ok(seen) if seen.held => {
                return keep(
                    "the write lease was handed over to it: mount or unmount it again".into(),
                );
            }
            Ok(_) => {
                return keep("the site still lists it as standing by: unmount it again".into());
            }
            Err(e) => {
                return keep(format!(
                    "it is not known whether the write lease was handed over to it ({}): unmount it again",
                    one_line(&e)
                ));
            }
        }
        if how.keep_cache || how.offline {
            return keep("the cache is kept".into());
        }
        Left::here(
            self.place
                .remove()
                .err()
                .map_or_else(String::new, |e| one_line(&e)),
        )
    }

    fn status(&self, client: &Client, managed: &Managed) -> DiskStatus {
        let (progress, traffic) = (managed.synced.progress(), client.traffic());
        let shape = client.shape();
        DiskStatus {
            image: self.record.images[0].to_string(),
            mode: "managed".into(),
            read_only: true,
            size: shape.size,
            local: (progress.local * u64::from(shape.chunk)).min(shape.size),
            in_flight: traffic.in_flight,
            received: traffic.received,
            sent: traffic.sent,
            rate: traffic.rate,
            seconds_left: progress.seconds_left,
            epoch: progress.epoch.count(),
            link: match client.link() {
                Link::Up(_) => "up".into(),
                Link::Down(why) => why,
                Link::Gone(e) => e.to_string(),
            },
            trouble: match self.had_writer.load(Ordering::Relaxed) {
                true => progress.trouble.map(|e| e.to_string()),
                false => Some(self.in_vain()),
            },
            ..DiskStatus::default()
        }
    }
}

/// Whether the lease of a mount came from the site whose heir it is, if it is one: nobody's machine gets the disk of another one.
fn is_from(heir_of: Option<HeirOf>, giver: Option<PeerKey>) -> bool {
    heir_of.is_none_or(|heir| giver == Some(PeerKey(heir.site)))
}

/// How a mount began to stand by.
enum Began {
    /// Its cache is open; whether the site records what is written.
    Standing(Arc<dyn BlockDevice>, Managed, bool),
    /// It has the lease already.
    Held,
}

/// Why it stopped to stand by.
enum Stop {
    Failed(Error),
    Asked(StopHow),
}

fn is_same(one: &Link, other: &Link) -> bool {
    match (one, other) {
        (Link::Up(one), Link::Up(other)) => one == other,
        (Link::Down(_), Link::Down(_)) => true,
        _ => false,
    }
}

/// Whether the site does not know this mount, or its image.
fn is_refused_for_good(error: &Error) -> bool {
    matches!(error.code(), Some(Code::OutOfOrder | Code::NotFound))
}

/// Drops from the cache what was written since it began, or all of it if that is not known. Afterwards all that is in it is as
/// old as the point that was `seen`, or as that in which it was fetched later.
fn bring_up(place: &Place, record: &Record, seen: &LeaseSeen, stood_by: bool) -> Result<()> {
    let Some(left) = place.left(0)? else {
        return Ok(());
    };
    if left.dirty > 0 {
        bail!(
            "{} was not pushed by an earlier mount there: mount it without --standby to push it, or discard it with `drover unmount {} --discard`",
            bytes(left.dirty),
            place.name()
        );
    }
    let since = match stood_by {
        true => read(place)?,
        // A cache of another kind of mount: it may be of any time.
        false => None,
    };
    let is_same_image =
        left.image == Some(seen.identity.digest) && left.shape.chunk == record.how.chunk;
    let since = since.filter(|_| is_same_image);
    let changed = since.and_then(|since| seen.written_since(&since));
    let Some(changed) = changed else {
        tracing::info!(
            "{}: what was written is not known, and the cache begins anew",
            place.name()
        );
        return place.remove_cache(0);
    };
    let directory = HostDirectory::open(&place.cache(0))
        .with_context(|| format!("cannot open {}", place.cache(0).display()))?;
    let directory: Arc<dyn Directory> = Arc::new(directory);
    let of: u64 = changed.iter().map(|range| range.end - range.start).sum();
    tracing::info!(
        "{}: {} were written since and are fetched again",
        place.name(),
        bytes(of)
    );
    Ok(drop_chunks(
        &directory,
        &changed,
        Epoch(seen.identity.epoch),
    )?)
}

/// Notes, durably, what the cache begins with.
fn write(place: &Place, generations: Option<&[u8]>) -> Result<()> {
    let path = place.standby();
    let written = FORMAT.write(&path, generations.unwrap_or_default());
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// What the cache began with; none if that is not known.
fn read(place: &Place) -> Result<Option<Summary>> {
    let path = place.standby();
    let bytes = FORMAT.read(&path);
    let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
    let found = bytes.as_deref().and_then(|bytes| FORMAT.open(bytes).ok());
    Ok(found.and_then(|bytes| Summary::decode(bytes).ok()))
}

/// Forgets that an earlier mount there stood by.
///
/// # Errors
/// Of the disk.
pub fn forget(place: &Place) -> Result<()> {
    match place.standby().exists() {
        true => remove(place),
        false => Ok(()),
    }
}

/// The mount does not stand by any more: what is in its cache from now on is its own.
fn remove(place: &Place) -> Result<()> {
    let path = place.standby();
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(File::open(place.dir())?.sync_all()?),
    }
}

/// What requests on its control socket see.
struct Shown {
    name: String,
    place: String,
    since_unix: i64,
    disk: Mutex<DiskStatus>,
    stop: watch::Sender<Option<StopHow>>,
    left: Mutex<Option<Left>>,
    ended: Notify,
    replied: Notify,
}

impl Shown {
    fn new(waits: &Waits) -> Shown {
        let disk = DiskStatus {
            image: waits.record.images[0].to_string(),
            mode: "managed".into(),
            read_only: true,
            link: "connecting".into(),
            ..DiskStatus::default()
        };
        Shown {
            name: waits.record.name.clone(),
            place: waits.record.front.place(),
            since_unix: waits.record.since_unix,
            disk: Mutex::new(disk),
            stop: watch::Sender::new(None),
            left: Mutex::default(),
            ended: Notify::new(),
            replied: Notify::new(),
        }
    }
}

struct Requests(Arc<Shown>);

impl Handler<GetStatus> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        _: GetStatus,
        _: &mut Exchange<'_, GetStatus>,
    ) -> Result<Status, Refusal> {
        Ok(Status {
            name: self.0.name.clone(),
            place: self.0.place.clone(),
            process: std::process::id(),
            since_unix: self.0.since_unix,
            state: MountState::Standby,
            disks: vec![self.0.disk.lock().clone()],
            devices: Vec::new(),
        })
    }
}

impl Handler<StopHow> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        how: StopHow,
        _: &mut Exchange<'_, StopHow>,
    ) -> Result<Left, Refusal> {
        if how.hand_over.is_some() {
            let text = "this mount only stands by: it has no write lease to hand over";
            return Err(Refusal::new(Code::OutOfOrder, text));
        }
        let shown = &self.0;
        shown.stop.send_replace(Some(how));
        let left = || shown.left.lock().clone();
        let left = timeout(control::ANSWER_LIMIT, drover_net::until(&shown.ended, left)).await;
        left.map_err(|_| {
            Refusal::new(
                Code::Unavailable,
                "it has just got the write lease: try again",
            )
        })
    }

    fn reply_sent(&self) {
        if self.0.left.lock().is_some() {
            self.0.replied.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lease_of_a_machines_disk_comes_from_where_the_machine_does() {
        let (one, two) = (PeerKey([1; 32]), PeerKey([2; 32]));
        let heir = HeirOf {
            site: one.0,
            mount: [3; 16],
        };
        assert!(is_from(Some(heir), Some(one)));
        assert!(!is_from(Some(heir), Some(two)));
        assert!(!is_from(Some(heir), None), "nobody handed it over");
        // A person's own mount takes what it gets.
        assert!(is_from(None, None) && is_from(None, Some(two)));
    }
}
