//! What of a machine's disks cannot be read, since it had not arrived when its source was given up as lost.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::DeviceError;

/// The file that says so, in the directory with the journal of a disk.
pub(super) fn mark_in(journal: &Path) -> PathBuf {
    journal.join("lost")
}

/// Makes these files, durably, or none of them.
///
/// # Errors
/// Errors of the disk.
pub(super) fn mark(marks: &[PathBuf]) -> io::Result<()> {
    let made = marks.iter().try_for_each(|mark| {
        drover_storage::create_private(mark)?;
        drover_storage::sync_parent(mark)
    });
    made.inspect_err(|_| {
        for mark in marks {
            // One that remains is removed when the disk is opened next.
            let _ = unmark(mark);
        }
    })
}

/// Removes such a file, if there is one.
///
/// # Errors
/// Errors of the disk.
pub(super) fn unmark(mark: &Path) -> io::Result<()> {
    match std::fs::remove_file(mark) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
        Ok(()) => drover_storage::sync_parent(mark),
    }
}

/// What a reader gets.
pub(super) fn error() -> DeviceError {
    let text = "it had not arrived when the site that the machine came from was given up as lost";
    DeviceError::Io(Arc::new(io::Error::other(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_disks_are_marked_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let journal = |n: usize| directory.path().join(format!(".web-{n}.journal"));
        let marks: Vec<_> = (0..3).map(|n| mark_in(&journal(n))).collect();
        let are_there = || marks.iter().filter(|mark| mark.exists()).count();
        std::fs::create_dir(journal(0)).unwrap();
        std::fs::create_dir(journal(2)).unwrap();
        mark(&marks).unwrap_err();
        assert_eq!(are_there(), 0);
        std::fs::create_dir(journal(1)).unwrap();
        mark(&marks).unwrap();
        mark(&marks).unwrap();
        assert_eq!(are_there(), 3);
        unmark(&marks[1]).unwrap();
        unmark(&marks[1]).unwrap();
        assert_eq!(are_there(), 2);
    }
}
