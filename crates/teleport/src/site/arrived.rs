//! Delivery: a complete file gets its name, and the image is added to the catalog.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_core::ImageName;
use drover_image::{Layout, Stamp};
use drover_index::{ImageId, Sketch};
use drover_net::{Code, PeerKey};
use drover_store::naming::{self, Named};
use drover_store::{BlockMap, ImageMap, ImageRecord, StoreError};

use super::Site;
use crate::TeleportError;
use crate::files::remove_dir;
use crate::log::RecordKind;
use crate::teleporter::ImageEvent;
use crate::transfer::{Closing, Leftover, Opening};

/// A complete and synced file.
pub(crate) struct Arrived {
    pub(crate) dir: PathBuf,
    pub(crate) opening: Opening,
    pub(crate) layout: Arc<Layout>,
    pub(crate) blocks: Arc<BlockMap>,
    pub(crate) closing: Closing,
    /// The owner in its map; `None` when that has to be saved, or may be out of date.
    pub(crate) mapped: Option<PeerKey>,
}

impl Arrived {
    /// Path of the partial file, until it is renamed.
    pub(crate) fn part(&self) -> PathBuf {
        self.dir.join("image.part")
    }

    /// The complete file that a transfer directory holds, or the directory's contents if it is not complete.
    pub(crate) fn of(left: Leftover) -> Result<Self, Box<Leftover>> {
        let Some(closing) = left.closing else {
            return Err(Box::new(left));
        };
        let mut blocks = BlockMap::default();
        left.data.iter().for_each(|d| blocks.push(d));
        Ok(Arrived {
            dir: left.dir,
            opening: left.opening,
            layout: left.layout,
            blocks: Arc::new(blocks),
            closing,
            mapped: None,
        })
    }

    /// The image's record, once its file is at `path` in the place of `old`.
    fn record(&self, path: PathBuf, old: Option<&ImageRecord>) -> ImageRecord {
        let offer = &self.opening.offer;
        let sender = self.opening.peer;
        ImageRecord {
            id: ImageId(self.opening.image),
            name: offer.name.clone(),
            path,
            format: offer.format.clone(),
            size_bytes: offer.file_bytes,
            data_bytes: self.layout.covered_bytes(),
            virtual_bytes: offer.virtual_bytes,
            digest: self.closing.digest,
            stamp: None,
            added_unix: self.closing.added_unix,
            from: self.opening.peer_name.clone(),
            external: false,
            // Who replaces an image with its owner's leave does not get it.
            owner: old.and_then(|old| old.owner).or(Some(sender)),
            shared: old.map_or_else(Vec::new, |old| old.shared.clone()),
        }
    }

    /// Logs that the file is complete; from here on it survives a crash.
    pub(crate) fn log(&self, log: &mut crate::log::Log) -> Result<(), TeleportError> {
        log.append(RecordKind::Closing, &drover_net::encode(&self.closing))?;
        log.sync()
    }
}

impl Site {
    /// Renames a complete file to its final name and adds it to the catalog. Every step is idempotent. If the catalog
    /// fails, the previous image gets the name back. Returns `false` when the file no longer exists. `sketch` is of all its
    /// blocks, if they are known.
    pub(crate) fn settle(
        &self,
        arrived: &Arrived,
        sketch: Option<&Sketch>,
    ) -> Result<bool, TeleportError> {
        self.settle_unless(arrived, sketch, |_| false)
    }

    /// As [`Site::settle`], but fails if the image that has the name, as the catalog says while it is locked, is one that must not
    /// be replaced.
    pub(super) fn settle_unless(
        &self,
        arrived: &Arrived,
        sketch: Option<&Sketch>,
        stays: impl Fn(&ImageRecord) -> bool,
    ) -> Result<bool, TeleportError> {
        let offer = &arrived.opening.offer;
        let target = self.image_path(&offer.name);
        let part = arrived.part();
        let id = ImageId(arrived.opening.image);
        let (changing, old) = self.change(&offer.name, part.exists())?;
        // It may not be there under a key that is delivered once more, later.
        self.remove_taken(&arrived.dir)?;
        let mut record = arrived.record(target.clone(), old.as_ref());
        let mut named = None;
        if part.exists() {
            if old.as_ref().is_some_and(stays) {
                let text = format!("a newer image is called {} by now", offer.name);
                return Err(TeleportError::refused(Code::Denied, text));
            }
            // Any of it may have changed since the image was offered.
            self.check_sender(&arrived.opening.peer, old.as_ref())?;
            let all_known = arrived.blocks.walk_blocks() == arrived.layout.walk_blocks();
            if all_known && arrived.mapped != record.owner {
                self.write_map(arrived, &record)?;
            }
            let mode = Permissions::from_mode(self.config.image_mode);
            if let Err(e) = std::fs::set_permissions(&part, mode) {
                // Some file systems have modes that cannot be changed.
                tracing::warn!(path = %target.display(), error = %e, "cannot set the mode of an image");
            }
            named = Some(self.give_name(&part, &offer.name, old.as_ref())?);
        } else if !self.images.map_path(id).exists() || !self.is_in_place(arrived, old.as_ref()) {
            drop(changing);
            self.discard(&arrived.dir, id);
            self.remove_map(id);
            return Ok(false);
        }
        record.stamp = Stamp::of_path(&target).ok();
        // Until it is delivered a boot that ends goes to the transfer, then to the image.
        let boots = self.launches.boots.lock();
        self.keep_profiles(id, old.as_ref().map(|old| old.id), &arrived.dir);
        let old = self.enter(&record, named)?;
        drop(changing);
        self.launches.delivered(id, &offer.name, &target);
        drop(boots);
        self.note_image(&record, sketch);
        self.partials.remove(id);
        remove_dir(&arrived.dir);
        if let Some(old) = old {
            self.replaced(old.id, id);
        }
        self.wake_copier();
        Ok(true)
    }

    /// Renames a complete file to the name of an image. It replaces the file of the image `old`, which has that name
    /// in the catalog, and no other.
    pub(super) fn give_name(
        &self,
        part: &Path,
        name: &ImageName,
        old: Option<&ImageRecord>,
    ) -> Result<Named, TeleportError> {
        let fresh = !old.is_some_and(|old| self.has_file_of(old));
        match Named::new(part, &self.image_path(name), fresh) {
            Err(StoreError::File { error, .. })
                if fresh && error.kind() == io::ErrorKind::AlreadyExists =>
            {
                Err(unknown_file())
            }
            named => Ok(named?),
        }
    }

    /// Fails if the images directory has a file of that name that the catalog does not: it is not this site's to
    /// replace.
    ///
    /// # Errors
    /// A refusal that says so.
    pub fn check_unknown_file(&self, name: &ImageName) -> Result<(), TeleportError> {
        let known = self.images.by_name(name);
        let known = known.is_some_and(|record| self.has_file_of(&record));
        match !known && self.image_path(name).symlink_metadata().is_ok() {
            true => Err(unknown_file()),
            false => Ok(()),
        }
    }

    /// Whether the file of that name in the images directory is the image's own: the directory may have been another
    /// one when the image was delivered.
    fn has_file_of(&self, record: &ImageRecord) -> bool {
        let target = self.image_path(&record.name);
        let directory = |path: &Path| path.parent().and_then(|dir| dir.canonicalize().ok());
        let same = record.path == target
            || (record.path.file_name() == target.file_name()
                && directory(&record.path) == directory(&target));
        same && !record.external
    }

    /// An image has taken the name of an older one, which is forgotten.
    pub(super) fn replaced(&self, old: drover_index::ImageId, new: drover_index::ImageId) {
        self.sequences.drop_image(old);
        self.tell(old, ImageEvent::Forget);
        // The caches' entries of the old image do not refer to the new one: enter its blocks again.
        self.tell(new, ImageEvent::Reindex);
        self.images_went.store(true, Ordering::Relaxed);
    }

    /// Adds an image to the catalog whose file has just been renamed, or was in place already. On failure the
    /// previous file gets its name back.
    pub(super) fn enter(
        &self,
        record: &ImageRecord,
        named: Option<Named>,
    ) -> Result<Option<ImageRecord>, TeleportError> {
        match self.images.put(record) {
            Ok(old) => {
                if let Some(named) = named {
                    named.entered();
                }
                Ok(old)
            }
            Err(e) => {
                if let Some(named) = named.filter(|_| !self.is_entered(record)) {
                    named.undo();
                }
                Err(e.into())
            }
        }
    }

    /// Whether the catalog contains the image although adding it reported an error.
    fn is_entered(&self, record: &ImageRecord) -> bool {
        let now = self.catalog.by_name(&record.name);
        now.is_ok_and(|now| now.is_some_and(|now| now.id == record.id))
    }

    /// Completes the rollback of a rename. A site that stopped during the rollback leaves the new file under both
    /// names; the previous file gets its name back, because neither link may be written to while both exist.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn finish_undoing(&self, dir: &Path, name: &ImageName) -> Result<(), TeleportError> {
        let (part, target) = (dir.join("image.part"), self.image_path(name));
        Ok(naming::finish_undoing(&part, &target)?)
    }

    /// Whether the file of that name is the one that arrived. Another image may have taken the name before this one
    /// was added to the catalog.
    fn is_in_place(&self, arrived: &Arrived, entered: Option<&ImageRecord>) -> bool {
        let target = self.image_path(&arrived.opening.offer.name);
        let size = std::fs::metadata(&target).map_or(0, |about| about.len());
        let digest = || crate::walk::digest_file(&target, &mut |_, _| {});
        target.exists()
            && (entered.is_some_and(|e| e.id.0 == arrived.opening.image)
                || (size == arrived.opening.offer.file_bytes
                    && digest().is_ok_and(|found| found == arrived.closing.digest)))
    }

    /// Removes the map of an image that this site does not enter. Among nodes that needs this node's own directory: if it was taken
    /// for dead meanwhile, another one is about to enter the image.
    pub(super) fn remove_map(&self, id: ImageId) {
        let map = self.images.map_path(id);
        match self.remove_file_of(&map, id.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %map.display(), error = %e, "cannot remove");
            }
            _ => {}
        }
    }

    fn write_map(&self, arrived: &Arrived, record: &ImageRecord) -> Result<(), TeleportError> {
        let map = ImageMap {
            layout: arrived.layout.clone(),
            blocks: arrived.blocks.clone(),
        };
        Ok(map.save(record, &self.images.map_path(record.id))?)
    }

    /// Saves the map of a complete, synced file before it gets its name.
    pub(crate) fn save_map(&self, arrived: &mut Arrived) -> Result<(), TeleportError> {
        let name = &arrived.opening.offer.name;
        let old = self.images.by_name(name);
        let record = arrived.record(self.image_path(name), old.as_ref());
        self.write_map(arrived, &record)?;
        arrived.mapped = record.owner;
        Ok(())
    }
}

fn unknown_file() -> TeleportError {
    let message = "the images directory has a file of that name that the site does not know, and does not overwrite: choose another name, or index that file or move it away there";
    TeleportError::refused(Code::Denied, message)
}

/// Seconds since 1970.
pub(crate) fn unix_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX))
}
