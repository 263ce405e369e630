//! What the examples of streaming have in common: a site that serves devices to whoever has its key, and a managed mount of
//! one of them, over TLS. A program of your own has one of the two; `drover serve` is such a site with peers, rights and images.

// Each example uses a part of it.
#![allow(dead_code)]

use std::error::Error;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError, Digest, ImageName};
use drover_device::backend::FileDevice;
use drover_device::builder::{Managed, Stack};
use drover_device::remote::Shape;
use drover_device::synced::{Order, PullHandle, Sync, SyncedOptions};
use drover_mount::client::{Client, Connecting, Connector, Options};
use drover_mount::server::{Base, Config, Images, Room, Server};
use drover_net::service::IncomingCall;
use drover_net::{
    Code, ConnectOptions, Identity, Listener, Peer, PeerKey, Refusal, Rights, connect,
};
use drover_storage::HostDirectory;
use drover_store::lease::Access;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::watch;

pub type Failed = Box<dyn Error + Send + std::marker::Sync>;

/// The unit of fetching: smaller than the default of 64 KiB, as these programs read a little here and there.
pub const CHUNK: u32 = 16 << 10;
/// How much may be under way in the background: what still comes when pulling is paused.
const WINDOW: u64 = 128 << 10;
/// How long a fetch may take.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A device and its name.
pub type Named = (&'static str, Arc<dyn BlockDevice>);

/// The devices of a site. What mounts write is kept beside them.
struct Devices {
    key: PeerKey,
    named: Vec<Named>,
}

impl Images for Devices {
    fn allow(&self, _: &ImageName, peer: &Peer, _: Access) -> Result<(), Refusal> {
        match peer.key == self.key {
            true => Ok(()),
            false => Err(Refusal::new(Code::Denied, "the key of a stranger")),
        }
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        let found = self.named.iter().find(|(own, _)| *own == name.as_str());
        let (name, device) = found.ok_or_else(|| Refusal::new(Code::NotFound, "no such device"))?;
        Ok(Base {
            device: Arc::clone(device),
            // Caches of another content are refused. A site has the digest of each image; these never change.
            digest: Digest(*blake3::hash(name.as_bytes()).as_bytes()),
            arriving: None,
            through: None,
        })
    }
}

/// Where a site is, and the key that it shares with its mounts.
#[derive(Clone)]
pub struct Site {
    pub address: String,
    pub identity: Identity,
}

impl Site {
    /// Serves devices at an address; what mounts write is kept in `state`.
    pub async fn serve(
        address: &str,
        identity: Identity,
        named: Vec<Named>,
        state: &Path,
    ) -> Result<Site, Failed> {
        let listener = Listener::bind(address.parse()?, &identity).await?;
        let address = listener.local_addr().to_string();
        let key = identity.key();
        let server = Server::new(Config::new(Arc::new(Devices { key, named }), state, 2))?;
        tokio::spawn(async move {
            while let Ok(pending) = listener.accept().await {
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let connection = pending.handshake().await?;
                    let peer = Peer {
                        key: connection.peer().ok_or("no key")?,
                        name: connection.remote().into(),
                        rights: Rights::DEFAULT.of_peer(),
                        domain: "default".into(),
                    };
                    let (_go, stop) = watch::channel(false);
                    let call = IncomingCall::receive(connection, stop).await?;
                    server.serve_connection(peer, call).await?;
                    Ok::<(), Failed>(())
                });
            }
        });
        Ok(Site { address, identity })
    }

    /// Serves a file in this process, and mounts it here, with a cache in `dir`.
    pub fn stream(runtime: &Handle, file: &Path, dir: &Path) -> Result<Mount, Failed> {
        let device = Arc::new(FileDevice::new(File::open(file)?, true)?);
        let named: Vec<Named> = vec![("file", device)];
        let serve = Site::serve("127.0.0.1:0", Identity::generate(), named, dir);
        let site = runtime.block_on(serve)?;
        Mount::open(runtime, &site, "file", Access::ReadOnly, dir)
    }
}

impl Connector for Site {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            let (options, key) = (ConnectOptions::default(), self.identity.key());
            Ok(connect(&self.address, &self.identity, &key, &options).await?)
        })
    }
}

/// The chunks that have come, in their order, and what is to be done when there are enough.
#[derive(Default)]
struct Came {
    chunks: Mutex<(Vec<u64>, usize)>,
    change: Condvar,
    pull: OnceLock<PullHandle>,
}

impl Came {
    fn add(&self, index: u64) {
        let mut came = self.chunks.lock();
        came.0.push(index);
        if came.0.len() == came.1 {
            // At once: meanwhile more would come.
            self.pull.get().inspect(|pull| pull.pause());
            self.change.notify_all();
        }
    }
}

/// A device of a site, with a cache: what is not here is fetched when it is read.
pub struct Mount {
    pub device: Arc<dyn BlockDevice>,
    managed: Managed,
    came: Arc<Came>,
}

impl Mount {
    pub fn open(
        runtime: &Handle,
        site: &Site,
        name: &str,
        access: Access,
        dir: &Path,
    ) -> Result<Mount, Failed> {
        let options = Options {
            chunk: CHUNK,
            window: Some(WINDOW),
            ..Options::new(ImageName::new(name)?, access)
        };
        let client = Client::open(runtime, Arc::new(site.clone()), options);
        let client = runtime.block_on(client)?;
        let cache = HostDirectory::open_or_create(&dir.join(format!("cache-{name}")))?;
        let image = client.identity().digest;
        let mut options = SyncedOptions::new(Arc::new(cache), Arc::new(client), name.as_bytes());
        options.image = image;
        // Nothing in the background until `pull`; a flush waits for the disk here.
        options.prefetch = Order::None;
        options.sync = Sync::Local;
        let came = Arc::new(Came::default());
        let hook = Arc::clone(&came);
        options.hooks.chunk_is_local = Some(Arc::new(move |index| hook.add(index)));
        let built = Stack::managed(options).build()?;
        let managed = built.managed.ok_or("it is not managed")?;
        let _ = came.pull.set(managed.pull.clone());
        Ok(Mount {
            device: built.device,
            managed,
            came,
        })
    }

    /// Bytes that are here: those of whole chunks.
    pub fn here(&self) -> u64 {
        self.managed.synced.progress().stored_bytes
    }

    /// Where the chunks that have come lie, in their order.
    pub fn came(&self) -> Vec<Range<u64>> {
        let chunk = u64::from(CHUNK);
        let range = |index: &u64| index * chunk..(index + 1) * chunk;
        self.came.chunks.lock().0.iter().map(range).collect()
    }

    /// Fetches these places first, and then the rest in order, until there are so many bytes: the heuristic of r3map.
    pub fn pull(&self, first: &[Range<u64>], bytes: u64) -> Result<(), Failed> {
        let size = self.device.size();
        let shape = Shape { size, chunk: CHUNK };
        let mut came = self.came.chunks.lock();
        came.1 = came.0.len() + bytes.div_ceil(u64::from(CHUNK)) as usize;
        self.managed.pull.set_order(&Order::of_ranges(first, shape));
        self.managed.pull.resume();
        while came.0.len() < came.1 {
            if self.came.change.wait_for(&mut came, PATIENCE).timed_out() {
                return Err("what was pulled does not come".into());
            }
        }
        Ok(())
    }

    /// What was written is at the site when this returns.
    pub fn push(&self) -> Result<(), DeviceError> {
        self.managed.push.sync()
    }

    /// Pushes what was written, and gives the device back.
    pub fn close(self) -> Result<(), DeviceError> {
        self.managed.synced.close(true)
    }
}
