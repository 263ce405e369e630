//! The generations of a disk in the qcow2 file that it is, so that a copy of the file has them, too.
//!
//! They are those of a copy that is left and frozen: of a new line, with one generation. Where the file is indexed they are taken up,
//! if they are still valid: see [`drover_image::attached`].

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::ReadAt;
use drover_image::{Change, ImageError, ImageFile, attach, attached, detach};
use rustix::fs::{FlockOperation, OFlags, fcntl_lock};

use super::line::{Contents, Line};
use super::{MAX_SIZE, Summary};

/// Why generations were not written into a file.
#[derive(Debug, thiserror::Error)]
pub enum InFileError {
    /// A hypervisor has it open, or another program has locked it.
    #[error("{} is in use by another program", .0.display())]
    InUse(PathBuf),
    /// It is no file that can have them.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The disk is larger than any whose generations are recorded.
    #[error("{}: a disk of {} bytes is larger than any whose generations are recorded", .0.display(), .1)]
    TooLarge(PathBuf, u64),
    /// It cannot be read or written.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A new line for the disk in a qcow2 file that nobody has open: its first generation is over. Nothing is written.
///
/// # Errors
/// [`InFileError`].
pub fn new_of_file(path: &Path) -> Result<Summary, InFileError> {
    let (_, content) = open(path)?;
    let size = drover_image::qcow2_size(&content).map_err(|e| e.in_file(path))?;
    if size > MAX_SIZE {
        return Err(InFileError::TooLarge(path.to_owned(), size));
    }
    let mut line = Line::new(size);
    line.freeze(Contents::new(&[], 0, 0));
    let summary = line.summary(&|_| false);
    // Whether it can have them at all.
    attach(&content, &summary.encode()).map_err(|e| e.in_file(path))?;
    Ok(summary)
}

/// Writes generations, the last of which is over, into the qcow2 file that they are of. Durable when it returns; killed before,
/// the file is the same disk all the same.
///
/// # Errors
/// [`InFileError`]: nothing is known of the file then.
pub fn write_in_file(path: &Path, summary: &Summary) -> Result<(), InFileError> {
    change(path, |content| attach(content, &summary.encode()))
}

/// Removes generations from a qcow2 file, whatever they say. Durable when it returns.
///
/// # Errors
/// [`InFileError`].
pub fn remove_from_file(path: &Path) -> Result<(), InFileError> {
    change(path, detach)
}

fn change(
    path: &Path,
    changes: impl FnOnce(&Arc<dyn ReadAt>) -> Result<Vec<Change>, ImageError>,
) -> Result<(), InFileError> {
    let (file, content) = open(path)?;
    for change in changes(&content).map_err(|e| e.in_file(path))? {
        match change {
            Change::Write(offset, bytes) => file.write_all_at(&bytes, offset),
            Change::Sync => file.sync_all(),
        }
        .map_err(failed("write", path))?;
    }
    Ok(())
}

fn failed(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> InFileError {
    move |source| InFileError::Io {
        doing,
        path: path.to_owned(),
        source,
    }
}

/// Opens a file, which is locked until it is closed.
fn open(path: &Path) -> Result<(Arc<File>, Arc<dyn ReadAt>), InFileError> {
    let failed = |doing| failed(doing, path);
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits() as i32);
    let opened = options.read(true).write(true).open(path);
    let file = Arc::new(opened.map_err(failed("write"))?);
    let about = file.metadata().map_err(failed("look at"))?;
    if !about.is_file() {
        return Err(ImageError::NotAFile.in_file(path).into());
    }
    // Hypervisors lock bytes of the file as long as they have it open. The lock ends with any descriptor of the file.
    fcntl_lock(&*file, FlockOperation::NonBlockingLockExclusive).map_err(|e| match e {
        rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS => InFileError::InUse(path.to_owned()),
        e => failed("lock")(e.into()),
    })?;
    let length = file.metadata().map_err(failed("look at"))?.len();
    let content: Arc<dyn ReadAt> = Arc::new(Content(Arc::clone(&file), length));
    Ok((file, content))
}

/// The generations in a file of a disk that is left, of which they are still believed; none in any other file.
#[must_use]
pub fn of_file(path: &Path) -> Option<Summary> {
    let read = || -> Result<Option<Summary>, ImageError> {
        let file: Arc<dyn ReadAt> = Arc::new(ImageFile::open(path)?);
        let size = drover_image::qcow2_size(&file)?;
        let decode = |found: &[u8]| {
            let summary = Summary::decode(found).ok();
            summary.filter(|summary| summary.size == size)
        };
        let found = attached(&file, |found| decode(found)?.bitmap_name())?;
        Ok(found.and_then(|found| decode(&found)))
    };
    let damaged = |error: &ImageError| tracing::debug!(%error, "no generations in a file");
    read().inspect_err(damaged).ok()?
}

/// A file of this length.
struct Content(Arc<File>, u64);

impl ReadAt for Content {
    fn len(&self) -> u64 {
        self.1
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use super::*;
    use crate::generations::Comparison;

    fn begin_in_file(path: &Path) -> Result<Summary, InFileError> {
        let summary = new_of_file(path)?;
        let name = summary.bitmap_name().unwrap();
        let add = ["bitmap", "--add", "-g", "64K"];
        let mut add = Command::new("qemu-img")
            .args(add)
            .arg(path)
            .arg(name)
            .spawn();
        assert!(add.as_mut().unwrap().wait().unwrap().success());
        let length = path.metadata().unwrap().len();
        let written = write_in_file(path, &summary);
        assert_eq!(path.metadata().unwrap().len(), length);
        written.map(|()| summary)
    }

    #[test]
    fn a_file_has_its_generations_until_it_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.qcow2");
        let run = |tool: &str, args: &[&str]| Command::new(tool).args(args).arg(&path).output();
        let create = run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", "size=9M"],
        );
        match create {
            Ok(done) => assert!(done.status.success(), "{done:?}"),
            Err(e) => return eprintln!("SKIP: no qemu-img (qemu-utils): {e}"),
        }
        assert_eq!(of_file(&path), None);
        let first = begin_in_file(&path).unwrap();
        assert_eq!(of_file(&path), Some(first.clone()));
        // Once more: another line.
        let again = begin_in_file(&path).unwrap();
        assert_eq!(of_file(&path), Some(again.clone()));
        assert!(matches!(first.compare(&again), Comparison::Unknown(_)));
        // While QEMU has it open, nothing is written.
        let mut qemu = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It has it when it has read: before, our own lock would keep it out.
        qemu.stdin
            .as_mut()
            .unwrap()
            .write_all(b"read 0 512\n")
            .unwrap();
        let mut said = BufReader::new(qemu.stdout.take().unwrap()).lines();
        assert!(said.any(|line| line.unwrap().contains("read 512/512")));
        let refused = begin_in_file(&path);
        assert!(matches!(refused, Err(InFileError::InUse(_))), "{refused:?}");
        drop(qemu.stdin.take());
        qemu.wait().unwrap();
        assert_eq!(of_file(&path), None, "it was opened for writing");
        std::fs::write(&path, b"no image").unwrap();
        let refused = begin_in_file(&path).unwrap_err().to_string();
        assert!(refused.contains("x.qcow2"), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"no image");
    }
}
