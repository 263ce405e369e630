//! A site's side: images served as devices to mounts.

mod flow;
mod image;
mod lane;
mod pool;
mod queue;
mod work;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use drover_core::ImageName;
use drover_device::remote::Shape;
use drover_net::{FrameReader, FrameWriter, PeerKey};
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{debug, info};

use crate::MountError;
use crate::protocol::{
    Access, Answer, Code, Identity, MAX_LANES, MAX_MOUNT_FRAME, MountId, Open, Opened, Refusal,
    check_shape, encode_message, kind,
};

pub use image::{Base, Epochs, Images};

use image::Image;
use lane::{Lane, Parts, Shared};

pub(crate) use lane::KEEP_ALIVE;
use pool::Pool;

/// Lanes of all mounts of a site at most.
pub const MAX_SITE_LANES: usize = 512;

/// Mounts of one peer at most.
pub const MAX_PEER_MOUNTS: usize = 64;

/// How long a refused lane's last word may take.
const LAST_WORD: Duration = Duration::from_secs(5);

/// Who is at the other end of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The key that it proved to have.
    pub key: PeerKey,
    /// What people call it.
    pub name: String,
}

/// All mounts of a site.
pub struct Server {
    images: Arc<dyn Images>,
    pool: Arc<Pool>,
    next_lane: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Images that a mount has open.
    open: HashMap<ImageName, Arc<Image>>,
    mounts: HashMap<(PeerKey, MountId), Mount>,
}

/// A mount that has lanes.
struct Mount {
    image: Arc<Image>,
    shared: Arc<Shared>,
    access: Access,
    shape: Shape,
    lanes: Vec<Arc<Lane>>,
}

impl Server {
    /// A server of `images` with so many threads that read, hash and compress.
    ///
    /// # Errors
    /// [`MountError::System`] when the threads cannot be started.
    pub fn new(images: Arc<dyn Images>, threads: usize) -> Result<Arc<Self>, MountError> {
        Ok(Arc::new(Self {
            images,
            pool: Arc::new(Pool::new(threads)?),
            next_lane: AtomicU64::new(1),
            state: Mutex::default(),
        }))
    }

    /// Serves a lane that `peer` opened with the message `open`, until it ends.
    ///
    /// # Errors
    /// [`MountError`]: refused, a protocol that was not kept to, or a link that broke. The peer has been told, where
    /// it can be.
    pub async fn serve_lane(
        self: &Arc<Self>,
        mut reader: FrameReader,
        mut writer: FrameWriter,
        peer: Peer,
        open: &[u8],
        stop: watch::Receiver<bool>,
    ) -> Result<(), MountError> {
        reader.set_max_frame(MAX_MOUNT_FRAME);
        writer.set_max_frame(MAX_MOUNT_FRAME);
        KEEP_ALIVE.apply(&mut reader, &mut writer);
        let result = match Open::decode(open) {
            Ok(open) => self.enter(&peer, open).await,
            Err(refusal) => Err(refusal),
        };
        let (lane, opened) = match result {
            Ok(entered) => entered,
            Err(refusal) => {
                info!(peer = %peer.name, %refusal, "mount refused");
                let head = encode_message(&Answer::Error {
                    id: 0,
                    refusal: refusal.clone(),
                });
                writer.send(kind::ANSWER, &head).await?;
                drover_net::close(reader, writer, LAST_WORD).await.ok();
                return Err(MountError::Refused(refusal));
            }
        };
        let key = (peer.key, lane.1);
        let lane = lane.0;
        debug!(peer = %peer.name, image = %lane.image.name(), lane = ?lane.kind, link = lane.link, "lane open");
        let head = encode_message(&Answer::Opened(opened));
        let result = async {
            writer.send(kind::ANSWER, &head).await?;
            writer.flush().await?;
            lane.serve(&mut reader, &mut writer, stop).await
        }
        .await;
        lane.close();
        lane.drained().await;
        self.leave(key, &lane);
        drover_net::close(reader, writer, LAST_WORD).await.ok();
        result
    }

    async fn enter(
        self: &Arc<Self>,
        peer: &Peer,
        open: Open,
    ) -> Result<((Arc<Lane>, MountId), Opened), Refusal> {
        let image = self.image(&open.image).await?;
        let shape = Shape {
            size: image.device().size(),
            chunk: open.chunk,
        };
        check_shape(shape).map_err(|text| {
            let name = open.image.as_str();
            Refusal::new(Code::Unsupported, format!("{name}: {text}"))
        })?;
        let key = (peer.key, open.mount);
        // The lanes of earlier links must have ended before this one may do anything.
        let earlier = self.earlier(key, open.link)?;
        for lane in earlier {
            lane.close();
            lane.drained().await;
        }
        let (lane, identity) = self.join(key, &open, image, shape)?;
        let can = lane.image.device().capabilities();
        let opened = Opened {
            size: shape.size,
            chunk: shape.chunk,
            identity,
            fresh: open.expected == Some(identity),
            read_only: open.access == Access::ReadOnly,
            can: [can.fast_zeroes, can.trim, can.durable, can.extents],
        };
        Ok(((lane, open.mount), opened))
    }

    /// The image, opened if no mount has it open.
    async fn image(self: &Arc<Self>, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        if let Some(image) = self.state.lock().open.get(name) {
            return Ok(image.clone());
        }
        let (images, wanted) = (self.images.clone(), name.clone());
        let found = tokio::task::spawn_blocking(move || images.open(&wanted)).await;
        let base = found.map_err(|e| Refusal::new(Code::Io, e.to_string()))??;
        let mut state = self.state.lock();
        // Another lane may have been faster.
        let image = state
            .open
            .entry(name.clone())
            .or_insert_with(|| Arc::new(Image::read_only(name.clone(), base)));
        Ok(image.clone())
    }

    /// Lanes of earlier links of a mount.
    fn earlier(&self, key: (PeerKey, MountId), link: u64) -> Result<Vec<Arc<Lane>>, Refusal> {
        let state = self.state.lock();
        let Some(mount) = state.mounts.get(&key) else {
            return Ok(Vec::new());
        };
        if mount.lanes.iter().any(|lane| lane.link > link) {
            let text = "this mount has connected anew meanwhile";
            return Err(Refusal::new(Code::Unavailable, text));
        }
        let earlier = mount.lanes.iter().filter(|lane| lane.link < link);
        Ok(earlier.cloned().collect())
    }

    fn join(
        &self,
        key: (PeerKey, MountId),
        open: &Open,
        image: Arc<Image>,
        shape: Shape,
    ) -> Result<(Arc<Lane>, Identity), Refusal> {
        let busy = |text: &str| Err(Refusal::new(Code::Busy, text));
        let mut state = self.state.lock();
        let lanes: usize = state.mounts.values().map(|m| m.lanes.len()).sum();
        if lanes >= MAX_SITE_LANES {
            return busy("this site serves as many lanes as it can; try again later");
        }
        let known = state.mounts.contains_key(&key);
        if !known && state.mounts.keys().filter(|k| k.0 == key.0).count() >= MAX_PEER_MOUNTS {
            return busy("this site serves as many mounts of yours as it may; unmount one");
        }
        let mount = state.mounts.entry(key).or_insert_with(|| Mount {
            image: image.clone(),
            shared: Arc::default(),
            access: open.access,
            shape,
            lanes: Vec::new(),
        });
        if mount.image.name() != image.name() || mount.access != open.access || mount.shape != shape
        {
            let text = "lanes of one mount must agree on image, access and chunk";
            return Err(Refusal::new(Code::Protocol, text));
        }
        if mount.lanes.len() >= 2 * MAX_LANES {
            return busy("a mount has too many lanes");
        }
        let lane = Lane::new(Parts {
            number: self.next_lane.fetch_add(1, Ordering::Relaxed),
            kind: open.lane,
            link: open.link,
            access: open.access,
            image: image.clone(),
            shape,
            shared: mount.shared.clone(),
            pool: self.pool.clone(),
        });
        mount.lanes.push(lane.clone());
        let identity = Identity {
            digest: image.digest(),
            edition: 0,
            epoch: image.committed(),
        };
        Ok((lane, identity))
    }

    fn leave(&self, key: (PeerKey, MountId), lane: &Arc<Lane>) {
        let mut state = self.state.lock();
        let Some(mount) = state.mounts.get_mut(&key) else {
            return;
        };
        mount.lanes.retain(|l| l.number != lane.number);
        if !mount.lanes.is_empty() {
            return;
        }
        state.mounts.remove(&key);
        let name = lane.image.name();
        if !state.mounts.values().any(|m| m.image.name() == name) {
            state.open.remove(name);
        }
    }
}
