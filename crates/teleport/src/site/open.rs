//! Opens a site: recovers what an earlier run left, then starts the background threads.

use std::collections::HashSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use drover_index::ImageId;
use drover_storage::{HostDirectory, make_private_dir};
use drover_store::sequences::Sequences;
use drover_store::{Catalog, Images, KnownFiles};
use parking_lot::{Mutex, RwLock};

use super::{Callbacks, Site, SiteConfig, Totals, catch_up, flocks, recover, shared};
use crate::TeleportError;
use crate::active::Active;
use crate::files::remove_dir;
use crate::flock::live::Flocks;
use crate::matching::{Matching, handle, open_teleporter};
use crate::partials::Partials;
use crate::teleporter::{Event, ImageEvent};

impl Site {
    /// Opens a site without callbacks. Returns what was repaired, one line each.
    ///
    /// # Errors
    /// When a directory, the catalog or the matcher's files cannot be used.
    pub fn open(
        config: SiteConfig,
        catalog: Arc<dyn Catalog>,
    ) -> Result<(Arc<Self>, Vec<String>), TeleportError> {
        Self::open_with(config, catalog, None)
    }

    /// Like [`Site::open`], with callbacks.
    ///
    /// # Errors
    /// As [`Site::open`].
    pub fn open_for(
        config: SiteConfig,
        catalog: Arc<dyn Catalog>,
        callbacks: Callbacks,
    ) -> Result<(Arc<Self>, Vec<String>), TeleportError> {
        Self::open_with(config, catalog, Some(callbacks))
    }

    fn open_with(
        config: SiteConfig,
        catalog: Arc<dyn Catalog>,
        callbacks: Option<Callbacks>,
    ) -> Result<(Arc<Self>, Vec<String>), TeleportError> {
        let (holder, rights, watcher) = match callbacks {
            Some(c) => (Some(c.holder), Some(c.rights), Some(c.watcher)),
            None => (None, None, None),
        };
        let mut repairs = Vec::new();
        for dir in [&config.images_dir, &config.work_dir, &config.state_dir] {
            make_private_dir(dir).map_err(TeleportError::file("create", dir))?;
        }
        // Earlier versions made it readable to others where it is not in the home.
        let only_own = Permissions::from_mode(0o700);
        if let Err(e) = std::fs::set_permissions(&config.work_dir, only_own) {
            tracing::warn!(path = %config.work_dir.display(), error = %e, "cannot make the directory private");
        }
        Site::prepare_shared(&config)?;
        let partials = Arc::<Partials>::default();
        let transfers = config.work_dir.join("transfers");
        let flocks = flocks::flocks_found(&config.work_dir, &config.disk, &mut repairs)?;
        let whole = recover::transfers_found(&transfers, &partials, &mut repairs)?;
        let awaited = whole.iter().map(|a| ImageId(a.opening.image)).collect();
        let images = match &config.shared {
            Some(shared) => Images::open_shared(catalog.clone(), shared.maps_dir.clone())?,
            None => {
                let maps = config.state_dir.join("maps");
                Images::open(catalog.clone(), maps, &awaited, &mut repairs)?
            }
        };
        let sequences = Sequences::open(&config.work_dir, config.sequence_data_bytes)?;
        let directory = HostDirectory::open(&config.state_dir)
            .map_err(TeleportError::file("open", &config.state_dir))?;
        let known = KnownFiles::open(Arc::new(directory))?;
        let matching = match &config.teleporter {
            Some(remote) => Matching::Remote(remote.clone()),
            None => Matching::Local(open_teleporter(
                &config.state_dir.join("index"),
                config.sequence_data_bytes,
                &mut repairs,
            )?),
        };
        let (wake, wakes) = crossbeam_channel::bounded(1);
        let (catch_up_wakes, lacks) = crossbeam_channel::bounded(1);
        let others = config.shared.as_ref().map(|s| Arc::clone(&s.others));
        let site = Arc::new(Site {
            config,
            catalog,
            images,
            partials,
            launches: Arc::default(),
            sequences,
            matching,
            matched: Arc::default(),
            active: Arc::new(Active::among(others)),
            sessions: Mutex::default(),
            flocks: Flocks::of(flocks),
            elsewhere: Default::default(),
            session_opened: tokio::sync::Notify::new(),
            totals: Totals::default(),
            closing: AtomicBool::new(false),
            threads: Mutex::default(),
            copier_wakes: wake,
            catch_up_wakes,
            behind: AtomicBool::new(true),
            indexing: Mutex::default(),
            known,
            candidates: Default::default(),
            images_went: AtomicBool::new(true),
            trimmings: Mutex::new(0),
            admitting: Mutex::default(),
            changing: Mutex::default(),
            rights,
            holds: RwLock::new(holder),
            launched: RwLock::default(),
            quota: RwLock::default(),
            watcher,
            old_copies: RwLock::default(),
        });
        remove_dir(&site.links_dir());
        site.recover(whole, &mut repairs);
        repairs.extend(site.take_over()?);
        site.recover_flocks(&mut repairs);
        site.remove_stray_hash_files();
        site.report_lost_indexes(&mut repairs);
        let copier = shared::start_copier(&site, wakes);
        site.threads.lock().extend(copier.ok());
        site.wake_copier();
        // Without this thread only possible matches are lost.
        match catch_up::start(&site, lacks) {
            Ok(thread) => site.threads.lock().push(thread),
            Err(e) => {
                tracing::warn!(error = %e, "cannot start the thread that keeps the matcher up to date");
            }
        }
        Ok((site, repairs))
    }

    /// Removes hash files of images that are neither in the catalog nor in transit.
    fn remove_stray_hash_files(&self) {
        let Matching::Local(teleporter) = &self.matching else {
            return;
        };
        let strays: Vec<ImageId> = teleporter
            .lock()
            .images()
            .into_iter()
            .filter(|i| !self.images.knows(*i) && !self.partials.knows(*i))
            .collect();
        for image in strays {
            let _ = handle(teleporter, Event::Image(image, ImageEvent::Forget));
        }
    }

    /// Reports images whose blocks can no longer be matched or read for reuse, and how to fix it.
    fn report_lost_indexes(&self, repairs: &mut Vec<String>) {
        let Matching::Local(teleporter) = &self.matching else {
            return;
        };
        let found: HashSet<ImageId> = teleporter.lock().images().into_iter().collect();
        for image in self.images.list() {
            if !self.images.map_path(image.id).exists() {
                repairs.push(format!(
                    "{}: its map is lost, so its blocks are not reused; `drover index {}` makes it again",
                    image.name,
                    image.path.display()
                ));
            } else if !found.contains(&image.id) {
                repairs.push(format!(
                    "{}: its hash file is lost; it is made again from the image, until then its blocks are not reused",
                    image.name
                ));
            }
        }
    }
}
