//! Files on disk: opening, hole detection, and change detection.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use drover_core::{BLOCK_SIZE_U64, ReadAt};
use rustix::fs::{OFlags, SeekFrom as RawSeek, seek};

use crate::ImageError;
use crate::limits::MAX_FILE_EXTENTS;

/// File metadata that reveals whether a file was replaced or modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Last modification of the content, in nanoseconds since 1970.
    pub mtime_ns: i128,
    /// Last change of content or attributes, in nanoseconds since 1970.
    pub ctime_ns: i128,
}

impl Stamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    /// What `fstat` reports.
    pub fn of(file: &File) -> io::Result<Self> {
        let mut stamp = Self::from_metadata(&file.metadata()?);
        if stamp.size == 0 && file.metadata()?.file_type().is_block_device() {
            let mut f = file;
            stamp.size = f.seek(SeekFrom::End(0))?;
        }
        Ok(stamp)
    }

    /// The stamp of the file at `path`.
    ///
    /// # Errors
    /// What opening the file or `fstat` reports.
    pub fn of_path(path: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        if meta.file_type().is_block_device() {
            return Self::of(&File::open(path)?);
        }
        Ok(Self::from_metadata(&meta))
    }

    fn from_metadata(m: &Metadata) -> Self {
        let ns = |s: i64, n: i64| i128::from(s) * 1_000_000_000 + i128::from(n);
        Stamp {
            device: m.dev(),
            inode: m.ino(),
            size: m.len(),
            mtime_ns: ns(m.mtime(), m.mtime_nsec()),
            ctime_ns: ns(m.ctime(), m.ctime_nsec()),
        }
    }
}

/// A regular file or block device, open for reading.
#[derive(Debug)]
pub struct ImageFile {
    file: File,
    path: PathBuf,
    stamp: Stamp,
}

impl ImageFile {
    /// Opens `path` read-only. Only regular files and block devices are accepted; never blocks on a FIFO.
    ///
    /// # Errors
    /// [`ImageError`] naming the path.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(Self::FLAGS.bits() as i32)
            .open(path)
            .map_err(|e| ImageError::io("open the image", e).in_file(path))?;
        Self::new(file, path)
    }

    /// Flags for opening: neither a FIFO nor a terminal has an effect.
    pub(crate) const FLAGS: OFlags = OFlags::NONBLOCK.union(OFlags::NOCTTY);

    /// A file that was opened with [`Self::FLAGS`] at `path`.
    pub(crate) fn new(file: File, path: &Path) -> Result<Self, ImageError> {
        let checked = || -> Result<Self, ImageError> {
            let kind = file
                .metadata()
                .map_err(|e| ImageError::io("look at the image", e))?
                .file_type();
            if !kind.is_file() && !kind.is_block_device() {
                return Err(ImageError::NotAFile);
            }
            let stamp = Stamp::of(&file).map_err(|e| ImageError::io("look at the image", e))?;
            Ok(ImageFile {
                file,
                path: path.to_owned(),
                stamp,
            })
        };
        checked().map_err(|e| e.in_file(path))
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's stamp at the time it was opened.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// The data runs (no holes) of the file, in order, rounded outward to blocks. One run if the file system does not
    /// support holes. After [`MAX_FILE_EXTENTS`] runs the rest of the file counts as one.
    ///
    /// # Errors
    /// Errors of `lseek`.
    pub fn data_extents(&self) -> Result<Vec<Range<u64>>, ImageError> {
        self.find_extents()
            .map_err(|e| ImageError::io("look for holes", e).in_file(&self.path))
    }

    fn find_extents(&self) -> io::Result<Vec<Range<u64>>> {
        let len = self.stamp.size;
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut at = 0;
        while at < len {
            let start = match seek(&self.file, RawSeek::Data(at)) {
                Ok(p) => p,
                Err(rustix::io::Errno::NXIO) => break,
                // No hole detection here: everything is data.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => at,
                Err(e) => return Err(e.into()),
            };
            if start >= len {
                break;
            }
            let end = if runs.len() + 1 >= MAX_FILE_EXTENTS {
                len
            } else {
                match seek(&self.file, RawSeek::Hole(start)) {
                    Ok(p) => p.clamp(start + 1, len),
                    Err(_) => len,
                }
            };
            push_rounded(&mut runs, start..end, len);
            at = end;
        }
        Ok(runs)
    }
}

/// Appends `run`, rounded outward to blocks and merged with the last run if they touch.
pub(crate) fn push_rounded(runs: &mut Vec<Range<u64>>, run: Range<u64>, len: u64) {
    let start = run.start - run.start % BLOCK_SIZE_U64;
    let end = run
        .end
        .checked_next_multiple_of(BLOCK_SIZE_U64)
        .unwrap_or(len)
        .min(len);
    match runs.last_mut() {
        Some(last) if start <= last.end => last.end = last.end.max(end),
        _ => runs.push(start..end),
    }
}

impl ReadAt for ImageFile {
    fn len(&self) -> u64 {
        self.stamp.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        // The length is that of opening: growth of the file is ignored.
        let left = self.stamp.size.saturating_sub(offset);
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        if want == 0 {
            return Ok(0);
        }
        self.file.read_at(&mut buf[..want], offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_seen_and_their_edges_rounded_outward() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        let f = File::create(&path).unwrap();
        f.set_len((1 << 20) + 100).unwrap();
        f.write_all_at(b"x", 5).unwrap();
        f.write_all_at(b"x", (512 << 10) + 5000).unwrap();
        f.write_all_at(b"x", (1 << 20) + 99).unwrap();
        let image = ImageFile::open(&path).unwrap();
        let runs = image.data_extents().unwrap();
        if runs.len() == 1 && runs[0] == (0..(1 << 20) + 100) {
            eprintln!("SKIP: this file system does not report holes");
            return;
        }
        assert_eq!(
            runs,
            vec![
                0..4096,
                (512 << 10) + 4096..(512 << 10) + 8192,
                1 << 20..(1 << 20) + 100
            ]
        );
    }

    #[test]
    fn a_stamp_notices_a_write_and_a_replacement() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"abc").unwrap();
        let image = ImageFile::open(&path).unwrap();
        assert_eq!(image.stamp(), Stamp::of_path(&path).unwrap());
        std::fs::write(dir.path().join("g"), b"abc").unwrap();
        std::fs::rename(dir.path().join("g"), &path).unwrap();
        assert_ne!(image.stamp(), Stamp::of_path(&path).unwrap());
    }

    #[test]
    fn what_is_not_a_file_is_refused_without_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let e = ImageFile::open(dir.path()).unwrap_err();
        assert!(e.to_string().contains("not a regular file"), "{e}");
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert!(ImageFile::open(&fifo).is_err());
        assert!(ImageFile::open(Path::new("/no/such/file")).is_err());
    }
}
