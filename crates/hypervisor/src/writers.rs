//! Processes that write a file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::one_line;

/// Upper bound on the processes that are named.
const MAX_WRITERS: usize = 8;

/// A process that has a file open for writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writer {
    /// Its number.
    pub process: u32,
    /// Its name, as `ps` shows it.
    pub name: String,
}

/// The processes of this host that have a file open for writing, without this one; at most eight. Those that this process
/// may not inspect are missed, as are writers on other hosts. Blocks on the disk.
#[must_use]
pub fn writers_of(file: &Path) -> Vec<Writer> {
    let Ok(wanted) = fs::metadata(file).map(|about| (about.dev(), about.ino())) else {
        return Vec::new();
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let others = numbers.filter(|process| *process != std::process::id());
    let writers = others.filter(|process| writes(*process, wanted));
    let named = writers.map(|process| {
        let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        let name = one_line(name.trim());
        Writer { process, name }
    });
    named.take(MAX_WRITERS).collect()
}

/// Whether a process has a file open for writing.
fn writes(process: u32, file: (u64, u64)) -> bool {
    let open = fs::read_dir(format!("/proc/{process}/fd"));
    open.into_iter().flatten().flatten().any(|entry| {
        // Only of what has a path: the others may not answer.
        let has_path = fs::read_link(entry.path()).is_ok_and(|link| link.is_absolute());
        let is_it = || fs::metadata(entry.path()).is_ok_and(|at| (at.dev(), at.ino()) == file);
        let about = || {
            let number = entry.file_name();
            let path = format!("/proc/{process}/fdinfo/{}", number.to_string_lossy());
            fs::read_to_string(path).unwrap_or_default()
        };
        has_path && is_it() && is_writable(&about())
    })
}

/// Whether a file is open for writing, by its `fdinfo`.
fn is_writable(about: &str) -> bool {
    let flags = about
        .lines()
        .find_map(|line| line.strip_prefix("flags:"))
        .and_then(|flags| u64::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 3 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn only_those_that_write_a_file_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "x").unwrap();
        let link = dir.path().join("another name");
        fs::hard_link(&path, &link).unwrap();
        let held = |how: fs::File| {
            let mut sleep = Command::new("sleep");
            sleep.arg("600").stdin(Stdio::from(how)).spawn().unwrap()
        };
        // This process does not count.
        let own = fs::File::options().write(true).open(&path).unwrap();
        let mut reader = held(fs::File::open(&path).unwrap());
        assert_eq!(writers_of(&path), []);
        let mut writer = held(own);
        let found = Writer {
            process: writer.id(),
            name: "sleep".into(),
        };
        let found = [found];
        assert_eq!(writers_of(&path), found);
        assert_eq!(writers_of(&link), found);
        assert_eq!(writers_of(&dir.path().join("missing")), []);
        for child in [&mut reader, &mut writer] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(writers_of(&path), []);
    }

    #[test]
    fn flags_are_octal() {
        assert!(is_writable("pos:\t0\nflags:\t0100002\nmnt_id:\t29\n"));
        assert!(is_writable("flags:\t0100001\n"));
        for not in ["flags:\t0100000\n", "flags:\tx\n", "", "pos:\t2\n"] {
            assert!(!is_writable(not), "{not:?}");
        }
    }
}
