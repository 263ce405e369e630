//! The order of the changes of a direct mount.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The changes that are being made, and those that wait. The changes of overlapping ranges wait for each other, so that
/// the order of their replies is that in which they were made: first come, first served.
pub struct Changes {
    order: Mutex<Order>,
    freed: Condvar,
    /// Bytes of memory beyond which they wait for each other.
    most: u64,
}

#[derive(Default)]
struct Order {
    /// How many there ever were.
    begun: u64,
    changes: VecDeque<Change>,
    /// When one has failed because the site did not answer, last.
    failed: Option<Instant>,
}

struct Change {
    number: u64,
    range: Range<u64>,
    bytes: u64,
}

impl Order {
    /// Whether a change may be made, after those that came before it.
    fn may(&self, number: u64, most: u64) -> bool {
        let Some(own) = self.changes.iter().find(|change| change.number == number) else {
            return true;
        };
        let mut before = self.changes.iter().take_while(|c| c.number < number);
        let bytes: u64 = before.clone().map(|change| change.bytes).sum();
        before.all(|c| c.range.end <= own.range.start || own.range.end <= c.range.start)
            && (bytes == 0 || bytes + own.bytes <= most)
    }
}

impl Changes {
    /// None yet; they wait for each other beyond so many bytes of memory.
    pub fn new(most: u64) -> Self {
        Self {
            order: Mutex::default(),
            freed: Condvar::new(),
            most,
        }
    }

    /// Waits until a change of a range that takes so many bytes of memory may be made.
    pub fn begin(&self, range: Range<u64>, bytes: u64) -> Changing<'_> {
        let begun = Instant::now();
        let mut order = self.order.lock();
        let number = order.begun;
        order.begun += 1;
        order.changes.push_back(Change {
            number,
            range,
            bytes,
        });
        while !order.may(number, self.most) {
            self.freed.wait(&mut order);
        }
        let failed = order.failed.is_some_and(|failed| failed >= begun);
        Changing {
            changes: self,
            number,
            waited: if failed {
                begun.elapsed()
            } else {
                Duration::ZERO
            },
        }
    }
}

/// A change that is being made.
pub struct Changing<'a> {
    changes: &'a Changes,
    number: u64,
    /// How long it has waited for others of which one failed, because the site did not answer. It need not wait as long
    /// once more.
    pub waited: Duration,
}

impl Changing<'_> {
    /// Bytes of memory of the changes up to this one that are being made.
    pub fn bytes(&self) -> u64 {
        let order = self.changes.order.lock();
        let until = order.changes.iter().take_while(|c| c.number <= self.number);
        until.map(|change| change.bytes).sum()
    }

    /// The site did not answer.
    pub fn failed(&self) {
        self.changes.order.lock().failed = Some(Instant::now());
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let mut order = self.changes.order.lock();
        order.changes.retain(|change| change.number != self.number);
        drop(order);
        self.changes.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    /// Until a number of changes has come.
    fn until(changes: &Changes, begun: u64) {
        while changes.order.lock().begun < begun {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn overlapping_changes_are_made_in_the_order_in_which_they_came() {
        let changes = Changes::new(100);
        let made = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let first = changes.begin(0..10, 1);
            let ranges = [0..20, 15..30, 25..40, 5..35];
            for (n, range) in ranges.into_iter().enumerate() {
                let (changes, made) = (&changes, &made);
                scope.spawn(move || {
                    let _changing = changes.begin(range, 1);
                    made.lock().push(n);
                });
                until(changes, n as u64 + 2);
            }
            // Even one that overlaps only a change that waits.
            std::thread::sleep(Duration::from_millis(50));
            assert!(made.lock().is_empty());
            // Another range is free.
            drop(changes.begin(100..110, 1));
            drop(first);
        });
        assert_eq!(*made.lock(), [0, 1, 2, 3]);
        assert!(changes.order.lock().changes.is_empty());
    }

    #[test]
    fn changes_in_progress_take_bounded_memory() {
        let changes = Changes::new(100);
        let (most, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for n in 0..8 {
                let (changes, most, done) = (&changes, &most, &done);
                scope.spawn(move || {
                    // The longest alone.
                    let bytes = if n == 5 { 300 } else { 50 };
                    let _changing = changes.begin(n * 10..n * 10 + 10, bytes);
                    let now = most.fetch_add(1, SeqCst) + 1;
                    assert!(now <= if n == 5 { 1 } else { 2 });
                    std::thread::sleep(Duration::from_millis(5));
                    most.fetch_sub(1, SeqCst);
                    done.fetch_add(1, SeqCst);
                });
            }
        });
        assert_eq!(done.into_inner(), 8);
    }

    #[test]
    fn those_that_waited_for_a_change_that_failed_have_waited() {
        let changes = Changes::new(100);
        std::thread::scope(|scope| {
            let first = changes.begin(0..10, 1);
            let second = scope.spawn(|| changes.begin(0..10, 1).waited);
            until(&changes, 2);
            std::thread::sleep(Duration::from_millis(30));
            first.failed();
            drop(first);
            assert!(second.join().unwrap() >= Duration::from_millis(30));
            // One that came later has not, nor one that waited for a change that was made.
            let third = changes.begin(0..10, 1);
            assert_eq!(third.waited, Duration::ZERO);
            let fourth = scope.spawn(|| changes.begin(0..10, 1).waited);
            until(&changes, 4);
            drop(third);
            assert_eq!(fourth.join().unwrap(), Duration::ZERO);
        });
    }
}
