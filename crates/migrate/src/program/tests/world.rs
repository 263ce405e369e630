//! Two processes in one: a program of a region and a disk, and where it goes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::MemoryDevice;
use drover_device::stage::{TrackHandle, Tracked};
use drover_frontend::region::{Options, Region};
use drover_net::service::{IncomingCall, Peer, Services};
use drover_net::{Code, Connection, NetError, PeerKey, Refusal, Right, Rights};
use drover_store::machine::{MachineRecord, Machines};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, watch};

use super::super::*;
use protocol::PartOffer;

pub fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// What arrived.
#[derive(Clone)]
pub struct Arrived {
    pub region: Arc<Region>,
    pub disk: Arc<dyn BlockDevice>,
    pub track: TrackHandle,
    pub state: Vec<u8>,
}

/// Where the program goes.
pub struct There {
    sizes: [u64; 2],
    targets: Mutex<Option<Arrived>>,
    pub arrived: Mutex<Option<Arrived>>,
    /// The records: at the other end it must not allow it to run there too.
    machines: [Machines; 2],
    pub runs: AtomicU64,
    /// Whether it was taken before all of it was there for good.
    pub in_part: AtomicBool,
    /// Whether it reads its memory when it is started.
    pub reads: AtomicBool,
    /// Called when it is started.
    pub on_run: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl There {
    pub fn new(sizes: [u64; 2], machines: [Machines; 2]) -> Arc<Self> {
        Arc::new(Self {
            sizes,
            targets: Mutex::default(),
            arrived: Mutex::default(),
            machines,
            runs: AtomicU64::new(0),
            in_part: AtomicBool::new(false),
            reads: AtomicBool::new(true),
            on_run: Mutex::default(),
        })
    }
}

impl Host for There {
    fn prepare(&self, parts: &[PartOffer]) -> Result<Vec<Target>, Refusal> {
        let expected = [("memory", self.sizes[0]), ("disk", self.sizes[1])];
        if !parts
            .iter()
            .map(|part| (&*part.name, part.size))
            .eq(expected)
        {
            return Err(Refusal::new(Code::Denied, "it has other parts"));
        }
        let store = Arc::new(MemoryDevice::new(self.sizes[0]));
        let options = Options {
            timeout: Duration::from_secs(2),
            ..Options::default()
        };
        let (memory, region) = Target::region(store, options)
            .map_err(|e| Refusal::new(Code::Failed, e.to_string()))?;
        let (disk, device) = Target::device(Arc::new(MemoryDevice::new(self.sizes[1])));
        let (device, track) = Tracked::new(device, 4096);
        *self.targets.lock() = Some(Arrived {
            region,
            disk: Arc::new(device),
            track,
            state: Vec::new(),
        });
        Ok(vec![memory, disk])
    }

    fn run(&self, state: Vec<u8>) -> Result<(), String> {
        let [other, own] = [0, 1].map(|end| self.machines[end].load(&name("program")).unwrap());
        self.in_part
            .store(own.unwrap().is_partial(), Ordering::SeqCst);
        assert!(
            other.is_none_or(|record| !record.may_run()),
            "it runs at both ends"
        );
        if let Some(on_run) = self.on_run.lock().take() {
            on_run();
        }
        let mut arrived = self.targets.lock().take().unwrap();
        let mut page = [0; 4096];
        let end = match self.reads.load(Ordering::SeqCst) {
            true => arrived.region.len() as u64,
            false => 0,
        };
        for offset in (0..end).step_by(64 << 10) {
            arrived
                .region
                .read_at(offset, &mut page)
                .map_err(|e| e.to_string())?;
        }
        arrived.state = state;
        *self.arrived.lock() = Some(arrived);
        self.runs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

type Serving = Arc<dyn Fn(Connection) + Send + Sync>;

/// A way to a leecher: each connection is a pair of sockets.
pub struct Way {
    pub serving: Mutex<Option<Serving>>,
    /// After how many bytes the next connections break.
    pub limits: Mutex<Vec<usize>>,
    /// Whether connections can be cut.
    pub is_fragile: AtomicBool,
    cuts: Mutex<Vec<Arc<Notify>>>,
    is_stalled: Arc<AtomicBool>,
}

impl Way {
    pub fn new(serving: Serving) -> Arc<Self> {
        Arc::new(Self {
            serving: Mutex::new(Some(serving)),
            limits: Mutex::default(),
            is_fragile: AtomicBool::new(false),
            cuts: Mutex::default(),
            is_stalled: Arc::default(),
        })
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.cuts.lock().drain(..).for_each(|cut| cut.notify_one());
    }

    /// Ends the first connection, and carries nothing in the others any more.
    pub fn stall(&self) {
        self.is_stalled.store(true, Ordering::SeqCst);
        self.cuts.lock()[0].notify_one();
    }
}

impl Site for Way {
    fn connect(&self) -> Pin<Box<dyn Future<Output = Result<Connection, NetError>> + Send + '_>> {
        Box::pin(async {
            let serving = self.serving.lock().clone();
            let serving = serving.ok_or_else(|| NetError::Local {
                path: "nowhere".into(),
                reason: "nobody is there".into(),
            })?;
            let limit = self.limits.lock().pop();
            let is_fragile = self.is_fragile.load(Ordering::SeqCst);
            let Some(limit) = limit.or(is_fragile.then_some(usize::MAX)) else {
                let (here, there) = Connection::pair().unwrap();
                serving(there);
                return Ok(here);
            };
            let (here, near) = UnixStream::pair().unwrap();
            let (far, there) = UnixStream::pair().unwrap();
            let (cut, is_stalled) = (Arc::new(Notify::new()), Arc::clone(&self.is_stalled));
            self.cuts.lock().push(Arc::clone(&cut));
            tokio::spawn(async move {
                tokio::select! {
                    () = carry(near, far, limit, &is_stalled) => {}
                    () = cut.notified() => {}
                }
            });
            serving(Connection::from_unix(there, "one that breaks"));
            Ok(Connection::from_unix(here, "one that breaks"))
        })
    }

    fn key(&self) -> [u8; 32] {
        [2; 32]
    }

    fn name(&self) -> String {
        "there".into()
    }
}

/// Carries so many bytes in both directions together.
async fn carry(near: UnixStream, far: UnixStream, limit: usize, is_stalled: &AtomicBool) {
    let passed = AtomicU64::new(0);
    let pass = |count: u64| passed.fetch_add(count, Ordering::SeqCst) + count < limit as u64;
    let one_way = async |mut from: OwnedReadHalf, mut to: OwnedWriteHalf| {
        let mut bytes = vec![0; 8192];
        while let Ok(count @ 1..) = from.read(&mut bytes).await {
            if is_stalled.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            if !pass(count as u64) || to.write_all(&bytes[..count]).await.is_err() {
                break;
            }
        }
    };
    let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
    tokio::select! {
        () = one_way(near_read, far_write) => {}
        () = one_way(far_read, near_write) => {}
    }
}

/// Serves a leecher on a runtime.
pub fn serve<H: Host>(runtime: &Runtime, leecher: &Arc<Leecher<H>>) -> Serving {
    let mut services = Services::new(Refusal::new(Code::Unsupported, "no such service"));
    leecher.add_to(&mut services);
    let services = Arc::new(services);
    let handle = runtime.handle().clone();
    let (stop, stopped) = watch::channel(false);
    Arc::new(move |connection| {
        let (services, stopped, _kept) = (Arc::clone(&services), stopped.clone(), stop.clone());
        handle.spawn(async move {
            let _kept = _kept;
            let peer = Peer {
                key: PeerKey([1; 32]),
                name: "here".into(),
                rights: Rights::of(&[Right::Host]),
                domain: "default".into(),
            };
            if let Ok(call) = IncomingCall::receive(connection, stopped).await {
                let _ = services.serve(peer, call).await;
            }
        });
    })
}

pub struct World {
    pub runtime: Arc<Runtime>,
    pub region: Arc<Region>,
    pub disk: Arc<dyn BlockDevice>,
    track: TrackHandle,
    pub way: Arc<Way>,
    pub host: Arc<There>,
    leecher: Arc<Leecher<There>>,
    pub machines: [Machines; 2],
    _directory: Arc<tempfile::TempDir>,
}

/// None where the kernel has no regions.
pub fn world(seed: u64, memory: u64, disk: u64) -> Option<World> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let below = MemoryDevice::new(memory);
    let mut page = [0; 4096];
    for offset in (0..memory).step_by(4096).filter(|offset| offset % 3 == 0) {
        rng.fill(&mut page);
        below.write(offset, &page).unwrap();
    }
    let options = Options {
        writable: true,
        ..Options::default()
    };
    let region = match Region::new(Arc::new(below), options) {
        Ok(region) => Arc::new(region),
        Err(error) => {
            eprintln!("SKIP: {error}");
            return None;
        }
    };
    let (device, track) = Tracked::new(MemoryDevice::new(disk), 4096);
    let directory = tempfile::tempdir().unwrap();
    let machines = ["here", "there"].map(|end| Machines::new(directory.path().join(end)));
    Some(World::new(
        region,
        Arc::new(device),
        track,
        machines,
        Arc::new(directory),
    ))
}

impl World {
    fn new(
        region: Arc<Region>,
        disk: Arc<dyn BlockDevice>,
        track: TrackHandle,
        machines: [Machines; 2],
        directory: Arc<tempfile::TempDir>,
    ) -> Self {
        let runtime = Arc::new(runtime());
        let sizes = [region.len() as u64, disk.size()];
        let host = There::new(sizes, machines.clone());
        let leecher = Leecher::new(name("program"), machines[1].clone(), Arc::clone(&host));
        let way = Way::new(serve(&runtime, &leecher));
        Self {
            runtime,
            region,
            disk,
            track,
            way,
            host,
            leecher,
            machines,
            _directory: directory,
        }
    }

    /// The way back from where it arrived.
    pub fn back(&self) -> World {
        let arrived = self.arrived();
        let [here, there] = self.machines.clone();
        let directory = Arc::clone(&self._directory);
        World::new(
            arrived.region,
            arrived.disk,
            arrived.track,
            [there, here],
            directory,
        )
    }

    pub fn parts(&self) -> Vec<Part> {
        vec![
            Part::region("memory", Arc::clone(&self.region)),
            Part::device("disk", Arc::clone(&self.disk), self.track.clone()),
        ]
    }

    pub fn options(&self) -> SeederOptions {
        let to = Arc::clone(&self.way) as _;
        SeederOptions {
            give_up_after: Duration::from_secs(3),
            ..SeederOptions::new(name("program"), self.machines[0].clone(), to)
        }
    }

    pub fn leecher(&self) -> &Arc<Leecher<There>> {
        &self.leecher
    }

    pub fn arrived(&self) -> Arrived {
        self.host.arrived.lock().clone().expect("it has arrived")
    }

    pub fn here(&self) -> MachineRecord {
        self.machines[0].load(&name("program")).unwrap().unwrap()
    }

    pub fn there(&self) -> MachineRecord {
        self.machines[1].load(&name("program")).unwrap().unwrap()
    }
}

/// Threads that write to the region and the disk, until they are paused, and what they wrote.
pub struct Writers {
    model: Arc<Mutex<Model>>,
    stop: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    resumed: AtomicU64,
    stubborn: bool,
}

struct Model {
    memory: Vec<u8>,
    disk: Vec<u8>,
}

impl Writers {
    pub fn start(world: &World, seed: u64) -> Arc<Self> {
        let mut memory = vec![0; world.region.len()];
        world.region.read_at(0, &mut memory).unwrap();
        let mut disk = vec![0; world.disk.size() as usize];
        world.disk.read(0, &mut disk).unwrap();
        let model = Arc::new(Mutex::new(Model { memory, disk }));
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..2)
            .map(|thread| {
                let (model, stop) = (Arc::clone(&model), Arc::clone(&stop));
                let (region, disk) = (Arc::clone(&world.region), Arc::clone(&world.disk));
                std::thread::spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed * 10 + thread);
                    while !stop.load(Ordering::SeqCst) {
                        let mut data = vec![0; rng.usize(1..20_000)];
                        if rng.u8(..5) > 0 {
                            rng.fill(&mut data);
                        }
                        let mut model = model.lock();
                        let model = &mut *model;
                        let is_memory = rng.u8(..4) > 0;
                        let into = match is_memory {
                            true => &mut model.memory,
                            false => &mut model.disk,
                        };
                        let at = rng.usize(..into.len() - data.len());
                        into[at..at + data.len()].copy_from_slice(&data);
                        match is_memory {
                            true => region.write_at(at as u64, &data).unwrap(),
                            false => disk.write(at as u64, &data).unwrap(),
                        }
                    }
                })
            })
            .collect();
        Arc::new(Self {
            model,
            stop,
            threads: Mutex::new(threads),
            resumed: AtomicU64::new(0),
            stubborn: false,
        })
    }

    fn with(of: &Arc<Self>, stubborn: bool) -> Arc<Self> {
        Arc::new(Self {
            model: Arc::clone(&of.model),
            stop: Arc::default(),
            threads: Mutex::default(),
            resumed: AtomicU64::new(0),
            stubborn,
        })
    }

    /// They do not write any more.
    pub fn frozen(of: &Arc<Self>) -> Arc<Self> {
        Self::with(of, false)
    }

    /// They cannot be paused.
    pub fn stubborn(of: &Arc<Self>) -> Arc<Self> {
        Self::with(of, true)
    }

    pub fn model(&self) -> (Vec<u8>, Vec<u8>) {
        let model = self.model.lock();
        (model.memory.clone(), model.disk.clone())
    }

    /// Writes to each block of the first MiB of the memory, and of a quarter of the disk.
    pub fn touch(&self, world: &World) {
        let mut model = self.model.lock();
        for at in (0..1 << 20).step_by(4096) {
            model.memory[at] ^= 1;
            world
                .region
                .write_at(at as u64, &model.memory[at..=at])
                .unwrap();
        }
        for at in (0..model.disk.len() / 4).step_by(4096) {
            model.disk[at] ^= 1;
            world.disk.write(at as u64, &model.disk[at..=at]).unwrap();
        }
    }

    pub fn is_paused(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::SeqCst)
    }

    pub fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.lock().drain(..) {
            thread.join().unwrap();
        }
    }
}

impl Program for Writers {
    fn pause(&self) -> std::io::Result<Vec<u8>> {
        if self.stubborn {
            return Err(std::io::Error::other("not now"));
        }
        self.end();
        Ok(b"its own state".to_vec())
    }

    fn resume(&self) {
        self.resumed.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.end();
    }
}
