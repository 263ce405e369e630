//! Locates the blocks that a plan names: in complete images, in images in transit, in the sequence cache. Also
//! updates this when a transfer is given up.

use std::path::Path;

use drover_core::CompactIndex;
use drover_index::{ImageId, Origin, Plan, SequenceStore};
use drover_store::sequences::{From, Reach};

use super::Site;
use crate::destination::{ReuseJob, Run};
use crate::files::remove_dir;
use crate::teleporter::ImageEvent;

impl Site {
    /// Whether `count` data blocks of an image, from `first` on, can be read.
    pub(crate) fn reach(&self, image: ImageId, first: CompactIndex, count: u64) -> Reach {
        match self.images.knows(image) {
            true => Reach::Here,
            false => self.partials.reach(image, first, count),
        }
    }

    /// Where to read the blocks that a plan for an image in transit names, as of now.
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
                    let parts = self.in_image(image, first, run.count);
                    out.extend(parts.into_iter().map(|(count, from)| with(count, from)));
                }
                Origin::Sequence { first } => {
                    let parts = self.in_sequence(first, run.count, own);
                    out.extend(parts.into_iter().map(|(count, from)| with(count, from)));
                }
            }
        }
        out
    }

    fn in_image(
        &self,
        image: ImageId,
        mut first: CompactIndex,
        mut count: u32,
    ) -> Vec<(u32, From)> {
        let mut out = Vec::new();
        while count > 0 {
            let n = self.partials.alike(image, first, u64::from(count)) as u32;
            let from = match self.reach(image, first, u64::from(n)) {
                Reach::Gone => From::Literal,
                Reach::Here | Reach::Coming => From::Image { image, first },
            };
            out.push((n, from));
            first = first + u64::from(n);
            count -= n;
        }
        out
    }

    /// Where to read slots of the sequence cache. A pending sequence that is only partly available in one place is
    /// looked up piece by piece, as the rest may be elsewhere.
    fn in_sequence(&self, first: u64, count: u32, own: ImageId) -> Vec<(u32, From)> {
        let (mut out, mut asked) = (Vec::new(), vec![(first, count)]);
        while let Some((first, count)) = asked.pop() {
            let reach = |image, at, n| self.reach(image, at, n);
            let mut at = first;
            for (n, from) in self.sequences.resolve(first, count, own, reach) {
                let alike = match from {
                    From::Image { image, first } => {
                        self.partials.alike(image, first, u64::from(n)) as u32
                    }
                    _ => n,
                };
                if alike < n {
                    let end = first + u64::from(count);
                    let rest = at + u64::from(alike);
                    asked.extend([(rest, (end - rest) as u32), (at, alike)]);
                    break;
                }
                out.push((n, from));
                at += u64::from(n);
            }
        }
        out
    }

    /// Handles blocks of a job that failed verification: if they came from a stopped transfer, they are not looked up
    /// there again.
    pub(crate) fn refute(&self, job: &ReuseJob, failed: &[u32]) {
        for (start, run) in &job.runs {
            if let From::Image { image, first } = run.from {
                let wrong = failed.iter().filter_map(|i| i.checked_sub(*start));
                let wrong = wrong.filter(|i| *i < run.count);
                let mut wrong = wrong.map(|i| first + u64::from(i)).peekable();
                if wrong.peek().is_some() {
                    self.partials.refute(image, wrong);
                }
            }
        }
    }

    /// Applies the stores of a plan, for the batch of `own` whose first data block is `base`. A store may overwrite
    /// slots that the plan's runs name, so resolve those first.
    pub(crate) fn take_stores(&self, own: ImageId, base: CompactIndex, plan: &Plan) {
        for store in &plan.stores {
            self.sequences
                .add(own, *store, found_at(own, base, plan, store));
            self.flocks.stored(own, store);
        }
    }

    /// Discards a transfer; its blocks are no longer available for reuse.
    pub(crate) fn discard(&self, dir: &Path, image: ImageId) {
        self.forget_partial(image);
        remove_dir(dir);
    }

    /// Removes a transfer's blocks from the sources for reuse.
    pub(crate) fn forget_partial(&self, image: ImageId) {
        self.partials.remove(image);
        self.sequences.drop_image(image);
        self.tell(image, ImageEvent::Forget);
    }
}

/// Where a store's blocks were when they were matched, if that is in another image.
fn found_at(
    own: ImageId,
    base: CompactIndex,
    plan: &Plan,
    store: &SequenceStore,
) -> Option<(ImageId, CompactIndex)> {
    let mut left = store.from.0.checked_sub(base.0)?;
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
                run(
                    20,
                    Origin::Image {
                        image,
                        first: CompactIndex(500),
                    },
                ),
                run(
                    5,
                    Origin::Image {
                        image: own,
                        first: CompactIndex(3),
                    },
                ),
            ],
            stores: vec![],
        };
        let found = |from, count| {
            let store = SequenceStore {
                first: 0,
                from: CompactIndex(from),
                count,
            };
            found_at(own, CompactIndex(1000), &plan, &store)
        };
        assert_eq!(found(1010, 20), Some((image, CompactIndex(500))));
        assert_eq!(found(1015, 2), Some((image, CompactIndex(505))));
        assert_eq!(found(1015, 16), None);
        assert_eq!(found(1005, 1), None);
        assert_eq!(found(1030, 5), None);
        assert_eq!(found(999, 1), None);
        assert_eq!(found(1035, 1), None);
    }
}
