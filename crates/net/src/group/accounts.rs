//! Fair shares of threads between peers, by what each has used.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;

/// Beyond this many peers, those that owe nothing are forgotten.
const MAX_IDLE: usize = 1024;

/// What each of several peers has used of something that they share, such as the time of a pool's threads: whoever has
/// used least goes first (start-time fair queueing). A peer that had nothing to do starts where the others are: it saves
/// nothing up, and what it used beyond its share is not forgotten.
///
/// Nothing here reads a clock: the unit of use is the caller's.
#[derive(Debug)]
pub struct Accounts<P> {
    by_peer: HashMap<P, Account>,
    /// What had been used by the peer that was served last, before that.
    level: u64,
    /// Numbers the turns, so that of peers that have used as much the one goes first that has waited longest.
    turn: u64,
    /// How far a peer may fall behind.
    max_debt: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Account {
    used: u64,
    turn: u64,
}

impl<P: Copy + Eq + Hash> Accounts<P> {
    /// Nobody has used anything. A peer that used `max_debt` more than the others owes no more.
    #[must_use]
    pub fn new(max_debt: u64) -> Self {
        Self {
            by_peer: HashMap::new(),
            level: 0,
            turn: 0,
            max_debt,
        }
    }

    /// A peer for which nothing waited has something to do.
    pub fn enter(&mut self, peer: P) {
        let level = self.level;
        if self.by_peer.len() >= MAX_IDLE {
            self.by_peer.retain(|_, account| account.used > level);
        }
        self.turn += 1;
        let account = self.by_peer.entry(peer).or_default();
        account.used = account.used.max(level);
        account.turn = self.turn;
    }

    /// The place of a peer in the order: the least goes first.
    #[must_use]
    pub fn place(&self, peer: &P) -> (u64, u64) {
        let account = self.by_peer.get(peer).copied().unwrap_or_default();
        (account.used.max(self.level), account.turn)
    }

    /// Of these peers, the one that goes first.
    #[must_use]
    pub fn first(&self, peers: impl Iterator<Item = P>) -> Option<P> {
        peers.max_by_key(|peer| Reverse(self.place(peer)))
    }

    /// A peer is served, and uses at least this much.
    pub fn serve(&mut self, peer: P, least: u64) {
        self.turn += 1;
        let level = self.level;
        let account = self.by_peer.entry(peer).or_default();
        account.used = account.used.max(level);
        self.level = account.used;
        account.used = account.used.saturating_add(least);
        account.turn = self.turn;
    }

    /// What a peer was served took this much more than was counted then.
    pub fn charge(&mut self, peer: &P, more: u64) {
        let most = self.level.saturating_add(self.max_debt);
        if let Some(account) = self.by_peer.get_mut(peer) {
            let used = account.used.saturating_add(more).min(most);
            account.used = account.used.max(used);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whoever_used_less_goes_first_and_nobody_saves_up() {
        let mut accounts = Accounts::new(1000);
        ['a', 'b'].into_iter().for_each(|peer| accounts.enter(peer));
        let first = |accounts: &Accounts<char>| accounts.first(['a', 'b', 'c'].into_iter().take(2));
        assert_eq!(first(&accounts), Some('a'), "who came first");
        accounts.serve('a', 10);
        accounts.charge(&'a', 90);
        for _ in 0..10 {
            assert_eq!(first(&accounts), Some('b'));
            accounts.serve('b', 10);
        }
        assert_eq!(first(&accounts), Some('a'), "both have used as much");
        // Who comes late starts where the others are.
        accounts.serve('a', 10);
        accounts.enter('c');
        assert_eq!(accounts.place(&'c').0, 100);
        // A debt is not forgotten while its peer is away, but bounded.
        accounts.charge(&'b', 1 << 40);
        accounts.enter('b');
        assert_eq!(accounts.place(&'b').0, 1100);
    }

    /// A peer's jobs: when each comes (after so many jobs of all were served), and what it costs.
    fn jobs() -> impl Strategy<Value = Vec<Vec<(u64, u64)>>> {
        let job = (0u64..40, prop_oneof![1u64..10, 1u64..1000]);
        prop::collection::vec(prop::collection::vec(job, 1..60), 2..5)
    }

    proptest! {
        /// The reference: in any time in which two peers always have something waiting, one gets at most a job of each
        /// more than the other.
        #[test]
        fn peers_that_both_wait_get_as_much(arrivals in jobs(), counted in 0u64..20) {
            let mut accounts = Accounts::new(u64::MAX);
            let mut coming: Vec<VecDeque<(u64, u64)>> = arrivals
                .into_iter()
                .map(|mut jobs| {
                    jobs.sort_unstable();
                    jobs.into()
                })
                .collect();
            let peers = coming.len();
            let mut waiting: Vec<VecDeque<u64>> = vec![VecDeque::new(); peers];
            // For each pair: what the two got since both have been waiting, or none.
            let mut got = vec![vec![None::<(u64, u64)>; peers]; peers];
            let most = 1000;
            let mut served = 0;
            loop {
                for peer in 0..peers {
                    while coming[peer].front().is_some_and(|job| job.0 <= served) {
                        let (_, cost) = coming[peer].pop_front().unwrap();
                        if waiting[peer].is_empty() {
                            accounts.enter(peer);
                        }
                        waiting[peer].push_back(cost);
                    }
                }
                let both = |a: usize, b: usize| !waiting[a].is_empty() && !waiting[b].is_empty();
                for (a, row) in got.iter_mut().enumerate() {
                    for (b, pair) in row.iter_mut().enumerate() {
                        *pair = both(a, b).then(|| pair.unwrap_or((0, 0)));
                    }
                }
                let some = (0..peers).filter(|&peer| !waiting[peer].is_empty());
                let Some(peer) = accounts.first(some) else {
                    if coming.iter().all(VecDeque::is_empty) {
                        break;
                    }
                    served += 1;
                    continue;
                };
                let cost = waiting[peer].pop_front().unwrap();
                // As in a pool: what it costs at least is known before, the rest afterwards.
                accounts.serve(peer, counted.min(cost));
                accounts.charge(&peer, cost - counted.min(cost));
                served += 1;
                #[expect(clippy::needless_range_loop, reason = "also a column is walked")]
                for other in 0..peers {
                    if let Some(pair) = &mut got[peer][other] {
                        pair.0 += cost;
                    }
                    if let Some(pair) = &mut got[other][peer] {
                        pair.1 += cost;
                    }
                    if let Some((own, its)) = got[peer][other] {
                        prop_assert!(peer == other || own.abs_diff(its) <= 2 * most, "{own} {its}");
                    }
                }
            }
        }
    }
}
