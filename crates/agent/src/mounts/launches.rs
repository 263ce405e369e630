//! Images that are used while they are still arriving.

use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_mount::client;
use drover_net::request;
use drover_store::Catalog;
use drover_store::lease::term_text;
use drover_teleport::{LaunchStatus, TransferState, unfinished};
use serde::{Deserialize, Serialize};

use super::status::{DiskStatus, MountState, Status};
use crate::error::{Error, Result};
use crate::home::Home;
use crate::remote::Call;
use crate::site;
use crate::text::clean;

/// Request: the launched images of this site, in the domain of the caller.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListLaunches;
request!(ListLaunches: "launch.list", Manage, () => Vec<LaunchStatus>);

/// A launched image; see [`LaunchStatus`].
pub type Launched = LaunchStatus;

/// The launched images of the running site of this home; none if none runs.
///
/// # Errors
/// When the site does not answer.
pub async fn launches(home: &Home) -> Result<Vec<Launched>> {
    match Call::local(home).await? {
        Some(call) => call.ask(&ListLaunches, |()| {}).await,
        None => Ok(Vec::new()),
    }
}

/// How long a request of a launched image waits: a machine's reads and writes are held, whatever happens to the image's source and to
/// this site, until they can be done. Ten years.
const HELD: Duration = Duration::from_secs(3650 * 86_400);

/// How long the first connection may take: the tables of a container have to come first.
const FIRST_CONTACT: Duration = Duration::from_secs(120);

/// Has a mount wait as long as a launched image may take.
pub(super) fn hold(options: &mut client::Options) {
    options.give_up = HELD;
    options.first_contact = FIRST_CONTACT;
}

/// Whether the site has an image, or one of that name is still arriving.
///
/// # Errors
/// When it has neither; when no site runs that could receive the rest.
pub(super) async fn check(home: &Home, name: &str, launch: bool) -> Result<()> {
    let (its, name) = (home.clone(), ImageName::new(name)?);
    let wanted = name.clone();
    let look = move || -> Result<_> {
        let is_here = site::look_at_catalog(&its)?.by_name(&wanted)?.is_some();
        let mut transfers = unfinished(&its.work_dir())?;
        transfers.retain(|t| t.name == wanted.as_str() && t.state != TransferState::Damaged);
        Ok((is_here, transfers.into_iter().next()))
    };
    match (tokio::task::spawn_blocking(look).await??, launch) {
        ((true, _), _) | ((false, None), false) => Ok(()),
        ((false, None), true) => Err(Error::refused(format!(
            "{name} is neither an image of this site nor being sent to it; `drover transfers` lists what is being sent"
        ))),
        ((false, Some(transfer)), false) => Err(Error::refused(format!(
            "{name} is still being sent by {}; `drover launch {name}` uses it meanwhile",
            transfer.peer
        ))),
        ((false, Some(transfer)), true) => match Call::local(home).await? {
            Some(_) => Ok(()),
            None => Err(Error::refused(format!(
                "{name} has not arrived completely from {}, and no site runs here that could receive the rest; start `drover serve`",
                transfer.peer
            ))),
        },
    }
}

/// Waits until an image is here, or is being sent.
pub(super) async fn wait_for(home: &Home, name: &str, limit: Duration) -> Result<()> {
    let began = Instant::now();
    loop {
        match check(home, name, true).await {
            Err(_) if began.elapsed() < limit => tokio::time::sleep(WAIT_PAUSE).await,
            done => return done,
        }
    }
}

/// Interval at which an image is looked for.
const WAIT_PAUSE: Duration = Duration::from_millis(200);

/// Adds to the status of mounts what the site knows of their images that are still arriving.
pub(super) async fn add_to(home: &Home, all: &mut [Status]) {
    let of_own = |status: &Status| {
        status.state == MountState::Up && status.disks.iter().any(|disk| disk.mode == "own")
    };
    if !all.iter().any(of_own) {
        return;
    }
    // A site that does not answer is said by the mounts themselves.
    let Ok(launched) = launches(home).await else {
        return;
    };
    for disk in all.iter_mut().flat_map(|status| &mut status.disks) {
        let found = launched.iter().find(|l| l.image == disk.image);
        if let Some(launched) = found.filter(|_| disk.mode == "own") {
            show(disk, launched);
        }
    }
}

/// Shows how far an image has arrived, and what is waited for.
fn show(disk: &mut DiskStatus, launched: &Launched) {
    let share = |of: u64| match launched.total_bytes {
        0 => of,
        total => (u128::from(of) * u128::from(launched.done_bytes) / u128::from(total)) as u64,
    };
    disk.mode = "launched".into();
    disk.local = share(disk.size);
    let peer = clean(&launched.peer);
    let ago = |since: i64| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        term_text(now.saturating_sub(since).unsigned_abs())
    };
    let waits = launched.waiting_since_unix.map(|since| {
        let stopped = match launched.stopped_since_unix {
            Some(_) => "; its reads are held until the image is sent again",
            None => "",
        };
        format!("waiting for blocks from {peer} for {}{stopped}", ago(since))
    });
    let stopped = launched
        .stopped_since_unix
        .map(|since| format!("nothing has come from {peer} for {}", ago(since)));
    disk.trouble = waits.or(stopped).or(disk.trouble.take());
}
