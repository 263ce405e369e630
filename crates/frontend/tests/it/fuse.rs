//! The FUSE file and the loop device, with the kernel and common tools as clients.

mod clients;
mod crash;
mod disk;
mod file;
mod room;
mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_frontend::fuse::{FileMount, FuseError, Options};

use support::{Place, can_mount, eventually};

#[test]
fn a_file_that_does_not_exist_is_the_disk_and_goes_with_it() {
    if !can_mount("a_file_that_does_not_exist_is_the_disk_and_goes_with_it") {
        return;
    }
    let place = Place::new();
    let at = place.path("disk");
    let device = Arc::new(MemoryDevice::new(1 << 20));
    let mut mount = FileMount::mount(&at, device.clone(), Options::default()).unwrap();
    assert_eq!(mount.path(), at);
    {
        let file = File::options().read(true).write(true).open(&at).unwrap();
        file.write_all_at(b"hello", 4093).unwrap();
        let mut back = [0; 5];
        device.read(4093, &mut back).unwrap();
        assert_eq!(&back, b"hello");
        let error = mount.unmount().unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, FuseError::Busy { .. }), "{said}");
        assert!(
            said.contains(&format!("(process {})", std::process::id())),
            "{said}"
        );
    }
    mount.unmount().unwrap();
    assert!(!at.exists());
    eventually("nothing of the mount holds the device", || {
        Arc::strong_count(&device) == 1
    });
}
