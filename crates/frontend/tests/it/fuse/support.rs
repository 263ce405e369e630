//! What the tests share: places that are cleaned up whatever happens, and what this machine can do.

use std::path::{Path, PathBuf};
use std::process::Command;

use drover_frontend::fuse::FileMount;
use drover_frontend::loopdev;

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
    programs.iter().all(|program| has(test, program))
}

/// Whether a program is there; says so if not.
pub fn has(test: &str, program: &str) -> bool {
    let paths = std::env::var("PATH").unwrap_or_default();
    let found = paths
        .split(':')
        .chain(["/sbin", "/usr/sbin"])
        .any(|dir| Path::new(dir).join(program).exists());
    if !found {
        eprintln!("SKIP {test}: no {program}");
    }
    found
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

/// Runs a program, which must succeed; gives what it said.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}: {said}",
        output.status
    );
    said
}

/// The example `fuse_memory`, beside this test.
pub fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples/fuse_memory");
    // `cargo test --test it` builds no examples.
    if !path.exists() {
        let release: &[&str] = match cfg!(debug_assertions) {
            true => &[],
            false => &["--release"],
        };
        let status = Command::new(env!("CARGO"))
            .args([
                "build",
                "-q",
                "-p",
                "drover-frontend",
                "--example",
                "fuse_memory",
            ])
            .args(release)
            .status();
        assert!(status.unwrap().success());
    }
    path
}

/// Waits until `true`, for at most ten seconds.
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !is() {
        assert!(
            start.elapsed().as_secs() < 10,
            "not within ten seconds: {what}"
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
