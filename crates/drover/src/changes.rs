//! `changes`: the changes that mounts wrote to this site's images.

use std::collections::HashMap;

use anyhow::Result;
use drover_agent::changes::{self, ImageChanges, Merged, Order};
use drover_agent::error::Error;
use drover_agent::home::{CleanUp, Home};
use drover_agent::images::{self, list_of_peer};
use drover_agent::mounts::Writer;
use drover_agent::site;
use drover_agent::text::{bytes, clean, moment};
use drover_core::Digest;
use drover_net::Code;
use serde_json::json;

use crate::bar::Bar;
use crate::cli::{ChangesAction, ChangesArgs, DropArgs, MergeArgs};
use crate::failure::{self, usage};
use crate::{out, prompt};

/// `drover changes`.
///
/// # Errors
/// When they cannot be listed, merged or dropped.
pub async fn changes(home: &Home, args: ChangesArgs) -> Result<()> {
    match args.action {
        None => list(home, args.peer.as_deref(), args.json).await,
        Some(ChangesAction::List { peer, json }) => list(home, peer.as_deref(), json).await,
        Some(ChangesAction::Merge(args)) => merge_changes(home, args).await,
        Some(ChangesAction::Drop(args)) => drop_changes(home, args).await,
    }
}

async fn list(home: &Home, peer: Option<&str>, json: bool) -> Result<()> {
    let list = changes::list(home, peer).await?;
    if json {
        return list.iter().try_for_each(out::json);
    }
    if list.is_empty() {
        out::note("drover: no changes");
        return Ok(());
    }
    let images = images(home, peer).await?;
    let rows = list
        .into_iter()
        .map(|c| {
            let state = state(&images, &c);
            let by = |of: &dyn Fn(&Writer) -> &str| {
                c.by.as_ref().map_or_else(|| "-".into(), |w| clean(of(w)))
            };
            vec![
                clean(&c.image),
                bytes(c.changed_bytes),
                bytes(c.room_bytes),
                c.written_unix.map_or_else(|| "-".into(), moment),
                by(&|w| &w.peer),
                by(&|w| &w.note),
                state,
            ]
        })
        .collect();
    let heading = [
        "image",
        "changed",
        "on disk",
        "last written (UTC)",
        "written by",
        "mount",
        "state",
    ];
    out::line(&out::table(&heading, rows, &[1, 2]))
}

/// The images of this site or of a peer, by name.
async fn images(home: &Home, peer: Option<&str>) -> Result<HashMap<String, Digest>> {
    let catalog = site::look_at_catalog(home)?;
    let images = match peer {
        None => images::list(home, &catalog)?,
        Some(peer) => list_of_peer(home, &catalog, peer).await?,
    };
    Ok(images.into_iter().map(|i| (i.name, i.digest)).collect())
}

/// The state of changes. `images` are those of the site, by name.
fn state(images: &HashMap<String, Digest>, c: &ImageChanges) -> String {
    if let Some(problem) = &c.problem {
        return clean(problem);
    }
    if c.earlier {
        return "of an earlier image".into();
    }
    if let Some(writer) = &c.held_by {
        return format!(
            "leased by {} ({})",
            clean(&writer.peer),
            clean(&writer.note)
        );
    }
    match images.get(&c.image) {
        None => "image removed".into(),
        Some(digest) if !c.is_over(digest) => "of an earlier image".into(),
        Some(_) => "free".into(),
    }
}

async fn drop_changes(home: &Home, args: DropArgs) -> Result<()> {
    let (peer, name) = (args.image.peer.as_deref(), &args.image.name);
    let list = changes::list(home, peer).await?;
    let these = |c: &&ImageChanges| c.image == name.as_str() && c.earlier == args.earlier;
    let found: Vec<&ImageChanges> = list.iter().filter(these).collect();
    if found.is_empty() {
        let other = list.iter().any(|c| c.image == name.as_str());
        let is_there = other || images(home, peer).await?.contains_key(name.as_str());
        return nothing_to_drop(&args, is_there, other);
    }
    let sum = |of: fn(&ImageChanges) -> u64| found.iter().map(|c| of(c)).sum::<u64>();
    let (changed, room) = (sum(|c| c.changed_bytes), sum(|c| c.room_bytes));
    let what = format!(
        "the changes to {}{} ({}, {} on disk)",
        if args.earlier {
            "earlier images called "
        } else {
            ""
        },
        args.image,
        bytes(changed),
        bytes(room)
    );
    if args.dry_run {
        return match args.json {
            true => out::json(&json!({
                "image": name.as_str(), "dropped": false, "changed_bytes": changed,
                "room_bytes": room, "earlier": args.earlier,
            })),
            false => out::line(&format!("would drop {what}")),
        };
    }
    prompt::confirm(&format!("Drop {what}? This cannot be undone"), args.yes)?;
    let mut room = CleanUp::of(home);
    let dropped = room
        .run_async(|| changes::ask_to_drop(home, peer, name, args.earlier))
        .await?;
    if args.json {
        return out::json(&dropped);
    }
    match dropped.dropped {
        true => out::line(&format!("dropped {what}")),
        false => {
            out::note(&format!(
                "drover: {} has no changes any more: nothing to drop",
                args.image
            ));
            Ok(())
        }
    }
}

/// Reports that there is nothing to drop, or that there is no such image. It may have `other` changes.
fn nothing_to_drop(args: &DropArgs, is_there: bool, other: bool) -> Result<()> {
    let (peer, name) = (args.image.peer.as_deref(), &args.image.name);
    if !is_there {
        return Err(Error::no_image(peer, name).into());
    }
    if args.json {
        return out::json(&json!({
            "image": name.as_str(), "dropped": false, "changed_bytes": 0, "room_bytes": 0,
            "earlier": args.earlier,
        }));
    }
    let (which, instead) = match args.earlier {
        true => (
            format!("an earlier {}", args.image),
            "without --earlier, the current changes are dropped",
        ),
        false => (
            args.image.to_string(),
            "--earlier drops those of earlier images",
        ),
    };
    let hint = match other {
        true => format!("; {instead}"),
        false => String::new(),
    };
    // A peer shows only those.
    let whose = match peer {
        Some(_) => " that belong to this site",
        None => "",
    };
    out::note(&format!(
        "drover: {which} has no changes{whose}: nothing to drop{hint}"
    ));
    Ok(())
}

async fn merge_changes(home: &Home, args: MergeArgs) -> Result<()> {
    let (peer, name) = (args.image.peer.as_deref(), &args.image.name);
    if args.rename.as_ref() == Some(name) {
        return Err(usage(format!(
            "--as {name}: a new image needs another name; without --as, the changes are merged in place"
        )));
    }
    let bar = Bar::new(name.as_str(), args.json || args.dry_run);
    let order = Order {
        name: name.clone(),
        rename: args.rename.clone(),
        to: args.to.map(Into::into),
        drop: args.drop,
        dry_run: args.dry_run,
    };
    let shown = bar.clone();
    let progress = move |done, total| shown.at(done, total);
    let merged = changes::ask_to_merge(home, peer, order, progress).await;
    bar.clear();
    let merged = merged.map_err(|e| {
        let options = "`--as NAME`, with `--as NAME --to raw` or `--as NAME --to qcow2` in that format, creates one";
        failure::hint(e, Code::ReadOnly, options)
    })?;
    if args.json {
        return out::json(&merged);
    }
    if merged.changed_bytes == 0 && !merged.merged {
        out::note(&format!(
            "drover: {} has no changes: nothing to merge",
            args.image
        ));
        return Ok(());
    }
    out::line(&clean(&description(&args, &merged)))
}

fn description(args: &MergeArgs, m: &Merged) -> String {
    let name = &args.image;
    let changed = bytes(m.changed_bytes);
    let place = match &args.rename {
        Some(rename) => format!("{rename}, a new {} image", m.format),
        None => name.to_string(),
    };
    if args.dry_run {
        let mut text = format!(
            "would merge {changed} of changes to {name} into {place} of {}; needs {} of space",
            bytes(m.size_bytes),
            bytes(m.room_bytes)
        );
        if let Some(free) = m.free_bytes {
            text += &format!(" ({} free)", bytes(free));
        }
        if m.format == "raw" {
            text += ", less if the file system shares extents";
        }
        if let Some(held) = &m.held {
            text += &format!("; refused at present: {held} holds a lease");
        }
        return text;
    }
    let digest = m.digest.as_deref().unwrap_or_default();
    if m.changed_bytes == 0 {
        return format!("completed the interrupted merge of {name}; its digest is {digest}");
    }
    let left = match (&args.rename, m.dropped) {
        (Some(_), false) => format!("; {name} keeps its changes"),
        (Some(_), true) => format!("; the changes to {name} were dropped"),
        (None, true) => String::new(),
        (None, false) => "; the old changes remain: see `drover changes`".into(),
    };
    format!("merged {changed} into {place}; its digest is {digest}{left}")
}
