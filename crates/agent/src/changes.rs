//! Changes: the data that mounts wrote over this site's images, kept separately from the image files.
//!
//! - `merge`: merges changes into an image, or into a new one; `part`: writes the new file.
//! - `decided`: the durable commit record of a merge; `recover`: crash recovery.

mod decided;
mod merge;
mod part;
mod recover;
mod turn;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{Digest, ImageName};
use drover_mount::server::Server;
use drover_net::request;
use drover_store::changes::{self, Changes};
use drover_store::{Catalog, ImageRecord};
use drover_teleport::services::Progress;
use serde::{Deserialize, Serialize};

use crate::audit::{Audited, Event, Record};
use crate::error::Result;
use crate::home::Home;
use crate::mounts::{self, Writer};
use crate::own::Own;
use crate::remote::Call;
use crate::signals::{Stop, stopped};
use crate::site;
use crate::text::{bytes, clean};

pub use merge::{Author, Merged, Order, merge};
pub use part::Target;
pub use recover::{recover, recover_own};
pub use turn::Here;
pub(crate) use turn::crash;

/// The changes that mounts made to one image, as reported to users.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImageChanges {
    /// The image's name.
    pub image: String,
    /// Bytes of the disk that differ from the image.
    pub changed_bytes: u64,
    /// Bytes that the changes occupy on disk.
    pub room_bytes: u64,
    /// Time of the last write, seconds since 1970.
    pub written_unix: Option<i64>,
    /// The last writer.
    pub by: Option<Writer>,
    /// The current holder of the write lease.
    pub held_by: Option<Writer>,
    /// Whether the changes belong to an earlier image of this name, which has been replaced.
    pub earlier: bool,
    /// The digest of the base image.
    pub base: Option<String>,
    /// The directory with the changes; empty for a peer.
    pub directory: String,
    /// Why the changes cannot be read.
    pub problem: Option<String>,
}

impl From<Changes> for ImageChanges {
    fn from(c: Changes) -> ImageChanges {
        ImageChanges {
            image: c.image.to_string(),
            changed_bytes: c.changed,
            room_bytes: c.room,
            written_unix: c.written_unix,
            by: c.writer.map(Writer::from),
            held_by: c.holder.map(Writer::from),
            earlier: c.earlier,
            base: c.base.map(|base| base.to_string()),
            directory: c.directory.display().to_string(),
            problem: c.problem,
        }
    }
}

/// The result of dropping changes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Dropped {
    /// The image's name.
    pub image: String,
    /// Whether there were any changes to drop.
    pub dropped: bool,
    /// Bytes of the disk that differed from the image.
    pub changed_bytes: u64,
    /// Bytes that the changes occupied on disk.
    pub room_bytes: u64,
    /// Whether they belonged to earlier, replaced images.
    pub earlier: bool,
}

/// The changes that mounts made to an image; `None` when there are none.
pub fn of_image(home: &Home, name: &ImageName) -> Option<ImageChanges> {
    let changes = changes::of_image(&home.mounted_dir(), name)?;
    let catalog = site::look_at_catalog(home).ok();
    Some(match &catalog {
        Some(catalog) => ImageChanges::known(changes, catalog),
        None => changes.into(),
    })
}

/// Request: list the changes of all images; a peer sees those that belong to it or that it wrote.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListChanges;
request!(ListChanges: "change.list", List, () => Vec<ImageChanges>);

/// Request: drop the changes of an image; a peer may drop those that belong to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DropChanges {
    /// The image.
    pub name: ImageName,
    /// Drop the changes of earlier, replaced images of that name instead.
    pub earlier: bool,
}
request!(DropChanges: "change.drop", Write, () => Dropped);

request!(Order: "change.merge", Write, Progress => Merged);

impl Audited for DropChanges {
    fn told(&self, reply: Option<&Dropped>) -> Option<Record> {
        let record = Record::new(Event::ChangesDropped).image(&self.name);
        match reply {
            Some(dropped) if !dropped.dropped => None,
            Some(dropped) => Some(record.bytes(dropped.changed_bytes)),
            None => Some(record),
        }
    }
}

impl Audited for Order {
    fn told(&self, reply: Option<&Merged>) -> Option<Record> {
        let record = Record::new(Event::Merged).image(&self.name);
        let record = match &self.rename {
            Some(rename) => record.detail(format!("into {rename}")),
            None => record,
        };
        match reply {
            Some(merged) if !merged.merged => None,
            Some(merged) => Some(record.bytes(merged.changed_bytes)),
            None => Some(record),
        }
    }
}

/// The changes of all images, read from disk.
///
/// # Errors
/// When the site's state cannot be read.
pub fn on_disk(home: &Home) -> Result<Vec<ImageChanges>> {
    let all = changes::all(&home.mounted_dir())?;
    let catalog = site::look_at_catalog(home)?;
    let known = |changes| ImageChanges::known(changes, &catalog);
    Ok(all.into_iter().map(known).collect())
}

/// Drops the changes of an image and reports what was dropped. Blocks on disk I/O.
///
/// # Errors
/// When the image is mounted, or its files cannot be modified.
pub fn drop_at(server: &Server, name: &ImageName, earlier: bool) -> Result<Dropped> {
    let dropped = match earlier {
        true => server.drop_earlier(name)?,
        false => Vec::from_iter(server.drop_changes(name)?),
    };
    Ok(Dropped {
        image: name.to_string(),
        dropped: !dropped.is_empty(),
        changed_bytes: dropped.iter().map(|c| c.changed).sum(),
        room_bytes: dropped.iter().map(|c| c.room).sum(),
        earlier,
    })
}

/// The changes of all images, from the running site or, when none runs, from disk; or those at a peer that this site may see.
///
/// # Errors
/// When the site does not reply, or its state cannot be read.
pub async fn list(home: &Home, peer: Option<&str>) -> Result<Vec<ImageChanges>> {
    match Call::at(home, peer).await? {
        Some(call) => call.ask(&ListChanges, |()| {}).await,
        None => on_disk(home),
    }
}

/// Drops changes at a peer, through the running site, or in this process when none runs.
///
/// # Errors
/// As [`drop_at`].
pub async fn ask_to_drop(
    home: &Home,
    peer: Option<&str>,
    name: &ImageName,
    earlier: bool,
) -> Result<Dropped> {
    let request = DropChanges {
        name: name.clone(),
        earlier,
    };
    if let Some(call) = Call::at(home, peer).await? {
        let dropped = call.ask(&request, |()| {}).await;
        return dropped.map_err(|e| e.about_image(peer, name));
    }
    // Keeps a site from starting to serve the image meanwhile; recovers interrupted merges first.
    let catalog = Arc::new(site::open_catalog(home)?);
    let own = Own::open(home, &catalog).await?;
    let server = mounts::site_server(home, &catalog)?;
    let name = name.clone();
    let dropped = tokio::task::spawn_blocking(move || drop_at(&server, &name, earlier)).await?;
    own.close().await?;
    let dropped = dropped?;
    home.audit().done(home.domain_name(), &request, &dropped);
    Ok(dropped)
}

impl ImageChanges {
    /// Changes to an image of a catalog. Those that were made while it was still arriving, before its digest was known, are
    /// shown as what they are: over the image.
    pub fn known(changes: Changes, catalog: &dyn Catalog) -> ImageChanges {
        let launched = changes::is_launched(&changes.directory) && !changes.earlier;
        let record = match launched {
            true => catalog.by_name(&changes.image).ok().flatten(),
            false => None,
        };
        let of = |record: &ImageRecord| changes.base == Some(changes::in_transit(record.id));
        let digest = record.filter(of).map(|record| record.digest.to_string());
        let shown = ImageChanges::from(changes);
        ImageChanges {
            base: digest.or(shown.base),
            ..shown
        }
    }

    /// Whether the base is known to be the image with this digest, rather than an earlier image of the same name.
    pub fn is_over(&self, digest: &Digest) -> bool {
        let of_another = |base: &String| *base != digest.to_string();
        !self.base.as_ref().is_some_and(of_another)
    }

    /// A note for users who read the image itself: that there are also changes.
    pub fn beside(&self) -> String {
        match &self.problem {
            Some(problem) => format!("its changes cannot be read: {}", clean(problem)),
            None => format!(
                "it has changes by mounts, {}, which are not in the file; see `drover changes`",
                bytes(self.changed_bytes)
            ),
        }
    }
}

/// Merges at a peer, through the running site, or in this process when none runs. `progress` receives bytes done and the total.
///
/// # Errors
/// As [`merge()`].
pub async fn ask_to_merge(
    home: &Home,
    peer: Option<&str>,
    order: Order,
    mut progress: impl FnMut(u64, u64) + Send + 'static,
) -> Result<Merged> {
    if let Some(call) = Call::at(home, peer).await? {
        let merged = call.ask(&order, |p| progress(p.done, p.total)).await;
        return merged.map_err(|e| e.about_image(peer, &order.name));
    }
    let signals = Stop::on_signals()?;
    let catalog = Arc::new(site::open_catalog(home)?);
    let own = Own::open(home, &catalog).await?;
    let here = Here::of(home, &catalog, own.site())?;
    let stop = Arc::new(AtomicBool::new(false));
    let (flag, request) = (Arc::clone(&stop), order.clone());
    let mut work =
        tokio::task::spawn_blocking(move || merge(&here, &order, None, &mut progress, &flag));
    let mut stop_requested = signals.watch();
    let merged = tokio::select! {
        merged = &mut work => merged,
        () = stopped(&mut stop_requested) => {
            stop.store(true, Ordering::Relaxed);
            work.await
        }
    };
    own.close().await?;
    let merged = merged??;
    home.audit().done(home.domain_name(), &request, &merged);
    Ok(merged)
}
