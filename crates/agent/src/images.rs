//! Images that are somewhere already: this site's, and those of peers.

use std::path::PathBuf;
use std::sync::Arc;

use drover_core::ImageName;
use drover_store::{ImageRecord, SiteCatalog};
use drover_teleport::services::{ImageInfo, ListImages, RemoveImage};

use crate::changes;
use crate::error::{Context, Result};
use crate::home::Home;
use crate::own::Own;
use crate::remote::{Call, find_peer};
use crate::text::bytes;

/// Images that a peer may list.
const MAX_LISTED: usize = 1_000_000;

/// A record as others see it.
pub fn info(r: ImageRecord) -> ImageInfo {
    ImageInfo {
        name: r.name.to_string(),
        digest: r.digest,
        size_bytes: r.size_bytes,
        data_bytes: r.data_bytes,
        virtual_bytes: r.virtual_bytes,
        format: r.format,
        added_unix: r.added_unix,
        from: r.from,
    }
}

/// What a removal did, for a person.
pub fn removal(home: &Home, r: &ImageRecord) -> String {
    let done = if r.external {
        format!(
            "removed {} from the catalog; its file {} stays",
            r.name,
            r.path.display()
        )
    } else {
        format!("removed {} ({})", r.name, bytes(r.data_bytes))
    };
    done + &written(home, r).map_or_else(String::new, |(text, _)| text)
}

/// What mounts wrote over an image, which its removal leaves: for a person, and where. None when that is nothing.
pub fn written(home: &Home, r: &ImageRecord) -> Option<(String, PathBuf)> {
    let changes = changes::of_image(home, &r.name)?;
    let text = format!(
        "; its changes ({}) stay in {}, and apply again to the same image under that name (`drover changes drop {}` drops them)",
        bytes(changes.changed_bytes),
        changes.directory,
        r.name
    );
    Some((text, changes.directory.into()))
}

/// Bytes that mounts wrote over an image of this site.
pub fn changed_bytes(home: &Home, image: &ImageInfo) -> u64 {
    let name = ImageName::new(&image.name).ok();
    let changes = name.and_then(|name| changes::of_image(home, &name));
    let changes = changes.filter(|c| c.is_over(&image.digest));
    changes.map_or(0, |c| c.changed_bytes)
}

/// The images of a peer.
///
/// # Errors
/// When it cannot be asked.
pub async fn list_of_peer(
    home: &Home,
    catalog: &SiteCatalog,
    name: &str,
) -> Result<Vec<ImageInfo>> {
    let peer = find_peer(catalog, name)?;
    let call = Call::peer(&home.identity()?, &peer).await?;
    let list = call.list(&ListImages, MAX_LISTED).await?;
    list.with_context(|| format!("{name} lists more than {MAX_LISTED} images"))
}

/// Removes an image by the running site, or by this process when none runs. What was half done is done by the next call.
///
/// # Errors
/// When the site refuses, or the image cannot be removed.
pub async fn remove(home: &Home, catalog: &Arc<SiteCatalog>, name: &ImageName) -> Result<()> {
    let name = name.clone();
    if let Some(call) = Call::local(home).await? {
        return call.ask(&RemoveImage { name }, |()| {}).await;
    }
    let site = Own::open(home, catalog).await?;
    site.run(move |site| site.remove(&name).map(drop)).await
}
