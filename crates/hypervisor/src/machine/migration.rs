//! QEMU's own migration: what it moves is memory and the state of devices, over a socket that it is given.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Machine;
use crate::error::HypervisorError;
use crate::qmp::{Command, Events, Version};

mod info;

pub use info::{MigrationInfo, MigrationStatus, RamInfo};

use info::{WireInfo, status_of};

/// The oldest QEMU that a running machine is moved with: it has `yank`, `blockdev-reopen`, and exports with bitmaps.
pub const MIN_VERSION: Version = Version {
    major: 6,
    minor: 1,
    micro: 0,
};

/// The oldest QEMU that moves a machine without KVM and loses nothing. The ones before leave a page's fast path open
/// (`cpu_physical_memory_sync_dirty_bitmap`, fixed in 2024), but in a block of memory that is not whole units of 256 KiB.
pub const TCG_VERSION: Version = Version {
    major: 9,
    minor: 0,
    micro: 0,
};

/// Memory whose dirty bits are one word, in bytes.
const TCG_UNIT: u64 = 64 * 4096;

/// Something that both sides of a migration can be told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// `MIGRATION` events.
    Events,
    /// The source waits in `pre-switchover`, paused, for [`Machine::continue_migration`].
    PauseBeforeSwitchover,
    /// The destination touches its disks when it is continued, not when memory has arrived.
    LateBlockActivate,
    /// The destination answers, so that the source knows how it ended.
    ReturnPath,
    /// A guest that writes faster than the link is slowed down.
    AutoConverge,
    /// Memory can be left behind and fetched afterwards.
    PostcopyRam,
    /// Pages that changed are sent as differences.
    Xbzrle,
}

impl Capability {
    /// What the sequence with drover needs, on both sides.
    pub const NEEDED: [Capability; 4] = [
        Capability::Events,
        Capability::PauseBeforeSwitchover,
        Capability::LateBlockActivate,
        Capability::ReturnPath,
    ];

    fn name(self) -> &'static str {
        match self {
            Capability::Events => "events",
            Capability::PauseBeforeSwitchover => "pause-before-switchover",
            Capability::LateBlockActivate => "late-block-activate",
            Capability::ReturnPath => "return-path",
            Capability::AutoConverge => "auto-converge",
            Capability::PostcopyRam => "postcopy-ram",
            Capability::Xbzrle => "xbzrle",
        }
    }
}

/// Parameters of a migration; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationParameters {
    /// Bytes a second while the machine runs at the source; zero: as fast as it goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bandwidth: Option<u64>,
    /// Milliseconds that the machine may be paused at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_limit: Option<u64>,
    /// Bytes a second for what is sent ahead after a switch to post-copy; zero: as fast as it goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_postcopy_bandwidth: Option<u64>,
}

/// Where a migration's stream goes. There is no way to name a command or an address of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Channel {
    /// A socket that was passed under this name by [`Machine::pass_descriptor`].
    Descriptor(String),
    /// A Unix socket: the source connects to it, the destination listens on it.
    Unix(PathBuf),
}

impl Channel {
    fn uri(&self) -> Option<String> {
        match self {
            Channel::Descriptor(name) => Some(format!("fd:{name}")),
            Channel::Unix(path) => Some(format!("unix:{}", path.to_str()?)),
        }
    }
}

impl Machine {
    /// Whether this machine can be migrated at all, as far as can be told before it is tried.
    ///
    /// # Errors
    /// [`HypervisorError::Unsupported`] for a QEMU older than [`MIN_VERSION`], or without KVM than [`TCG_VERSION`],
    /// [`HypervisorError::Migration`] with what blocks it, and those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn check_migratable(&self) -> Result<(), HypervisorError> {
        if self.version() < MIN_VERSION {
            let reason = format!(
                "has version {}: a machine can move while it runs from {MIN_VERSION} on; move it while it is off",
                self.version()
            );
            return Err(self.qmp.unsupported(&reason));
        }
        if self.version() < TCG_VERSION {
            #[derive(Deserialize)]
            struct Block {
                size: u64,
            }
            let blocks: Vec<Block> = self.qmp.execute("query-memdev", json!({})).await?;
            let lossy = |block: &Block| block.size.is_multiple_of(TCG_UNIT);
            if blocks.iter().any(lossy) && !self.description().await?.accelerated {
                let reason = format!(
                    "runs version {} without KVM, whose migration loses what the machine writes to its memory: use KVM or \
                     {TCG_VERSION}, or, without libvirt, start it with 8 KiB more memory",
                    self.version()
                );
                return Err(self.qmp.unsupported(&reason));
            }
        }
        let info = self.migration().await?;
        if info.blocked.is_empty() {
            return Ok(());
        }
        Err(self.migration_error(format!("is not possible: {}", info.blocked.join("; "))))
    }

    /// Turns capabilities on, or off.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn set_capabilities(
        &self,
        capabilities: &[Capability],
        on: bool,
    ) -> Result<(), HypervisorError> {
        let list: Vec<Value> = capabilities
            .iter()
            .map(|one| json!({"capability": one.name(), "state": on}))
            .collect();
        self.qmp
            .order("migrate-set-capabilities", json!({"capabilities": list}))
            .await
    }

    /// Sets parameters. Those of bandwidth take effect at once, also while a migration runs.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn set_parameters(
        &self,
        parameters: &MigrationParameters,
    ) -> Result<(), HypervisorError> {
        self.qmp
            .order("migrate-set-parameters", json!(parameters))
            .await
    }

    /// The parameters as they are.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn parameters(&self) -> Result<MigrationParameters, HypervisorError> {
        self.qmp
            .execute("query-migrate-parameters", json!({}))
            .await
    }

    /// How its migration is, at the source or the destination.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn migration(&self) -> Result<MigrationInfo, HypervisorError> {
        let wire: WireInfo = self.qmp.execute("query-migrate", json!({})).await?;
        Ok(wire.info())
    }

    /// Hands QEMU an open file or socket under a name, for [`Channel::Descriptor`].
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn pass_descriptor(
        &self,
        name: &str,
        file: impl Into<OwnedFd>,
    ) -> Result<(), HypervisorError> {
        let command = Command::new("getfd").arguments(json!({"fdname": name}));
        self.qmp
            .run::<Value>(command.descriptor(file))
            .await
            .map(|_| ())
    }

    /// At the source: begins to migrate. Ask for the events before.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn migrate(&self, to: &Channel) -> Result<(), HypervisorError> {
        let uri = self.uri(to)?;
        self.qmp.order("migrate", json!({"uri": uri})).await
    }

    /// At a destination that was started with `-incoming defer`: waits for the source.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn migrate_incoming(&self, from: &Channel) -> Result<(), HypervisorError> {
        let uri = self.uri(from)?;
        self.qmp
            .order("migrate-incoming", json!({"uri": uri}))
            .await
    }

    fn uri(&self, channel: &Channel) -> Result<String, HypervisorError> {
        let uri = channel.uri();
        uri.ok_or_else(|| self.qmp.unsupported("takes only UTF-8 for a socket's path"))
    }

    /// At the source, in `pre-switchover`: switches over.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run): refused in any other state.
    pub async fn continue_migration(&self) -> Result<(), HypervisorError> {
        let state = MigrationStatus::PreSwitchover;
        self.qmp
            .order("migrate-continue", json!({"state": state.name()}))
            .await
    }

    /// At the source: lets the machine run at the destination, and memory follow.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn start_postcopy(&self) -> Result<(), HypervisorError> {
        self.qmp.order("migrate-start-postcopy", json!({})).await
    }

    /// At the source: gives the migration up. A machine that ran before it runs again, by itself. Once the source is
    /// `completed` this changes nothing; without a migration, neither.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn cancel_migration(&self) -> Result<(), HypervisorError> {
        self.qmp.order("migrate_cancel", json!({})).await
    }

    /// Waits until the migration of this machine is in `wanted`, by the events since before it could be.
    ///
    /// # Errors
    /// [`HypervisorError::Migration`] when it ended otherwise, [`HypervisorError::NotSeen`] after `within`, or how the
    /// connection ended.
    pub async fn wait_migration(
        &self,
        events: &mut Events,
        wanted: &MigrationStatus,
        within: Duration,
    ) -> Result<(), HypervisorError> {
        let begun = Instant::now();
        let what = format!("migration status {wanted}");
        loop {
            let left = within.saturating_sub(begun.elapsed());
            let seen = events.wait_for(&what, left, |event| {
                status_of(event).filter(|status| status == wanted || status.is_final())
            });
            let status = match seen.await {
                Ok(status) => status,
                Err(HypervisorError::EventsLost { .. }) => self.migration().await?.status,
                Err(HypervisorError::NotSeen { socket, what, .. }) => {
                    return Err(HypervisorError::NotSeen {
                        socket,
                        what,
                        after: within,
                    });
                }
                Err(e) => return Err(e),
            };
            if status == *wanted {
                return Ok(());
            }
            if status.is_final() {
                return Err(self.ended_otherwise(&status).await);
            }
        }
    }

    async fn ended_otherwise(&self, status: &MigrationStatus) -> HypervisorError {
        let why = match self.migration().await {
            Ok(MigrationInfo {
                error: Some(error), ..
            }) => format!(": {error}"),
            _ => String::new(),
        };
        self.migration_error(match status {
            MigrationStatus::Cancelled => "was cancelled".into(),
            MigrationStatus::Failed => format!("failed{why}"),
            other => format!("is {other} already{why}"),
        })
    }

    fn migration_error(&self, reason: String) -> HypervisorError {
        HypervisorError::Migration {
            socket: self.socket().to_owned(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixStream;

    use super::*;
    use crate::qmp::Qmp;

    #[tokio::test]
    async fn a_qemu_that_is_too_old_is_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let greeting = r#"{"QMP": {"version": {"qemu": {"micro": 3, "minor": 0, "major": 6}, "package": ""}, "capabilities": []}}"#;
        let says = async {
            let mut there = BufReader::new(there);
            there.write_all(greeting.as_bytes()).await.unwrap();
            let mut asked = String::new();
            there.read_line(&mut asked).await.unwrap();
            let asked: Value = serde_json::from_str(&asked).unwrap();
            let answer = json!({"return": {}, "id": asked["id"]}).to_string();
            there.write_all(answer.as_bytes()).await.unwrap();
            there
        };
        let (qmp, _there) = tokio::join!(Qmp::over(here, "web.qmp"), says);
        let refused = Machine::new(qmp.unwrap()).check_migratable().await;
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("has version 6.0.3"), "{said}");
        assert!(said.contains("move it while it is off"), "{said}");
    }
}
