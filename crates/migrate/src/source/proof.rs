//! Images that were delivered without having been read here: an old copy at the other site was said to have what did not
//! change. Their digests are compared in the background, and before the machine is handed over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{Digest, ImageName};
use drover_image::Outgoing;
use drover_teleport::{TeleportError, digest_of};
use tokio::task::JoinHandle;

use crate::error::MigrateError;

/// An image to compare.
pub struct Delivered {
    /// Its name at the other site.
    pub name: ImageName,
    /// The state that was sent.
    pub image: Arc<Outgoing>,
    /// What the other site has.
    pub digest: Digest,
}

/// A comparison that is under way; it ends when this is dropped.
pub struct Proof {
    compared: Option<JoinHandle<Result<Option<ImageName>, TeleportError>>>,
    stop: Arc<AtomicBool>,
}

impl Proof {
    /// Begins to read these images.
    pub fn begin(images: Vec<Delivered>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let compare = move || {
            for delivered in images {
                let digest = digest_of(&delivered.image, &|| stopped.load(Ordering::Relaxed))?;
                if digest.is_some_and(|digest| digest != delivered.digest) {
                    return Ok(Some(delivered.name));
                }
            }
            Ok(None)
        };
        let compared = Some(tokio::task::spawn_blocking(compare));
        Self { compared, stop }
    }

    /// Whether [`Self::done`] has not returned yet.
    pub fn is_pending(&self) -> bool {
        self.compared.is_some()
    }

    /// Whether it would return at once, and has not yet.
    pub fn is_finished(&self) -> bool {
        self.compared.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Waits until all are compared. Cancel safe.
    ///
    /// # Errors
    /// [`MigrateError::OldCopy`] when one differs; or it cannot be read.
    pub async fn done(&mut self) -> Result<(), MigrateError> {
        let Some(compared) = &mut self.compared else {
            return Ok(());
        };
        let compared = compared.await;
        self.compared = None;
        match compared.map_err(|_| MigrateError::Stopped)?? {
            None => Ok(()),
            Some(image) => Err(MigrateError::OldCopy(image)),
        }
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
