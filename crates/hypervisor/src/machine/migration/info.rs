//! What QEMU says of its migration.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use crate::error::one_line;
use crate::qmp::Event;

/// How far a migration is, in the order in which a good one goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationStatus {
    /// There was none.
    None,
    /// It begins, or the destination waits for the source.
    Setup,
    /// Memory is sent.
    Active,
    /// The source is paused and has sent all memory but the last of it.
    PreSwitchover,
    /// The last memory and the state of devices are sent.
    Device,
    /// The machine runs at the destination, and memory follows.
    PostcopyActive,
    /// As before, with a broken connection.
    PostcopyPaused,
    /// The other side has everything.
    Completed,
    /// It ended with an error.
    Failed,
    /// It is being cancelled.
    Cancelling,
    /// It was cancelled.
    Cancelled,
    /// Any other, in QEMU's words.
    Other(String),
}

impl MigrationStatus {
    pub(super) fn from_name(name: &str) -> Self {
        match name {
            "none" => MigrationStatus::None,
            "setup" => MigrationStatus::Setup,
            "active" => MigrationStatus::Active,
            "pre-switchover" => MigrationStatus::PreSwitchover,
            "device" => MigrationStatus::Device,
            "postcopy-active" => MigrationStatus::PostcopyActive,
            "postcopy-paused" => MigrationStatus::PostcopyPaused,
            "completed" => MigrationStatus::Completed,
            "failed" => MigrationStatus::Failed,
            "cancelling" => MigrationStatus::Cancelling,
            "cancelled" => MigrationStatus::Cancelled,
            other => MigrationStatus::Other(one_line(other)),
        }
    }

    pub(super) fn name(&self) -> &str {
        match self {
            MigrationStatus::None => "none",
            MigrationStatus::Setup => "setup",
            MigrationStatus::Active => "active",
            MigrationStatus::PreSwitchover => "pre-switchover",
            MigrationStatus::Device => "device",
            MigrationStatus::PostcopyActive => "postcopy-active",
            MigrationStatus::PostcopyPaused => "postcopy-paused",
            MigrationStatus::Completed => "completed",
            MigrationStatus::Failed => "failed",
            MigrationStatus::Cancelling => "cancelling",
            MigrationStatus::Cancelled => "cancelled",
            MigrationStatus::Other(name) => name,
        }
    }

    /// Whether no migration is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        *self == MigrationStatus::None || self.is_final()
    }

    /// Whether nothing follows it.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            MigrationStatus::Completed | MigrationStatus::Failed | MigrationStatus::Cancelled
        )
    }
}

impl fmt::Display for MigrationStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What QEMU says of its migration.
#[derive(Debug, Clone, PartialEq)]
pub struct MigrationInfo {
    /// How far it is.
    pub status: MigrationStatus,
    /// Its memory, once it has begun.
    pub ram: Option<RamInfo>,
    /// Milliseconds since it began.
    pub total_time_ms: Option<u64>,
    /// Milliseconds that the machine would be paused if the switch were now.
    pub expected_downtime_ms: Option<u64>,
    /// Milliseconds that the source counted as the pause.
    pub downtime_ms: Option<u64>,
    /// Why it failed.
    pub error: Option<String>,
    /// Why none is possible, as a device that cannot be migrated.
    pub blocked: Vec<String>,
}

/// What a migration has done of the memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamInfo {
    /// Bytes sent.
    pub transferred: u64,
    /// Bytes to be sent yet.
    pub remaining: u64,
    /// Bytes of memory.
    pub total: u64,
    /// Pages of one repeated byte.
    pub duplicate: u64,
    /// Bytes of the other pages.
    pub normal_bytes: u64,
    /// Pages that the guest changes in a second.
    pub dirty_pages_rate: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// Rounds over the memory.
    pub dirty_sync_count: u64,
    /// Megabits a second.
    pub mbps: f64,
}

impl RamInfo {
    /// Bytes that the guest changes in a second.
    #[must_use]
    pub fn dirty_rate(&self) -> u64 {
        self.dirty_pages_rate.saturating_mul(self.page_size)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct WireInfo {
    status: Option<String>,
    ram: Option<RamInfo>,
    total_time: Option<u64>,
    expected_downtime: Option<u64>,
    downtime: Option<u64>,
    error_desc: Option<String>,
    #[serde(default)]
    blocked_reasons: Vec<String>,
}

impl WireInfo {
    pub(super) fn info(self) -> MigrationInfo {
        MigrationInfo {
            status: MigrationStatus::from_name(self.status.as_deref().unwrap_or("none")),
            ram: self.ram,
            total_time_ms: self.total_time,
            expected_downtime_ms: self.expected_downtime,
            downtime_ms: self.downtime,
            error: self.error_desc.map(|text| one_line(&text)),
            blocked: self
                .blocked_reasons
                .iter()
                .map(|text| one_line(text))
                .collect(),
        }
    }
}

/// The status that a `MIGRATION` event tells.
pub(super) fn status_of(event: &Event) -> Option<MigrationStatus> {
    let status = event.data.get("status").and_then(Value::as_str);
    status
        .filter(|_| event.name == "MIGRATION")
        .map(MigrationStatus::from_name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_qemu_says_of_a_migration() {
        let none: WireInfo = serde_json::from_str("{}").unwrap();
        assert_eq!(none.info().status, MigrationStatus::None);
        let active = json!({
            "status": "active", "total-time": 12, "expected-downtime": 300, "blocked-reasons": ["a\nb"],
            "ram": {"total": 100, "remaining": 7, "dirty-pages-rate": 3, "page-size": 4096, "mbps": 1.5, "later": {}},
        });
        let active = serde_json::from_value::<WireInfo>(active).unwrap().info();
        assert_eq!(active.ram.unwrap().dirty_rate(), 12_288);
        assert_eq!(active.blocked, ["a b"]);
        assert_eq!((active.total_time_ms, active.downtime_ms), (Some(12), None));
    }

    #[test]
    fn every_status_keeps_its_name() {
        for name in "none setup active pre-switchover device postcopy-active postcopy-paused completed failed cancelling \
                     cancelled wait-unplug"
            .split_whitespace()
        {
            assert_eq!(MigrationStatus::from_name(name).to_string(), name);
        }
    }
}
