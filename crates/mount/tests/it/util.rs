//! Test helpers.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drover_core::{BlockDevice, Digest, ImageName};
use drover_device::backend::MemoryDevice;
use drover_mount::client::{ConnectError, Connecting, Connector};
use drover_mount::server::{Base, Config, Images, Room, Server};
use drover_net::service::IncomingCall;
use drover_net::{Code, Connection, Identity, Peer, PeerKey, Refusal, Rights};
use drover_store::lease::Access;
use parking_lot::Mutex;
use tokio::sync::watch;

/// A runtime that lives as long as a test.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

pub fn name(text: &str) -> ImageName {
    ImageName::new(text).expect("a name")
}

/// Images in memory.
#[derive(Default)]
pub struct Shelf(pub Mutex<HashMap<ImageName, Base>>);

impl Shelf {
    /// A site with one image.
    pub fn with(text: &str, device: Arc<dyn BlockDevice>) -> Arc<Self> {
        let shelf = Self::default();
        let base = Base {
            device,
            digest: Digest([7; 32]),
            arriving: None,
            through: None,
        };
        shelf.0.lock().insert(name(text), base);
        Arc::new(shelf)
    }
}

impl Images for Shelf {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        let found = self.0.lock().get(name).cloned();
        found.ok_or_else(|| {
            let text = format!("there is no image {}", name.as_str());
            Refusal::new(Code::NotFound, text)
        })
    }
}

/// A site in a directory of its own.
pub struct Site {
    pub server: Arc<Server>,
    pub directory: tempfile::TempDir,
    images: Arc<dyn Images>,
}

impl Site {
    /// A site with one image. Call within a runtime.
    pub fn with(text: &str, device: Arc<dyn BlockDevice>) -> Self {
        Self::of(Shelf::with(text, device))
    }

    /// A site with such images. Call within a runtime.
    pub fn of(images: Arc<dyn Images>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        Self {
            server: serve(images.clone(), directory.path()),
            directory,
            images,
        }
    }

    /// The site's program ends; what stands in for it has no images.
    pub fn idle(&mut self) -> Arc<Server> {
        let nowhere = self.directory.path().join("nowhere");
        self.server = serve(Arc::new(Shelf::default()), &nowhere);
        self.server.clone()
    }

    /// The site's program starts anew.
    pub fn restart(&mut self) {
        self.server = serve(self.images.clone(), self.directory.path());
    }
}

pub fn serve(images: Arc<dyn Images>, state: &Path) -> Arc<Server> {
    Server::new(Config::new(images, state, 2)).expect("threads")
}

/// Bytes that are noise, text and zeros by turns.
pub fn content(size: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut out = vec![0; size];
    for piece in out.chunks_mut(50_000) {
        match random.u8(0..4) {
            0 => {}
            1 => piece
                .iter_mut()
                .for_each(|b| *b = random.alphanumeric() as u8 & 0x63),
            _ => random.fill(piece),
        }
    }
    out
}

pub fn memory(bytes: &[u8]) -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::from_bytes(bytes))
}

/// Connects to a server inside the process.
pub struct Near {
    server: Mutex<Arc<Server>>,
    pub peer: Peer,
    /// No connection can be made while this is set.
    pub down: AtomicBool,
    pub connects: AtomicU64,
    stop: Mutex<watch::Sender<bool>>,
}

impl Near {
    pub fn new(server: Arc<Server>) -> Arc<Self> {
        let peer = Peer {
            key: Identity::generate().key(),
            name: "nantes".into(),
            rights: Rights::DEFAULT.of_peer(),
            domain: "default".into(),
        };
        Self::again(server, peer)
    }

    /// The same peer once more.
    pub fn again(server: Arc<Server>, peer: Peer) -> Arc<Self> {
        Arc::new(Self {
            server: Mutex::new(server),
            peer,
            down: AtomicBool::new(false),
            connects: AtomicU64::new(0),
            stop: Mutex::new(watch::Sender::new(false)),
        })
    }

    /// Connects to another server from now on.
    pub fn now(&self, server: Arc<Server>) {
        *self.server.lock() = server;
    }

    /// Breaks all connections.
    pub fn cut(&self) {
        let old = std::mem::replace(&mut *self.stop.lock(), watch::Sender::new(false));
        old.send_replace(true);
    }
}

impl Connector for Near {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            self.connects.fetch_add(1, Ordering::Relaxed);
            let server = {
                // Together: one that is shown while no connection can be made gets none.
                let server = self.server.lock();
                if self.down.load(Ordering::Relaxed) {
                    return Err(ConnectError::lost("cannot reach lyon: no route"));
                }
                server.clone()
            };
            let (here, there) = Connection::pair().expect("a pair");
            let stop = self.stop.lock().subscribe();
            let peer = self.peer.clone();
            tokio::spawn(async move {
                let call = IncomingCall::receive(there, stop).await?;
                server.serve_connection(peer, call).await
            });
            Ok(here)
        })
    }
}
