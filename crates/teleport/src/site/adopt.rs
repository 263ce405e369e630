//! Images that are created at the site itself: reading them in, naming them, and indexing files in place.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::{Digest, ImageName};
use drover_image::{Conversion, Outgoing, Stamp, open_for_sending};
use drover_index::{BLOCK_SKETCH, Sketch};
use drover_net::{Code, PeerKey};
use drover_storage::sync_parent;
use drover_store::{BlockMap, ImageMap, ImageRecord, StoreError};

use super::Site;
use super::arrived::unix_now;
use crate::TeleportError;
use crate::active::{Hold, Taken};
use crate::teleporter::{Event, ImageEvent};
use crate::walk::Walk;

/// What holds a name that is reserved here: no transfer has this key.
const HERE: &str = "here";

/// How long a transfer that gives way may take to release a name.
const RESERVE_WAIT: Duration = Duration::from_secs(5);

/// Progress callback while an image is read: blocks read, total blocks. An error cancels the read.
pub type Progress<'a> = dyn FnMut(u64, u64) -> Result<(), TeleportError> + 'a;

/// Where an image that is made here has its content from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The peer that sent it; empty for none.
    pub from: &'a str,
    /// The peer that it belongs to; `None` when it belongs to this site's administrator.
    pub owner: Option<PeerKey>,
}

impl Site {
    /// Path of the site's own image file of that name.
    #[must_use]
    pub fn image_path(&self, name: &ImageName) -> PathBuf {
        self.config.images_dir.join(name.as_str())
    }

    /// Directory in which images are assembled, on the images' file system.
    #[must_use]
    pub fn work_dir(&self) -> &Path {
        &self.config.work_dir
    }

    /// Directory for links to files that [`Site::adopt`] takes from elsewhere on the file system. Removed when the site is
    /// opened.
    #[must_use]
    pub fn links_dir(&self) -> PathBuf {
        self.config.work_dir.join("links")
    }

    /// Keeps others from delivering an image of that name until the guard is dropped.
    ///
    /// # Errors
    /// When one is being delivered.
    pub fn reserve_name(&self, name: &ImageName) -> Result<Hold, TeleportError> {
        let number = self.active.number();
        let held = self.active.take(name, HERE, number, RESERVE_WAIT);
        held.map_err(|taken| {
            if let Taken::Refused(refusal) = taken {
                return TeleportError::Refused(refusal);
            }
            let text = format!("an image called {name} is being sent or moved; try again later");
            TeleportError::refused(Code::Busy, text)
        })
    }

    /// Permissions of delivered images.
    #[must_use]
    pub fn image_mode(&self) -> u32 {
        self.config.image_mode
    }

    /// Catalog record of the image of that name.
    #[must_use]
    pub fn by_name(&self, name: &ImageName) -> Option<ImageRecord> {
        self.images.by_name(name)
    }

    /// Reads a whole, synced image file that will be called `name`. Indexes its blocks in the matcher and saves its map.
    /// [`Site::adopt`] or [`Site::forget_prepared`] must follow; a crash before that leaves nothing behind. Blocks the
    /// thread.
    ///
    /// # Errors
    /// When the file cannot be read as an image, or `progress` returns an error.
    pub fn prepare(
        &self,
        file: &Path,
        name: &ImageName,
        origin: Origin<'_>,
        progress: &mut Progress<'_>,
    ) -> Result<ImageRecord, TeleportError> {
        let outgoing = open_for_sending(file, Conversion::AsIs)?;
        let path = self.image_path(name);
        let (mut record, map) = self.read_in(outgoing, name, path, progress, |_| Ok(()))?;
        record.from = origin.from.into();
        record.owner = origin.owner;
        let saved = map.save(&record, &self.images.map_path(record.id));
        if let Err(e) = saved {
            self.forget_prepared(&record);
            return Err(e.into());
        }
        Ok(record)
    }

    /// Gives a prepared file its name and adds it to the catalog, replacing the image of that name; with `fresh`,
    /// only if there is none. Without `file` the file is already in place. The caller must check that the image may
    /// be replaced.
    ///
    /// # Errors
    /// When the name is taken, or the file or the catalog fails: then `file` is back at its path and the previous
    /// image keeps the name.
    pub fn adopt(
        &self,
        file: Option<&Path>,
        record: &ImageRecord,
        fresh: bool,
    ) -> Result<ImageRecord, TeleportError> {
        let target = &record.path;
        let (changing, old) = self.change(&record.name, !fresh)?;
        if fresh && old.is_some() {
            return Err(taken(&record.name));
        }
        let named = match file {
            Some(file) => Some(self.give_name(file, &record.name, old.as_ref())?),
            None => {
                let failed = TeleportError::file("sync the directory of", target);
                sync_parent(target).map_err(failed)?;
                None
            }
        };
        let record = ImageRecord {
            stamp: Stamp::of_path(target).ok(),
            shared: old.map_or_else(Vec::new, |old| old.shared),
            ..record.clone()
        };
        let old = self.enter(&record, named)?;
        drop(changing);
        let sketch = self.indexing.lock().remove(&record.id);
        self.note_image(&record, sketch.as_ref());
        if let Some(old) = old {
            self.replaced(old.id, record.id);
        }
        self.wake_copier();
        Ok(record)
    }

    /// Undoes [`Site::prepare`]; the file stays with the caller.
    pub fn forget_prepared(&self, record: &ImageRecord) {
        self.tell(record.id, ImageEvent::Forget);
        self.indexing.lock().remove(&record.id);
        // If this fails, the stray map is removed at the next start.
        let _ = std::fs::remove_file(self.images.map_path(record.id));
    }

    /// Sends all blocks of an image to the matcher. Returns its map, and a record of it as the site's own file at
    /// `path`, without a stamp. `accept` may reject its digest.
    fn read_in(
        &self,
        outgoing: Outgoing,
        name: &ImageName,
        path: PathBuf,
        progress: &mut Progress<'_>,
        accept: impl FnOnce(Digest) -> Result<(), TeleportError>,
    ) -> Result<(ImageRecord, ImageMap), TeleportError> {
        let id = self.catalog.new_image_id().map_err(StoreError::from)?;
        let mut link = self.matching.link()?;
        self.indexing.lock().insert(id, Sketch::new(BLOCK_SKETCH));
        let mut sketch = Sketch::new(BLOCK_SKETCH);
        let begun = link.ask(Event::Image(id, ImageEvent::Begin));
        let mut blocks = BlockMap::default();
        let mut walk = Walk::new(&outgoing);
        let total = outgoing.layout.walk_blocks();
        let read = loop {
            if let Err(e) = begun {
                break Err(e);
            }
            match walk.next_batch() {
                Ok(Some(batch)) => {
                    blocks.push(&batch.data);
                    sketch.add_blocks(&batch.digests);
                    let noted = progress(blocks.walk_blocks(), total)
                        .and_then(|()| link.ask(Event::Record(id, Arc::new(batch))).map(drop));
                    if let Err(e) = noted {
                        break Err(e);
                    }
                }
                Ok(None) => break walk.digest(),
                Err(e) => break Err(e),
            }
        };
        let read = read.and_then(|digest| {
            crate::walk::check_unchanged(&outgoing)?;
            accept(digest)?;
            Ok(digest)
        });
        let ended = read.and_then(|digest| {
            link.ask(Event::Image(id, ImageEvent::Finish))?;
            Ok(digest)
        });
        let digest = ended.inspect_err(|_| {
            let _ = link.ask(Event::Image(id, ImageEvent::Abort));
            self.indexing.lock().remove(&id);
        })?;
        self.indexing.lock().insert(id, sketch);
        let record = ImageRecord {
            id,
            name: name.clone(),
            stamp: None,
            path,
            format: outgoing.format.as_str().into(),
            size_bytes: outgoing.layout.file_len(),
            data_bytes: outgoing.layout.covered_bytes(),
            virtual_bytes: outgoing.virtual_size,
            digest,
            added_unix: unix_now(),
            from: String::new(),
            external: false,
            owner: None,
            shared: Vec::new(),
        };
        let map = ImageMap {
            layout: Arc::new(outgoing.layout),
            blocks: Arc::new(blocks),
        };
        Ok((record, map))
    }

    /// Indexes an image file of this machine in place, so that its blocks can be reused. Blocks the thread.
    ///
    /// # Errors
    /// When the file cannot be read as an image, changes while it is read, or its name is taken.
    pub fn index_image(
        &self,
        path: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<ImageRecord, TeleportError> {
        self.index_file(path, &mut |done, total| {
            progress(done, total);
            Ok(())
        })
    }

    /// As [`Site::index_image`]; an error of `progress` ends it.
    pub(super) fn index_file(
        &self,
        path: &Path,
        progress: &mut Progress<'_>,
    ) -> Result<ImageRecord, TeleportError> {
        let path = path
            .canonicalize()
            .map_err(TeleportError::file("find", path))?;
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        let name = ImageName::new(name).map_err(|e| TeleportError::Failed(e.to_string()))?;
        check_path(self.images.by_name(&name).as_ref(), &path)?;
        let outgoing = open_for_sending(&path, Conversion::AsIs)?;
        // The stamp from when it was opened; it is still the same after the last read.
        let stamp = outgoing.stamps.first().map(|(_, stamp)| *stamp);
        // A file in the site's own directory belongs to the site; any other stays its owner's.
        let external = path.parent() != self.config.images_dir.canonicalize().ok().as_deref();
        let accept = |digest: Digest| {
            // Unchanged content may be indexed again; different content would replace an image that is in use.
            match self.images.by_name(&name) {
                Some(old) if old.digest != digest => self.check_held(&name, name.as_str()),
                _ => Ok(()),
            }
        };
        let (mut record, map) = self.read_in(outgoing, &name, path, progress, accept)?;
        (record.stamp, record.external) = (stamp, external);
        let id = record.id;
        let entered = self.enter_indexed(&mut record, &map);
        let sketch = self.indexing.lock().remove(&id);
        if entered.is_ok() {
            self.note_image(&record, sketch.as_ref());
        }
        let old = entered.inspect_err(|_| self.tell(id, ImageEvent::Forget))?;
        if let Some(old) = old {
            self.replaced(old.id, id);
            self.wake_copier();
        }
        Ok(record)
    }

    /// Adds an image to the catalog that was read in place; returns the record that it replaces.
    fn enter_indexed(
        &self,
        record: &mut ImageRecord,
        map: &ImageMap,
    ) -> Result<Option<ImageRecord>, TeleportError> {
        let (_changing, old) = self.change(&record.name, false)?;
        check_path(old.as_ref(), &record.path)?;
        // An image that is read again stays its owner's.
        if let Some(old) = old {
            (record.owner, record.shared) = (old.owner, old.shared);
        }
        map.save(record, &self.images.map_path(record.id))?;
        Ok(self.images.put(record)?)
    }
}

/// Fails if an image of the same name is elsewhere.
fn check_path(known: Option<&ImageRecord>, path: &Path) -> Result<(), TeleportError> {
    match known.filter(|known| known.path != path) {
        Some(other) => Err(TeleportError::Failed(format!(
            "{}: an image of that name is at {}; rename one of them",
            path.display(),
            other.path.display()
        ))),
        None => Ok(()),
    }
}

fn taken(name: &ImageName) -> TeleportError {
    let message = format!("there is an image called {name} already; choose another name");
    TeleportError::refused(Code::Denied, message)
}
