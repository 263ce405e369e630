//! What several tests need.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Digest, Extent, ImageName, Zeroes,
};
use drover_device::backend::MemoryDevice;
use drover_device::remote::Change;
use drover_mount::client::{ConnectError, Connected, Connector};
use drover_mount::protocol::{Code, Refusal};
use drover_mount::server::{Base, Config, Epochs, Images, Overlays, Peer, Server};
use drover_net::{Connection, Identity};
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
        };
        shelf.0.lock().insert(name(text), base);
        Arc::new(shelf)
    }
}

impl Images for Shelf {
    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        let found = self.0.lock().get(name).cloned();
        found.ok_or_else(|| {
            let text = format!("there is no image {}", name.as_str());
            Refusal::new(Code::NoImage, text)
        })
    }
}

/// Overlays in memory, kept when the server goes.
#[derive(Default)]
pub struct Sheets(Mutex<HashMap<PathBuf, Arc<Sheet>>>);

impl Overlays for Sheets {
    fn open(&self, directory: &Path, base: &Base) -> Result<Arc<dyn Epochs>, DeviceError> {
        let mut sheets = self.0.lock();
        if let Some(sheet) = sheets.get(directory) {
            return Ok(sheet.clone());
        }
        let mut bytes = vec![0; base.device.size() as usize];
        base.device.read(0, &mut bytes)?;
        let sheet = Arc::new(Sheet {
            device: MemoryDevice::from_bytes(&bytes),
            state: Mutex::default(),
        });
        sheets.insert(directory.to_owned(), sheet.clone());
        Ok(sheet)
    }
}

/// A device in memory that takes epochs.
pub struct Sheet {
    device: MemoryDevice,
    state: Mutex<(u64, Vec<Change>)>,
}

impl Epochs for Sheet {
    fn committed(&self) -> u64 {
        self.state.lock().0
    }
    fn stage(&self, epoch: u64, changes: &[Change]) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        assert_eq!(epoch, state.0 + 1);
        state.1.extend_from_slice(changes);
        Ok(())
    }
    fn commit(&self, epoch: u64) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        assert_eq!(epoch, state.0 + 1);
        for change in std::mem::take(&mut state.1) {
            match change {
                Change::Write(offset, bytes) => self.device.write(offset, &bytes)?,
                Change::Zero(offset, length) => {
                    self.device
                        .write_zeroes(offset, length, Zeroes::default())?;
                }
            }
        }
        state.0 = epoch;
        Ok(())
    }
    fn abandon(&self) -> Result<(), DeviceError> {
        self.state.lock().1.clear();
        Ok(())
    }
}

impl BlockDevice for Sheet {
    fn size(&self) -> u64 {
        self.device.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.device.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.device.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.device.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.device.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.device.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.device.extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.device.prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.device.cost(offset, length)
    }
}

/// A site in a directory of its own.
pub struct Site {
    pub server: Arc<Server>,
    pub sheets: Arc<Sheets>,
    pub directory: tempfile::TempDir,
    images: Arc<dyn Images>,
}

impl Site {
    /// A site with one image. Call within a runtime.
    pub fn with(text: &str, device: Arc<dyn BlockDevice>) -> Self {
        let images: Arc<dyn Images> = Shelf::with(text, device);
        let sheets = Arc::new(Sheets::default());
        let directory = tempfile::tempdir().expect("a directory");
        Self {
            server: serve(images.clone(), sheets.clone(), directory.path()),
            sheets,
            directory,
            images,
        }
    }

    /// The site's program starts anew.
    pub fn restart(&mut self) {
        self.server = serve(
            self.images.clone(),
            self.sheets.clone(),
            self.directory.path(),
        );
    }
}

pub fn serve(images: Arc<dyn Images>, sheets: Arc<Sheets>, state: &Path) -> Arc<Server> {
    let config = Config {
        images,
        overlays: sheets,
        state: state.to_owned(),
        threads: 2,
    };
    Server::new(config).expect("threads")
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
    fn connect(
        &self,
        open: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, ConnectError>> + Send + '_>> {
        Box::pin(async move {
            self.connects.fetch_add(1, Ordering::Relaxed);
            if self.down.load(Ordering::Relaxed) {
                return Err(ConnectError {
                    fatal: false,
                    message: "cannot reach lyon: no route".into(),
                });
            }
            let (here, there) = Connection::pair().expect("a pair");
            let stop = self.stop.lock().subscribe();
            let (server, peer) = (self.server.lock().clone(), self.peer.clone());
            tokio::spawn(async move {
                let (reader, writer) = there.split();
                let _ = server.serve_lane(reader, writer, peer, &open, stop).await;
            });
            let wire = here.wire();
            let (reader, writer) = here.split();
            Ok(Connected {
                reader,
                writer,
                wire,
                round_trip: None,
            })
        })
    }
}
