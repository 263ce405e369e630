//! The site's side: serves images as devices to mounts. [`Server`] admits connections; each runs as
//! `connection::Connection`, whose requests are queued in `queue`, executed by the threads of `pool` and answered in
//! the order that `net::group` permits.

mod absences;
mod arriving;
mod blocking;
mod changes;
mod connection;
mod counters;
mod generations;
mod hand_over;
mod image;
mod leases;
mod open_images;
mod overlays;
mod points;
mod pool;
pub(crate) mod queue;
mod recording;
mod seen;
mod settler;
mod standing;
mod through;
pub(crate) mod unit;
mod work;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_device::remote::Shape;
use drover_net::service::{self, IncomingCall, Service, ServiceFuture};
use drover_net::{Code, Peer, PeerKey, Refusal, Right, ShareLimits, Shares, until};
use drover_store::lease::{Access, Identity, MountId, READER_GRACE, Who};
use parking_lot::Mutex;
use tracing::{debug, info};

use crate::MountError;
use crate::protocol::{
    ConnectionKind, KEEP_ALIVE, MAX_CONNECTIONS, MAX_MOUNT_FRAME, Open, Opened, check_shape,
};

pub use absences::Absences;
pub use arriving::{Arrival, Arriving};
pub use changes::{Claim, ClaimEnd, View};
pub use counters::MountCounts;
pub use generations::{OldCopy, freeze_on_disk, generations_on_disk, keep_on_disk};
pub use image::{Base, Happened, Images, Room, WhyBroken};
pub use leases::{Leased, lease_on_disk};
pub use through::WriteThrough;

use blocking::blocking;
use connection::{Connection, LinkShared, Running};
use counters::Counters;
use image::Image;
use pool::Pool;
use standing::Standing;

/// Maximum connections of all mounts of a site; one peer has fewer, and in any case those of one mount.
pub const MAX_SITE_CONNECTIONS: ShareLimits = ShareLimits {
    all: 512,
    one: 384,
    sure: MAX_CONNECTIONS as u64,
};

/// Maximum mounts of one peer.
pub const MAX_PEER_MOUNTS: usize = 64;

/// Maximum body bytes of all mounts' requests queued or executing; beyond it connections are not read.
const MAX_SITE_BODIES: ShareLimits = ShareLimits {
    all: 256 << 20,
    one: 192 << 20,
    sure: 16 << 20,
};

/// How long a connection waits for its mount's front connection.
const FRONT_WAIT: Duration = Duration::from_secs(10);

/// Timeout for sending a refusal.
const LAST_WORD: Duration = Duration::from_secs(5);

/// Configuration of a server.
pub struct Config {
    /// The source of images.
    pub images: Arc<dyn Images>,
    /// The directory of the site's state; overlays and leases are in `overlays/NAME/` below it.
    pub state: PathBuf,
    /// Approximate number of threads that read, hash and compress, at least two; one fewer serve background reads, and
    /// some more wait for disks.
    pub threads: usize,
    /// The longest that a mount without a connection keeps its write lease; `None` for as long as it wants.
    pub max_term: Option<Duration>,
    /// Since when mounts have had no connection; servers of one site should have the same.
    pub absences: Arc<Absences>,
}

impl Config {
    /// A server of its own, at which mounts keep their write leases for as long as they want.
    pub fn new(images: Arc<dyn Images>, state: impl Into<PathBuf>, threads: usize) -> Config {
        Config {
            images,
            state: state.into(),
            threads,
            max_term: None,
            absences: Arc::default(),
        }
    }
}

/// All mounts of a site.
pub struct Server {
    config: Config,
    started: tokio::time::Instant,
    pool: Arc<Pool>,
    counters: Arc<Counters>,
    /// Memory for request bodies, in bytes.
    bodies: Shares<PeerKey>,
    next_connection: AtomicU64,
    /// A lock per image, held by threads that may block while it is opened, closed or its lease broken. Lock order:
    /// this, the image's leases, `state`. No disk I/O happens under `state`.
    image_locks: Mutex<HashMap<ImageName, Weak<Mutex<()>>>>,
    /// A task is about to close images that were in use until recently.
    tidying: AtomicBool,
    /// Notified when a front connection is admitted.
    joined: tokio::sync::Notify,
    state: Mutex<ServerState>,
}

#[derive(Default)]
struct ServerState {
    /// Images opened for mounts.
    open: HashMap<ImageName, Arc<Image>>,
    mounts: HashMap<(PeerKey, MountId), Mount>,
}

/// An admitted connection.
struct Joined {
    connection: Arc<Connection>,
    /// Whether it is the first of its mount.
    is_first: bool,
    /// Connections that must end before it may do anything.
    earlier: Vec<Arc<Connection>>,
    /// The image state reported to its mount, and whether it is the expected one.
    reported: (Identity, bool),
}

/// A mount with connections.
struct Mount {
    image: Arc<Image>,
    peer: Peer,
    since: Instant,
    /// Bytes that it has written.
    written: Arc<AtomicU64>,
    /// The latest link whose front connection was admitted.
    link: u64,
    /// The image state reported to it, and whether that was the expected one.
    identity: Identity,
    fresh: bool,
    shared: Arc<LinkShared>,
    access: Access,
    shape: Shape,
    connections: Vec<Arc<Connection>>,
}

impl Server {
    /// Creates a server. Must be called within a runtime.
    ///
    /// # Errors
    /// [`MountError::System`] if its threads cannot be started.
    pub fn new(config: Config) -> Result<Arc<Self>, MountError> {
        Ok(Arc::new(Self {
            pool: Arc::new(Pool::new(config.threads)?),
            counters: Arc::default(),
            bodies: Shares::new(MAX_SITE_BODIES),
            config,
            started: tokio::time::Instant::now(),
            next_connection: AtomicU64::new(1),
            image_locks: Mutex::default(),
            tidying: AtomicBool::new(false),
            joined: tokio::sync::Notify::new(),
            state: Mutex::default(),
        }))
    }

    /// Serves a connection of `peer` until it ends, or refuses it.
    ///
    /// # Errors
    /// [`MountError`]: a protocol violation, or a broken link. The peer is notified if the connection permits.
    pub async fn serve_connection(
        self: &Arc<Self>,
        peer: Peer,
        mut call: IncomingCall,
    ) -> Result<(), MountError> {
        call.reader.set_max_frame(MAX_MOUNT_FRAME);
        call.writer.set_max_frame(MAX_MOUNT_FRAME);
        KEEP_ALIVE.apply(&mut call.reader, &mut call.writer);
        let open = call.request().map_err(Refusal::from);
        let result = match open.and_then(|open: Open| open.check().map(|()| open)) {
            Ok(open) => {
                self.enter_or_tell(&peer, open, call.reader.peer_text())
                    .await
            }
            Err(refusal) => Err(refusal),
        };
        let (connection, opened) = match result {
            Ok(entered) => entered,
            Err(refusal) => {
                info!(peer = %peer.name, %refusal, "mount refused");
                self.counters.refused(&refusal);
                self.tidy(None).await;
                return Ok(call.refuse(&refusal).await?);
            }
        };
        debug!(peer = %peer.name, image = %connection.image.name(), connection = ?connection.kind, link = connection.link, "connection open");
        let result = async {
            call.accept::<Open>(&opened).await?;
            call.writer.flush().await?;
            let IncomingCall {
                reader,
                writer,
                stop,
                ..
            } = &mut call;
            connection.serve(reader, writer, stop.clone()).await
        }
        .await;
        connection.close();
        connection.drained().await;
        self.leave(&connection).await;
        // Copying what the mount has committed may take long: its connection does not wait for that.
        let (_, closed) = tokio::join!(
            self.close_after(connection),
            drover_net::close(call.reader, call.writer, LAST_WORD)
        );
        closed.ok();
        result
    }

    /// Closes the image of an ended connection once it is unused.
    async fn close_after(self: &Arc<Self>, connection: Arc<Connection>) {
        if connection.access == Access::ReadWrite {
            connection.image.settled().await;
        }
        let image = connection.image.name().clone();
        drop(connection);
        self.tidy(Some(image)).await;
    }

    /// The same as [`Self::enter`]; a refusal is told to the site.
    async fn enter_or_tell(
        self: &Arc<Self>,
        peer: &Peer,
        open: Open,
        from: &str,
    ) -> Result<(Arc<Connection>, Opened), Refusal> {
        let (name, access) = (open.image.clone(), open.access);
        let result = self.enter(peer, open, from).await;
        if let Err(refusal) = &result {
            let refused = Happened::Refused {
                peer: peer.clone(),
                from: from.to_owned(),
                access,
                refusal: refusal.clone(),
            };
            self.tell(name, refused).await;
        }
        result
    }

    /// Tells the site what has happened to an image.
    async fn tell(&self, name: ImageName, what: Happened) {
        let images = Arc::clone(&self.config.images);
        let told = blocking(move || {
            images.happened(&name, &what);
            Ok(())
        });
        // Fails only when the runtime ends.
        let _ = told.await;
    }

    async fn enter(
        self: &Arc<Self>,
        peer: &Peer,
        open: Open,
        from: &str,
    ) -> Result<(Arc<Connection>, Opened), Refusal> {
        self.allow(peer, &open).await?;
        if open.connection != ConnectionKind::Front {
            // The front connection represents the mount: only it acquires leases.
            self.wait_for_front((peer.key, open.mount), open.link)
                .await?;
        }
        if open.connection == ConnectionKind::Front {
            self.close_replaced(&open.image).await?;
        }
        let image = self.image(&open.image).await?;
        let shape = Shape {
            size: image.device().size(),
            chunk: open.chunk,
        };
        check_shape(shape).map_err(|text| {
            let name = open.image.as_str();
            Refusal::new(Code::Unsupported, format!("{name}: {text}"))
        })?;
        let term = self.term(&open);
        let who = Who {
            peer: peer.clone(),
            mount: open.mount,
            link: open.link,
            note: open.note.clone(),
            term,
        };
        let (admitted, standing) = match open.connection {
            ConnectionKind::Front => {
                let (admitted, standing) = self.admit_for_good(peer, &image, who, &open).await?;
                (Some(admitted), standing)
            }
            _ => (None, None),
        };
        let Joined {
            connection,
            is_first,
            earlier,
            reported: (mut identity, fresh),
        } = self.join(peer, &open, image, shape, admitted)?;
        if let Some(standing) = standing {
            standing.joined();
        }
        self.joined.notify_waiters();
        if is_first {
            let opened = Happened::Opened {
                peer: peer.clone(),
                from: from.to_owned(),
                access: open.access,
            };
            self.tell(open.image, opened).await;
        }
        let ready = connection.shared.ready.get_or_try_init(|| async {
            // Work of earlier links must have ended: then what they staged is final.
            for connection in earlier {
                connection.close();
                connection.drained().await;
            }
            let image = connection.image.clone();
            match open.access {
                Access::ReadOnly | Access::Standby => Ok(()),
                Access::ReadWrite => blocking(move || image.begin_link()).await,
            }
        });
        if let Err(refusal) = ready.await {
            self.leave(&connection).await;
            return Err(refusal);
        }
        if open.access == Access::ReadWrite {
            // An earlier link of the mount may have committed since admission.
            identity.epoch = connection.image.committed();
        }
        let opened = Opened {
            size: shape.size,
            chunk: shape.chunk,
            identity,
            fresh,
            read_only: open.access != Access::ReadWrite,
            direct: connection.image.device().capabilities().into(),
            term,
        };
        Ok((connection, opened))
    }

    /// Admits a mount that still has the permission afterwards. Goes on when the caller is cancelled, which a peer whose
    /// rights are taken away is: no lease of it must remain.
    async fn admit_for_good(
        self: &Arc<Self>,
        peer: &Peer,
        image: &Arc<Image>,
        who: Who,
        open: &Open,
    ) -> Result<((Identity, bool), Option<Standing>), Refusal> {
        let (server, peer, image) = (self.clone(), peer.clone(), image.clone());
        let open = open.clone();
        let admission = tokio::spawn(async move {
            let admitted = server.admit(&image, who, &open).await?;
            let standing = (open.access == Access::Standby)
                .then(|| Standing::new(&image, (peer.key, open.mount), open.link));
            // Whoever took the permission away before the lease was granted had no lease to break.
            if let Err(refusal) = server.allow(&peer, &open).await {
                let (key, mount, link) = (peer.key, open.mount, open.link);
                blocking(move || image.close(key, mount, link)).await?;
                server.config.absences.forget(&(key, mount));
                return Err(refusal);
            }
            Ok((admitted, standing))
        });
        let ended = |_| Refusal::new(Code::Failed, "the site is stopping");
        admission.await.map_err(ended)?
    }

    /// Checks that the image may be opened by this peer.
    async fn allow(&self, peer: &Peer, open: &Open) -> Result<(), Refusal> {
        let images = Arc::clone(&self.config.images);
        let (peer, name, access) = (peer.clone(), open.image.clone(), open.access);
        blocking(move || images.allow(&name, &peer, access)).await
    }

    /// The term of the write lease that a mount gets, now or when it is handed over.
    fn term(&self, open: &Open) -> Option<u64> {
        let max = self.config.max_term.map(|max| max.as_secs().max(1));
        let term = match (open.term, max) {
            (Some(term), Some(max)) => Some(term.min(max)),
            (term, max) => term.or(max),
        };
        term.filter(|_| open.access != Access::ReadOnly)
    }

    /// Admits a mount to an image; the lease of another that is gone for too long does not keep it out.
    async fn admit(
        self: &Arc<Self>,
        image: &Arc<Image>,
        who: Who,
        open: &Open,
    ) -> Result<(Identity, bool), Refusal> {
        match self.admit_now(image, who.clone(), open).await {
            Err(refusal)
                if refusal.code == Code::Held && self.end_overdue(image.name(), &who).await? =>
            {
                self.admit_now(image, who, open).await
            }
            admitted => admitted,
        }
    }

    async fn admit_now(
        self: &Arc<Self>,
        image: &Arc<Image>,
        who: Who,
        open: &Open,
    ) -> Result<(Identity, bool), Refusal> {
        let (server, image) = (self.clone(), image.clone());
        let (access, expected, now) = (open.access, open.expected, self.started.elapsed());
        blocking(move || {
            let key = (who.peer.key, who.mount);
            // It counts as gone until it joins, which may be long after it was admitted.
            let granted = || match access {
                Access::ReadWrite => server.config.absences.left(key, Instant::now()),
                Access::ReadOnly | Access::Standby => {}
            };
            let connected = |key: &(PeerKey, MountId)| server.state.lock().mounts.contains_key(key);
            image.enter(&who, access, expected, now, &connected, &granted)
        })
        .await
    }

    /// Waits until the front connection of a link has been admitted, as it is opened concurrently.
    async fn wait_for_front(&self, key: (PeerKey, MountId), link: u64) -> Result<(), Refusal> {
        let is_here = || {
            let here = self.state.lock().mounts.get(&key)?.link;
            (here >= link).then_some(())
        };
        tokio::time::timeout(FRONT_WAIT, until(&self.joined, is_here))
            .await
            .map_err(|_| no_front())
    }

    /// Registers a new connection. `admitted` is the state reported to a front connection.
    fn join(
        &self,
        peer: &Peer,
        open: &Open,
        image: Arc<Image>,
        shape: Shape,
        admitted: Option<(Identity, bool)>,
    ) -> Result<Joined, Refusal> {
        let key = (peer.key, open.mount);
        let busy = |text: &str| Err(Refusal::new(Code::Busy, text));
        let mut state = self.state.lock();
        let connections = |own_only: bool| {
            let mounts = state
                .mounts
                .iter()
                .filter(|(k, _)| !own_only || k.0 == key.0);
            mounts.map(|(_, m)| m.connections.len() as u64).sum::<u64>()
        };
        if !MAX_SITE_CONNECTIONS.allow(connections(false), connections(true), 1) {
            return busy("this site has too many connections; try again later");
        }
        let known = state.mounts.get(&key).map(|m| (m.identity, m.fresh));
        let Some(reported) = admitted.or(known) else {
            return Err(no_front());
        };
        if known.is_none()
            && state.mounts.keys().filter(|k| k.0 == key.0).count() >= MAX_PEER_MOUNTS
        {
            return busy("your site has too many mounts of this site; unmount one");
        }
        let mount = state.mounts.entry(key).or_insert_with(|| Mount {
            image: image.clone(),
            peer: peer.clone(),
            since: Instant::now(),
            written: Arc::default(),
            link: 0,
            identity: reported.0,
            fresh: reported.1,
            shared: Arc::default(),
            access: open.access,
            shape,
            connections: Vec::new(),
        });
        if open.link > mount.link && admitted.is_none() {
            return Err(no_front());
        }
        if open.link < mount.link {
            let text = "this mount has reconnected in the meantime";
            return Err(Refusal::new(Code::Unavailable, text));
        }
        let first = open.link > mount.link;
        let own = mount.connections.len();
        let is_earlier = |connection: &&Arc<Connection>| connection.link < open.link;
        let mut earlier: Vec<_> = mount
            .connections
            .iter()
            .filter(is_earlier)
            .cloned()
            .collect();
        let own = own - earlier.len();
        let same = Arc::ptr_eq(&mount.image, &image)
            && mount.access == open.access
            && mount.shape == shape;
        if !same && own > 0 {
            let text = "connections of one mount must agree on image, access and chunk";
            return Err(Refusal::new(Code::Protocol, text));
        }
        if own >= MAX_CONNECTIONS {
            return busy("a mount has too many connections");
        }
        mount.link = open.link;
        (mount.identity, mount.fresh) = reported;
        (mount.image, mount.access, mount.shape) = (image.clone(), open.access, shape);
        if first {
            mount.shared = Arc::default();
        }
        let connection_image = image.clone();
        let connection = Arc::new(Connection {
            number: self.next_connection.fetch_add(1, Ordering::Relaxed),
            key,
            kind: open.connection,
            link: open.link,
            access: open.access,
            image,
            shape,
            shared: mount.shared.clone(),
            pool: connection_image.pool().unwrap_or(&self.pool).clone(),
            runtime: tokio::runtime::Handle::current(),
            counters: self.counters.clone(),
            bodies: self.bodies.clone(),
            written: mount.written.clone(),
            running: Running::default(),
        });
        mount.connections.push(connection.clone());
        self.config.absences.forget(&key);
        if open.access == Access::ReadWrite {
            // Connections of another writer, whose lease was just broken.
            let others = state.mounts.iter().filter(|(other, _)| **other != key);
            let others = others.flat_map(|(_, mount)| &mount.connections);
            let broken = |connection: &&Arc<Connection>| {
                connection.access == Access::ReadWrite
                    && Arc::ptr_eq(&connection.image, &connection_image)
            };
            earlier.extend(others.filter(broken).cloned());
        }
        Ok(Joined {
            connection,
            is_first: known.is_none(),
            earlier,
            reported,
        })
    }

    async fn leave(self: &Arc<Self>, connection: &Arc<Connection>) {
        let last = {
            let mut state = self.state.lock();
            let Some(mount) = state.mounts.get_mut(&connection.key) else {
                return;
            };
            mount.connections.retain(|l| l.number != connection.number);
            match mount.connections.is_empty() {
                true => {
                    // Before it counts as gone.
                    self.config.absences.left(connection.key, Instant::now());
                    state.mounts.remove(&connection.key)
                }
                false => None,
            }
        };
        if let Some(mount) = last {
            let (image, key, now) = (
                connection.image.clone(),
                connection.key,
                self.started.elapsed(),
            );
            let link = connection.link;
            let closed = Happened::Closed {
                peer: mount.peer,
                access: mount.access,
                written: mount.written.load(Ordering::Relaxed),
                time: mount.since.elapsed(),
            };
            let absences = Arc::clone(&self.config.absences);
            let left = blocking(move || {
                image.left(key.0, key.1, now);
                image.end_standby(key.0, key.1, link);
                if !image.is_held_by(key.0, key.1) {
                    absences.forget(&key);
                }
                image.happened(&closed);
                Ok(())
            });
            // Fails only when the runtime ends.
            let _ = left.await;
            if connection.access == Access::ReadOnly {
                let server = Arc::downgrade(self);
                tokio::spawn(async move {
                    tokio::time::sleep(READER_GRACE + Duration::from_secs(1)).await;
                    if let Some(server) = server.upgrade() {
                        server.tidy(None).await;
                    }
                });
            }
        }
    }

    /// Open mounts, and counters. Does no disk I/O.
    #[must_use]
    pub fn counted(&self) -> MountCounts {
        let mut now = self.counters.now();
        let state = self.state.lock();
        for mount in state.mounts.values() {
            match mount.access {
                Access::ReadOnly | Access::Standby => now.readers += 1,
                Access::ReadWrite => now.writers += 1,
            }
            now.connections += mount.connections.len() as u64;
        }
        now.images = state.open.len() as u64;
        now
    }
}

/// The service that accepts connections of mounts.
pub struct Connections(pub Arc<Server>);

impl Service for Connections {
    fn id(&self) -> &'static str {
        <Open as service::Request>::SERVICE
    }

    fn right(&self) -> Right {
        <Open as service::Request>::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move { Ok(self.0.serve_connection(peer, call).await?) })
    }
}

fn no_front() -> Refusal {
    Refusal::new(
        Code::Unavailable,
        "the mount's front connection is not open",
    )
}
