//! A made-up fleet: machines of a few systems and applications with data of their own, aged day by day. Blocks are
//! numbers only, so that a hundred terabytes fit; everything follows from a seed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use drover_core::Digest;
use fastrand::Rng;

use super::policy::{Block, Content, SEGMENT, Version};

/// Versions of each machine.
pub const VERSIONS: usize = 10;
/// Systems, of which each machine has one.
const SYSTEMS: u64 = 6;
/// Applications, of which each machine has some.
const APPLICATIONS: u64 = 80;
const APPLICATIONS_EACH: usize = 5;
/// Most blocks of a file.
const MAX_FILE: u64 = 1 << 12;
/// Set in numbers of blocks that belong to one machine.
const OWN: Block = 1 << 63;

/// The size of each machine, by blocks.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Of its system.
    pub system: usize,
    /// Of each application.
    pub application: usize,
    /// Of data of its own.
    pub own: usize,
}

impl Size {
    /// Some 10 GB: a terabyte is ten machines with ten versions.
    pub const USUAL: Size = Size {
        system: 390_000,
        application: 40_000,
        own: 1_850_000,
    };
    /// A hundredth of that.
    pub const SMALL: Size = Size {
        system: 6_000,
        application: 800,
        own: 20_000,
    };

    fn blocks(self) -> usize {
        self.system + self.application * APPLICATIONS_EACH + self.own
    }
}

/// Whether a block may be on other machines.
pub fn is_shared(block: Block) -> bool {
    block & OWN == 0
}

/// Content of blocks whose digests are made of their numbers.
pub struct Numbers;

impl Content for Numbers {
    fn digest(&self, block: Block) -> Digest {
        let mut out = [0; 32];
        let mut state = block;
        for part in out.as_chunks_mut::<8>().0 {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            *part = mixed(state).to_le_bytes();
        }
        Digest(out)
    }
}

/// The finalizer of SplitMix64.
fn mixed(mut n: u64) -> u64 {
    n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

/// A file of a system or an application, as of some version: the number of its first block.
fn file(of: u64, number: u64, version: u64) -> Block {
    1 << 62 | of << 48 | number << 28 | version << 20
}

/// Blocks of a file: most are small, most data is in large ones.
fn file_blocks(of: u64, number: u64) -> u64 {
    let random = mixed(of << 32 | number | 1 << 60);
    (1u64 << (random % 9)) + random / 16 % (1 << (random / 1024 % 12 + 1)) % MAX_FILE
}

/// A machine of the fleet, as of some day.
pub struct Machine {
    number: usize,
    rng: Rng,
    disk: Vec<Block>,
    segments: Vec<Arc<[Block]>>,
    /// The files of the system and of applications: which, and where.
    files: Vec<(u64, u64, usize)>,
    versions: HashMap<(u64, u64), u64>,
    next: Block,
    /// Where data of its own is, and free space behind it.
    own: usize,
    free: usize,
}

impl Machine {
    /// A machine on its first day.
    pub fn new(number: usize, size: Size) -> Self {
        let mut rng = Rng::with_seed(number as u64 ^ 0x00f1_ee70);
        let mut of = vec![(rng.u64(..SYSTEMS), size.system)];
        let mut chosen = HashSet::new();
        while chosen.len() < APPLICATIONS_EACH {
            // Some are on most machines.
            chosen.insert(rng.u64(..APPLICATIONS).min(rng.u64(..APPLICATIONS)));
        }
        let mut chosen: Vec<u64> = chosen.into_iter().collect();
        chosen.sort_unstable();
        of.extend(chosen.into_iter().map(|n| (SYSTEMS + n, size.application)));
        let total = size.blocks();
        let mut machine = Machine {
            number,
            disk: vec![0; (total + total / 4).next_multiple_of(SEGMENT)],
            segments: Vec::new(),
            files: Vec::new(),
            versions: HashMap::new(),
            next: OWN | (number as u64) << 36,
            own: 0,
            free: 0,
            rng,
        };
        let mut at = 0;
        for (of, blocks) in of {
            let mut order: Vec<u64> = Vec::new();
            let mut left = blocks as u64;
            for number in 0.. {
                let len = file_blocks(of, number);
                if len > left {
                    break;
                }
                left -= len;
                // A few files are not on every machine.
                if machine.rng.u8(..20) > 0 {
                    order.push(number);
                }
            }
            // Written in nearly the same order everywhere.
            for _ in 0..order.len() / 10 {
                let (a, b) = (
                    machine.rng.usize(..order.len()),
                    machine.rng.usize(..order.len()),
                );
                order.swap(a, b);
            }
            for number in order {
                machine.put(at, file(of, number, 0), file_blocks(of, number));
                machine.files.push((of, number, at));
                at += file_blocks(of, number) as usize;
            }
        }
        machine.own = at;
        machine.write_new(at, size.own);
        machine.free = at + size.own;
        machine
    }

    /// Writes consecutive numbers.
    fn put(&mut self, at: usize, first: Block, blocks: u64) {
        let end = (at + blocks as usize).min(self.disk.len());
        for (place, block) in self.disk[at..end].iter_mut().zip(first..) {
            *place = block;
        }
    }

    fn write_new(&mut self, at: usize, blocks: usize) {
        let first = self.next;
        self.next += blocks as u64;
        self.put(at, first, blocks as u64);
    }

    /// A day: packages are upgraded, as on every machine that has them; pages of a database are written, a log grows, a
    /// dump is written anew, most of it as before, at another place.
    pub fn age(&mut self, day: usize) {
        let own = self.free - self.own;
        let mut upgraded = Vec::new();
        for (nth, &(of, number, _)) in self.files.iter().enumerate() {
            if mixed(of << 40 | number << 8 | day as u64).is_multiple_of(40) {
                upgraded.push(nth);
            }
        }
        let room = self.disk.len() - self.free;
        for nth in upgraded {
            let (of, number, at) = self.files[nth];
            let version = self.versions.entry((of, number)).or_default();
            *version += 1;
            let (first, blocks) = (file(of, number, *version), file_blocks(of, number));
            // Half of them where free space is.
            let at = match self.rng.bool() {
                true => at,
                false => self.free + self.rng.usize(..room / 2),
            };
            self.put(at, first, blocks);
        }
        let pages = own / 8;
        for _ in 0..own / 300 {
            let at = self.own + self.rng.usize(..pages);
            let blocks = self.rng.usize(1..4);
            self.write_new(at, blocks);
        }
        let log = own / 200;
        self.write_new(self.own + own / 2 + day * log, log);
        // The dump has two places in turn.
        let dump = own / 40;
        let place = |day: usize| self.own + own / 4 + day % 2 * (dump + 77);
        let (from, to) = (place(day + 1), place(day));
        self.disk.copy_within(from..from + dump, to);
        for _ in 0..dump / 100 {
            let at = to + self.rng.usize(..dump);
            let blocks = self.rng.usize(1..6);
            self.write_new(at, blocks);
        }
    }

    /// The disk as it is now.
    pub fn version(&mut self) -> Version {
        let mut segments: Vec<Arc<[Block]>> = Vec::with_capacity(self.disk.len() / SEGMENT);
        for (at, blocks) in self.disk.chunks(SEGMENT).enumerate() {
            let same = self.segments.get(at).filter(|old| ***old == *blocks);
            segments.push(same.cloned().unwrap_or_else(|| blocks.into()));
        }
        self.segments.clone_from(&segments);
        Version {
            machine: self.number,
            segments,
        }
    }
}

/// What a fleet has, exactly.
#[derive(Debug, Default)]
pub struct Totals {
    /// Blocks of all versions.
    pub raw: u64,
    /// Different ones.
    pub distinct: u64,
    /// The 2 % that most machines have, at least two, in the order of their numbers.
    pub popular: Vec<Block>,
    /// The share of segments that a day changes.
    pub changed_segments: f64,
}

/// Counts a fleet.
pub fn count(machines: usize, size: Size) -> Totals {
    let mut totals = Totals::default();
    let mut of_machines: HashMap<Block, u32> = HashMap::new();
    let (mut changed, mut segments) = (0u64, 0u64);
    for number in 0..machines {
        let mut machine = Machine::new(number, size);
        let mut shared: HashSet<Block> = HashSet::new();
        let mut own: HashSet<Block> = HashSet::new();
        let mut before: Vec<Arc<[Block]>> = Vec::new();
        for day in 0..VERSIONS {
            if day > 0 {
                machine.age(day);
            }
            let version = machine.version();
            totals.raw += version.data_blocks();
            for (at, segment) in version.segments.iter().enumerate() {
                segments += u64::from(day > 0);
                if before.get(at).is_some_and(|old| Arc::ptr_eq(old, segment)) {
                    continue;
                }
                changed += u64::from(day > 0);
                for &block in segment.iter().filter(|block| **block != 0) {
                    match is_shared(block) {
                        true => shared.insert(block),
                        false => own.insert(block),
                    };
                }
            }
            before = version.segments;
        }
        totals.distinct += own.len() as u64;
        for block in shared {
            *of_machines.entry(block).or_default() += 1;
        }
    }
    totals.distinct += of_machines.len() as u64;
    totals.changed_segments = changed as f64 / segments.max(1) as f64;
    totals.popular = popular(of_machines, totals.distinct);
    totals
}

/// The 2 % of all different blocks that most machines have.
pub fn popular(of_machines: impl IntoIterator<Item = (Block, u32)>, distinct: u64) -> Vec<Block> {
    let mut sorted: Vec<(u32, Block)> = of_machines
        .into_iter()
        .filter(|(_, machines)| *machines > 1)
        .map(|(block, machines)| (machines, block))
        .collect();
    sorted.sort_unstable_by_key(|&(machines, block)| (std::cmp::Reverse(machines), block));
    sorted.truncate((distinct / 50) as usize);
    let mut blocks: Vec<Block> = sorted.into_iter().map(|(_, block)| block).collect();
    blocks.sort_unstable();
    blocks
}
