//! The backing file of each loop device, from `/sys/block`.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Loop devices of any process whose backing file is `file`.
///
/// The kernel reports the file's current path, so call this before unmounting the file system that contains it.
///
/// # Errors
/// When `/sys/block` cannot be read.
pub fn find_by_backing(file: &Path) -> io::Result<Vec<PathBuf>> {
    find(|backing| backing == file)
}

/// Loop devices whose backing file is at or below `place`.
pub(crate) fn find_under(place: &Path) -> io::Result<Vec<PathBuf>> {
    find(|backing| backing.starts_with(place))
}

pub(super) fn find(wanted: impl Fn(&Path) -> bool) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        if let Some(backing) = backing_of(Path::new(&name))
            && wanted(&backing)
        {
            found.push(Path::new("/dev").join(name));
        }
    }
    found.sort();
    Ok(found)
}

/// The device of that number.
pub(super) fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

/// The backing file of `/sys/block/NAME`, if that is an attached loop device.
pub(super) fn backing_of(name: &Path) -> Option<PathBuf> {
    let file = Path::new("/sys/block").join(name).join("loop/backing_file");
    let mut text = std::fs::read(file).ok()?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    Some(PathBuf::from(OsString::from_vec(text)))
}
