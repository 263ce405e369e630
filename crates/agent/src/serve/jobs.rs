//! Long work that a caller waits for: off the runtime's workers, a few at once, with progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Result, bail};
use drover_core::ImageName;
use drover_net::{FrameWriter, PeerKey};
use drover_store::{Catalog, ImageRecord};
use drover_teleport::protocol::Reply;
use drover_teleport::{RefuseReason, Site, TeleportError};

use super::Server;
use super::conversation::{failed, no, no_image, reply};
use crate::changes::{self, Here, Order};
use crate::failure::{Exit, exit_of, one_line};
use crate::home::CleanUp;
use crate::signals::told;

/// How often the caller hears how far it is; also what keeps the connection alive.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Runs `job` on a thread of its own when there is room, telling the caller how far it is.
async fn run<T: Send + 'static>(
    server: &Arc<Server>,
    writer: &mut FrameWriter,
    job: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T + Send + 'static,
) -> Result<T> {
    let done = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let seen = Arc::clone(&done);
    let jobs = Arc::clone(&server.jobs);
    let work = async move {
        let place = jobs.acquire_owned().await?;
        let out = tokio::task::spawn_blocking(move || {
            let _place = place;
            job(&mut |now, total| {
                done.0.store(now, Relaxed);
                done.1.store(total, Relaxed);
            })
        })
        .await?;
        Ok(out)
    };
    tokio::pin!(work);
    let mut stop = server.stop.clone();
    let mut ticks = tokio::time::interval(REPORT_EVERY);
    loop {
        tokio::select! {
            out = &mut work => return out,
            () = told(&mut stop) => bail!("the site is stopping"),
            _ = ticks.tick() => {
                let progress = Reply::Progress { done: seen.0.load(Relaxed), total: seen.1.load(Relaxed) };
                reply(writer, &progress).await?;
            }
        }
    }
}

/// Checks an image against its digest.
pub async fn verify(
    server: &Arc<Server>,
    site: &Arc<Site>,
    name: ImageName,
    writer: &mut FrameWriter,
) -> Result<Reply> {
    if record(server, &name).await?.is_none() {
        return Ok(no_image(server, &name));
    }
    let (site, job_name) = (Arc::clone(site), name.clone());
    let checked = run(server, writer, move |progress| {
        site.verify(&job_name, progress)
    })
    .await?;
    Ok(match checked {
        Ok((expected, found)) => {
            let good = expected == found;
            let counter = if good {
                &server.metrics.verified_good
            } else {
                &server.metrics.verified_bad
            };
            counter.fetch_add(1, Relaxed);
            if !good {
                tracing::error!(image = %name, "its file is not what was delivered: {found}, expected {expected}");
            }
            Reply::Verified { expected, found }
        }
        Err(e) => of_error(&e),
    })
}

/// Makes an image file of this machine a source of blocks.
pub async fn index(
    server: &Arc<Server>,
    site: &Arc<Site>,
    path: PathBuf,
    writer: &mut FrameWriter,
) -> Result<Reply> {
    let site = Arc::clone(site);
    let indexed = run(server, writer, move |progress| {
        site.index_image(&path, progress)
    })
    .await?;
    Ok(match indexed {
        Ok(record) => Reply::Done {
            message: record.name.to_string(),
        },
        Err(e) => of_error(&e),
    })
}

/// Ends a job when nobody waits for it any more.
struct StopWhenDropped(Arc<AtomicBool>);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Merges what mounts wrote over an image. A caller that goes away, or a site that stops, ends it without harm.
pub async fn merge(
    server: &Arc<Server>,
    site: &Arc<Site>,
    devices: &Arc<drover_mount::server::Server>,
    order: Order,
    writer: &mut FrameWriter,
) -> Result<Reply> {
    let here = Here {
        site: Arc::clone(site),
        server: Arc::clone(devices),
        state: server.home.mounted_dir(),
        key: server.identity.key(),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let _stop = StopWhenDropped(Arc::clone(&stop));
    let merged = run(server, writer, move |progress| {
        changes::merge(&here, &order, progress, &stop)
    })
    .await?;
    Ok(match merged {
        Ok(merged) => Reply::Text(serde_json::to_string(&merged)?),
        Err(e) if exit_of(&e) == Exit::Refused => no(RefuseReason::Policy, one_line(&e)),
        Err(e) => failed(one_line(&e)),
    })
}

/// Removes an image.
pub async fn remove(server: &Arc<Server>, site: &Arc<Site>, name: ImageName) -> Result<Reply> {
    if record(server, &name).await?.is_none() {
        return Ok(no_image(server, &name));
    }
    let (site, home) = (Arc::clone(site), server.home.clone());
    let removed =
        tokio::task::spawn_blocking(move || CleanUp::of(&home).run(|| Ok(site.remove(&name)?)));
    Ok(match removed.await? {
        Ok(record) => Reply::Done {
            message: crate::images::removal(&server.home, &record),
        },
        Err(e) => match e.downcast_ref() {
            Some(e) => of_error(e),
            None => failed(one_line(&e)),
        },
    })
}

/// Removes what is left of a transfer; a peer may only have its own removed.
pub async fn remove_transfer(
    server: &Arc<Server>,
    site: &Arc<Site>,
    key: String,
    peer: Option<PeerKey>,
) -> Result<Reply> {
    let (site, home) = (Arc::clone(site), server.home.clone());
    let removed = tokio::task::spawn_blocking(move || {
        if let Some(peer) = peer
            && !crate::transfers::is_of(&site.unfinished()?, &key, &peer)
        {
            let message = "you have no unfinished transfer of that key here";
            return Err(crate::failure::failure(Exit::Refused, message));
        }
        CleanUp::of(&home).run(|| Ok(site.remove_transfer(&key)?))
    });
    Ok(match removed.await? {
        Ok(transfer) => {
            tracing::info!(
                image = transfer.name,
                peer = transfer.peer,
                "removed what was left of a transfer"
            );
            Reply::Done {
                message: transfer.name,
            }
        }
        Err(e) if exit_of(&e) == Exit::Refused => no(RefuseReason::Policy, one_line(&e)),
        Err(e) => failed(one_line(&e)),
    })
}

async fn record(server: &Arc<Server>, name: &ImageName) -> Result<Option<ImageRecord>> {
    let (catalog, name) = (Arc::clone(&server.catalog), name.clone());
    Ok(tokio::task::spawn_blocking(move || catalog.by_name(&name)).await??)
}

fn of_error(e: &TeleportError) -> Reply {
    match e.refusal() {
        Some(reason) => no(reason, e.to_string()),
        None => failed(e.to_string()),
    }
}
