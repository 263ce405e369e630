//! The images that mounts have open: opened for the first mount, closed after the last.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use drover_core::ImageName;
use drover_net::{Code, Refusal};
use parking_lot::Mutex;

use super::Server;
use super::blocking::blocking;
use super::image::Image;

/// How often, and how many times, images that are still in use are checked again before closing.
const CLOSE_PAUSE: Duration = Duration::from_millis(50);
const CLOSE_TRIES: u32 = 100;

impl Server {
    /// Closes an open image that has been replaced by another of that name. It stays open for readers that may
    /// reconnect, which would otherwise read one image's bytes under the other's digest.
    pub(super) async fn close_replaced(self: &Arc<Self>, name: &ImageName) -> Result<(), Refusal> {
        if !self.state.lock().open.contains_key(name) {
            return Ok(());
        }
        let (server, name) = (self.clone(), name.clone());
        blocking(move || {
            let image_lock = server.image_lock(&name);
            let _closing = image_lock.lock();
            let now = server.config.images.digest(&name)?;
            let mut state = server.state.lock();
            let former = match state.open.get(&name) {
                Some(image) if image.digest() != now => {
                    // Only when it is idle: an overlay has one owner, so it is not reopened while in use.
                    if Arc::strong_count(image) > 1 {
                        let text =
                            format!("{name} was replaced, and a mount still uses the old image");
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

    /// The lock held while an image is opened or closed.
    pub(super) fn image_lock(&self, name: &ImageName) -> Arc<Mutex<()>> {
        let mut image_locks = self.image_locks.lock();
        if let Some(image_lock) = image_locks.get(name).and_then(Weak::upgrade) {
            return image_lock;
        }
        image_locks.retain(|_, image_lock| image_lock.strong_count() > 0);
        let image_lock = Arc::default();
        image_locks.insert(name.clone(), Arc::downgrade(&image_lock));
        image_lock
    }

    /// The image, opened if no mount has it open.
    pub(super) async fn image(self: &Arc<Self>, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        if let Some(image) = self.state.lock().open.get(name) {
            return Ok(image.clone());
        }
        let (server, wanted) = (self.clone(), name.clone());
        blocking(move || server.open_image(&wanted)).await
    }

    /// The image, opened if it is not. Blocks on the disk.
    pub(super) fn open_image(&self, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        // One at a time: an overlay has one owner.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        self.open_image_now(name)
    }

    /// The same for a caller that holds [`Self::image_lock`].
    pub(super) fn open_image_now(&self, name: &ImageName) -> Result<Arc<Image>, Refusal> {
        if let Some(image) = self.state.lock().open.get(name) {
            return Ok(image.clone());
        }
        let config = &self.config;
        let image = Arc::new(Image::open(name, &config.images, &config.state)?);
        self.state.lock().open.insert(name.clone(), image.clone());
        Ok(image)
    }

    /// Closes images that are no longer mounted, and waits until the `awaited` one is closed. Each may take as long as
    /// its disk does.
    pub(super) async fn tidy(self: &Arc<Self>, awaited: Option<ImageName>) {
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

    /// Images that can be closed, and whether more are unused but for a thread that is finishing work for an
    /// ended mount.
    pub(super) fn idle(&self, now: Duration) -> (Vec<ImageName>, bool) {
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

    /// Closes an image if it is still unused. A mount that arrives now waits and reopens it.
    pub(super) fn close_idle(&self, name: &ImageName, now: Duration) {
        let image_lock = self.image_lock(name);
        let _closing = image_lock.lock();
        let image = {
            let mut state = self.state.lock();
            // References are cloned under this lock only, so the count cannot grow meanwhile.
            match state.open.get(name) {
                Some(image) if is_free(image, now) => state.open.remove(name),
                _ => None,
            }
        };
        drop(image);
    }
}

/// Closes images that become unused soon.
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

/// Whether only the server refers to an image, and no mount is expected to reconnect.
fn is_free(image: &Arc<Image>, now: Duration) -> bool {
    Arc::strong_count(image) == 1 && image.is_idle(now)
}
