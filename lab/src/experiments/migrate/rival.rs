//! QEMU's own migration over TCP, which libvirt, Proxmox and LXD drive: with storage that both sides share, or with
//! `blockdev-mirror` to NBD exports of the destination.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::machine::Machine;
use crate::link::Side;

/// Timeout of a migration, and of copying the disks.
const LIMIT: Duration = Duration::from_secs(1800);
/// Ports of the destination.
const PORTS: [&str; 2] = ["7078", "7079"];

/// When a mirror copies what the guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMode {
    /// Later.
    Background,
    /// Before the guest hears that it was written.
    WriteBlocking,
}

impl CopyMode {
    /// What QEMU calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }
}

/// Migrates with shared storage. The destination runs as soon as it has everything.
pub fn with_shared_storage(here: &mut Machine, there: &mut Machine) -> Result<()> {
    begin(here, there, &["events", "return-path", "auto-converge"])?;
    until(here, "completed")?;
    until(there, "completed")
}

/// Migrates with the disks `disk0` and so on, in libvirt's order: mirrors until they are ready, memory, the mirrors' end in
/// the pause, and then `cont` at the destination, without the round trip that its controller would need.
pub fn with_mirrors(
    here: &mut Machine,
    there: &mut Machine,
    disks: usize,
    mode: CopyMode,
) -> Result<()> {
    let server = json!({"type": "inet", "host": Side::B.address(), "port": PORTS[1]});
    let listen = json!({"type": "inet", "data": {"host": Side::B.address(), "port": PORTS[1]}});
    there.qmp.ask("nbd-server-start", json!({"addr": listen}))?;
    for number in 0..disks {
        let disk = format!("disk{number}");
        let export =
            json!({"type": "nbd", "id": disk, "node-name": disk, "name": disk, "writable": true});
        there.qmp.ask("block-export-add", export)?;
        let node =
            json!({"driver": "nbd", "node-name": target(number), "server": server, "export": disk});
        here.qmp.ask("blockdev-add", node)?;
        let mirror = json!({
            "job-id": job(number), "device": disk, "target": target(number), "sync": "full", "copy-mode": mode.name(),
        });
        here.qmp.ask("blockdev-mirror", mirror)?;
    }
    for number in 0..disks {
        ended(here, "BLOCK_JOB_READY", number)?;
    }
    let capabilities = [
        "events",
        "return-path",
        "auto-converge",
        "pause-before-switchover",
        "late-block-activate",
    ];
    begin(here, there, &capabilities)?;
    until(here, "pre-switchover")?;
    for number in 0..disks {
        let cancel = json!({"device": job(number)});
        here.qmp.ask("block-job-cancel", cancel)?;
    }
    for number in 0..disks {
        ended(here, "BLOCK_JOB_COMPLETED", number)?;
    }
    let state = json!({"state": "pre-switchover"});
    here.qmp.ask("migrate-continue", state)?;
    until(here, "completed")?;
    until(there, "completed")?;
    there.qmp.ask("nbd-server-stop", json!({}))?;
    there.qmp.ask("cont", json!({})).map(drop)
}

/// Starts the migration of memory, with the settings that drover has.
fn begin(here: &mut Machine, there: &mut Machine, capabilities: &[&str]) -> Result<()> {
    let on = |name: &&str| json!({"capability": name, "state": true});
    let on: Vec<Value> = capabilities.iter().map(on).collect();
    let uri = json!({"uri": format!("tcp:{}:{}", Side::B.address(), PORTS[0])});
    let unlimited = json!({"max-bandwidth": 0, "downtime-limit": 300});
    let capabilities = json!({"capabilities": on});
    for machine in [&mut *there, &mut *here] {
        let set = "migrate-set-capabilities";
        machine.qmp.ask(set, capabilities.clone())?;
    }
    here.qmp.ask("migrate-set-parameters", unlimited)?;
    there.qmp.ask("migrate-incoming", uri.clone())?;
    here.qmp.ask("migrate", uri).map(drop)
}

/// Waits for a state of the migration.
fn until(machine: &mut Machine, state: &str) -> Result<()> {
    let mut failed = false;
    let wanted = |event: &Value| {
        let status = &event["data"]["status"];
        let of_migration = event["event"] == "MIGRATION";
        failed = of_migration && (status == "failed" || status == "cancelled");
        failed || of_migration && status == state
    };
    let event = machine.qmp.wait(LIMIT, wanted);
    event.with_context(|| format!("the migration is never {state}"))?;
    match failed {
        true => bail!("the migration failed"),
        false => Ok(()),
    }
}

fn ended(machine: &mut Machine, name: &str, number: usize) -> Result<()> {
    let job = job(number);
    let wanted = |event: &Value| event["event"] == name && event["data"]["device"] == job;
    let event = machine.qmp.wait(LIMIT, wanted);
    let event = event.with_context(|| format!("no {name} of {job}"))?;
    match event["data"].get("error") {
        Some(error) => bail!("{job}: {error}"),
        None => Ok(()),
    }
}

fn job(number: usize) -> String {
    format!("mirror{number}")
}

fn target(number: usize) -> String {
    format!("target{number}")
}
