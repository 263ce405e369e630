//! Fair turns.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// What waits for each of several peers (or mounts, or transfers) that take turns, so that none waits for all that another
/// has asked for.
#[derive(Debug)]
pub struct Turns<K, T> {
    waiting: HashMap<K, VecDeque<T>>,
    /// Those that have something, in turn.
    turns: VecDeque<K>,
}

impl<K, T> Default for Turns<K, T> {
    fn default() -> Self {
        Self {
            waiting: HashMap::new(),
            turns: VecDeque::new(),
        }
    }
}

impl<K: Copy + Eq + Hash, T> Turns<K, T> {
    /// Something is to be done for `who`, behind all that is.
    pub fn put(&mut self, who: K, item: T) {
        let own = self.waiting.entry(who).or_default();
        if own.is_empty() {
            self.turns.push_back(who);
        }
        own.push_back(item);
    }

    /// The next of the first in turn whose next `may` be taken.
    pub fn take(&mut self, may: impl Fn(&K, &T) -> bool) -> Option<(K, T)> {
        let fits = |who: &K| {
            let next = self.waiting.get(who).and_then(VecDeque::front);
            next.is_some_and(|item| may(who, item))
        };
        let at = self.turns.iter().position(fits)?;
        let who = self.turns.remove(at)?;
        let own = self.waiting.get_mut(&who)?;
        let item = own.pop_front()?;
        match own.is_empty() {
            true => drop(self.waiting.remove(&who)),
            false => self.turns.push_back(who),
        }
        Some((who, item))
    }

    /// Whether [`Turns::take`] would take something.
    #[must_use]
    pub fn has(&self, may: impl Fn(&K, &T) -> bool) -> bool {
        self.turns.iter().any(|who| {
            let next = self.waiting.get(who).and_then(VecDeque::front);
            next.is_some_and(|item| may(who, item))
        })
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_much_waits_for_who_has_little_and_who_may_not_is_passed_over() {
        let mut turns = Turns::default();
        for n in 0..3 {
            turns.put('a', n);
        }
        turns.put('b', 10);
        let mut order = Vec::new();
        order.extend(turns.take(|_, _| true));
        order.extend(turns.take(|_, _| true));
        turns.put('c', 20);
        order.extend(turns.take(|who, _| *who != 'a'));
        assert_eq!(order, [('a', 0), ('b', 10), ('c', 20)]);
        assert_eq!(
            turns.take(|_, item| *item > 1),
            None,
            "only the next may go"
        );
        assert_eq!(turns.take(|_, _| true), Some(('a', 1)));
        assert!(!turns.is_empty());
        assert_eq!(turns.take(|_, _| true), Some(('a', 2)));
        assert!(turns.is_empty());
    }
}
