//! Since when mounts that hold a write lease have had no connection: a lease with a term may be taken when that is longer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use drover_net::PeerKey;
use drover_store::lease::MountId;
use parking_lot::Mutex;

/// The mounts without a connection, as far as this process knows: of all servers of a site. The clock is monotonic, and
/// stands still while the host sleeps. At most one mount per image is here.
#[derive(Debug)]
pub struct Absences {
    /// The time of those that have not connected since.
    started: Instant,
    left: Mutex<HashMap<(PeerKey, MountId), Instant>>,
}

impl Default for Absences {
    fn default() -> Absences {
        Absences::new(Instant::now())
    }
}

impl Absences {
    /// A site that begins to accept connections.
    #[must_use]
    pub fn new(now: Instant) -> Absences {
        Absences {
            started: now,
            left: Mutex::default(),
        }
    }

    /// The last connection of a mount has ended.
    pub fn left(&self, mount: (PeerKey, MountId), now: Instant) {
        self.left.lock().insert(mount, now);
    }

    /// A mount has a connection again, or no lease any more.
    pub fn forget(&self, mount: &(PeerKey, MountId)) {
        self.left.lock().remove(mount);
    }

    /// How long a mount without a connection, which holds a lease, has had none; the time before the site was started does
    /// not count.
    #[must_use]
    pub fn time(&self, mount: &(PeerKey, MountId), now: Instant) -> Duration {
        let left = self.left.lock().get(mount).copied();
        now.saturating_duration_since(left.unwrap_or(self.started))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_from_the_last_connection_or_the_start_of_the_site() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let absences = Absences::new(start);
        let mount = (PeerKey([1; 32]), MountId([1; 16]));
        let other = (PeerKey([1; 32]), MountId([2; 16]));
        let time = |mount, seconds| absences.time(mount, at(seconds)).as_secs();
        assert_eq!(time(&mount, 100), 100, "it has not been here since");
        absences.left(mount, at(150));
        assert_eq!((time(&mount, 150), time(&mount, 250)), (0, 100));
        assert_eq!(time(&other, 250), 250);
        absences.left(mount, at(300));
        assert_eq!(time(&mount, 301), 1);
        assert_eq!(time(&mount, 200), 0, "a clock that stood still");
        absences.forget(&mount);
        assert!(absences.left.lock().is_empty());
    }
}
