//! A damaged or forged device in a directory: opened, read, written and opened again.

use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::{DirectoryDevice, DirectoryOptions};
use drover_storage::FakeDirectory;

fn open(directory: &FakeDirectory) -> Option<DirectoryDevice> {
    DirectoryDevice::open(Arc::new(directory.clone()), DirectoryOptions::default()).ok()
}

// The header, and what the first chunk's file holds.
pub fn run(data: &[u8]) {
    let (header, chunk) = data.split_at(data.len().min(28));
    let directory = FakeDirectory::default();
    directory.put("header", header);
    directory.put("00000000.chunk", chunk);
    let Some(device) = open(&directory) else {
        return;
    };
    let (size, shape) = (device.size(), device.shape());
    assert!(shape.chunk.is_power_of_two() && shape.chunk >= 4096);
    let mut bytes = vec![0; size.min(4096) as usize];
    if device.read(0, &mut bytes).is_err() {
        // Damage, which a trim of the whole chunk takes away.
        device.trim(0, u64::from(shape.length(0))).unwrap();
    }
    let last = size.saturating_sub(10);
    let tail = vec![7; (size - last) as usize];
    device.write(last, &tail).unwrap();
    device.flush().unwrap();
    drop(device);
    let device = open(&directory).expect("a device that was opened once");
    let mut back = vec![0; tail.len()];
    device.read(last, &mut back).unwrap();
    assert_eq!(back, tail);
}
