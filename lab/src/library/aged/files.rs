//! Files that are rewritten, edited, moved and deleted; logs that grow.

use std::fs::{self, File, FileTimes};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

use crate::library::ext4;

/// Changes some of the files below /usr/share, /usr/lib and /etc, chosen by their names; says how many.
///
/// # Errors
/// When the disk is full.
pub fn churn(root: &Path, time: SystemTime) -> Result<String> {
    let mut files = Vec::new();
    for dir in ["usr/share", "usr/lib", "etc", "home", "srv"] {
        regular_files(&root.join(dir), &mut files);
    }
    files.sort();
    let (mut rewritten, mut edited, mut moved, mut deleted) = (0, 0, 0, 0);
    for path in files {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let key = blake3::hash(relative.as_os_str().as_encoded_bytes()).as_bytes()[0];
        let spare = relative.starts_with("usr/share/doc") || relative.starts_with("usr/share/man");
        match key {
            0..4 => {
                rewrite(&path, time)?;
                rewritten += 1;
            }
            // Comments where they do no harm.
            4..40 if relative.starts_with("etc") && is_text(relative) => {
                let mut file = File::options().append(true).open(&path)?;
                writeln!(file, "# edited by an administrator")?;
                stamp(&file, time)?;
                edited += 1;
            }
            40..48 if spare => {
                fs::rename(&path, path.with_extension("old"))?;
                moved += 1;
            }
            48..60 if spare => {
                fs::remove_file(&path)?;
                deleted += 1;
            }
            _ => {}
        }
    }
    Ok(format!(
        "{rewritten} files rewritten, {edited} edited, {moved} moved, {deleted} deleted"
    ))
}

/// An editor's or an upgrade's way to write: a new file with the old content, elsewhere on the disk.
fn rewrite(path: &Path, time: SystemTime) -> Result<()> {
    let meta = path.metadata()?;
    let aside = path.with_extension("drover-lab");
    fs::copy(path, &aside).with_context(|| format!("cannot rewrite {}", path.display()))?;
    // The mode goes after the owner, whose change clears bits of it.
    std::os::unix::fs::chown(&aside, Some(meta.uid()), Some(meta.gid()))?;
    fs::set_permissions(&aside, meta.permissions())?;
    File::open(&aside).and_then(|f| stamp(&f, time))?;
    Ok(fs::rename(&aside, path)?)
}

fn is_text(path: &Path) -> bool {
    path.extension()
        .is_some_and(|e| e == "conf" || e == "cfg" || e == "list")
        || path.starts_with("etc/default")
        || path.starts_with("etc/cron.d")
}

fn stamp(file: &File, time: SystemTime) -> std::io::Result<()> {
    file.set_times(FileTimes::new().set_accessed(time).set_modified(time))
}

fn regular_files(dir: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for path in entries.flatten().map(|e| e.path()) {
        match path.symlink_metadata() {
            Ok(meta) if meta.is_dir() => regular_files(&path, out),
            Ok(meta) if meta.is_file() => out.push(path),
            _ => {}
        }
    }
}

/// Appends to the logs, `bytes` in all.
///
/// # Errors
/// When the disk is full.
pub fn grow_logs(
    dir: &Path,
    bytes: usize,
    time: SystemTime,
    rng: &mut fastrand::Rng,
) -> Result<()> {
    fs::create_dir_all(dir)?;
    for (name, share) in [("syslog", 6), ("auth.log", 3), ("kern.log", 1)] {
        let path = dir.join(name);
        let mut file = BufWriter::new(
            File::options()
                .create(true)
                .append(true)
                .open(&path)
                .with_context(|| format!("cannot write {}", path.display()))?,
        );
        let mut clock = ext4::EPOCH;
        let mut written = 0;
        while written < bytes / 10 * share {
            clock += rng.u64(0..30);
            let line = log_line(rng, clock);
            file.write_all(line.as_bytes())
                .context("the log cannot grow")?;
            written += line.len();
        }
        let file = file.into_inner().map_err(|e| e.into_error())?;
        stamp(&file, time)?;
    }
    Ok(())
}

fn log_line(rng: &mut fastrand::Rng, clock: u64) -> String {
    let pid = rng.u32(300..40_000);
    match rng.u8(0..5) {
        0 => format!(
            "{clock} vm sshd[{pid}]: Accepted publickey for admin from 192.0.2.{} port {} ssh2: ED25519 SHA256:{:016x}{:016x}\n",
            rng.u8(..),
            rng.u16(1024..),
            rng.u64(..),
            rng.u64(..)
        ),
        1 => format!(
            "{clock} vm CRON[{pid}]: (root) CMD (cd / && run-parts --report /etc/cron.hourly)\n"
        ),
        2 => format!("{clock} vm systemd[1]: session-{pid}.scope: Deactivated successfully.\n"),
        3 => format!(
            "{clock} vm kernel: [{}.{:06}] TCP: request_sock_TCP: Possible SYN flooding on port 443\n",
            clock % 1_000_000,
            rng.u32(0..1_000_000)
        ),
        _ => format!(
            "{clock} vm sshd[{pid}]: Failed password for invalid user u{:x} from 198.51.100.{} port {}\n",
            rng.u16(..),
            rng.u16(0..256),
            rng.u16(1024..)
        ),
    }
}

/// A stand-in for a database where none can run: a file of 16 KiB pages, grown and then written here and there.
///
/// # Errors
/// When the disk is full.
pub fn grow_table(path: &Path, rng: &mut fastrand::Rng) -> Result<String> {
    const PAGE: usize = 16 << 10;
    const PAGES: u64 = 256;
    const WRITES: u64 = 400;
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let file = File::create(path)?;
    let mut page = vec![0; PAGE];
    for write in 0..PAGES + WRITES {
        let at = if write < PAGES {
            write
        } else {
            rng.u64(0..PAGES)
        };
        // Two thirds full.
        rng.fill(&mut page[..PAGE / 3 * 2]);
        file.write_all_at(&page, at * PAGE as u64)?;
    }
    Ok(format!(
        "no database runs in it: a file of {PAGES} pages written {} times stands for one",
        PAGES + WRITES
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(dir: &Path) {
        for n in 0..400 {
            for (place, end) in [
                ("usr/share/doc", "txt"),
                ("etc/default", "conf"),
                ("usr/lib", "so"),
            ] {
                let path = dir.join(format!("{place}/file{n}.{end}"));
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{place} {n}\n")).unwrap();
            }
        }
    }

    #[test]
    fn the_same_tree_ages_to_the_same_tree() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut said = Vec::new();
        let mut digests = Vec::new();
        for dir in [&one, &two] {
            tree(dir.path());
            let before = crate::library::filesystem::files_digest(dir.path()).unwrap();
            said.push(churn(dir.path(), SystemTime::UNIX_EPOCH).unwrap());
            let mut rng = fastrand::Rng::with_seed(1);
            grow_logs(
                &dir.path().join("srv/log"),
                100_000,
                SystemTime::UNIX_EPOCH,
                &mut rng,
            )
            .unwrap();
            grow_table(&dir.path().join("srv/table"), &mut rng).unwrap();
            let after = crate::library::filesystem::files_digest(dir.path()).unwrap();
            assert_ne!(before, after);
            digests.push(after);
        }
        assert_eq!(digests[0], digests[1]);
        assert_eq!(said[0], said[1]);
        for word in ["rewritten", "edited", "moved", "deleted"] {
            let (before, _) = said[0].split_once(&format!(" {word}")).unwrap();
            assert!(!before.ends_with(" 0"), "{}", said[0]);
        }
        let log = fs::metadata(one.path().join("srv/log/syslog"))
            .unwrap()
            .len();
        assert!((60_000..61_000).contains(&log), "{log}");
    }

    #[test]
    fn a_file_that_is_rewritten_is_another_file_with_the_same_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.txt");
        fs::write(&path, b"content").unwrap();
        let before = path.metadata().unwrap();
        rewrite(&path, SystemTime::UNIX_EPOCH).unwrap();
        let after = path.metadata().unwrap();
        assert_ne!(before.ino(), after.ino());
        assert_eq!((before.mode(), before.uid()), (after.mode(), after.uid()));
        assert_eq!(fs::read(&path).unwrap(), b"content");
    }
}
