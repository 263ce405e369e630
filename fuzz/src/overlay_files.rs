//! An overlay whose state log or redo file is damaged or forged: opened, read and written.

use std::sync::Arc;

use drover_core::{BlockDevice, Digest};
use drover_device::backend::MemoryDevice;
use drover_device::backend::overlay::{Identity, Options, Overlay, OverlayError};
use drover_storage::FakeDirectory;

const SIZE: u64 = 20 * 4096 + 100;

fn open(directory: &FakeDirectory) -> Result<Overlay, OverlayError> {
    let identity = Identity {
        base: Digest([0; 32]),
        size: SIZE,
        name: String::new(),
    };
    let base = Arc::new(MemoryDevice::new(SIZE));
    Overlay::open(
        Arc::new(directory.clone()),
        base,
        identity,
        Options::default(),
    )
}

pub fn run(data: &[u8]) {
    let Some((which, bytes)) = data.split_first() else {
        return;
    };
    let directory = FakeDirectory::default();
    drop(open(&directory).expect("a new overlay"));
    let name = if which % 2 == 0 { "states" } else { "epoch-1" };
    directory.put(name, bytes);
    let Ok(overlay) = open(&directory) else {
        return;
    };
    let _ = overlay.staged_runs(overlay.staged_epoch().unwrap_or_default(), 0, 10);
    overlay.abandon().expect("what is staged can be dropped");
    let mut found = vec![0; SIZE as usize];
    overlay
        .read(0, &mut found)
        .expect("a read of what was opened");
    overlay.write(5000, &[7; 9000]).expect("a write");
    overlay.flush().expect("a flush");
    found[5000..14000].fill(7);
    drop(overlay);
    let overlay = open(&directory).expect("an overlay that was opened once");
    let mut again = vec![0; SIZE as usize];
    overlay.read(0, &mut again).expect("a read");
    assert!(again == found, "it did not stay");
}
