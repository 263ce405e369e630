//! An image being read: a thread walks it ahead of the socket, up to the limit of the window.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::Digest;
use drover_image::{Format, Outgoing, VirtualDisk, open_for_sending};
use drover_store::Likeness;
use drover_store::profile::Profile;
use tokio::sync::{mpsc, watch};

use crate::TeleportError;
use crate::codec::Have;
use crate::progress::Counters;
use crate::protocol::BATCH_BLOCKS;
use crate::session::{FindProfile, SendItem};
use crate::stages::Lap;
use crate::walk::Walk;

/// How long a file must not have changed for its stamp to tell of the next change: the times of files are not exact.
const MIN_SETTLED: Duration = Duration::from_secs(2);

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
    /// The batches that need not be read, if the destination says so before it accepts.
    pub have: Arc<OnceLock<Have>>,
    /// The generations of the disk, encoded.
    pub generations: Option<Arc<[u8]>>,
    /// What is noted of the image to choose similar ones, encoded; `None` if nothing is known of it.
    pub likeness: Option<Vec<u8>>,
    /// What a machine reads first of its disk.
    pub profile: Option<Arc<Profile>>,
}

impl Begun {
    /// Opens an image and starts to read its first `ahead` batches on a thread of its own. Blocks on the disk.
    pub fn open(
        item: &SendItem,
        ahead: u64,
        counters: Arc<Counters>,
        profiles: Option<&FindProfile>,
    ) -> Result<Self, TeleportError> {
        let mut generations = None;
        let (image, stamp) = match &item.snapshot {
            Some(snapshot) => {
                generations.clone_from(&snapshot.generations);
                (snapshot.image.clone(), snapshot.stamp)
            }
            None => {
                let image = open_for_sending(&item.path, item.conversion)?;
                let stamp = stamp_of(&image);
                (Arc::new(image), stamp)
            }
        };
        // What need not be read is known once it is accepted.
        let ahead = if generations.is_some() { 0 } else { ahead };
        let (walk_to, limit) = watch::channel(ahead);
        let (batches, walked) = mpsc::channel(WALK_QUEUE);
        let (walker, have) = (image.clone(), Arc::new(OnceLock::new()));
        let skip = have.clone();
        tokio::task::spawn_blocking(move || walk(&walker, limit, &skip, &batches, &counters));
        Ok(Self {
            stamp,
            walk_to,
            walked,
            have,
            likeness: match &generations {
                // The destination may have the disk itself.
                Some(_) => None,
                None => likeness_of(&image),
            },
            profile: match (&item.profile, profiles) {
                (None, Some(find)) => find_profile(&image, find),
                (known, _) => known.clone(),
            },
            image,
            generations,
        })
    }
}

fn find_profile(image: &Outgoing, find: &FindProfile) -> Option<Arc<Profile>> {
    let found = match image.format {
        Format::Raw => (find.0)(&image.content),
        _ => (find.0)(&VirtualDisk::peek(Arc::clone(&image.content)).ok()?),
    };
    found.map(Arc::new)
}

fn likeness_of(image: &Outgoing) -> Option<Vec<u8>> {
    let disk = VirtualDisk::peek(Arc::clone(&image.content)).ok()?;
    let likeness = Likeness::look(&disk);
    (likeness != Likeness::default()).then(|| likeness.encode())
}

/// Output of the walk.
pub enum Walked {
    Batch {
        index: u64,
        /// Number of nonzero blocks.
        data: u64,
        frame: Vec<u8>,
    },
    /// A batch that was not read.
    Skipped { index: u64, blocks: u64 },
    /// With the digest, unless batches were skipped.
    End(Option<Digest>),
}

/// Walks the image as far as the window allows, repeatedly as it grows. Blocks the thread.
fn walk(
    image: &Outgoing,
    mut limit: watch::Receiver<u64>,
    have: &OnceLock<Have>,
    batches: &mpsc::Sender<Result<Walked, TeleportError>>,
    counters: &Counters,
) {
    let mut walk = Walk::new(image);
    let total = image.layout.walk_blocks().div_ceil(BATCH_BLOCKS);
    let (stages, mut lap) = (&counters.stages, Lap::start());
    let mut skipped = false;
    for index in 0..total {
        let allowed = tokio::runtime::Handle::current()
            .block_on(limit.wait_for(|l| *l > index))
            .is_ok();
        if !allowed {
            return; // The session is over.
        }
        lap.wait(&stages.read);
        if have.get().is_some_and(|have| have.has(index)) {
            walk.skip_batch();
            skipped = true;
            let blocks = image.layout.walk_blocks() - index * BATCH_BLOCKS;
            let blocks = blocks.min(BATCH_BLOCKS);
            Counters::add(&counters.walked_blocks, blocks);
            let next = Walked::Skipped { index, blocks };
            if batches.blocking_send(Ok(next)).is_err() {
                return;
            }
            continue;
        }
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
    let digest = match skipped {
        true => Ok(None),
        false => walk.digest().map(Some),
    };
    lap.busy(&stages.digest);
    let _ = batches.blocking_send(digest.map(Walked::End));
}

/// What the stamp of an image's files is now, by which a later change is noticed; none if changes could go unnoticed: of a block
/// device, of a file that changed within the last seconds, and of what is no file. Reads headers only.
///
/// # Errors
/// When the image cannot be opened.
pub fn source_stamp(item: &SendItem) -> Result<Option<Digest>, TeleportError> {
    if item.snapshot.is_some() {
        return Ok(None);
    }
    let image = open_for_sending(&item.path, item.conversion)?;
    let now = std::time::SystemTime::now();
    let now = now
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let settled = now.saturating_sub(MIN_SETTLED).as_nanos() as i128;
    let is_plain = |(path, stamp): &(std::path::PathBuf, drover_image::Stamp)| {
        let plain = std::fs::metadata(path).is_ok_and(|about| about.is_file());
        plain && stamp.ctime_ns < settled && stamp.mtime_ns < settled
    };
    let plain = !image.stamps.is_empty() && image.stamps.iter().all(is_plain);
    Ok(plain.then(|| {
        let mut h = blake3::Hasher::new_derive_key("drover 2026-11 source stamp and form");
        h.update(&stamp_of(&image).0);
        h.update(format!("{:?}", item.conversion).as_bytes());
        Digest(*h.finalize().as_bytes())
    }))
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
