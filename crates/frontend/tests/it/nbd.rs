//! The NBD server against real clients, and against hostile clients.

mod clients;
mod device;
mod hostile;
mod lifecycle;
mod order;
mod raw;
mod requests;
mod room;
mod tls;

use std::path::PathBuf;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_frontend::nbd::{Address, Export, Listening, Server, ServerOptions};

/// A server on a unix socket in a directory that goes with it.
pub struct Served {
    pub server: Server,
    pub listening: Listening,
    pub directory: tempfile::TempDir,
}

impl Served {
    /// Serves devices by name.
    pub fn new(devices: Vec<(&str, Arc<dyn BlockDevice>)>, options: ServerOptions) -> Self {
        let exports = devices
            .into_iter()
            .map(|(name, device)| Export {
                name: name.into(),
                description: format!("the device {name:?}"),
                device,
                read_only: false,
            })
            .collect();
        Self::exports(exports, options)
    }

    pub fn exports(exports: Vec<Export>, options: ServerOptions) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let server = Server::new(exports, options).expect("exports");
        let listening = server
            .listen_unix(&directory.path().join("nbd.sock"))
            .expect("a socket");
        Self {
            server,
            listening,
            directory,
        }
    }

    /// One device under no name.
    pub fn one(device: Arc<dyn BlockDevice>) -> Self {
        Self::new(vec![("", device)], ServerOptions::default())
    }

    /// What clients call an export.
    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.socket().display())
    }

    pub fn socket(&self) -> PathBuf {
        match self.listening.local_addr() {
            Address::Unix(path) => path.clone(),
            Address::Tcp(address) => panic!("{address} is no unix socket"),
        }
    }

    /// A path in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}
