//! Deleting snapshots: how long it takes to know what becomes free, and to free it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use drover_core::BLOCK_SIZE;
use drover_vault::{ContainerId, Entry, Machine, SessionId, SnapshotId, Uses};

use super::{ALL, By, Tool, Version, size};
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::experiments::duplicates::fleet::{self, Size, VERSIONS};
use crate::experiments::duplicates::policy::{self, Block};
use crate::setup::Lab;
use crate::shell;

const DECIDE: &str = "decide_ms";
const WORST: &str = "worst_ms";
const USES: &str = "uses_kib";
const SECONDS: &str = "seconds";
const FREED: &str = "freed_mb";

pub const EXPERIMENT: Experiment = Experiment {
    name: "deletion",
    title: "Deleting snapshots",
    text: "*Decision*: how long it takes to know exactly what a deletion makes free, in a vault in a local directory; each snapshot in turn, at most a hundred. *Deleted and freed*: the oldest \
version of a machine, and its space (`drover vault forget` and `compact`, `restic forget --prune`, `borg delete` and `compact`), start of the programs included. \
*Made-up machines* of 70 MB with five versions each are stored by each program. *Lists only*: the vault has what says which blocks each snapshot uses, as long as they are for machines \
of 1 GB with ten versions each, and no data.",
    columns: &[
        Column::label("by", "by"),
        Column::label("snapshots", "snapshots"),
        Column::optional(DECIDE, "ms to decide, median", 1),
        Column::optional(WORST, "worst", 1),
        Column::optional(USES, "KiB of lists a snapshot", 1),
        Column::optional(SECONDS, "seconds to delete one", 2),
        Column::optional(FREED, "MB freed", 1),
    ],
    cases: |lab| Ok(cases(lab)),
    run,
};

/// Machines with five versions each that are stored.
const STORED: [(&str, usize, u8); 1] = [("50-snapshots", 10, 1)];
/// Machines of which there are lists only, each with ten versions.
const LISTED: [(&str, usize, u8); 2] = [("50-lists", 5, 1), ("1000-lists", 100, 1)];
/// Versions that are stored.
const STORED_VERSIONS: usize = 5;
/// Deletions that are decided.
const MAX_DECIDED: usize = 100;

fn cases(lab: &Lab) -> Vec<Case> {
    let all = |cases: &[(&'static str, usize, u8)], what: &str| {
        let case = |&(id, machines, rank): &(&'static str, usize, u8)| {
            Case::new(
                id,
                format!("{machines} made-up machines, {what}"),
                rank,
                &[],
            )
        };
        cases.iter().map(case).collect::<Vec<_>>()
    };
    match lab.small {
        true => all(&[("4-lists", 1, 1)], "lists only"),
        false => [all(&STORED, "stored"), all(&LISTED, "lists only")].concat(),
    }
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    if let Some((_, machines, _)) = STORED.iter().find(|(id, ..)| *id == case.id) {
        return stored(lab, *machines);
    }
    let listed = LISTED.iter().find(|(id, ..)| *id == case.id);
    let machines = listed.map_or(1, |(_, machines, _)| *machines);
    Ok(vec![lists(lab, machines, lab.either(LARGE, TINY))?])
}

/// Some 1 GB, as the machines of the design's corpus.
const LARGE: Size = Size {
    system: 39_000,
    application: 4_000,
    own: 185_000,
};
const TINY: Size = Size {
    system: 2_000,
    application: 200,
    own: 3_000,
};
/// Some 70 MB.
const SMALL: Size = Size {
    system: 6_000,
    application: 600,
    own: 8_000,
};

/// Times a decision for each of some snapshots; milliseconds.
fn decide(vault: &drover_vault::Vault, ids: &[SnapshotId]) -> Result<Vec<f64>> {
    let step = ids.len().div_ceil(MAX_DECIDED).max(1);
    let mut times = Vec::new();
    for id in ids.iter().step_by(step) {
        let began = Instant::now();
        let freed = vault.would_free(std::slice::from_ref(id))?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        anyhow::ensure!(freed.snapshots == 1, "{id}");
    }
    Ok(times)
}

fn set_times(row: &mut Row, times: &[f64]) {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    if let (Some(worst), Some(median)) = (sorted.last(), sorted.get(sorted.len() / 2)) {
        row.set(DECIDE, *median);
        row.set(WORST, *worst);
    }
}

/// Every program stores the versions; then one goes.
fn stored(lab: &Lab, machines: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for by in ALL
        .into_iter()
        .filter(|by| !matches!(by, By::Drover("popular")))
    {
        let snapshots = (machines * STORED_VERSIONS).to_string();
        let row = Row::new([("by", by.name()), ("snapshots", snapshots)]);
        rows.push(match by.program().filter(|program| !shell::have(program)) {
            Some(program) => row.but(Verdict::Skipped(format!("no {program} here"))),
            None => match delete_one(lab, by, machines, row.clone()) {
                Ok(row) => row,
                Err(error) => row.but(Verdict::failed(&error)),
            },
        });
    }
    Ok(rows)
}

fn delete_one(lab: &Lab, by: By, machines: usize, mut row: Row) -> Result<Row> {
    let tool = Tool::new(lab, by)?;
    let mut fleet: Vec<(fleet::Machine, Version, policy::Version)> = Vec::new();
    for number in 0..machines {
        let image = tool.work.join(&format!("machine-{number}.raw"));
        let version = Version {
            machine: format!("machine-{number}"),
            image,
        };
        fleet.push((
            fleet::Machine::new(number, SMALL),
            version,
            policy::Version::default(),
        ));
    }
    let mut number = 0;
    for day in 0..STORED_VERSIONS {
        for (machine, version, written) in &mut fleet {
            if day > 0 {
                machine.age(day);
            }
            let now = machine.version();
            write(&version.image, written, &now)?;
            *written = now;
            tool.store(number, version)?;
            number += 1;
        }
    }
    if matches!(by, By::Drover(_)) {
        let vault = drover_vault::Vault::open(&tool.store_dir())?;
        let (entries, _) = vault.snapshots(None)?;
        let ids: Vec<SnapshotId> = entries.into_iter().map(|entry: Entry| entry.id).collect();
        anyhow::ensure!(
            ids.len() == machines * STORED_VERSIONS,
            "{} snapshots",
            ids.len()
        );
        set_times(&mut row, &decide(&vault, &ids)?);
        row.set(
            USES,
            size(&tool.store_dir().join("uses"))? as f64 / 1024.0 / ids.len() as f64,
        );
    }
    let before = size(&tool.store_dir())?;
    let began = Instant::now();
    tool.delete(0, &fleet[0].1, STORED_VERSIONS)?;
    row.set(SECONDS, began.elapsed().as_secs_f64());
    let freed = before.saturating_sub(size(&tool.store_dir())?);
    row.set(FREED, freed as f64 / 1e6);
    Ok(row)
}

/// Writes what differs from the version that is there.
fn write(image: &Path, there: &policy::Version, version: &policy::Version) -> Result<()> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(image)?;
    file.set_len((version.segments.len() * policy::SEGMENT * BLOCK_SIZE) as u64)?;
    let mut bytes = vec![0; policy::SEGMENT * BLOCK_SIZE];
    for (at, segment) in version.segments.iter().enumerate() {
        if there
            .segments
            .get(at)
            .is_some_and(|old| Arc::ptr_eq(old, segment))
        {
            continue;
        }
        bytes.fill(0);
        for (block, &number) in bytes.chunks_exact_mut(BLOCK_SIZE).zip(segment.iter()) {
            if number != 0 {
                // Half of it compresses.
                fastrand::Rng::with_seed(number).fill(&mut block[..BLOCK_SIZE / 2]);
            }
        }
        let len = segment.len() * BLOCK_SIZE;
        file.write_all_at(&bytes[..len], (at * policy::SEGMENT * BLOCK_SIZE) as u64)?;
    }
    file.sync_all()
        .with_context(|| format!("cannot write {}", image.display()))
}

/// Where blocks are in a vault that stores each once, in the order in which they come.
#[derive(Default)]
pub(super) struct Places {
    of: HashMap<Block, (ContainerId, u16)>,
    container: u64,
    local: u16,
}

impl Places {
    /// What a version uses; a container has blocks of one session only.
    pub(super) fn uses(&mut self, machine: &Machine, version: &policy::Version) -> Uses {
        self.next();
        let mut uses = Uses::default();
        let blocks = version.segments.iter().flat_map(|segment| segment.iter());
        for &block in blocks.filter(|block| **block != 0) {
            let (id, local) = match self.of.get(&block) {
                Some(&place) => place,
                None => {
                    if usize::from(self.local) == drover_vault::container::MAX_BLOCKS {
                        self.next();
                    }
                    let place = (ContainerId(self.container << 24), self.local);
                    self.local += 1;
                    self.of.insert(block, place);
                    place
                }
            };
            uses.insert(machine, id, local);
        }
        uses
    }

    fn next(&mut self) {
        (self.container, self.local) = (self.container + 1, 0);
    }
}

fn lists(lab: &Lab, machines: usize, size: Size) -> Result<Row> {
    let work = lab.work("deletion")?;
    let dir: PathBuf = work.join("vault");
    let vault = drover_vault::Vault::create(&dir)?;
    let put = |key: &str, bytes: &[u8]| -> Result<()> {
        let path = dir.join(key);
        fs::create_dir_all(path.parent().context("a key has a directory")?)?;
        fs::write(path, bytes)?;
        Ok(())
    };
    let mut places = Places::default();
    let (mut ids, mut bytes) = (Vec::new(), 0);
    for number in 0..machines {
        let name = Machine::new(format!("machine-{number}"))?;
        let mut machine = fleet::Machine::new(number, size);
        for day in 0..VERSIONS {
            if day > 0 {
                machine.age(day);
            }
            let id = SnapshotId {
                machine: name.clone(),
                time: 1_780_000_000 + day as i64 * 86_400,
                session: SessionId((number * VERSIONS + day) as u64 + 1),
            };
            let uses = places.uses(&name, &machine.version()).encode();
            bytes += uses.len();
            put(&id.uses(), &uses)?;
            put(&id.record(), b"not read")?;
            ids.push(id);
        }
        places.of.retain(|block, _| fleet::is_shared(*block));
    }
    let by = format!("drover, lists only, {} containers", places.container);
    let mut row = Row::new([("by", by), ("snapshots", ids.len().to_string())]);
    set_times(&mut row, &decide(&vault, &ids)?);
    row.set(USES, bytes as f64 / 1024.0 / ids.len() as f64);
    Ok(row)
}
