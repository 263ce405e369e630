//! The flocks of a site while they are received.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use drover_core::CompactIndex;
use drover_index::{ImageId, SequenceStore};
use drover_net::PeerKey;
use parking_lot::{Mutex, RwLock};

use super::provenance::Provenance;
use super::record::{FlockRecord, FlockState};
use crate::destination::Run;
use crate::protocol::Origins;

/// A flock that is being received.
pub(crate) struct Flock {
    /// The key of its record.
    pub(crate) key: String,
    /// The number of this sending of it.
    pub(crate) id: [u8; 16],
    /// Who sends it.
    pub(crate) peer: PeerKey,
    /// Whether its images get their names together.
    pub(crate) atomic: bool,
    provenance: Mutex<Provenance>,
    /// The sessions that send its images now.
    pub(crate) sessions: AtomicU32,
}

impl Flock {
    pub(crate) fn new(key: &str, record: &FlockRecord) -> Arc<Self> {
        let mut provenance = Provenance::default();
        // After a restart it is only known that they came with the flock.
        let came = record.images.iter().filter(|image| image.image != 0);
        came.for_each(|image| provenance.begin(ImageId(image.image)));
        Arc::new(Flock {
            key: key.into(),
            id: record.id,
            peer: record.peer,
            atomic: record.atomic,
            provenance: Mutex::new(provenance),
            sessions: AtomicU32::new(0),
        })
    }

    /// See [`Provenance::begin`].
    pub(crate) fn begin(&self, image: ImageId) {
        self.provenance.lock().begin(image);
    }

    /// Whether the image is one of its images, and was offered.
    pub(crate) fn has(&self, image: ImageId) -> bool {
        self.provenance.lock().has(image)
    }

    /// See [`Provenance::planned`].
    pub(crate) fn planned(&self, image: ImageId, base: CompactIndex, runs: &[Run]) {
        self.provenance.lock().planned(image, base, runs);
    }

    /// See [`Provenance::recorded`].
    pub(crate) fn recorded(&self, image: ImageId, base: CompactIndex, count: u64, had: bool) {
        self.provenance.lock().recorded(image, base, count, had);
    }

    /// Counts data blocks of an image from `first` on, but those in `failed` (ascending), as reused.
    pub(crate) fn reused(
        &self,
        image: ImageId,
        first: u64,
        count: u64,
        failed: impl Iterator<Item = u64>,
        origins: &mut Origins,
    ) {
        let provenance = self.provenance.lock();
        let mut at = first;
        for wrong in failed.chain(std::iter::once(first + count)) {
            provenance.tally(image, at, wrong.saturating_sub(at), origins);
            at = wrong + 1;
        }
    }

    /// A session of it, which counts until this is dropped.
    pub(crate) fn session(self: &Arc<Self>) -> FlockSession {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        FlockSession(Arc::clone(self))
    }
}

/// A session that sends images of a flock.
pub(crate) struct FlockSession(pub(crate) Arc<Flock>);

impl Drop for FlockSession {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The flocks of a site.
#[derive(Default)]
pub(crate) struct Flocks {
    /// What is known of each, by its key.
    pub(crate) known: Mutex<HashMap<String, FlockRecord>>,
    /// Those that are not over.
    pub(crate) live: RwLock<Vec<Arc<Flock>>>,
    /// Locked while the record of one that nodes share is changed.
    pub(crate) changing: Mutex<()>,
    /// Locked while one is ended.
    pub(crate) ending: Mutex<()>,
}

impl Flocks {
    /// The flocks that an earlier run has left.
    pub(crate) fn of(records: Vec<(PathBuf, FlockRecord)>) -> Self {
        let all = Flocks::default();
        for (path, record) in records {
            let Some(key) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            if record.state == FlockState::Open {
                all.live.write().push(Flock::new(key, &record));
            }
            all.known.lock().insert(key.into(), record);
        }
        all
    }

    /// Blocks of an image were stored in the sequence cache.
    pub(crate) fn stored(&self, image: ImageId, store: &SequenceStore) {
        for flock in self.live.read().iter() {
            flock.provenance.lock().stored(image, store);
        }
    }

    pub(crate) fn find(&self, peer: &PeerKey, id: &[u8; 16]) -> Option<Arc<Flock>> {
        let live = self.live.read();
        live.iter()
            .find(|flock| flock.peer == *peer && flock.id == *id)
            .cloned()
    }

    /// The record of a flock, unless another sending of it has begun.
    pub(crate) fn record(&self, flock: &Flock) -> Option<FlockRecord> {
        let known = self.known.lock();
        known.get(&flock.key).filter(|r| r.id == flock.id).cloned()
    }
}
