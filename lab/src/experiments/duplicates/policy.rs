//! Policies that find duplicates, on numbers of blocks and their digests: the vault's own index, and the scheme of the
//! paper (Zhang et al., *VM-centric snapshot deduplication*).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use drover_core::Digest;
use drover_vault::ContainerId;
use drover_vault::container::{LocalIds, MAX_BLOCKS};
use drover_vault::measured::{
    CONTAINER_BYTES, Found, List, MAX_CHAMPIONS, MAX_LIKELY, Ordinal, SparseIndex, WINDOW_BLOCKS,
    hooks_of,
};

/// Blocks of a segment: 2 MiB.
pub const SEGMENT: usize = 512;
/// Segments of a window.
const WINDOW: usize = WINDOW_BLOCKS / SEGMENT;
/// Segments of the parent that are compared, by the paper.
const MAX_SIMILAR: usize = 10;
/// Bytes of memory of a popular block's entry: its digest is 20 bytes, and the place.
const POPULAR_BYTES: u64 = 32;

/// Bits of a Bloom filter for each block.
const BITS: u64 = 10;

/// A block, by a number; the same content has the same. 0 is zeros.
pub type Block = u64;

/// What blocks are.
pub trait Content {
    /// The digest of a block.
    fn digest(&self, block: Block) -> Digest;
}

/// A version of a machine's disk: its segments, which versions share that have the same.
#[derive(Clone, Default)]
pub struct Version {
    /// The machine.
    pub machine: usize,
    /// Its segments, of [`SEGMENT`] blocks; the last one may have fewer.
    pub segments: Vec<Arc<[Block]>>,
}

impl Version {
    /// Its blocks that are not zero.
    pub fn data_blocks(&self) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| segment.iter());
        blocks.filter(|block| **block != 0).count() as u64
    }
}

/// What a policy did.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Blocks that it stored.
    pub stored: u64,
    /// Of those, blocks that a search by signature in the parent would have found.
    pub by_signature: u64,
    /// Bytes of memory of its index: the sum over machines if each has its own.
    pub bytes: u64,
}

/// A way to find duplicates. Versions of a machine come in their order.
pub trait Policy {
    /// Stores a version.
    fn store(&mut self, content: &dyn Content, version: &Version);
    /// What it did so far.
    fn counts(&self) -> Counts;
}

/// Segments of a machine's latest version by signature, the least digest of each, as the paper has it.
#[derive(Default)]
struct Signatures {
    of: Vec<Option<u64>>,
    by: HashMap<u64, Vec<usize>>,
}

fn signature(content: &dyn Content, segment: &[Block]) -> Option<u64> {
    let data = segment.iter().filter(|block| **block != 0);
    data.map(|block| content.digest(*block).prefix()).min()
}

impl Signatures {
    /// Those of a version, of which `old` has those of the version before.
    fn next(&self, content: &dyn Content, before: Option<&Version>, version: &Version) -> Self {
        let mut next = Signatures::default();
        for (at, segment) in version.segments.iter().enumerate() {
            let same = before.is_some_and(|before| is_same(before, at, segment));
            let signature = match same {
                true => self.of[at],
                false => signature(content, segment),
            };
            next.of.push(signature);
            if let Some(signature) = signature {
                next.by.entry(signature).or_default().push(at);
            }
        }
        next
    }

    /// The blocks of segments that are similar to one.
    fn similar(
        &self,
        content: &dyn Content,
        before: &Version,
        segment: &[Block],
    ) -> HashSet<Block> {
        let found = signature(content, segment).and_then(|signature| self.by.get(&signature));
        let similar = found.into_iter().flatten().take(MAX_SIMILAR);
        similar
            .flat_map(|&at| before.segments[at].iter().copied())
            .collect()
    }
}

/// Whether a version has this segment at that place.
fn is_same(before: &Version, at: usize, segment: &Arc<[Block]>) -> bool {
    let old = before.segments.get(at);
    old.is_some_and(|old| Arc::ptr_eq(old, segment) || old == segment)
}

/// Consecutive numbers, at most a container's.
#[derive(Clone, Copy)]
struct Run {
    first: Block,
    blocks: u16,
}

/// Containers with their index: of one vault, or of one machine.
#[derive(Default)]
struct Store {
    index: SparseIndex,
    containers: Vec<Box<[Run]>>,
    open: Vec<Run>,
    /// The blocks of the open container.
    in_open: HashSet<Block>,
    /// Lists that may still be loaded for single blocks of the window.
    left: usize,
    machines: HashMap<usize, Latest>,
}

/// The latest version of a machine.
#[derive(Default)]
struct Latest {
    version: Version,
    /// Of each segment, how many blocks are in which container.
    places: Vec<Arc<[(Ordinal, u32)]>>,
    signatures: Signatures,
}

impl Store {
    fn ordinal(&self) -> Ordinal {
        Ordinal(self.containers.len() as u32)
    }

    fn load(&mut self, content: &dyn Content, ordinal: Ordinal) {
        let runs = &self.containers[ordinal.0 as usize];
        let blocks = runs
            .iter()
            .flat_map(|run| run.first..run.first + u64::from(run.blocks));
        let digests: Vec<Digest> = blocks.map(|block| content.digest(block)).collect();
        let present = LocalIds::first(digests.len());
        let list = List::new(ContainerId(u64::from(ordinal.0)), digests, &present);
        self.index.load(ordinal, Arc::new(list));
    }

    fn push(&mut self, content: &dyn Content, block: Block) {
        match self.open.last_mut() {
            Some(run) if run.first + u64::from(run.blocks) == block => run.blocks += 1,
            _ => self.open.push(Run {
                first: block,
                blocks: 1,
            }),
        }
        self.in_open.insert(block);
        if self.in_open.len() == MAX_BLOCKS {
            self.seal(content);
        }
    }

    fn seal(&mut self, content: &dyn Content) {
        if self.open.is_empty() {
            return;
        }
        let ordinal = self.ordinal();
        let runs = std::mem::take(&mut self.open).into_boxed_slice();
        let blocks = runs
            .iter()
            .flat_map(|run| run.first..run.first + u64::from(run.blocks));
        let digests: Vec<Digest> = blocks.map(|block| content.digest(block)).collect();
        self.index.add_hooks(hooks_of(&digests), ordinal);
        self.containers.push(runs);
        self.in_open.clear();
        self.load(content, ordinal);
    }

    /// As the vault's index does it.
    fn find(
        &mut self,
        content: &dyn Content,
        digest: &Digest,
        before: Option<Found>,
    ) -> Option<Found> {
        let found = self.index.find(digest, before);
        if found.is_some() || self.left == 0 {
            return found;
        }
        for ordinal in self.index.small_ones(digest) {
            if self.left > 0 {
                self.left -= 1;
                self.load(content, ordinal);
            }
        }
        self.index.find(digest, None)
    }

    /// Stores a version as a backup does: what is as in the latest one of the machine at the same place, if `compares`,
    /// is not looked up.
    fn store(&mut self, content: &dyn Content, version: &Version, compares: bool) -> Counts {
        let mut counts = Counts::default();
        let latest = self.machines.remove(&version.machine);
        let before = latest.as_ref().map(|latest| &latest.version);
        let compared = latest.as_ref().filter(|_| compares);
        let mut places: Vec<Arc<[(Ordinal, u32)]>> = Vec::new();
        for (number, window) in version.segments.chunks(WINDOW).enumerate() {
            let first = number * WINDOW;
            let same =
                |at: usize| compared.is_some_and(|l| is_same(&l.version, at, &window[at - first]));
            let others: Vec<usize> = (first..first + window.len())
                .filter(|at| !same(*at))
                .collect();
            let data = others.iter().flat_map(|at| window[at - first].iter());
            let data: Vec<Digest> = data
                .filter(|block| **block != 0)
                .map(|block| content.digest(*block))
                .collect();
            self.left = MAX_CHAMPIONS;
            for ordinal in self.index.champions(&data, |_| true) {
                self.load(content, ordinal);
            }
            for ordinal in likely(compared, &others) {
                if !self.index.is_cached(ordinal) {
                    self.load(content, ordinal);
                }
            }
            let mut digests = data.into_iter();
            for (at, segment) in (first..).zip(window) {
                if let Some(latest) = compared.filter(|_| !others.contains(&at)) {
                    places.push(latest.places[at].clone());
                    continue;
                }
                let mut of: HashMap<Ordinal, u32> = HashMap::new();
                let mut similar = None;
                let mut found = None;
                for &block in segment.iter().filter(|block| **block != 0) {
                    let digest = digests.next().expect("one for each block");
                    found = self.find(content, &digest, found);
                    let ordinal = found.map_or(self.ordinal(), |found| found.ordinal);
                    *of.entry(ordinal).or_default() += 1;
                    if found.is_some() || self.in_open.contains(&block) {
                        continue;
                    }
                    counts.stored += 1;
                    if let (Some(latest), Some(before)) = (&latest, before) {
                        let similar = similar.get_or_insert_with(|| {
                            latest.signatures.similar(content, before, segment)
                        });
                        counts.by_signature += u64::from(similar.contains(&block));
                    }
                    self.push(content, block);
                }
                places.push(of.into_iter().collect());
            }
        }
        self.seal(content);
        let old = latest.as_ref().map(|latest| &latest.signatures);
        let signatures = old
            .unwrap_or(&Signatures::default())
            .next(content, before, version);
        let latest = Latest {
            version: version.clone(),
            places,
            signatures,
        };
        self.machines.insert(version.machine, latest);
        counts
    }

    fn bytes(&self) -> u64 {
        (self.index.hook_bytes() + self.containers.len() * CONTAINER_BYTES) as u64
    }
}

/// The containers that have most of what was at these places.
fn likely(latest: Option<&Latest>, segments: &[usize]) -> Vec<Ordinal> {
    let mut blocks: HashMap<Ordinal, u32> = HashMap::new();
    let places = latest.map(|latest| &latest.places);
    for places in segments.iter().filter_map(|at| places?.get(*at)) {
        for (ordinal, count) in places.iter() {
            *blocks.entry(*ordinal).or_default() += count;
        }
    }
    let mut sorted: Vec<(u32, Ordinal)> = blocks.into_iter().map(|(o, n)| (n, o)).collect();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    sorted.truncate(MAX_LIKELY);
    sorted.into_iter().map(|(_, ordinal)| ordinal).collect()
}

/// The vault, by what machines share.
pub struct Vault {
    stores: HashMap<usize, Store>,
    shares_all: bool,
    compares: bool,
    popular: Vec<Block>,
    counts: Counts,
    /// Of each machine that ended: containers of popular blocks, and others, that its latest version uses.
    used: Vec<(usize, usize)>,
}

impl Vault {
    /// Each machine by itself, or all together; in each of them these blocks are known, and are stored once.
    pub fn new(shares_all: bool, compares: bool, popular: Vec<Block>) -> Self {
        Vault {
            stores: HashMap::new(),
            shares_all,
            compares,
            used: Vec::new(),
            counts: Counts {
                stored: popular.len() as u64,
                ..Counts::default()
            },
            popular,
        }
    }

    /// What is known of a machine that has no further versions is only counted from now on.
    pub fn end(&mut self, machine: usize) {
        let number = if self.shares_all { 0 } else { machine };
        let Some(store) = self.stores.get_mut(&number) else {
            return;
        };
        if let Some(latest) = store.machines.remove(&machine) {
            let places = latest.places.iter().flat_map(|places| places.iter());
            let used: HashSet<Ordinal> = places.map(|(ordinal, _)| *ordinal).collect();
            let first_own = Ordinal(self.popular.len().div_ceil(MAX_BLOCKS) as u32);
            let popular = used.iter().filter(|ordinal| **ordinal < first_own).count();
            self.used.push((popular, used.len() - popular));
        }
        if !self.shares_all {
            self.counts.bytes += store.bytes();
            self.stores.remove(&number);
        }
    }

    /// Of each machine that ended: containers of popular blocks, and others, that its latest version uses.
    pub fn used(&self) -> &[(usize, usize)] {
        &self.used
    }
}

impl Policy for Vault {
    fn store(&mut self, content: &dyn Content, version: &Version) {
        let number = if self.shares_all { 0 } else { version.machine };
        let popular = &self.popular;
        let store = self.stores.entry(number).or_insert_with(|| {
            let mut store = Store::default();
            popular.iter().for_each(|block| store.push(content, *block));
            store.seal(content);
            store
        });
        let done = store.store(content, version, self.compares);
        self.counts.stored += done.stored;
        self.counts.by_signature += done.by_signature;
    }

    fn counts(&self) -> Counts {
        let open: u64 = self.stores.values().map(Store::bytes).sum();
        Counts {
            bytes: self.counts.bytes + open,
            ..self.counts
        }
    }
}

/// The paper's scheme: the segment at the same place of the parent, perhaps similar ones, and popular blocks.
pub struct Paper {
    similar: bool,
    popular: HashSet<Block>,
    machines: HashMap<usize, (Version, Signatures)>,
    stored: u64,
}

impl Paper {
    /// With similar segments or without, and with these popular blocks.
    pub fn new(similar: bool, popular: &[Block]) -> Self {
        Paper {
            similar,
            popular: popular.iter().copied().collect(),
            machines: HashMap::new(),
            stored: popular.len() as u64,
        }
    }

    /// A machine has no further versions.
    pub fn end(&mut self, machine: usize) {
        self.machines.remove(&machine);
    }
}

impl Policy for Paper {
    fn store(&mut self, content: &dyn Content, version: &Version) {
        let (before, signatures) = self.machines.remove(&version.machine).unzip();
        for (at, segment) in version.segments.iter().enumerate() {
            let mut known: HashSet<Block> = HashSet::new();
            if let Some(before) = &before {
                if is_same(before, at, segment) {
                    continue;
                }
                known.extend(before.segments.get(at).into_iter().flat_map(|s| s.iter()));
                if let Some(signatures) = signatures.as_ref().filter(|_| self.similar) {
                    known.extend(signatures.similar(content, before, segment));
                }
            }
            for &block in segment.iter().filter(|block| **block != 0) {
                let is_new = !self.popular.contains(&block) && known.insert(block);
                self.stored += u64::from(is_new);
            }
        }
        let old = signatures.unwrap_or_default();
        let next = match self.similar {
            true => old.next(content, before.as_ref(), version),
            false => old,
        };
        self.machines
            .insert(version.machine, (version.clone(), next));
    }

    fn counts(&self) -> Counts {
        Counts {
            stored: self.stored,
            bytes: self.popular.len() as u64 * POPULAR_BYTES,
            ..Counts::default()
        }
    }
}

/// The paper's rival: each segment is routed to one of several machines by its signature, and its blocks are looked up in
/// an index of all that this one has.
pub struct Routed {
    nodes: Vec<HashSet<Block>>,
    machines: HashMap<usize, Version>,
}

impl Routed {
    /// Among so many machines.
    pub fn new(nodes: usize) -> Self {
        Routed {
            nodes: vec![HashSet::new(); nodes],
            machines: HashMap::new(),
        }
    }
}

impl Policy for Routed {
    fn store(&mut self, content: &dyn Content, version: &Version) {
        let before = self.machines.remove(&version.machine);
        for (at, segment) in version.segments.iter().enumerate() {
            if before
                .as_ref()
                .is_some_and(|before| is_same(before, at, segment))
            {
                continue;
            }
            if let Some(signature) = signature(content, segment) {
                let node = signature as usize % self.nodes.len();
                let data = segment.iter().copied().filter(|block| *block != 0);
                self.nodes[node].extend(data);
            }
        }
        self.machines.insert(version.machine, version.clone());
    }

    fn counts(&self) -> Counts {
        let stored = self.nodes.iter().map(|node| node.len() as u64).sum();
        Counts {
            stored,
            // A Bloom filter before an index on a disk.
            bytes: stored * BITS / 8,
            ..Counts::default()
        }
    }
}
