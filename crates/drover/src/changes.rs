//! `changes`: what mounts wrote over this site's images.
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
use drover_mount::server::{Changes, Holder, Server, changes_of, changes_on_disk};
use drover_store::{Catalog, SiteCatalog};
use drover_teleport::protocol::{Reply, Request};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::bar::Bar;
use crate::cli::{ChangesAction, ChangesArgs, DropArgs, MergeArgs, Target};
use crate::failure::{no_image, usage};
use crate::home::{CleanUp, Home};
use crate::own::Own;
use crate::remote::Call;
use crate::signals::{Stop, told as told_to_stop};
use crate::text::{bytes, clean, moment};
use crate::{mounts, out, prompt, site};

pub use merge::{Here, Merged, Order, merge};
pub use recover::recover;

/// What mounts wrote over an image, as it is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Told {
    image: String,
    /// Bytes of the disk that are not the image's any more.
    pub changed_bytes: u64,
    /// Bytes that it takes.
    pub room_bytes: u64,
    written_unix: Option<i64>,
    /// Who wrote last.
    by: Option<Writer>,
    /// Who may write now.
    held_by: Option<Writer>,
    /// Of an image that was replaced since.
    earlier: bool,
    /// The digest of the image that it was written over.
    base: Option<String>,
    /// Where it is.
    pub directory: PathBuf,
    problem: Option<String>,
}

/// A mount that writes or wrote.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Writer {
    peer: String,
    note: String,
    mount: String,
    since_unix: u64,
}

impl From<Holder> for Writer {
    fn from(holder: Holder) -> Writer {
        Writer {
            peer: holder.peer_name,
            note: holder.note,
            mount: holder.mount.to_string(),
            since_unix: holder.since_unix,
        }
    }
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
struct Dropped {
    image: String,
    /// Whether there was anything.
    dropped: bool,
    changed_bytes: u64,
    room_bytes: u64,
    earlier: bool,
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

/// `drover changes`.
///
/// # Errors
/// What stands in the way.
pub async fn changes(home: &Home, args: ChangesArgs) -> Result<()> {
    match args.action {
        None => list(home, args.json).await,
        Some(ChangesAction::List { json }) => list(home, json).await,
        Some(ChangesAction::Merge(args)) => merge_changes(home, args).await,
        Some(ChangesAction::Drop(args)) => drop_changes(home, args).await,
    }
}

async fn told(home: &Home) -> Result<Vec<Told>> {
    let text = match Call::local(home).await? {
        Some(mut call) => {
            call.ask(&Request::Changes).await?;
            let Reply::Text(text) = call.reply().await? else {
                return Err(call.confused());
            };
            call.close().await;
            text
        }
        None => list_json(home)?,
    };
    Ok(serde_json::from_str(&text)?)
}

async fn list(home: &Home, json: bool) -> Result<()> {
    let list = told(home).await?;
    if json {
        return list.iter().try_for_each(out::json);
    }
    if list.is_empty() {
        out::note("drover: no mount has written over an image of this site");
        return Ok(());
    }
    let catalog = site::look_at_catalog(home)?;
    let rows = list
        .into_iter()
        .map(|c| {
            let state = state(&catalog, &c)?;
            let by = |of: &dyn Fn(&Writer) -> &str| {
                c.by.as_ref().map_or_else(|| "-".into(), |w| clean(of(w)))
            };
            Ok(vec![
                clean(&c.image),
                bytes(c.changed_bytes),
                bytes(c.room_bytes),
                c.written_unix.map_or_else(|| "-".into(), moment),
                by(&|w| &w.peer),
                by(&|w| &w.note),
                state,
            ])
        })
        .collect::<Result<_>>()?;
    let heading = [
        "image",
        "changed",
        "takes",
        "last written (UTC)",
        "by",
        "mount",
        "state",
    ];
    out::line(&out::table(&heading, rows, &[1, 2]))
}

/// In what state changes are, in a few words.
fn state(catalog: &SiteCatalog, c: &Told) -> Result<String> {
    if let Some(problem) = &c.problem {
        return Ok(clean(problem));
    }
    if c.earlier {
        return Ok("of an earlier image".into());
    }
    if let Some(writer) = &c.held_by {
        return Ok(format!(
            "held by {} ({})",
            clean(&writer.peer),
            clean(&writer.note)
        ));
    }
    let record = match ImageName::new(&c.image) {
        Ok(name) => catalog.by_name(&name).map_err(anyhow::Error::msg)?,
        Err(_) => None,
    };
    Ok(match record {
        None => "the image is gone".into(),
        Some(record) if !c.is_over(&record.digest) => "of an earlier image".into(),
        Some(_) => "free".into(),
    })
}

async fn drop_changes(home: &Home, args: DropArgs) -> Result<()> {
    let list = told(home).await?;
    let these = |c: &&Told| c.image == args.name.as_str() && c.earlier == args.earlier;
    let found: Vec<&Told> = list.iter().filter(these).collect();
    let catalog = Arc::new(site::look_at_catalog(home)?);
    if found.is_empty() {
        let other = list.iter().any(|c| c.image == args.name.as_str());
        return nothing_to_drop(&catalog, &args, other);
    }
    let sum = |of: fn(&Told) -> u64| found.iter().map(|c| of(c)).sum::<u64>();
    let (changed, room) = (sum(|c| c.changed_bytes), sum(|c| c.room_bytes));
    let what = format!(
        "what mounts wrote over {}{} ({}, which takes {})",
        if args.earlier {
            "earlier images called "
        } else {
            ""
        },
        args.name,
        bytes(changed),
        bytes(room)
    );
    if args.dry_run {
        return match args.json {
            true => out::json(&json!({
                "image": args.name.as_str(), "dropped": false, "changed_bytes": changed,
                "room_bytes": room, "earlier": args.earlier,
            })),
            false => out::line(&format!("would drop {what}")),
        };
    }
    prompt::confirm(&format!("Drop {what}? It cannot be undone"), args.yes)?;
    let mut room = CleanUp::of(home);
    let text = room
        .run_async(|| ask_to_drop(home, &catalog, &args.name, args.earlier))
        .await?;
    let dropped: Dropped = serde_json::from_str(&text)?;
    if args.json {
        return out::json(&dropped);
    }
    match dropped.dropped {
        true => out::line(&format!("dropped {what}")),
        false => {
            out::note(&format!(
                "drover: there was nothing left to drop of {}",
                args.name
            ));
            Ok(())
        }
    }
}

/// Has the running site drop changes, or drops them when none runs.
async fn ask_to_drop(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    name: &ImageName,
    earlier: bool,
) -> Result<String> {
    if let Some(mut call) = Call::local(home).await? {
        let name = name.clone();
        call.ask(&Request::DropChanges { name, earlier }).await?;
        let Reply::Text(text) = call.reply().await? else {
            return Err(call.confused());
        };
        call.close().await;
        return Ok(text);
    }
    // No site may begin to serve it meanwhile; what a merge left that was interrupted is dealt with first.
    let own = Own::open(home, catalog).await?;
    let server = mounts::site_server(home, catalog)?;
    let (of, name) = (home.clone(), name.clone());
    let dropped =
        tokio::task::spawn_blocking(move || drop_json(&of, &server, &name, earlier)).await?;
    own.close().await?;
    dropped
}

/// There is nothing: fine, if there is such an image, or `other` changes than those that were asked for.
fn nothing_to_drop(catalog: &SiteCatalog, args: &DropArgs, other: bool) -> Result<()> {
    let record = catalog.by_name(&args.name).map_err(anyhow::Error::msg)?;
    if record.is_none() && !other {
        return Err(no_image(&args.name));
    }
    if args.json {
        return out::json(&json!({
            "image": args.name.as_str(), "dropped": false, "changed_bytes": 0, "room_bytes": 0,
            "earlier": args.earlier,
        }));
    }
    let (which, instead) = match args.earlier {
        true => ("an earlier ", "without --earlier what there is goes"),
        false => ("", "--earlier drops what was written over an earlier one"),
    };
    let hint = match other {
        true => format!("; {instead}"),
        false => String::new(),
    };
    out::note(&format!(
        "drover: no mount has written over {which}{}: nothing to drop{hint}",
        args.name
    ));
    Ok(())
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
        out::note(&format!("drover: {}", clean(&line)));
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

async fn merge_changes(home: &Home, args: MergeArgs) -> Result<()> {
    if args.rename.as_ref() == Some(&args.name) {
        return Err(usage(format!(
            "{} is the image's own name; without --as it is merged in place",
            args.name
        )));
    }
    let bar = Bar::new(args.name.as_str(), args.json || args.dry_run);
    let merged = ask_to_merge(home, &args, &bar).await;
    bar.clear();
    let merged = merged?;
    if args.json {
        return out::json(&merged);
    }
    out::line(&clean(&merged_in_words(&args, &merged)))
}

fn merged_in_words(args: &MergeArgs, m: &Merged) -> String {
    let name = &args.name;
    if m.changed_bytes == 0 && !m.merged {
        return format!("no mount has written over {name}: nothing to merge");
    }
    let changed = bytes(m.changed_bytes);
    let place = match &args.rename {
        Some(rename) => format!("{rename}, a new {} image", m.format),
        None => name.to_string(),
    };
    if args.dry_run {
        let mut text = format!(
            "would merge {changed} that mounts wrote over {name} into {place} of {}; needs {} beside it",
            bytes(m.size_bytes),
            bytes(m.room_bytes)
        );
        if let Some(free) = m.free_bytes {
            text += &format!(" ({} are free)", bytes(free));
        }
        if m.format == "raw" {
            text += ", less where the file system shares extents";
        }
        if let Some(held) = &m.held {
            text += &format!("; now {held} is in the way, which may write it");
        }
        return text;
    }
    let digest = m.digest.as_deref().unwrap_or_default();
    if m.changed_bytes == 0 {
        return format!(
            "finished the merge of {name} that was interrupted; its digest is {digest}"
        );
    }
    let left = match (&args.rename, m.dropped) {
        (Some(_), false) => format!("; {name} keeps its changes"),
        (Some(_), true) => format!("; {name} is again as it was delivered"),
        (None, true) => String::new(),
        (None, false) => "; what mounts wrote is still there: `drover changes`".into(),
    };
    format!("merged {changed} into {place}; its digest is {digest}{left}")
}

/// Has the running site merge, or merges when none runs.
async fn ask_to_merge(home: &Home, args: &MergeArgs, bar: &Bar) -> Result<Merged> {
    if let Some(mut call) = Call::local(home).await? {
        call.ask(&Request::MergeChanges {
            name: args.name.clone(),
            rename: args.rename.clone(),
            qcow2: args.to.map(|to| to == Target::Qcow2),
            drop: args.drop,
            dry_run: args.dry_run,
        })
        .await?;
        let text = loop {
            match call.reply().await? {
                Reply::Progress { done, total } => bar.at(done, total),
                Reply::Text(text) => break text,
                _ => return Err(call.confused()),
            }
        };
        call.close().await;
        return Ok(serde_json::from_str(&text)?);
    }
    let order = Order {
        name: args.name.clone(),
        rename: args.rename.clone(),
        to: args.to,
        drop: args.drop,
        dry_run: args.dry_run,
    };
    let signals = Stop::on_signals()?;
    let catalog = Arc::new(site::open_catalog(home)?);
    let own = Own::open(home, &catalog).await?;
    let here = here(home, &catalog, own.site())?;
    let stop = Arc::new(AtomicBool::new(false));
    let (bar, flag) = (bar.clone(), Arc::clone(&stop));
    let mut work = tokio::task::spawn_blocking(move || {
        merge(&here, &order, &mut |done, total| bar.at(done, total), &flag)
    });
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
