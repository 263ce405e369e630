//! Loop mounts that go away: at the end, after an error, and after a kill at the next start.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::jail;
use super::table::Fs;
use crate::shell;

/// An image that is mounted.
pub struct Mounted {
    /// Where.
    pub at: PathBuf,
    open: bool,
}

impl Mounted {
    /// Mounts an image at a new directory.
    ///
    /// # Errors
    /// When it cannot be: no root, no loop device, a file system that the kernel lacks.
    pub fn new(image: &Path, at: PathBuf, fs: Fs, read_only: bool) -> Result<Self> {
        fs::create_dir_all(&at)?;
        let options = match (read_only, fs) {
            (true, Fs::Ext4) => "ro,loop,noload",
            (true, Fs::Xfs) => "ro,loop,norecovery,nouuid",
            (true, Fs::Btrfs) => "ro,loop",
            // Inode tables are not zeroed in the background: how far that comes depends on time.
            (false, Fs::Ext4) => "loop,noatime,noinit_itable",
            (false, Fs::Xfs) => "loop,noatime,nouuid",
            (false, Fs::Btrfs) => "loop,noatime",
        };
        let mut command = Command::new("mount");
        command
            .args(["-t", &fs.to_string(), "-o", options])
            .arg(image)
            .arg(&at);
        jail::run(
            &format!("cannot mount {}", image.display()),
            &mut command,
            None,
        )?;
        Ok(Self { at, open: true })
    }

    /// Unmounts it: all that was written is in the image.
    ///
    /// # Errors
    /// When something holds it.
    pub fn close(mut self) -> Result<()> {
        unmount(&self.at)?;
        self.open = false;
        fs::remove_dir(&self.at)?;
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.open && unmount(&self.at).is_err() {
            eprintln!(
                "{} stays mounted; the next build tries again",
                self.at.display()
            );
        }
    }
}

fn unmount(at: &Path) -> Result<()> {
    let mut result = Ok(());
    for _ in 0..20 {
        match shell::run(Command::new("umount").arg(at)) {
            Ok(_) => return Ok(()),
            Err(error) => result = Err(error),
        }
        thread::sleep(Duration::from_millis(200));
    }
    result
}

/// Unmounts all that is mounted below a directory; returns how much it was.
///
/// # Errors
/// When something cannot be unmounted.
pub fn unmount_below(dir: &Path) -> Result<usize> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut below: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .map(|at| PathBuf::from(at.replace("\\040", " ")))
        .filter(|at| at.starts_with(dir))
        .collect();
    below.reverse();
    for at in &below {
        if shell::run(Command::new("umount").arg(at)).is_err() {
            shell::run(Command::new("umount").arg("-l").arg(at))
                .with_context(|| format!("{} is mounted and stays so", at.display()))?;
        }
    }
    Ok(below.len())
}

/// The loop device that an image is attached to, if it can be written through it.
///
/// # Errors
/// When `losetup` fails.
pub fn writable_loop(image: &Path) -> Result<Option<String>> {
    Ok(loops_of(image)?
        .into_iter()
        .find(|(_, read_only)| !read_only)
        .map(|(device, _)| device))
}

/// Fails when an image can change under one who reads it.
///
/// # Errors
/// When it is attached to a loop device for writing.
pub fn check_still(image: &Path) -> Result<()> {
    if let Some(device) = writable_loop(image)? {
        bail!(
            "{} is in use: attached to {device} for writing; unmount it first",
            image.display()
        );
    }
    Ok(())
}

/// Detaches loop devices of a file, if nothing holds them.
///
/// # Errors
/// When one cannot be detached.
pub fn detach(image: &Path) -> Result<usize> {
    let loops = loops_of(image)?;
    for (device, _) in &loops {
        shell::run(Command::new("losetup").args(["-d", device]))?;
    }
    Ok(loops.len())
}

fn loops_of(image: &Path) -> Result<Vec<(String, bool)>> {
    if !shell::have("losetup") || !Path::new("/dev/loop-control").exists() {
        return Ok(Vec::new());
    }
    let output = shell::run(
        Command::new("losetup")
            .args(["--noheadings", "--raw", "--output", "NAME,RO", "-j"])
            .arg(image),
    )?;
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.trim().rsplit_once(' '))
        .map(|(device, ro)| (device.trim().to_owned(), ro == "1"))
        .collect())
}
