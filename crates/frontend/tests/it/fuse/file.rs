//! The file itself: the effect of reads, writes, seeks and other file operations on the device.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_frontend::fuse::{FileMount, FuseError, Options};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use super::support::{Place, Troubled, can_mount};
use crate::support::{fails, installed, noise, succeeds, text};

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

fn number(result: std::io::Result<impl Sized>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn a_directory_holds_one_file_and_nothing_else() {
    if !can_mount("a_directory_holds_one_file_and_nothing_else") {
        return;
    }
    let place = Place::new();
    let at = place.path("dir");
    std::fs::create_dir(&at).unwrap();
    let options = Options {
        name: "web, the \\2nd.raw".into(),
        ..Options::default()
    };
    let memory = Arc::new(MemoryDevice::new(12_345));
    let mut mount = FileMount::mount(&at, memory, options).unwrap();
    assert_eq!(mount.path(), at.join("web, the \\2nd.raw"));
    let names: Vec<_> = std::fs::read_dir(&at)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["web, the \\2nd.raw"]);
    let meta = std::fs::metadata(mount.path()).unwrap();
    assert!(meta.is_file());
    assert_eq!(meta.len(), 12_345);
    assert_eq!(number(File::open(at.join("other"))), Some(libc::ENOENT));
    assert!(File::create(at.join("new")).is_err());
    assert!(std::fs::remove_file(mount.path()).is_err());
    let again = FileMount::mount(&at, Arc::new(MemoryDevice::new(1)), Options::default());
    assert!(matches!(again, Err(FuseError::Mounted { .. })), "{again:?}");
    mount.unmount().unwrap();
    assert!(at.is_dir());
}

#[test]
fn a_file_that_is_there_is_covered_and_comes_back() {
    if !can_mount("a_file_that_is_there_is_covered_and_comes_back") {
        return;
    }
    let place = Place::new();
    let (at, link) = (place.path("file"), place.path("link"));
    std::fs::write(&at, "what was there").unwrap();
    std::os::unix::fs::symlink(&at, &link).unwrap();
    let memory = Arc::new(MemoryDevice::from_bytes(b"what the device holds"));
    // Through a link it is the file that is covered.
    let mut mount = FileMount::mount(&link, memory, Options::default()).unwrap();
    assert_eq!(std::fs::read(&at).unwrap(), b"what the device holds");
    mount.unmount().unwrap();
    assert_eq!(std::fs::read(&at).unwrap(), b"what was there");
}

#[test]
fn what_cannot_be_a_file_is_refused() {
    let place = Place::new();
    let memory = || Arc::new(MemoryDevice::new(4096));
    for name in ["", ".", "..", "a/b", "a\nb", &"x".repeat(256)] {
        let options = Options {
            name: name.into(),
            ..Options::default()
        };
        let refused = FileMount::mount(&place.path("disk"), memory(), options).unwrap_err();
        assert!(matches!(refused, FuseError::Name(_)), "{refused}");
    }
    let nowhere = place.path("no/such/directory");
    let refused = FileMount::mount(&nowhere, memory(), Options::default()).unwrap_err();
    assert!(
        refused.to_string().contains("no/such/directory"),
        "{refused}"
    );
    assert!(!place.path("disk").exists());
}

#[test]
fn a_read_only_mount_takes_no_writes() {
    if !can_mount("a_read_only_mount_takes_no_writes") {
        return;
    }
    let place = Place::new();
    let options = Options {
        read_only: true,
        ..Options::default()
    };
    let memory = Arc::new(MemoryDevice::from_bytes(&noise(1, 10_000)));
    let mut mount = FileMount::mount(&place.path("disk"), memory, options).unwrap();
    assert_eq!(
        number(OpenOptions::new().write(true).open(mount.path())),
        Some(libc::EROFS)
    );
    assert!(std::fs::read(mount.path()).unwrap() == noise(1, 10_000));
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(mount.path()).unwrap());
    assert_eq!(mode & 0o777, 0o400);
    mount.unmount().unwrap();
}

#[test]
fn its_size_is_the_devices_and_stays() {
    if !can_mount("its_size_is_the_devices_and_stays") {
        return;
    }
    let place = Place::new();
    let memory = Arc::new(MemoryDevice::from_bytes(&noise(2, 10_000)));
    let mut mount = FileMount::mount(&place.path("disk"), memory, Options::default()).unwrap();
    let file = open(mount.path());
    assert_eq!(number(file.set_len(9_999)), Some(libc::EPERM));
    assert_eq!(number(file.set_len(10_001)), Some(libc::EPERM));
    file.set_len(10_000).unwrap();
    let cut = OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(mount.path());
    assert_eq!(number(cut), Some(libc::EPERM));
    // The end, as a block device has it: what fits is written, then there is no space.
    assert_eq!(file.write_at(&[7; 100], 9_990).unwrap(), 10);
    assert_eq!(number(file.write_at(&[7], 10_000)), Some(libc::ENOSPC));
    assert_eq!(number(file.write_at(&[7], 1 << 40)), Some(libc::ENOSPC));
    let mut back = [0; 100];
    assert_eq!(file.read_at(&mut back, 9_990).unwrap(), 10);
    assert_eq!(back[..10], [7; 10]);
    assert_eq!(file.read_at(&mut back, 10_000).unwrap(), 0);
    assert_eq!(std::fs::metadata(mount.path()).unwrap().len(), 10_000);
    drop(file);
    mount.unmount().unwrap();
}

#[test]
fn holes_are_found_made_and_zero() {
    const M: u64 = 1 << 20;
    if !can_mount("holes_are_found_made_and_zero") {
        return;
    }
    let place = Place::new();
    // Longer than one look at the extents.
    let size = 3 << 30;
    let memory = Arc::new(MemoryDevice::new(size));
    memory.write(2 * M, &noise(3, 2 << 20)).unwrap();
    memory.write(size - M, &noise(4, 1 << 20)).unwrap();
    let mut mount =
        FileMount::mount(&place.path("disk"), memory.clone(), Options::default()).unwrap();
    let file = open(mount.path());
    let data = |at| seek(&file, SeekFrom::Data(at));
    let hole = |at| seek(&file, SeekFrom::Hole(at));
    assert_eq!((data(0), hole(0)), (Ok(2 * M), Ok(0)));
    assert_eq!((data(3 * M), hole(2 * M)), (Ok(3 * M), Ok(4 * M)));
    assert_eq!((data(4 * M), hole(size - 1)), (Ok(size - M), Ok(size)));
    assert_eq!(data(size), Err(rustix::io::Errno::NXIO));
    let before = memory.allocated();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 2 * M + 10, M).unwrap();
    assert!(
        memory.allocated() <= before - M + 131_072,
        "{}",
        memory.allocated()
    );
    let mut expected = noise(3, 2 << 20);
    expected[10..10 + (1 << 20)].fill(0);
    let mut seen = vec![0; 2 << 20];
    file.read_exact_at(&mut seen, 2 * M).unwrap();
    assert!(seen == expected);
    // Zeroed, it stays allocated.
    let kept = memory.allocated();
    fallocate(&file, FallocateFlags::ZERO_RANGE, size - M, M).unwrap();
    assert_eq!(memory.allocated(), kept);
    // Beyond the end there is nothing to punch, and nothing grows.
    fallocate(&file, punch, size - 5, 100).unwrap();
    assert_eq!(
        fallocate(&file, FallocateFlags::ZERO_RANGE, size - 5, 100),
        Err(rustix::io::Errno::NOSPC)
    );
    // Space cannot be promised: glibc and others then write.
    assert_eq!(
        fallocate(&file, FallocateFlags::empty(), 0, M),
        Err(rustix::io::Errno::OPNOTSUPP)
    );
    drop(file);
    mount.unmount().unwrap();
}

#[test]
fn a_flush_is_a_flush_and_a_readers_close_is_none() {
    if !can_mount("a_flush_is_a_flush_and_a_readers_close_is_none") {
        return;
    }
    let place = Place::new();
    let device = Troubled::new(1 << 20);
    let mut mount =
        FileMount::mount(&place.path("disk"), device.clone(), Options::default()).unwrap();
    let flushes = || device.flushes.load(Ordering::SeqCst);
    let file = open(mount.path());
    file.write_all_at(&[1; 5000], 77).unwrap();
    assert_eq!(flushes(), 0);
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    assert_eq!(flushes(), 2);
    drop(file);
    assert_eq!(flushes(), 3);
    drop(File::open(mount.path()).unwrap());
    let synced = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_SYNC)
        .open(mount.path())
        .unwrap();
    assert_eq!(flushes(), 3);
    synced.write_all_at(&[2; 100], 0).unwrap();
    assert_eq!(flushes(), 4);
    drop(synced);
    mount.unmount().unwrap();
}

#[test]
fn chmod_and_chown_hold_and_others_see_it_only_if_allowed() {
    if !can_mount("chmod_and_chown_hold_and_others_see_it_only_if_allowed") {
        return;
    }
    let test = "chmod_and_chown_hold_and_others_see_it_only_if_allowed";
    if !installed(test, &["setpriv", "cat"]) {
        return;
    }
    let place = Place::new();
    std::fs::set_permissions(
        place.path(""),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    for allow_other in [false, true] {
        let options = Options {
            allow_other,
            ..Options::default()
        };
        let memory = Arc::new(MemoryDevice::from_bytes(b"secret"));
        let mut mount = FileMount::mount(&place.path("disk"), memory, options).unwrap();
        let as_other = [
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "cat",
            text(mount.path()),
        ];
        match allow_other {
            true => assert_eq!(succeeds("setpriv", &as_other), "secret"),
            false => drop(fails("setpriv", &as_other)),
        }
        std::os::unix::fs::chown(mount.path(), Some(65534), Some(65534)).unwrap();
        std::fs::set_permissions(
            mount.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o600),
        )
        .unwrap();
        if allow_other {
            assert_eq!(succeeds("setpriv", &as_other), "secret");
            std::os::unix::fs::chown(mount.path(), Some(0), Some(0)).unwrap();
            fails("setpriv", &as_other);
        }
        let meta = std::fs::metadata(mount.path()).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&meta) & 0o7777, 0o600);
        mount.unmount().unwrap();
    }
}

#[test]
fn who_has_it_open_goes_on_after_a_lazy_unmount() {
    if !can_mount("who_has_it_open_goes_on_after_a_lazy_unmount") {
        return;
    }
    let place = Place::new();
    let at = place.path("disk");
    let memory = Arc::new(MemoryDevice::from_bytes(&noise(8, 100_000)));
    let mut mount = FileMount::mount(&at, memory.clone(), Options::default()).unwrap();
    let mut file = File::open(&at).unwrap();
    mount.unmount_lazy().unwrap();
    drop(mount);
    assert!(!at.exists());
    let mut seen = Vec::new();
    file.read_to_end(&mut seen).unwrap();
    assert!(seen == noise(8, 100_000));
    drop(file);
    super::support::eventually("the device is let go", || Arc::strong_count(&memory) == 1);
    // The place is free for the next.
    FileMount::mount(&at, memory, Options::default())
        .unwrap()
        .unmount()
        .unwrap();
}
