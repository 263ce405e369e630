//! What a machine leaves at a site, and whose it is.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_mount::server::Server;
use drover_net::PeerKey;
use drover_store::Catalog;
use drover_store::lease::MountId;

use crate::changes::{self, Here, Order};
use crate::error::one_line;
use crate::serve::domains::InUse;

/// How long the connections of disks that were closed may take to end.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// How often that is looked at.
const CLOSE_POLL: Duration = Duration::from_millis(10);

/// Whether the write lease of an image is that of a machine's disk.
pub(super) async fn is_held_by(domain: &Arc<InUse>, image: &ImageName, mount: MountId) -> bool {
    let (domain, image) = (Arc::clone(domain), image.clone());
    let leased = tokio::task::spawn_blocking(move || domain.devices.leased(&image)).await;
    let holder = leased
        .ok()
        .and_then(|leased| leased.ok()?)
        .and_then(|leased| leased.holder);
    holder.is_some_and(|holder| holder.mount == mount)
}

/// Whether mounts wrote over this image. What they wrote over an earlier one of its name is set aside when it is opened.
pub(in crate::serve) fn has_changes(domain: &InUse, image: &ImageName) -> bool {
    changes::of_image(&domain.home, image).is_some_and(|changes| {
        let known = domain.catalog.by_name(image).ok().flatten();
        known.is_none_or(|known| changes.is_over(&known.digest))
    })
}

/// Waits until no mount uses these images, but not for long.
pub(super) fn wait_until_free(devices: &Server, images: &[ImageName]) {
    let begun = Instant::now();
    let is_open = |name| devices.leased(name).is_ok_and(|leased| leased.is_some());
    while images.iter().any(is_open) && begun.elapsed() < CLOSE_LIMIT {
        std::thread::sleep(CLOSE_POLL);
    }
}

/// Hands an image over: it belongs to the site that has the machine.
pub(super) fn give(domain: &InUse, image: &ImageName, owner: Option<PeerKey>) {
    if let Err(e) = domain.site.give(image, owner) {
        tracing::warn!(image = %image, "it was not handed over with its machine: {e}");
    }
}

/// Whether a machine left this image here when it moved to the site with this key.
pub(super) fn was_left(domain: &InUse, image: &ImageName, at: Option<PeerKey>) -> bool {
    let known = domain.catalog.by_name(image).ok().flatten();
    known.is_some_and(|known| {
        let state = domain.home.mounted_dir();
        let about = drover_mount::server::generations_on_disk(&state, image, known.digest);
        known.owner == at && matches!(about, Ok(Some(about)) if about.frozen)
    })
}

/// Keeps what a machine that is elsewhere has left here from being started: it is an old copy.
pub(super) fn freeze(domain: &InUse, image: &ImageName) {
    if let Err(e) = domain.devices.freeze(image) {
        tracing::warn!(image = %image, "it is not protected from being written: {e}");
    }
}

/// Makes what a machine wrote part of its image; whether that was done.
pub(super) fn merge(here: &Here, image: &ImageName) -> bool {
    let order = Order {
        name: image.clone(),
        rename: None,
        to: None,
        drop: false,
        dry_run: false,
    };
    let stop = AtomicBool::new(false);
    match changes::merge(here, &order, None, &mut |_, _| {}, &stop) {
        Ok(_) => tracing::info!(image = %image, "it has what its machine wrote"),
        Err(e) => {
            tracing::warn!(image = %image, "its changes were not merged: {}", one_line(&e));
            return false;
        }
    }
    true
}
