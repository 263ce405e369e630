//! `images`, `verify`, `rm`, `index` and `digest`.

mod inside;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drover_agent::error::{Error, one_line};
use drover_agent::home::{CleanUp, Home};
use drover_agent::images::{Indexer, changed_bytes, list_of_peer, removal, remove, written};
use drover_agent::text::{bytes, clean, moment};
use drover_agent::{changes, images, mounts, site};
use drover_core::{Digest, ImageName};
use drover_image::{VirtualDisk, named_files};
use drover_net::{Code, DEFAULT_DOMAIN};
use drover_store::{Catalog, ImageRecord};
use drover_teleport::digest_file;
use drover_teleport::services::{ImageInfo, Removal, ShareImage, Verified};
use serde_json::json;

use crate::bar::Bar;
use crate::cli::{DigestArgs, ImageAt, ImagesArgs, IndexArgs, RmArgs, ShareArgs, VerifyArgs};
use crate::failure::{hint, no_image, usage};
use crate::{out, prompt};

/// Most files that one `index` command takes from directories.
const MAX_INDEXED: usize = 10_000;

/// Lists images.
///
/// # Errors
/// When the catalog cannot be read, or the peer does not respond.
pub async fn images(home: &Home, args: ImagesArgs) -> Result<()> {
    if let Some(name) = &args.packages {
        return inside::packages(home, name, args.json);
    }
    if args.known || args.similar.is_some() {
        return inside::known(home, args.similar.as_ref(), args.json);
    }
    let catalog = site::look_at_catalog(home)?;
    let list = match &args.peer {
        None => images::list(home, &catalog)?,
        Some(name) => list_of_peer(home, &catalog, name).await?,
    };
    // The changes at a peer are not known here.
    let changed: Vec<Option<u64>> = list
        .iter()
        .map(|i| args.peer.is_none().then(|| changed_bytes(home, i)))
        .collect();
    if args.json {
        for (i, changed) in list.iter().zip(changed) {
            let mut object = json!({
                "name": i.name, "digest": i.digest.to_string(), "format": i.format,
                "size_bytes": i.size_bytes, "data_bytes": i.data_bytes, "virtual_bytes": i.virtual_bytes,
                "added_unix": i.added_unix, "from": i.from,
                "system": i.guest.system, "system_version": i.guest.version, "system_name": i.guest.name,
                "file_system": i.guest.file_system, "packages": i.guest.packages,
            });
            if let Some(changed) = changed {
                object["changed_bytes"] = changed.into();
                object["generations"] = generations(home, i);
            }
            out::json(&object)?;
        }
        return Ok(());
    }
    if args.peer.is_none() {
        inside::note_known(home)?;
    }
    if list.is_empty() {
        out::note("drover: no images");
        return Ok(());
    }
    let any = changed.iter().any(|c| c.is_some_and(|c| c > 0));
    let rows = list
        .iter()
        .zip(changed)
        .map(|(i, changed)| {
            let from = if i.from.is_empty() {
                "-".into()
            } else {
                clean(&i.from)
            };
            let digest = i.digest.to_string()[..12].to_string();
            let mut row = vec![
                clean(&i.name),
                clean(&i.format),
                bytes(i.size_bytes),
                bytes(i.data_bytes),
                digest,
                moment(i.added_unix),
                from,
                inside::system(&i.guest),
            ];
            if any {
                let changed = changed.filter(|c| *c > 0);
                row.push(changed.map_or_else(|| "-".into(), bytes));
            }
            row
        })
        .collect();
    let mut heading = vec![
        "name",
        "format",
        "size",
        "data",
        "digest",
        "added (UTC)",
        "from",
        "system",
    ];
    if any {
        heading.push("changes");
    }
    out::line(&out::table(&heading, rows, &[2, 3, 8]))
}

/// The generations of an image of this site: null for one that was not mounted for writing since it was made.
fn generations(home: &Home, image: &ImageInfo) -> serde_json::Value {
    let name = ImageName::new(&image.name).ok();
    match name.map(|name| mounts::generations(home, &name, image.digest)).transpose() {
        Ok(about) => about.flatten().map_or(serde_json::Value::Null, |about| {
            json!({
                "seed": about.seed.to_string(), "generation": about.generation.0, "frozen": about.frozen,
            })
        }),
        Err(error) => json!({"problem": error.to_string()}),
    }
}

/// The home for a command about an image: that of a domain of this site, or, for an image of a peer, that of the site.
///
/// # Errors
/// When there is no such domain, or one is named for an image of a peer.
pub fn home_of(home: Home, image: &mut ImageAt, domain: &str) -> Result<Home> {
    let Some(peer) = &image.peer else {
        return Ok(home.domain(domain)?);
    };
    // An earlier version may have given an image such a name.
    let catalog = site::look_at_catalog(&home)?;
    if catalog.peer(peer)?.is_none()
        && let Ok(name) = ImageName::new(format!("{peer}:{}", image.name))
        && catalog.by_name(&name)?.is_some()
    {
        *image = ImageAt { peer: None, name };
    } else if domain != DEFAULT_DOMAIN {
        return Err(usage(
            "--domain is for images of this site: at a peer, this site is in one domain",
        ));
    }
    Ok(home)
}

/// Shares an image with a peer, or no longer.
///
/// # Errors
/// When the site that has it cannot be reached, or refuses.
pub async fn share(home: &Home, args: ShareArgs) -> Result<()> {
    let at = args.image.peer.as_deref();
    let request = ShareImage {
        name: args.image.name.clone(),
        with: args.with,
        share: !args.stop,
    };
    images::share(home, at, &request).await?;
    let ShareImage { name, with, share } = request;
    if args.json {
        return out::json(&json!({"name": name.as_str(), "with": with, "shared": share}));
    }
    out::line(&match share {
        true => format!("{with} may replace {name} and write to it"),
        false => format!("{name} is no longer shared with {with}"),
    })
}

/// Verifies an image, here or at a peer.
///
/// # Errors
/// When it differs from the recorded digest, or cannot be read.
pub async fn verify(home: &Home, args: VerifyArgs) -> Result<()> {
    let bar = Bar::new(args.name.as_str(), args.json);
    let shown = bar.clone();
    let progress = move |done, total| shown.at(done, total);
    let verified = images::verify(home, &args.name, args.peer.as_deref(), progress).await;
    bar.clear();
    let Verified { expected, found } = verified?;
    let changes = match args.peer {
        None => changes::of_image(home, &args.name).filter(|c| c.is_over(&expected)),
        Some(_) => None,
    };
    report_verified(&args, expected, found, changes)
}

fn report_verified(
    args: &VerifyArgs,
    expected: Digest,
    found: Digest,
    changes: Option<changes::ImageChanges>,
) -> Result<()> {
    let place = args
        .peer
        .as_ref()
        .map(|p| format!(" at {p}"))
        .unwrap_or_default();
    if args.json {
        let mut object = json!({
            "name": args.name.as_str(), "good": expected == found,
            "expected": expected.to_string(), "digest": found.to_string(),
        });
        if args.peer.is_none() {
            object["changed_bytes"] = changes.as_ref().map_or(0, |c| c.changed_bytes).into();
        }
        out::json(&object)?;
    }
    if expected != found {
        bail!(
            "{}{place} has changed since it was received or indexed: its digest is {found}, expected {expected}; send or index it again",
            args.name
        );
    }
    if !args.json {
        out::line(&format!("{}{place}: OK, digest {found}", args.name))?;
        if let Some(changes) = changes {
            out::note(&format!("drover: {}: {}", args.name, changes.beside()));
        }
    }
    Ok(())
}

/// Removes an image from this site, or from a peer.
///
/// # Errors
/// When the user does not confirm, or it cannot be removed.
pub async fn rm(home: &Home, args: RmArgs) -> Result<()> {
    match args.image.peer.clone() {
        Some(peer) => rm_at(home, &peer, args).await,
        None => rm_here(home, args).await,
    }
}

/// Removes an image from a peer.
async fn rm_at(home: &Home, peer: &str, args: RmArgs) -> Result<()> {
    let (image, name) = (&args.image, &args.image.name);
    let json = |removal: &Removal, removed: bool| {
        out::json(&json!({
            "name": name.as_str(), "peer": peer, "removed": removed, "external": removal.external,
            "data_bytes": removal.data_bytes, "changed_bytes": removal.changed_bytes, "held": removal.held,
        }))
    };
    let would = images::remove_at(home, peer, name, true).await?;
    let size = bytes(would.data_bytes);
    let file = match would.external {
        true => ", only from the catalog: it was indexed in place",
        false => "",
    };
    let changes = match would.changed_bytes {
        0 => String::new(),
        n => format!(
            "; its changes ({}) stay: `drover changes drop {peer}:{name}` drops them",
            bytes(n)
        ),
    };
    let what = clean(&format!("{image} ({size}{file}{changes})"));
    if args.dry_run {
        if args.json {
            return json(&would, false);
        }
        let held = would.held.as_deref();
        let held = held.map_or_else(String::new, |held| format!("; refused at present: {held}"));
        return out::line(&format!("would remove {what}{}", clean(&held)));
    }
    prompt::confirm(&format!("Remove {what}?"), args.yes)?;
    let removed = images::remove_at(home, peer, name, false).await?;
    match args.json {
        true => json(&removed, true),
        false => out::line(&format!("removed {what}")),
    }
}

async fn rm_here(home: &Home, args: RmArgs) -> Result<()> {
    let name = &args.image.name;
    let mut room = CleanUp::of(home);
    let catalog = Arc::new(match args.dry_run {
        true => site::look_at_catalog(home)?,
        false => room.run(|| site::open_catalog(home))?,
    });
    let record = catalog.by_name(name)?;
    let Some(record) = record else {
        return Err(no_image(name));
    };
    let (kept, left) = written(home, &record).unzip();
    let would = if record.external {
        format!(
            "remove {} from the catalog (its file {} stays{})",
            record.name,
            record.path.display(),
            kept.unwrap_or_default()
        )
    } else {
        format!(
            "remove {} ({}{})",
            record.name,
            bytes(record.data_bytes),
            kept.unwrap_or_default()
        )
    };
    if args.dry_run {
        let held = mounts::leased_on_disk(&home.mounted_dir(), name);
        let held = mounts::why_held(name, held);
        if args.json {
            return out::json(&json!({
                "name": name.as_str(), "removed": false, "external": record.external,
                "path": record.path, "data_bytes": record.data_bytes, "written": left, "held": held,
            }));
        }
        let now = held.map_or_else(String::new, |held| format!("; refused at present: {held}"));
        return out::line(&format!("would {}{}", clean(&would), clean(&now)));
    }
    let mut question = would;
    if let Some(first) = question.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    prompt::confirm(&format!("{question}?"), args.yes)?;
    room.run_async(|| remove(home, &catalog, name)).await?;
    if args.json {
        return out::json(&json!({
            "name": name.as_str(), "removed": true, "external": record.external,
            "path": record.path, "data_bytes": record.data_bytes, "written": left,
        }));
    }
    out::line(&clean(&removal(home, &record)))
}

/// Indexes local image files.
///
/// # Errors
/// When one cannot be indexed; those before it stay indexed.
pub async fn index(home: impl FnOnce(&str) -> Result<Home>, args: IndexArgs) -> Result<()> {
    let at_once = args.now || args.with_parts || args.mark || args.unmark;
    let (directories, files) = split(&args.paths, at_once)?;
    if files.is_empty() && directories.is_empty() {
        return Err(usage("no files to index: the directories are empty"));
    }
    let home = home(&args.of.domain)?;
    let mut indexer = Indexer::new(&home)?;
    for directory in &directories {
        inside::know(&mut indexer, directory, args.json).await?;
    }
    let (all, mut unchanged) = (files.len(), 0);
    for path in files {
        let bar = Bar::new(
            &path.file_name().unwrap_or_default().to_string_lossy(),
            args.json,
        );
        let shown = bar.clone();
        let progress = move |done, total| shown.at(done, total);
        if let Err(e) = change(&home, &path, &args).await {
            if all == 1 {
                return Err(e.into());
            }
            unchanged += 1;
            not_marked(&path, &one_line(&e), args.json)?;
        }
        let record = indexer.index(&path, args.with_parts, progress).await;
        bar.clear();
        let option = "--with-parts indexes it nevertheless";
        let record = record.map_err(|e| hint(e, Code::Unsupported, option))?;
        let parts = match args.with_parts {
            true => read_from(&path)?,
            false => Vec::new(),
        };
        report_indexed(&record, &path, &parts, args.json)?;
    }
    indexer.close().await?;
    let what = if args.mark { "marked" } else { "unmarked" };
    match unchanged {
        0 => Ok(()),
        n => bail!("{n} of {all} files are indexed, but not {what}"),
    }
}

/// Marks a file, or removes its mark, if that was asked for.
async fn change(home: &Home, path: &Path, args: &IndexArgs) -> Result<(), Error> {
    if args.mark {
        images::mark(home, path, Duration::ZERO).await?;
    }
    if args.unmark {
        images::unmark(home, path).await?;
    }
    Ok(())
}

fn not_marked(path: &Path, why: &str, json: bool) -> Result<()> {
    if json {
        return out::json(&json!({"event": "note", "path": path, "message": clean(why)}));
    }
    out::note(&clean(&format!("note: {}: {why}", path.display())));
    Ok(())
}

/// The other files that an image is read from.
fn read_from(path: &Path) -> Result<Vec<PathBuf>> {
    if named_files(path)?.is_empty() {
        return Ok(Vec::new());
    }
    let disk = VirtualDisk::open(path)?;
    let files = disk.stamps().iter().skip(1);
    Ok(files.map(|(path, _)| path.clone()).collect())
}

fn report_indexed(record: &ImageRecord, path: &Path, parts: &[PathBuf], json: bool) -> Result<()> {
    if json {
        return out::json(&json!({
            "name": record.name.as_str(), "path": record.path, "format": record.format,
            "digest": record.digest.to_string(), "size_bytes": record.size_bytes, "data_bytes": record.data_bytes,
            "parts": parts,
        }));
    }
    out::line(&format!(
        "indexed {} as {} ({})",
        path.display(),
        record.name,
        bytes(record.data_bytes)
    ))?;
    for part in parts {
        out::line(&clean(&format!("  is read from {}, too", part.display())))?;
    }
    Ok(())
}

/// The paths of directories, and those of the other files; with `at_once`, of the files in directories, too.
fn split(paths: &[PathBuf], at_once: bool) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let directory = |path: &&PathBuf| !at_once && path.is_dir();
    let mut directories = Vec::new();
    for path in paths.iter().filter(directory) {
        // Without any file it is a mistake.
        if !files_of(std::slice::from_ref(path))?.is_empty() {
            directories.push(path.canonicalize()?);
        }
    }
    let files: Vec<PathBuf> = paths.iter().filter(|p| !directory(p)).cloned().collect();
    Ok((directories, files_of(&files)?))
}

/// The absolute paths of the files in `paths`, with directories replaced by the files in them, sorted.
fn files_of(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        let path = path
            .canonicalize()
            .with_context(|| format!("cannot open {}", path.display()))?;
        if !path.is_dir() {
            files.push(path);
            continue;
        }
        let entries =
            std::fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?;
        let mut inside = Vec::new();
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", path.display()))?;
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if entry.file_type().is_ok_and(|t| t.is_file()) && !hidden {
                inside.push(entry.path());
            }
            if files.len() + inside.len() > MAX_INDEXED {
                bail!(
                    "{} has too many files (more than {MAX_INDEXED} in total); name the images instead",
                    path.display()
                );
            }
        }
        inside.sort();
        files.append(&mut inside);
    }
    let mut seen = std::collections::HashSet::new();
    files.retain(|f| seen.insert(f.clone()));
    Ok(files)
}

/// Prints digests.
///
/// # Errors
/// When a file cannot be read.
pub fn digest(args: DigestArgs) -> Result<()> {
    for path in &args.files {
        let bar = Bar::new(&path.display().to_string(), args.json);
        let digest = digest_file(path, &mut |done, total| bar.at(done, total))?;
        bar.clear();
        if args.json {
            out::json(&json!({"path": path, "digest": digest.to_string()}))?;
        } else {
            out::line(&format!("{digest}  {}", clean(&path.display().to_string())))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_replaced_by_their_files() {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().canonicalize().unwrap();
        for name in ["b.img", "a.img", ".hidden"] {
            std::fs::write(root.join(name), "x").unwrap();
        }
        std::fs::create_dir(root.join("sub")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", root.join("link")).unwrap();
        let files = files_of(&[root.join("b.img"), root.clone()]).unwrap();
        assert_eq!(files, [root.join("b.img"), root.join("a.img")]);
        let e = files_of(&[root.join("nowhere")]).unwrap_err();
        assert!(e.to_string().contains("nowhere"), "{e}");
    }
}
