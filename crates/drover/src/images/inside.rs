//! What is inside images, and which are similar: `images --known`, `--similar` and `--packages`, and `index` of a directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::images::{Indexer, known_files};
use drover_agent::site;
use drover_agent::text::{bytes, clean};
use drover_core::ImageName;
use drover_image::VirtualDisk;
use drover_image::guest::look;
use drover_store::{Catalog, ImageRecord, KnownFile, MIN_SIMILARITY};
use drover_teleport::services::{GuestInfo, Taken};
use serde_json::json;

use crate::bar::Bar;
use crate::failure::no_image;
use crate::out;

/// What a list shows of a system: its name, or else the file system.
pub fn system(guest: &GuestInfo) -> String {
    match (&*guest.name, &*guest.file_system) {
        ("", "") => "-".into(),
        ("", kind) => clean(kind),
        (name, _) => clean(name),
    }
}

/// The files that are known and not indexed.
fn not_indexed<'a>(
    known: &'a BTreeMap<PathBuf, Arc<KnownFile>>,
    images: &[ImageRecord],
) -> Vec<&'a KnownFile> {
    let indexed = |path: &Path| images.iter().any(|image| image.path == path);
    let files = known.values().filter(|file| file.offered);
    let files = files.filter(|file| !indexed(&file.path));
    files.map(|file| &**file).collect()
}

/// Says how many files are known and not indexed, if any.
///
/// # Errors
/// When the catalog, or what is known, cannot be read.
pub fn note_known(home: &Home) -> Result<()> {
    let images = site::look_at_catalog(home)?.images()?;
    match not_indexed(&known_files(home)?, &images).len() {
        0 => {}
        n => out::note(&format!(
            "drover: {n} more files are known and not indexed; `drover images --known` lists them"
        )),
    }
    Ok(())
}

/// Lists the files that are known and not indexed; or, with the name of an image, those and the images that are similar to it.
///
/// # Errors
/// When there is no such image, or what is known cannot be read.
pub fn known(home: &Home, similar: Option<&ImageName>, as_json: bool) -> Result<()> {
    let catalog = site::look_at_catalog(home)?;
    let (images, known) = (catalog.images()?, known_files(home)?);
    let mut files: Vec<(&KnownFile, Option<&ImageRecord>)> = not_indexed(&known, &images)
        .into_iter()
        .map(|file| (file, None))
        .collect();
    let mut rated: Vec<Option<f64>> = vec![None; files.len()];
    if let Some(name) = similar {
        let image = images.iter().find(|image| image.name == *name);
        let image = image.ok_or_else(|| no_image(name))?;
        let of = known.get(&image.path);
        let others = images.iter().filter(|other| other.name != *name);
        files.extend(others.filter_map(|other| Some((&**known.get(&other.path)?, Some(other)))));
        let rate = |file: &KnownFile| of.map_or(0.0, |of| of.likeness.similarity(&file.likeness));
        let mut all: Vec<_> = files.into_iter().map(|f| (rate(f.0), f)).collect();
        all.retain(|(similarity, _)| *similarity >= MIN_SIMILARITY);
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        (rated, files) = all.into_iter().map(|(s, file)| (Some(s), file)).unzip();
    }
    if as_json {
        for ((file, image), similarity) in files.iter().zip(&rated) {
            let guest = GuestInfo::from(&file.likeness);
            let mut object = json!({
                "path": file.path, "name": image.map(|image| image.name.as_str()), "indexed": image.is_some(),
                "format": file.format, "size_bytes": file.stamp.size, "virtual_bytes": file.virtual_bytes,
                "system": guest.system, "system_version": guest.version, "system_name": guest.name,
                "host": file.likeness.host, "file_system": guest.file_system, "packages": guest.packages,
            });
            if let Some(similarity) = similarity {
                object["similarity"] = (*similarity).into();
            }
            out::json(&object)?;
        }
        return Ok(());
    }
    if files.is_empty() {
        out::note(match similar {
            Some(_) => "drover: nothing similar is known",
            None => "drover: no files are known that are not indexed",
        });
        return Ok(());
    }
    let row = |((file, image), similarity): (&(&KnownFile, Option<&ImageRecord>), &Option<f64>)| {
        let mut row = vec![match image {
            Some(image) => clean(image.name.as_str()),
            None => clean(&file.path.display().to_string()),
        }];
        row.extend(similarity.map(|s| format!("{:.0} %", s * 100.0)));
        row.extend([
            clean(&file.format),
            bytes(file.stamp.size),
            file.likeness.packages.to_string(),
            system(&GuestInfo::from(&file.likeness)),
        ]);
        row
    };
    let rows: Vec<_> = files.iter().zip(&rated).map(row).collect();
    let (heading, numbers): (&[&str], &[usize]) = match similar {
        Some(_) => (
            &[
                "image or file",
                "similar",
                "format",
                "size",
                "packages",
                "system",
            ],
            &[1, 3, 4],
        ),
        None => (&["file", "format", "size", "packages", "system"], &[2, 3]),
    };
    out::line(&out::table(heading, rows, numbers))
}

/// Lists the packages in an image.
///
/// # Errors
/// When there is no such image, or its file cannot be read.
pub fn packages(home: &Home, name: &ImageName, as_json: bool) -> Result<()> {
    let record = site::look_at_catalog(home)?.by_name(name)?;
    let record = record.ok_or_else(|| no_image(name))?;
    let system = look(&VirtualDisk::open(&record.path)?).system;
    let system = system.unwrap_or_default();
    if as_json {
        for package in &system.packages {
            out::json(&json!({"name": package.name, "version": package.version}))?;
        }
        return Ok(());
    }
    if system.packages.is_empty() {
        out::note(&format!("drover: no list of packages was found in {name}"));
        return Ok(());
    }
    let rows = system.packages.iter();
    let rows = rows.map(|p| vec![clean(&p.name), clean(&p.version)]);
    out::line(&out::table(&["package", "version"], rows.collect(), &[]))
}

/// Makes the files of a directory known, and says so.
///
/// # Errors
/// When it cannot be listed, or the site refuses.
pub async fn know(indexer: &mut Indexer, directory: &Path, as_json: bool) -> Result<()> {
    let shown = directory.display().to_string();
    let bar = Bar::of_files(&shown, as_json);
    let progress = {
        let bar = bar.clone();
        move |done, total| bar.at(done, total)
    };
    let taken = indexer.know(directory, progress).await;
    bar.clear();
    let Taken {
        looked,
        unchanged,
        indexed,
        skipped,
        reasons,
        read_bytes,
    } = taken?;
    if as_json {
        let reasons = reasons
            .iter()
            .map(|(path, why)| json!({"path": path, "reason": clean(why)}));
        return out::json(&json!({
            "directory": directory, "looked": looked, "unchanged": unchanged, "indexed": indexed,
            "skipped": skipped, "read_bytes": read_bytes, "reasons": reasons.collect::<Vec<_>>(),
        }));
    }
    for (path, why) in &reasons {
        out::note(&clean(&format!("note: {path} is not taken: {why}")));
    }
    out::line(&clean(&format!(
        "{shown}: {looked} files looked at ({} read), {unchanged} known before, {indexed} indexed, {skipped} not taken",
        bytes(read_bytes)
    )))?;
    if looked + unchanged > 0 {
        out::note("drover: they are indexed when a similar image is sent; --now indexes all");
    }
    Ok(())
}
