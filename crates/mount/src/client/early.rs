//! Chunks requested together with the open, before the local side has requested any: kept until it does, since it
//! accepts only chunks it has requested.

use std::collections::HashMap;

use drover_device::remote::{Chunks, Fetched};

/// Maximum chunks requested with the open...
pub const MAX_EARLY: usize = 8;

/// ...and their bytes; one is always allowed.
pub const MAX_EARLY_BYTES: u64 = 512 << 10;

/// Chunks that the local side has not requested: the contents of those that arrived, none for those in flight.
#[derive(Debug, Default)]
pub struct EarlyChunks(HashMap<u64, Option<Fetched>>);

/// The state of a run that the local side requests.
#[derive(Debug, Default)]
pub struct Claimed {
    /// Chunks that have arrived.
    pub here: Vec<Fetched>,
    /// Runs that are in flight.
    pub coming: Vec<Chunks>,
    /// The rest.
    pub missing: Vec<Chunks>,
}

impl EarlyChunks {
    /// Starts with these chunks in flight.
    pub fn new(chunks: impl IntoIterator<Item = u64>) -> Self {
        Self(chunks.into_iter().map(|index| (index, None)).collect())
    }

    /// Keeps an arriving chunk, or returns it if the local side has requested it.
    pub fn keep(&mut self, chunk: Fetched) -> Option<Fetched> {
        match self.0.get_mut(&chunk.index) {
            Some(kept) => {
                *kept = Some(chunk);
                None
            }
            None => Some(chunk),
        }
    }

    /// The local side requests a run: its chunks are delivered from now on.
    pub fn claim(&mut self, run: Chunks) -> Claimed {
        let mut claimed = Claimed::default();
        if self.0.is_empty() {
            claimed.missing.push(run);
            return claimed;
        }
        for index in run.first..run.end() {
            let runs = match self.0.remove(&index) {
                Some(Some(chunk)) => {
                    claimed.here.push(chunk);
                    continue;
                }
                Some(None) => &mut claimed.coming,
                None => &mut claimed.missing,
            };
            match runs.last_mut() {
                Some(last) if last.end() == index => last.count += 1,
                _ => runs.push(one(index)),
            }
        }
        claimed
    }

    /// A fetch of a run has failed.
    pub fn forget(&mut self, run: Chunks) {
        self.0
            .retain(|index, _| !(run.first..run.end()).contains(index));
    }

    /// The device is about to change, so unclaimed chunks may become stale. Returns the chunks in flight.
    pub fn drop_all(&mut self) -> Vec<Chunks> {
        let under_way = self.0.drain().filter(|(_, kept)| kept.is_none());
        under_way.map(|(index, _)| one(index)).collect()
    }
}

/// A run of one chunk.
pub fn one(first: u64) -> Chunks {
    Chunks { first, count: 1 }
}

#[cfg(test)]
mod tests {
    use drover_device::remote::Content;

    use super::*;

    fn zero(index: u64) -> Fetched {
        let content = Content::Zero;
        Fetched { index, content }
    }

    #[test]
    fn early_chunks_are_kept_until_they_are_requested() {
        let mut early = EarlyChunks::new([0, 1, 5]);
        assert!(early.keep(zero(0)).is_none());
        assert_eq!(early.keep(zero(9)).unwrap().index, 9, "not an early one");
        let claimed = early.claim(Chunks { first: 0, count: 4 });
        assert_eq!(claimed.here.len(), 1);
        assert_eq!(claimed.here[0].index, 0);
        assert_eq!(claimed.coming, [one(1)]);
        assert_eq!(claimed.missing, [Chunks { first: 2, count: 2 }]);
        assert_eq!(early.keep(zero(1)).unwrap().index, 1, "asked for by now");
        let again = early.claim(Chunks { first: 0, count: 2 });
        assert_eq!(again.missing, [Chunks { first: 0, count: 2 }]);
    }

    #[test]
    fn failed_or_possibly_stale_chunks_are_requested_again() {
        let mut early = EarlyChunks::new([0, 1, 2]);
        assert!(early.keep(zero(2)).is_none());
        early.forget(one(0));
        assert_eq!(early.claim(one(0)).missing, [one(0)]);
        assert_eq!(early.drop_all(), [one(1)]);
        assert_eq!(early.claim(one(2)).missing, [one(2)]);
        assert_eq!(early.keep(zero(1)).unwrap().index, 1);
    }
}
