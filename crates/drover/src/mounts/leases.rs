//! `mounts leases` and `mounts break`: who holds this site's images.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use drover_core::ImageName;
use drover_mount::MountError;
use drover_mount::server::{Leased, MERGE_NOTE, Server, lease_on_disk};
use drover_store::Catalog;
use drover_teleport::Site;
use drover_teleport::protocol::{Reply, Request};
use serde::{Deserialize, Serialize};

use crate::failure::no_image;
use crate::home::{CleanUp, Home};
use crate::remote::Call;
use crate::text::{clean, moment};
use crate::{out, prompt, site};

/// An image that is mounted or leased, as it is told.
#[derive(Debug, Serialize, Deserialize)]
struct Held {
    image: String,
    writer: Option<Writer>,
    connected: Vec<String>,
    /// Why it cannot be said who may write it.
    #[serde(default)]
    problem: Option<String>,
}

/// Who may write.
#[derive(Debug, Serialize, Deserialize)]
struct Writer {
    peer: String,
    note: String,
    mount: String,
    since_unix: u64,
}

/// What a broken lease was.
#[derive(Debug, Serialize, Deserialize)]
struct Broken {
    image: String,
    writer: Option<Writer>,
    /// The lease was damaged, and another is in its place.
    #[serde(default)]
    damaged: bool,
}

fn writer(holder: drover_mount::server::Holder) -> Writer {
    Writer {
        peer: holder.peer_name,
        note: holder.note,
        mount: holder.mount.to_string(),
        since_unix: holder.since_unix,
    }
}

/// Why an image may not be replaced or removed now; none when it may.
pub fn why_held(name: &ImageName, leased: Result<Option<Leased>, MountError>) -> Option<String> {
    let leased = match leased {
        Ok(leased) => leased?,
        // Somebody may have it.
        Err(e) => return Some(format!("who may write it cannot be read: {e}")),
    };
    match (&leased.holder, leased.connected.first()) {
        (Some(holder), _) if holder.note == MERGE_NOTE => Some(format!(
            "what mounts wrote over it is being made part of it; try again when that is done, or end it by `drover mounts break {name}`"
        )),
        (Some(holder), _) => Some(format!(
            "{} of {} may write it; unmount it there, or `drover mounts break {name}` at the site that has it",
            clean(&holder.note),
            clean(&holder.peer_name)
        )),
        (None, Some(reader)) => Some(format!(
            "{} has it mounted; unmount it there",
            clean(reader)
        )),
        (None, None) => None,
    }
}

/// Who may still push to an image, by what is written down: also while no site serves it.
pub fn leased_on_disk(state: &Path, name: &ImageName) -> Result<Option<Leased>, MountError> {
    let holder = lease_on_disk(state, name)?;
    Ok(Some(Leased {
        image: name.to_string(),
        holder,
        connected: Vec::new(),
        problem: None,
    }))
}

/// Keeps images that somebody may still push to from being replaced or removed while no site runs.
pub fn hold_written(site: &Site, home: &Home) {
    let state = home.mounted_dir();
    site.hold_by(Arc::new(move |name| {
        why_held(name, leased_on_disk(&state, name))
    }));
}

/// The leases of a server as JSON.
///
/// # Errors
/// When the site's state cannot be read.
pub fn leases_json(server: &Server) -> Result<String> {
    let held: Vec<Held> = server
        .leases()?
        .into_iter()
        .map(|leased| Held {
            image: leased.image,
            writer: leased.holder.map(writer),
            connected: leased.connected,
            problem: leased.problem,
        })
        .collect();
    Ok(serde_json::to_string(&held)?)
}

/// Breaks a lease; what it was, as JSON.
///
/// # Errors
/// When the site's state cannot be changed.
pub async fn broken_json(server: &Arc<Server>, name: &ImageName) -> Result<String> {
    let (on_disk, image) = (Arc::clone(server), name.clone());
    let damaged = tokio::task::spawn_blocking(move || on_disk.replace_damaged_lease(&image));
    let damaged = damaged.await??;
    let holder = server.break_lease(name).await?;
    Ok(serde_json::to_string(&Broken {
        image: name.to_string(),
        writer: holder.map(writer),
        damaged,
    })?)
}

/// Asks the running site, or does what it would do when none runs.
async fn ask(home: &Home, request: Request) -> Result<String> {
    if let Some(mut call) = Call::local(home).await? {
        call.ask(&request).await?;
        let Reply::Text(text) = call.reply().await? else {
            return Err(call.confused());
        };
        call.close().await;
        return Ok(text);
    }
    let catalog = Arc::new(match &request {
        Request::Leases => site::look_at_catalog(home)?,
        _ => site::open_catalog(home)?,
    });
    let server = super::site_server(home, &catalog)?;
    match request {
        Request::BreakLease { name } => broken_json(&server, &name).await,
        _ => leases_json(&server),
    }
}

/// Lists who holds images.
///
/// # Errors
/// When the site does not answer.
pub async fn list(home: &Home, json: bool) -> Result<()> {
    let held: Vec<Held> = serde_json::from_str(&ask(home, Request::Leases).await?)?;
    if json {
        return held.iter().try_for_each(out::json);
    }
    if held.is_empty() {
        out::note("drover: nobody holds an image of this site");
        return Ok(());
    }
    let rows = held
        .into_iter()
        .map(|held| {
            let writer = held.writer.as_ref();
            vec![
                clean(&held.image),
                writer.map_or_else(|| "-".into(), |w| clean(&w.peer)),
                match &held.problem {
                    Some(problem) => clean(problem),
                    None => writer.map_or_else(String::new, |w| clean(&w.note)),
                },
                writer.map_or_else(String::new, |w| {
                    moment(i64::try_from(w.since_unix).unwrap_or_default())
                }),
                clean(&held.connected.join(" ")),
            ]
        })
        .collect();
    let heading = ["image", "writer", "mount", "since (UTC)", "connected now"];
    out::line(&out::table(&heading, rows, &[]))
}

/// Whether there is an image of that name, or a lease of one that is gone.
fn is_known(home: &Home, name: &ImageName) -> Result<bool> {
    let image = site::open_catalog(home)?.by_name(name);
    if image.map_err(anyhow::Error::msg)?.is_some() {
        return Ok(true);
    }
    // One that cannot be read is one.
    Ok(!matches!(
        lease_on_disk(&home.mounted_dir(), name),
        Ok(None)
    ))
}

/// Takes the right to write an image from whoever has it.
///
/// # Errors
/// When there is no such image, or the site does not answer.
pub async fn break_lease(home: &Home, name: &ImageName, yes: bool, json: bool) -> Result<()> {
    let mut room = CleanUp::of(home);
    if !room.run(|| is_known(home, name))? {
        return Err(no_image(name));
    }
    let question = format!(
        "Take the right to write {name} from whoever has it? What they have not pushed is lost to this site"
    );
    prompt::confirm(&question, yes)?;
    let request = || Request::BreakLease { name: name.clone() };
    let broken = room.run_async(|| ask(home, request())).await?;
    let broken: Broken = serde_json::from_str(&broken)?;
    if json {
        return out::json(&broken);
    }
    match broken.writer {
        Some(w) => out::note(&format!(
            "drover: {} of {} may not write {name} any more",
            clean(&w.note),
            clean(&w.peer)
        )),
        None if broken.damaged => out::note(&format!(
            "drover: the damaged lease of {name} is kept beside a new one; nobody may write the image now, and what was written over it is there"
        )),
        None => out::note(&format!("drover: nobody had the right to write {name}")),
    }
    Ok(())
}
