//! Block nodes: what a machine's disks are made of, and how one is replaced while the machine is paused.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use serde_json::{Value, json};

use super::Machine;
use crate::error::HypervisorError;

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
