//! What a site notes of image files, to choose similar ones when an image is offered: of its own images, and of files that it knows
//! without having read them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_core::ImageName;
use drover_image::Stamp;
use drover_index::Sketch;
use drover_store::{ImageRecord, KnownFile, Likeness, Looked, MAX_KNOWN_FILES, look_at_file};

use super::Site;
use super::arrived::unix_now;
use crate::TeleportError;
use crate::services::{MAX_SKIPPED, Taken};

/// Files that are noted at once.
const NOTED_AT_ONCE: usize = 64;

/// What is noted of a file that was looked at.
pub(super) fn known_file(path: &Path, looked: Looked, offered: bool) -> KnownFile {
    KnownFile {
        path: path.to_owned(),
        stamp: looked.stamp,
        format: looked.format.as_str().into(),
        virtual_bytes: looked.virtual_bytes,
        looked_unix: unix_now(),
        offered,
        likeness: looked.likeness,
    }
}

impl Site {
    /// Notes what an image of the site is like. A failure costs matches with images that are similar.
    pub(super) fn note_image(&self, record: &ImageRecord, sketch: Option<&Sketch>) {
        let path = &record.path;
        let file = match look_at_file(path) {
            Ok(looked) => known_file(path, looked, false),
            // Its blocks may tell.
            Err(_) => KnownFile {
                path: path.clone(),
                stamp: match Stamp::of_path(path) {
                    Ok(stamp) => stamp,
                    Err(_) => return,
                },
                format: record.format.clone(),
                virtual_bytes: record.virtual_bytes,
                looked_unix: unix_now(),
                offered: false,
                likeness: Likeness::default(),
            },
        };
        let likeness = file.likeness.clone().with_blocks(sketch);
        let noted = self.known.put(vec![KnownFile { likeness, ..file }]);
        if let Err(e) = noted {
            tracing::warn!(image = %record.name, error = %e, "cannot note what it is like");
        }
    }

    /// Notes it of images of which it is not known: those of an earlier version, or what was lost.
    pub(super) fn note_images(&self) {
        for record in self.images.list() {
            if self.closing.load(Ordering::Relaxed) {
                return;
            }
            let known = self.known.get(&record.path);
            let stamp = Stamp::of_path(&record.path).ok();
            if stamp.is_some() && known.is_none_or(|known| Some(known.stamp) != stamp) {
                self.note_image(&record, None);
            }
        }
    }

    /// What is known of the file at a path.
    #[must_use]
    pub fn known_file(&self, path: &Path) -> Option<Arc<KnownFile>> {
        self.known.get(path)
    }

    /// Forgets a file that it knows.
    pub(super) fn forget_known(&self, path: &Path) {
        if let Err(e) = self.known.remove(path) {
            tracing::warn!(path = %path.display(), error = %e, "cannot forget what is known of it");
        }
    }

    /// Makes the image files of a directory known: each is looked at, which reads little, and indexed when an image is offered
    /// that is probably similar. Files in directories below are not taken, nor hidden ones. Blocks the thread.
    ///
    /// # Errors
    /// When the directory cannot be listed or has too many files, or the site stops.
    pub fn know_files(
        &self,
        directory: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Taken, TeleportError> {
        let paths = files_in(directory)?;
        let images = self.images.list();
        let by_name: HashMap<&ImageName, &Path> = images
            .iter()
            .map(|image| (&image.name, &*image.path))
            .collect();
        let known = self.known.list();
        let offered = known.iter().filter(|file| file.offered);
        let mut names: HashMap<_, PathBuf> = offered
            .filter_map(|file| Some((file.path.file_name()?.to_owned(), file.path.clone())))
            .collect();
        let mut taken = Taken::default();
        let mut fresh = Vec::new();
        for (i, path) in paths.iter().enumerate() {
            if self.closing.load(Ordering::Relaxed) {
                return Err(TeleportError::Stopped);
            }
            progress(i as u64, paths.len() as u64);
            let file_name = path.file_name().unwrap_or_default();
            let name = file_name.to_str().unwrap_or_default();
            let name = ImageName::new(name).ok().filter(|_| !name.contains(':'));
            let other = |other: &Path| (other != path).then(|| other.display().to_string());
            let trouble = match name {
                None => Some("its name cannot be that of an image".to_owned()),
                Some(name) => match by_name.get(&name) {
                    Some(at) if *at == path => {
                        taken.indexed += 1;
                        continue;
                    }
                    at => at
                        .and_then(|at| other(at))
                        .or_else(|| other(names.get(file_name)?))
                        .map(|at| format!("a file of that name is known at {at}")),
                },
            };
            let before = self.known.get(path).filter(|file| file.offered);
            if trouble.is_none()
                && let Some(before) = before
                && Stamp::of_path(path).is_ok_and(|stamp| stamp == before.stamp)
            {
                taken.unchanged += 1;
                continue;
            }
            let looked = match trouble {
                Some(why) => Err(why),
                None if names.len() >= MAX_KNOWN_FILES && !names.contains_key(file_name) => {
                    Err(format!("the site knows {MAX_KNOWN_FILES} files already"))
                }
                None => look_at_file(path).map_err(|e| e.to_string()),
            };
            match looked {
                Ok(looked) => {
                    taken.looked += 1;
                    taken.read_bytes += looked.read_bytes;
                    names.insert(file_name.to_owned(), path.clone());
                    fresh.push(known_file(path, looked, true));
                }
                Err(why) => {
                    taken.skipped += 1;
                    if taken.reasons.len() < MAX_SKIPPED {
                        taken.reasons.push((path.display().to_string(), why));
                    }
                }
            }
            if fresh.len() >= NOTED_AT_ONCE {
                self.known.put(std::mem::take(&mut fresh))?;
            }
        }
        if !fresh.is_empty() {
            self.known.put(fresh)?;
        }
        Ok(taken)
    }
}

/// The files in a directory that may be images, sorted.
fn files_in(directory: &Path) -> Result<Vec<PathBuf>, TeleportError> {
    let failed = |e| TeleportError::file("list", directory)(e);
    let directory = directory.canonicalize().map_err(failed)?;
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if entry.file_type().is_ok_and(|t| t.is_file()) && !hidden {
            paths.push(entry.path());
        }
        if paths.len() > MAX_KNOWN_FILES {
            let text = format!(
                "{} has more than {MAX_KNOWN_FILES} files",
                directory.display()
            );
            return Err(TeleportError::Failed(text));
        }
    }
    paths.sort();
    Ok(paths)
}
