//! The client of `device` against this server: every front end and backend meets here.

use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, Cost, DeviceError, ExtentKind, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_device::backend::nbd::{NbdAddress, NbdDevice, NbdOptions};
use drover_device::testing::{self, Delay, Strict};
use drover_frontend::nbd::{Address, Export, ServerOptions};

use super::Served;
use super::raw::Odd;
use crate::support::noise;

fn open(uri: &str) -> NbdDevice {
    let address: NbdAddress = uri.parse().unwrap_or_else(|e| panic!("{e}"));
    NbdDevice::connect(&address, &NbdOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_client_and_the_server_keep_the_contract_together() {
    for (seed, size) in [(1, 0), (2, 4096), (3, 200_000), (4, 1 << 20), (5, 70_001)] {
        for cost in [Cost::Memory, Cost::Network] {
            let served = Served::one(Arc::new(Odd::new(size, cost)));
            let device = open(&served.uri(""));
            assert_eq!(device.size(), size);
            testing::run(&device, seed);
            let listening = served
                .server
                .listen_tcp("127.0.0.1:0".parse().unwrap())
                .unwrap();
            let Address::Tcp(address) = listening.local_addr() else {
                panic!("not TCP");
            };
            let device = open(&format!("nbd://{address}/"));
            device.write_zeroes(0, size, Zeroes::default()).unwrap();
            testing::run(&device, seed + 10);
        }
    }
    let demanding = Strict::new(MemoryDevice::new(1 << 20), 4096, 64 << 10);
    let served = Served::one(Arc::new(demanding));
    let device = open(&served.uri(""));
    assert_eq!(device.capabilities().alignment, 4096);
    testing::run(&device, 6);
}

#[test]
fn what_the_server_says_of_a_device_is_what_the_client_says_of_it() {
    let below = MemoryDevice::new(1 << 20);
    below.write(128 << 10, &[1; 64 << 10]).unwrap();
    let below: Arc<dyn BlockDevice> = Arc::new(below);
    for read_only in [false, true] {
        let export = Export {
            name: "my disk?".into(),
            description: String::new(),
            device: Arc::clone(&below),
            read_only,
        };
        let served = Served::exports(vec![export], ServerOptions::default());
        let device = open(&served.uri("my%20disk%3F"));
        let (can, expected) = (device.capabilities(), below.capabilities());
        assert_eq!(can.read_only, read_only);
        assert_eq!(can.trim, !read_only);
        assert_eq!(can.fast_zeroes, !read_only);
        assert!(can.extents && can.alignment == 1);
        assert_eq!(can.preferred, expected.preferred);
        assert_eq!(can.longest, 32 << 20);
        let mut extents = device.extents(0, 1 << 20).unwrap();
        assert_eq!(extents, below.extents(0, 1 << 20).unwrap());
        extents.retain(|extent| extent.kind == ExtentKind::Data);
        assert_eq!(
            (extents[0].offset, extents[0].length),
            (128 << 10, 64 << 10)
        );
        let written = device.write(128 << 10, &[1]);
        assert_eq!(matches!(written, Err(DeviceError::ReadOnly)), read_only);
        let mut other = device.status("qemu:dirty-bitmap:x", 0, 1);
        assert!(matches!(other, Err(DeviceError::Unsupported(_))));
        other = device.status("base:allocation", 0, 1 << 20);
        assert!(other.unwrap().len() >= 2);
    }
}

#[test]
fn many_threads_see_their_own_writes_through_one_connection() {
    const PART: u64 = 256 << 10;
    const THREADS: u64 = 12;
    // Answers come in another order than requests.
    let slow = Delay::new(
        MemoryDevice::new(PART * THREADS),
        Duration::from_micros(50),
        Duration::from_nanos(1),
    );
    let served = Served::one(Arc::new(slow));
    let device = open(&served.uri(""));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let device = &device;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                let mut model = vec![0; PART as usize];
                for step in 0..150 {
                    let at = random.usize(..model.len());
                    let length = random.usize(..=(model.len() - at).min(70_000));
                    let offset = thread * PART + at as u64;
                    let range = at..at + length;
                    match random.u8(..5) {
                        0 | 1 => {
                            let data = noise(random.u64(..), length);
                            device.write(offset, &data).unwrap();
                            model[range].copy_from_slice(&data);
                        }
                        2 => {
                            let zeroes = Zeroes::default();
                            device.write_zeroes(offset, length as u64, zeroes).unwrap();
                            model[range].fill(0);
                        }
                        3 => device.flush().unwrap(),
                        _ => {
                            let mut back = vec![1; length];
                            device.read(offset, &mut back).unwrap();
                            assert!(back == model[range], "thread {thread}, step {step}");
                        }
                    }
                }
            });
        }
    });
    assert_eq!(served.server.counts().connections, 1);
    drop(device);
    assert_eq!(served.server.counts().errors, 0);
}

#[test]
fn a_server_that_stops_fails_the_client_at_once() {
    let served = Served::one(Arc::new(MemoryDevice::new(1 << 20)));
    let device = open(&served.uri(""));
    device.write(0, &[1; 4096]).unwrap();
    served.server.stop();
    let error = device.read(0, &mut [0; 4096]).unwrap_err();
    assert!(
        error.to_string().contains("closed the connection"),
        "{error}"
    );
    assert!(!error.is_transient());
}
