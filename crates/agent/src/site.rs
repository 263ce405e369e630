//! The site of a home: the teleport layer set up with what the home says. Everything that depends
//! on how a site is opened is here.

use std::sync::Arc;

use drover_net::Identity;
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_store::{Catalog, SiteCatalog};
use drover_teleport::{Holder, RemoteTeleporter, Site, SiteConfig};

use crate::error::{Context, Result};
use crate::home::Home;
use crate::remote::find_peer;
use crate::text::clean;

/// Space left free on the images' file system when the configuration says nothing.
const RESERVE_BYTES: u64 = 256 << 20;

/// Sessions at once when the configuration says nothing.
const MAX_SESSIONS: usize = 16;

/// Opens the catalog of a home, and says what had to be repaired.
///
/// # Errors
/// When it cannot be used.
pub fn open_catalog(home: &Home) -> Result<SiteCatalog> {
    let (catalog, repairs) = SiteCatalog::open(home.dir())?;
    tell(&repairs);
    Ok(catalog)
}

/// Opens the catalog of a home for a command that only looks: also when the disk is too full to open it otherwise.
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

/// Opens the site of a home that this process has locked, and says what had to be repaired.
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
    // Who may write an image is written down; nobody is connected yet.
    let state = home.mounted_dir();
    let holder: Arc<Holder> = Arc::new(move |name| {
        crate::mounts::why_held(name, crate::mounts::leased_on_disk(&state, name))
    });
    let (site, repairs) =
        tokio::task::spawn_blocking(move || Site::open_held_by(config, catalog, holder)).await??;
    tell(&repairs);
    Ok(site)
}

/// Tells people what had to be repaired.
pub fn tell(repairs: &[String]) {
    for repair in repairs {
        crate::notice::notice(&format!("repaired: {}", clean(repair)));
    }
}
