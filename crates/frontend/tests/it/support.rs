//! Helpers for tests of front ends.

use std::path::Path;
use std::process::{Command, Output};

/// Whether a program is installed; says loudly that a test is skipped when not.
pub fn installed(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    for program in programs {
        if !std::env::split_paths(&path).any(|directory| directory.join(program).is_file()) {
            eprintln!("SKIP {test}: {program} is not installed");
            return false;
        }
    }
    true
}

/// Runs a program, with a limit of 60 seconds.
pub fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new("timeout")
        .args(["-k", "1", "60", program])
        .args(arguments)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"))
}

/// Runs a program that has to succeed, and gives what it printed.
#[track_caller]
pub fn succeeds(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{said}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

/// Runs a program that has to fail, and gives what it complained of.
#[track_caller]
pub fn fails(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    assert!(
        !output.status.success(),
        "{program} {arguments:?} succeeded: {}",
        String::from_utf8_lossy(&output.stdout)
    );
    let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stdout));
    said
}

/// Bytes that look like nothing, the same for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// A managed device over zeros in memory whose cache is full of what cannot be pushed: the link is away. Chunks from 0 to
/// `DIRTY` are here and dirty, the others known to be zeros.
pub fn full() -> (
    std::sync::Arc<drover_device::synced::Synced>,
    std::sync::Arc<drover_device::local_remote::LocalRemote>,
) {
    use drover_core::BlockDevice;
    use drover_device::synced::{Order, Sync, Synced, SyncedOptions};
    let far = std::sync::Arc::new(drover_device::backend::MemoryDevice::new(64 << 20));
    let remote = drover_device::local_remote::LocalRemote::new(far, CHUNK as u32, 2, None).unwrap();
    let directory = std::sync::Arc::new(drover_storage::FakeDirectory::default());
    let device = Synced::open(SyncedOptions {
        sync: Sync::Local,
        cache_size: Some(DIRTY * CHUNK),
        prefetch: Order::Sequential,
        ..SyncedOptions::new(directory, remote.clone(), b"image")
    })
    .unwrap();
    assert!(
        device
            .puller()
            .wait(std::time::Duration::from_secs(60))
            .unwrap()
    );
    remote.cut("for a test");
    for index in 0..DIRTY {
        device
            .write(index * CHUNK, &vec![index as u8 + 1; CHUNK as usize])
            .unwrap();
    }
    (device, remote)
}

/// See [`full`].
pub const CHUNK: u64 = 64 << 10;
/// See [`full`].
pub const DIRTY: u64 = 16;
