//! A destination that applies plans, with digests in place of blocks.

use std::collections::HashMap;

use drover_core::Digest;

use crate::SEGMENT_SLOTS;
use crate::matcher::{ImageId, Origin, Plan};

/// Contents of a destination: for each image and for the sequence data file, the digests of its blocks.
#[derive(Debug, Clone, Default)]
pub struct Destination {
    images: HashMap<ImageId, Vec<Digest>>,
    sequences: HashMap<u64, Digest>,
}

/// Result of applying a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks from the source.
    pub literal: u64,
    /// Reused blocks that are correct.
    pub reused: u64,
    /// Reused blocks that are wrong, for example because they changed: a real destination requests them from the
    /// source.
    pub refetched: u64,
}

impl Destination {
    /// An empty destination.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts an image, discarding any earlier one.
    pub fn begin(&mut self, image: ImageId) {
        self.images.insert(image, Vec::new());
    }

    /// Deletes an image.
    pub fn delete(&mut self, image: ImageId) {
        self.images.remove(&image);
    }

    /// An image's blocks so far.
    #[must_use]
    pub fn image(&self, image: ImageId) -> &[Digest] {
        self.images.get(&image).map_or(&[], Vec::as_slice)
    }

    /// Applies a plan for the next blocks of `image`, which should become `digests`.
    ///
    /// # Errors
    /// A message when the plan violates the contract of [`Plan`].
    pub fn apply(
        &mut self,
        image: ImageId,
        digests: &[Digest],
        plan: &Plan,
    ) -> Result<Applied, String> {
        let base = self.image(image).len() as u64;
        let mut applied = Applied::default();
        let mut at = 0usize;
        for run in &plan.runs {
            let n = run.count as usize;
            let want = digests
                .get(at..at + n)
                .filter(|w| !w.is_empty())
                .ok_or_else(|| format!("{run:?} at {at} of {}", digests.len()))?;
            for (k, want) in want.iter().enumerate() {
                let k = k as u64;
                let got = match run.origin {
                    Origin::Literal => {
                        applied.literal += 1;
                        continue;
                    }
                    Origin::Image { image: from, first } => {
                        if from == image && first.0 + u64::from(run.count) > base + at as u64 {
                            return Err(format!("{run:?} reads what it makes"));
                        }
                        // Blocks of this batch are not in `images` yet.
                        let in_batch = (first.0 + k).checked_sub(base).filter(|_| from == image);
                        match in_batch {
                            Some(i) => digests.get(i as usize).copied(),
                            None => self.image(from).get((first.0 + k) as usize).copied(),
                        }
                    }
                    Origin::Sequence { first } => self.sequences.get(&(first + k)).copied(),
                };
                if got == Some(*want) {
                    applied.reused += 1;
                } else {
                    applied.refetched += 1;
                }
            }
            at += n;
        }
        if at != digests.len() {
            return Err(format!("the plan covers {at} of {} blocks", digests.len()));
        }
        let blocks = self.images.entry(image).or_default();
        blocks.extend_from_slice(digests);
        for store in &plan.stores {
            let last = (store.first + u64::from(store.count)).wrapping_sub(1);
            let same_segment = store.first / SEGMENT_SLOTS == last / SEGMENT_SLOTS;
            if store.count == 0 || !same_segment {
                return Err(format!("{store:?} crosses a segment"));
            }
            for k in 0..u64::from(store.count) {
                let from = (store.from.0 + k) as usize;
                let d = blocks
                    .get(from)
                    .ok_or_else(|| format!("{store:?} reads beyond"))?;
                self.sequences.insert(store.first + k, *d);
            }
        }
        Ok(applied)
    }
}
