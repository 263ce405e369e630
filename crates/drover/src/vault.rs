//! `vault`, `snapshots` and `restore`.

mod common;
mod drill;
mod restore_file;
mod schedule;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use drover_agent::error::Error;
use drover_agent::home::{Chosen, Home};
use drover_agent::text::{bytes, clean, count, moment};
use drover_agent::vaults::{self, Key};
use drover_vault::{
    Checking, Entry, Keep, KeyEntry, Location, Machine, Problem, Reference, Secret, SnapshotId,
    Vault,
};
use serde_json::{Value, json};

use crate::bar::Bar;
use crate::cli::{
    ForgetArgs, OfVault, RestoreArgs, SnapshotsArgs, SnapshotsOf, VaultAction, VaultArgs,
    VaultCopyArgs, VaultInitArgs, VaultKeyAction, VaultKeyArgs,
};
use crate::failure::usage;
use crate::{out, prompt};
pub use common::{Progress, open};

/// A check without --full reads one container in so many.
const SAMPLE: u32 = 16;

/// A new secret: from a file, which is created if it does not exist, or a passphrase, which is asked for twice at a terminal.
fn new_secret(key_file: Option<&Path>) -> Result<Secret> {
    if let Some(path) = key_file {
        let (secret, created) = vaults::read_or_create_key(path)?;
        if created {
            out::note(&format!(
                "drover: created the key file {}",
                clean(&path.display().to_string())
            ));
        }
        return Ok(secret);
    }
    let text = prompt::new_passphrase()?;
    Secret::new(text.as_bytes()).ok_or_else(|| usage("the passphrase is empty"))
}

/// `drover vault`.
///
/// # Errors
/// Those of each command.
pub fn vault(home: Option<&Path>, args: VaultArgs) -> Result<()> {
    match args.action {
        VaultAction::Init(args) => init(home, args),
        VaultAction::Key(args) => key(home, args),
        VaultAction::Forget(args) => forget(&open(home, &args.of)?, &args),
        VaultAction::Compact { grace, limit, of } => {
            compact(&open(home, &of)?, grace, limit, of.json)
        }
        VaultAction::Copy(args) => copy(home, &args),
        VaultAction::Schedule(args) => schedule::schedule(home, &args),
        VaultAction::Drill(args) => drill::drill(home, &args),
        VaultAction::Popular { top, limit, of } => popular(&open(home, &of)?, top, limit, of.json),
        VaultAction::Check { full, from, of, .. } => check(home, full, from, &of),
        VaultAction::Stats { of } => stats(&open(home, &of)?, of.json),
    }
}

fn init(home: Option<&Path>, args: VaultInitArgs) -> Result<()> {
    // With its identity: without one it is no site.
    let (home, _) = Home::init(Home::locate(home)?, &Chosen::default())?;
    let vault = args.vault.absolute()?;
    let (secret, key) = match (args.encrypt, args.key_file) {
        (false, _) => (None, Key::None),
        (true, None) => (Some(new_secret(None)?), Key::Asked),
        (true, Some(path)) => {
            let path = std::path::absolute(path)?;
            (Some(new_secret(Some(&path))?), Key::File(path))
        }
    };
    let labelled = secret.as_ref().map(|secret| (secret, "the first"));
    vault
        .create(args.share.into(), labelled)
        .map_err(Error::from)?;
    if secret.is_some() {
        out::note(
            "drover: the vault is encrypted: without its passphrase or key file nobody can read anything in it, ever; keep a copy elsewhere",
        );
    }
    vaults::add(&home, &vault, key)?;
    match args.json {
        true => out::json(&json!({"vault": vault.to_string(), "encrypted": secret.is_some()})),
        false => out::line(&format!("created the vault {}", clean(&vault.to_string()))),
    }
}

/// `drover vault key`.
fn key(home: Option<&Path>, args: VaultKeyArgs) -> Result<()> {
    match args.action {
        VaultKeyAction::Add {
            new_key_file,
            label,
            of,
        } => {
            let vault = open(home, &of)?;
            // Before anything is asked for.
            vault.keys().map_err(Error::from)?;
            let secret = new_secret(new_key_file.as_deref())?;
            let id = vault.add_key(&secret, &label).map_err(Error::from)?;
            match of.json {
                true => out::json(&json!({"key": id.to_string(), "label": label})),
                false => out::line(&format!("added the key {id}")),
            }
        }
        VaultKeyAction::Remove { key, of } => {
            let vault = open(home, &of)?;
            vault.remove_key(key).map_err(Error::from)?;
            match of.json {
                true => out::json(&json!({"key": key.to_string(), "removed": true})),
                false => out::line(&format!("removed the key {key}")),
            }
        }
        VaultKeyAction::List { of } => {
            let keys = open(home, &of)?.keys().map_err(Error::from)?;
            if of.json {
                return keys.iter().try_for_each(|key| {
                    out::json(&json!({
                        "key": key.id.to_string(), "label": key.label, "created_unix": key.created,
                        "used": key.is_used,
                    }))
                });
            }
            let row = |key: &KeyEntry| {
                let used = if key.is_used { "this one" } else { "" };
                vec![
                    key.id.to_string(),
                    moment(key.created),
                    clean(&key.label),
                    used.into(),
                ]
            };
            let heading = ["key", "added (utc)", "label", "used"];
            out::line(&out::table(&heading, keys.iter().map(row).collect(), &[]))
        }
    }
}

/// A snapshot as JSON.
pub fn json_of(entry: &Entry) -> Value {
    let r = &entry.record;
    json!({
        "snapshot": entry.id.to_string(), "name": entry.id.machine.as_str(), "time": entry.id.when(),
        "time_unix": entry.id.time, "id": entry.id.session.to_string(), "source": r.source, "host": r.host,
        "format": r.format, "file_bytes": r.file_bytes, "disk_bytes": r.disk_bytes, "data_bytes": r.data_bytes,
        "new_bytes": r.new_bytes, "stored_bytes": r.stored_bytes, "root": r.root.to_string(),
    })
}

/// `drover snapshots`.
///
/// # Errors
/// When the vault cannot be read.
pub fn snapshots(home: Option<&Path>, args: &SnapshotsArgs) -> Result<()> {
    let (mut of, mut name) = (args.of.clone(), None);
    for what in &args.of_what {
        let before = match what {
            SnapshotsOf::Machine(machine) => name.replace(machine).is_some(),
            SnapshotsOf::Peer(peer) => of.vault.vault.replace(peer.clone()).is_some(),
        };
        if before {
            return Err(usage("name one machine and one vault at most"));
        }
    }
    let vault = open(home, &of)?;
    let (entries, damaged) = vault.snapshots(name).map_err(Error::from)?;
    for id in &damaged {
        out::note(&format!(
            "drover: the record of {} is damaged; see `drover vault check`",
            clean(&id.to_string())
        ));
    }
    if args.of.json {
        return entries
            .iter()
            .try_for_each(|entry| out::json(&json_of(entry)));
    }
    if entries.is_empty() {
        out::note("drover: no snapshots");
        return Ok(());
    }
    let rows = entries
        .iter()
        .map(|entry| {
            let r = &entry.record;
            vec![
                clean(entry.id.machine.as_str()),
                entry.id.when(),
                bytes(r.file_bytes),
                bytes(r.data_bytes),
                bytes(r.new_bytes),
                bytes(r.stored_bytes),
                clean(&format!("{}:{}", r.host, r.source)),
            ]
        })
        .collect();
    let heading = ["name", "time", "size", "data", "new", "stored", "from"];
    out::line(&out::table(&heading, rows, &[2, 3, 4, 5]))
}

/// `drover restore`.
///
/// # Errors
/// When there is no such snapshot, the vault is damaged, or the file cannot be written.
pub fn restore(home: Option<&Path>, args: &RestoreArgs) -> Result<()> {
    let vault = open(home, &args.of)?;
    let entry = vault.find(&args.what.snapshot).map_err(Error::from)?;
    if let Some(path) = &args.what.path {
        let of = (&vault, &entry, path.as_str());
        return restore_file::restore(of, &args.file, args.yes, args.of.json);
    }
    if args.file.exists() {
        let question = format!(
            "Overwrite {} with {}?",
            clean(&args.file.display().to_string()),
            clean(&entry.id.to_string())
        );
        prompt::confirm(&question, args.yes)?;
    }
    let snapshot = vault.open_snapshot(&entry.id).map_err(Error::from)?;
    let mut progress = Progress::new(&entry.id.to_string(), args.of.json);
    let restored = vault.restore(&snapshot, &args.file, &mut |p| {
        progress.at(
            p.done_bytes,
            p.total_bytes,
            || json!({"written_bytes": p.written_bytes}),
        );
    });
    progress.clear();
    let restored = restored.map_err(Error::from)?;
    if args.of.json {
        return out::json(&json!({
            "event": "restored", "snapshot": entry.id.to_string(), "file": args.file,
            "file_bytes": restored.file_bytes, "written_bytes": restored.written_bytes, "in_place": restored.in_place,
        }));
    }
    out::line(&format!(
        "{}: {}, {} written",
        clean(&args.file.display().to_string()),
        clean(&entry.id.to_string()),
        bytes(restored.written_bytes)
    ))
}

/// The snapshots of a machine, as a list of one machine's.
fn snapshots_of(vault: &Vault, machine: &Machine) -> Result<Vec<Vec<Entry>>> {
    Ok(vec![vault.snapshots(Some(machine)).map_err(Error::from)?.0])
}

/// The snapshots of each disk of a machine that has several: NAME.DEVICE, made of that device.
fn of_disks(vault: &Vault, machine: &Machine) -> Result<Vec<Vec<Entry>>> {
    let mut found = Vec::new();
    for disk in vault.machines().map_err(Error::from)? {
        let device = disk.as_str().strip_prefix(machine.as_str());
        let Some(device) = device.and_then(|rest| rest.strip_prefix('.')) else {
            continue;
        };
        let of_it = format!("({device})");
        let (mut entries, _) = vault.snapshots(Some(&disk)).map_err(Error::from)?;
        entries.retain(|entry| entry.record.source.ends_with(&of_it));
        found.push(entries);
    }
    Ok(found)
}

/// The snapshots that `forget` is about to delete.
fn chosen(vault: &Vault, args: &ForgetArgs, keep: &Keep) -> Result<Vec<SnapshotId>> {
    let held = vault.held().map_err(Error::from)?;
    let mut ids = Vec::new();
    let mut machines = Vec::new();
    for name in &args.names {
        if let Some(reference) = Reference::parse(name) {
            if !keep.is_nothing() {
                return Err(usage(format!(
                    "{} is one snapshot: --keep options are for names of machines",
                    clean(name)
                )));
            }
            ids.push(vault.find(&reference).map_err(Error::from)?.id);
        } else {
            machines.push(Machine::new(name.as_str()).map_err(|e| usage(e.to_string()))?);
        }
    }
    if args.names.is_empty() {
        if keep.is_nothing() {
            return Err(usage(
                "say what to delete: a machine, a snapshot, or what to keep, such as --keep-last 7",
            ));
        }
        machines.extend(vault.machines().map_err(Error::from)?);
    }
    let mut wanted = Vec::new();
    for machine in machines {
        let mut found = snapshots_of(vault, &machine)?;
        if args.disks && !args.names.is_empty() {
            found.extend(of_disks(vault, &machine)?);
        }
        if found.iter().all(Vec::is_empty) && !args.names.is_empty() {
            return Err(Error::refused(format!("there is no snapshot of {machine}")).into());
        }
        wanted.extend(found);
    }
    for entries in wanted {
        let times: Vec<i64> = entries.iter().map(|e| e.id.time).collect();
        let kept = keep.decide(&times);
        let due = entries.into_iter().zip(kept).filter(|(_, kept)| !kept);
        for (entry, _) in due {
            // One of many, perhaps by a timer: it is deleted the next time. One that is named is refused.
            match held.iter().find(|held| held.id == entry.id) {
                Some(held) => out::note(&format!(
                    "drover: {} is kept: it is mounted as {}",
                    clean(&entry.id.to_string()),
                    clean(&held.holder)
                )),
                None => ids.push(entry.id),
            }
        }
    }
    ids.sort();
    ids.dedup();
    Ok(ids)
}

fn forget(vault: &Vault, args: &ForgetArgs) -> Result<()> {
    let keep = args.keep.keep();
    let ids = chosen(vault, args, &keep)?;
    vault.check_free(&ids).map_err(Error::from)?;
    let freed = vault.would_free(&ids).map_err(Error::from)?;
    if !args.dry_run && !ids.is_empty() {
        if !args.of.json {
            for id in &ids {
                out::note(&clean(&id.to_string()));
            }
        }
        let question = format!("Delete {}?", count(ids.len(), "snapshot"));
        prompt::confirm(&question, args.yes)?;
        vault.forget(&ids).map_err(Error::from)?;
    }
    if args.of.json {
        for id in &ids {
            out::json(
                &json!({"event": "forgotten", "snapshot": id.to_string(), "dry_run": args.dry_run}),
            )?;
        }
        return out::json(&json!({
            "event": "done", "snapshots": freed.snapshots, "garbage_bytes": freed.garbage_bytes,
            "dead_containers": freed.dead_containers, "dead_bytes": freed.dead_bytes, "dry_run": args.dry_run,
        }));
    }
    if args.dry_run {
        for id in &ids {
            out::line(&clean(&id.to_string()))?;
        }
    }
    let verb = if args.dry_run {
        "would be deleted"
    } else {
        "deleted"
    };
    out::line(&format!(
        "{} {verb}; {} of blocks that no other snapshot uses, before compression",
        count(ids.len(), "snapshot"),
        bytes(freed.garbage_bytes)
    ))?;
    if !args.dry_run && freed.garbage_bytes > 0 {
        out::note(
            "drover: `drover vault compact` frees the space, an hour from now at the earliest",
        );
    }
    Ok(())
}

/// Takes as long for so many bytes as a limit says.
fn pace(limit: Option<u64>) -> impl FnMut(u64) {
    move |bytes| {
        if let Some(limit) = limit.filter(|&limit| limit > 0) {
            std::thread::sleep(Duration::from_secs_f64(bytes as f64 / limit as f64));
        }
    }
}

fn popular(vault: &Vault, top: u8, limit: Option<u64>, as_json: bool) -> Result<()> {
    let done = vault
        .popularize(top, &mut pace(limit))
        .map_err(Error::from)?;
    if as_json {
        return out::json(&json!({
            "machines": done.machines, "different_blocks": done.different_blocks, "known_blocks": done.known_blocks,
            "added_blocks": done.added_blocks, "stored_bytes": done.stored_bytes,
            "least_machines": done.least_machines,
        }));
    }
    out::line(&format!(
        "{} of {} added, {} stored; {} were popular before",
        count(done.added_blocks as usize, "block"),
        done.different_blocks,
        bytes(done.stored_bytes),
        done.known_blocks
    ))
}

fn compact(vault: &Vault, grace: Duration, limit: Option<u64>, as_json: bool) -> Result<()> {
    let done = vault.collect(grace, &mut pace(limit));
    let done = done.map_err(Error::from)?;
    if as_json {
        return out::json(&json!({
            "snapshots": done.snapshots, "aborted": done.aborted, "removed": done.removed,
            "compacted": done.compacted, "freed_bytes": done.freed_bytes, "swept": done.swept,
        }));
    }
    out::line(&format!(
        "{} freed: {} removed, {} written again",
        bytes(done.freed_bytes),
        count(done.removed as usize, "container"),
        done.compacted
    ))
}

fn copy(home: Option<&Path>, args: &VaultCopyArgs) -> Result<()> {
    let vault = open(home, &args.of)?;
    let place = args.to.clone().absolute()?;
    let to = copy_of(home, &vault, &place, true)?;
    let mut progress = Progress::on(
        Bar::counting("copy", "snapshots", args.of.json),
        args.of.json,
    );
    let (began, limit) = (Instant::now(), args.limit.filter(|&limit| limit > 0));
    let copied = vault.copy(&to, args.all, &mut |p| {
        progress.bar_at(p.done_snapshots, p.total_snapshots);
        progress.tell(|| {
            json!({
                "event": "progress", "done_snapshots": p.done_snapshots, "total_snapshots": p.total_snapshots,
                "containers": p.containers, "moved_bytes": p.moved_bytes,
            })
        });
        if let Some(limit) = limit {
            let due = Duration::from_secs_f64(p.moved_bytes as f64 / limit as f64);
            std::thread::sleep(due.saturating_sub(began.elapsed()));
        }
    });
    progress.clear();
    let copied = copied.map_err(Error::from)?;
    if args.of.json {
        out::json(&json!({
            "event": "copied", "vault": place.to_string(), "snapshots": copied.snapshots, "there": copied.there, "deleted": copied.dropped,
            "containers": copied.containers, "moved_bytes": copied.moved_bytes,
            "problems": json_problems(&copied.problems),
        }))?;
    } else {
        problems(&copied.problems, "affected")?;
        let deleted = match copied.dropped {
            0 => String::new(),
            n => format!(", {n} were deleted there (--all copies them)"),
        };
        out::line(&format!(
            "{}: {} copied, {} were there{deleted}; {} written",
            clean(&place.to_string()),
            count(copied.snapshots as usize, "snapshot"),
            copied.there,
            bytes(copied.moved_bytes)
        ))?;
    }
    match copied.problems.len() {
        0 => Ok(()),
        n => bail!("the vault is damaged: {} not copied", count(n, "snapshot")),
    }
}

/// The copy of a vault, which a home remembers to be encrypted.
fn copy_of(home: Option<&Path>, vault: &Vault, place: &Location, create: bool) -> Result<Vault> {
    let copy = place.copy_of(vault, create).map_err(Error::from)?;
    if let Ok(home) = Home::existing(Home::locate(home)?) {
        vaults::remember(&home, place, &copy)?;
    }
    Ok(copy)
}

fn json_problems(problems: &[Problem]) -> Vec<Value> {
    let json = |p: &Problem| {
        let affected: Vec<String> = p.affected.iter().map(ToString::to_string).collect();
        json!({"problem": p.what, "snapshots": affected})
    };
    problems.iter().map(json).collect()
}

fn problems(problems: &[Problem], said: &str) -> Result<()> {
    for problem in problems {
        let names: Vec<String> = problem.affected.iter().map(ToString::to_string).collect();
        out::line(&format!(
            "{}; {said}: {}",
            clean(&problem.what),
            drover_agent::text::some(&names)
        ))?;
    }
    Ok(())
}

fn check(home: Option<&Path>, full: bool, from: Option<Location>, of: &OfVault) -> Result<()> {
    let vault = open(home, of)?;
    let copy = match from {
        Some(place) => Some(copy_of(home, &vault, &place.absolute()?, false)?),
        None => None,
    };
    let how = match full {
        true => Checking::Full,
        false => Checking::Sample(SAMPLE),
    };
    let bar = Bar::new("check", of.json);
    let report = vault.check_and_repair(how, copy.as_ref(), &mut |done, total| bar.at(done, total));
    bar.clear();
    let report = report.map_err(Error::from)?;
    if of.json {
        out::json(&json!({
            "snapshots": report.snapshots, "containers": report.containers, "read": report.read,
            "read_bytes": report.read_bytes, "problems": json_problems(&report.problems),
            "repaired": json_problems(&report.repaired),
        }))?;
    } else {
        problems(&report.repaired, "repaired, was of")?;
        problems(&report.problems, "affected")?;
        out::line(&format!(
            "{} and {} checked, {} read and verified",
            count(report.snapshots as usize, "snapshot"),
            count(report.containers as usize, "container"),
            bytes(report.read_bytes)
        ))?;
    }
    if !report.problems.is_empty() {
        bail!(
            "the vault is damaged: {} found",
            count(report.problems.len(), "problem")
        );
    }
    Ok(())
}

fn stats(vault: &Vault, as_json: bool) -> Result<()> {
    let s = vault.stats().map_err(Error::from)?;
    if as_json {
        return out::json(&json!({
            "vault": vault.place(), "machines": s.machines, "snapshots": s.snapshots, "data_bytes": s.data_bytes,
            "containers": s.containers, "container_bytes": s.container_bytes, "metadata_bytes": s.metadata_bytes,
            "used_bytes": s.used_bytes, "garbage_bytes": s.garbage_bytes, "hooks": s.hooks,
            "index_bytes": s.index_bytes, "share": vault.record().share.as_str(),
            "popular_bytes": s.popular_bytes,
        }));
    }
    let row = |what: &str, n: u64| vec![what.to_owned(), bytes(n)];
    let rows = vec![
        row("data of all snapshots", s.data_bytes),
        row("different blocks of it", s.used_bytes),
        row("containers, compressed", s.container_bytes),
        row("metadata", s.metadata_bytes),
        row("garbage, before compression", s.garbage_bytes),
        row("index of a backup, in memory", s.index_bytes),
    ];
    out::line(&format!(
        "{}: {} of {}, {}",
        clean(&vault.place()),
        count(s.snapshots as usize, "snapshot"),
        count(s.machines as usize, "machine"),
        count(s.containers as usize, "container")
    ))?;
    out::line(&out::table(&["what", "size"], rows, &[1]))
}
