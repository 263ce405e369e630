//! The site of a direct mount is killed, or loses power, while it is written.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_core::{BlockDevice, Digest, ImageName, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_mount::server::{Base, Images, Room, Server, WhyBroken};
use drover_net::{Peer, PeerKey, Refusal};
use drover_storage::{Directory, FakeDirectory};
use drover_store::lease::{Access, MountId};

use crate::util::{Near, name, runtime, serve};

/// Bytes of each writer's part of the disk.
const PART: u64 = 100_000;
const WRITERS: u64 = 3;
/// How long may pass until something is written on a machine that is loaded.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the disk.
const SIZE: u64 = 2 << 20;

/// One image, the files of its overlay in memory.
struct OnFake(FakeDirectory, Ask);

/// Whether a peer may take up so many bytes.
pub type Ask = Arc<dyn Fn(u64) -> Result<(), Refusal> + Send + Sync>;

impl Images for OnFake {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, bytes: u64) -> Result<Room, Refusal> {
        (self.1)(bytes)?;
        Ok(Box::new(()))
    }

    fn open(&self, _: &ImageName) -> Result<Base, Refusal> {
        Ok(Base {
            device: Arc::new(MemoryDevice::new(SIZE)),
            digest: Digest([7; 32]),
            arriving: None,
            through: None,
        })
    }

    fn overlay(&self, _: &Path) -> std::io::Result<Arc<dyn Directory>> {
        Ok(Arc::new(self.0.clone()))
    }
}

/// A site whose process can end at any moment.
pub struct Mortal {
    state: tempfile::TempDir,
    fake: FakeDirectory,
    ask: Ask,
    pub server: Arc<Server>,
}

impl Mortal {
    pub fn new(seed: u64) -> Self {
        Self::asking(seed, Arc::new(|_| Ok(())))
    }

    pub fn asking(seed: u64, ask: Ask) -> Self {
        let state = tempfile::tempdir().unwrap();
        let fake = FakeDirectory::new(512, seed);
        let images = OnFake(fake.clone(), ask.clone());
        let server = serve(Arc::new(images), state.path());
        Self {
            state,
            fake,
            ask,
            server,
        }
    }

    /// It ends, and a new one begins with what is left: all files if it is killed, what was synced if the power fails.
    pub fn ends(&mut self, near: &Near, power: Option<u64>) {
        self.stops(near, power);
        near.now(self.server.clone());
        near.down.store(false, Ordering::Relaxed);
    }

    /// The same, and whoever used it does not come back.
    pub fn stops(&mut self, near: &Near, power: Option<u64>) {
        // First: a site that sees its connections end flushes.
        self.fake.cut_power_at(self.fake.steps());
        near.down.store(true, Ordering::Relaxed);
        near.cut();
        self.fake = match power {
            Some(seed) => self.fake.after_crash(seed),
            None => self.fake.after_kill(),
        };
        let images = OnFake(self.fake.clone(), self.ask.clone());
        self.server = serve(Arc::new(images), self.state.path());
    }
}

/// Until it succeeds: a request may meet the site as it ends.
pub fn insist<E: std::fmt::Display>(seed: u64, mut request: impl FnMut() -> Result<(), E>) {
    for _ in 0..100 {
        match request() {
            Ok(()) => return,
            Err(error) => eprintln!("seed {seed}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("seed {seed}: it never succeeds");
}

/// Changes a part of the disk and reads it until told to stop; returns what it has.
fn write(device: &RemoteDevice, seed: u64, part: u64, stop: &AtomicBool) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed * 100 + part);
    let start = part * PART;
    let mut model = vec![0; PART as usize];
    while !stop.load(Ordering::Relaxed) {
        let length = random.usize(1..12_000);
        let at = random.usize(0..PART as usize - length);
        let (offset, range) = (start + at as u64, at..at + length);
        match random.u8(..10) {
            0 => insist(seed, || device.flush()),
            1 => {
                let zeroes = Zeroes::default();
                insist(seed, || device.write_zeroes(offset, length as u64, zeroes));
                model[range].fill(0);
            }
            2 => {
                insist(seed, || device.trim(offset, length as u64));
                // Unspecified, but it stays.
                insist(seed, || device.read(offset, &mut model[range.clone()]));
            }
            3..6 => {
                let mut found = vec![0; length];
                insist(seed, || device.read(offset, &mut found));
                assert!(found == model[range], "seed {seed}: a write is lost");
            }
            _ => {
                random.fill(&mut model[range.clone()]);
                insist(seed, || device.write(offset, &model[range.clone()]));
            }
        }
    }
    model
}

#[test]
fn no_write_is_lost_with_the_site_and_a_flush_is_honest() {
    let runtime = runtime();
    let _inside = runtime.enter();
    for seed in 0..8 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut site = Mortal::new(seed);
        let near = Near::new(site.server.clone());
        let mount = MountId([9; 16]);
        let open = || {
            let options = Options {
                mount,
                ..Options::new(name("web"), Access::ReadWrite)
            };
            let client = Client::open(runtime.handle(), near.clone(), options);
            RemoteDevice::new(Arc::new(runtime.block_on(client).unwrap()))
        };
        let device = open();
        let stop = AtomicBool::new(false);
        let model: Vec<u8> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS)
                .map(|part| {
                    scope.spawn({
                        let (device, stop) = (&device, &stop);
                        move || write(device, seed, part, stop)
                    })
                })
                .collect();
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(random.u64(1..300)));
                let begun = std::time::Instant::now();
                while device.unflushed() == 0 {
                    assert!(begun.elapsed() < PATIENCE, "seed {seed}: all is flushed");
                    std::thread::yield_now();
                }
                match random.u8(..3) {
                    // Only the link.
                    0 => near.cut(),
                    1 => site.ends(&near, None),
                    _ => site.ends(&near, Some(random.u64(..))),
                }
            }
            stop.store(true, Ordering::Relaxed);
            let parts = writers.into_iter().map(|writer| writer.join().unwrap());
            parts.flatten().collect()
        });
        insist(seed, || device.flush());
        // Both ends lose what they have in memory.
        near.down.store(true, Ordering::Relaxed);
        drop(device);
        site.ends(&near, Some(random.u64(..)));
        let device = open();
        let mut found = vec![0; model.len()];
        device.read(0, &mut found).unwrap();
        assert!(found == model, "seed {seed}: a flush has lied");
        device.close().unwrap();
    }
}

#[test]
fn writes_that_are_lost_with_a_revoked_lease_are_told() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut site = Mortal::new(1);
    let near = Near::new(site.server.clone());
    let open = |near: &Arc<Near>| {
        let options = Options::new(name("web"), Access::ReadWrite);
        let client = Client::open(runtime.handle(), near.clone(), options);
        RemoteDevice::new(Arc::new(runtime.block_on(client).unwrap()))
    };
    let device = open(&near);
    device.write(0, &[1; 5000]).unwrap();
    near.down.store(true, Ordering::Relaxed);
    near.cut();
    site.ends(&near, None);
    near.down.store(true, Ordering::Relaxed);
    let web = name("web");
    let broken = site.server.break_lease(&web, WhyBroken::ByUser);
    runtime.block_on(broken).unwrap();
    // Another writes meanwhile, and must not be overwritten.
    let other = Near::new(site.server.clone());
    let second = open(&other);
    second.write(0, &[2; 5000]).unwrap();
    second.flush().unwrap();
    second.close().unwrap();
    near.down.store(false, Ordering::Relaxed);
    assert!(device.flush().is_err());
    assert!(device.flush().is_err());
    let second = open(&other);
    let mut found = [0; 5000];
    second.read(0, &mut found).unwrap();
    assert!(found == [2; 5000]);
    second.close().unwrap();
}
