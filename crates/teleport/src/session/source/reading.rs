//! An image being read: a thread walks it ahead of the socket, up to the limit of the window.

use std::sync::Arc;

use drover_core::Digest;
use drover_image::{Outgoing, open_for_sending};
use tokio::sync::{mpsc, watch};

use crate::TeleportError;
use crate::progress::Counters;
use crate::protocol::BATCH_BLOCKS;
use crate::session::SendItem;
use crate::stages::Lap;
use crate::walk::Walk;

/// Batches queued between the walk and the socket.
const WALK_QUEUE: usize = 4;

/// An image whose reading has started, up to the limit of the window.
pub struct Begun {
    pub image: Arc<Outgoing>,
    /// Changes when the image changes.
    pub stamp: Digest,
    /// The number of batches that may be read; the end of the session when it is dropped.
    pub walk_to: watch::Sender<u64>,
    pub walked: mpsc::Receiver<Result<Walked, TeleportError>>,
}

impl Begun {
    /// Opens an image and starts to read its first `ahead` batches on a thread of its own. Blocks on the disk.
    pub fn open(
        item: &SendItem,
        ahead: u64,
        counters: Arc<Counters>,
    ) -> Result<Self, TeleportError> {
        let (image, stamp) = match &item.snapshot {
            Some(snapshot) => (snapshot.image.clone(), snapshot.stamp),
            None => {
                let image = open_for_sending(&item.path, item.conversion)?;
                let stamp = stamp_of(&image);
                (Arc::new(image), stamp)
            }
        };
        let (walk_to, limit) = watch::channel(ahead);
        let (batches, walked) = mpsc::channel(WALK_QUEUE);
        let walker = image.clone();
        tokio::task::spawn_blocking(move || walk(&walker, limit, &batches, &counters));
        Ok(Self {
            image,
            stamp,
            walk_to,
            walked,
        })
    }
}

/// Output of the walk.
pub enum Walked {
    Batch {
        index: u64,
        /// Number of nonzero blocks.
        data: u64,
        frame: Vec<u8>,
    },
    End(Digest),
}

/// Walks the image as far as the window allows, repeatedly as it grows. Blocks the thread.
fn walk(
    image: &Outgoing,
    mut limit: watch::Receiver<u64>,
    batches: &mpsc::Sender<Result<Walked, TeleportError>>,
    counters: &Counters,
) {
    let mut walk = Walk::new(image);
    let total = image.layout.walk_blocks().div_ceil(BATCH_BLOCKS);
    let (stages, mut lap) = (&counters.stages, Lap::start());
    for index in 0..total {
        let allowed = tokio::runtime::Handle::current()
            .block_on(limit.wait_for(|l| *l > index))
            .is_ok();
        if !allowed {
            return; // The session is over.
        }
        lap.wait(&stages.read);
        let next = match walk.next_timed(stages, &mut lap) {
            Ok(Some(batch)) => {
                Counters::add(&counters.walked_blocks, batch.data.blocks());
                Counters::add(
                    &counters.zero_blocks,
                    batch.data.blocks() - batch.data.count(),
                );
                Ok(Walked::Batch {
                    index,
                    data: batch.data.count(),
                    frame: batch.encode(),
                })
            }
            Ok(None) => return,
            Err(e) => Err(e),
        };
        let failed = next.is_err();
        if batches.blocking_send(next).is_err() || failed {
            return;
        }
        lap.wait(&stages.digest);
    }
    let digest = walk.digest();
    lap.busy(&stages.digest);
    let _ = batches.blocking_send(digest.map(Walked::End));
}

/// A stamp of the image's files that changes when they change, independent of the path used to open them.
fn stamp_of(image: &Outgoing) -> Digest {
    let mut h = blake3::Hasher::new_derive_key("drover 2026 source stamp");
    for (_, s) in &image.stamps {
        for n in [s.device, s.inode, s.size] {
            h.update(&n.to_le_bytes());
        }
        h.update(&s.mtime_ns.to_le_bytes());
        h.update(&s.ctime_ns.to_le_bytes());
    }
    Digest(*h.finalize().as_bytes())
}
