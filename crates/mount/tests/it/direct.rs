//! Direct mounts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_core::{BlockDevice, DeviceError};
use drover_mount::client::{Client, Options};
use drover_mount::direct::{RemoteDevice, UNFLUSHED};
use drover_store::lease::Access;

use crate::util::{Near, Site, content, memory, name, runtime};

#[test]
fn an_image_is_read_at_any_offset_by_many_threads() {
    let runtime = runtime();
    let bytes = content(5_000_123, 1);
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let options = Options::new(name("web"), Access::ReadOnly);
    let client = runtime
        .block_on(Client::open(runtime.handle(), near, options))
        .unwrap();
    let device = RemoteDevice::new(Arc::new(client));
    assert_eq!(device.size(), bytes.len() as u64);
    assert!(matches!(device.write(0, &[1]), Err(DeviceError::ReadOnly)));
    let mut all = vec![1; bytes.len()];
    device.read(0, &mut all).unwrap();
    assert!(all == bytes);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (device, bytes) = (&device, &bytes);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..100 {
                    let at = random.usize(0..bytes.len());
                    let length = random.usize(0..=(bytes.len() - at).min(200_000));
                    let mut part = vec![1; length];
                    device.read(at as u64, &mut part).unwrap();
                    assert!(part == bytes[at..at + length], "seed {seed}");
                }
            });
        }
    });
    device.close().unwrap();
    let closed = device.read(0, &mut [0; 10]);
    assert!(matches!(closed, Err(DeviceError::Closed)), "{closed:?}");
}

#[test]
fn an_image_that_is_not_there_is_refused_in_one_line() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&[1; 5000]));
    let near = Near::new(site.server.clone());
    let options = Options::new(name("db"), Access::ReadOnly);
    let refused = runtime.block_on(Client::open(runtime.handle(), near, options));
    let error = refused.err().expect("refused");
    assert_eq!(error.to_string(), "there is no image db");
}

#[test]
fn a_direct_mount_keeps_the_contract_of_devices() {
    let runtime = runtime();
    let _inside = runtime.enter();
    for (seed, size) in [(1, 200_000), (2, 70_001), (3, 3_000_000)] {
        let site = Site::with("web", memory(&vec![0; size]));
        let near = Near::new(site.server.clone());
        let options = Options::new(name("web"), Access::ReadWrite);
        let client = runtime
            .block_on(Client::open(runtime.handle(), near, options))
            .unwrap();
        let device = RemoteDevice::new(Arc::new(client));
        drover_device::testing::run(&device, seed);
        device.close().unwrap();
    }
}

#[test]
fn what_is_not_flushed_takes_bounded_memory() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&vec![0; 48 << 20]));
    let near = Near::new(site.server.clone());
    let options = Options::new(name("web"), Access::ReadWrite);
    let client = runtime
        .block_on(Client::open(runtime.handle(), near, options))
        .unwrap();
    let device = RemoteDevice::new(Arc::new(client));
    const LONG: u64 = 8 << 20;
    let most = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for part in 0..6 {
            let (device, most) = (&device, &most);
            scope.spawn(move || {
                let mut bytes = vec![0; LONG as usize];
                fastrand::Rng::with_seed(part).fill(&mut bytes);
                // One long write, and as much in short ones.
                device.write(part * LONG, &bytes).unwrap();
                most.fetch_max(device.unflushed(), Ordering::Relaxed);
                for (n, piece) in bytes.chunks(1 << 18).enumerate() {
                    let at = part * LONG + ((n as u64) << 18);
                    device.write(at, piece).unwrap();
                    most.fetch_max(device.unflushed(), Ordering::Relaxed);
                }
            });
        }
    });
    let most = most.into_inner();
    assert!(most > UNFLUSHED / 2, "{most}");
    assert!(most <= 2 * UNFLUSHED + LONG, "{most}");
    device.flush().unwrap();
    assert_eq!(device.unflushed(), 0);
    device.close().unwrap();
}
