//! Room that is kept back, so that a full disk never blocks its own cleanup.
//!
//! A home has a file of [`BYTES`] that holds nothing, `reserve`. Whatever makes room or takes a right away (`rm`,
//! `mounts break`, `peers forget`, and for its own sake `ticket`) needs a little room first: for the catalog's log, a
//! lease's new file. Such a command does its work inside a [`CleanUp`]; when that fails on a full disk, the reserve is
//! given up in two steps, the work is tried again after each, and the reserve is made anew at the end, of what there
//! is then. A running site does the same for what it is asked to clear up, and looks after the file every
//! [`LOOK_EVERY`]. While anybody has given some of it up, in whatever process, nobody makes it whole: a lock on the file
//! says so. Commands that only look never touch it.
//!
//! How a command uses it:
//!
//! ```text
//! let mut room = CleanUp::of(home);                   // before the catalog: dropped last
//! let catalog = room.run(|| site::open_catalog(home))?;
//! ...ask the user...
//! room.run_async(|| async { /* what can be done twice */ }).await?;
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

use drover_net::Code;
use drover_store::CatalogError;
use drover_teleport::TeleportError;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, statvfs};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

use super::Home;
use crate::error::{Error, Result, chain};

/// The file's size: room for the catalog's log and its spare copy, and for what else is written beside them.
pub const BYTES: u64 = 8 << 20;

/// How often a running site looks whether the reserve is whole.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);

/// What is taken at once.
const STEP: u64 = 256 << 10;

/// A file system with less room than this is full.
const FULL: u64 = 1 << 20;

impl Home {
    /// Where the reserve is.
    pub fn reserve_path(&self) -> PathBuf {
        self.dir.join("reserve")
    }

    /// Makes the reserve, or makes it whole again as far as there is room, unless somebody clears up with it. A directory that is not a home yet, such as
    /// one named by mistake, gets none.
    ///
    /// # Errors
    /// When the file cannot be written; a full disk is none.
    pub fn keep_reserve(&self) -> io::Result<()> {
        if !self.dir.join("identity.key").is_file() {
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
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path);
        let filled =
            file.and_then(
                |file| match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Err(Errno::WOULDBLOCK) => Ok(()),
                    // Where there are no locks it is kept all the same.
                    _ => fill(&file),
                },
            );
        match filled {
            Err(e) if is_full_kind(&e) => Ok(()),
            other => other,
        }
    }

    /// [`keep_reserve`](Self::keep_reserve) for whom it is not the purpose: what goes wrong is only logged.
    pub fn try_keep_reserve(&self) {
        if let Err(e) = self.keep_reserve() {
            let path = self.reserve_path();
            tracing::warn!("cannot keep a reserve in {}: {e}", path.display());
        }
    }

    /// Keeps everybody from making the reserve whole for as long as the file is open; none where there is no reserve, or
    /// no locks.
    fn hold_reserve(&self) -> Option<File> {
        let file = File::open(self.reserve_path()).ok()?;
        // Waits for who is filling it just now.
        flock(&file, FlockOperation::LockShared).ok()?;
        Some(file)
    }

    /// Gives up half of the reserve, or all of it.
    fn release_reserve(&self, all: bool) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.reserve_path())?;
        file.set_len(if all { 0 } else { BYTES / 2 })?;
        // Some file systems give the blocks to others only now.
        file.sync_all()
    }

    /// Whether the home's file system has no room left to work with.
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

/// Allocates what is missing of the reserve, until the disk is full.
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
            // Bytes that no file system can make smaller.
            let mut noise = vec![0; STEP as usize];
            rustix::rand::getrandom(&mut noise, GetRandomFlags::empty())?;
            file.write_all_at(&noise, at)
        }
        other => Ok(other?),
    }
}

fn is_full_kind(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Whether an error says that a disk is full.
fn says_full(error: &Error) -> bool {
    chain(error).any(|cause| {
        if let Some(e) = cause.downcast_ref::<io::Error>() {
            return is_full_kind(e);
        }
        if let Some(e) = cause.downcast_ref::<TeleportError>() {
            return e.refusal() == Some(Code::NoSpace);
        }
        cause
            .downcast_ref::<CatalogError>()
            .is_some_and(CatalogError::is_full)
    })
}

/// Work that clears up, and may use the [reserve](self) for it.
pub struct CleanUp {
    home: Home,
    /// Steps of the reserve that were given up: none, half, all.
    steps: u8,
    /// Once some was: keeps others from making it whole.
    held: Option<File>,
}

impl CleanUp {
    /// Begins in a home; nothing is given up yet.
    pub fn of(home: &Home) -> CleanUp {
        CleanUp {
            home: home.clone(),
            steps: 0,
            held: None,
        }
    }

    /// Does `job`, and again with more room when it failed for a full disk.
    ///
    /// # Errors
    /// What the job reports, at last with all of the reserve given up.
    pub fn run<T>(&mut self, mut job: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match job() {
                Err(e) if self.makes_room(&e) => {}
                done => return done,
            }
        }
    }

    /// The same for a job that waits.
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

    /// Whether `error` came of a full disk and there is more room now.
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
        // Whoever still clears up makes it whole in the end.
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
        assert_eq!(size(&home), Some(BYTES), "made anew");
        let mut tries = 0;
        let mut room = CleanUp::of(&home);
        let failed: Result<()> = room.run(|| {
            tries += 1;
            crate::error::bail!("no such image")
        });
        assert!(failed.is_err() && tries == 1 && size(&home) == Some(BYTES));
    }

    #[test]
    fn it_is_not_made_whole_while_somebody_clears_up_with_it() {
        let (_tmp, home) = home(true);
        home.keep_reserve().unwrap();
        // As the running site does, in the midst of the work of others.
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
