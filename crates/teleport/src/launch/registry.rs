//! The launches of a site.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};

use drover_core::ImageName;
use drover_index::ImageId;
use parking_lot::Mutex;

use super::Launch;
use super::sessions::Serving;

/// The launches of a site, and the sessions that they ask for blocks.
#[derive(Default)]
pub(crate) struct Launches {
    open: Mutex<HashMap<ImageName, Weak<Launch>>>,
    /// The sessions.
    pub sessions: Arc<Serving>,
    /// Held while a boot of an image in transit is kept, or an image in transit becomes one of the site with the boots there are.
    pub boots: Mutex<()>,
}

impl Launches {
    /// The launch of an image, if it is open.
    pub fn get(&self, name: &ImageName) -> Option<Arc<Launch>> {
        self.open.lock().get(name).and_then(Weak::upgrade)
    }

    /// All launches that are open, by name.
    pub fn all(&self) -> Vec<Arc<Launch>> {
        let open = self.open.lock();
        let mut all: Vec<_> = open.values().filter_map(Weak::upgrade).collect();
        drop(open);
        all.sort_by(|a, b| a.name().cmp(b.name()));
        all
    }

    /// The launch of an image: the open one, or a new one.
    pub fn open<E>(
        &self,
        name: &ImageName,
        new: impl FnOnce() -> Result<Option<Launch>, E>,
    ) -> Result<Option<Arc<Launch>>, E> {
        let mut open = self.open.lock();
        if let Some(launch) = open.get(name).and_then(Weak::upgrade)
            && !launch.is_delivered()
        {
            return Ok(Some(launch));
        }
        let Some(launch) = new()?.map(Arc::new) else {
            return Ok(None);
        };
        open.retain(|_, launch| launch.strong_count() > 0);
        open.insert(name.clone(), Arc::downgrade(&launch));
        let open: Vec<_> = open.values().filter_map(Weak::upgrade).collect();
        let images: Vec<ImageId> = open.iter().map(|launch| launch.image()).collect();
        self.sessions.watch(&images);
        Ok(Some(launch))
    }

    /// An image was delivered, to this path.
    pub fn delivered(&self, image: ImageId, name: &ImageName, path: &Path) {
        if let Some(launch) = self.get(name).filter(|launch| launch.image() == image) {
            launch.delivered(path);
        }
    }
}
