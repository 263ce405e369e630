//! How many duplicates policies find, and with how much memory: on the digests of images, and of a made-up fleet of up
//! to a hundred terabytes.

pub mod availability;
pub mod fleet;
pub mod policy;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use drover_core::{BLOCK_SIZE, Digest, is_zero};
use drover_vault::Digester;

use self::fleet::{Numbers, Size};
use self::policy::{Block, Content, Counts, Paper, Policy, Routed, SEGMENT, Vault, Version};
use super::vault::{corpora, versions_of};
use crate::bench::{Case, Column, Experiment, Need, Row};
use crate::setup::Lab;

const FOUND: &str = "found_percent";
const BY_SIGNATURE: &str = "found_with_signatures_percent";
const TIMES: &str = "times_perfect";
const MEMORY: &str = "index_mb";
const PER_TB: &str = "index_mb_per_tb";
const RATIO: &str = "data_to_memory";

pub const EXPERIMENT: Experiment = Experiment {
    name: "duplicates",
    title: "Duplicates found, and the memory it takes",
    text: "The digests of the blocks of all versions of machines pass through the vault's own sparse index, as they do in backups; nothing is stored. *Found* is the share of all \
duplicate blocks that is not stored again, *times perfect* what is stored over what an index of every block would store, *index* the memory that grows with what is stored (8 bytes a hook, 24 a \
container; a backup takes at most 16 MiB of lists beside it): with `none` and `popular` the sum over the machines, of which a backup loads one. *Popular* blocks are the 2 % that most machines have, with hindsight. \
*Paper* is the scheme of Zhang et al.: the segment of 2 MiB at the same place of the version before, at most ten others with the same least digest, and popular blocks by an index of 32 bytes each. *Routed* is its rival: each segment goes to one of ten machines by its least digest, which has a Bloom filter of 10 bits a block and an index of all it has on a disk. \
*And by signatures* adds what such a search would find of what `none` does not. *By hooks alone*: without the comparison with the latest version. The fleet is made up from a seed: machines of 10 GB and ten versions, \
of six systems and eighty applications, with upgrades that all get, database pages, logs and dumps; machine by machine.",
    columns: &[
        Column::label("by", "by"),
        Column::figure(FOUND, "% found", 2),
        Column::optional(BY_SIGNATURE, "% and by signatures", 2),
        Column::figure(TIMES, "times perfect", 3),
        Column::figure(MEMORY, "MB of index", 2),
        Column::figure(PER_TB, "MB a raw TB", 2),
        Column::optional(RATIO, "raw bytes to one of memory", 0),
    ],
    cases: |lab| Ok(cases(lab)),
    run,
};

/// Fleets, by machines of a tenth of a terabyte each; the rank of the case.
const FLEETS: [(&str, usize, u8); 3] = [
    ("fleet-1tb", 10, 1),
    ("fleet-10tb", 100, 1),
    ("fleet-100tb", 1000, 2),
];
/// Above this, only what shares all is measured.
const MAX_ALL_POLICIES: usize = 100;
/// Above this, the index of the paper's rival is too large.
const MAX_ROUTED: usize = 10;
/// Memory of a backup that does not grow, in bytes.
const FIXED: f64 = (16 << 20) as f64;

fn cases(lab: &Lab) -> Vec<Case> {
    let mut cases = Vec::new();
    for (id, corpus, rank) in corpora(lab) {
        let versions: usize = corpus.iter().map(|(_, versions)| versions.len()).sum();
        let what = format!("{versions} versions of {} machines", corpus.len());
        cases.push(Case::new(id, what, rank, &[Need::Library]));
    }
    if !lab.small {
        for (id, machines, rank) in FLEETS {
            let what = format!(
                "{machines} made-up machines, {} versions each",
                fleet::VERSIONS
            );
            cases.push(Case::new(id, what, rank, &[]));
        }
    }
    cases
}

/// A policy, with the name of its row.
enum By {
    Vault(&'static str, Vault),
    Paper(&'static str, Paper),
    Routed(&'static str, Routed),
}

impl By {
    fn name(&self) -> &'static str {
        match self {
            By::Vault(name, _) | By::Paper(name, _) | By::Routed(name, _) => name,
        }
    }

    fn policy(&mut self) -> &mut dyn Policy {
        match self {
            By::Vault(_, vault) => vault,
            By::Paper(_, paper) => paper,
            By::Routed(_, routed) => routed,
        }
    }

    fn end(&mut self, machine: usize) {
        match self {
            By::Vault(_, vault) => vault.end(machine),
            By::Paper(_, paper) => paper.end(machine),
            By::Routed(..) => {}
        }
    }
}

fn policies(popular: &[Block]) -> Vec<By> {
    let vault = |name, all, compares, popular: &[Block]| {
        By::Vault(name, Vault::new(all, compares, popular.to_vec()))
    };
    vec![
        vault("--share all", true, true, &[]),
        vault("--share all, by hooks alone", true, false, &[]),
        vault("--share popular", false, true, popular),
        vault("--share none", false, true, &[]),
        vault("--share none, by hooks alone", false, false, &[]),
        By::Paper("paper, same place", Paper::new(false, &[])),
        By::Paper("paper, and similar segments", Paper::new(true, &[])),
        By::Paper("paper, and popular blocks", Paper::new(true, popular)),
        By::Paper(
            "paper, same place and popular blocks",
            Paper::new(false, popular),
        ),
        By::Routed("routed by signature to ten", Routed::new(10)),
    ]
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    match FLEETS.iter().find(|(id, ..)| *id == case.id) {
        Some((_, machines, _)) => Ok(of_fleet(*machines, Size::USUAL)),
        None => of_images(lab, case),
    }
}

/// The figures of a policy.
fn row(by: &str, counts: Counts, raw: u64, distinct: u64) -> Row {
    let mut row = Row::new([("by", by.to_owned())]);
    let duplicates = (raw - distinct).max(1) as f64;
    let found = |stored: u64| 100.0 * (raw - stored) as f64 / duplicates;
    let raw_tb = (raw * BLOCK_SIZE as u64) as f64 / 1e12;
    let bytes = counts.bytes as f64;
    row.set(FOUND, found(counts.stored));
    if by.starts_with("--share none") {
        row.set(BY_SIGNATURE, found(counts.stored - counts.by_signature));
    }
    row.set(TIMES, counts.stored as f64 / distinct.max(1) as f64);
    row.set(MEMORY, bytes / 1e6);
    row.set(PER_TB, bytes / 1e6 / raw_tb);
    if by.starts_with("--share all") {
        row.set(RATIO, raw_tb * 1e12 / (bytes + FIXED));
    }
    row
}

fn of_fleet(machines: usize, size: Size) -> Vec<Row> {
    let totals = fleet::count(machines, size);
    eprintln!(
        "  {machines} machines: {:.2} TB, {:.3} TB different; a day changes {:.1} % of the segments",
        (totals.raw * 4096) as f64 / 1e12,
        (totals.distinct * 4096) as f64 / 1e12,
        100.0 * totals.changed_segments
    );
    let mut policies = policies(&totals.popular);
    if machines > MAX_ALL_POLICIES {
        policies.truncate(1);
    }
    if machines > MAX_ROUTED {
        policies.retain(|by| !matches!(by, By::Routed(..)));
    }
    for number in 0..machines {
        let mut machine = fleet::Machine::new(number, size);
        for day in 0..fleet::VERSIONS {
            if day > 0 {
                machine.age(day);
            }
            let version = machine.version();
            for by in &mut policies {
                by.policy().store(&Numbers, &version);
            }
        }
        policies.iter_mut().for_each(|by| by.end(number));
        if number % 50 == 49 {
            eprintln!("  {} of {machines} machines", number + 1);
        }
    }
    let row = |by: &mut By| row(by.name(), by.policy().counts(), totals.raw, totals.distinct);
    policies.iter_mut().map(row).collect()
}

/// Blocks of images: the first is 1.
#[derive(Default)]
struct Interned {
    numbers: HashMap<Digest, Block>,
    digests: Vec<Digest>,
    /// By block, which machines have it, by bits.
    machines: Vec<u64>,
}

impl Content for Interned {
    fn digest(&self, block: Block) -> Digest {
        self.digests[block as usize - 1]
    }
}

impl Interned {
    /// The number of a block, which a machine has.
    fn number(&mut self, digest: Digest, machine: usize) -> Block {
        let number = *self.numbers.entry(digest).or_insert_with(|| {
            self.digests.push(digest);
            self.machines.push(0);
            self.digests.len() as Block
        });
        self.machines[number as usize - 1] |= 1 << (machine % 64);
        number
    }

    /// The blocks of an image.
    fn read(&mut self, image: &Path, machine: usize) -> Result<Version> {
        let file = File::open(image).with_context(|| format!("cannot open {}", image.display()))?;
        let size = file.metadata()?.len();
        let (mut segments, mut digests) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < size {
            let len = (size - at).min((SEGMENT * BLOCK_SIZE) as u64) as usize;
            let mut bytes = vec![0; len.next_multiple_of(BLOCK_SIZE)];
            file.read_exact_at(&mut bytes[..len], at)
                .with_context(|| format!("cannot read {}", image.display()))?;
            digests.clear();
            Digester::default().blocks(&bytes, &mut digests);
            let blocks = bytes.chunks(BLOCK_SIZE).zip(&digests);
            let segment: Arc<[Block]> = blocks
                .map(|(block, digest)| match is_zero(block) {
                    true => 0,
                    false => self.number(*digest, machine),
                })
                .collect();
            segments.push(segment);
            at += len as u64;
        }
        Ok(Version { machine, segments })
    }
}

fn of_images(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let mut content = Interned::default();
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    let mut versions = Vec::new();
    for version in versions_of(lab, &case.id)? {
        let next = names.len();
        let machine = *names.entry(version.machine).or_insert(next);
        versions.push(content.read(&version.image, machine)?);
    }
    let raw = versions.iter().map(Version::data_blocks).sum();
    let distinct = content.digests.len() as u64;
    let of_machines = (1..).zip(content.machines.iter().map(|bits| bits.count_ones()));
    let popular = fleet::popular(of_machines, distinct);
    let mut rows = Vec::new();
    for mut by in policies(&popular) {
        versions
            .iter()
            .for_each(|version| by.policy().store(&content, version));
        rows.push(row(by.name(), by.policy().counts(), raw, distinct));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same fleet twice is the same; the policies are in the order that they must be in, and none finds more than
    /// there is.
    #[test]
    fn a_small_fleet() {
        let rows = of_fleet(4, Size::SMALL);
        assert_eq!(rows, of_fleet(4, Size::SMALL));
        let found = |by: &str| {
            let row = rows.iter().find(|row| row.label("by") == by).unwrap();
            assert!(row.value(TIMES).unwrap() >= 1.0, "{row:?}");
            row.value(FOUND).unwrap()
        };
        for row in &rows {
            println!("{:40} {:.2}", row.label("by"), row.value(FOUND).unwrap());
        }
        assert!(found("--share all") > 98.0 && found("--share all") <= 100.0);
        assert!(found("--share all") > found("--share popular"));
        assert!(found("--share popular") > found("--share none"));
        assert!(found("--share none") >= found("--share none, by hooks alone"));
        assert!(found("--share none") > found("paper, and similar segments"));
        assert!(found("paper, and similar segments") > found("paper, same place"));
        assert!(found("paper, and popular blocks") > found("paper, and similar segments"));
    }

    #[test]
    fn blocks_of_images_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let block = |n: u8| vec![n; BLOCK_SIZE];
        std::fs::write(
            &image,
            [block(1), block(0), block(2), block(1), vec![3; 7]].concat(),
        )
        .unwrap();
        let mut content = Interned::default();
        let version = content.read(&image, 0).unwrap();
        assert_eq!(version.segments.len(), 1);
        assert_eq!(*version.segments[0], [1, 0, 2, 1, 3]);
        assert_eq!((version.data_blocks(), content.digests.len()), (4, 3));
        let again = content.read(&image, 1).unwrap();
        assert_eq!(again.segments, version.segments);
        assert_eq!(content.machines, [3, 3, 3]);
    }
}
