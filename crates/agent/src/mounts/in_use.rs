//! Whether an image may be replaced or removed: not while a mount reads it or can still write to it.

use std::path::Path;

use drover_core::ImageName;
use drover_mount::MountError;
use drover_mount::server::{Leased, lease_on_disk};
use drover_store::lease::MERGE_NOTE;
use drover_store::{Catalog, changes};

use crate::text::clean;

/// Why an image may not be replaced or removed now; `None` when it may.
pub fn why_held(name: &ImageName, leased: Result<Option<Leased>, MountError>) -> Option<String> {
    let leased = match leased {
        Ok(leased) => leased?,
        // Treat an unreadable lease as held.
        Err(e) => return Some(format!("its lease cannot be read: {e}")),
    };
    match (&leased.holder, leased.connected.first()) {
        (Some(holder), _) if holder.note == MERGE_NOTE => Some(format!(
            "its changes are being merged; try again when that is done, or end the merge with `drover mounts break {name}`"
        )),
        (Some(holder), _) => Some(format!(
            "{} holds its write lease (mount {}): unmount it there, or revoke the lease with `drover mounts break {name}` at the site that has the image",
            clean(&holder.peer_name),
            clean(&holder.note)
        )),
        (None, Some(reader)) => Some(format!(
            "{} has it mounted; unmount it there",
            clean(reader)
        )),
        (None, None) => None,
    }
}

/// Whether mounts of that name use an image that is still arriving: its delivery replaces nothing.
pub fn is_launched(name: &ImageName, state: &Path, catalog: &dyn Catalog) -> bool {
    matches!(catalog.by_name(name), Ok(None))
        && changes::is_launched(&changes::directory(state, name))
}

/// The holder of an image's write lease according to the lease file; works without a running site.
pub fn leased_on_disk(state: &Path, name: &ImageName) -> Result<Option<Leased>, MountError> {
    let holder = lease_on_disk(state, name)?;
    Ok(Some(Leased {
        image: name.to_string(),
        holder,
        connected: Vec::new(),
        problem: None,
    }))
}
