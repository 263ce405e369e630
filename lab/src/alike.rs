//! Which of several images is the most similar to another one.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::limit;

/// Cache of the blocks of images, for similarity; each image is read once.
#[derive(Default)]
pub struct Alike(HashMap<PathBuf, HashSet<u128>>);

impl Alike {
    /// The one of `candidates` that shares the most blocks with `image`, the first of equals; `None` when none shares
    /// any.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn most_similar<'p>(
        &mut self,
        image: &Path,
        candidates: &'p [PathBuf],
    ) -> Result<Option<&'p Path>> {
        for path in candidates.iter().map(PathBuf::as_path).chain([image]) {
            if !self.0.contains_key(path) {
                self.0.insert(path.to_owned(), limit::digests(path)?);
            }
        }
        let own = &self.0[image];
        let shared = candidates
            .iter()
            .rev()
            .map(|path| (own.intersection(&self.0[path]).count(), path));
        let best = shared
            .max_by_key(|(count, _)| *count)
            .filter(|(count, _)| *count > 0);
        Ok(best.map(|(_, path)| path.as_path()))
    }
}
