//! The users of a block device, and exclusive use of one.

use std::path::{Path, PathBuf};

use super::backing::find;
use super::error::LoopError;
use super::sys;
use crate::fuse::{User, mounts};

/// Opens a device exclusively, so that it cannot be mounted meanwhile.
pub(super) fn claim(device: &Path) -> Result<std::fs::File, LoopError> {
    match sys::open_exclusively(device) {
        Ok(file) => Ok(file),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(busy(device)),
        Err(source) => Err(LoopError::Detach {
            device: device.to_owned(),
            source,
        }),
    }
}

/// The users of a block device, as far as visible.
pub(crate) fn users_of(device: &Path) -> Vec<User> {
    let mounted = mounts::mounted_from(device).into_iter().map(User::Mounted);
    let mut users: Vec<User> = mounted.collect();
    users.extend(stacked_on(device).into_iter().map(User::Device));
    users.extend(mounts::openers_of(device));
    users
}

/// Block devices on top of this one or its partitions: loop devices (`mount -o loop,offset=…`), and the kernel's holders
/// (LVM, encryption, RAID). No process has the device open for them.
fn stacked_on(device: &Path) -> Vec<PathBuf> {
    let mut found = find(|backing| mounts::is_or_in(backing, device)).unwrap_or_default();
    let own = Path::new("/sys/block").join(device.file_name().unwrap_or_default());
    let parts = std::fs::read_dir(&own).into_iter().flatten().flatten();
    let places = parts.map(|entry| entry.path()).chain([own.clone()]);
    for holders in places.map(|place| place.join("holders")) {
        let holders = std::fs::read_dir(holders).into_iter().flatten().flatten();
        found.extend(holders.map(|entry| Path::new("/dev").join(entry.file_name())));
    }
    found
}

pub(super) fn busy(device: &Path) -> LoopError {
    LoopError::Busy {
        device: device.to_owned(),
        users: users_of(device),
    }
}
