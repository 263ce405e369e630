//! The table of hooks: eight bytes each, sorted, without room that is empty.

/// Hooks that are added are kept apart, and merged when they are more than this and a part of all.
const MIN_ADDED: usize = 1 << 13;
/// That part: one in so many.
const ADDED: usize = 16;

/// A container's number in the index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ordinal(pub u32);

/// Tags of digests and the containers that have them: `tag << 32 | ordinal`.
///
/// Tags are as good as random numbers, so the place of one is known within a few entries without a search tree or empty
/// slots. What was added lately is in a table of its own, which is small.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    sorted: Vec<u64>,
    added: Vec<u64>,
}

fn entry(tag: u32, ordinal: Ordinal) -> u64 {
    u64::from(tag) << 32 | u64::from(ordinal.0)
}

impl Hooks {
    /// Adds a hook. Cheap only in between: see [`Hooks::extend`].
    pub(crate) fn extend(&mut self, tags: impl IntoIterator<Item = u32>, ordinal: Ordinal) {
        // In order, and few: those of one container.
        let mut new: Vec<u64> = tags.into_iter().map(|tag| entry(tag, ordinal)).collect();
        new.sort_unstable();
        let old = std::mem::take(&mut self.added);
        self.added = merged(old, new);
        if self.added.len() > MIN_ADDED.max(self.sorted.len() / ADDED) {
            let added = std::mem::take(&mut self.added);
            self.merge(added);
        }
    }

    /// Adds many, in any order.
    pub(crate) fn load(&mut self, mut hooks: Vec<u64>) {
        hooks.sort_unstable();
        hooks.shrink_to_fit();
        match self.sorted.is_empty() {
            true => self.sorted = hooks,
            false => self.merge(hooks),
        }
    }

    /// An entry of [`Hooks::load`].
    pub(crate) fn entry(tag: u32, ordinal: Ordinal) -> u64 {
        entry(tag, ordinal)
    }

    /// From the end, in place: what is merged needs no second table.
    fn merge(&mut self, added: Vec<u64>) {
        let (mut left, mut right) = (self.sorted.len(), added.len());
        self.sorted.reserve_exact(right);
        self.sorted.resize(left + right, 0);
        while right > 0 {
            let to = left + right - 1;
            if left > 0 && self.sorted[left - 1] > added[right - 1] {
                left -= 1;
                self.sorted[to] = self.sorted[left];
            } else {
                right -= 1;
                self.sorted[to] = added[right];
            }
        }
    }

    /// The containers that have a hook like this.
    pub(crate) fn get(&self, tag: u32) -> impl Iterator<Item = Ordinal> + '_ {
        let of = |table: &'_ [u64], at: usize| {
            let end = table[at..].iter().take_while(|&&e| (e >> 32) as u32 == tag);
            at..at + end.count()
        };
        let added = self.added.partition_point(|&e| e < entry(tag, Ordinal(0)));
        let sorted = guess(&self.sorted, entry(tag, Ordinal(0)));
        let (added, sorted) = (of(&self.added, added), of(&self.sorted, sorted));
        // The newest first.
        let newest = self.added[added].iter().rev();
        newest
            .chain(self.sorted[sorted].iter().rev())
            .map(|&e| Ordinal((e & 0xffff_ffff) as u32))
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.sorted.len() + self.added.len()
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> usize {
        (self.sorted.capacity() + self.added.capacity()) * size_of::<u64>()
    }
}

/// Where the first entry is that is not below `wanted`.
fn guess(table: &[u64], wanted: u64) -> usize {
    let expected = ((u128::from(wanted) * table.len() as u128) >> 64) as usize;
    // Doubling steps from where it should be, then halving.
    let (mut low, mut high, mut step) = (expected, expected, 16);
    while low > 0 && table[low - 1] >= wanted {
        low = low.saturating_sub(step);
        step *= 2;
    }
    step = 16;
    while high < table.len() && table[high] < wanted {
        high = (high + step).min(table.len());
        step *= 2;
    }
    low + table[low..high].partition_point(|&e| e < wanted)
}

/// Two sorted lists as one.
fn merged(one: Vec<u64>, other: Vec<u64>) -> Vec<u64> {
    let mut out = Vec::with_capacity(one.len() + other.len());
    let (mut one, mut other) = (one.into_iter().peekable(), other.into_iter().peekable());
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let next = if a <= b { one.next() } else { other.next() };
        out.extend(next);
    }
    out.extend(one);
    out.extend(other);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hooks_are_found_again(
            loaded in proptest::collection::vec((0u32..50, 0u32..9), 0..300),
            added in proptest::collection::vec((0u32..50, 9u32..20), 0..300),
            spread in any::<bool>(),
        ) {
            // Evenly spread, as tags are, or all in one place.
            let tag = |t: u32| if spread { t * (u32::MAX / 50) } else { 7 << 20 | t };
            let mut hooks = Hooks::default();
            hooks.load(loaded.iter().map(|&(t, o)| Hooks::entry(tag(t), Ordinal(o))).collect());
            for (number, chunk) in added.chunks(7).enumerate() {
                for &(t, o) in chunk {
                    hooks.extend([tag(t)], Ordinal(o));
                }
                // As a large table does by itself.
                if number % 3 == 0 {
                    let added = std::mem::take(&mut hooks.added);
                    hooks.merge(added);
                }
            }
            prop_assert_eq!(hooks.len(), loaded.len() + added.len());
            for t in 0..50 {
                let mut got: Vec<u32> = hooks.get(tag(t)).map(|o| o.0).collect();
                let mut want: Vec<u32> = loaded.iter().chain(&added).filter(|x| x.0 == t).map(|x| x.1).collect();
                got.sort_unstable();
                want.sort_unstable();
                prop_assert_eq!(got, want);
            }
            prop_assert_eq!(hooks.get(tag(50).wrapping_add(1)).count(), 0);
        }
    }
}
