//! The sessions that may be asked for blocks ahead of all others, and who has them asked.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use drover_index::ImageId;
use parking_lot::Mutex;

use crate::codec::Want;

/// Asks a session for blocks; `false` when it has too much to do.
pub(crate) type Ask = dyn Fn(Want) -> bool + Send + Sync;

/// The sessions, by the image that they receive.
#[derive(Default)]
pub(crate) struct Serving(Mutex<State>);

#[derive(Default)]
struct State {
    running: HashMap<ImageId, (u64, Arc<Ask>)>,
    /// When they ended, of images that are watched.
    ended: HashMap<ImageId, i64>,
    last: u64,
    /// Who reads them, of images that are read.
    readers: HashMap<ImageId, Weak<Mutex<Readers>>>,
}

/// Who reads an image in transit: of all launches of it together.
#[derive(Default)]
pub(crate) struct Readers {
    /// Readers that wait for blocks.
    pub waiting: u64,
    /// Since when some have been waiting, in seconds since 1970.
    pub since_unix: i64,
    /// Profiles that its blocks come in the order of.
    pub profiles: u64,
}

/// A session that may be asked, until it is dropped.
pub(crate) struct Served {
    of: Arc<Serving>,
    image: ImageId,
}

impl Serving {
    /// Lets a session be asked for blocks of its image.
    pub fn serve(self: &Arc<Self>, image: ImageId, ask: Box<Ask>) -> Served {
        let mut state = self.0.lock();
        state.last += 1;
        let number = state.last;
        state.running.insert(image, (number, Arc::from(ask)));
        Served {
            of: self.clone(),
            image,
        }
    }

    /// The session that receives an image, by its number, if there is one.
    pub fn running(&self, image: ImageId) -> Option<(u64, Arc<Ask>)> {
        self.0.lock().running.get(&image).cloned()
    }

    /// Who reads an image.
    pub fn readers(&self, image: ImageId) -> Arc<Mutex<Readers>> {
        let readers = &mut self.0.lock().readers;
        if let Some(known) = readers.get(&image).and_then(Weak::upgrade) {
            return known;
        }
        let new = Arc::default();
        readers.retain(|_, of| of.strong_count() > 0);
        readers.insert(image, Arc::downgrade(&new));
        new
    }

    /// Watches when the sessions of these images end, and of no others.
    pub fn watch(&self, images: &[ImageId]) {
        let mut state = self.0.lock();
        state.ended.retain(|image, _| images.contains(image));
        for image in images {
            state.ended.entry(*image).or_insert_with(unix_now);
        }
    }

    /// Since when no session has received an image.
    pub fn stopped_since(&self, image: ImageId) -> i64 {
        let state = self.0.lock();
        state.ended.get(&image).copied().unwrap_or_else(unix_now)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let mut state = self.of.0.lock();
        state.running.remove(&self.image);
        if let Some(ended) = state.ended.get_mut(&self.image) {
            *ended = unix_now();
        }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX))
}
