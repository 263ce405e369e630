//! `profile`: what machines read of images first.

mod map;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use drover_agent::error::Error;
use drover_agent::home::Home;
use drover_agent::mounts::{self, Profiled, read_profile};
use drover_agent::profiles::{self, OfImage};
use drover_agent::site::{self, find_peer};
use drover_agent::text::{bytes, clean, count};
use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_store::profile::Profile;
use serde_json::json;

use crate::bar::Bar;
use crate::cli::{ImageAt, ProfileAction, ProfileArgs};
use crate::{out, prompt};

/// `drover profile`. `home` is that of the domain.
///
/// # Errors
/// When there is no such image, mount or file, or it cannot be read.
pub async fn profile(home: &Home, args: ProfileArgs) -> Result<()> {
    match args.action {
        Some(ProfileAction::Record { what, limit }) => {
            let mount = mounts::find(home, &what)?;
            Ok(mounts::start_profile(&mount, limit).await?)
        }
        Some(ProfileAction::Stop { what, json }) => {
            let mount = mounts::find(home, &what)?;
            stopped(&mounts::stop_profile(&mount).await?, json)
        }
        Some(ProfileAction::Export { image, file }) => {
            let profile = get(home, &image).await?;
            let written = profile.write(&file);
            Ok(written.context("cannot write the profile")?)
        }
        Some(ProfileAction::Import { image, file, json }) => {
            let home = home.clone();
            let import = move || import(&home, &image, &file, json);
            tokio::task::spawn_blocking(import).await?
        }
        Some(ProfileAction::Forget { image, yes }) => forget(home, &image, yes),
        None => {
            let image = args.image.context("no image")?;
            show(home, &image, args.svg.as_deref(), args.json).await
        }
    }
}

/// The profile of an image, here or at a peer.
async fn get(home: &Home, image: &ImageAt) -> Result<Profile> {
    let found = match &image.peer {
        Some(peer) => {
            let peer = find_peer(&site::look_at_catalog(home)?, peer)?;
            let profile = profiles::of_peer(&home.identity()?, &peer, &image.name).await;
            profile.map_err(|e| e.about_image(Some(&peer.name), &image.name))?
        }
        None => {
            let (home, name) = (home.clone(), image.name.clone());
            let get = move || {
                let catalog = Arc::new(site::open_catalog(&home)?);
                OfImage::named(&home, &catalog, &name)?.get()
            };
            tokio::task::spawn_blocking(get).await??
        }
    };
    let none = || {
        Error::refused(format!(
            "{image} has no profile; record one with `drover profile record` while a machine starts from it"
        ))
    };
    Ok(found.ok_or_else(none)?)
}

async fn show(home: &Home, image: &ImageAt, svg: Option<&Path>, as_json: bool) -> Result<()> {
    let profile = get(home, image).await?;
    if let Some(path) = svg {
        let picture = map::svg(&profile, &image.to_string());
        std::fs::write(path, picture)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if as_json {
        return out::json(&object(image, &profile));
    }
    let rare = profile.entries().iter().filter(|e| profile.is_rare(e));
    let rare = rare.count() as u64 * BLOCK_SIZE_U64;
    let last = profile.entries().iter().map(|e| e.at_ms).max();
    out::line(&format!(
        "{image}: {} read {} of {} in {:.1} s{}",
        count(profile.boots().into(), "boot"),
        bytes(profile.bytes()),
        bytes(profile.disk_bytes()),
        f64::from(last.unwrap_or(0)) / 1000.0,
        match rare {
            0 => String::new(),
            rare => format!("; {} of it by few of them, which goes last", bytes(rare)),
        }
    ))?;
    out::line(&map::text(&profile))
}

/// A profile for scripts.
fn object(image: &ImageAt, profile: &Profile) -> serde_json::Value {
    let mut regions: Vec<serde_json::Value> = Vec::new();
    let mut last: Option<(u64, u32, u8)> = None;
    for entry in profile.entries() {
        let offset = entry.block * BLOCK_SIZE_U64;
        let length = BLOCK_SIZE_U64.min(profile.disk_bytes().saturating_sub(offset));
        let continues = last == Some((offset, entry.at_ms, entry.boots));
        match regions.last_mut() {
            Some(region) if continues => {
                let before = region["length"].as_u64().unwrap_or(0);
                region["length"] = json!(before + length);
            }
            _ => regions.push(json!({
                "offset": offset, "length": length, "at_ms": entry.at_ms, "boots": entry.boots,
                "last": profile.is_rare(entry),
            })),
        }
        last = Some((offset + length, entry.at_ms, entry.boots));
    }
    json!({
        "image": image.name.as_str(),
        "peer": image.peer,
        "boots": profile.boots(),
        "disk_bytes": profile.disk_bytes(),
        "bytes": profile.bytes(),
        "regions": regions,
    })
}

fn stopped(recorded: &[Profiled], as_json: bool) -> Result<()> {
    let mut problem = None;
    for disk in recorded {
        if as_json {
            out::json(disk)?;
        } else if disk.problem.is_none() {
            out::line(&recording(disk))?;
        }
        if let Some(why) = &disk.problem {
            problem.get_or_insert_with(|| format!("{}: {}", clean(&disk.image), clean(why)));
        }
    }
    match problem {
        None => Ok(()),
        Some(why) => Err(Error::msg(format!("no profile was recorded: {why}")).into()),
    }
}

/// A recording in a line.
fn recording(disk: &Profiled) -> String {
    let where_to = match (&disk.file, disk.boots) {
        (Some(file), _) => format!("; written to {}", file.display()),
        (None, Some(boots)) => format!("; its profile counts {}", count(boots.into(), "boot")),
        (None, None) => String::new(),
    };
    let cut = match disk.is_cut {
        true => "; there was more than a profile holds",
        false => "",
    };
    format!(
        "{}: {} read in {:.1} s{cut}{where_to}",
        clean(&disk.image),
        bytes(disk.blocks * BLOCK_SIZE_U64),
        disk.lasted_ms as f64 / 1000.0,
    )
}

fn import(home: &Home, image: &ImageName, file: &Path, as_json: bool) -> Result<()> {
    let profile = read_profile(file)?;
    let catalog = Arc::new(site::open_catalog(home)?);
    let bar = Bar::new(image.as_str(), as_json);
    let put = OfImage::named(home, &catalog, image)?.import(&profile, |d, t| bar.at(d, t));
    bar.clear();
    let put = put?;
    if as_json {
        return out::json(&json!({
            "image": image.as_str(), "bytes": put.blocks * BLOCK_SIZE_U64,
            "missing_bytes": put.pruned * BLOCK_SIZE_U64, "boots": put.boots,
        }));
    }
    let missing = match put.pruned {
        0 => String::new(),
        n => format!("; {} of it are not in the image", bytes(n * BLOCK_SIZE_U64)),
    };
    out::line(&format!(
        "{image}: a profile of {}, {}{missing}",
        bytes(put.blocks * BLOCK_SIZE_U64),
        count(put.boots.into(), "boot"),
    ))
}

fn forget(home: &Home, image: &ImageName, yes: bool) -> Result<()> {
    let catalog = Arc::new(site::open_catalog(home)?);
    let of = OfImage::named(home, &catalog, image)?;
    if !of.has_one() {
        out::note(&format!("drover: {image} has no profile"));
        return Ok(());
    }
    prompt::confirm(&format!("Forget the profile of {image}?"), yes)?;
    of.forget()?;
    out::line(&format!("forgot the profile of {image}"))
}
