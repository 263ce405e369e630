//! Finding duplicates with little memory: the sparse index.
//!
//! One digest in 64 of each container is a *hook*, kept in memory (8 bytes: a tag of the digest and the container's
//! number). A window of 8 MiB is looked up by its hooks; the containers with most of them, at most 16, have their
//! digest lists loaded and cached, and the window's blocks are compared with those. Duplicates come in runs, so that
//! a list found by one hook has most of the neighbours.
//!
//! Of a container of few blocks, all are hooks, and a block that is found nowhere else is looked up there.
//!
//! A hook is only a hint: a reference is made when the whole digest is in the list. Losing hooks loses duplicates,
//! never data. No I/O here: the caller loads lists.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use drover_core::Digest;

use crate::container::{ContainerId, LocalIds};
use crate::hooks::{Hooks, Ordinal};

/// Blocks of a window: 8 MiB.
pub const WINDOW_BLOCKS: usize = 2048;
/// Bytes of memory of a hook.
pub const HOOK_BYTES: usize = size_of::<u64>();
/// One digest in so many is a hook.
pub const SAMPLING: u64 = 64;
/// Most lists that are loaded for one window.
pub const MAX_CHAMPIONS: usize = 16;
/// Lists that are kept; 220 KiB each, with the table of their blocks, which is just full then.
pub const MAX_LISTS: usize = 56;
/// Most containers that are looked up for one hook: a block that is everywhere says little.
const MAX_PER_HOOK: usize = 64;

/// A container with at most so many blocks has them all as hooks: it might have none otherwise.
pub const SMALL_BLOCKS: usize = 256;

/// The hooks of a container.
pub fn hooks_of(digests: &[Digest]) -> impl Iterator<Item = u32> + '_ {
    let all = digests.len() <= SMALL_BLOCKS;
    digests.iter().filter(move |d| all || is_hook(d)).map(tag)
}

/// Whether a digest is a hook.
#[must_use]
pub fn is_hook(digest: &Digest) -> bool {
    digest.prefix().is_multiple_of(SAMPLING)
}

/// What the index remembers of a hook.
#[must_use]
pub fn tag(digest: &Digest) -> u32 {
    let d = &digest.0;
    u32::from_le_bytes([d[8], d[9], d[10], d[11]])
}

/// A hook of a container, for [`SparseIndex::load_hooks`].
#[must_use]
pub fn hook_entry(tag: u32, ordinal: Ordinal) -> u64 {
    Hooks::entry(tag, ordinal)
}

/// The blocks of a container: digests, and their local ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// The container.
    pub id: ContainerId,
    /// The digests.
    pub digests: Vec<Digest>,
    /// Their local ids, as many, ascending.
    pub locals: Vec<u16>,
}

impl List {
    /// The list of a container.
    #[must_use]
    pub fn new(id: ContainerId, digests: Vec<Digest>, present: &LocalIds) -> Self {
        List {
            id,
            digests,
            locals: present.iter().collect(),
        }
    }
}

/// Digests are random already.
#[derive(Default, Clone, Copy)]
struct Prefix(u64);

impl Hasher for Prefix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&b| self.0 = self.0.rotate_left(8) ^ u64::from(b));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}

struct Cached {
    list: Arc<List>,
    ordinal: Ordinal,
    used: u64,
}

/// A block that is there already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// The container.
    pub ordinal: Ordinal,
    /// The block's local id.
    pub local: u16,
    slot: u16,
    position: u16,
}

/// The index; see the module's documentation.
pub struct SparseIndex {
    hooks: Hooks,
    lists: Vec<Option<Cached>>,
    /// By the first eight bytes of a digest: the slot of a cached list, and the position there.
    blocks: HashMap<u64, (u16, u16), BuildHasherDefault<Prefix>>,
    clock: u64,
}

impl Default for SparseIndex {
    fn default() -> Self {
        SparseIndex {
            hooks: Hooks::default(),
            lists: (0..MAX_LISTS).map(|_| None).collect(),
            blocks: HashMap::default(),
            clock: 0,
        }
    }
}

impl SparseIndex {
    /// Adds the hooks of a container.
    pub fn add_hooks(&mut self, tags: impl IntoIterator<Item = u32>, ordinal: Ordinal) {
        self.hooks.extend(tags, ordinal);
    }

    /// Adds the hooks of many, as `hook_entry` makes them, in any order.
    pub fn load_hooks(&mut self, hooks: Vec<u64>) {
        self.hooks.load(hooks);
    }

    /// Bytes of memory that hooks take.
    #[must_use]
    pub fn hook_bytes(&self) -> usize {
        self.hooks.bytes()
    }

    /// Bytes of memory that it takes beside them: the lists, and the table of their blocks.
    #[cfg(test)]
    fn list_bytes(&self) -> usize {
        let lists = self.lists.iter().flatten();
        let entry = size_of::<(u64, (u16, u16))>() + 1;
        lists
            .map(|c| c.list.digests.capacity() * Digest::LEN + c.list.locals.capacity() * 2)
            .sum::<usize>()
            // A hash table doubles, and is at most seven eighths full.
            + (self.blocks.capacity() * 8 / 7).next_power_of_two() * entry
    }

    /// The containers worth a look for a window, best first, of those that `usable` lets through. Lists that are
    /// cached already are not among them.
    pub fn champions(
        &mut self,
        window: &[Digest],
        usable: impl Fn(Ordinal) -> bool,
    ) -> Vec<Ordinal> {
        self.clock += 1;
        // By container, which of the window's hooks it has. A window has some 32; those beyond 128 are ignored.
        let mut hits: HashMap<Ordinal, u128> = HashMap::new();
        let hooks = window.iter().filter(|d| is_hook(d)).take(128);
        for (number, digest) in hooks.enumerate() {
            for ordinal in self.hooks.get(tag(digest)).take(MAX_PER_HOOK) {
                if usable(ordinal) {
                    *hits.entry(ordinal).or_default() |= 1 << number;
                }
            }
        }
        // Greedily: the container that explains most of the hooks that are left. Ties go to the newest.
        let mut chosen = Vec::new();
        let mut left = u128::MAX;
        while chosen.len() < MAX_CHAMPIONS {
            let best = hits
                .iter()
                .map(|(&ordinal, &bits)| ((bits & left).count_ones(), ordinal))
                .max();
            let Some((gain, ordinal)) = best.filter(|(gain, _)| *gain > 0) else {
                break;
            };
            left &= !hits.remove(&ordinal).unwrap_or_default();
            let _ = gain;
            chosen.push(ordinal);
        }
        chosen.retain(|&ordinal| !self.is_cached(ordinal));
        chosen
    }

    /// Whether a container's list is cached; then it is kept for this window.
    pub fn is_cached(&mut self, ordinal: Ordinal) -> bool {
        let mut lists = self.lists.iter_mut().flatten();
        match lists.find(|c| c.ordinal == ordinal) {
            Some(cached) => {
                cached.used = self.clock;
                true
            }
            None => false,
        }
    }

    /// Containers that are not cached and have a hook like this digest, which is none of the window's: small ones.
    pub fn small_ones(&self, digest: &Digest) -> Vec<Ordinal> {
        if is_hook(digest) {
            return Vec::new();
        }
        let cached = |o: &Ordinal| self.lists.iter().flatten().any(|c| c.ordinal == *o);
        let hooks = self.hooks.get(tag(digest)).filter(|o| !cached(o));
        hooks.take(MAX_CHAMPIONS).collect()
    }

    /// Caches a container's list.
    pub fn load(&mut self, ordinal: Ordinal, list: Arc<List>) {
        let slot = self
            .lists
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                let oldest = self.lists.iter().enumerate();
                oldest
                    .min_by_key(|(_, c)| c.as_ref().map_or(0, |c| c.used))
                    .map_or(0, |(slot, _)| slot)
            });
        self.evict(slot);
        for (position, digest) in list.digests.iter().enumerate() {
            self.blocks
                .insert(digest.prefix(), (slot as u16, position as u16));
        }
        self.lists[slot] = Some(Cached {
            list,
            ordinal,
            used: self.clock,
        });
    }

    /// Drops a container's list; its hooks stay.
    #[cfg(test)]
    fn unload(&mut self, ordinal: Ordinal) {
        let slot = self
            .lists
            .iter()
            .position(|c| c.as_ref().is_some_and(|c| c.ordinal == ordinal));
        if let Some(slot) = slot {
            self.evict(slot);
        }
    }

    fn evict(&mut self, slot: usize) {
        if let Some(old) = self.lists[slot].take() {
            for digest in &old.list.digests {
                let prefix = digest.prefix();
                if self
                    .blocks
                    .get(&prefix)
                    .is_some_and(|(s, _)| usize::from(*s) == slot)
                {
                    self.blocks.remove(&prefix);
                }
            }
        }
    }

    /// Where a block is, by the lists that are cached. Goes on where the block before was found, if that is possible:
    /// long runs make short recipes.
    pub fn find(&mut self, digest: &Digest, before: Option<Found>) -> Option<Found> {
        before
            .and_then(|b| self.at(b.slot, b.position.checked_add(1)?, digest))
            .filter(|f| Some(f.ordinal) == before.map(|b| b.ordinal))
            .or_else(|| {
                let &(slot, position) = self.blocks.get(&digest.prefix())?;
                self.at(slot, position, digest)
            })
    }

    fn at(&mut self, slot: u16, position: u16, digest: &Digest) -> Option<Found> {
        let clock = self.clock;
        let cached = self.lists.get_mut(usize::from(slot))?.as_mut()?;
        if cached.list.digests.get(usize::from(position))? != digest {
            return None;
        }
        cached.used = clock;
        Some(Found {
            ordinal: cached.ordinal,
            local: cached.list.locals[usize::from(position)],
            slot,
            position,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use proptest::prelude::*;

    fn digest(n: u64) -> Digest {
        drover_index::digest_block(&n.to_le_bytes().repeat(512))
    }

    /// Writes windows of blocks into containers as a backup does; whether each block was found.
    struct Model {
        index: SparseIndex,
        lists: Vec<Arc<List>>,
        open: Vec<Digest>,
        capacity: usize,
        exact: HashSet<Digest>,
        duplicates: u64,
        found: u64,
    }

    impl Model {
        fn new(capacity: usize) -> Self {
            Model {
                index: SparseIndex::default(),
                lists: Vec::new(),
                open: Vec::new(),
                capacity,
                exact: HashSet::new(),
                duplicates: 0,
                found: 0,
            }
        }

        fn window(&mut self, window: &[Digest]) {
            for ordinal in self.index.champions(window, |_| true) {
                self.index
                    .load(ordinal, self.lists[ordinal.0 as usize].clone());
            }
            let mut before = None;
            for d in window {
                before = self.index.find(d, before);
                if self.exact.contains(d) {
                    self.duplicates += 1;
                }
                if let Some(f) = before {
                    // Never a wrong reference.
                    let list = &self.lists[f.ordinal.0 as usize];
                    assert_eq!(&list.digests[usize::from(f.local)], d);
                    assert!(self.exact.contains(d));
                    self.found += 1;
                } else if self.open.contains(d) {
                    self.found += 1;
                } else {
                    self.exact.insert(*d);
                    self.open.push(*d);
                    if self.open.len() == self.capacity {
                        self.seal();
                    }
                }
            }
        }

        fn seal(&mut self) {
            let digests = std::mem::take(&mut self.open);
            if digests.is_empty() {
                return;
            }
            let ordinal = Ordinal(self.lists.len() as u32);
            let hooks = digests.iter().filter(|d| is_hook(d));
            self.index.add_hooks(hooks.map(tag), ordinal);
            let present = LocalIds::first(digests.len());
            let list = Arc::new(List::new(
                ContainerId(self.lists.len() as u64),
                digests,
                &present,
            ));
            self.lists.push(list.clone());
            self.index.load(ordinal, list);
        }
    }

    #[test]
    fn machines_that_share_files_in_another_order() {
        let mut rng = fastrand::Rng::with_seed(5);
        // 400 files of 16 to 400 blocks; ten machines of 150 of them, with blocks of their own between.
        let files: Vec<Vec<Digest>> = (0..400u64)
            .map(|f| (0..rng.u64(16..400)).map(|b| digest(f << 32 | b)).collect())
            .collect();
        let mut model = Model::new(1024);
        for machine in 0..10u64 {
            let mut disk = Vec::new();
            for n in 0..150 {
                disk.extend_from_slice(&files[rng.usize(..files.len())]);
                disk.extend(
                    (0..rng.u64(..20)).map(|b| digest(1 << 63 | machine << 48 | n << 32 | b)),
                );
            }
            disk.chunks(WINDOW_BLOCKS).for_each(|w| model.window(w));
            model.seal();
        }
        let share = model.found as f64 / model.duplicates as f64;
        println!(
            "found {} of {} duplicates: {:.2} %, {} containers, {} bytes of hooks",
            model.found,
            model.duplicates,
            share * 100.0,
            model.lists.len(),
            model.index.hook_bytes()
        );
        assert!(share > 0.97, "{share}");
    }

    /// What decision 0063 says: 16 MiB, and an eighth of a byte for each block that is stored, 32 MiB a TiB; loaded or
    /// grown by a backup of a million blocks after another.
    #[test]
    fn an_eighth_of_a_byte_for_each_block() {
        let mut rng = fastrand::Rng::with_seed(9);
        let blocks = 4096;
        let containers = 4096u32;
        let tags = |rng: &mut fastrand::Rng| -> Vec<u32> {
            (0..blocks / SAMPLING as usize)
                .map(|_| rng.u32(..))
                .collect()
        };
        let total = blocks * containers as usize;
        let mut loaded = SparseIndex::default();
        let entries = (0..containers).flat_map(|n| {
            tags(&mut rng)
                .into_iter()
                .map(move |tag| hook_entry(tag, Ordinal(n)))
        });
        loaded.load_hooks(entries.collect());
        let mut grown = SparseIndex::default();
        let mut known = Vec::new();
        for n in 0..containers {
            let tags = tags(&mut rng);
            known.push(tags[0]);
            grown.add_hooks(tags, Ordinal(n));
        }
        for (n, tag) in known.into_iter().enumerate() {
            assert!(grown.hooks.get(tag).any(|o| o == Ordinal(n as u32)));
        }
        for n in 0..MAX_LISTS as u64 + 9 {
            let digests: Vec<Digest> = (0..4096).map(|i| digest(n << 20 | i)).collect();
            let present = LocalIds::first(4096);
            grown.load(
                Ordinal(n as u32),
                Arc::new(List::new(ContainerId(n), digests, &present)),
            );
        }
        let a_block = |index: &SparseIndex| index.hook_bytes() as f64 / total as f64;
        println!(
            "{:.4} bytes a block when loaded, {:.4} when grown, and {} MiB of lists",
            a_block(&loaded),
            a_block(&grown),
            grown.list_bytes() >> 20
        );
        assert!(a_block(&loaded) <= 0.125);
        // And up to a sixteenth that is not merged yet, or was in this moment.
        assert!(a_block(&grown) <= 0.125 * (1.0 + 2.0 / 16.0));
        assert!(grown.list_bytes() <= 16 << 20);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn never_a_wrong_reference(seed in any::<u64>()) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut model = Model::new(rng.usize(1..300));
            let kinds = rng.u64(1..20_000);
            for _ in 0..rng.usize(1..20) {
                let from = rng.u64(..kinds);
                let window: Vec<_> = (0..rng.u64(1..600)).map(|i| digest((from + i) % kinds)).collect();
                model.window(&window);
                if rng.u8(..4) == 0 {
                    model.seal();
                }
                if rng.u8(..4) == 0 && !model.lists.is_empty() {
                    model.index.unload(Ordinal(rng.u32(..model.lists.len() as u32)));
                }
            }
            prop_assert!(model.found <= model.duplicates);
        }
    }
}
