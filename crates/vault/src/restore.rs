//! Writing a snapshot to a file, byte for byte; into an existing file, only what differs.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drover_core::{BLOCK_SIZE, is_zero};
use drover_image::Layout;
use drover_index::ZERO_BLOCK;
use drover_storage::sync_parent;
use rustix::fs::FallocateFlags;

use crate::error::{Result, VaultError};
use crate::recipe::SEGMENT_BLOCKS;
use crate::snapshot::Snapshot;
use crate::vault::Vault;

/// Most threads of a restore.
const MAX_THREADS: usize = 4;

/// How far a restore is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RestoreProgress {
    /// Bytes of the walk that are done.
    pub done_bytes: u64,
    /// Bytes of the walk.
    pub total_bytes: u64,
    /// Bytes written so far.
    pub written_bytes: u64,
}

/// What a restore did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Whether there was a file before, of which the rest was kept.
    pub in_place: bool,
}

impl Vault {
    /// Writes a snapshot's file to `path`. A new file gets its name when it is complete. In an existing one, what
    /// differs is overwritten in place: after an interruption it is neither the old nor the new file, until the
    /// restore is repeated.
    ///
    /// # Errors
    /// Damage; errors of the store and of the file.
    pub fn restore(
        &self,
        snapshot: &Snapshot,
        path: &Path,
        progress: &mut dyn FnMut(RestoreProgress),
    ) -> Result<Restored> {
        let fail = |doing: &'static str, path: &Path| {
            let path = path.to_path_buf();
            move |source: io::Error| VaultError::File {
                doing,
                path,
                source,
            }
        };
        let in_place = path.exists();
        let target = match in_place {
            true => path.to_path_buf(),
            false => unfinished(path),
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(!in_place)
            .open(&target)
            .map_err(fail("open", &target))?;
        let written = (|| {
            if in_place {
                let kind = file.metadata().map_err(fail("read", &target))?.file_type();
                if !kind.is_file() {
                    let why =
                        io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
                    return Err(fail("overwrite", &target)(why));
                }
            }
            file.set_len(snapshot.layout().file_len())
                .map_err(fail("write", &target))?;
            let job = Job {
                snapshot,
                file: &file,
                path: &target,
                in_place,
                next: AtomicU64::new(0),
                done: AtomicU64::new(0),
                written: AtomicU64::new(0),
                failed: AtomicBool::new(false),
            };
            let written = job.run(progress)?;
            file.sync_all().map_err(fail("sync", &target))?;
            if !in_place {
                std::fs::hard_link(&target, path).map_err(fail("create", path))?;
                std::fs::remove_file(&target).map_err(fail("remove", &target))?;
                sync_parent(path).map_err(fail("sync the directory of", path))?;
            }
            Ok(written)
        })();
        if written.is_err() && !in_place {
            let _ = std::fs::remove_file(&target);
        }
        Ok(Restored {
            file_bytes: snapshot.layout().file_len(),
            written_bytes: written?,
            in_place,
        })
    }
}

/// The name of a file until it is complete.
fn unfinished(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{:08x}.restore", fastrand::u32(..)))
}

struct Job<'a> {
    snapshot: &'a Snapshot,
    file: &'a File,
    path: &'a Path,
    in_place: bool,
    next: AtomicU64,
    done: AtomicU64,
    written: AtomicU64,
    failed: AtomicBool,
}

impl Job<'_> {
    fn run(&self, progress: &mut dyn FnMut(RestoreProgress)) -> Result<u64> {
        if self.in_place {
            self.punch_holes().map_err(|e| self.error("write", e))?;
        }
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
        std::thread::scope(|scope| {
            let (tell, told) = crossbeam_channel::bounded::<()>(1);
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    let tell = tell.clone();
                    scope.spawn(move || self.work(&tell))
                })
                .collect();
            drop(tell);
            for () in told {
                progress(self.progress());
            }
            let mut outcome = Ok(());
            for worker in workers {
                outcome = outcome.and(worker.join().map_err(|_| VaultError::Worker)?);
            }
            outcome
        })?;
        progress(self.progress());
        Ok(self.written.load(Ordering::Relaxed))
    }

    fn progress(&self) -> RestoreProgress {
        RestoreProgress {
            done_bytes: self.done.load(Ordering::Relaxed),
            total_bytes: self.snapshot.recipe().walk_blocks * BLOCK_SIZE as u64,
            written_bytes: self.written.load(Ordering::Relaxed),
        }
    }

    fn error(&self, doing: &'static str, source: io::Error) -> VaultError {
        VaultError::File {
            doing,
            path: self.path.to_path_buf(),
            source,
        }
    }

    fn work(&self, tell: &crossbeam_channel::Sender<()>) -> Result<()> {
        let mut buffers = (Vec::new(), Vec::new());
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.snapshot.segments() || self.failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let done = self.segment(number, &mut buffers);
            if done.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(done?, Ordering::Relaxed);
            let _ = tell.try_send(());
        }
    }

    /// Restores a segment; its length.
    fn segment(&self, number: u64, (have, bytes): &mut (Vec<u8>, Vec<u8>)) -> Result<u64> {
        let layout = self.snapshot.layout();
        let segment = self.snapshot.segment(number)?;
        let blocks = segment.digests.len();
        let offset = number * (SEGMENT_BLOCKS * BLOCK_SIZE) as u64;
        let mut wanted: Vec<bool> = segment.digests.iter().map(|d| d != &*ZERO_BLOCK).collect();
        if self.in_place {
            have.resize(blocks * BLOCK_SIZE, 0);
            layout
                .read(&Present(self.file, layout.file_len()), offset, have)
                .map_err(|e| self.error("read", e))?;
            let mut digests = Vec::with_capacity(blocks);
            self.snapshot.reader.digester().blocks(have, &mut digests);
            for (i, wanted) in wanted.iter_mut().enumerate() {
                *wanted = digests[i] != segment.digests[i];
            }
        }
        bytes.resize(blocks * BLOCK_SIZE, 0);
        self.snapshot.read_segment(&segment, |i| wanted[i], bytes)?;
        let mut at = 0;
        while at < blocks {
            let end = (at..blocks)
                .find(|&i| wanted[i] != wanted[at])
                .unwrap_or(blocks);
            if wanted[at] {
                let part = &bytes[at * BLOCK_SIZE..end * BLOCK_SIZE];
                self.write(layout, offset + (at * BLOCK_SIZE) as u64, part)?;
            }
            at = end;
        }
        Ok((blocks * BLOCK_SIZE) as u64)
    }

    fn write(&self, layout: &Layout, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut done = 0;
        for piece in layout.pieces(offset, bytes.len() as u64) {
            let part = &bytes[done..done + piece.len as usize];
            done += part.len();
            match piece.file {
                Some(at) => {
                    self.file
                        .write_all_at(part, at)
                        .map_err(|e| self.error("write", e))?;
                    self.written.fetch_add(part.len() as u64, Ordering::Relaxed);
                }
                None if is_zero(part) => {}
                None => {
                    let why = "the snapshot has data where its layout has none";
                    return Err(
                        self.error("write", io::Error::new(io::ErrorKind::InvalidData, why))
                    );
                }
            }
        }
        Ok(())
    }

    /// Makes zero what the snapshot's file has as holes.
    fn punch_holes(&self) -> io::Result<()> {
        let layout = self.snapshot.layout();
        let mut spans: Vec<Range<u64>> = layout.ranges().iter().map(|r| r.file_span()).collect();
        spans.sort_unstable_by_key(|s| s.start);
        let mut at = 0;
        for span in spans
            .into_iter()
            .chain(std::iter::once(layout.file_len()..layout.file_len()))
        {
            if at < span.start {
                self.zero(at..span.start)?;
            }
            at = at.max(span.end);
        }
        Ok(())
    }

    fn zero(&self, range: Range<u64>) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let len = range.end - range.start;
        match rustix::fs::fallocate(self.file, flags, range.start, len) {
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
            done => return Ok(done?),
        }
        let zeros = vec![0; 1 << 20];
        let mut at = range.start;
        while at < range.end {
            let n = (range.end - at).min(zeros.len() as u64) as usize;
            self.file.write_all_at(&zeros[..n], at)?;
            at += n as u64;
        }
        Ok(())
    }
}

/// A file that has its length already.
struct Present<'a>(&'a File, u64);

impl drover_core::ReadAt for Present<'_> {
    fn len(&self) -> u64 {
        self.1
    }
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buf, offset)
    }
}
