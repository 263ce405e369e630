//! Programs that people use.

use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;

use super::Served;
use crate::support::{installed, noise, succeeds, text};

#[test]
fn nbdcopy_copies_both_ways() {
    if !installed("nbdcopy_copies_both_ways", &["nbdcopy"]) {
        return;
    }
    let device = Arc::new(MemoryDevice::new(40 << 20));
    let served = Served::one(device.clone());
    let mut bytes = noise(1, 40 << 20);
    bytes[5 << 20..25 << 20].fill(0);
    let (from, back) = (served.path("from"), served.path("back"));
    std::fs::write(&from, &bytes).unwrap();
    succeeds("nbdcopy", &[text(&from), &served.uri("")]);
    let mut there = vec![1; bytes.len()];
    device.read(0, &mut there).unwrap();
    assert!(there == bytes, "what nbdcopy wrote is not there");
    succeeds("nbdcopy", &[&served.uri(""), text(&back)]);
    assert!(
        std::fs::read(&back).unwrap() == bytes,
        "what nbdcopy read differs"
    );
    assert!(served.server.counts().connections >= 2);
    assert_eq!(served.server.counts().errors, 0);
}
