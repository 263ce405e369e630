//! Where a site has the blocks that a plan names: in whole images, in those in transit, in the
//! sequence cache; and what happens to that when a transfer is given up.

use std::path::Path;

use drover_index::{ImageId, Origin, Plan, SequenceStore};

use super::{Site, remove_dir};
use crate::destination::{From, Run};
use crate::sequences::Reach;
use crate::teleporter::ImageEvent;

impl Site {
    /// Whether `count` data blocks of an image from compact index `first` can be read.
    pub(crate) fn reach(&self, image: ImageId, first: u64, count: u64) -> Reach {
        match self.images.knows(image) {
            true => Reach::Here,
            false => self.partials.reach(image, first, count),
        }
    }

    /// Where the blocks that a plan for an image in transit names are to be read now.
    pub(crate) fn resolve(&self, own: ImageId, plan: &Plan) -> Vec<Run> {
        let mut out = Vec::with_capacity(plan.runs.len());
        for run in &plan.runs {
            let with = |count, from| Run {
                count,
                from,
                via: run.via,
            };
            match run.origin {
                Origin::Literal => out.push(with(run.count, From::Literal)),
                Origin::Image { image, first } if image == own => {
                    out.push(with(run.count, From::Own { first }));
                }
                Origin::Image { image, first } => {
                    let from = match self.reach(image, first, u64::from(run.count)) {
                        Reach::Gone => From::Literal,
                        Reach::Here | Reach::Coming => From::Image { image, first },
                    };
                    out.push(with(run.count, from));
                }
                Origin::Sequence { first } => {
                    let parts = self
                        .sequences
                        .resolve(first, run.count, own, |i, at, n| self.reach(i, at, n));
                    out.extend(parts.into_iter().map(|(count, from)| with(count, from)));
                }
            }
        }
        out
    }

    /// Takes over what a plan stores, for the batch of `own` whose first data block is `base`. A
    /// store may overwrite what the plan's runs name: look them up before.
    pub(crate) fn take_stores(&self, own: ImageId, base: u64, plan: &Plan) {
        for store in &plan.stores {
            self.sequences
                .add(own, *store, found_at(own, base, plan, store));
        }
    }

    /// Gives a transfer up for good: what it has brought is no source of blocks any more.
    pub(crate) fn discard(&self, dir: &Path, image: ImageId) {
        self.forget_partial(image);
        remove_dir(dir);
    }

    /// What a transfer has brought is no source of blocks any more.
    pub(crate) fn forget_partial(&self, image: ImageId) {
        self.partials.remove(image);
        self.sequences.drop_image(image);
        self.tell(image, ImageEvent::Forget);
    }
}

/// Where the blocks of a store were when they were matched, if that is another image.
fn found_at(own: ImageId, base: u64, plan: &Plan, store: &SequenceStore) -> Option<(ImageId, u64)> {
    let mut left = store.from.checked_sub(base)?;
    for run in &plan.runs {
        let count = u64::from(run.count);
        if left < count {
            let inside = left + u64::from(store.count) <= count;
            return match run.origin {
                Origin::Image { image, first } if inside && image != own => {
                    Some((image, first + left))
                }
                _ => None,
            };
        }
        left -= count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_index::{PlanRun, Via};

    #[test]
    fn a_store_is_found_where_its_run_was() {
        let run = |count, origin| PlanRun {
            count,
            origin,
            via: Via::C1,
        };
        let (own, image) = (ImageId(1), ImageId(2));
        let plan = Plan {
            runs: vec![
                run(10, Origin::Literal),
                run(20, Origin::Image { image, first: 500 }),
                run(
                    5,
                    Origin::Image {
                        image: own,
                        first: 3,
                    },
                ),
            ],
            stores: vec![],
        };
        let found = |from, count| {
            let store = SequenceStore {
                first: 0,
                from,
                count,
            };
            found_at(own, 1000, &plan, &store)
        };
        assert_eq!(found(1010, 20), Some((image, 500)));
        assert_eq!(found(1015, 2), Some((image, 505)));
        assert_eq!(found(1015, 16), None);
        assert_eq!(found(1005, 1), None);
        assert_eq!(found(1030, 5), None);
        assert_eq!(found(999, 1), None);
        assert_eq!(found(1035, 1), None);
    }
}
