//! Blocks that go ahead of everything else of an image, and in which order: first those that a machine waits for, then those that are
//! only likely to be read soon. Of these there may be a thousand; a machine that reads waits for none of them.

use std::collections::VecDeque;

use super::Violation;
use crate::codec::{Runs, Want};
use crate::protocol::GIVEN_BLOCKS;

/// Upper bound on the runs of blocks that wait to be given: 4 MiB. A destination wants a few thousand at once.
pub const MAX_GIVES: usize = 1 << 18;

/// The blocks that are to be given and have not been; at most about [`MAX_GIVES`] runs.
#[derive(Debug, Default)]
pub struct Gives {
    /// A machine waits for them.
    waited: VecDeque<(u64, u64)>,
    others: VecDeque<(u64, u64)>,
}

impl Gives {
    /// Adds blocks.
    ///
    /// # Errors
    /// When too many wait already.
    pub fn give(&mut self, want: &Want) -> Result<(), Violation> {
        if self.waited.len() + self.others.len() > MAX_GIVES {
            return Err(Violation(format!(
                "the destination wants more than {MAX_GIVES} runs of blocks at once"
            )));
        }
        match want.waited {
            true => self.waited.extend(want.runs.iter()),
            false => self.others.extend(want.runs.iter()),
        }
        Ok(())
    }

    /// Has blocks that were asked for before come as soon as `want` says. `back` are those of them that were queued elsewhere,
    /// and are not any more.
    ///
    /// # Errors
    /// As for [`Gives::give`].
    pub fn hurry(&mut self, want: &Want, back: Runs) -> Result<(), Violation> {
        if want.waited {
            let here: Runs = take_out(&mut self.others, &want.runs).into_iter().collect();
            self.waited.extend(here.iter());
        }
        self.give(&Want {
            waited: want.waited,
            runs: back,
        })
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waited.is_empty() && self.others.is_empty()
    }

    /// The blocks of the next frame, in ascending order; `None` if there are none.
    pub fn next(&mut self) -> Option<Runs> {
        let queue = match self.waited.is_empty() {
            true => &mut self.others,
            false => &mut self.waited,
        };
        let mut out = Runs::default();
        let (mut left, mut end) = (GIVEN_BLOCKS as u64, 0);
        while left > 0
            && let Some((first, count)) = queue.front_mut()
            && *first >= end
        {
            let n = (*count).min(left);
            out.push(*first, n);
            (end, left) = (*first + n, left - n);
            (*first, *count) = (*first + n, *count - n);
            if *count == 0 {
                queue.pop_front();
            }
        }
        (!out.is_empty()).then_some(out)
    }
}

/// Takes those of some blocks out of a queue that are in it, however often; returns them, each once and in ascending order.
pub fn take_out(queue: &mut VecDeque<(u64, u64)>, wanted: &Runs) -> Vec<u64> {
    let mut taken = Vec::new();
    let wanted: Vec<(u64, u64)> = wanted.iter().collect();
    for (first, count) in std::mem::take(queue) {
        let mut at = first;
        let inside = |(f, n): &(u64, u64)| (*f.max(&first), (f + n).min(first + count));
        // They ascend.
        let begin = wanted.partition_point(|(f, n)| f + n <= first);
        let found = wanted[begin..].iter().map(inside);
        let found = found.take_while(|(from, to)| from < to);
        for (from, to) in found {
            if from > at {
                queue.push_back((at, from - at));
            }
            taken.extend(from..to);
            at = to;
        }
        if at < first + count {
            queue.push_back((at, first + count - at));
        }
    }
    taken.sort_unstable();
    taken.dedup();
    taken
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn want(waited: bool, blocks: impl IntoIterator<Item = u64>) -> Want {
        let runs = blocks.into_iter().collect();
        Want { waited, runs }
    }

    fn next(gives: &mut Gives) -> Vec<u64> {
        gives.next().map_or_else(Vec::new, |r| r.blocks().collect())
    }

    fn all(gives: &mut Gives) -> Vec<u64> {
        std::iter::from_fn(|| gives.next())
            .flat_map(|runs| runs.blocks().collect::<Vec<_>>())
            .collect()
    }

    #[test]
    fn what_a_machine_waits_for_overtakes_a_thousand_others() {
        let background: Range<u64> = 5000..6024;
        let mut gives = Gives::default();
        gives.give(&want(false, background.clone())).unwrap();
        assert_eq!(next(&mut gives), Vec::from_iter(5000..5016));
        // Not asked for before, queued at the data connections, and among the others.
        gives.give(&want(true, [7, 8])).unwrap();
        let hurry = |gives: &mut Gives, want: Want, back: &[u64]| {
            gives.hurry(&want, back.iter().copied().collect()).unwrap();
        };
        hurry(&mut gives, want(true, [9000, 9001]), &[9001]);
        hurry(&mut gives, want(true, [5000, 5700, 5701, 9001]), &[]);
        assert_eq!(next(&mut gives), [7, 8, 9001]);
        assert_eq!(next(&mut gives), [5700, 5701]);
        // The others go on, without those, and what is in no hurry comes behind them.
        hurry(&mut gives, want(false, [3, 5900]), &[3]);
        let rest = background.filter(|b| *b >= 5016 && ![5700, 5701].contains(b));
        assert_eq!(all(&mut gives), Vec::from_iter(rest.chain([3])));
        assert!(gives.is_empty() && gives.next().is_none());
    }

    #[test]
    fn what_is_not_given_is_bounded() {
        let apart = |waited| want(waited, (0..4096).map(|n| 2 * n));
        let mut gives = Gives::default();
        let asked = (0..1000).take_while(|n| gives.give(&apart(n % 2 == 0)).is_ok());
        assert!(asked.count() >= MAX_GIVES / 4096);
        let kept = gives.waited.len() + gives.others.len();
        assert!(kept <= MAX_GIVES + 4096, "{kept}");
        let back = apart(true).runs;
        assert!(gives.hurry(&want(true, [1]), back).is_err());
        // Once some were given, there is room again.
        (0..2000).for_each(|_| drop(gives.next()));
        gives.give(&apart(true)).unwrap();
    }

    #[test]
    fn blocks_are_taken_out_wherever_they_are() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..500 {
            let mut queue = VecDeque::new();
            for _ in 0..random.usize(0..6) {
                queue.push_back((random.u64(0..40), random.u64(1..9)));
            }
            let wanted: Runs = (0..50).filter(|_| random.bool()).collect();
            let blocks = |queue: &VecDeque<(u64, u64)>| -> Vec<u64> {
                queue.iter().flat_map(|(f, n)| *f..f + n).collect()
            };
            let before = blocks(&queue);
            let is_wanted = |b: &&u64| wanted.blocks().any(|w| w == **b);
            let taken = take_out(&mut queue, &wanted);
            let mut expected: Vec<u64> = before.iter().filter(is_wanted).copied().collect();
            expected.sort_unstable();
            expected.dedup();
            assert_eq!(taken, expected);
            let left: Vec<u64> = before.iter().filter(|b| !is_wanted(b)).copied().collect();
            assert_eq!(blocks(&queue), left);
        }
    }
}
