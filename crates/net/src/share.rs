//! Shares of a limited supply: places, or bytes of memory, that several peers take from one stock.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::until;

/// How much of a supply may be taken. With `one` below `all`, no holder gets everything; with `sure`, none is kept out
/// by the others together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareLimits {
    /// By all holders together, except for what `sure` gives them beyond it.
    pub all: u64,
    /// By one holder.
    pub one: u64,
    /// By one holder in any case, even if the others have taken everything.
    pub sure: u64,
}

impl ShareLimits {
    /// Whether a holder that has `own`, of `all` that are taken, may take `more`.
    #[must_use]
    pub fn allow(&self, all: u64, own: u64, more: u64) -> bool {
        let own = own.saturating_add(more);
        own <= self.one && (own <= self.sure || all.saturating_add(more) <= self.all)
    }
}

/// A supply from which holders named by `K` take shares. Clones are the same supply.
pub struct Shares<K>(Arc<Inner<K>>);

struct Inner<K> {
    limits: ShareLimits,
    state: Mutex<State<K>>,
    freed: Notify,
}

struct State<K> {
    all: u64,
    /// A holder that has nothing takes no memory.
    by_holder: HashMap<K, u64>,
}

/// A share, returned when it is dropped.
pub struct Share<K: Copy + Eq + Hash> {
    of: Shares<K>,
    holder: K,
    amount: u64,
    is_only: bool,
}

impl<K: Copy + Eq + Hash> Share<K> {
    /// Whether its holder had nothing else when it was taken.
    #[must_use]
    pub fn is_only(&self) -> bool {
        self.is_only
    }
}

impl<K> Clone for Shares<K> {
    fn clone(&self) -> Self {
        Shares(Arc::clone(&self.0))
    }
}

impl<K: Copy + Eq + Hash> Shares<K> {
    /// A supply of which nothing is taken.
    #[must_use]
    pub fn new(limits: ShareLimits) -> Self {
        Shares(Arc::new(Inner {
            limits,
            state: Mutex::new(State {
                all: 0,
                by_holder: HashMap::new(),
            }),
            freed: Notify::new(),
        }))
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> ShareLimits {
        self.0.limits
    }

    /// Takes `amount` for `holder`; `None` when a limit is reached.
    #[must_use]
    pub fn try_take(&self, holder: K, amount: u64) -> Option<Share<K>> {
        let mut state = self.0.state.lock();
        let own = state.by_holder.get(&holder).copied().unwrap_or(0);
        if !self.0.limits.allow(state.all, own, amount) {
            return None;
        }
        state.all += amount;
        *state.by_holder.entry(holder).or_insert(0) += amount;
        drop(state);
        Some(Share {
            of: self.clone(),
            holder,
            amount,
            is_only: own == 0,
        })
    }

    /// Takes `amount` for `holder`, and waits until the limits permit it. More than one holder may have is never
    /// permitted. Cancel safe.
    pub async fn take(&self, holder: K, amount: u64) -> Share<K> {
        until(&self.0.freed, || self.try_take(holder, amount)).await
    }

    /// What all holders have taken, and what `holder` has.
    #[must_use]
    pub fn taken(&self, holder: &K) -> (u64, u64) {
        let state = self.0.state.lock();
        let own = state.by_holder.get(holder).copied().unwrap_or(0);
        (state.all, own)
    }
}

impl<K: Copy + Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        let inner = &self.of.0;
        let mut state = inner.state.lock();
        state.all -= self.amount;
        if let Some(own) = state.by_holder.get_mut(&self.holder) {
            *own -= self.amount;
            if *own == 0 {
                state.by_holder.remove(&self.holder);
            }
        }
        drop(state);
        inner.freed.notify_waiters();
    }
}

impl<K> fmt::Debug for Shares<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shares")
            .field("limits", &self.0.limits)
            .finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash> fmt::Debug for Share<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share")
            .field("amount", &self.amount)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: ShareLimits = ShareLimits {
        all: 10,
        one: 6,
        sure: 2,
    };

    #[test]
    fn nobody_is_kept_out_and_nobody_has_everything() {
        let places = Shares::new(LIMITS);
        let many: Vec<_> = (0..20).filter_map(|_| places.try_take('a', 1)).collect();
        assert_eq!(many.len(), 6);
        let more: Vec<_> = (0..20).filter_map(|_| places.try_take('b', 1)).collect();
        assert_eq!(more.len(), 4);
        let late: Vec<_> = (0..20).filter_map(|_| places.try_take('c', 1)).collect();
        assert_eq!(late.len(), 2, "what is sure");
        assert_eq!(places.taken(&'c'), (12, 2));
        let only = late.iter().map(Share::is_only);
        assert_eq!(Vec::from_iter(only), [true, false]);
        drop((many, more, late));
        assert_eq!(places.taken(&'a'), (0, 0));
        assert!(
            places.0.state.lock().by_holder.is_empty(),
            "nothing is kept of who left"
        );
    }

    #[tokio::test]
    async fn a_taker_waits_until_there_is_enough() {
        let bytes = Shares::new(LIMITS);
        let first = bytes.take('a', 5).await;
        let (of, second) = (bytes.clone(), bytes.take('a', 1).await);
        let waiting = tokio::spawn(async move { of.take('a', 4).await.amount });
        tokio::task::yield_now().await;
        drop(second);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        let other = bytes.take('b', 2).await;
        drop(first);
        assert_eq!(waiting.await.unwrap(), 4);
        drop(other);
    }

    proptest! {
        #[test]
        fn the_limits_hold_whatever_is_taken_and_returned(
            steps in prop::collection::vec((0u8..4, 0u64..5, any::<bool>()), 0..200),
        ) {
            let shares = Shares::new(LIMITS);
            let mut held: Vec<(u8, u64, Share<u8>)> = Vec::new();
            for (holder, amount, takes) in steps {
                if !takes {
                    if !held.is_empty() {
                        held.swap_remove(amount as usize % held.len());
                    }
                    continue;
                }
                let all: u64 = held.iter().map(|h| h.1).sum();
                let own: u64 = held.iter().filter(|h| h.0 == holder).map(|h| h.1).sum();
                let may = own + amount <= 6 && (own + amount <= 2 || all + amount <= 10);
                let share = shares.try_take(holder, amount);
                prop_assert_eq!(share.is_some(), may);
                held.extend(share.map(|share| (holder, amount, share)));
                let all: u64 = held.iter().map(|h| h.1).sum();
                prop_assert_eq!(shares.taken(&holder).0, all);
                prop_assert!(all <= 10 + 4 * 2);
            }
        }
    }
}
