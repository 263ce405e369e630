//! Images that are still arriving: requests wait for what they read of them, without a thread.

use std::ops::Range;
use std::pin::Pin;

/// An image that is still arriving.
pub trait Arriving: Send + Sync {
    /// Whether all of it is here, from now on.
    fn is_complete(&self) -> bool;

    /// Waits until a range of the image can be read; `None` when it can be now. The request that needs it is executed then.
    fn wait(&self, offset: u64, length: u64) -> Option<Arrival>;
}

/// Completes when a range has arrived. May be dropped before.
pub type Arrival = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Waits for the ranges `(offset, length)` of an image, as far as they are in it and were not `written` over; `None` when they are
/// here.
pub(super) fn arrival(
    arriving: &dyn Arriving,
    size: u64,
    reads: Vec<(u64, u64)>,
    written: impl Fn(Range<u64>) -> Vec<(Range<u64>, bool)>,
) -> Option<Arrival> {
    if arriving.is_complete() {
        return None;
    }
    let mut waits = Vec::new();
    for (offset, length) in reads {
        let end = offset.saturating_add(length).min(size);
        let mut at = offset.min(end);
        let written = written(at..end).into_iter().map(|(part, _)| part);
        for next in written.chain(std::iter::once(end..end)) {
            if next.start > at {
                waits.extend(arriving.wait(at, next.start - at));
            }
            at = at.max(next.end);
        }
    }
    (!waits.is_empty()).then(|| -> Arrival {
        Box::pin(async move {
            for wait in waits {
                wait.await;
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Nothing(Mutex<Vec<(u64, u64)>>);

    impl Arriving for Nothing {
        fn is_complete(&self) -> bool {
            false
        }

        fn wait(&self, offset: u64, length: u64) -> Option<Arrival> {
            self.0.lock().unwrap().push((offset, length));
            Some(Box::pin(std::future::ready(())))
        }
    }

    #[test]
    fn what_was_written_over_an_image_is_not_waited_for() {
        let waits = |reads: Vec<(u64, u64)>, written: Vec<Range<u64>>| {
            let nothing = Nothing::default();
            let parts = |range: Range<u64>| {
                let inside = |w: &Range<u64>| w.start.max(range.start)..w.end.min(range.end);
                let parts = written.iter().map(inside).filter(|part| !part.is_empty());
                parts.map(|part| (part, false)).collect()
            };
            let waits = arrival(&nothing, 100, reads, parts).is_some();
            let asked = nothing.0.into_inner().unwrap();
            assert_eq!(waits, !asked.is_empty());
            asked
        };
        assert_eq!(waits(vec![(10, 20)], vec![]), [(10, 20)]);
        assert_eq!(waits(vec![(10, 20)], vec![0..25, 25..50]), []);
        assert_eq!(
            waits(vec![(10, 20)], vec![12..14, 20..90]),
            [(10, 2), (14, 6)]
        );
        assert_eq!(waits(vec![(90, 20), (0, 1)], vec![]), [(90, 10), (0, 1)]);
        assert_eq!(waits(vec![(200, 20)], vec![]), []);
    }
}
