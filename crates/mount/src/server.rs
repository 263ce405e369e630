//! A site's side: images served as devices to mounts.

mod changes;
pub(crate) mod counters;
mod image;
mod lane;
mod lease;
mod pool;
pub(crate) mod queue;
mod settler;
mod work;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use drover_core::ImageName;
use drover_device::remote::Shape;
use drover_net::service::{Call, Request, Service, ServiceFuture};
use drover_net::{Code, Peer, PeerKey, Refusal, Right};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tracing::{debug, info};

use crate::MountError;
use crate::protocol::{
    Access, Identity, LaneKind, MAX_LANES, MAX_MOUNT_FRAME, MountId, Open, Opened, check_shape,
};

pub use changes::{Changes, Claim, View, changes_of, changes_on_disk};
pub use counters::Counted;
pub use image::{Base, Images};
pub use lease::{Holder, MERGE_NOTE, READER_GRACE};

use counters::Counters;
use image::Image;
use lane::{Lane, Parts, Shared};
use lease::{Desk, Who};

use pool::Pool;

/// Lanes of all mounts of a site at most.
pub const MAX_SITE_LANES: usize = 512;

/// Mounts of one peer at most.
pub const MAX_PEER_MOUNTS: usize = 64;

/// Bytes of all mounts' requests that wait or are being done, at most; then their lanes are not read on.
const MAX_SITE_BODIES: usize = 256 << 20;

/// How long a lane waits for its mount's front lane.
const FRONT_WAIT: Duration = Duration::from_secs(10);

/// How often is looked for images of which somebody lets go soon, and for how many times.
const CLOSE_PAUSE: Duration = Duration::from_millis(50);
const CLOSE_TRIES: u32 = 100;

/// How long a refused lane's last word may take.
const LAST_WORD: Duration = Duration::from_secs(5);

/// What a server is made of.
pub struct Config {
    /// Where images come from.
    pub images: Arc<dyn Images>,
    /// The directory of the site's state; what is written over images, and leases, are in `overlays/NAME/` below it.
    pub state: PathBuf,
    /// How many threads read, hash and compress, about, at least two; one fewer do so in the background, and some more
    /// wait for disks.
    pub threads: usize,
}

/// An image that is mounted, or leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// Which image.
    pub image: String,
    /// Who may write it.
    pub holder: Option<Holder>,
    /// Mounts that are connected, by what their sites are called.
    pub connected: Vec<String>,
    /// Why it cannot be said who may write it.
    pub problem: Option<String>,
}

/// All mounts of a site.
pub struct Server {
    config: Config,
    started: tokio::time::Instant,
    pool: Arc<Pool>,
    counters: Arc<Counters>,
    /// Room for requests' bodies, in bytes.
    bodies: Arc<Semaphore>,
    next_lane: AtomicU64,
    /// Held while an image is opened, closed, or its lease broken, each by threads that may block: one for each image
    /// that somebody is at. Before its desk, which is before `state`; no disk is waited for under that.
    doors: Mutex<HashMap<ImageName, Weak<Mutex<()>>>>,
    /// Images are about to be closed that somebody still had.
    tidying: AtomicBool,
    /// Told when a front lane was let in.
    joined: tokio::sync::Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Images that a mount has open.
    open: HashMap<ImageName, Arc<Image>>,
    mounts: HashMap<(PeerKey, MountId), Mount>,
}

/// A lane that was let in.
struct Joined {
    lane: Arc<Lane>,
    /// Lanes that must have ended before it may do anything.
    earlier: Vec<Arc<Lane>>,
    /// The state that its mount is told, and whether it is the expected one.
    told: (Identity, bool),
}

/// A mount that has lanes.
struct Mount {
    image: Arc<Image>,
    peer_name: String,
    /// The newest link whose front lane has been let in.
    link: u64,
    /// What that one was told.
    identity: Identity,
    fresh: bool,
    shared: Arc<Shared>,
    access: Access,
    shape: Shape,
    lanes: Vec<Arc<Lane>>,
}

impl Server {
    /// A server. Call within a runtime.
    ///
    /// # Errors
    /// [`MountError::System`] when its threads cannot be started.
    pub fn new(config: Config) -> Result<Arc<Self>, MountError> {
        Ok(Arc::new(Self {
            pool: Arc::new(Pool::new(config.threads)?),
            counters: Arc::default(),
            bodies: Arc::new(Semaphore::new(MAX_SITE_BODIES)),
            config,
            started: tokio::time::Instant::now(),
            next_lane: AtomicU64::new(1),
            doors: Mutex::default(),
            tidying: AtomicBool::new(false),
            joined: tokio::sync::Notify::new(),
            state: Mutex::default(),
        }))
    }

    /// Serves a lane that `peer` called for, until it ends.
    ///
    /// # Errors
    /// [`MountError`]: refused, a protocol that was not kept to, or a link that broke. The peer has been told, where
    /// it can be.
    pub async fn serve_lane(
        self: &Arc<Self>,
        peer: Peer,
        mut call: Call,
    ) -> Result<(), MountError> {
        call.reader.set_max_frame(MAX_MOUNT_FRAME);
        call.writer.set_max_frame(MAX_MOUNT_FRAME);
        KEEP_ALIVE.apply(&mut call.reader, &mut call.writer);
        let open = call.request().map_err(Refusal::from);
        let result = match open.and_then(|open: Open| open.check().map(|()| open)) {
            Ok(open) => self.enter(&peer, open).await,
            Err(refusal) => Err(refusal),
        };
        let (lane, opened) = match result {
            Ok(entered) => entered,
            Err(refusal) => {
                info!(peer = %peer.name, %refusal, "mount refused");
                self.counters.refused(&refusal);
                self.tidy(None).await;
                call.refuse(&refusal).await?;
                return Err(MountError::Refused(refusal));
            }
        };
        debug!(peer = %peer.name, image = %lane.image.name(), lane = ?lane.kind, link = lane.link, "lane open");
        let result = async {
            call.accept::<Open>(&opened).await?;
            call.writer.flush().await?;
            let Call {
                reader,
                writer,
                stop,
                ..
            } = &mut call;
            lane.serve(reader, writer, stop.clone()).await
        }
        .await;
        lane.close();
        lane.drained().await;
        self.leave(&lane).await;
        // What the mount has committed may be copied for long: its connection does not wait for that.
        let (_, closed) = tokio::join!(
            self.close_after(lane),
            drover_net::close(call.reader, call.writer, LAST_WORD)
        );
        closed.ok();
        result
    }

    /// Closes the image of a lane that has ended when nobody is at it any more.
    async fn close_after(self: &Arc<Self>, lane: Arc<Lane>) {
        if lane.access == Access::ReadWrite {
            lane.image.settled().await;
        }
        let image = lane.image.name().clone();
        drop(lane);
        self.tidy(Some(image)).await;
    }

    async fn enter(
        self: &Arc<Self>,
        peer: &Peer,
        open: Open,
    ) -> Result<(Arc<Lane>, Opened), Refusal> {
        if open.lane != LaneKind::Front {
            // The front lane is the mount: only it takes leases.
            self.wait_for_front((peer.key, open.mount), open.link)
                .await?;
        }
        if open.lane == LaneKind::Front {
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
        let who = Who {
            peer: peer.clone(),
            mount: open.mount,
            link: open.link,
            note: open.note.clone(),
        };
        let admitted = match open.lane {
            LaneKind::Front => Some(self.admit(&image, who, &open).await?),
            _ => None,
        };
        let Joined {
            lane,
            earlier,
            told: (mut identity, fresh),
        } = self.join(peer, &open, image, shape, admitted)?;
        self.joined.notify_waiters();
        let ready = lane.shared.ready.get_or_try_init(|| async {
            // What the lanes of earlier links began must have ended: what they staged is what it is then.
            for lane in earlier {
                lane.close();
                lane.drained().await;
            }
            let image = lane.image.clone();
            match open.access {
                Access::ReadOnly => Ok(()),
                Access::ReadWrite => blocking(move || image.begin_link()).await,
            }
        });
        if let Err(refusal) = ready.await {
            self.leave(&lane).await;
            return Err(refusal);
        }
        if open.access == Access::ReadWrite {
            // What the mount's earlier link began may have been committed since it was let in.
            identity.epoch = lane.image.committed();
        }
        let can = lane.image.device().capabilities();
        let opened = Opened {
            size: shape.size,
            chunk: shape.chunk,
            identity,
            fresh,
            read_only: open.access == Access::ReadOnly,
            can: [can.fast_zeroes, can.trim, can.durable, can.extents],
        };
        Ok((lane, opened))
    }

    /// Closes an image that is open but is not the one of that name any more. It is kept open for readers that may come
    /// back, and they would read the bytes of one under the digest of the other.
    async fn close_replaced(self: &Arc<Self>, name: &ImageName) -> Result<(), Refusal> {
        if !self.state.lock().open.contains_key(name) {
            return Ok(());
        }
        let (server, name) = (self.clone(), name.clone());
        blocking(move || {
            let door = server.door(&name);
            let _closing = door.lock();
            let now = server.config.images.digest(&name)?;
            let mut state = server.state.lock();
            let former = match state.open.get(&name) {
                Some(image) if image.digest() != now => {
                    // As when it is idle: an overlay has one owner, so it is not opened again beside whoever still has it.
                    if Arc::strong_count(image) > 1 {
                        let text = format!("{name} was replaced, and a mount still has the former");
                        return Err(Refusal::new(Code::Unavailable, text));
                    }
                    state.open.remove(&name)
                }
                _ => None,
            };
            drop(state);
            drop(former);
            Ok(())
        })
        .await
    }

    /// What is held while an image is opened or closed.
    fn door(&self, name: &ImageName) -> Arc<Mutex<()>> {
        let mut doors = self.doors.lock();
        if let Some(door) = doors.get(name).and_then(Weak::upgrade) {
            return door;
        }
        doors.retain(|_, door| door.strong_count() > 0);
        let door = Arc::default();
        doors.insert(name.clone(), Arc::downgrade(&door));
        door
    }

    /// The image, opened if no mount has it open.
    async fn image(self: &Arc<Self>, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        if let Some(image) = self.state.lock().open.get(name) {
            return Ok(image.clone());
        }
        let (server, wanted) = (self.clone(), name.clone());
        blocking(move || server.open_image(&wanted)).await
    }

    /// The image, opened if it is not. Blocks on the disk.
    fn open_image(&self, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        // One at a time: an overlay has one owner.
        let door = self.door(name);
        let _opening = door.lock();
        self.open_image_now(name)
    }

    /// The same for who holds its door.
    fn open_image_now(&self, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        if let Some(image) = self.state.lock().open.get(name) {
            return Ok(image.clone());
        }
        let config = &self.config;
        let image = Arc::new(Image::open(name, &config.images, &config.state)?);
        self.state.lock().open.insert(name.clone(), image.clone());
        Ok(image)
    }

    async fn admit(
        self: &Arc<Self>,
        image: &Arc<Image>,
        who: Who,
        open: &Open,
    ) -> Result<(Identity, bool), Refusal> {
        let (server, image) = (self.clone(), image.clone());
        let (access, expected, now) = (open.access, open.expected, self.started.elapsed());
        blocking(move || {
            let connected = |key: &(PeerKey, MountId)| server.state.lock().mounts.contains_key(key);
            image.enter(&who, access, expected, now, &connected)
        })
        .await
    }

    /// Waits until the front lane of a link has been let in, as it is opened at the same time.
    async fn wait_for_front(&self, key: (PeerKey, MountId), link: u64) -> Result<(), Refusal> {
        let wait = async {
            loop {
                let joined = self.joined.notified();
                tokio::pin!(joined);
                joined.as_mut().enable();
                let here = self.state.lock().mounts.get(&key).map(|m| m.link);
                if here.is_some_and(|here| here >= link) {
                    return;
                }
                joined.await;
            }
        };
        tokio::time::timeout(FRONT_WAIT, wait)
            .await
            .map_err(|_| no_front())
    }

    /// A new lane. `admitted` is what a front lane was told.
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
        let lanes: usize = state.mounts.values().map(|m| m.lanes.len()).sum();
        if lanes >= MAX_SITE_LANES {
            return busy("this site serves as many lanes as it can; try again later");
        }
        let known = state.mounts.get(&key).map(|m| (m.identity, m.fresh));
        let Some(told) = admitted.or(known) else {
            return Err(no_front());
        };
        if known.is_none()
            && state.mounts.keys().filter(|k| k.0 == key.0).count() >= MAX_PEER_MOUNTS
        {
            return busy("this site serves as many mounts of yours as it may; unmount one");
        }
        let mount = state.mounts.entry(key).or_insert_with(|| Mount {
            image: image.clone(),
            peer_name: peer.name.clone(),
            link: 0,
            identity: told.0,
            fresh: told.1,
            shared: Arc::default(),
            access: open.access,
            shape,
            lanes: Vec::new(),
        });
        if open.link > mount.link && admitted.is_none() {
            return Err(no_front());
        }
        if open.link < mount.link {
            let text = "this mount has connected anew meanwhile";
            return Err(Refusal::new(Code::Unavailable, text));
        }
        let first = open.link > mount.link;
        let own = mount.lanes.len();
        let is_earlier = |lane: &&Arc<Lane>| lane.link < open.link;
        let mut earlier: Vec<_> = mount.lanes.iter().filter(is_earlier).cloned().collect();
        let own = own - earlier.len();
        let same = Arc::ptr_eq(&mount.image, &image)
            && mount.access == open.access
            && mount.shape == shape;
        if !same && own > 0 {
            let text = "lanes of one mount must agree on image, access and chunk";
            return Err(Refusal::new(Code::Protocol, text));
        }
        if own >= MAX_LANES {
            return busy("a mount has too many lanes");
        }
        mount.link = open.link;
        (mount.identity, mount.fresh) = told;
        (mount.image, mount.access, mount.shape) = (image.clone(), open.access, shape);
        if first {
            mount.shared = Arc::default();
        }
        let lane_image = image.clone();
        let lane = Lane::new(Parts {
            number: self.next_lane.fetch_add(1, Ordering::Relaxed),
            key,
            kind: open.lane,
            link: open.link,
            access: open.access,
            image,
            shape,
            shared: mount.shared.clone(),
            pool: self.pool.clone(),
            counters: self.counters.clone(),
            bodies: self.bodies.clone(),
        });
        mount.lanes.push(lane.clone());
        if open.access == Access::ReadWrite {
            // Of another writer whose lease was broken just now.
            let others = state.mounts.iter().filter(|(other, _)| **other != key);
            let others = others.flat_map(|(_, mount)| &mount.lanes);
            let broken = |lane: &&Arc<Lane>| {
                lane.access == Access::ReadWrite && Arc::ptr_eq(&lane.image, &lane_image)
            };
            earlier.extend(others.filter(broken).cloned());
        }
        Ok(Joined {
            lane,
            earlier,
            told,
        })
    }

    async fn leave(self: &Arc<Self>, lane: &Arc<Lane>) {
        let last = {
            let mut state = self.state.lock();
            let Some(mount) = state.mounts.get_mut(&lane.key) else {
                return;
            };
            mount.lanes.retain(|l| l.number != lane.number);
            let last = mount.lanes.is_empty();
            if last {
                state.mounts.remove(&lane.key);
            }
            last
        };
        if last {
            let (image, key, now) = (lane.image.clone(), lane.key, self.started.elapsed());
            let left = blocking(move || {
                image.left(key.0, key.1, now);
                Ok(())
            });
            // Fails only when the runtime ends.
            let _ = left.await;
            if lane.access == Access::ReadOnly {
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

    /// Closes images that nobody has mounted any more, and waits for that of one of them: each may take as long as its disk
    /// does.
    async fn tidy(self: &Arc<Self>, awaited: Option<ImageName>) {
        let now = self.started.elapsed();
        let (idle, more) = self.idle(now);
        for name in idle {
            let server = self.clone();
            let wait = awaited.as_ref() == Some(&name);
            let closing = tokio::task::spawn_blocking(move || server.close_idle(&name, now));
            if wait {
                // Fails only when the runtime ends.
                let _ = closing.await;
            }
        }
        if more && !self.tidying.swap(true, Ordering::AcqRel) {
            tokio::spawn(tidy_on(Arc::downgrade(self)));
        }
    }

    /// Images that can be closed, and whether there are more that nobody has mounted: a thread that has done the last
    /// thing for a mount lets go of its image a little later.
    fn idle(&self, now: Duration) -> (Vec<ImageName>, bool) {
        let state = self.state.lock();
        let is_mounted = |image: &Arc<Image>| {
            let mut mounts = state.mounts.values();
            mounts.any(|mount| Arc::ptr_eq(&mount.image, image))
        };
        let (mut idle, mut more) = (Vec::new(), false);
        for (name, image) in &state.open {
            match is_free(image, now) {
                true => idle.push(name.clone()),
                false => more |= image.is_idle(now) && !is_mounted(image),
            }
        }
        (idle, more)
    }

    /// Closes an image if nobody has come for it. Whoever comes now waits, and opens it anew.
    fn close_idle(&self, name: &ImageName, now: Duration) {
        let door = self.door(name);
        let _closing = door.lock();
        let image = {
            let mut state = self.state.lock();
            // Whoever has it got it under this lock, so nobody else can come by one that only we have.
            match state.open.get(name) {
                Some(image) if is_free(image, now) => state.open.remove(name),
                _ => None,
            }
        };
        drop(image);
    }

    /// What is open, and what was done. Waits for no disk.
    #[must_use]
    pub fn counted(&self) -> Counted {
        let mut now = self.counters.now();
        let state = self.state.lock();
        for mount in state.mounts.values() {
            match mount.access {
                Access::ReadOnly => now.readers += 1,
                Access::ReadWrite => now.writers += 1,
            }
            now.lanes += mount.lanes.len() as u64;
        }
        now.images = state.open.len() as u64;
        now
    }

    /// The writers' leases of all images that were ever mounted, and who is connected. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::State`] when the site's state cannot be read.
    pub fn leases(&self) -> Result<Vec<Leased>, MountError> {
        let directory = self.config.state.join("overlays");
        let mut names = std::collections::BTreeSet::new();
        names.extend(
            self.state
                .lock()
                .mounts
                .values()
                .map(|m| m.image.name().clone()),
        );
        match std::fs::read_dir(&directory) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(state_error(&directory, e.to_string())),
            Ok(entries) => {
                for entry in entries.flatten() {
                    let name = entry.file_name().into_string().ok();
                    names.extend(name.and_then(|name| ImageName::new(name).ok()));
                }
            }
        }
        let mut out = Vec::new();
        for name in names {
            match self.leased(&name) {
                Ok(leased) => out.extend(leased),
                // One that cannot be read hides none of the others.
                Err(error) => out.push(Leased {
                    image: name.to_string(),
                    holder: None,
                    connected: self.connected(&name),
                    problem: Some(error.to_string()),
                }),
            }
        }
        Ok(out)
    }

    /// Who has an image mounted, or may still write it; none when nobody does. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`] when the lease is damaged, [`MountError::State`] when it cannot be read.
    pub fn leased(&self, name: &ImageName) -> Result<Option<Leased>, MountError> {
        let holder = lease_on_disk(&self.config.state, name)?;
        let leased = Leased {
            connected: self.connected(name),
            holder,
            image: name.as_str().to_owned(),
            problem: None,
        };
        Ok(Some(leased).filter(|l| l.holder.is_some() || !l.connected.is_empty()))
    }

    /// The mounts of an image that are connected, by what their sites are called.
    fn connected(&self, name: &ImageName) -> Vec<String> {
        let state = self.state.lock();
        let here = state.mounts.values().filter(|m| m.image.name() == name);
        here.map(|m| m.peer_name.clone()).collect()
    }

    /// Puts a new lease in the place of one whose file is damaged, which is kept beside it: then nobody may write the
    /// image until a mount asks. Says whether there was one. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: a disk that does not take it.
    pub fn replace_damaged_lease(&self, name: &ImageName) -> Result<bool, MountError> {
        // Nobody opens it meanwhile.
        let door = self.door(name);
        let _opening = door.lock();
        let directory = self.config.state.join("overlays").join(name.as_str());
        let open = self.state.lock().open.get(name).cloned();
        let Some(image) = open else {
            return Desk::replace_damaged(&directory).map_err(MountError::Refused);
        };
        let is_damaged = lease_on_disk(&self.config.state, name).is_err();
        if is_damaged {
            // Who has it open knows what was in it.
            image.store_lease().map_err(MountError::Refused)?;
        }
        Ok(is_damaged)
    }

    /// Takes the writer's lease of an image away from whoever has it; none when nobody does. What that mount has not
    /// written back stays in its cache; it is told.
    ///
    /// # Errors
    /// [`MountError::Refused`]: no such image, or a disk that does not take it.
    pub async fn break_lease(
        self: &Arc<Self>,
        name: &ImageName,
    ) -> Result<Option<Holder>, MountError> {
        let (server, name) = (self.clone(), name.clone());
        let broken = blocking(move || {
            // Nobody opens it meanwhile.
            let door = server.door(&name);
            let _opening = door.lock();
            let open = server.state.lock().open.get(&name).cloned();
            let holder = match &open {
                Some(image) => image.break_lease(),
                // It need not be one that can be opened: that may be why nobody can use the lease.
                None => {
                    let directory = server.config.state.join("overlays").join(name.as_str());
                    Desk::open(name, directory)?.break_lease()
                }
            };
            Ok((holder?, open))
        });
        let (holder, image) = broken.await.map_err(MountError::Refused)?;
        let Some(holder) = holder else {
            return Ok(None);
        };
        self.counters.lease_broken();
        let key = (PeerKey(holder.peer), holder.mount);
        let lanes = {
            let state = self.state.lock();
            state
                .mounts
                .get(&key)
                .map(|m| m.lanes.clone())
                .unwrap_or_default()
        };
        for lane in lanes {
            let refusal = Refusal::new(Code::Lost, lease::broken(lane.image.name().as_str()));
            lane.end(refusal).await;
        }
        // One that nobody has open forgets what was staged when it is opened for the next writer.
        if let Some(image) = image {
            blocking(move || image.abandon_unheld())
                .await
                .map_err(MountError::Refused)?;
        }
        Ok(Some(holder))
    }
}

/// Who may write an image, by what is written down in a site's state (see [`Config::state`]): also when no server runs.
///
/// # Errors
/// [`MountError::Refused`] when it is damaged, [`MountError::State`] when it cannot be read.
pub fn lease_on_disk(state: &Path, name: &ImageName) -> Result<Option<Holder>, MountError> {
    let directory = state.join("overlays").join(name.as_str());
    match Desk::open(name.clone(), directory.clone()) {
        Ok(desk) => Ok(desk.holder().cloned()),
        // It says how to go on.
        Err(refusal) if refusal.code == Code::Corrupt => Err(MountError::Refused(refusal)),
        Err(refusal) => Err(state_error(&directory, refusal.message)),
    }
}

/// The lanes of mounts as a service.
pub struct Lanes(pub Arc<Server>);

impl Service for Lanes {
    fn id(&self) -> &'static str {
        Open::SERVICE
    }

    fn right(&self) -> Right {
        Open::RIGHT
    }

    fn serve(&self, peer: Peer, call: Call) -> ServiceFuture<'_> {
        Box::pin(async move { Ok(self.0.serve_lane(peer, call).await?) })
    }
}

/// Closes images of which somebody lets go soon.
async fn tidy_on(server: Weak<Server>) {
    for _ in 0..CLOSE_TRIES {
        tokio::time::sleep(CLOSE_PAUSE).await;
        let Some(server) = server.upgrade() else {
            return;
        };
        let now = server.started.elapsed();
        let (idle, more) = server.idle(now);
        for name in idle {
            let server = server.clone();
            drop(tokio::task::spawn_blocking(move || {
                server.close_idle(&name, now);
            }));
        }
        if !more {
            break;
        }
    }
    if let Some(server) = server.upgrade() {
        server.tidying.store(false, Ordering::Release);
    }
}

/// Whether only the server has an image, and nobody is expected back.
fn is_free(image: &Arc<Image>, now: Duration) -> bool {
    Arc::strong_count(image) == 1 && image.is_idle(now)
}

fn no_front() -> Refusal {
    Refusal::new(Code::Unavailable, "the mount's front lane is not open")
}

fn state_error(path: &Path, reason: String) -> MountError {
    MountError::State {
        path: path.to_owned(),
        reason,
    }
}

/// Does what may wait for a disk where it may.
async fn blocking<T: Send + 'static>(
    what: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(what)
        .await
        .unwrap_or_else(|e| Err(Refusal::new(Code::Io, e.to_string())))
}
