//! `mount`, `export`, `attach`, `unmount`, `mounts`: images of other sites as disks of this one.
//!
//! - [`target`]: what the command line speaks of.
//! - [`record`]: what is written down of a mount, so that a crash leaves nothing unknown.
//! - [`background`]: starting the process that keeps it; [`keeper`]: that process.
//! - [`disk`]: from an image's name to a device; [`front`]: from a device to what a person uses.
//! - [`kernel`]: block devices of the kernel, and what guards them.
//! - [`control`], [`status`]: asking that process; [`end`]: ending it, and [`dead`] when it is gone.
//! - [`left`]: what is left of it then; [`known`]: what lets a mount begin while the other site cannot be reached.

mod background;
mod connector;
mod control;
mod dead;
mod disk;
mod end;
mod front;
mod keeper;
mod kernel;
mod known;
mod leases;
mod left;
mod record;
mod site_images;
mod status;
mod target;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::cli::{AttachArgs, ExportArgs, HowArgs, KeepArgs, MountArgs, MountsAction, MountsArgs};
use crate::failure::usage;
use crate::home::Home;
use crate::out;
use record::{Front, Place, Record};

pub use end::unmount;
pub use keeper::keep_in_background;
pub use kernel::{guard, survive_write_back};
pub use leases::{broken_json, hold_written, leased_on_disk, leases_json, why_held};
pub use site_images::{own, site_server};
pub use status::{DiskStatus, State, Status};
pub use target::{Listen, Prefetch, Target};

/// How long the process of a mount may take to say how it is.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Processes of mounts that are asked at the same time, at most.
const ASKED_AT_ONCE: usize = 32;

/// `drover mount`.
///
/// # Errors
/// What stands in the way of the mount.
pub async fn mount(home: &Home, args: MountArgs, verbose: u8) -> Result<()> {
    let path = std::path::absolute(&args.path)
        .with_context(|| format!("cannot find {}", args.path.display()))?;
    let front = Front::File {
        path,
        device: args.device,
    };
    begin(home, vec![args.image], front, args.how, &args.keep, verbose).await
}

/// `drover export`.
///
/// # Errors
/// What stands in the way.
pub async fn export(home: &Home, args: ExportArgs, verbose: u8) -> Result<()> {
    if !args.nbd.is_local() && args.tls_certificates.is_none() {
        return Err(usage(format!(
            "{} can be reached from other machines: give --tls-certificates DIR, or listen on unix:PATH or 127.0.0.1:PORT",
            args.nbd
        )));
    }
    if let Some(dir) = &args.tls_certificates
        && !args.nbd.is_local()
        && !dir.join("ca-cert.pem").exists()
    {
        return Err(usage(format!(
            "{} can be reached from other machines, and without ca-cert.pem in {} no client there is asked who it is: put the certificate in it that your clients' are signed with",
            args.nbd,
            dir.display()
        )));
    }
    for (i, image) in args.images.iter().enumerate() {
        if args.images[..i]
            .iter()
            .any(|other| other.image == image.image)
        {
            return Err(usage(format!("{} is there twice", image.image)));
        }
    }
    let tls = match &args.tls_certificates {
        Some(dir) => Some(
            std::path::absolute(dir).with_context(|| format!("cannot find {}", dir.display()))?,
        ),
        None => None,
    };
    let front = Front::Nbd {
        listen: args.nbd,
        tls,
    };
    let keep = KeepArgs {
        foreground: !args.background,
        json: args.json,
    };
    begin(home, args.images, front, args.how, &keep, verbose).await
}

/// `drover attach`.
///
/// # Errors
/// What stands in the way.
pub async fn attach(home: &Home, args: AttachArgs, verbose: u8) -> Result<()> {
    let front = Front::Kernel {
        driver: kernel::choose(args.driver, args.device.as_deref())?,
        device: args.device,
    };
    begin(home, vec![args.image], front, args.how, &args.keep, verbose).await
}

/// Writes a mount down and has it kept, here or by a process in the background.
async fn begin(
    home: &Home,
    images: Vec<Target>,
    front: Front,
    how: HowArgs,
    keep: &KeepArgs,
    verbose: u8,
) -> Result<()> {
    disk::check(home, &images, &how)?;
    home.try_keep_reserve();
    let place = Place::of(home, &images, &front, how.read_only);
    let Some(kept) = place.keep()? else {
        let what = match &front {
            Front::Kernel { .. } => place.name(),
            other => other.place(),
        };
        bail!(
            "{what} is there already, called {}; `drover unmount {what}` ends it",
            place.name(),
        );
    };
    let before = place.read()?;
    if let Some(before) = &before {
        end::clear_leftovers(before)?;
    }
    let record = Record::new(&place, images, front, how, before.as_ref());
    place.write(&record)?;
    if keep.foreground {
        let (json, name) = (keep.json, record.name.clone());
        let ready = move |lines: &[String]| show(&name, lines, json);
        let kept = keeper::keep(home, place.clone(), kept, record.clone(), ready).await;
        if kept.is_err() {
            disk::forget_if_empty(&place, &record, before.is_some());
        }
        return kept;
    }
    drop(kept);
    let started = {
        let (home, place) = (home.clone(), place.clone());
        tokio::task::spawn_blocking(move || background::start(&home, &place, verbose)).await?
    };
    match started {
        Ok(lines) => show(&record.name, &lines, keep.json),
        Err(e) => {
            disk::forget_if_empty(&place, &record, before.is_some());
            Err(e)
        }
    }
}

/// Says that a mount is there.
fn show(name: &str, lines: &[String], json: bool) -> Result<()> {
    if json {
        return out::json(&json!({"event": "ready", "name": name, "paths": lines}));
    }
    for line in lines {
        out::line(line)?;
    }
    Ok(())
}

/// `drover mounts`.
///
/// # Errors
/// When the home cannot be read, or a site does not answer.
pub async fn mounts(home: &Home, args: MountsArgs) -> Result<()> {
    match args.action {
        Some(MountsAction::Leases { json }) => leases::list(home, json || args.json).await,
        Some(MountsAction::Break { name, yes, json }) => {
            leases::break_lease(home, &name, yes, json || args.json).await
        }
        None if args.metrics => {
            let text = crate::metrics::of_mounts(&all(home, ANSWER_LIMIT)?);
            out::line(text.trim_end())
        }
        None => list(home, args.json),
    }
}

/// How every mount of a home is; of one whose process does not answer within `limit`, that.
///
/// # Errors
/// When the home cannot be read.
pub fn all(home: &Home, limit: Duration) -> Result<Vec<Status>> {
    let mut found = Vec::new();
    let (listed, damaged) = Place::list_all(home)?;
    for some in listed.chunks(ASKED_AT_ONCE) {
        std::thread::scope(|scope| {
            let asked: Vec<_> = some
                .iter()
                .map(|(place, record)| scope.spawn(move || status_of(place, record, limit)))
                .collect();
            found.extend(asked.into_iter().filter_map(|asked| asked.join().ok()));
        });
    }
    // What cannot be said of one hides none.
    let damaged = damaged.iter();
    found.extend(damaged.map(|(place, why)| damaged_status(place, why, limit)));
    Ok(found)
}

fn list(home: &Home, json: bool) -> Result<()> {
    let mut rows = Vec::new();
    for status in all(home, ANSWER_LIMIT)? {
        if json {
            out::json(&status)?;
        } else {
            rows.push(status.row());
        }
    }
    if json {
        return Ok(());
    }
    if rows.is_empty() {
        out::note("drover: nothing is mounted; `drover mount PEER:IMAGE PATH` mounts an image");
        return Ok(());
    }
    out::line(&out::table(&Status::HEADING, rows, &[]))
}

/// How a mount is whose record cannot be used: what its process says, or what its caches hold.
fn damaged_status(place: &Place, why: &anyhow::Error, limit: Duration) -> Status {
    let kept = place.is_kept();
    if kept && let Ok(status) = control::status(&place.socket(), limit) {
        return status;
    }
    let caches = (0..).take_while(|index| *index == 0 || place.cache(*index).exists());
    let dirty = |index| match kept {
        true => None,
        false => Some(place.left(index).ok()??.dirty),
    };
    let disk = |index| DiskStatus {
        image: "?".into(),
        mode: "?".into(),
        dirty: dirty(index).unwrap_or(0),
        link: format!("{why:#}"),
        ..DiskStatus::default()
    };
    Status {
        name: place.name(),
        place: "?".into(),
        devices: Vec::new(),
        process: 0,
        since_unix: 0,
        state: State::Damaged,
        disks: caches.map(disk).collect(),
    }
}

/// How a mount is: what its process says, or what is written down when that is gone.
fn status_of(place: &Place, record: &Record, limit: Duration) -> Status {
    let kept = place.is_kept();
    if kept && let Ok(status) = control::status(&place.socket(), limit) {
        return status;
    }
    let link = match (kept, record.unmounted) {
        (true, _) => "its process does not answer",
        (false, true) => "its cache is kept for the next mount there",
        (false, false) => "its process is gone",
    };
    // What its caches hold, as far as that can be read now. Not under a process that is just opening them.
    let dirty = |index| match kept {
        true => None,
        false => Some(place.left(index).ok()??.dirty),
    };
    Status {
        name: record.name.clone(),
        place: record.front.place(),
        devices: record.devices.clone(),
        process: if kept { record.process } else { 0 },
        since_unix: record.since_unix,
        state: match (kept, record.unmounted) {
            (true, _) => State::Silent,
            (false, true) => State::Unmounted,
            (false, false) => State::Dead,
        },
        disks: record
            .images
            .iter()
            .enumerate()
            .map(|(index, image)| DiskStatus {
                dirty: dirty(index).unwrap_or(0),
                image: image.to_string(),
                mode: disk::mode(image, &record.how).into(),
                read_only: record.how.read_only,
                link: link.into(),
                ..DiskStatus::default()
            })
            .collect(),
    }
}

/// Whether something is at `path` in the file system's tree, without following it.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
