//! What mounts wrote over this site's images.
//!
//! - [`mod@merge`]: what makes it part of an image; [`part`]: the new file; [`decided`], [`mod@recover`]: after a crash.

mod decided;
mod merge;
mod part;
mod recover;
mod turn;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{Digest, ImageName};
use drover_mount::server::{Changes, Server, changes_of, changes_on_disk};

use drover_net::request;
use drover_store::SiteCatalog;
use drover_teleport::services::Progress;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::home::Home;
use crate::mounts::{self, Writer};
use crate::own::Own;
use crate::remote::Call;
use crate::signals::{Stop, told as told_to_stop};
use crate::site;
use crate::text::{bytes, clean};

pub use merge::{Merged, Order, merge};
pub use part::Target;
pub use recover::{recover, recover_own};
pub use turn::Here;

/// What mounts wrote over an image, as it is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Told {
    /// The image.
    pub image: String,
    /// Bytes of the disk that are not the image's any more.
    pub changed_bytes: u64,
    /// Bytes that it takes.
    pub room_bytes: u64,
    /// When it was last written, seconds since 1970.
    pub written_unix: Option<i64>,
    /// Who wrote last.
    pub by: Option<Writer>,
    /// Who may write now.
    pub held_by: Option<Writer>,
    /// Of an image that was replaced since.
    pub earlier: bool,
    /// The digest of the image that it was written over.
    pub base: Option<String>,
    /// Where it is.
    pub directory: String,
    /// Why it cannot be read.
    pub problem: Option<String>,
}

impl From<Changes> for Told {
    fn from(c: Changes) -> Told {
        Told {
            image: c.image,
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

/// What was dropped.
#[derive(Debug, Serialize, Deserialize)]
pub struct Dropped {
    /// The image.
    pub image: String,
    /// Whether there was anything.
    pub dropped: bool,
    /// Bytes of the disk that were not the image's.
    pub changed_bytes: u64,
    /// Bytes that it took.
    pub room_bytes: u64,
    /// Of images that were replaced since.
    pub earlier: bool,
}

/// What mounts wrote over an image; none when that is nothing.
pub fn of_image(home: &Home, name: &ImageName) -> Option<Told> {
    changes_of(&home.mounted_dir(), name).map(Told::from)
}

/// What mounts wrote over all images?
#[derive(Debug, Serialize, Deserialize)]
pub struct ListChanges;
request!(ListChanges: "change.list", Manage, () => Vec<Told>);

/// Drop what mounts wrote over an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DropChanges {
    /// Which.
    pub name: ImageName,
    /// Over earlier images of that name, which were replaced since.
    pub earlier: bool,
}
request!(DropChanges: "change.drop", Manage, () => Dropped);

request!(Order: "change.merge", Manage, Progress => Merged);

/// What mounts wrote over all images.
///
/// # Errors
/// When the site's state cannot be read.
pub fn on_disk(home: &Home) -> Result<Vec<Told>> {
    let all = changes_on_disk(&home.mounted_dir())?;
    Ok(all.into_iter().map(Told::from).collect())
}

/// Drops changes; what they were. Blocks on the disk.
///
/// # Errors
/// When somebody has the image mounted, or its files cannot be changed.
pub fn drop_at(home: &Home, server: &Server, name: &ImageName, earlier: bool) -> Result<Dropped> {
    let room = room_of(home, name, earlier)?;
    let (dropped, changed_bytes) = if earlier {
        (server.drop_earlier(name)? > 0, 0)
    } else {
        let changed = server.drop_changes(name)?;
        (changed.is_some(), changed.unwrap_or(0))
    };
    Ok(Dropped {
        image: name.to_string(),
        dropped,
        changed_bytes,
        room_bytes: room,
        earlier,
    })
}

fn room_of(home: &Home, name: &ImageName, earlier: bool) -> Result<u64> {
    let all = changes_on_disk(&home.mounted_dir())?;
    let these = all
        .iter()
        .filter(|c| c.image == name.as_str() && c.earlier == earlier);
    Ok(these.map(|c| c.room).sum())
}

/// What mounts wrote, by the running site or by what is written down.
///
/// # Errors
/// When the site does not answer, or its state cannot be read.
pub async fn told(home: &Home) -> Result<Vec<Told>> {
    match Call::local(home).await? {
        Some(call) => call.ask(&ListChanges, |()| {}).await,
        None => on_disk(home),
    }
}

/// Has the running site drop changes, or drops them when none runs.
///
/// # Errors
/// As [`drop_at`].
pub async fn ask_to_drop(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    name: &ImageName,
    earlier: bool,
) -> Result<Dropped> {
    if let Some(call) = Call::local(home).await? {
        let name = name.clone();
        return call.ask(&DropChanges { name, earlier }, |()| {}).await;
    }
    // No site may begin to serve it meanwhile; what a merge left that was interrupted is dealt with first.
    let own = Own::open(home, catalog).await?;
    let server = mounts::site_server(home, catalog)?;
    let (of, name) = (home.clone(), name.clone());
    let dropped =
        tokio::task::spawn_blocking(move || drop_at(&of, &server, &name, earlier)).await?;
    own.close().await?;
    dropped
}

impl Told {
    /// Whether it was written over the image of this digest, as far as that is known, and not over one that had its name
    /// before.
    pub fn is_over(&self, digest: &Digest) -> bool {
        let of_another = |base: &String| *base != digest.to_string();
        !self.base.as_ref().is_some_and(of_another)
    }

    /// For who looks at the image itself: that there is more.
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

/// Has the running site merge, or merges when none runs. `progress` hears bytes done of bytes in all.
///
/// # Errors
/// As [`merge()`].
pub async fn ask_to_merge(
    home: &Home,
    order: Order,
    mut progress: impl FnMut(u64, u64) + Send + 'static,
) -> Result<Merged> {
    if let Some(call) = Call::local(home).await? {
        return call.ask(&order, |p| progress(p.done, p.total)).await;
    }
    let signals = Stop::on_signals()?;
    let catalog = Arc::new(site::open_catalog(home)?);
    let own = Own::open(home, &catalog).await?;
    let here = Here::of(home, &catalog, own.site())?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let mut work = tokio::task::spawn_blocking(move || merge(&here, &order, &mut progress, &flag));
    let mut asked = signals.watch();
    let merged = tokio::select! {
        merged = &mut work => merged,
        () = told_to_stop(&mut asked) => {
            stop.store(true, Ordering::Relaxed);
            work.await
        }
    };
    own.close().await?;
    merged?
}
