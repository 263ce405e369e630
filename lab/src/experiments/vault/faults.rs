//! Vaults whose hosts are stopped, and whose store fails, at random: what was acknowledged must be there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drover_core::{BLOCK_SIZE, ReadAt};
use drover_vault::testing::{Fault, MemoryObjects};
use drover_vault::{Checking, Machine, SnapshotFile, SnapshotId, Vault};
use fastrand::Rng;

use super::{By, Tool, Version};
use crate::bench::{Case, Column, Experiment, Row};
use crate::files::identical;
use crate::setup::Lab;

const RUNS: &str = "runs";
const STRUCK: &str = "struck";
const KEPT: &str = "acknowledged";
const READ: &str = "read_again";
const LOST: &str = "lost";

pub const EXPERIMENT: Experiment = Experiment {
    name: "vault-faults",
    title: "A vault whose hosts are stopped",
    text: "Random histories of snapshots, deletions and compactions of three machines, from seeds. *In memory*: in the store, one operation of one command is refused, its answer is lost, or the host is gone before it or after it; \
days pass at times. *Killed*: the real program, in a local directory, by SIGKILL after a random time. After each command every snapshot that was acknowledged and not deleted is read again and compared, and at the end the vault is checked in full. \
*Lost* counts snapshots that are not there, or not what they were; the run ends there.",
    columns: &[
        Column::label("by", "by"),
        Column::figure(RUNS, "commands", 0),
        Column::figure(STRUCK, "interrupted", 0),
        Column::figure(KEPT, "snapshots acknowledged", 0),
        Column::figure(READ, "read again", 0),
        Column::figure(LOST, "lost", 0),
    ],
    cases: |_| {
        Ok(vec![
            Case::new("memory", "faults in a store in memory", 1, &[]),
            Case::new("killed", "the program is killed", 1, &[]),
        ])
    },
    run,
};

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let (by, counts) = match case.id.as_str() {
        "memory" => ("in memory", in_memory(lab, lab.either(400, 8))?),
        _ => ("killed", killed(lab, lab.either(300, 10))?),
    };
    let mut row = Row::new([("by", by.to_owned())]);
    row.set(RUNS, counts.runs as f64);
    row.set(STRUCK, counts.struck as f64);
    row.set(KEPT, counts.kept as f64);
    row.set(READ, counts.read as f64);
    row.set(LOST, 0.0);
    Ok(vec![row])
}

#[derive(Default, Debug)]
struct Counts {
    runs: u64,
    struck: u64,
    kept: u64,
    read: u64,
}

/// A disk of blocks by number.
fn disk(numbers: &[u32]) -> Vec<u8> {
    let mut out = vec![0; numbers.len() * BLOCK_SIZE];
    for (block, &n) in out.chunks_exact_mut(BLOCK_SIZE).zip(numbers) {
        if n != 0 {
            Rng::with_seed(u64::from(n)).fill(&mut block[..BLOCK_SIZE / 2]);
        }
    }
    out
}

/// Changes some blocks, or moves or drops some.
fn change(rng: &mut Rng, blocks: &mut Vec<u32>) {
    for _ in 0..rng.usize(..40) {
        let at = rng.usize(..blocks.len());
        blocks[at] = rng.u32(..100_000);
    }
    match rng.u8(..4) {
        0 => blocks.rotate_left(rng.usize(..300)),
        1 => blocks.extend((0..rng.usize(..400)).map(|_| rng.u32(..100_000))),
        2 => blocks.truncate(1000),
        _ => {}
    }
}

const FAULTS: [Fault; 4] = [
    Fault::Refuse,
    Fault::LoseAnswer,
    Fault::StopBefore,
    Fault::StopAfter,
];
const STEPS: usize = 14;
const DAY: Duration = Duration::from_secs(86_400);

/// What a vault must have.
type Kept = BTreeMap<SnapshotId, Vec<u8>>;

fn in_memory(lab: &Lab, seeds: u64) -> Result<Counts> {
    let work = lab.work("faults")?;
    let image = work.join("disk.raw");
    let mut counts = Counts::default();
    for seed in 0..seeds {
        history(seed, &image, &mut counts).with_context(|| format!("seed {seed}"))?;
    }
    Ok(counts)
}

fn history(seed: u64, image: &Path, counts: &mut Counts) -> Result<()> {
    let mut rng = Rng::with_seed(seed);
    let objects = MemoryObjects::default();
    Vault::create_on(Arc::new(objects.clone()))?;
    let mut disks: Vec<Vec<u32>> = (0..3u32)
        .map(|n| (n * 300..n * 300 + 1200).collect())
        .collect();
    let mut kept = Kept::new();
    for step in 0..STEPS {
        counts.runs += 1;
        let (at, fault) = (rng.u64(..60), FAULTS[rng.usize(..4)]);
        let struck = Arc::new(AtomicU64::new(0));
        let strikes = struck.clone();
        let view = objects.with_hook(move |number, _| {
            (number == at).then(|| {
                strikes.store(1, Ordering::Relaxed);
                fault
            })
        });
        let Ok(vault) = Vault::open_on(Arc::new(view)) else {
            continue;
        };
        let nth = rng.usize(..3);
        match rng.u8(..6) {
            0..4 => {
                change(&mut rng, &mut disks[nth]);
                let bytes = disk(&disks[nth]);
                fs::write(image, &bytes)?;
                let machine = Machine::new(format!("m{nth}"))?;
                let time = 1000 + step as i64;
                if let Ok(made) = vault.backup_at(image, &machine, "host", time, &mut |_| {}) {
                    counts.kept += 1;
                    kept.insert(made.id, bytes);
                }
            }
            4 if !kept.is_empty() => {
                // Whether it is forgotten is not known after an error.
                let id = kept.keys().nth(rng.usize(..kept.len())).cloned();
                let id = id.context("there is one")?;
                kept.remove(&id);
                let _ = vault.forget(&[id]);
            }
            _ => {
                objects.advance(DAY * rng.u32(..3));
                let _ = vault.collect(Duration::ZERO, &mut |_| {});
            }
        }
        counts.struck += struck.load(Ordering::Relaxed);
        all_there(&objects, &kept, counts)?;
    }
    objects.advance(DAY * 2);
    let vault = Vault::open_on(Arc::new(objects.clone()))?;
    vault.collect(Duration::ZERO, &mut |_| {})?;
    all_there(&objects, &kept, counts)?;
    let report = vault.check(Checking::Full, &mut |_, _| {})?;
    ensure!(report.problems.is_empty(), "lost: {:?}", report.problems);
    Ok(())
}

fn all_there(objects: &MemoryObjects, kept: &Kept, counts: &mut Counts) -> Result<()> {
    let vault = Vault::open_on(Arc::new(objects.clone()))?;
    for (id, bytes) in kept {
        let snapshot = vault
            .open_snapshot(id)
            .with_context(|| format!("lost: {id}"))?;
        let file = SnapshotFile::new(snapshot);
        let mut read = vec![0; bytes.len()];
        file.read_exact_at(&mut read, 0)
            .with_context(|| format!("lost: {id}"))?;
        ensure!(
            file.len() == bytes.len() as u64 && read == *bytes,
            "lost: {id} is another"
        );
        counts.read += 1;
    }
    Ok(())
}

/// The program, killed at a random moment.
fn killed(lab: &Lab, commands: u64) -> Result<Counts> {
    let tool = Tool::new(lab, By::Drover("all"))?;
    let mut rng = Rng::with_seed(9);
    let mut counts = Counts::default();
    let mut disks: Vec<Vec<u32>> = (0..3u32)
        .map(|n| (n * 900..n * 900 + 6000).collect())
        .collect();
    // Of each machine, the image of the latest snapshot that was acknowledged.
    let mut latest: BTreeMap<String, std::path::PathBuf> = BTreeMap::new();
    let mut micros = 20_000;
    for number in 0..commands {
        counts.runs += 1;
        let nth = rng.usize(..3);
        let machine = format!("m{nth}");
        let image = tool.work.join(&format!("disk-{number}.raw"));
        let makes = rng.u8(..4) > 0;
        let args = if makes {
            change(&mut rng, &mut disks[nth]);
            fs::write(&image, disk(&disks[nth]))?;
            let version = Version {
                machine: machine.clone(),
                image: image.clone(),
            };
            tool.args_to_store(0, &version)
        } else {
            let forget = ["vault", "forget", "--keep-last", "1", "--yes"];
            let compact = ["vault", "compact", "--grace", "0s"];
            let args = if rng.bool() {
                &forget[..]
            } else {
                &compact[..]
            };
            args.iter().map(|arg| (*arg).to_owned()).collect()
        };
        let began = std::time::Instant::now();
        let mut child = tool
            .command()
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        std::thread::sleep(Duration::from_micros(rng.u64(..micros * 2)));
        let _ = child.kill();
        let status = child.wait()?;
        counts.struck += u64::from(status.signal().is_some());
        if status.success() {
            // About as long as a command takes, so that it is killed anywhere.
            micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(micros);
        }
        if makes && status.success() {
            counts.kept += 1;
            latest.insert(machine.clone(), image.clone());
        }
        // One that was killed may be there all the same, and is the latest then: so each is asked for by what it must be.
        let Some(wanted) = latest.get(&machine) else {
            continue;
        };
        let out = tool.work.join("restored");
        let _ = fs::remove_file(&out);
        let name = format!("{machine}@latest");
        tool.run(&["restore", &name, &out.display().to_string()])
            .with_context(|| format!("lost: {machine} after command {number}"))?;
        let is_it = identical(wanted, &out)?;
        let is_new = makes && image.is_file() && identical(&image, &out)?;
        ensure!(
            is_it || is_new,
            "lost: {machine} is another after command {number}"
        );
        if is_new {
            latest.insert(machine, image);
        }
        counts.read += 1;
    }
    tool.run(&["vault", "check", "--full"]).context("lost")?;
    Ok(counts)
}
