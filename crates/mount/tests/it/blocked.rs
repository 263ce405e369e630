//! Hanging disks of a site do not delay requests to other disks.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Digest, Extent, ImageName, Zeroes,
};
use drover_device::backend::MemoryDevice;
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_mount::server::{Base, Images, Room, Server};
use drover_net::{Peer, PeerKey, Refusal};
use drover_store::lease::Access;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Runtime;

use crate::util::{Near, content, memory, name, runtime, serve};

const SIZE: usize = 4 << 20;

/// From here on an image that hangs does.
const HANGS: u64 = 1 << 20;

/// How long something that need not wait is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Holds back, while it is closed, reads of a part of an image, and its closing.
#[derive(Default)]
pub struct Gate {
    closed: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    pub fn pass(&self) {
        let mut closed = self.closed.lock();
        closed.1 += 1;
        while closed.0 {
            self.changed.wait(&mut closed);
        }
        closed.1 -= 1;
    }

    pub fn set(&self, closed: bool) {
        self.closed.lock().0 = closed;
        self.changed.notify_all();
    }

    pub fn wait_for_a_request(&self) {
        let limit = Instant::now() + PATIENCE;
        while self.closed.lock().1 == 0 {
            assert!(Instant::now() < limit, "nobody comes");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Lets go on what waits, however the test ends.
pub struct Opens(pub Arc<Gate>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

struct Hangs {
    inner: Arc<MemoryDevice>,
    gate: Arc<Gate>,
    closes: bool,
}

impl Drop for Hangs {
    fn drop(&mut self) {
        if self.closes {
            self.gate.pass();
        }
    }
}

impl BlockDevice for Hangs {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        if !self.closes && offset >= HANGS {
            self.gate.pass();
        }
        self.inner.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.inner.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.inner.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.inner.extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.cost(offset, length)
    }
    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.write_cost(offset, length)
    }
}

/// An image `slow`, which may hang, and `quick`.
struct Shelf {
    inner: Arc<MemoryDevice>,
    gate: Arc<Gate>,
    closes: bool,
}

impl Images for Shelf {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        let device: Arc<dyn BlockDevice> = match name.as_str() {
            "slow" => Arc::new(Hangs {
                inner: self.inner.clone(),
                gate: self.gate.clone(),
                closes: self.closes,
            }),
            _ => self.inner.clone(),
        };
        Ok(Base {
            device,
            digest: Digest([7; 32]),
            arriving: None,
            through: None,
        })
    }

    fn digest(&self, _: &ImageName) -> Result<Digest, Refusal> {
        Ok(Digest([7; 32]))
    }
}

struct World {
    server: Arc<Server>,
    _directory: tempfile::TempDir,
    gate: Arc<Gate>,
    bytes: Vec<u8>,
}

/// Call within a runtime.
fn world(closes: bool) -> World {
    let bytes = content(SIZE, 5);
    let gate = Arc::new(Gate::default());
    let directory = tempfile::tempdir().unwrap();
    let shelf = Shelf {
        inner: memory(&bytes),
        gate: gate.clone(),
        closes,
    };
    World {
        server: serve(Arc::new(shelf), directory.path()),
        _directory: directory,
        gate,
        bytes,
    }
}

fn mount(runtime: &Runtime, world: &World, image: &str, access: Access) -> RemoteDevice {
    let near = Near::new(world.server.clone());
    let options = Options {
        give_up: 2 * PATIENCE,
        ..Options::new(name(image), access)
    };
    let opened = Client::open(runtime.handle(), near, options);
    let client = runtime.block_on(async { tokio::time::timeout(PATIENCE, opened).await });
    let client = client.expect("it opens in time").unwrap();
    RemoteDevice::new(Arc::new(client))
}

/// Whether something is done before patience ends.
fn in_time(what: &str, work: impl FnOnce() + Send + 'static) {
    let (say, hear) = mpsc::channel();
    std::thread::spawn(move || {
        work();
        let _ = say.send(());
    });
    let heard = hear.recv_timeout(PATIENCE);
    assert!(heard.is_ok(), "{what}: {heard:?}");
}

#[test]
fn changes_that_hang_keep_no_read_waiting() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let world = world(false);
    let slow = Arc::new(mount(&runtime, &world, "slow", Access::ReadWrite));
    let quick = mount(&runtime, &world, "quick", Access::ReadOnly);
    world.gate.set(true);
    let opens = Opens(world.gate.clone());
    // Each begins and ends within a block, so the image is read for the rest of it.
    let writers = (0..30).map(|n: u64| {
        let slow = slow.clone();
        std::thread::spawn(move || slow.write(HANGS + n * 8192 + 5, &[9; 100]))
    });
    let writers: Vec<_> = writers.collect();
    world.gate.wait_for_a_request();
    let (bytes, own) = (world.bytes.clone(), slow.clone());
    in_time("reads", move || {
        let mut all = vec![0; SIZE];
        quick.read(0, &mut all).unwrap();
        assert!(all == bytes);
        let mut some = vec![0; HANGS as usize];
        own.read(0, &mut some).unwrap();
        assert!(some == bytes[..HANGS as usize]);
        quick.close().unwrap();
    });
    drop(opens);
    for writer in writers {
        writer.join().unwrap().unwrap();
    }
    let mut written = [0; 100];
    slow.read(HANGS + 29 * 8192 + 5, &mut written).unwrap();
    assert_eq!(written, [9; 100]);
    slow.close().unwrap();
}

#[test]
fn an_image_that_does_not_answer_keeps_nothing_from_readers_of_others() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let world = world(false);
    let slow = Arc::new(mount(&runtime, &world, "slow", Access::ReadOnly));
    world.gate.set(true);
    let opens = Opens(world.gate.clone());
    let readers = (0..30).map(|n: u64| {
        let slow = slow.clone();
        std::thread::spawn(move || slow.read(HANGS + n * 8192, &mut [0; 100]))
    });
    let readers: Vec<_> = readers.collect();
    world.gate.wait_for_a_request();
    let quick = mount(&runtime, &world, "quick", Access::ReadWrite);
    in_time("a mount of another image", move || {
        quick.write(70, &[3; 100]).unwrap();
        quick.flush().unwrap();
        let mut back = [0; 100];
        quick.read(70, &mut back).unwrap();
        assert_eq!(back, [3; 100]);
        quick.close().unwrap();
    });
    drop(opens);
    for reader in readers {
        reader.join().unwrap().unwrap();
    }
    slow.close().unwrap();
}

#[test]
fn an_image_that_takes_long_to_close_keeps_nothing_from_another() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let world = world(true);
    let slow = mount(&runtime, &world, "slow", Access::ReadWrite);
    slow.write(0, &[1; 100]).unwrap();
    world.gate.set(true);
    let opens = Opens(world.gate.clone());
    slow.close().unwrap();
    drop(slow);
    world.gate.wait_for_a_request();
    let quick = Arc::new(mount(&runtime, &world, "quick", Access::ReadWrite));
    in_time("a mount of another image", move || {
        quick.write(70, &[3; 100]).unwrap();
        quick.flush().unwrap();
        quick.close().unwrap();
    });
    drop(opens);
    // A client that connects meanwhile waits until it is closed, and finds it complete.
    let again = mount(&runtime, &world, "slow", Access::ReadWrite);
    let mut written = [0; 100];
    again.read(0, &mut written).unwrap();
    assert_eq!(written, [1; 100]);
    again.close().unwrap();
}
