//! Chooses the next job of a pool's thread. No threads, no clock.
//!
//! Reads and changes have separate threads, since a change may wait long: for a disk's sync, for an epoch being copied,
//! for another change. Mounts take turns, so that none waits for everything another has requested.

use std::collections::HashMap;
use std::hash::Hash;

use drover_net::group::Turns;

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A foreground read.
    Front,
    /// A background read.
    Back,
    /// A change to what later reads return.
    Change,
    /// Writes only this byte range of a device, from start to before end: disjoint writes may run concurrently.
    Write(u64, u64),
    /// Makes changes durable, which takes as long as the disk does.
    Sync,
}

impl Kind {
    /// Whether two jobs of a mount may run in any order, or concurrently.
    fn is_apart(self, other: Self) -> bool {
        match (self, other) {
            (Kind::Write(from, to), Kind::Write(other_from, other_to)) => {
                to <= other_from || other_to <= from
            }
            _ => false,
        }
    }
}

/// Numbers of threads, in total and per purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Threads that read.
    pub reading: usize,
    /// Maximum of those on background reads.
    pub back: usize,
    /// Maximum of those on reads of one mount: an image may be on a disk that hangs.
    pub reading_one: usize,
    /// Threads that make changes. One at a time per mount, except for writes.
    pub changing: usize,
    /// Another write of a mount that has one running starts only while fewer than this run: the other threads are for
    /// mounts that have none.
    pub writing: usize,
    /// Maximum of those on syncs.
    pub syncing: usize,
}

impl Limits {
    /// The limits of a pool configured with `threads` threads: one fewer for background reads, plus some that wait for
    /// disks.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(2);
        Self {
            reading: threads + 3,
            back: threads - 1,
            reading_one: threads + 1,
            changing: threads + 2,
            writing: (threads + 2) / 2,
            syncing: threads + 1,
        }
    }
}

/// Queued jobs, and the accounting of running ones.
#[derive(Debug)]
pub struct Schedule<K, J> {
    limits: Limits,
    front: Turns<K, J>,
    back: Turns<K, J>,
    changes: Turns<K, (Kind, J)>,
    /// Running reads, by mount.
    reads: HashMap<K, usize>,
    running_back: usize,
    /// Running changes, with their mounts.
    changing: Vec<(K, Kind)>,
    running_syncs: usize,
}

/// The accounting of a running job, to be passed to [`Schedule::done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running<K> {
    /// The mount it belongs to.
    pub mount: K,
    /// Its kind.
    pub kind: Kind,
}

impl<K: Copy + Eq + Hash, J> Schedule<K, J> {
    /// A schedule without jobs.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            front: Turns::default(),
            back: Turns::default(),
            changes: Turns::default(),
            reads: HashMap::new(),
            running_back: 0,
            changing: Vec::new(),
            running_syncs: 0,
        }
    }

    /// Queues a job.
    pub fn put(&mut self, mount: K, kind: Kind, job: J) {
        match kind {
            Kind::Front => self.front.put(mount, job),
            Kind::Back => self.back.put(mount, job),
            Kind::Change | Kind::Write(..) | Kind::Sync => self.changes.put(mount, (kind, job)),
        }
    }

    /// The next job for a reading thread.
    pub fn next_read(&mut self) -> Option<(Running<K>, J)> {
        let (reads, most) = (&self.reads, self.limits.reading_one);
        let may = |mount: &K, _: &J| reads.get(mount).is_none_or(|n| *n < most);
        let mut kind = Kind::Front;
        let mut taken = self.front.take(may);
        if taken.is_none() && self.running_back < self.limits.back {
            kind = Kind::Back;
            taken = self.back.take(may);
        }
        let (mount, job) = taken?;
        *self.reads.entry(mount).or_default() += 1;
        self.running_back += usize::from(kind == Kind::Back);
        Some((Running { mount, kind }, job))
    }

    /// The next job for a changing thread.
    pub fn next_change(&mut self) -> Option<(Running<K>, J)> {
        let (changing, syncs) = (&self.changing, self.running_syncs < self.limits.syncing);
        let more = changing.len() < self.limits.writing;
        let (mount, (kind, job)) = self.changes.take(|mount, (kind, _)| {
            let mut own = changing.iter().filter(|(other, _)| other == mount);
            let alone = own.clone().next().is_none();
            (alone || more && own.all(|(_, other)| kind.is_apart(*other)))
                && (syncs || *kind != Kind::Sync)
        })?;
        self.changing.push((mount, kind));
        self.running_syncs += usize::from(kind == Kind::Sync);
        Some((Running { mount, kind }, job))
    }

    /// Whether changes are queued, even if blocked by another one.
    pub fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// A job has finished.
    pub fn done(&mut self, Running { mount, kind }: Running<K>) {
        match kind {
            Kind::Front | Kind::Back => {
                self.running_back -= usize::from(kind == Kind::Back);
                if let Some(reads) = self.reads.get_mut(&mount) {
                    *reads -= 1;
                    if *reads == 0 {
                        self.reads.remove(&mount);
                    }
                }
            }
            Kind::Change | Kind::Write(..) | Kind::Sync => {
                self.running_syncs -= usize::from(kind == Kind::Sync);
                let at = self.changing.iter().position(|own| *own == (mount, kind));
                at.map(|at| self.changing.swap_remove(at));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        reading: 7,
        back: 3,
        reading_one: 5,
        changing: 6,
        writing: 3,
        syncing: 5,
    };

    fn schedule() -> Schedule<u32, u32> {
        Schedule::new(LIMITS)
    }

    #[test]
    fn there_is_always_a_thread_for_foreground_work() {
        for threads in 0..20 {
            let limits = Limits::new(threads);
            assert!(limits.back > 0 && limits.back < limits.reading);
            assert!(limits.reading_one < limits.reading && limits.reading_one > limits.back);
            assert!(limits.syncing < limits.changing && limits.writing < limits.changing);
        }
        assert_eq!(Limits::new(4), LIMITS);
    }

    #[test]
    fn mounts_take_turns_and_a_mounts_jobs_keep_their_order() {
        let mut schedule = schedule();
        for job in 0..4 {
            schedule.put(1, Kind::Front, 10 + job);
        }
        schedule.put(2, Kind::Front, 20);
        schedule.put(3, Kind::Front, 30);
        schedule.put(3, Kind::Front, 31);
        let mut order = Vec::new();
        while let Some((running, job)) = schedule.next_read() {
            schedule.done(running);
            order.push(job);
        }
        assert_eq!(order, [10, 20, 30, 11, 31, 12, 13]);
        assert!(schedule.reads.is_empty() && schedule.front.is_empty());
    }

    #[test]
    fn foreground_work_goes_first_and_background_work_leaves_it_room() {
        let mut schedule = schedule();
        for job in 0..9 {
            schedule.put(job, Kind::Back, job);
        }
        let back: Vec<_> = std::iter::from_fn(|| schedule.next_read()).collect();
        assert_eq!(back.len(), 3);
        schedule.put(1, Kind::Front, 100);
        let (front, job) = schedule.next_read().unwrap();
        assert_eq!((front.kind, job), (Kind::Front, 100));
        schedule.done(front);
        assert_eq!(schedule.next_read(), None);
        schedule.done(back[0].0);
        assert_eq!(schedule.next_read().unwrap().1, 3);
    }

    #[test]
    fn reads_of_one_mount_that_hang_leave_threads_to_the_others() {
        let mut schedule = schedule();
        for job in 0..50 {
            schedule.put(1, Kind::Front, job);
        }
        let hang: Vec<_> = std::iter::from_fn(|| schedule.next_read()).collect();
        assert_eq!(hang.len(), 5);
        schedule.put(2, Kind::Front, 200);
        schedule.put(2, Kind::Back, 201);
        let (read, job) = schedule.next_read().unwrap();
        assert_eq!(job, 200);
        schedule.done(read);
        assert_eq!(schedule.next_read().unwrap().1, 201);
    }

    #[test]
    fn changes_are_one_at_a_time_for_a_mount_and_no_read_waits_for_them() {
        let mut schedule = schedule();
        for job in 0..5 {
            schedule.put(1, Kind::Change, job);
        }
        schedule.put(1, Kind::Sync, 5);
        schedule.put(2, Kind::Change, 20);
        schedule.put(1, Kind::Front, 100);
        let (first, job) = schedule.next_change().unwrap();
        assert_eq!(job, 0);
        assert_eq!(schedule.next_change().unwrap().1, 20);
        assert_eq!(schedule.next_change(), None);
        assert_eq!(schedule.next_read().unwrap().1, 100);
        schedule.done(first);
        for expected in 1..=5 {
            let (running, job) = schedule.next_change().unwrap();
            assert_eq!(job, expected, "in their order");
            schedule.done(running);
        }
    }

    #[test]
    fn writes_of_a_mount_that_have_no_byte_in_common_are_done_at_once_and_a_sync_waits_for_them() {
        let mut schedule = schedule();
        schedule.put(1, Kind::Write(0, 8192), 0);
        schedule.put(1, Kind::Write(8192, 9000), 1);
        schedule.put(1, Kind::Write(4096, 5000), 2);
        schedule.put(1, Kind::Write(20_000, 20_001), 3);
        schedule.put(1, Kind::Sync, 4);
        schedule.put(1, Kind::Write(30_000, 40_000), 5);
        let (first, job) = schedule.next_change().unwrap();
        assert_eq!(job, 0);
        let (second, job) = schedule.next_change().unwrap();
        assert_eq!(job, 1);
        assert_eq!(schedule.next_change(), None, "the third overlaps the first");
        schedule.done(second);
        assert_eq!(schedule.next_change(), None);
        schedule.done(first);
        let (third, job) = schedule.next_change().unwrap();
        assert_eq!(job, 2);
        let (fourth, job) = schedule.next_change().unwrap();
        assert_eq!(job, 3);
        assert_eq!(schedule.next_change(), None, "a sync is alone");
        schedule.done(third);
        assert_eq!(schedule.next_change(), None, "a sync is alone");
        schedule.done(fourth);
        let (sync, job) = schedule.next_change().unwrap();
        assert_eq!(job, 4);
        assert_eq!(schedule.next_change(), None, "nothing overtakes a sync");
        schedule.done(sync);
        assert_eq!(schedule.next_change().unwrap().1, 5);
    }

    #[test]
    fn writes_of_one_mount_that_hang_leave_threads_to_the_others() {
        let mut schedule = schedule();
        for n in 0..50 {
            schedule.put(1, Kind::Write(n * 10, n * 10 + 10), 0);
        }
        let hang: Vec<_> = std::iter::from_fn(|| schedule.next_change()).collect();
        assert_eq!(hang.len(), LIMITS.writing);
        // The others still get one thread each, as before.
        for mount in 2..5 {
            schedule.put(mount, Kind::Write(0, 10), mount);
            schedule.put(mount, Kind::Write(10, 20), mount);
            assert_eq!(schedule.next_change().unwrap().1, mount);
        }
        assert_eq!(schedule.next_change(), None);
    }

    #[test]
    fn syncs_leave_a_thread_for_changes() {
        let mut schedule = schedule();
        for mount in 0..9 {
            schedule.put(mount, Kind::Sync, mount);
        }
        let syncs: Vec<_> = std::iter::from_fn(|| schedule.next_change()).collect();
        assert_eq!(syncs.len(), 5);
        schedule.put(20, Kind::Change, 20);
        assert_eq!(schedule.next_change().unwrap().1, 20);
        schedule.done(syncs[0].0);
        assert_eq!(schedule.next_change().unwrap().1, 5);
    }
}
