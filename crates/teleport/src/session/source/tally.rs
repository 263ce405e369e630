//! Counts the blocks that the destination had: those of each batch that it has not requested by the time the batch is
//! complete.

use std::collections::BTreeMap;

use crate::progress::Counters;
use crate::protocol::BATCH_BLOCKS;
use crate::source::Event;

/// Batches in flight; bounded by the window.
#[derive(Debug, Default)]
pub struct Tally {
    /// Batches below this one were sent in an earlier session.
    from: u64,
    /// For each batch: nonzero blocks, and requested blocks.
    open: BTreeMap<u64, (u64, u64)>,
}

impl Tally {
    /// A batch with `data` nonzero blocks was read.
    pub fn walked(&mut self, index: u64, data: u64) {
        if index >= self.from {
            self.open.insert(index, (data, 0));
        }
    }

    /// Handles an event from the destination.
    pub fn heard(&mut self, event: &Event, counters: &Counters) {
        match event {
            Event::Accepted(accept) => {
                self.from = accept.resume_batch;
                self.open.retain(|i, _| *i >= accept.resume_batch);
            }
            Event::Need(need) => {
                for block in need.runs.blocks() {
                    if let Some((_, needed)) = self.open.get_mut(&(block / BATCH_BLOCKS)) {
                        *needed += 1;
                    }
                }
            }
            Event::Ack(index) => {
                if let Some((data, needed)) = self.open.remove(index) {
                    Counters::add(&counters.answered_blocks, data);
                    Counters::add(&counters.matched_blocks, data.saturating_sub(needed));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Need, Runs};
    use crate::protocol::Accept;

    #[test]
    fn what_is_complete_and_was_not_asked_for_is_matched() {
        let (mut tally, counters) = (Tally::default(), Counters::default());
        let hear = |tally: &mut Tally, event| tally.heard(&event, &counters);
        let found = || {
            (
                Counters::get(&counters.answered_blocks),
                Counters::get(&counters.matched_blocks),
            )
        };
        (0..4).for_each(|i| tally.walked(i, 1000));
        let accept = Accept {
            resume_batch: 1,
            resumed_blocks: 900,
            open_batches: 1,
        };
        hear(&mut tally, Event::Accepted(accept));
        // Crosses the end of a batch, and includes an earlier batch.
        let runs: Runs = [5, 2 * BATCH_BLOCKS - 1, 2 * BATCH_BLOCKS]
            .into_iter()
            .collect();
        hear(&mut tally, Event::Need(Need { runs }));
        // Blocks that were read but not answered count as neither.
        assert_eq!(found(), (0, 0));
        hear(&mut tally, Event::Ack(0));
        hear(&mut tally, Event::Ack(2));
        assert_eq!(found(), (1000, 999));
        hear(&mut tally, Event::Ack(1));
        hear(&mut tally, Event::Ack(1));
        assert_eq!(found(), (2000, 1998));
    }
}
