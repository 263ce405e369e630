//! The images of a site as sources of blocks: found by number, opened with their maps, the maps
//! kept in memory within a budget.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::ImageName;
use drover_index::ImageId;
use parking_lot::{Mutex, RwLock};

use crate::StoreError;
use crate::catalog::{Catalog, ImageRecord};
use crate::imagemap::ImageMap;

/// Memory for the maps of images that are being read from.
const MAP_BUDGET_BYTES: usize = 48 << 20;

/// An image open as a source of blocks. Stays readable while it is held, whatever happens to its
/// name.
#[derive(Debug)]
pub struct OpenImage {
    /// Its file, read-only.
    pub file: File,
    /// How it is walked and which blocks hold data.
    pub map: ImageMap,
}

/// See the module.
pub struct Images {
    catalog: Arc<dyn Catalog>,
    maps_dir: PathBuf,
    records: RwLock<HashMap<ImageId, ImageRecord>>,
    /// Most recently used last.
    open: Mutex<Vec<(ImageId, Arc<OpenImage>)>>,
    /// Images whose maps were found missing or damaged.
    lost: Mutex<HashSet<ImageId>>,
}

impl Images {
    /// Reads the catalog. Images that have a map but no entry are put back, but for those that are
    /// `awaited`: about to be entered anyway. What was repaired is said in `repairs`.
    ///
    /// # Errors
    /// When the catalog or the directory of maps cannot be read.
    pub fn open(
        catalog: Arc<dyn Catalog>,
        maps_dir: PathBuf,
        awaited: &HashSet<ImageId>,
        repairs: &mut Vec<String>,
    ) -> Result<Self, StoreError> {
        std::fs::create_dir_all(&maps_dir).map_err(StoreError::file("create", &maps_dir))?;
        let listed = catalog.images()?;
        let records = listed.into_iter().map(|r| (r.id, r)).collect();
        let images = Images {
            catalog,
            maps_dir,
            records: RwLock::new(records),
            open: Mutex::default(),
            lost: Mutex::default(),
        };
        images.reconcile(awaited, repairs)?;
        Ok(images)
    }

    /// Puts images back into the catalog whose maps are there but whose entries were lost, and
    /// removes maps that nothing needs.
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

    /// The file of an image's map.
    #[must_use]
    pub fn map_path(&self, id: ImageId) -> PathBuf {
        self.maps_dir.join(format!("{}.map", id.0))
    }

    /// Whether there is such an image.
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

    /// Opens an image to read blocks from; `None` when it is gone or its map is damaged (its
    /// blocks are then asked for like any that are missing).
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

    /// Enters an image whose map is saved; returns the one whose name it takes.
    ///
    /// # Errors
    /// When the catalog fails.
    pub fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>, StoreError> {
        let old = self.catalog.put(record)?;
        let old = old.filter(|o| o.id != record.id);
        if let Some(old) = &old {
            self.drop_record(old);
        }
        self.records.write().insert(record.id, record.clone());
        Ok(old)
    }

    /// Takes an image out of the catalog.
    ///
    /// # Errors
    /// When the catalog fails.
    pub fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>, StoreError> {
        let old = self.catalog.remove(name)?;
        if let Some(old) = &old {
            self.drop_record(old);
        }
        Ok(old)
    }

    fn drop_record(&self, old: &ImageRecord) {
        self.records.write().remove(&old.id);
        self.open.lock().retain(|(i, _)| *i != old.id);
        self.lost.lock().remove(&old.id);
        let _ = std::fs::remove_file(self.map_path(old.id));
    }
}
