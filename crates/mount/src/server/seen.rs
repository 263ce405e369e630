//! What was written over an image, for a mount on this host that reads the rest of it by itself.

use std::ops::Range;
use std::sync::Arc;

use drover_core::BLOCK_SIZE_U64;
use drover_net::{Code, Peer, Refusal};
use drover_store::lease::Access;

use super::Server;
use super::blocking::blocking;
use super::image::Image;
use crate::protocol::{ChangesSeen, LookAtChanges, MAX_RUNS};

/// The image is looked through in parts, which bounds the memory for it: so many, and of at least this size.
const LOOKS: u64 = 1 << 16;
const LOOK: u64 = 256 << 20;

impl Server {
    /// Tells a mount of `peer` that has a connection what was written over its image, by whomever.
    ///
    /// # Errors
    /// [`Code::OutOfOrder`]: it has none, or only stands by.
    pub async fn look_at_changes(
        self: &Arc<Self>,
        peer: &Peer,
        ask: LookAtChanges,
    ) -> Result<ChangesSeen, Refusal> {
        let key = (peer.key, ask.mount);
        let image = {
            let state = self.state.lock();
            let mount = state.mounts.get(&key);
            let mount =
                mount.filter(|m| m.access != Access::Standby && *m.image.name() == ask.image);
            mount.map(|mount| Arc::clone(&mount.image))
        };
        let Some(image) = image else {
            let text = format!("this mount has no connection to {}", ask.image);
            return Err(Refusal::new(Code::OutOfOrder, text));
        };
        let seen = blocking(move || Ok(look(&image))).await;
        self.tidy(None).await;
        seen
    }
}

fn look(image: &Image) -> ChangesSeen {
    let size = image.device().size();
    let part = LOOK.max(size.div_ceil(LOOKS));
    let parts = (0..size.div_ceil(part)).map(|nth| nth * part..size.min((nth + 1) * part));
    let ranges = parts.flat_map(|part| image.changes_in(part));
    let (unit, changed) = in_units(ranges.map(|(range, _)| range), MAX_RUNS);
    ChangesSeen {
        digest: image.digest(),
        unit,
        changed,
    }
}

/// Ranges, in order, as at most so many runs of units that cover them.
fn in_units(ranges: impl Iterator<Item = Range<u64>>, most: usize) -> (u64, Vec<(u64, u64)>) {
    let (mut unit, mut runs) = (BLOCK_SIZE_U64, Vec::<(u64, u64)>::new());
    let add = |runs: &mut Vec<(u64, u64)>, first: u64, end: u64| match runs.last_mut() {
        Some((start, count)) if first <= *start + *count => {
            *count = (*count).max(end - *start);
        }
        _ => runs.push((first, end - first)),
    };
    for range in ranges {
        add(&mut runs, range.start / unit, range.end.div_ceil(unit));
        while runs.len() > most {
            unit *= 2;
            let finer = std::mem::take(&mut runs);
            for (first, count) in finer {
                add(&mut runs, first / 2, (first + count).div_ceil(2));
            }
        }
    }
    (unit, runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_runs_cover_all_that_was_written_and_little_else() {
        let mut rng = fastrand::Rng::with_seed(3);
        for round in 0..200 {
            let (mut at, mut ranges) = (0, Vec::new());
            for _ in 0..rng.u64(0..60) {
                let start = at + rng.u64(0..200_000);
                at = start + rng.u64(1..50_000);
                ranges.push(start..at);
            }
            let most = rng.usize(1..80);
            let (unit, runs) = in_units(ranges.iter().cloned(), most);
            assert!(runs.len() <= most, "round {round}");
            let of = |run: &(u64, u64)| run.0 * unit..(run.0 + run.1) * unit;
            for range in &ranges {
                let mut covering = runs.iter().map(of);
                assert!(covering.any(|run| run.start <= range.start && range.end <= run.end));
            }
            for pair in runs.windows(2) {
                assert!(pair[0].0 + pair[0].1 < pair[1].0, "round {round}");
            }
            if unit == BLOCK_SIZE_U64 {
                for run in runs.iter().map(of) {
                    let mut of_it = ranges.iter();
                    assert!(of_it.any(|r| r.start / unit * unit == run.start));
                }
            }
        }
    }
}
