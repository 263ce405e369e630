//! Opens the site of a home: configures the teleport layer from the home's settings. All other code that depends on how
//! a site is opened belongs here, too.

use std::sync::Arc;

use drover_net::Identity;
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_store::{Catalog, SiteCatalog};
use drover_teleport::{Holder, RemoteTeleporter, Site, SiteConfig};

use crate::error::{Context, Result};
use crate::home::Home;
use crate::remote::find_peer;
use crate::text::clean;

/// Default space to keep free on the images' file system.
const RESERVE_BYTES: u64 = 256 << 20;

/// Default limit on concurrent sessions.
const MAX_SESSIONS: usize = 16;

/// Opens the catalog of a home, and reports repairs.
///
/// # Errors
/// When it cannot be used.
pub fn open_catalog(home: &Home) -> Result<SiteCatalog> {
    let (catalog, repairs) = SiteCatalog::open(home.dir())?;
    tell(&repairs);
    Ok(catalog)
}

/// Opens the catalog of a home for a read-only command; works even if the disk is too full to open it normally.
///
/// # Errors
/// When it cannot be read.
pub fn look_at_catalog(home: &Home) -> Result<SiteCatalog> {
    match open_catalog(home) {
        Err(e) if home.is_full() => match SiteCatalog::open_on_full_disk(home.dir()) {
            Ok(Some(catalog)) => Ok(catalog),
            _ => Err(e),
        },
        opened => opened,
    }
}

/// Opens the site of a home whose lock this process holds, and reports repairs.
///
/// # Errors
/// When its files cannot be used, or the configured teleporter is not a peer.
pub async fn open(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    identity: &Identity,
) -> Result<Arc<Site>> {
    let teleporter = match &home.config.teleporter {
        None => None,
        Some(name) => {
            let peer = find_peer(catalog, name).context("the teleporter of config.toml")?;
            Some(RemoteTeleporter {
                identity: identity.clone(),
                key: peer.key,
                addresses: peer.addresses,
            })
        }
    };
    let config = SiteConfig {
        images_dir: home.images_dir(),
        work_dir: home.work_dir(),
        state_dir: home.index_dir(),
        teleporter,
        reserve_bytes: home.config.reserve.unwrap_or(RESERVE_BYTES),
        max_sessions: home.config.max_sessions.unwrap_or(MAX_SESSIONS),
        sequence_data_bytes: home.config.sequence_data.unwrap_or(SEQUENCE_DATA_BYTES),
        disk: Arc::new(drover_storage::HostDisk),
    };
    let catalog = Arc::clone(catalog) as Arc<dyn Catalog>;
    // No mount is connected yet, so the lease file decides.
    let state = home.mounted_dir();
    let holder: Arc<Holder> = Arc::new(move |name| {
        crate::mounts::why_held(name, crate::mounts::leased_on_disk(&state, name))
    });
    let (site, repairs) =
        tokio::task::spawn_blocking(move || Site::open_held_by(config, catalog, holder)).await??;
    tell(&repairs);
    Ok(site)
}

/// Reports repairs to the user.
pub fn tell(repairs: &[String]) {
    for repair in repairs {
        crate::notice::notice(&format!("repaired: {}", clean(repair)));
    }
}
