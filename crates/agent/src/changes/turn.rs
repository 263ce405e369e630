//! The context of a merge, and the lock that lets only one thread merge an image at a time.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::ImageName;
use drover_mount::server::Server;
use drover_net::PeerKey;
use drover_storage::{make_private_dir, sync_parent};
use drover_store::SiteCatalog;
use drover_teleport::Site;
use parking_lot::Mutex;

use crate::error::{Context, Result};
use crate::home::Home;
use crate::mounts;

/// File name of the new file while it is written.
pub const PART: &str = "image.part";

/// The context of merges.
#[derive(Clone)]
pub struct Here {
    /// The site with the images.
    pub site: Arc<Site>,
    /// The server of mounts.
    pub server: Arc<Server>,
    /// Directory with leases and changes.
    pub state: PathBuf,
    /// This site's key.
    pub key: PeerKey,
}

impl Here {
    /// Creates the context for the site of this home, whose lock this process holds.
    ///
    /// # Errors
    /// When the home's key cannot be read, or mounts cannot be served.
    pub fn of(home: &Home, catalog: &Arc<SiteCatalog>, site: &Arc<Site>) -> Result<Here> {
        Ok(Here {
            site: Arc::clone(site),
            server: mounts::site_server(home, catalog)?,
            state: home.mounted_dir(),
            key: home.identity()?.key(),
        })
    }

    /// Directory for the working files of merges.
    pub fn merges(&self) -> PathBuf {
        self.site.work_dir().join("merges")
    }

    fn dir(&self, name: &ImageName) -> PathBuf {
        self.merges().join(name.as_str())
    }
}

/// Directories of the images that this process is merging.
static BUSY: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Per-image lock: while it is held, no other thread of this process merges the image or recovers a merge of it.
pub struct Turn(PathBuf);

impl Turn {
    /// Locks an image; `None` when it is already locked.
    pub fn take(here: &Here, name: &ImageName) -> Option<Turn> {
        let dir = here.dir(name);
        BUSY.lock().insert(dir.clone()).then_some(Turn(dir))
    }

    /// Working directory of the merge.
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Creates the directory durably: by it, recovery finds the lease that a crash leaves behind.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn make(&self) -> Result<()> {
        let made = make_private_dir(&self.0)
            .and_then(|()| sync_parent(&self.0))
            .and_then(|()| self.0.parent().map_or(Ok(()), sync_parent));
        made.with_context(|| format!("cannot create {}", self.0.display()))
    }

    /// Removes the working files of the merge.
    pub fn tidy(&self) {
        if let Err(e) = fs::remove_dir_all(&self.0)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {e}", self.0.display());
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        BUSY.lock().remove(&self.0);
    }
}

/// Crash point for tests: the process dies as if killed when `DROVER_TEST_CRASH` names this place.
pub fn crash(place: &str) {
    if cfg!(debug_assertions) && std::env::var_os("DROVER_TEST_CRASH").is_some_and(|p| p == place) {
        std::process::abort();
    }
}

/// Wait point for tests: waits for `stop` when `DROVER_TEST_HOLD` names this place.
pub fn hold(place: &str, stop: &AtomicBool) {
    if cfg!(debug_assertions) && std::env::var_os("DROVER_TEST_HOLD").is_some_and(|p| p == place) {
        tracing::info!("held at {place}");
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
