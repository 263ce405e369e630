//! The images of a site as sources of blocks: looked up by ID, opened with their maps, and cached within a memory
//! budget.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::ImageName;
use drover_index::ImageId;
use drover_storage::make_private_dir;
use parking_lot::{Mutex, RwLock};

use crate::StoreError;
use crate::catalog::{Catalog, ImageRecord, Known};
use crate::imagemap::ImageMap;
use crate::profile::Profiles;

/// Memory budget for the maps of open images.
const MAP_BUDGET_BYTES: usize = 48 << 20;

/// An image open for reading blocks. It stays readable while it is held, even if it is renamed or removed.
#[derive(Debug)]
pub struct OpenImage {
    /// Its file, read-only.
    pub file: File,
    /// Its layout and block map.
    pub map: ImageMap,
}

/// What the catalog had when it was last looked at for changes.
#[derive(Default)]
struct Seen {
    known: Known,
    /// Whose names they are.
    ids: HashMap<ImageName, ImageId>,
}

/// The images of a site. See the module's documentation.
pub struct Images {
    catalog: Arc<dyn Catalog>,
    maps_dir: PathBuf,
    profiles: Profiles,
    records: RwLock<HashMap<ImageId, ImageRecord>>,
    /// Most recently used last.
    open: Mutex<Vec<(ImageId, Arc<OpenImage>)>>,
    /// Images whose maps are missing or damaged.
    lost: Mutex<HashSet<ImageId>>,
    /// Locked from when the catalog is read or changed until `records` says the same.
    changing: Mutex<Seen>,
}

impl Images {
    /// Reads the catalog. Images with a map but no record are restored, except those in `awaited`, which are about to
    /// be entered anyway. Repairs are appended to `repairs`.
    ///
    /// # Errors
    /// When the catalog or the directory of maps cannot be read.
    pub fn open(
        catalog: Arc<dyn Catalog>,
        maps_dir: PathBuf,
        awaited: &HashSet<ImageId>,
        repairs: &mut Vec<String>,
    ) -> Result<Self, StoreError> {
        let images = Images::open_shared(catalog, maps_dir)?;
        images.reconcile(awaited, repairs)?;
        Ok(images)
    }

    /// The same for a directory of maps that other nodes use as well: what the catalog lacks of it may be about to be entered by one of
    /// them.
    ///
    /// # Errors
    /// As [`Images::open`].
    pub fn open_shared(catalog: Arc<dyn Catalog>, maps_dir: PathBuf) -> Result<Self, StoreError> {
        make_private_dir(&maps_dir).map_err(StoreError::file("create", &maps_dir))?;
        let listed = catalog.images()?;
        let records = listed.into_iter().map(|r| (r.id, r)).collect();
        let images = Images {
            catalog,
            profiles: Profiles::beside(&maps_dir),
            maps_dir,
            records: RwLock::new(records),
            open: Mutex::default(),
            lost: Mutex::default(),
            changing: Mutex::default(),
        };
        Ok(images)
    }

    /// Reads what has changed in the catalog, where another node may have changed it. Returns the images that left, and those that came.
    ///
    /// # Errors
    /// When the catalog cannot be read.
    pub fn refresh(&self) -> Result<(Vec<ImageId>, Vec<ImageId>), StoreError> {
        let mut seen = self.changing.lock();
        let seen = &mut *seen;
        let Some(changed) = self.catalog.changed(&mut seen.known)? else {
            return Ok((Vec::new(), Vec::new()));
        };
        let mut records = self.records.write();
        let mut new = Vec::new();
        for record in changed {
            let (name, id) = (record.name.clone(), record.id);
            seen.ids.insert(name, id);
            if records.insert(id, record).is_none() {
                new.push(id);
            }
        }
        let sums = &seen.known.sums;
        seen.ids.retain(|name, _| sums.contains_key(name.as_str()));
        let is_gone = |r: &&ImageRecord| seen.ids.get(&r.name) != Some(&r.id);
        let gone: Vec<ImageId> = records.values().filter(is_gone).map(|r| r.id).collect();
        gone.iter().for_each(|id| drop(records.remove(id)));
        drop(records);
        gone.iter().for_each(|id| self.close(*id));
        Ok((gone, new))
    }

    /// Reads the record of one image again, as [`Images::refresh`] does.
    ///
    /// # Errors
    /// When the catalog cannot be read.
    pub fn reread(&self, name: &ImageName) -> Result<(), StoreError> {
        let _changing = self.changing.lock();
        let now = self.catalog.by_name(name)?;
        let mut records = self.records.write();
        let before = records.values().find(|r| r.name == *name).map(|r| r.id);
        let gone = before.filter(|id| now.as_ref().is_none_or(|now| now.id != *id));
        if let Some(gone) = gone {
            records.remove(&gone);
        }
        if let Some(now) = now {
            records.insert(now.id, now);
        }
        drop(records);
        gone.iter().for_each(|id| self.close(*id));
        Ok(())
    }

    fn close(&self, id: ImageId) {
        self.open.lock().retain(|(i, _)| *i != id);
        self.lost.lock().remove(&id);
    }

    /// Restores images whose maps exist but whose records were lost, and removes orphaned maps.
    fn reconcile(
        &self,
        awaited: &HashSet<ImageId>,
        repairs: &mut Vec<String>,
    ) -> Result<(), StoreError> {
        let failed = |e| StoreError::file("list", &self.maps_dir)(e);
        for entry in std::fs::read_dir(&self.maps_dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let id = path
                .file_stem()
                .and_then(|s| s.to_str())
                .and_then(|s| s.parse().ok())
                .map(ImageId);
            let is_map = path.extension().is_some_and(|e| e == "map");
            match id {
                Some(id) if is_map && self.knows(id) => {}
                Some(id) if is_map && awaited.contains(&id) => {}
                Some(_) if is_map => self.restore(&path, repairs)?,
                _ => {
                    let _ = std::fs::remove_file(&path);
                }
            }
        }
        self.profiles
            .remove_orphans(|id| self.knows(id) || awaited.contains(&id));
        Ok(())
    }

    fn restore(&self, path: &Path, repairs: &mut Vec<String>) -> Result<(), StoreError> {
        let found = ImageMap::load(path)?.map(|(record, _)| record);
        let taken = |r: &ImageRecord| self.records.read().values().any(|o| o.name == r.name);
        match found {
            Some(record) if !taken(&record) && record.path.exists() => {
                self.catalog.put(&record)?;
                repairs.push(format!(
                    "{}: put back into the catalog from its map",
                    record.name
                ));
                self.records.write().insert(record.id, record);
            }
            _ => {
                let _ = std::fs::remove_file(path);
            }
        }
        Ok(())
    }

    /// The path of an image's map.
    #[must_use]
    pub fn map_path(&self, id: ImageId) -> PathBuf {
        self.maps_dir.join(format!("{}.map", id.0))
    }

    /// The profiles of the images.
    #[must_use]
    pub fn profiles(&self) -> &Profiles {
        &self.profiles
    }

    /// Whether an image with this ID exists.
    #[must_use]
    pub fn knows(&self, id: ImageId) -> bool {
        self.records.read().contains_key(&id)
    }

    /// All images, by name.
    #[must_use]
    pub fn list(&self) -> Vec<ImageRecord> {
        let mut all: Vec<_> = self.records.read().values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The image of that name.
    #[must_use]
    pub fn by_name(&self, name: &ImageName) -> Option<ImageRecord> {
        self.records
            .read()
            .values()
            .find(|r| r.name == *name)
            .cloned()
    }

    /// Opens an image to read blocks from; `None` when it is gone or its map is damaged (its blocks then count as
    /// missing, and are requested).
    #[must_use]
    pub fn open_image(&self, id: ImageId) -> Option<Arc<OpenImage>> {
        let mut open = self.open.lock();
        if let Some(at) = open.iter().position(|(i, _)| *i == id) {
            let entry = open.remove(at);
            let image = entry.1.clone();
            open.push(entry);
            return Some(image);
        }
        let path = self.records.read().get(&id)?.path.clone();
        if self.lost.lock().contains(&id) {
            return None;
        }
        let Some((_, map)) = ImageMap::load(&self.map_path(id)).ok().flatten() else {
            tracing::warn!(
                path = %path.display(),
                "its map is missing or damaged: its blocks cannot be reused until `drover index` has read it again"
            );
            self.lost.lock().insert(id);
            return None;
        };
        let file = File::open(&path).ok()?;
        let image = Arc::new(OpenImage { file, map });
        open.push((id, image.clone()));
        let mut used: usize = open.iter().map(|(_, i)| i.map.memory_bytes()).sum();
        while used > MAP_BUDGET_BYTES && open.len() > 1 {
            used -= open.remove(0).1.map.memory_bytes();
        }
        Some(image)
    }

    /// Inserts an image whose map is saved; returns the one it replaces.
    ///
    /// # Errors
    /// When the catalog fails.
    pub fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>, StoreError> {
        let _changing = self.changing.lock();
        let old = self.catalog.put(record)?;
        let old = old.filter(|o| o.id != record.id);
        if let Some(old) = &old {
            self.profiles.hand_down(old.id, record.id);
            self.drop_record(old);
        }
        self.records.write().insert(record.id, record.clone());
        Ok(old)
    }

    /// Removes an image from the catalog.
    ///
    /// # Errors
    /// When the catalog fails.
    pub fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>, StoreError> {
        let _changing = self.changing.lock();
        let old = self.catalog.remove(name)?;
        if let Some(old) = &old {
            self.drop_record(old);
        }
        Ok(old)
    }

    fn drop_record(&self, old: &ImageRecord) {
        self.records.write().remove(&old.id);
        self.close(old.id);
        let _ = std::fs::remove_file(self.map_path(old.id));
        let _ = self.profiles.remove(old.id);
    }
}
