//! Against a real S3 server, through a proxy that fails.

use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;
use drover_storage::cloud::Patience;
use drover_storage::testing::{Fault, Proxy, Server};
use parking_lot::Mutex;

use super::super::{NewStore, OpenError, StoreDevice, StoreOptions, create};
use super::*;
use crate::testing::contract;

/// Waits little.
const HASTY: Patience = Patience {
    first: Duration::from_secs(60),
    later: Duration::from_secs(60),
    pause: Duration::from_millis(2),
    max_pause: Duration::from_millis(20),
    request: Duration::from_secs(30),
    connect: Duration::from_secs(10),
};

fn disk(proxy: &Proxy, name: &str) -> Arc<CloudStore> {
    Arc::new(proxy.cloud(name, HASTY, "testsecret").into())
}

fn new(size: u64) -> NewStore {
    NewStore {
        size,
        chunk: 4096,
        object: Some(65536),
    }
}

fn options() -> StoreOptions {
    StoreOptions::new([3; 16], "a test")
}

#[test]
fn the_contract_is_held_by_s3() {
    let Some(server) = Server::start() else {
        return;
    };
    let proxy = server.proxy(|_, _, _| None);
    contract(&|size| {
        let store = disk(&proxy, &format!("disks/of-{size}"));
        create(&*store, new(size)).unwrap();
        let mut options = options();
        options.max_buffer = 256 << 10;
        Box::new(StoreDevice::open(store, &options).unwrap())
    });
}

/// Errors and lost answers in the middle lose nothing, and conditional writes that were done without an answer count.
#[test]
fn faults_at_random_lose_nothing_in_s3() {
    let Some(server) = Server::start() else {
        return;
    };
    let rng = Mutex::new(fastrand::Rng::with_seed(9));
    let failing = server.proxy(move |_, method, _| {
        let mut rng = rng.lock();
        if rng.u8(..4) > 0 {
            return None;
        }
        Some(match (method, rng.u8(..4)) {
            (_, 0) => Fault::Busy,
            (_, 1) => Fault::LateError,
            ("GET", 2) => Fault::Torn,
            _ => Fault::Lost,
        })
    });
    let store = disk(&failing, "faults");
    create(&*store, new(1 << 20)).unwrap();
    let mut random = fastrand::Rng::with_seed(4);
    let mut model = vec![0; 1 << 20];
    for _ in 0..3 {
        let device = StoreDevice::open(store.clone(), &options()).unwrap();
        for _ in 0..20 {
            let offset = random.usize(..1 << 20);
            let length = random.usize(..100_000.min((1 << 20) - offset));
            let value = random.u8(..);
            device.write(offset as u64, &vec![value; length]).unwrap();
            model[offset..offset + length].fill(value);
            if random.u8(..4) == 0 {
                device.flush().unwrap();
            }
        }
        device.close().unwrap();
        let device = StoreDevice::open(store.clone(), &options()).unwrap();
        let mut read = vec![0; 1 << 20];
        device.read(0, &mut read).unwrap();
        assert!(read == model);
        device.close().unwrap();
    }
}

#[test]
fn a_server_that_ignores_conditions_or_refuses_the_keys() {
    let Some(server) = Server::start() else {
        return;
    };
    let careless = server.proxy(|_, _, _| Some(Fault::Careless));
    let refused = create(&*disk(&careless, "careless"), new(1 << 20)).unwrap_err();
    assert!(matches!(refused, OpenError::Careless(_)), "{refused}");

    let proxy = server.proxy(|_, _, _| None);
    let wrong = CloudStore::from(proxy.cloud("x", HASTY, "another"));
    let refused = create(&wrong, new(1 << 20)).unwrap_err().to_string();
    assert!(
        refused.contains("credentials") && !refused.contains('\n') && !refused.contains("another"),
        "{refused}"
    );
}
