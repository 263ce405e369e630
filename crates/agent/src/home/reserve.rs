//! Reserved disk space, so that a full disk never blocks its own cleanup.
//!
//! Each home has a file `reserve` of [`BYTES`] without content. Commands that free space or revoke a right (`rm`,
//! `mounts break`, `peers forget`, and also `ticket`) need a little space first: for the catalog's write-ahead log or a
//! new lease file. Such a command works inside a [`CleanUp`]; when it fails because the disk is full, the reserve is
//! released in two steps, the work is retried after each, and the reserve is refilled at the end from what is then
//! free. A running site does the same for cleanup requests, and checks the file every [`LOOK_EVERY`]. While any process
//! has part of the reserve released, a lock on the file prevents refilling it. Read-only commands never touch it.
//!
//! How a command uses it:
//!
//! ```text
//! let mut room = CleanUp::of(home);                   // before the catalog: dropped last
//! let catalog = room.run(|| site::open_catalog(home))?;
//! ...ask the user...
//! room.run_async(|| async { /* must be idempotent */ }).await?;
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use drover_core::is_disk_full;
use drover_net::Code;
use drover_storage::open_private;
use drover_store::CatalogError;
use drover_teleport::TeleportError;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, statvfs};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

use super::Home;
use crate::error::{Error, Result, chain};

/// Size of the reserve: room for the catalog's log and its spare copy, and whatever else is written next to them.
pub const BYTES: u64 = 8 << 20;

/// How often a running site checks that the reserve is full.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Allocation step.
const STEP: u64 = 256 << 10;

/// A file system with less free space than this counts as full.
const FULL: u64 = 1 << 20;

impl Home {
    /// Path of the reserve.
    pub fn reserve_path(&self) -> PathBuf {
        self.site_dir().join("reserve")
    }

    /// Creates the reserve, or refills it as far as there is space, unless a cleanup has part of it released. A
    /// directory that is not a home yet, such as one named by mistake, gets none.
    ///
    /// # Errors
    /// When the file cannot be written; a full disk is not an error.
    pub fn keep_reserve(&self) -> io::Result<()> {
        if !self.site_dir().join("identity.key").is_file() {
            return Ok(());
        }
        let path = self.reserve_path();
        let has = match path.metadata() {
            Ok(about) => about.len().min(about.blocks() * 512),
            Err(_) => 0,
        };
        if has >= BYTES {
            return Ok(());
        }
        let filled = open_private(&path).and_then(|file| {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => Ok(()),
                // Without lock support, keep it anyway.
                _ => fill(&file),
            }
        });
        match filled {
            Err(e) if is_disk_full(&e) => Ok(()),
            other => other,
        }
    }

    /// [`keep_reserve`](Self::keep_reserve), but errors are only logged.
    pub fn try_keep_reserve(&self) {
        if let Err(e) = self.keep_reserve() {
            let path = self.reserve_path();
            tracing::warn!("cannot keep a reserve in {}: {e}", path.display());
        }
    }

    /// Prevents refilling for as long as the returned file is open; `None` without a reserve or without lock support.
    fn hold_reserve(&self) -> Option<File> {
        let file = File::open(self.reserve_path()).ok()?;
        // Waits for a process that is refilling it.
        flock(&file, FlockOperation::LockShared).ok()?;
        Some(file)
    }

    /// Releases half of the reserve, or all of it.
    fn release_reserve(&self, all: bool) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.reserve_path())?;
        file.set_len(if all { 0 } else { BYTES / 2 })?;
        // Some file systems free the blocks only on sync.
        file.sync_all()
    }

    /// Whether the home's file system is full.
    pub fn is_full(&self) -> bool {
        let Ok(fs) = statvfs(&self.dir) else {
            return false;
        };
        let blocks = match rustix::process::geteuid().is_root() {
            true => fs.f_bfree,
            false => fs.f_bavail,
        };
        blocks.saturating_mul(fs.f_frsize) < FULL
    }
}

/// Allocates the missing part of the reserve, until the disk is full.
fn fill(file: &File) -> io::Result<()> {
    for at in (0..BYTES).step_by(STEP as usize) {
        if let Err(e) = allocate(file, at) {
            file.set_len(at)?;
            return Err(e);
        }
    }
    file.sync_all()
}

fn allocate(file: &File, at: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), at, STEP) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            // Incompressible, for file systems that compress.
            let mut noise = vec![0; STEP as usize];
            rustix::rand::getrandom(&mut noise, GetRandomFlags::empty())?;
            file.write_all_at(&noise, at)
        }
        other => Ok(other?),
    }
}

/// Whether an error means that a disk is full.
fn says_full(error: &Error) -> bool {
    chain(error).any(|cause| {
        if let Some(e) = cause.downcast_ref::<io::Error>() {
            return is_disk_full(e);
        }
        if let Some(e) = cause.downcast_ref::<TeleportError>() {
            return e.refusal() == Some(Code::NoSpace);
        }
        cause
            .downcast_ref::<CatalogError>()
            .is_some_and(CatalogError::is_full)
    })
}

/// Cleanup work that may use the reserve.
pub struct CleanUp {
    home: Home,
    /// Steps of the reserve released so far: none, half, all.
    steps: u8,
    /// Set once some is released: prevents refilling.
    held: Option<File>,
}

impl CleanUp {
    /// Starts in a home; nothing is released yet.
    pub fn of(home: &Home) -> CleanUp {
        CleanUp {
            home: home.clone(),
            steps: 0,
            held: None,
        }
    }

    /// Runs `job`, and retries with more space when it failed because the disk is full.
    ///
    /// # Errors
    /// The job's error, in the end with all of the reserve released.
    pub fn run<T>(&mut self, mut job: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match job() {
                Err(e) if self.makes_room(&e) => {}
                done => return done,
            }
        }
    }

    /// The same for an async job.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_async<T, F: Future<Output = Result<T>>>(
        &mut self,
        mut job: impl FnMut() -> F,
    ) -> Result<T> {
        loop {
            match job().await {
                Err(e) if tokio::task::block_in_place(|| self.makes_room(&e)) => {}
                done => return done,
            }
        }
    }

    /// Whether `error` means a full disk and more space has been released.
    fn makes_room(&mut self, error: &Error) -> bool {
        if self.steps >= 2 || !(says_full(error) || self.home.is_full()) {
            return false;
        }
        self.steps += 1;
        if self.held.is_none() {
            self.held = self.home.hold_reserve();
        }
        let released = self.home.release_reserve(self.steps == 2);
        if let Err(e) = &released
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("{}: {e}", self.home.reserve_path().display());
        }
        released.is_ok()
    }
}

impl Drop for CleanUp {
    fn drop(&mut self) {
        // If another cleanup is still running, it refills the reserve when it ends.
        self.held = None;
        self.home.try_keep_reserve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(real: bool) -> (tempfile::TempDir, Home) {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().join("h")).unwrap();
        if real {
            home.identity().unwrap();
        }
        (tmp, home)
    }

    fn size(home: &Home) -> Option<u64> {
        home.reserve_path().metadata().ok().map(|m| m.len())
    }

    #[test]
    fn only_a_home_has_a_reserve_and_it_is_allocated() {
        let (_tmp, typo) = home(false);
        typo.keep_reserve().unwrap();
        drop(CleanUp::of(&typo));
        assert_eq!(size(&typo), None);
        let (_tmp, real) = home(true);
        real.keep_reserve().unwrap();
        assert_eq!(size(&real), Some(BYTES));
        let blocks = real.reserve_path().metadata().unwrap().blocks();
        assert!(blocks * 512 >= BYTES, "{blocks} blocks of 512");
    }

    #[test]
    fn a_full_disk_gives_it_up_in_steps_and_any_other_error_does_not() {
        let (_tmp, home) = home(true);
        home.keep_reserve().unwrap();
        let mut seen = Vec::new();
        let full = || Error::from(io::Error::from(io::ErrorKind::StorageFull)).context("writing");
        let mut room = CleanUp::of(&home);
        let failed: Result<()> = room.run(|| {
            seen.push(size(&home));
            Err(full())
        });
        assert!(says_full(&failed.unwrap_err()));
        assert_eq!(seen, [Some(BYTES), Some(BYTES / 2), Some(0)]);
        drop(room);
        assert_eq!(size(&home), Some(BYTES), "recreated");
        let mut tries = 0;
        let mut room = CleanUp::of(&home);
        let failed: Result<()> = room.run(|| {
            tries += 1;
            crate::error::bail!("no such image")
        });
        assert!(failed.is_err() && tries == 1 && size(&home) == Some(BYTES));
    }

    #[test]
    fn it_is_not_refilled_during_another_cleanup() {
        let (_tmp, home) = home(true);
        home.keep_reserve().unwrap();
        // Like the running site, in the middle of other work.
        let look = || {
            home.keep_reserve().unwrap();
            size(&home)
        };
        let full = || Error::from(io::Error::from(io::ErrorKind::StorageFull));
        let mut seen = Vec::new();
        let mut room = CleanUp::of(&home);
        let failed: Result<()> = room.run(|| {
            seen.push(look());
            Err(full())
        });
        assert!(failed.is_err());
        assert_eq!(seen, [Some(BYTES), Some(BYTES / 2), Some(0)]);
        let mut other = CleanUp::of(&home);
        let failed: Result<()> = other.run(|| Err(full()));
        assert!(failed.is_err());
        drop(room);
        assert_eq!(look(), Some(0), "the other is not done");
        drop(other);
        assert_eq!(size(&home), Some(BYTES));
    }
}
