//! The loop device on the file: file systems on it, its options, and how it ends.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, ExtentKind};
use drover_device::backend::MemoryDevice;
use drover_frontend::fuse::{self, FileMount, FuseError};
use drover_frontend::loopdev::{self, LoopDevice, LoopError, Options};

use super::support::{Place, Troubled, attached_under, can_attach, eventually};
use crate::support::{fails, noise, succeeds, text};

fn mount(at: &Path, device: Arc<dyn BlockDevice>) -> FileMount {
    FileMount::mount(at, device, fuse::Options::default()).unwrap()
}

fn attach(mount: &FileMount) -> LoopDevice {
    LoopDevice::attach(mount.path(), Options::default()).unwrap()
}

/// What is written to the file system: names and seeds and lengths of content.
const FILES: [(&str, u64, usize); 4] = [
    ("empty", 1, 0),
    ("small", 2, 1234),
    ("large", 3, 5_000_001),
    ("deep/er/file", 4, 300_000),
];

fn write_files(root: &Path) {
    for (name, seed, length) in FILES {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, noise(seed, length)).unwrap();
    }
}

fn files_are_whole(root: &Path) {
    for (name, seed, length) in FILES {
        let content = std::fs::read(root.join(name)).unwrap();
        assert!(content == noise(seed, length), "{name} differs");
    }
}

/// Makes a file system on the loop device, fills it, checks it, and reads it through a second mount and loop device,
/// both read-only.
fn a_file_system_keeps_its_files(kind: &str, size: u64, mkfs: &[&str], fsck: &[&str]) {
    let test = format!("{kind}_keeps_its_files");
    let programs = [mkfs[0], fsck[0], "mount", "umount"];
    if !can_attach(&test, &programs) {
        return;
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap();
    if !known
        .lines()
        .any(|line| line.ends_with(&format!("\t{kind}")))
    {
        eprintln!("SKIP {test}: this kernel has no {kind}");
        return;
    }
    let place = Place::new();
    let (at, point) = (place.path("disk"), place.path("mnt"));
    std::fs::create_dir(&point).unwrap();
    let memory = Arc::new(MemoryDevice::new(size));
    {
        let mut file = mount(&at, memory.clone());
        let mut disk = attach(&file);
        assert!(disk.has_direct_io());
        succeeds(mkfs[0], &[&mkfs[1..], &[text(disk.path())]].concat());
        succeeds("mount", &["-t", kind, text(disk.path()), text(&point)]);
        write_files(&point);
        succeeds("sync", &["-f", text(&point)]);
        let refused = disk.detach().unwrap_err();
        assert!(matches!(refused, LoopError::Busy { .. }), "{refused}");
        assert!(refused.to_string().contains(text(&point)), "{refused}");
        let refused = file.unmount().unwrap_err();
        assert!(matches!(refused, FuseError::Busy { .. }), "{refused}");
        assert!(refused.to_string().contains(text(disk.path())), "{refused}");
        succeeds("umount", &[text(&point)]);
        succeeds(fsck[0], &[&fsck[1..], &[text(disk.path())]].concat());
        disk.detach().unwrap();
        file.unmount().unwrap();
    }
    let read_only = fuse::Options {
        read_only: true,
        ..fuse::Options::default()
    };
    let mut file = FileMount::mount(&at, memory.clone(), read_only).unwrap();
    let options = Options {
        read_only: true,
        ..Options::default()
    };
    let mut disk = LoopDevice::attach(file.path(), options).unwrap();
    succeeds(
        "mount",
        &["-t", kind, "-o", "ro", text(disk.path()), text(&point)],
    );
    files_are_whole(&point);
    succeeds("umount", &[text(&point)]);
    succeeds(fsck[0], &[&fsck[1..], &[text(disk.path())]].concat());
    disk.detach().unwrap();
    file.unmount().unwrap();
    assert_eq!(attached_under(&place.path("")), Vec::<PathBuf>::new());
}

#[test]
fn ext4_keeps_its_files() {
    a_file_system_keeps_its_files("ext4", 16 << 20, &["mkfs.ext4", "-q"], &["e2fsck", "-fn"]);
}

#[test]
fn xfs_keeps_its_files() {
    a_file_system_keeps_its_files("xfs", 300 << 20, &["mkfs.xfs", "-q"], &["xfs_repair", "-n"]);
}

#[test]
fn btrfs_keeps_its_files() {
    a_file_system_keeps_its_files(
        "btrfs",
        128 << 20,
        &["mkfs.btrfs", "-q"],
        &["btrfs", "check", "--readonly"],
    );
}

#[test]
fn a_discard_gives_memory_back_and_reads_as_zeros() {
    if !can_attach(
        "a_discard_gives_memory_back_and_reads_as_zeros",
        &["blkdiscard"],
    ) {
        return;
    }
    let place = Place::new();
    let memory = Arc::new(MemoryDevice::new(8 << 20));
    let mut file = mount(&place.path("disk"), memory.clone());
    let mut disk = attach(&file);
    memory.write(0, &noise(5, 8 << 20)).unwrap();
    assert_eq!(memory.allocated(), 8 << 20);
    succeeds(
        "blkdiscard",
        &["-o", "1048576", "-l", "2097152", text(disk.path())],
    );
    assert_eq!(memory.allocated(), 6 << 20);
    // Zeroed without a discard: it stays allocated.
    succeeds(
        "blkdiscard",
        &["-z", "-o", "4194304", "-l", "1048576", text(disk.path())],
    );
    let mut expected = noise(5, 8 << 20);
    expected[1 << 20..3 << 20].fill(0);
    expected[4 << 20..5 << 20].fill(0);
    let mut seen = Vec::new();
    File::open(disk.path())
        .unwrap()
        .read_to_end(&mut seen)
        .unwrap();
    assert!(seen == expected);
    let runs = memory.extents(1 << 20, 2 << 20).unwrap();
    assert!(
        runs.iter().all(|run| run.kind == ExtentKind::Hole),
        "{runs:?}"
    );
    disk.detach().unwrap();
    file.unmount().unwrap();
}

#[test]
fn an_error_is_that_of_its_own_range_and_what_follows_goes_on() {
    if !can_attach(
        "an_error_is_that_of_its_own_range_and_what_follows_goes_on",
        &["dd"],
    ) {
        return;
    }
    let place = Place::new();
    let device = Troubled::new(4 << 20);
    device.memory.write(0, &noise(6, 4 << 20)).unwrap();
    let mut file = mount(&place.path("disk"), device.clone());
    let mut disk = attach(&file);
    *device.fails.lock() = Some(1 << 20..2 << 20);
    for path in [file.path(), disk.path()] {
        let input = format!("if={}", text(path));
        let dd = |skip: &str| {
            [
                input.clone(),
                "of=/dev/null".into(),
                "iflag=direct".into(),
                "bs=64k".into(),
                "count=4".into(),
                format!("skip={skip}"),
            ]
        };
        let words = |skip| dd(skip).map(|w| Box::leak(w.into_boxed_str()) as &str);
        assert!(fails("dd", &words("20")).contains("Input/output error"));
        succeeds("dd", &words("0"));
        succeeds("dd", &words("32"));
    }
    let blocks = File::options().write(true).open(disk.path()).unwrap();
    blocks.write_all_at(&[1; 4096], 1 << 20).unwrap();
    let error = blocks.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    *device.fails.lock() = None;
    blocks.write_all_at(&[2; 4096], 1 << 20).unwrap();
    blocks.sync_all().unwrap();
    drop(blocks);
    let mut back = [0; 4096];
    device.memory.read(1 << 20, &mut back).unwrap();
    assert_eq!(back, [2; 4096]);
    disk.detach().unwrap();
    file.unmount().unwrap();
}

#[test]
fn what_cannot_be_written_back_keeps_it_attached() {
    if !can_attach("what_cannot_be_written_back_keeps_it_attached", &[]) {
        return;
    }
    let place = Place::new();
    let device = Troubled::new(1 << 20);
    let mut file = mount(&place.path("disk"), device.clone());
    let mut disk = attach(&file);
    *device.fails.lock() = Some(0..1 << 20);
    let blocks = File::options().write(true).open(disk.path()).unwrap();
    blocks.write_all_at(&[1; 4096], 8192).unwrap();
    let refused = disk.detach().unwrap_err();
    assert!(matches!(refused, LoopError::Busy { .. }), "{refused}");
    assert!(refused.to_string().contains("(process "), "{refused}");
    drop(blocks);
    let refused = disk.detach().unwrap_err();
    assert!(matches!(refused, LoopError::Unflushed { .. }), "{refused}");
    assert_eq!(
        loopdev::find_by_backing(file.path()).unwrap(),
        [disk.path()]
    );
    *device.fails.lock() = None;
    disk.detach().unwrap();
    disk.detach().unwrap();
    file.unmount().unwrap();
}

/// A process that has `path` open and, having said so, closes it a moment later.
struct Passing(Child);

impl Passing {
    fn start(path: &Path) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", "exec 3<\"$0\"; echo; sleep 0.1"])
            .arg(path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0];
        let open = child.stdout.take().unwrap().read_exact(&mut said);
        let passing = Self(child);
        open.unwrap();
        passing
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}

/// As a child of any program between fork and exec, or udev that probes.
#[test]
fn who_has_it_open_for_a_moment_is_waited_for() {
    if !can_attach("who_has_it_open_for_a_moment_is_waited_for", &["losetup"]) {
        return;
    }
    let place = Place::new();
    let mut file = mount(&place.path("disk"), Arc::new(MemoryDevice::new(1 << 20)));
    let mut disk = attach(&file);
    let passing = Passing::start(disk.path());
    disk.detach().unwrap();
    drop(passing);
    let other = succeeds("losetup", &["-f", "--show", text(file.path())]);
    let other = PathBuf::from(other.trim());
    let mut exclusive = File::options();
    exclusive.read(true).custom_flags(libc::O_EXCL);
    let exclusive = exclusive.open(&other).unwrap();
    let held = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(exclusive);
    });
    loopdev::detach_path(&other).unwrap();
    held.join().unwrap();
    let passing = Passing::start(file.path());
    file.unmount().unwrap();
    drop(passing);
}

#[test]
fn a_detach_that_hangs_ends_when_the_file_is_cut_off() {
    if !can_attach("a_detach_that_hangs_ends_when_the_file_is_cut_off", &[]) {
        return;
    }
    let place = Place::new();
    let device = Troubled::new(1 << 20);
    let mut file = mount(&place.path("disk"), device.clone());
    let mut disk = attach(&file);
    *device.waits.lock() = Some(0..1 << 20);
    let blocks = File::options().write(true).open(disk.path()).unwrap();
    blocks.write_all_at(&[1; 4096], 8192).unwrap();
    drop(blocks);
    let detaching = std::thread::spawn(move || {
        let result = disk.detach();
        (disk, result)
    });
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!detaching.is_finished());
    file.abort().unwrap();
    let (disk, result) = detaching.join().unwrap();
    assert!(
        matches!(result, Err(LoopError::Unflushed { .. })),
        "{result:?}"
    );
    drop(disk);
    eventually("the loop device is gone", || {
        attached_under(&place.path("")).is_empty()
    });
    device.free();
}

/// As `mount -o loop,offset=…` does with a partition. No process has the lower device open then.
#[test]
fn a_device_that_another_is_made_of_stays_and_names_it() {
    if !can_attach(
        "a_device_that_another_is_made_of_stays_and_names_it",
        &["losetup"],
    ) {
        return;
    }
    let place = Place::new();
    let mut file = mount(&place.path("disk"), Arc::new(MemoryDevice::new(16 << 20)));
    let mut disk = attach(&file);
    let upper = succeeds(
        "losetup",
        &["-f", "--show", "-o", "1048576", text(disk.path())],
    );
    let upper = Upper(upper.trim().to_owned());
    let refused = disk.detach().unwrap_err();
    assert!(matches!(refused, LoopError::Busy { .. }), "{refused}");
    assert!(refused.to_string().contains(&upper.0), "{refused}");
    drop(upper);
    assert_eq!(
        loopdev::find_by_backing(file.path()).unwrap(),
        [disk.path()],
        "a refusal changes nothing"
    );
    disk.detach().unwrap();
    file.unmount().unwrap();
}

/// A loop device of another program's.
struct Upper(String);

impl Drop for Upper {
    fn drop(&mut self) {
        succeeds("losetup", &["-d", &self.0]);
    }
}

#[test]
fn it_is_as_it_was_asked_for() {
    if !can_attach("it_is_as_it_was_asked_for", &["blockdev", "sfdisk"]) {
        return;
    }
    let place = Place::new();
    let memory = Arc::new(MemoryDevice::new(16 << 20));
    let mut file = mount(&place.path("disk"), memory.clone());
    let wrong = Options {
        block_size: 1024,
        ..Options::default()
    };
    let refused = LoopDevice::attach(file.path(), wrong).unwrap_err();
    assert!(matches!(refused, LoopError::BlockSize(1024)), "{refused}");
    let missing = LoopDevice::attach(&place.path("none"), Options::default()).unwrap_err();
    assert!(missing.to_string().contains("none"), "{missing}");
    {
        let options = Options {
            block_size: 4096,
            read_only: true,
            direct_io: false,
            partitions: false,
            read_ahead: 1 << 20,
        };
        let mut disk = LoopDevice::attach(file.path(), options).unwrap();
        let said = succeeds(
            "blockdev",
            &["--getss", "--getro", "--getsize64", text(disk.path())],
        );
        assert_eq!(
            said.split_whitespace().collect::<Vec<_>>(),
            ["4096", "1", "16777216"]
        );
        assert!(!disk.has_direct_io());
        let name = disk.path().file_name().unwrap().to_str().unwrap();
        let knob = format!("/sys/block/{name}/queue/read_ahead_kb");
        assert_eq!(std::fs::read_to_string(knob).unwrap().trim(), "1024");
        disk.detach().unwrap();
    }
    let disk = attach(&file);
    let table = place.path("table");
    std::fs::write(&table, "label: gpt\nstart=2048, size=4096\n").unwrap();
    succeeds(
        "sh",
        &[
            "-c",
            &format!(
                "sfdisk -q --no-reread {} < {}",
                text(disk.path()),
                text(&table)
            ),
        ],
    );
    // Dropped without a detach, it disappears when it is no longer open.
    drop(disk);
    eventually("the device is gone", || {
        attached_under(&place.path("")).is_empty()
    });
    // Nobody asked for partitions.
    let mut disk = attach(&file);
    assert!(!Path::new(&format!("{}p1", text(disk.path()))).exists());
    disk.detach().unwrap();
    let options = Options {
        partitions: true,
        ..Options::default()
    };
    let mut disk = LoopDevice::attach(file.path(), options).unwrap();
    let partition = PathBuf::from(format!("{}p1", text(disk.path())));
    eventually("the partition is seen", || partition.exists());
    memory.write(2048 * 512, b"in the partition").unwrap();
    let mut first = [0; 16];
    File::open(&partition)
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    assert_eq!(&first, b"in the partition");
    // Who has only a partition open uses the device, and is named.
    let held = File::open(&partition).unwrap();
    let refused = disk.detach_at_once().unwrap_err();
    assert!(matches!(refused, LoopError::Busy { .. }), "{refused}");
    let own = std::process::id().to_string();
    assert!(refused.to_string().contains(&own), "{refused}");
    drop(held);
    disk.detach().unwrap();
    file.unmount().unwrap();
}

#[test]
fn many_at_once_do_not_take_each_others_devices() {
    if !can_attach("many_at_once_do_not_take_each_others_devices", &[]) {
        return;
    }
    let place = Place::new();
    std::thread::scope(|scope| {
        for n in 0..6u8 {
            let at = place.path(&format!("disk{n}"));
            scope.spawn(move || {
                let device = Arc::new(MemoryDevice::new(64 << 10));
                let mut file = mount(&at, device.clone());
                for round in 0..3 {
                    let mut disk = attach(&file);
                    let blocks = File::options().write(true).open(disk.path()).unwrap();
                    blocks.write_all_at(&[n * 10 + round; 512], 0).unwrap();
                    drop(blocks);
                    disk.detach().unwrap();
                    let mut back = [0; 512];
                    device.read(0, &mut back).unwrap();
                    assert_eq!(back, [n * 10 + round; 512]);
                }
                file.unmount().unwrap();
            });
        }
    });
    assert_eq!(attached_under(&place.path("")), Vec::<PathBuf>::new());
}
