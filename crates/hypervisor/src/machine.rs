//! A QEMU as what it runs: a machine, with the commands that a migration needs, typed.
//!
//! Each method is one command, or the few that belong together; in which order they make a migration is the caller's.
//! What QEMU says of itself is checked for its form, not for its truth.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::error::{HypervisorError, one_line};
use crate::qmp::{Command, Events, Qmp, Version};

mod bitmaps;
mod disks;
mod exports;
mod migration;
mod nodes;

pub use bitmaps::{Action, Bitmap};
pub use disks::{Data, Disk, Medium, parse_data, parse_disks};
pub use exports::{Export, IOTHREAD_VERSION};
pub use migration::{
    Capability, Channel, MIN_VERSION, MigrationInfo, MigrationParameters, MigrationStatus, RamInfo,
    TCG_VERSION,
};
pub use nodes::Node;

/// A machine that a QEMU runs. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Machine {
    qmp: Qmp,
    /// Held while commands belong together that nothing may come between.
    pub(crate) alone: Arc<Mutex<()>>,
}

impl Machine {
    /// Connects to the QEMU whose QMP socket is at `path`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Those of [`Qmp::connect`].
    pub async fn connect(path: impl AsRef<Path>) -> Result<Machine, HypervisorError> {
        Ok(Machine::new(Qmp::connect(path).await?))
    }

    /// The machine of this QEMU.
    #[must_use]
    pub fn new(qmp: Qmp) -> Self {
        Machine {
            qmp,
            alone: Arc::default(),
        }
    }

    /// The connection, for commands that have no method here.
    #[must_use]
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// What errors call this machine: its QMP socket's path.
    #[must_use]
    pub fn socket(&self) -> &str {
        self.qmp.socket()
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.qmp.greeting().version
    }

    /// The events from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        self.qmp.events()
    }

    /// Whether it runs, and if not, why.
    ///
    /// # Errors
    /// Those of [`Qmp::run`]; so for all methods that say no more.
    pub async fn status(&self) -> Result<RunState, HypervisorError> {
        #[derive(Deserialize)]
        struct Status {
            status: String,
        }
        let answer: Status = self.qmp.execute("query-status", json!({})).await?;
        Ok(RunState::from_name(&answer.status))
    }

    /// What the machine is: what its other side must equal.
    ///
    /// # Errors
    /// Those of [`Qmp::run`].
    pub async fn description(&self) -> Result<Description, HypervisorError> {
        #[derive(Deserialize)]
        struct Name {
            name: Option<String>,
        }
        #[derive(Deserialize)]
        struct Uuid {
            #[serde(rename = "UUID")]
            uuid: String,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Cpu {
            qom_path: String,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Memory {
            base_memory: u64,
            #[serde(default)]
            plugged_memory: u64,
        }
        #[derive(Deserialize)]
        struct Kvm {
            enabled: bool,
        }
        let ask = json!({});
        let name: Name = self.qmp.execute("query-name", ask.clone()).await?;
        let uuid: Uuid = self.qmp.execute("query-uuid", ask.clone()).await?;
        let cpus: Vec<Cpu> = self.qmp.execute("query-cpus-fast", ask.clone()).await?;
        let memory: Memory = self
            .qmp
            .execute("query-memory-size-summary", ask.clone())
            .await?;
        let kvm: Kvm = self.qmp.execute("query-kvm", ask).await?;
        let mut cpu = String::new();
        if let Some(first) = cpus.first() {
            cpu = self.type_of(&first.qom_path).await?;
        }
        Ok(Description {
            name: name.name.map(|name| one_line(&name)),
            uuid: one_line(&uuid.uuid),
            machine: stem(&self.type_of("/machine").await?, "-machine"),
            cpu: stem(&cpu, "-cpu"),
            cpus: cpus.len(),
            memory: memory.base_memory.saturating_add(memory.plugged_memory),
            accelerated: kvm.enabled,
        })
    }

    /// Whether it has threads that serve disks.
    ///
    /// # Errors
    /// Those of [`Qmp::run`].
    pub async fn has_iothreads(&self) -> Result<bool, HypervisorError> {
        let threads: Vec<Value> = self.qmp.execute("query-iothreads", json!({})).await?;
        Ok(!threads.is_empty())
    }

    async fn type_of(&self, path: &str) -> Result<String, HypervisorError> {
        self.qmp
            .execute("qom-get", json!({"path": path, "property": "type"}))
            .await
    }

    /// Pauses the machine. When this returns it executes nothing more, and what it had asked its disks for is done and flushed.
    ///
    /// # Errors
    /// Those of [`Qmp::run`].
    pub async fn stop(&self) -> Result<(), HypervisorError> {
        self.qmp.order("stop", json!({})).await
    }

    /// Lets the machine run. After a migration QEMU allows this on both sides: call it on the owner's only.
    ///
    /// # Errors
    /// Those of [`Qmp::run`].
    pub async fn cont(&self) -> Result<(), HypervisorError> {
        self.qmp.order("cont", json!({})).await
    }

    /// Ends QEMU. Disks are flushed.
    ///
    /// # Errors
    /// Those of [`Qmp::run`]; not when QEMU ended before it could answer.
    pub async fn quit(&self) -> Result<(), HypervisorError> {
        match self.qmp.order("quit", json!({})).await {
            Err(HypervisorError::Closed { .. }) => Ok(()),
            other => other,
        }
    }

    /// Shuts connections down in which QEMU hangs. Works while it hangs, where it offers out-of-band commands.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`] when one of them is not there, [`HypervisorError::Unsupported`] without
    /// out-of-band commands.
    pub async fn yank(&self, what: &[Yank]) -> Result<(), HypervisorError> {
        let instances: Vec<Value> = what.iter().map(Yank::to_json).collect();
        let command = Command::new("yank")
            .arguments(json!({"instances": instances}))
            .timeout(YANK_TIMEOUT)
            .out_of_band();
        self.qmp.run::<Value>(command).await.map(|_| ())
    }
}

impl Machine {
    /// Shuts the connections of all disks down: those of a machine that does not run, and is to end without waiting for servers that
    /// are gone.
    ///
    /// # Errors
    /// As [`Machine::yank`].
    pub async fn yank_disks(&self) -> Result<(), HypervisorError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Instance {
            node_name: Option<String>,
        }
        let found: Vec<Instance> = self.qmp.execute("query-yank", json!({})).await?;
        let nodes = found.into_iter().filter_map(|instance| instance.node_name);
        let nodes: Vec<_> = nodes.map(Yank::BlockNode).collect();
        self.yank(&nodes).await
    }
}

/// It is answered at once or never.
const YANK_TIMEOUT: Duration = Duration::from_secs(5);

/// `pc-q35-7.2` of `pc-q35-7.2-machine`, `qemu64` of `qemu64-x86_64-cpu`.
fn stem(name: &str, kind: &str) -> String {
    let name = name.strip_suffix(kind).unwrap_or(name);
    let name = match kind {
        "-cpu" => name.rsplit_once('-').map_or(name, |(model, _)| model),
        _ => name,
    };
    one_line(name)
}

/// Whether a machine runs, in QEMU's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    /// It runs.
    Running,
    /// It was paused.
    Paused,
    /// It was started paused, and has not run.
    Prelaunch,
    /// It waits for another QEMU's migration.
    InMigrate,
    /// It is paused at the end of its migration.
    FinishMigrate,
    /// It has been migrated away.
    PostMigrate,
    /// It stopped at an error of a disk.
    IoError,
    /// It was shut down, and its QEMU stays.
    Shutdown,
    /// Any other, in QEMU's words.
    Other(String),
}

impl RunState {
    fn from_name(name: &str) -> Self {
        match name {
            "running" => RunState::Running,
            "paused" => RunState::Paused,
            "prelaunch" => RunState::Prelaunch,
            "inmigrate" => RunState::InMigrate,
            "finish-migrate" => RunState::FinishMigrate,
            "postmigrate" => RunState::PostMigrate,
            "io-error" => RunState::IoError,
            "shutdown" => RunState::Shutdown,
            other => RunState::Other(one_line(other)),
        }
    }
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::Prelaunch => "prelaunch",
            RunState::InMigrate => "inmigrate",
            RunState::FinishMigrate => "finish-migrate",
            RunState::PostMigrate => "postmigrate",
            RunState::IoError => "io-error",
            RunState::Shutdown => "shutdown",
            RunState::Other(name) => name,
        })
    }
}

/// What a machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Its name, if it was given one.
    pub name: Option<String>,
    /// Its UUID; all zeros where it was given none.
    pub uuid: String,
    /// Its versioned type, as `pc-q35-7.2`.
    pub machine: String,
    /// The model of its processors, as `qemu64`.
    pub cpu: String,
    /// How many processors it has.
    pub cpus: usize,
    /// Its memory, in bytes.
    pub memory: u64,
    /// Whether KVM runs it.
    pub accelerated: bool,
}

/// A connection of QEMU that can be shut down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Yank {
    /// Those of its migration.
    Migration,
    /// That of the block node of this name, as an NBD client's.
    BlockNode(String),
}

impl Yank {
    fn to_json(&self) -> Value {
        match self {
            Yank::Migration => json!({"type": "migration"}),
            Yank::BlockNode(name) => json!({"type": "block-node", "node-name": name}),
        }
    }
}
