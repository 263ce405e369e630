//! The matcher: which blocks of an image does the destination have already?

mod config;
mod plan;
mod stats;

use std::collections::HashMap;

use drover_core::{Digest, Head};

pub use config::{AnchorPolicy, Layout, MatcherConfig};
pub use plan::{ImageId, Origin, Plan, PlanRun, SequenceStore, Via};
pub use stats::{CacheStats, ImageInfo, MatcherStats, OpenReport, Repair};

use crate::error::{IndexError, Result};
use crate::storage::Storage;

/// An image being indexed or matched.
#[derive(Debug)]
pub struct Cursor {
    image: ImageId,
    blocks: u64,
}

impl Cursor {
    /// Which image.
    #[must_use]
    pub fn image(&self) -> ImageId {
        self.image
    }

    /// Blocks recorded so far: the compact index of the next one.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
}

/// The matcher.
pub struct Matcher<S: Storage> {
    _storage: S,
    known: HashMap<Digest, (ImageId, u64)>,
    images: HashMap<ImageId, u64>,
}

impl<S: Storage> Matcher<S> {
    /// Opens the index in `storage`.
    ///
    /// # Errors
    /// [`IndexError::Config`], or what the storage reports.
    pub fn open(storage: S, config: MatcherConfig) -> Result<(Self, OpenReport)> {
        config.check()?;
        let matcher = Matcher {
            _storage: storage,
            known: HashMap::new(),
            images: HashMap::new(),
        };
        Ok((matcher, OpenReport::default()))
    }

    /// Starts the hash file of `image`.
    ///
    /// # Errors
    /// [`IndexError::Busy`].
    pub fn begin(&mut self, image: ImageId) -> Result<Cursor> {
        if self.images.insert(image, 0).is_some() {
            return Err(IndexError::Busy(image));
        }
        Ok(Cursor { image, blocks: 0 })
    }

    /// Adds blocks without asking.
    ///
    /// # Errors
    /// What the storage reports.
    pub fn record(
        &mut self,
        cursor: &mut Cursor,
        digests: &[Digest],
        heads: &[Head],
    ) -> Result<()> {
        self.batch(cursor, digests, heads).map(drop)
    }

    /// Matches blocks.
    ///
    /// # Errors
    /// What the storage reports.
    pub fn batch(
        &mut self,
        cursor: &mut Cursor,
        digests: &[Digest],
        heads: &[Head],
    ) -> Result<Plan> {
        if digests.len() != heads.len() {
            return Err(IndexError::BadBatch("digests and heads differ in number"));
        }
        let mut plan = Plan::default();
        for d in digests {
            let (origin, via) = match self.known.get(d) {
                Some(&(image, first)) => (Origin::Image { image, first }, Via::C0),
                None => {
                    self.known.insert(*d, (cursor.image, cursor.blocks));
                    (Origin::Literal, Via::Literal)
                }
            };
            cursor.blocks += 1;
            match (plan.runs.last_mut(), origin) {
                (
                    Some(PlanRun {
                        origin: Origin::Literal,
                        count,
                        ..
                    }),
                    Origin::Literal,
                ) => *count += 1,
                _ => plan.runs.push(PlanRun {
                    count: 1,
                    origin,
                    via,
                }),
            }
        }
        Ok(plan)
    }

    /// The image is complete.
    ///
    /// # Errors
    /// What the storage reports.
    pub fn finish(&mut self, cursor: Cursor) -> Result<()> {
        self.images.insert(cursor.image, cursor.blocks);
        Ok(())
    }

    /// The transfer was given up.
    pub fn abort(&mut self, cursor: Cursor) {
        let _ = self.forget(cursor.image);
    }

    /// The image was deleted or replaced.
    ///
    /// # Errors
    /// What the storage reports.
    pub fn forget(&mut self, image: ImageId) -> Result<()> {
        self.images.remove(&image);
        self.known.retain(|_, (i, _)| *i != image);
        Ok(())
    }

    /// Inserts what the caches do not have of the image.
    ///
    /// # Errors
    /// [`IndexError::Unknown`].
    pub fn reindex(&mut self, image: ImageId) -> Result<()> {
        self.images
            .get(&image)
            .map(drop)
            .ok_or(IndexError::Unknown(image))
    }

    /// Saves the caches.
    ///
    /// # Errors
    /// What the storage reports.
    pub fn persist(&mut self) -> Result<()> {
        Ok(())
    }

    /// Images with hash files.
    #[must_use]
    pub fn images(&self) -> Vec<ImageInfo> {
        self.images
            .iter()
            .map(|(&image, &blocks)| ImageInfo {
                image,
                blocks,
                complete: true,
                recent: true,
            })
            .collect()
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> MatcherStats {
        MatcherStats::default()
    }

    /// Damage found since the last call.
    pub fn take_repairs(&mut self) -> Vec<Repair> {
        Vec::new()
    }
}
