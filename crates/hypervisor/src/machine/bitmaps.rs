//! Dirty bitmaps: what was written since a moment. Several commands can take effect at one moment.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Machine;
use crate::error::HypervisorError;
use crate::qmp::Command;

/// A dirty bitmap of a block node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Bitmap {
    /// Its name; some that QEMU makes for itself have none.
    #[serde(default)]
    pub name: String,
    /// Bytes that are dirty.
    pub count: u64,
    /// Bytes for each bit.
    pub granularity: u64,
    /// Whether writes are recorded.
    #[serde(default)]
    pub recording: bool,
    /// Whether an operation uses it, so that it cannot be changed.
    #[serde(default)]
    pub busy: bool,
    /// Whether it is kept in the image when QEMU ends.
    #[serde(default)]
    pub persistent: bool,
    /// Whether QEMU was killed while it recorded: what it says is not all.
    #[serde(default)]
    pub inconsistent: bool,
}

impl Bitmap {
    /// Whether it has all that was written to the image since it was made, also in earlier processes.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.persistent && self.recording && !self.inconsistent
    }
}

/// One part of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action<'a> {
    /// A new bitmap, which records.
    AddBitmap {
        /// Of this block node.
        node: &'a str,
        /// Its name.
        name: &'a str,
        /// Bytes for each bit: a power of two, at least 512.
        granularity: u32,
    },
    /// A new bitmap that records nothing: its name says something.
    AddMark {
        /// Of this block node.
        node: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// A bitmap that records no longer.
    DisableBitmap {
        /// Of this block node.
        node: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// What is dirty in another becomes dirty in this one.
    MergeBitmap {
        /// Of this block node.
        node: &'a str,
        /// The one that gets more.
        into: &'a str,
        /// The one that stays as it is.
        from: &'a str,
    },
}

impl Action<'_> {
    fn command(&self) -> (&'static str, Value) {
        match self {
            Action::AddBitmap {
                node,
                name,
                granularity,
            } => (
                "block-dirty-bitmap-add",
                json!({"node": node, "name": name, "granularity": granularity}),
            ),
            Action::AddMark { node, name } => (
                "block-dirty-bitmap-add",
                json!({"node": node, "name": name, "disabled": true}),
            ),
            Action::DisableBitmap { node, name } => (
                "block-dirty-bitmap-disable",
                json!({"node": node, "name": name}),
            ),
            Action::MergeBitmap { node, into, from } => (
                "block-dirty-bitmap-merge",
                json!({"node": node, "target": into, "bitmaps": [from]}),
            ),
        }
    }
}

/// Between two attempts at a bitmap that an export has just let go.
const BUSY_PAUSE: Duration = Duration::from_millis(2);

impl Machine {
    /// Does all of it at one moment, or nothing.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn transaction(&self, actions: &[Action<'_>]) -> Result<(), HypervisorError> {
        let actions: Vec<Value> = actions
            .iter()
            .map(|action| {
                let (kind, data) = action.command();
                json!({"type": kind, "data": data})
            })
            .collect();
        self.qmp
            .order("transaction", json!({"actions": actions}))
            .await
    }

    /// Removes a bitmap. One that is busy for a moment, as after its export is gone, is tried again for up to `within`.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn remove_bitmap(
        &self,
        node: &str,
        name: &str,
        within: Duration,
    ) -> Result<(), HypervisorError> {
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let remove = Command::new("block-dirty-bitmap-remove")
                .arguments(json!({"node": node, "name": name}));
            match self.qmp.run::<Value>(remove).await {
                Err(HypervisorError::Refused { description, .. })
                    if description.contains("in use") && tokio::time::Instant::now() < deadline =>
                {
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
                other => return other.map(|_| ()),
            }
        }
    }

    /// The bitmaps of a block node.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run); [`HypervisorError::Unsupported`] when there is no such node.
    pub async fn bitmaps(&self, node: &str) -> Result<Vec<Bitmap>, HypervisorError> {
        let nodes = self.nodes().await?;
        let found = nodes.into_iter().find(|medium| medium.node == node);
        found
            .map(|medium| medium.bitmaps)
            .ok_or_else(|| self.qmp.unsupported(&format!("has no block node {node}")))
    }
}
