//! What time does to a machine: packages come, files are rewritten, moved and deleted, logs grow.

use std::fs::{self, File, FileTimes};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{Dirs, Manifest, ext4, manifest_of, part_of};
use crate::shell;

/// Packages that an administrator adds in the first week.
const ADDED: &[&str] = &["vim", "tmux", "htop", "curl", "rsync"];
/// How much the logs have grown.
const LOG_BYTES: usize = 48 << 20;
const SEED: u64 = 0x0061_6765;

/// Copies an image of the library and ages the copy through a loop mount.
pub fn make(dirs: &Dirs, name: &str, aged: &str) -> Result<Manifest> {
    if !rustix::process::geteuid().is_root() {
        bail!("needs root to mount an image");
    }
    let from = dirs.image(name);
    if !from.exists() {
        bail!("{} is not built yet: lab library", from.display());
    }
    let part = part_of(dirs, aged);
    shell::run(
        Command::new("cp")
            .args(["--sparse=always", "--reflink=auto"])
            .arg(&from)
            .arg(&part),
    )?;
    let mounted = Mounted::new(&part, dirs.work.join(aged))?;
    let root = mounted.at.as_path();

    let added = match add_packages(root) {
        Ok(()) => format!(", {} added", ADDED.join(" ")),
        Err(error) => {
            eprintln!("SKIP adding packages to {aged}: {error:#}");
            String::new()
        }
    };
    let changed = churn(root)?;
    grow_logs(&root.join("var/log"))?;
    mounted.close()?;

    let recipe = format!("{name} aged: {changed} files changed, logs grown{added}");
    manifest_of(aged, recipe, &part, Vec::new())
}

/// A loop mount that goes away however the work ends.
struct Mounted {
    at: PathBuf,
    open: bool,
}

impl Mounted {
    fn new(image: &Path, at: PathBuf) -> Result<Self> {
        fs::create_dir_all(&at)?;
        shell::run(
            Command::new("mount")
                .args(["-o", "loop"])
                .arg(image)
                .arg(&at),
        )?;
        Ok(Self { at, open: true })
    }

    fn close(mut self) -> Result<()> {
        self.open = false;
        shell::run(Command::new("umount").arg(&self.at)).context("the aged image stays mounted")?;
        fs::remove_dir(&self.at)?;
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.open {
            let _ = Command::new("umount").arg("-l").arg(&self.at).status();
        }
    }
}

fn add_packages(root: &Path) -> Result<()> {
    let resolv = root.join("etc/resolv.conf");
    let kept = fs::read(&resolv).unwrap_or_default();
    fs::copy("/etc/resolv.conf", &resolv)?;
    let in_root = |args: &[&str]| {
        shell::run(
            Command::new("chroot")
                .arg(root)
                .args(args)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    };
    let result = in_root(&["apt-get", "-qq", "update"]).and_then(|_| {
        let mut install = vec!["apt-get", "-qq", "-y", "--no-install-recommends", "install"];
        install.extend(ADDED);
        in_root(&install)
    });
    fs::write(&resolv, kept)?;
    result.map(drop)
}

/// Rewrites, moves and deletes some of the files below /usr/share and /etc; returns how many.
fn churn(root: &Path) -> Result<usize> {
    let mut files = Vec::new();
    for dir in ["usr/share", "etc", "var/lib"] {
        regular_files(&root.join(dir), &mut files);
    }
    files.sort();
    let mut changed = 0;
    for path in files {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let key = blake3::hash(relative.as_os_str().as_encoded_bytes()).as_bytes()[0];
        let aside = path.with_extension("drover-lab");
        match key {
            // An editor's or an upgrade's way to write: a new file with the old content, elsewhere on the disk.
            0..6 => {
                fs::copy(&path, &aside)?;
                fs::rename(&aside, &path)?;
            }
            6..8 => {
                let mut file = File::options().append(true).open(&path)?;
                writeln!(file, "# edited by an administrator")?;
            }
            8..10 => fs::rename(&path, path.with_extension("old"))?,
            10..12 if relative.starts_with("usr/share/doc") => fs::remove_file(&path)?,
            _ => continue,
        }
        changed += 1;
    }
    Ok(changed)
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

fn grow_logs(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let mut rng = fastrand::Rng::with_seed(SEED);
    let epoch = ext4::EPOCH;
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(epoch);
    for (name, share) in [("syslog", 6), ("auth.log", 3), ("kern.log", 1)] {
        let mut file = BufWriter::new(File::create(dir.join(name))?);
        let mut clock = epoch;
        let mut written = 0;
        while written < LOG_BYTES / 10 * share {
            clock += rng.u64(0..30);
            let line = log_line(&mut rng, clock);
            file.write_all(line.as_bytes())?;
            written += line.len();
        }
        let file = file.into_inner().map_err(|e| e.into_error())?;
        file.set_times(FileTimes::new().set_accessed(time).set_modified(time))?;
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
            rng.u8(..),
            rng.u16(1024..)
        ),
    }
}
