//! Limits on requests in flight, by count and by bytes.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// Maximum changes parked while waiting for a network, in addition to the requests in flight; only their bytes count
/// against the common limit.
const MAX_PARKED: usize = 4096;

/// Limits the number and the bytes of requests in flight: from the moment a request is taken from a connection or the
/// kernel until its reply is being sent.
pub(crate) struct Budget {
    used: Mutex<Used>,
    freed: Condvar,
    requests: usize,
    bytes: usize,
}

#[derive(Default)]
struct Used {
    requests: usize,
    parked: usize,
    bytes: usize,
}

impl Budget {
    pub(crate) fn new(requests: usize, bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            used: Mutex::default(),
            freed: Condvar::new(),
            requests: requests.max(1),
            bytes,
        })
    }

    fn take(self: &Arc<Self>, used: &mut Used, bytes: usize) -> Option<Permit> {
        // A single request always fits, however long.
        let fits = used.requests < self.requests && used.bytes + bytes <= self.bytes;
        if used.requests + used.parked > 0 && !fits {
            return None;
        }
        used.requests += 1;
        used.bytes += bytes;
        Some(Permit {
            budget: Arc::clone(self),
            bytes,
            parked: false,
        })
    }

    /// Admits a request if there is room.
    pub(crate) fn try_admit(self: &Arc<Self>, bytes: usize) -> Option<Permit> {
        self.take(&mut self.used.lock(), bytes)
    }

    /// Waits for room. Every permit is returned when its request is answered or dropped, so this ends when the device
    /// completes or fails one request.
    pub(crate) fn admit(self: &Arc<Self>, bytes: usize) -> Permit {
        let mut used = self.used.lock();
        loop {
            if let Some(permit) = self.take(&mut used, bytes) {
                return permit;
            }
            self.freed.wait(&mut used);
        }
    }

    /// Waits until nothing is in flight.
    pub(crate) fn drain(&self) {
        let mut used = self.used.lock();
        while used.requests + used.parked > 0 {
            self.freed.wait(&mut used);
        }
    }
}

/// Permission for one request in flight.
pub(crate) struct Permit {
    budget: Arc<Budget>,
    bytes: usize,
    parked: bool,
}

impl Permit {
    /// Marks the request as possibly waiting for long: it stops counting against the number in flight, so that later
    /// requests are still read.
    pub(crate) fn park(&mut self) {
        let mut used = self.budget.used.lock();
        if !self.parked && used.parked < MAX_PARKED {
            used.parked += 1;
            used.requests -= 1;
            self.parked = true;
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.budget.used.lock();
        match self.parked {
            true => used.parked -= 1,
            false => used.requests -= 1,
        }
        used.bytes -= self.bytes;
        drop(used);
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_counts_requests_and_bytes_and_lets_one_alone_pass() {
        let budget = Budget::new(3, 100);
        let long = budget.try_admit(1000).expect("one alone");
        assert!(budget.try_admit(0).is_none(), "more than the bytes");
        drop(long);
        let some: Vec<Permit> = (0..3).filter_map(|_| budget.try_admit(30)).collect();
        assert_eq!(some.len(), 3);
        assert!(budget.try_admit(1).is_none(), "more than the requests");
        let waiting = {
            let budget = Arc::clone(&budget);
            std::thread::spawn(move || drop(budget.admit(100)))
        };
        drop(some);
        waiting.join().unwrap();
        budget.drain();
    }

    #[test]
    fn what_waits_for_long_keeps_its_bytes_but_no_place_among_the_rest() {
        let budget = Budget::new(2, 100);
        let mut long: Vec<Permit> = (0..9)
            .map(|_| {
                let mut permit = budget.try_admit(10).expect("a place");
                permit.park();
                permit
            })
            .collect();
        let last = budget.try_admit(10).expect("a place");
        assert!(budget.try_admit(1).is_none(), "more than the bytes");
        drop((last, long.pop()));
        let two: Vec<Permit> = (0..3).filter_map(|_| budget.try_admit(1)).collect();
        assert_eq!(two.len(), 2);
        drop((two, long));
        budget.drain();
        let many: Vec<Permit> = (0..MAX_PARKED + 9)
            .map_while(|_| {
                let mut permit = budget.try_admit(0)?;
                permit.park();
                Some(permit)
            })
            .collect();
        assert_eq!(many.len(), MAX_PARKED + 2);
    }
}
