//! Atomic replacement of small files.

use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::{Directory, HostDirectory};

/// Atomically replaces the file at `path` with `bytes`: after a crash it holds the old bytes or the new ones. Durable
/// on return. The file is private to this user; permissions of a replaced file are not kept.
///
/// The bytes are first written to `.NAME.PID` beside it, so processes do not interfere. Threads are serialized.
///
/// # Errors
/// `InvalidInput` when the path has no name, or one that is not UTF-8; else errors of the system.
pub fn atomic_replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        let text = format!("{} is no name of a file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    };
    let temporary = format!(".{name}.{}", std::process::id());
    replace(&HostDirectory::open(parent(path))?, &temporary, name, bytes)
}

/// Removes temporary files that crashed processes left in [`atomic_replace`] of `path`. Those of running processes are
/// kept. Errors are ignored: a leftover only takes space.
pub fn remove_leftovers(path: &Path) {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return;
    };
    let prefix = format!(".{name}.");
    for entry in fs::read_dir(parent(path)).into_iter().flatten().flatten() {
        let left = entry.file_name();
        let process = left.to_str().and_then(|left| left.strip_prefix(&prefix));
        let process = process.and_then(|p| Pid::from_raw(p.parse().ok()?));
        if process.is_some_and(|p| test_kill_process(p) == Err(Errno::SRCH)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// [`atomic_replace`] in a [`Directory`], with a temporary name chosen by the caller. A crash may leave a file of that
/// name; the next replacement truncates it.
///
/// # Errors
/// Errors of the medium. The file is then unchanged, or, if only the name could not be made durable, the new one.
pub fn replace(
    directory: &dyn Directory,
    temporary: &str,
    name: &str,
    bytes: &[u8],
) -> io::Result<()> {
    let write = || {
        let file = directory.create(temporary)?;
        file.write_at(bytes, 0)?;
        file.sync()?;
        directory.rename(temporary, name)
    };
    if let Err(error) = write() {
        // Best effort: a leftover only takes space.
        let _ = directory.remove(temporary);
        return Err(error);
    }
    directory.sync()
}

/// Makes the names in the parent directory of `path` durable.
///
/// # Errors
/// Errors of the system.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    HostDirectory::open(parent(path))?.sync()
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::{FakeDirectory, Operation};

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("f");
        atomic_replace(&path, b"one").unwrap();
        atomic_replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 1);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(atomic_replace(&tmp.path().join(".."), b"x").is_err());
        assert!(atomic_replace(&tmp.path().join("no/f"), b"x").is_err());
    }

    #[test]
    fn leftovers_of_crashed_processes_are_removed_and_no_other_files() {
        let tmp = tempfile::tempdir().unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let keep = [
            "f".to_string(),
            format!(".f.{}", std::process::id()),
            format!(".g.{}", dead.id()),
            ".f.old".into(),
            ".f.0".into(),
        ];
        let gone = format!(".f.{}", dead.id());
        for name in keep.iter().chain([&gone]) {
            fs::write(tmp.path().join(name), "x").unwrap();
        }
        remove_leftovers(&tmp.path().join("f"));
        assert!(!tmp.path().join(gone).exists());
        assert!(keep.iter().all(|name| tmp.path().join(name).exists()));
        remove_leftovers(&tmp.path().join("no/f"));
    }

    #[test]
    fn a_crash_leaves_the_old_bytes_or_the_new_ones() {
        let (old, new) = (vec![1; 3000], vec![2; 5000]);
        for step in 0..5 {
            for seed in 0..60 {
                let fake = FakeDirectory::new(512, seed);
                replace(&fake, "f.new", "f", &old).unwrap();
                fake.cut_power_at(fake.steps() + step);
                assert!(replace(&fake, "f.new", "f", &new).is_err());
                let found = fake.after_crash(seed).bytes("f").unwrap();
                assert!(found == old || found == new, "step {step}, seed {seed}");
            }
        }
        let fake = FakeDirectory::default();
        replace(&fake, "f.new", "f", &new).unwrap();
        for seed in 0..20 {
            let after = fake.after_crash(seed);
            assert_eq!(after.bytes("f").unwrap(), new, "it is durable");
            assert_eq!(after.list().unwrap(), ["f"]);
        }
    }

    #[test]
    fn what_fails_leaves_the_old_file_and_no_other() {
        use Operation::{Create, Rename, Sync, Write};
        for failing in [Create, Write, Sync, Rename] {
            let fake = FakeDirectory::default();
            replace(&fake, "f.new", "f", b"old").unwrap();
            fake.set_faults(move |operation, _| {
                (operation == failing).then_some(io::ErrorKind::StorageFull)
            });
            assert!(replace(&fake, "f.new", "f", b"new").is_err());
            assert_eq!(fake.bytes("f").unwrap(), b"old", "{failing:?}");
            assert_eq!(fake.list().unwrap(), ["f"], "{failing:?}");
        }
    }
}
