//! This site's images as devices: for mounts of other sites, and for this site's own exports.

use std::sync::Arc;

use anyhow::Result;
use drover_core::ImageName;
use drover_device::backend::ImageDevice;
use drover_image::VirtualDisk;
use drover_mount::protocol::{Code, Refusal};
use drover_mount::server::{Base, Config, Images, Server};
use drover_teleport::catalog::Catalog;

use crate::catalog::SiteCatalog;
use crate::home::Home;

/// Threads that read, hash and compress for mounts.
const THREADS: usize = 4;

/// What serves this site's images to mounts. Call within a runtime.
///
/// # Errors
/// When its threads cannot be started.
pub fn site_server(home: &Home, catalog: &Arc<SiteCatalog>) -> Result<Arc<Server>> {
    Ok(Server::new(Config {
        images: Arc::new(SiteImages {
            catalog: Arc::clone(catalog),
            site: home.name(),
        }),
        state: home.mounted_dir(),
        threads: THREADS,
    })?)
}

/// The images of a catalog.
struct SiteImages {
    catalog: Arc<SiteCatalog>,
    site: String,
}

impl Images for SiteImages {
    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        let record = self
            .catalog
            .by_name(name)
            .map_err(|e| Refusal::new(Code::Unavailable, e))?
            .ok_or_else(|| {
                let text = format!(
                    "{} has no image called {name}; `drover images` lists what it has",
                    self.site
                );
                Refusal::new(Code::NoImage, text)
            })?;
        let unreadable =
            |e: &dyn std::fmt::Display| Refusal::new(Code::Unavailable, format!("{name}: {e}"));
        let disk = VirtualDisk::open(&record.path).map_err(|e| unreadable(&e))?;
        Ok(Base {
            device: Arc::new(ImageDevice::new(disk)),
            digest: record.digest,
        })
    }
}
