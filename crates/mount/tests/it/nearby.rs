//! Mounts on the host that has the image, which read what nobody has written over from the image itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError, Zeroes};
use drover_mount::client::{Client, Options};
use drover_mount::direct::{Near as Found, NearDevice};
use drover_mount::protocol::{ChangesSeen, LookAtChanges};
use drover_mount::server::WhyBroken;
use drover_net::{Code, Refusal};
use drover_store::lease::{Access, MountId};

use crate::util::{Near, Site, content, memory, name, runtime};

const SIZE: usize = 300_000;
/// What the image on this host is filled with in these tests, so that it is seen what was read from it.
const HERE: u8 = 0xee;

struct World {
    runtime: tokio::runtime::Runtime,
    site: Site,
    near: Arc<Near>,
    /// What the site has.
    bytes: Vec<u8>,
}

struct Mounted {
    client: Arc<Client>,
    device: NearDevice,
    found: Arc<Found>,
    mount: MountId,
}

impl World {
    fn new() -> Self {
        let runtime = runtime();
        let inside = runtime.enter();
        // No block of it is like those of the image here.
        let mut bytes = content(SIZE, 5);
        bytes.iter_mut().for_each(|byte| *byte &= 0x7f);
        let site = Site::with("web", memory(&bytes));
        let near = Near::new(site.server.clone());
        drop(inside);
        Self {
            runtime,
            site,
            near,
            bytes,
        }
    }

    fn mount(&self, access: Access) -> Mounted {
        let _inside = self.runtime.enter();
        let mut options = Options::new(name("web"), access);
        options.give_up = Duration::from_secs(120);
        let mount = options.mount;
        let client = Client::open(self.runtime.handle(), self.near.clone(), options);
        let client = Arc::new(self.runtime.block_on(client).unwrap());
        let (device, found) = NearDevice::new(Arc::clone(&client));
        Mounted {
            client,
            device,
            found,
            mount,
        }
    }

    fn changes(&self, mount: MountId) -> Result<ChangesSeen, Refusal> {
        let ask = LookAtChanges {
            image: name("web"),
            mount,
        };
        let seen = self.site.server.look_at_changes(&self.near.peer, ask);
        self.runtime.block_on(seen)
    }

    fn find(&self, mounted: &Mounted) {
        let seen = self.changes(mounted.mount).unwrap();
        assert!(mounted.found.found(here(), seen.ranges()));
    }
}

fn here() -> Arc<dyn BlockDevice> {
    memory(&[HERE; SIZE])
}

fn read(device: &NearDevice, at: usize, length: usize) -> Vec<u8> {
    let mut out = vec![1; length];
    device.read(at as u64, &mut out).unwrap();
    out
}

/// Until the link is known to be up again.
fn soon(is: impl Fn() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "not within a minute"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_nobody_wrote_is_read_here_and_the_rest_at_the_site() {
    let mut world = World::new();
    // What an earlier mount wrote, and this one before and after it found the image here.
    let earlier = world.mount(Access::ReadWrite);
    earlier.device.write(8192 + 5, &[7; 10]).unwrap();
    earlier.device.flush().unwrap();
    earlier.client.close_now().unwrap();
    drop(earlier);
    world.bytes[8197..8207].fill(7);
    let mounted = world.mount(Access::ReadWrite);
    let device = &mounted.device;
    device.write(100_000, &[9; 5000]).unwrap();
    world.bytes[100_000..105_000].fill(9);
    assert!(
        read(device, 0, SIZE) == world.bytes,
        "all is read at the site"
    );
    assert_eq!(device.cost(0, 4096), Cost::Network);
    world.find(&mounted);
    device.trim(200_000, 4096).unwrap();
    device
        .write_zeroes(250_000, 9000, Zeroes::default())
        .unwrap();
    world.bytes[250_000..259_000].fill(0);
    device.write(299_999, &[3]).unwrap();
    world.bytes[299_999] = 3;

    let written = [
        8192..12288,
        98304..106_496,
        196_608..204_800,
        249_856..262_144,
        299_008..SIZE,
    ];
    let is_written = |at: usize| written.iter().any(|range| range.contains(&at));
    for at in (0..SIZE).step_by(4096) {
        let length = 4096.min(SIZE - at);
        let found = read(device, at, length);
        match is_written(at) {
            // What a trim leaves there is not said.
            true if (196_608..204_800).contains(&at) => assert!(!found.contains(&HERE)),
            true => assert!(found == world.bytes[at..at + length], "at {at}"),
            false => assert!(found == [HERE; 4096], "at {at}"),
        }
        let cost = device.cost(at as u64, length as u64);
        assert_eq!(cost == Cost::Network, is_written(at), "at {at}");
    }
    // All of a range or nothing.
    assert!(read(device, 4096, 8192) == world.bytes[4096..12288]);
    let past = device.read(SIZE as u64 - 10, &mut [0; 20]);
    assert!(
        matches!(past, Err(DeviceError::OutOfRange { .. })),
        "{past:?}"
    );
    let past = device.read(0, &mut vec![0; SIZE + 1]);
    assert!(
        matches!(past, Err(DeviceError::OutOfRange { .. })),
        "{past:?}"
    );
}

#[test]
fn a_reader_that_begins_after_a_write_was_answered_sees_it() {
    let world = World::new();
    let mounted = world.mount(Access::ReadWrite);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for block in 0..3 {
            let (device, done) = (&mounted.device, &done);
            scope.spawn(move || {
                let (at, mut round) = (block * 40_000, 0u8);
                while !done.load(Ordering::Relaxed) {
                    round = round % 100 + 1;
                    device.write(at as u64, &[round; 6000]).unwrap();
                    assert!(read(device, at, 6000) == [round; 6000], "its own write");
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        world.find(&mounted);
        std::thread::sleep(Duration::from_millis(300));
        done.store(true, Ordering::Relaxed);
    });
    assert!(read(&mounted.device, 200_000, 4096) == [HERE; 4096]);
}

#[test]
fn without_a_link_and_without_a_lease_nothing_is_read_here() {
    let world = World::new();
    let mounted = world.mount(Access::ReadWrite);
    world.find(&mounted);
    assert!(read(&mounted.device, 0, 4096) == [HERE; 4096]);
    world.near.down.store(true, Ordering::Relaxed);
    world.near.cut();
    soon(|| !mounted.client.is_up());
    assert_eq!(mounted.device.cost(0, 4096), Cost::Network);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&mounted.device, 0, 4096));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished(), "it was read without the site");
        world.near.down.store(false, Ordering::Relaxed);
        assert!(waiting.join().unwrap() == world.bytes[..4096]);
    });
    soon(|| read(&mounted.device, 0, 4096) == [HERE; 4096]);

    // Its lease goes to another mount, which writes.
    mounted.device.flush().unwrap();
    let web = name("web");
    let broken = world.site.server.break_lease(&web, WhyBroken::ByUser);
    world.runtime.block_on(async { broken.await.unwrap() });
    soon(|| !mounted.client.is_up());
    let other = world.mount(Access::ReadWrite);
    other.device.write(0, &[1; 4096]).unwrap();
    let refused = mounted.device.read(0, &mut [0; 4096]);
    assert!(refused.is_err(), "a mount without a lease reads");
}

#[test]
fn only_a_mount_of_that_image_is_told_what_was_written() {
    let world = World::new();
    let refused = world.changes(MountId([9; 16])).unwrap_err();
    assert_eq!(refused.code, Code::OutOfOrder);
    let mounted = world.mount(Access::ReadOnly);
    let seen = world.changes(mounted.mount).unwrap();
    assert!(seen.changed.is_empty());
    assert!(
        !mounted.found.found(memory(&[HERE; SIZE - 1]), []),
        "of another size"
    );
    assert!(read(&mounted.device, 0, SIZE) == world.bytes);
    assert!(mounted.found.found(here(), seen.ranges()));
    assert!(read(&mounted.device, 0, SIZE) == [HERE; SIZE]);
    mounted.client.close_now().unwrap();
    assert!(
        mounted.device.read(0, &mut [0; 10]).is_err(),
        "it was closed"
    );
}
