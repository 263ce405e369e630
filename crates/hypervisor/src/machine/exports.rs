//! QEMU's own NBD server, by which others read a machine's disks.

use std::os::fd::OwnedFd;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Machine;
use crate::error::HypervisorError;
use crate::qmp::{Command, Version};

/// A block node that QEMU's NBD server offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export<'a> {
    /// Its name in commands, and for NBD clients.
    pub id: &'a str,
    /// The node.
    pub node: &'a str,
    /// Whether clients may write.
    pub writable: bool,
    /// Dirty bitmaps of the node that clients can read, as contexts `qemu:dirty-bitmap:NAME`.
    pub bitmaps: &'a [&'a str],
}

/// The name of the NBD server's socket while it is handed over.
const NBD_LISTENER: &str = "drover-nbd";

/// The oldest QEMU whose NBD server exports disks that an iothread serves: the ones before are aborted by a client that
/// leaves (`nbd_blockdev_client_closed`), and the machine with them.
pub const IOTHREAD_VERSION: Version = Version {
    major: 9,
    minor: 0,
    micro: 0,
};

/// How long an export may take to let its clients go.
const DELETE_TIMEOUT: Duration = Duration::from_secs(10);

impl Machine {
    /// Starts the NBD server on a socket that listens. A QEMU has one server. It is handed the socket, so it needs no
    /// right to the directory.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run): refused when it has one already. [`HypervisorError::Unsupported`] for
    /// a machine with iothreads and a QEMU older than [`IOTHREAD_VERSION`].
    pub async fn start_nbd_server(
        &self,
        listener: impl Into<OwnedFd>,
    ) -> Result<(), HypervisorError> {
        if self.version() < IOTHREAD_VERSION && self.has_iothreads().await? {
            let reason = format!(
                "has version {} and iothreads: reading its disks can abort it; use {IOTHREAD_VERSION}, or no iothreads",
                self.version()
            );
            return Err(self.qmp.unsupported(&reason));
        }
        self.pass_descriptor(NBD_LISTENER, listener).await?;
        let address = json!({"addr": {"type": "fd", "data": {"str": NBD_LISTENER}}});
        let started = self.qmp.order("nbd-server-start", address).await;
        if started.is_err() {
            // It may have been taken.
            let close = self
                .qmp
                .order("closefd", json!({"fdname": NBD_LISTENER}))
                .await;
            tracing::debug!(?close, "the NBD server did not start");
        }
        started
    }

    /// Stops the NBD server, all its exports and connections. Nobody may be opening a connection meanwhile: QEMU waits for
    /// those forever, and the machine with it (seen in 7.2).
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn stop_nbd_server(&self) -> Result<(), HypervisorError> {
        self.qmp.order("nbd-server-stop", json!({})).await
    }

    /// Offers a block node to NBD clients.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn add_export(&self, export: &Export<'_>) -> Result<(), HypervisorError> {
        let mut arguments = json!({
            "type": "nbd",
            "id": export.id,
            "name": export.id,
            "node-name": export.node,
            "writable": export.writable,
        });
        if !export.bitmaps.is_empty() {
            arguments["bitmaps"] = json!(export.bitmaps);
        }
        self.qmp.order("block-export-add", arguments).await
    }

    /// Ends an export and its connections. When this returns, it is gone.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run); [`HypervisorError::NotSeen`] when it does not go.
    pub async fn delete_export(&self, id: &str) -> Result<(), HypervisorError> {
        let mut events = self.events();
        let delete = Command::new("block-export-del").arguments(json!({"id": id, "mode": "hard"}));
        self.qmp
            .run::<Value>(delete.timeout(DELETE_TIMEOUT))
            .await?;
        let what = format!("end of export {id}");
        let gone = events.wait_for(&what, DELETE_TIMEOUT, |event| {
            (event.name == "BLOCK_EXPORT_DELETED" && event.data["id"] == id).then_some(())
        });
        match gone.await {
            Err(HypervisorError::EventsLost { .. } | HypervisorError::NotSeen { .. })
                if !self.exports().await?.iter().any(|one| one == id) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// The exports that there are, by `id`.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn exports(&self) -> Result<Vec<String>, HypervisorError> {
        #[derive(Deserialize)]
        struct Found {
            id: String,
        }
        let found: Vec<Found> = self.qmp.execute("query-block-exports", json!({})).await?;
        Ok(found.into_iter().map(|export| export.id).collect())
    }
}
