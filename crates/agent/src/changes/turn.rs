//! What a merge works on, and whose turn it is: an image is merged by one thread at a time.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::ImageName;
use drover_mount::server::Server;
use drover_net::PeerKey;
use drover_storage::sync_parent;
use drover_store::SiteCatalog;
use drover_teleport::Site;
use parking_lot::Mutex;

use crate::error::{Context, Result};
use crate::home::Home;
use crate::mounts;

/// The file that is being written.
pub const PART: &str = "image.part";

/// What a merge works on.
#[derive(Clone)]
pub struct Here {
    /// The images.
    pub site: Arc<Site>,
    /// The mounts.
    pub server: Arc<Server>,
    /// Where leases and what mounts wrote are.
    pub state: PathBuf,
    /// This site's key.
    pub key: PeerKey,
}

impl Here {
    /// The site of this home, which this process has.
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

    /// Where the merges of this site are put together.
    pub fn merges(&self) -> PathBuf {
        self.site.work_dir().join("merges")
    }

    fn dir(&self, name: &ImageName) -> PathBuf {
        self.merges().join(name.as_str())
    }
}

/// Images that are being merged by this process, by their directories.
static BUSY: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// While it lives, nobody else in this process merges the image, or finishes a merge of it.
pub struct Turn(PathBuf);

impl Turn {
    /// The turn of an image; none when somebody has it.
    pub fn take(here: &Here, name: &ImageName) -> Option<Turn> {
        let dir = here.dir(name);
        BUSY.lock().insert(dir.clone()).then_some(Turn(dir))
    }

    /// Where the merge is put together.
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Makes the directory, durably: a lease that a crash leaves is found by it.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make(&self) -> Result<()> {
        let made = fs::create_dir_all(&self.0)
            .and_then(|()| sync_parent(&self.0))
            .and_then(|()| self.0.parent().map_or(Ok(()), sync_parent));
        made.with_context(|| format!("cannot create {}", self.0.display()))
    }

    /// Removes what the merge left.
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

/// Where a test may have the process die, as if it were killed: `DROVER_TEST_CRASH` names the place.
pub fn crash(place: &str) {
    if cfg!(debug_assertions) && std::env::var_os("DROVER_TEST_CRASH").is_some_and(|p| p == place) {
        std::process::abort();
    }
}

/// Where a test may have a job wait until it is to stop: `DROVER_TEST_HOLD` names the place.
pub fn hold(place: &str, stop: &AtomicBool) {
    if cfg!(debug_assertions) && std::env::var_os("DROVER_TEST_HOLD").is_some_and(|p| p == place) {
        tracing::info!("held at {place}");
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
