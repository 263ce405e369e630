//! Test helpers: directories that are always cleaned up, and checks of the host's features.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_frontend::fuse::FileMount;
use drover_frontend::loopdev;
use parking_lot::{Condvar, Mutex};

use crate::support::installed;

/// Whether this machine can mount by FUSE; says so if not.
pub fn can_mount(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    let fuse = Path::new("/dev/fuse").exists();
    match (root, fuse) {
        (true, true) => return true,
        (false, _) => eprintln!("SKIP {test}: only root may mount"),
        (_, false) => eprintln!("SKIP {test}: no /dev/fuse"),
    }
    false
}

/// Whether this machine has FUSE, loop devices and `programs`; says so if not.
pub fn can_attach(test: &str, programs: &[&str]) -> bool {
    if !can_mount(test) {
        return false;
    }
    if !Path::new("/dev/loop-control").exists() {
        eprintln!("SKIP {test}: no /dev/loop-control");
        return false;
    }
    installed(test, programs)
}

/// A directory; dropped, what is still mounted or attached in it is taken away, then it is removed.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("drover-fuse-")
            .tempdir()
            .unwrap();
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Only a test that failed leaves something: what was mounted last goes first.
        for _ in 0..8 {
            for device in attached_under(self.dir.path()) {
                let _ = loopdev::detach_path(&device);
            }
            for point in mounted_under(self.dir.path()).into_iter().rev() {
                if FileMount::clear_stale(&point).is_err() {
                    let _ = Command::new("umount").arg("-l").arg(&point).status();
                }
            }
        }
    }
}

/// Mount points below `dir`, in the order they were mounted.
pub fn mounted_under(dir: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .map(PathBuf::from)
        .filter(|point| point.starts_with(dir))
        .collect()
}

/// Loop devices on files below `dir`.
pub fn attached_under(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/block").unwrap() {
        let entry = entry.unwrap();
        let backing = std::fs::read_to_string(entry.path().join("loop/backing_file"));
        if backing.is_ok_and(|backing| Path::new(backing.trim_end()).starts_with(dir)) {
            found.push(Path::new("/dev").join(entry.file_name()));
        }
    }
    found
}

/// The example `fuse_memory`, beside this test; built, as `cargo test` does not always.
pub fn example() -> PathBuf {
    static BUILT: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    let build = || {
        let test = std::env::current_exe().unwrap();
        let target = test.ancestors().nth(2).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "-q", "-p", "drover-frontend"])
            .args(["--example", "fuse_memory"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
        target.join("examples/fuse_memory")
    };
    BUILT.get_or_init(build).clone()
}

/// Waits until `true`, for at most a minute.
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !is() {
        assert!(
            start.elapsed().as_secs() < 60,
            "not within a minute: {what}"
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// A device in memory of which some ranges fail, and some wait until they may go on, as if for a network.
pub struct Troubled {
    pub memory: MemoryDevice,
    pub fails: Mutex<Option<Range<u64>>>,
    pub waits: Mutex<Option<Range<u64>>>,
    pub freed: Condvar,
    pub flushes: AtomicUsize,
}

impl Troubled {
    pub fn new(size: u64) -> Arc<Self> {
        Arc::new(Self {
            memory: MemoryDevice::new(size),
            fails: Mutex::new(None),
            waits: Mutex::new(None),
            freed: Condvar::new(),
            flushes: AtomicUsize::new(0),
        })
    }

    /// Lets all go on that wait.
    pub fn free(&self) {
        *self.waits.lock() = None;
        self.freed.notify_all();
    }

    fn pass(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let touches = |range: &Option<Range<u64>>| {
            range
                .as_ref()
                .is_some_and(|r| offset < r.end && offset + length > r.start)
        };
        let mut waits = self.waits.lock();
        while touches(&waits) {
            self.freed.wait(&mut waits);
        }
        drop(waits);
        match touches(&self.fails.lock()) {
            true => Err(DeviceError::Unavailable("it was told so".into())),
            false => Ok(()),
        }
    }
}

impl BlockDevice for Troubled {
    fn size(&self) -> u64 {
        self.memory.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.pass(offset, buffer.len() as u64)?;
        self.memory.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.pass(offset, data.len() as u64)?;
        self.memory.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.pass(offset, length)?;
        self.memory.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.memory.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.memory.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.memory.extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.memory.prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        let waits = self.waits.lock();
        match waits.as_ref() {
            Some(r) if offset < r.end && offset + length > r.start => Cost::Network,
            _ => Cost::Memory,
        }
    }
    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.cost(offset, length)
    }
}
