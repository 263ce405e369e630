//! A single file out of a snapshot.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use drover_agent::error::Error;
use drover_agent::text::{bytes, clean};
use drover_core::ReadAt;
use drover_image::VirtualDisk;
use drover_image::guest::{FileError, FoundFile, find_file};
use drover_vault::{Entry, SnapshotFile, Vault};
use serde_json::json;

use crate::failure::refused;
use crate::{out, prompt};

/// Bytes that are copied at once.
const PIECE: u64 = 1 << 20;

/// Writes the file at a path of a snapshot to `to`, which gets it when it is complete.
///
/// # Errors
/// When there is no such file, the snapshot is damaged, or the file cannot be written.
pub fn restore(
    (vault, entry, path): (&Vault, &Entry, &str),
    to: &Path,
    yes: bool,
    as_json: bool,
) -> Result<()> {
    let of = format!("{}:{path}", entry.id);
    let snapshot = vault.open_snapshot(&entry.id).map_err(Error::from)?;
    let disk = VirtualDisk::from_content(Arc::new(SnapshotFile::new(snapshot)));
    let disk = disk.map_err(|e| refused(format!("{}: {e}", clean(&of))))?;
    let found = find_file(&disk, path).map_err(|why| failed(why, &of, entry))?;
    if to.exists() {
        let question = format!(
            "Overwrite {} with {}?",
            clean(&to.display().to_string()),
            clean(&of)
        );
        prompt::confirm(&question, yes)?;
    }
    let unfinished = unfinished(to);
    let copied = copy(&disk, &found, &unfinished).and_then(|()| {
        fs::rename(&unfinished, to)?;
        let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty());
        fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    });
    if copied.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    copied.with_context(|| format!("cannot write {}", to.display()))?;
    if as_json {
        return out::json(&json!({
            "event": "restored", "snapshot": entry.id.to_string(), "path": path, "file": to,
            "file_bytes": found.size, "partition": found.partition,
        }));
    }
    out::line(&format!(
        "{}: {}, {}",
        clean(&to.display().to_string()),
        clean(&of),
        bytes(found.size)
    ))
}

fn failed(why: FileError, of: &str, entry: &Entry) -> anyhow::Error {
    let hint = match why {
        FileError::Io => return Error::msg(format!("{}: {why}", clean(of))).into(),
        FileError::NotThere | FileError::NotAFile => "",
        FileError::NoFileSystem | FileError::InUse | FileError::Unreadable => {
            "; mount it instead: drover mount "
        }
    };
    match hint {
        "" => refused(format!("{}: {why}", clean(of))),
        hint => refused(format!(
            "{}: {why}{hint}{} PATH",
            clean(of),
            clean(&entry.id.to_string())
        )),
    }
}

/// A new file beside it.
fn unfinished(to: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(format!(".drover-{}", std::process::id()));
    to.with_file_name(name)
}

fn copy(disk: &dyn ReadAt, found: &FoundFile, to: &Path) -> io::Result<()> {
    // What it is in the file system of the machine is not for every user here.
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(to)?;
    file.set_len(found.size)?;
    let mut buffer = vec![0; PIECE as usize];
    for (offset, range) in &found.pieces {
        let (mut at, mut from) = (*offset, range.start);
        while from < range.end {
            let n = PIECE.min(range.end - from) as usize;
            disk.read_exact_at(&mut buffer[..n], from)?;
            file.write_all_at(&buffer[..n], at)?;
            (at, from) = (at + n as u64, from + n as u64);
        }
    }
    file.flush()?;
    file.sync_all()
}
