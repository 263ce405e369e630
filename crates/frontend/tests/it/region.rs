//! Regions: memory whose pages come from a device.

mod device;
mod faults;
mod writes;

use std::sync::Arc;

use drover_core::BlockDevice;
use drover_frontend::region::{Options, Region, support};

pub const PAGE: usize = 4096;

/// Whether the kernel lets the test `name` run.
pub fn can(name: &str) -> bool {
    match support() {
        Ok(support) if support.tracking && support.poison && support.kernel_faults => true,
        Ok(support) => {
            eprintln!("SKIP {name}: the kernel offers only {support:?}");
            false
        }
        Err(error) => {
            eprintln!("SKIP {name}: {error}");
            false
        }
    }
}

pub fn region(device: &Arc<impl BlockDevice + 'static>, options: Options) -> Region {
    Region::new(device.clone(), options).expect("a region")
}

pub fn writable() -> Options {
    Options {
        writable: true,
        ..Options::default()
    }
}

pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}
