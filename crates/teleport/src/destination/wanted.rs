//! Blocks that are wanted before their turn: those of batches that have not arrived are asked for, those of announced batches
//! hurried, each once.

use std::collections::HashMap;

use drover_store::DataBits;

use super::ahead::Given;
use super::event::Action;
use super::{Destination, Open};
use crate::codec::Want;
use crate::protocol::BATCH_BLOCKS;

impl Destination {
    /// Restores the blocks of batches beyond the log that came ahead in an earlier session and are in place.
    pub fn restore_ahead(&mut self, data: HashMap<u64, DataBits>, zero: HashMap<u64, DataBits>) {
        self.ahead.restore(data, zero);
    }

    /// Blocks of a batch, by order among its data blocks, that the source was asked for: until it is planned, ahead of it.
    #[must_use]
    pub fn asked(&self, index: u64) -> Option<&DataBits> {
        self.open.get(&index).map(|open| &open.asked)
    }

    /// What to do with a block that the source has sent because it was wanted.
    #[must_use]
    pub fn given(&self, block: u64) -> Given {
        let index = block / BATCH_BLOCKS;
        if index >= self.next {
            return match self.ahead.is_wanted(block) {
                true => Given::Ahead,
                false => Given::Useless,
            };
        }
        let is_asked = |open: &Open| {
            let place = (block % BATCH_BLOCKS) as u16;
            let i = open.places.binary_search(&place).map(|i| i as u64);
            i.is_ok_and(|i| open.missing.get(i) && open.asked.get(i))
        };
        match self.open.get(&index).is_some_and(is_asked) {
            true => Given::Literal,
            // A worker may be about to put other data where nothing was asked for.
            false => Given::Useless,
        }
    }

    pub(super) fn on_want(&mut self, wanted: &Want, actions: &mut Vec<Action>) {
        let (mut want, mut hurry) = (Vec::new(), Vec::new());
        let end = self.walk_blocks;
        let inside = |block: &u64| *block < end;
        for block in wanted.runs.blocks().filter(inside) {
            if block / BATCH_BLOCKS >= self.next {
                if self.ahead.want(block, wanted.waited) {
                    want.push(block);
                } else if wanted.waited && self.ahead.hurry(block) {
                    // Nobody waited for it before.
                    hurry.push(block);
                }
            } else if self.hurries(block, wanted.waited) {
                // What is to be reused is made so at once anyway.
                hurry.push(block);
            }
        }
        let parts = |blocks: Vec<u64>| -> Vec<Want> {
            let want = |part: &[u64]| Want {
                waited: wanted.waited,
                runs: part.iter().copied().collect(),
            };
            blocks.chunks(BATCH_BLOCKS as usize).map(want).collect()
        };
        actions.extend(parts(want).into_iter().map(Action::Want));
        actions.extend(parts(hurry).into_iter().map(Action::Hurry));
    }

    /// Whether to ask for a block of an announced batch ahead of others, which was requested: once, and once more when a machine
    /// waits for it.
    fn hurries(&mut self, block: u64, waited: bool) -> bool {
        if self.given(block) != Given::Literal {
            return false;
        }
        let place = (block % BATCH_BLOCKS) as u16;
        let open = self.open.get_mut(&(block / BATCH_BLOCKS));
        open.is_some_and(|open| match open.places.binary_search(&place) {
            Ok(i) => open.hurried.hurry(i as u64, waited),
            Err(_) => false,
        })
    }

    /// A batch has arrived: notes what of it came ahead or is on its way. Returns a block that is not the one that came.
    pub(super) fn come_to(&mut self, open: &mut Open) -> Option<u64> {
        let was = self.ahead.arrived(open.batch.index);
        let mut changed = None;
        for (i, place) in open.places.iter().enumerate() {
            let has =
                |bits: &Option<DataBits>| bits.as_ref().is_some_and(|b| b.get((*place).into()));
            if has(&was.wanted) {
                open.asked.set(i as u64);
                self.coming += 1;
            }
            if has(&was.data) {
                open.ahead.set(i as u64);
            }
            if has(&was.zero) {
                changed = Some(u64::from(*place));
            }
        }
        let data = &open.batch.data;
        let mut of_data = was.data.iter().flat_map(DataBits::iter);
        let changed = changed.or(of_data.find(|place| !data.get(*place)));
        changed.map(|place| open.batch.first_block() + place)
    }
}
