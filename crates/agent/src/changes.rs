//! What mounts wrote over this site's images.
//!
//! - [`mod@merge`]: what makes it part of an image; [`part`]: the new file; [`decided`], [`mod@recover`]: after a crash.

mod decided;
mod merge;
mod part;
mod recover;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use drover_core::{Digest, ImageName};
use drover_mount::server::{Changes, Server, changes_of, changes_on_disk};

use drover_teleport::protocol::{Reply, Request};
use serde::{Deserialize, Serialize};

use crate::home::Home;
use crate::mounts::{self, Writer};
use crate::notice::notice;
use crate::own::Own;
use crate::remote::Call;
use crate::signals::{Stop, told as told_to_stop};
use crate::site;
use crate::text::{bytes, clean};
use drover_store::SiteCatalog;

pub use merge::{Here, Merged, Order, merge};
pub use recover::recover;

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
    pub directory: PathBuf,
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
            directory: c.directory,
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

/// What mounts wrote over all images, as JSON.
///
/// # Errors
/// When the site's state cannot be read.
pub fn list_json(home: &Home) -> Result<String> {
    let all = changes_on_disk(&home.mounted_dir())?;
    let told: Vec<Told> = all.into_iter().map(Told::from).collect();
    Ok(serde_json::to_string(&told)?)
}

/// Drops changes; what they were, as JSON. Blocks on the disk.
///
/// # Errors
/// When somebody has the image mounted, or its files cannot be changed.
pub fn drop_json(home: &Home, server: &Server, name: &ImageName, earlier: bool) -> Result<String> {
    let room = room_of(home, name, earlier)?;
    let (dropped, changed_bytes) = if earlier {
        (server.drop_earlier(name)? > 0, 0)
    } else {
        let changed = server.drop_changes(name)?;
        (changed.is_some(), changed.unwrap_or(0))
    };
    Ok(serde_json::to_string(&Dropped {
        image: name.to_string(),
        dropped,
        changed_bytes,
        room_bytes: room,
        earlier,
    })?)
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
    let text = match Call::local(home).await? {
        Some(call) => call.text(&Request::Changes).await?,
        None => list_json(home)?,
    };
    Ok(serde_json::from_str(&text)?)
}

/// Has the running site drop changes, or drops them when none runs.
///
/// # Errors
/// As [`drop_json`].
pub async fn ask_to_drop(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    name: &ImageName,
    earlier: bool,
) -> Result<Dropped> {
    if let Some(call) = Call::local(home).await? {
        let name = name.clone();
        let text = call.text(&Request::DropChanges { name, earlier }).await?;
        return Ok(serde_json::from_str(&text)?);
    }
    // No site may begin to serve it meanwhile; what a merge left that was interrupted is dealt with first.
    let own = Own::open(home, catalog).await?;
    let server = mounts::site_server(home, catalog)?;
    let (of, name) = (home.clone(), name.clone());
    let dropped =
        tokio::task::spawn_blocking(move || drop_json(&of, &server, &name, earlier)).await?;
    own.close().await?;
    Ok(serde_json::from_str(&dropped?)?)
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
            Some(problem) => format!(
                "what mounts wrote over it cannot be read: {}",
                clean(problem)
            ),
            None => format!(
                "mounts wrote {} over it, which is no part of the image's file (`drover changes`)",
                bytes(self.changed_bytes)
            ),
        }
    }
}

/// A format that drover writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The disk, byte for byte.
    Raw,
    /// A qcow2 image without backing file.
    Qcow2,
}

/// The format of a request.
pub fn target(qcow2: Option<bool>) -> Option<Target> {
    qcow2.map(|qcow2| match qcow2 {
        true => Target::Qcow2,
        false => Target::Raw,
    })
}

/// Finishes merges that a crash interrupted, in a home that this process has.
///
/// # Errors
/// When mounts cannot be asked.
pub async fn recover_own(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    site: &Arc<drover_teleport::Site>,
) -> Result<()> {
    let merges = std::fs::read_dir(site.work_dir().join("merges"));
    if merges.map_or(true, |mut merges| merges.next().is_none()) {
        return Ok(());
    }
    let here = here(home, catalog, site)?;
    let recover = move || recover(&here, &AtomicBool::new(false));
    for line in tokio::task::spawn_blocking(recover).await? {
        notice(&clean(&line));
    }
    Ok(())
}

fn here(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    site: &Arc<drover_teleport::Site>,
) -> Result<Here> {
    Ok(Here {
        site: Arc::clone(site),
        server: mounts::site_server(home, catalog)?,
        state: home.mounted_dir(),
        key: home.identity()?.key(),
    })
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
    if let Some(mut call) = Call::local(home).await? {
        call.ask(&Request::MergeChanges {
            name: order.name,
            rename: order.rename,
            qcow2: order.to.map(|to| to == Target::Qcow2),
            drop: order.drop,
            dry_run: order.dry_run,
        })
        .await?;
        let text = loop {
            match call.reply().await? {
                Reply::Progress { done, total } => progress(done, total),
                Reply::Text(text) => break text,
                _ => return Err(call.confused()),
            }
        };
        call.close().await;
        return Ok(serde_json::from_str(&text)?);
    }
    let signals = Stop::on_signals()?;
    let catalog = Arc::new(site::open_catalog(home)?);
    let own = Own::open(home, &catalog).await?;
    let here = here(home, &catalog, own.site())?;
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
