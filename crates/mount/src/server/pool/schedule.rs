//! Chooses the next job of a pool's thread. No threads, no clock.
//!
//! Reads and changes have separate threads, since a change may wait long: for a disk's sync, for an epoch being copied,
//! for another change. Peers get as much of the threads' time as each other, however many mounts and requests they have:
//! a job counts by its bytes when it starts, and by the time that it took when it has finished. The mounts of a peer take
//! turns.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use drover_net::group::{Accounts, Turns};

#[cfg(test)]
mod tests;

/// What a job counts for at least, in nanoseconds. A byte counts for one.
const MIN_COST: u64 = 20_000;

/// How far a peer may fall behind by jobs that took long, in nanoseconds.
const MAX_DEBT: u64 = 10_000_000_000;

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
    /// Maximum of those on reads of one peer.
    pub reading_peer: usize,
    /// Threads that make changes. One at a time per mount, except for writes.
    pub changing: usize,
    /// Maximum of those on changes of one peer.
    pub changing_peer: usize,
    /// Another write of a mount that has one running starts only while fewer than this run: the other threads are for
    /// mounts that have none.
    pub writing: usize,
    /// Maximum of those on syncs.
    pub syncing: usize,
    /// Maximum of those on syncs of one peer.
    pub syncing_peer: usize,
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
            reading_peer: threads + 2,
            changing: threads + 2,
            changing_peer: threads + 1,
            writing: (threads + 2) / 2,
            syncing: threads + 1,
            syncing_peer: threads,
        }
    }
}

/// Beyond this many peers, those that have nothing queued are forgotten.
const MAX_IDLE: usize = 64;

/// Queued jobs, and the accounting of running ones. `P` is a peer, `M` one of its mounts.
#[derive(Debug)]
pub struct Schedule<P, M, J> {
    limits: Limits,
    reads: HashMap<P, Reads<M, J>>,
    changes: HashMap<P, Turns<M, (Kind, Queued<J>)>>,
    read_time: Accounts<P>,
    change_time: Accounts<P>,
    /// Running reads, by mount and by peer.
    reading: HashMap<(P, M), usize>,
    reading_peers: HashMap<P, usize>,
    running_back: usize,
    /// Running changes, with their mounts.
    changing: Vec<((P, M), Kind)>,
    running_syncs: usize,
}

#[derive(Debug)]
struct Queued<J> {
    cost: u64,
    job: J,
}

#[derive(Debug)]
struct Reads<M, J> {
    front: Turns<M, Queued<J>>,
    back: Turns<M, Queued<J>>,
}

impl<M, J> Default for Reads<M, J> {
    fn default() -> Self {
        Self {
            front: Turns::default(),
            back: Turns::default(),
        }
    }
}

impl<M: Copy + Eq + Hash, J> Reads<M, J> {
    fn is_empty(&self) -> bool {
        self.front.is_empty() && self.back.is_empty()
    }
}

/// The accounting of a running job, to be passed to [`Schedule::done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running<P, M> {
    /// The peer and the mount it belongs to.
    pub owner: (P, M),
    /// Its kind.
    pub kind: Kind,
    /// What it was counted for so far.
    cost: u64,
}

impl<P: Copy + Eq + Hash, M: Copy + Eq + Hash, J> Schedule<P, M, J> {
    /// A schedule without jobs.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            reads: HashMap::new(),
            changes: HashMap::new(),
            read_time: Accounts::new(MAX_DEBT),
            change_time: Accounts::new(MAX_DEBT),
            reading: HashMap::new(),
            reading_peers: HashMap::new(),
            running_back: 0,
            changing: Vec::new(),
            running_syncs: 0,
        }
    }

    /// Queues a job that reads or writes so many bytes.
    pub fn put(&mut self, (peer, mount): (P, M), kind: Kind, bytes: u64, job: J) {
        let cost = bytes.max(MIN_COST);
        let queued = Queued { cost, job };
        match kind {
            Kind::Front | Kind::Back => {
                if self.reads.len() > MAX_IDLE {
                    self.reads.retain(|_, reads| !reads.is_empty());
                }
                let reads = self.reads.entry(peer).or_default();
                if reads.is_empty() {
                    self.read_time.enter(peer);
                }
                match kind {
                    Kind::Front => reads.front.put(mount, queued),
                    _ => reads.back.put(mount, queued),
                }
            }
            Kind::Change | Kind::Write(..) | Kind::Sync => {
                if self.changes.len() > MAX_IDLE {
                    self.changes.retain(|_, changes| !changes.is_empty());
                }
                let changes = self.changes.entry(peer).or_default();
                if changes.is_empty() {
                    self.change_time.enter(peer);
                }
                changes.put(mount, (kind, queued));
            }
        }
    }

    /// The next job for a reading thread.
    pub fn next_read(&mut self) -> Option<(Running<P, M>, J)> {
        let (by_mount, by_peer, limits) = (&self.reading, &self.reading_peers, self.limits);
        let may = |peer: &P, mount: &M| {
            let below = |running: Option<&usize>, limit| running.is_none_or(|n| *n < limit);
            below(by_peer.get(peer), limits.reading_peer)
                && below(by_mount.get(&(*peer, *mount)), limits.reading_one)
        };
        let back = self.running_back < limits.back;
        let ready = self.reads.iter().filter(|(peer, reads)| {
            reads.front.has(|mount, _| may(peer, mount))
                || back && reads.back.has(|mount, _| may(peer, mount))
        });
        let peer = self.read_time.first(ready.map(|(peer, _)| *peer))?;
        let reads = self.reads.get_mut(&peer)?;
        let mut kind = Kind::Front;
        let mut taken = reads.front.take(|mount, _| may(&peer, mount));
        if taken.is_none() && back {
            kind = Kind::Back;
            taken = reads.back.take(|mount, _| may(&peer, mount));
        }
        let (mount, Queued { cost, job }) = taken?;
        self.read_time.serve(peer, cost);
        let owner = (peer, mount);
        *self.reading.entry(owner).or_default() += 1;
        *self.reading_peers.entry(peer).or_default() += 1;
        self.running_back += usize::from(kind == Kind::Back);
        Some((Running { owner, kind, cost }, job))
    }

    /// The next job for a changing thread.
    pub fn next_change(&mut self) -> Option<(Running<P, M>, J)> {
        let (changing, limits) = (&self.changing, self.limits);
        let syncs = self.running_syncs < limits.syncing;
        let more = changing.len() < limits.writing;
        let may = |peer: &P, mount: &M, kind: Kind| {
            let of_peer = changing.iter().filter(|((other, _), _)| other == peer);
            let mut own = of_peer.clone().filter(|((_, other), _)| other == mount);
            let alone = own.clone().next().is_none();
            let syncs_of_peer = of_peer.clone().filter(|(_, other)| *other == Kind::Sync);
            (alone || more && own.all(|(_, other)| kind.is_apart(*other)))
                && of_peer.count() < limits.changing_peer
                && (kind != Kind::Sync || syncs && syncs_of_peer.count() < limits.syncing_peer)
        };
        let ready = self
            .changes
            .iter()
            .filter(|(peer, own)| own.has(|mount, (kind, _)| may(peer, mount, *kind)));
        let peer = self.change_time.first(ready.map(|(peer, _)| *peer))?;
        let own = self.changes.get_mut(&peer)?;
        let (mount, (kind, Queued { cost, job })) =
            own.take(|mount, (kind, _)| may(&peer, mount, *kind))?;
        self.change_time.serve(peer, cost);
        let owner = (peer, mount);
        self.changing.push((owner, kind));
        self.running_syncs += usize::from(kind == Kind::Sync);
        Some((Running { owner, kind, cost }, job))
    }

    /// Whether changes are queued, even if blocked by another one.
    pub fn has_changes(&self) -> bool {
        self.changes.values().any(|changes| !changes.is_empty())
    }

    /// A job has finished, and took so long.
    pub fn done(&mut self, running: Running<P, M>, took: Duration) {
        let Running { owner, kind, cost } = running;
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let more = took.saturating_sub(cost);
        match kind {
            Kind::Front | Kind::Back => {
                self.read_time.charge(&owner.0, more);
                self.running_back -= usize::from(kind == Kind::Back);
                count_down(&mut self.reading, &owner);
                count_down(&mut self.reading_peers, &owner.0);
            }
            Kind::Change | Kind::Write(..) | Kind::Sync => {
                self.change_time.charge(&owner.0, more);
                self.running_syncs -= usize::from(kind == Kind::Sync);
                let at = self.changing.iter().position(|own| *own == (owner, kind));
                at.map(|at| self.changing.swap_remove(at));
            }
        }
    }
}

fn count_down<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}
