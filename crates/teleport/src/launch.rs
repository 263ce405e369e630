//! Images in transit from which machines run (vmflock §3.5): what is here is read, what is not is asked for ahead of
//! everything and waited for.
//!
//! A [`Launch`] reads the partial file of a transfer. Which blocks of it are in place [`Partial`] knows, whether the
//! transfer runs or has stopped. Readers wait for the others by [`LaunchDevice::arrival`]; a running transfer is told of them, and of
//! which blocks come next in the background. When the image is delivered the file stays the same one, with its name.
//!
//! [`Partial`]: crate::partials::Partial

mod device;
mod order;
mod places;
mod registry;
mod sessions;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::ImageName;
use drover_image::Layout;
use drover_index::ImageId;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::codec::{Runs, Want};
use crate::partials::Partials;
use crate::protocol::BATCH_BLOCKS;
use crate::transfer::Opening;

pub use device::LaunchDevice;
pub(crate) use order::{SendsFirst, send_first};
pub use order::{boot, follow};
use places::Places;
pub(crate) use registry::Launches;
pub(crate) use sessions::Serving;
use sessions::{Readers, unix_now};

/// How long a reader waits before it asks again for blocks that were not asked for at the source: they were to be
/// reused, and may have turned out wrong.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// Blocks that are asked for with one that a reader waits for, aligned: it is likely to read on.
const TOGETHER: u64 = 8;

/// An image in transit that is read.
pub struct Launch {
    name: ImageName,
    /// The key of its transfer.
    key: String,
    image: ImageId,
    peer_name: String,
    format: String,
    layout: Arc<Layout>,
    places: Places,
    /// The partial file, which becomes the image.
    file: File,
    partials: Arc<Partials>,
    sessions: Arc<Serving>,
    /// The site has no other image.
    nothing_else: bool,
    asked: Mutex<Asked>,
    readers: Arc<Mutex<Readers>>,
    /// No machine runs from it: it only has blocks come in another order.
    only_orders: bool,
    /// Its path, once it is delivered.
    delivered: OnceLock<PathBuf>,
}

/// What a session was asked for.
#[derive(Default)]
struct Asked {
    /// Which session.
    session: u64,
    blocks: HashSet<u64>,
    /// Those that a machine waited for.
    waited: HashSet<u64>,
}

/// A launched image, for people and scripts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchStatus {
    /// The image.
    pub image: String,
    /// Who sends it.
    pub peer: String,
    /// Whether it is being sent; else its source has to send it again.
    pub running: bool,
    /// Bytes that are in place.
    pub done_bytes: u64,
    /// Bytes of the image without holes.
    pub total_bytes: u64,
    /// Since when a reader has been waiting for blocks, in seconds since 1970.
    pub waiting_since_unix: Option<i64>,
    /// Since when nothing has been sent, in seconds since 1970.
    pub stopped_since_unix: Option<i64>,
}

impl Launch {
    pub(crate) fn new(
        opening: Opening,
        key: String,
        layout: Arc<Layout>,
        file: File,
        partials: Arc<Partials>,
        sessions: Arc<Serving>,
        nothing_else: bool,
    ) -> Self {
        let image = ImageId(opening.image);
        Launch {
            image,
            readers: sessions.readers(image),
            only_orders: false,
            name: opening.offer.name,
            key,
            peer_name: opening.peer_name,
            format: opening.offer.format,
            places: Places::new(&layout),
            layout,
            file,
            partials,
            sessions,
            nothing_else,
            asked: Mutex::default(),
            delivered: OnceLock::new(),
        }
    }

    /// Has it ask for blocks in the order of a profile, without a machine that runs from it.
    pub(crate) fn only_orders(mut self) -> Self {
        self.only_orders = true;
        self
    }

    /// The key of its transfer.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// It was delivered, to this path.
    fn delivered(&self, path: &Path) {
        let _ = self.delivered.set(path.into());
        self.partials.changed.notify_waiters();
    }

    /// The image's ID, which it also has once it is delivered.
    #[must_use]
    pub fn image(&self) -> ImageId {
        self.image
    }

    /// Whether it is complete, and has its name.
    #[must_use]
    pub fn is_delivered(&self) -> bool {
        self.delivered.get().is_some()
    }

    /// Those blocks of the walk that are not in place.
    fn lacking(&self, blocks: impl Iterator<Item = u64>) -> Vec<u64> {
        if self.is_delivered() {
            return Vec::new();
        }
        let partial = self.partials.get(self.image);
        let lacking = match partial {
            Some(partial) => partial.lacking(blocks),
            None => blocks.collect(),
        };
        // It may have been delivered, and forgotten as a partial one, in between.
        match self.is_delivered() {
            true => Vec::new(),
            false => lacking,
        }
    }

    /// Waits until `lacking` finds nothing, for a reader or not; what it finds is asked for. Cancel safe.
    async fn until_here<F: Future<Output = Vec<u64>>>(
        &self,
        is_reader: bool,
        lacking: impl Fn() -> F,
    ) {
        let mut reader = None;
        loop {
            let changed = self.partials.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let blocks = lacking().await;
            if blocks.is_empty() {
                return;
            }
            if is_reader {
                reader.get_or_insert_with(|| Reader::of(self));
            }
            self.ask(&blocks, TOGETHER, is_reader);
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(ASK_AGAIN) => self.forget(&blocks),
            }
        }
    }

    /// Notified whenever there may be more of it.
    fn changes(&self) -> Arc<Notify> {
        self.partials.changed.clone()
    }

    /// Whether what is asked for in the background has to wait: for a reader, or for a profile that says better what is
    /// needed.
    fn gives_way(&self) -> bool {
        let readers = self.readers.lock();
        readers.waiting > 0 || (readers.profiles > 0 && !self.only_orders)
    }

    /// The blocks before this one are announced: of those only what the site has not is sent.
    fn announced(&self) -> u64 {
        let partial = self.partials.get(self.image);
        partial.map_or(0, |partial| partial.announced())
    }

    /// Forgets that blocks were asked for.
    fn forget(&self, blocks: &[u64]) {
        let mut asked = self.asked.lock();
        for block in blocks {
            asked.blocks.remove(block);
            asked.waited.remove(block);
        }
    }

    /// Asks the session for blocks ahead of all others, unless it was asked for them as urgently; with each, for all of its group of
    /// so many. `waited`: a machine waits for them.
    fn ask(&self, blocks: &[u64], together: u64, waited: bool) {
        let Some((session, want)) = self.sessions.running(self.image) else {
            return;
        };
        let mut asked = self.asked.lock();
        if asked.session != session {
            *asked = Asked {
                session,
                ..Asked::default()
            };
        }
        let end = self.layout.walk_blocks();
        let mut wanted: Vec<u64> = Vec::new();
        let known = match waited {
            true => &asked.waited,
            false => &asked.blocks,
        };
        for block in blocks.iter().filter(|block| !known.contains(block)) {
            let first = block - block % together;
            wanted.extend(first..(first + together).min(end));
        }
        wanted.sort_unstable();
        wanted.dedup();
        for part in wanted.chunks(BATCH_BLOCKS as usize) {
            let runs: Runs = part.iter().copied().collect();
            // If it has too much to do just now, the reader asks again.
            if want(Want { waited, runs }) {
                asked.blocks.extend(part);
                if waited {
                    asked.waited.extend(part);
                }
            }
        }
        if asked.blocks.len() > MAX_ASKED {
            asked.blocks.clear();
            asked.waited.clear();
        }
    }

    /// Its state.
    #[must_use]
    pub fn status(&self) -> LaunchStatus {
        let block = drover_core::BLOCK_SIZE_U64;
        let total = self.layout.walk_blocks();
        let partial = self.partials.get(self.image);
        let done = match self.is_delivered() {
            true => total,
            false => partial.map_or(0, |partial| partial.blocks_in_place()),
        };
        let readers = self.readers.lock();
        // What is complete and only waits for its name needs no source.
        let is_here = self.is_delivered() || done >= total;
        let running = is_here || self.sessions.running(self.image).is_some();
        LaunchStatus {
            image: self.name.to_string(),
            peer: self.peer_name.clone(),
            running,
            done_bytes: done.min(total) * block,
            total_bytes: total * block,
            waiting_since_unix: (readers.waiting > 0).then_some(readers.since_unix),
            stopped_since_unix: match running {
                true => None,
                false => Some(self.sessions.stopped_since(self.image)),
            },
        }
    }
}

/// Upper bound on the blocks that are remembered as asked for; asking again does no harm.
const MAX_ASKED: usize = 1 << 16;

/// A reader that waits, until it is dropped.
struct Reader<'a>(&'a Launch);

impl<'a> Reader<'a> {
    fn of(launch: &'a Launch) -> Self {
        let mut readers = launch.readers.lock();
        if readers.waiting == 0 {
            readers.since_unix = unix_now();
        }
        readers.waiting += 1;
        drop(readers);
        Reader(launch)
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.readers.lock().waiting -= 1;
    }
}

impl std::fmt::Debug for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launch")
            .field("name", &self.name)
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}
