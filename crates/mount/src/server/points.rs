//! How often mounts that stand by may end generations of an image: only so many are told apart
//! (`docs/format/generations.md`), and those that the writer and its copies need must not be used up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use drover_net::{Code, PeerKey, Refusal};
use parking_lot::Mutex;

/// How many points the mounts of one site get at once. A mount needs one when it begins to stand by; processes that are killed
/// and begin again need more.
const MAX_POINTS: u32 = 32;

/// How often they get another one.
const POINT_EVERY: Duration = Duration::from_secs(60);

/// Points that were given, by site. A site is forgotten when it may have all of them again.
#[derive(Default)]
pub(super) struct Points(Mutex<BTreeMap<PeerKey, Taken>>);

struct Taken {
    points: u32,
    /// When the first of them stops to count.
    until: Instant,
}

impl Taken {
    /// Forgets those that do not count any more.
    fn at(&mut self, now: Instant) {
        while self.points > 0 && self.until <= now {
            self.points -= 1;
            self.until += POINT_EVERY;
        }
    }
}

impl Points {
    /// Counts a point for a mount of `peer`.
    ///
    /// # Errors
    /// [`Code::Busy`]: its site has had too many.
    pub(super) fn take(&self, peer: PeerKey, now: Instant) -> Result<(), Refusal> {
        let mut taken = self.0.lock();
        taken.retain(|_, taken| {
            taken.at(now);
            taken.points > 0
        });
        let taken = taken.entry(peer).or_insert(Taken {
            points: 0,
            until: now + POINT_EVERY,
        });
        if taken.points == MAX_POINTS {
            let text =
                "mounts of your site have begun to stand by too often: try again in a minute";
            return Err(Refusal::new(Code::Busy, text));
        }
        taken.points += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_gets_so_many_points_and_then_one_a_minute() {
        let (points, began) = (Points::default(), Instant::now());
        let (one, other) = (PeerKey([1; 32]), PeerKey([2; 32]));
        let take = |peer, after| {
            let taken = points.take(peer, began + Duration::from_secs(after));
            taken.map_err(|refusal| refusal.code)
        };
        for _ in 0..MAX_POINTS {
            take(one, 0).unwrap();
        }
        assert_eq!(take(one, 59), Err(Code::Busy));
        take(other, 59).unwrap();
        take(one, 60).unwrap();
        assert_eq!(take(one, 61), Err(Code::Busy));
        let day = 24 * 3600;
        assert_eq!((0..100).filter(|_| take(one, day).is_ok()).count(), 32);
        assert_eq!(points.0.lock().len(), 1, "the other is forgotten");
    }
}
