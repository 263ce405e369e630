//! The mount table and the users of a mount, read from `/proc` and `/sys`, without accessing the file system itself,
//! which may hang.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::error::User;

/// Maximum users named in an error.
const MAX_USERS: usize = 8;

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mounted {
    /// The mount's ID, as in `/proc/PID/fdinfo`.
    pub(super) id: u64,
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) point: PathBuf,
    pub(super) kind: String,
}

impl Mounted {
    pub(super) fn is_fuse(&self) -> bool {
        self.kind == "fuse" || self.kind.starts_with("fuse.")
    }
}

/// The topmost mount at `point`.
pub(super) fn mounted_at(point: &Path) -> io::Result<Option<Mounted>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table
        .split(|b| *b == b'\n')
        .filter_map(parse)
        .rfind(|mounted| mounted.point == point))
}

fn parse(line: &[u8]) -> Option<Mounted> {
    let mut words = line.split(|b| *b == b' ');
    let mut text = || words.next().and_then(|w| std::str::from_utf8(w).ok());
    let id = text()?.parse().ok()?;
    text()?;
    let (major, minor) = text()?.split_once(':')?;
    let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
    words.next()?;
    let point = PathBuf::from(OsString::from_vec(unescape(words.next()?)));
    let kind = words.skip_while(|w| *w != b"-").nth(1)?;
    Some(Mounted {
        id,
        major,
        minor,
        point,
        kind: String::from_utf8_lossy(kind).into_owned(),
    })
}

/// Decodes `\040` and the like, as the kernel writes them.
pub(crate) fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

/// The users of a mount, at most [`MAX_USERS`]: processes with open files, mappings or a directory in it, and loop
/// devices. Those this process may not inspect are missed.
pub(super) fn users_of(mounted: &Mounted) -> Vec<User> {
    let mut users: Vec<User> = devices_on(mounted).into_iter().map(User::Device).collect();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    users.extend(
        numbers
            .filter(|pid| uses(*pid, mounted))
            .take(MAX_USERS)
            .map(User::process),
    );
    users.truncate(MAX_USERS);
    users
}

/// Whether loop devices are attached to files in a mount.
pub(super) fn carries_devices(mounted: &Mounted) -> bool {
    !devices_on(mounted).is_empty()
}

fn devices_on(mounted: &Mounted) -> Vec<PathBuf> {
    crate::loopdev::backing::find_under(&mounted.point).unwrap_or_default()
}

fn uses(pid: u32, mounted: &Mounted) -> bool {
    let wanted = format!("mnt_id:\t{}", mounted.id);
    let open = fs::read_dir(format!("/proc/{pid}/fdinfo"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .any(|text| text.lines().any(|line| line == wanted));
    let device = format!("{:02x}:{:02x}", mounted.major, mounted.minor);
    let maps = || {
        fs::read_to_string(format!("/proc/{pid}/maps"))
            .is_ok_and(|maps| maps.lines().any(|l| l.split(' ').nth(3) == Some(&device)))
    };
    let stands = || {
        ["cwd", "root"].iter().any(|what| {
            fs::read_link(format!("/proc/{pid}/{what}"))
                .is_ok_and(|path| path.starts_with(&mounted.point))
        })
    };
    open || maps() || stands()
}

/// Processes that have a block device or one of its partitions open, with the path they have open, at most
/// [`MAX_USERS`].
pub(crate) fn openers_of(device: &Path) -> Vec<User> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers
        .filter(|pid| {
            fs::read_dir(format!("/proc/{pid}/fd"))
                .into_iter()
                .flatten()
                .flatten()
                .any(|entry| fs::read_link(entry.path()).is_ok_and(|link| is_or_in(&link, device)))
        })
        .take(MAX_USERS)
        .map(User::process)
        .collect()
}

/// Whether `path` is the device or one of its partitions.
pub(crate) fn is_or_in(path: &Path, device: &Path) -> bool {
    let (path, device) = (path.as_os_str().as_bytes(), device.as_os_str().as_bytes());
    path.strip_prefix(device).is_some_and(|rest| match rest {
        [] => true,
        [b'p', number @ ..] => !number.is_empty() && number.iter().all(u8::is_ascii_digit),
        _ => false,
    })
}

/// Mount points of file systems on a block device or one of its partitions.
#[must_use]
pub fn mounted_from(device: &Path) -> Vec<PathBuf> {
    let Some(device) = device.to_str() else {
        return Vec::new();
    };
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    table
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let rest = words.next()?.strip_prefix(device)?;
            let ours = rest.is_empty() || rest.starts_with('p');
            let point = unescape(words.next()?.as_bytes());
            ours.then(|| PathBuf::from(OsString::from_vec(point)))
        })
        .take(MAX_USERS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_its_optional_fields_and_escapes() {
        let line = br"61 28 0:57 / /mnt/a\040disk rw,nosuid shared:31 master:2 - fuse.drover web\040x rw,user_id=0";
        let mounted = parse(line).unwrap();
        assert_eq!(mounted.id, 61);
        assert_eq!((mounted.major, mounted.minor), (0, 57));
        assert_eq!(mounted.point, Path::new("/mnt/a disk"));
        assert!(mounted.is_fuse());
        let root = br"28 1 254:0 / / rw,relatime - ext4 /dev/root rw";
        assert!(!parse(root).unwrap().is_fuse());
        assert_eq!(parse(b"rubbish"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn a_partition_is_in_its_device_and_another_device_is_not() {
        let within = |path: &str| is_or_in(Path::new(path), Path::new("/dev/loop1"));
        assert!(within("/dev/loop1") && within("/dev/loop1p1") && within("/dev/loop1p12"));
        for other in [
            "/dev/loop",
            "/dev/loop10",
            "/dev/loop10p1",
            "/dev/loop1p",
            "/dev/loop1px",
        ] {
            assert!(!within(other), "{other}");
        }
    }

    #[test]
    fn escapes_that_are_none_stay() {
        assert_eq!(unescape(br"a\0409\x\04"), br"a 9\x\04");
        assert_eq!(unescape(b"\\"), b"\\");
    }

    #[test]
    fn the_root_is_mounted_and_used_by_us() {
        let root = mounted_at(Path::new("/")).unwrap().unwrap();
        assert!(uses(std::process::id(), &root));
        assert_eq!(mounted_at(Path::new("/no/such/place")).unwrap(), None);
    }
}
