//! A small cache: the most recently used entries, up to a number.

use std::collections::HashMap;
use std::hash::Hash;

pub(crate) struct Lru<K, V> {
    entries: HashMap<K, (u64, V)>,
    capacity: usize,
    clock: u64,
}

impl<K: Hash + Eq + Clone, V: Clone> Lru<K, V> {
    pub(crate) fn new(capacity: usize) -> Self {
        Lru {
            entries: HashMap::with_capacity(capacity + 1),
            capacity,
            clock: 0,
        }
    }

    pub(crate) fn get(&mut self, key: &K) -> Option<V> {
        self.clock += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value.clone())
    }

    /// Adds an entry; what had to go for it.
    pub(crate) fn put(&mut self, key: K, value: V) -> Option<(K, V)> {
        self.clock += 1;
        self.entries.insert(key, (self.clock, value));
        if self.entries.len() <= self.capacity {
            return None;
        }
        // Capacities are small: a scan costs less than what an entry costs to load.
        let oldest = self
            .entries
            .iter()
            .min_by_key(|(_, (used, _))| *used)
            .map(|(key, _)| key.clone())?;
        self.entries
            .remove(&oldest)
            .map(|(_, value)| (oldest, value))
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.entries.remove(key).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let mut lru = Lru::new(2);
        assert_eq!(lru.put(1, 'a'), None);
        assert_eq!(lru.put(2, 'b'), None);
        assert_eq!(lru.get(&1), Some('a'));
        assert_eq!(lru.put(3, 'c'), Some((2, 'b')));
        assert_eq!(
            (lru.get(&1), lru.get(&2), lru.get(&3)),
            (Some('a'), None, Some('c'))
        );
        assert_eq!(lru.remove(&1), Some('a'));
    }
}
