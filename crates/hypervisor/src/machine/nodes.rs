//! Block nodes: what a machine's disks are made of, and how one is replaced while the machine is paused.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Machine;
use crate::error::HypervisorError;
use crate::qmp::Command;

/// A block node to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// The bytes of another node.
    Raw {
        /// Its name.
        name: String,
        /// The node with the bytes.
        file: String,
    },
    /// A qcow2 image in another node.
    Qcow2 {
        /// Its name.
        name: String,
        /// The node with the image.
        file: String,
    },
    /// A file.
    File {
        /// Its name.
        name: String,
        /// The file.
        path: PathBuf,
    },
    /// Nothing: reads are zeros, writes are gone.
    Null {
        /// Its name.
        name: String,
        /// Bytes.
        size: u64,
    },
    /// A disk whose bytes are copied aside before they are overwritten, so that [`Node::Snapshot`] above it does not
    /// change. What cannot be copied ends the snapshot, and the machine goes on.
    CopyBeforeWrite {
        /// Its name.
        name: String,
        /// The disk's node.
        file: String,
        /// The node for the copies, as large as the disk.
        target: String,
        /// After how long a copy counts as failed; seconds are used. Zero: never.
        within: Duration,
    },
    /// The disk below a [`Node::CopyBeforeWrite`] as it was when a disk began to use that. Reads are refused when it has ended.
    Snapshot {
        /// Its name.
        name: String,
        /// The node that copies.
        file: String,
    },
    /// An export of an NBD server.
    Nbd {
        /// Its name.
        name: String,
        /// The server and the export.
        address: NbdAddress,
        /// For how long requests wait when the connection is lost; zero: they fail.
        reconnect: Duration,
    },
}

impl Node {
    /// The options of `blockdev-add`, also for QEMU's command line.
    ///
    /// A path that is not UTF-8 cannot be said: it is changed, and QEMU will not find it.
    #[must_use]
    pub fn options(&self) -> Value {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        match self {
            Node::Raw { name, file } => json!({"driver": "raw", "node-name": name, "file": file}),
            Node::Qcow2 { name, file } => {
                json!({"driver": "qcow2", "node-name": name, "file": file})
            }
            Node::File { name, path } => {
                json!({"driver": "file", "node-name": name, "filename": text(path)})
            }
            Node::Null { name, size } => {
                json!({"driver": "null-co", "node-name": name, "size": size, "read-zeroes": true})
            }
            Node::CopyBeforeWrite {
                name,
                file,
                target,
                within,
            } => json!({
                "driver": "copy-before-write",
                "node-name": name,
                "file": file,
                "target": target,
                "on-cbw-error": "break-snapshot",
                "cbw-timeout": within.as_secs(),
            }),
            Node::Snapshot { name, file } => {
                json!({"driver": "snapshot-access", "node-name": name, "file": file})
            }
            Node::Nbd {
                name,
                address,
                reconnect,
            } => json!({
                "driver": "nbd",
                "node-name": name,
                "server": match &address.socket {
                    NbdSocket::Unix(path) => json!({"type": "unix", "path": text(path)}),
                    NbdSocket::Tcp(host, port) => {
                        json!({"type": "inet", "host": host, "port": port.to_string()})
                    }
                },
                "export": address.export,
                "reconnect-delay": reconnect.as_secs(),
            }),
        }
    }
}

impl Machine {
    /// Adds a block node. For an NBD node QEMU connects now, and hangs until the server has answered.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn add_node(&self, node: &Node) -> Result<(), HypervisorError> {
        self.qmp.order("blockdev-add", node.options()).await
    }

    /// Gives a node new options at one moment, as another node for its bytes.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn reopen_node(&self, node: &Node) -> Result<(), HypervisorError> {
        self.qmp
            .order("blockdev-reopen", json!({"options": [node.options()]}))
            .await
    }

    /// Adds a node of an open file, which can have been removed already: it goes with the node.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn add_file_node(
        &self,
        name: &str,
        file: impl Into<OwnedFd>,
    ) -> Result<(), HypervisorError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Set {
            fdset_id: u64,
        }
        let add = Command::new("add-fd").descriptor(file);
        let set: Set = self.qmp.run(add).await?;
        let node = Node::File {
            name: name.to_owned(),
            path: PathBuf::from(format!("/dev/fdset/{}", set.fdset_id)),
        };
        let added = self.add_node(&node).await;
        // The node has its own descriptor.
        let ours = json!({"fdset-id": set.fdset_id});
        self.qmp.order("remove-fd", ours).await?;
        added
    }

    /// Has the device of a disk use another node, as a filter above its own, also while the machine runs.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn set_disk_node(&self, path: &str, node: &str) -> Result<(), HypervisorError> {
        let set = json!({"path": path, "property": "drive", "value": node});
        self.qmp.order("qom-set", set).await
    }

    /// Gives a node another size, in bytes.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn resize_node(&self, name: &str, size: u64) -> Result<(), HypervisorError> {
        let resize = json!({"node-name": name, "size": size});
        self.qmp.order("block_resize", resize).await
    }

    /// Removes a node that nothing uses.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn delete_node(&self, name: &str) -> Result<(), HypervisorError> {
        self.qmp
            .order("blockdev-del", json!({"node-name": name}))
            .await
    }
}
