//! What a store of a disk returns: a header, pages, chunks, keys, replies of Redis. A disk whose header is accepted can be
//! opened, written and read again.

use std::collections::BTreeMap;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::chunk_store::{
    MemoryStore, StoreDevice, StoreOptions, break_lease, fuzzing,
};

pub fn run(data: &[u8]) {
    fuzzing::parse(data);
    let store = Arc::new(MemoryStore::new());
    store.restore(BTreeMap::from([("disk".to_owned(), data.to_vec().into())]));
    if break_lease(&*store).is_err() {
        return;
    }
    let options = StoreOptions::new([1; 16], "a fuzzer");
    let Ok(device) = StoreDevice::open(store.clone(), &options) else {
        return;
    };
    let size = device.size();
    let (at, length) = (size.saturating_sub(10), size.min(10) as usize);
    device.write(at, &vec![7; length]).unwrap();
    device.close().unwrap();
    let device = StoreDevice::open(store, &options).expect("a disk that was opened once");
    let mut back = vec![0; length];
    device.read(at, &mut back).unwrap();
    assert!(back.iter().all(|b| *b == 7));
}
