//! What else carries an image from here to there. Each with its own best settings, behind one trait.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::site::Where;

/// A tool that can carry images from one machine to another, with its best settings.
pub trait Rival: Sync {
    /// A short name, fit for a file name: `rsync-delta`.
    fn name(&self) -> &'static str;

    /// How it is called, for the document: the commands with their options.
    fn settings(&self) -> String;

    /// Its version, or what is missing here.
    ///
    /// # Errors
    /// The reason why it is skipped, in words.
    fn version(&self) -> Result<String, String>;

    /// Bytes that it will send about, so that a plan can be made.
    fn expected_bytes(&self, image: &Weight) -> u64;

    /// Sets up both ends, everything of the far one below `dir`. Not timed.
    ///
    /// # Errors
    /// When an end does not come up.
    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>>;
}

/// A rival that is set up at both ends. What it has carried stays at the far end and may serve later images.
pub trait Carrier {
    /// Carries `image` to the far end; returns the seconds from the command until the whole file is there and the
    /// tool has said so. `basis` is the most similar of the images that the far end has, for tools that take one.
    ///
    /// # Errors
    /// When a command fails; what it said is in the error.
    fn carry(&mut self, image: &Path, basis: Option<&Path>) -> Result<f64>;

    /// Where the image is after [`Carrier::carry`].
    fn delivered(&self, image: &Path) -> PathBuf;
}

/// What an image weighs, for estimates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its size, holes included.
    pub size_bytes: u64,
    /// Its non-zero blocks.
    pub data_bytes: u64,
    /// Its limit: unique blocks, compressed.
    pub limit_bytes: u64,
}

/// How rsync is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `--whole-file`: nothing but copying.
    Whole,
    /// The same, on disk when it says that it is done.
    WholeSynced,
    /// The delta algorithm against the basis, compressed by zstd.
    Delta,
    /// No delta, compressed by zstd.
    Compressed,
}

/// rsync to a daemon at the far end.
pub struct Rsync<'a> {
    mode: Mode,
    place: Where<'a>,
    daemon: Child,
    port: u16,
    store: PathBuf,
}

impl<'a> Rsync<'a> {
    /// Starts a daemon that stores below `dir`.
    ///
    /// # Errors
    /// When rsync is absent or its daemon does not come up.
    pub fn start(mode: Mode, dir: &Path, place: Where<'a>) -> Result<Self> {
        if !shell::have("rsync") {
            bail!("rsync is not installed");
        }
        let store = dir.join("store");
        fs::create_dir_all(&store)?;
        let store = store.canonicalize()?;
        let port = free_port()?;
        let config = dir.join("rsyncd.conf");
        // Without a change of user the daemon works in a test without root, too.
        let ids = if rustix::process::geteuid().is_root() {
            "uid = 0\ngid = 0\n"
        } else {
            ""
        };
        fs::write(
            &config,
            format!(
                "use chroot = no\nmax verbosity = 0\n[lab]\npath = {}\nread only = no\n{ids}",
                store.display()
            ),
        )?;
        let mut daemon = place
            .far(Path::new("rsync"))
            .args(["--daemon", "--no-detach", "--port", &port.to_string()])
            .args([
                "--address",
                place.far_address(),
                "--log-file=/dev/null",
                "--config",
            ])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start the rsync daemon")?;
        wait_for_port(place, port, &mut daemon)?;
        Ok(Self {
            mode,
            place,
            daemon,
            port,
            store,
        })
    }

    fn options(&self) -> &'static [&'static str] {
        match self.mode {
            Mode::Whole => &["--whole-file"],
            Mode::WholeSynced => &["--whole-file", "--fsync"],
            Mode::Delta => &["--no-whole-file", "-z", "--zc=zstd", "--zl=3", "--fsync"],
            Mode::Compressed => &["--whole-file", "-z", "--zc=zstd", "--zl=3", "--fsync"],
        }
    }
}

impl Rsync<'_> {
    /// Its name with its settings.
    pub fn name(&self) -> String {
        format!("rsync {}", self.options().join(" "))
    }
}

impl Carrier for Rsync<'_> {
    fn carry(&mut self, image: &Path, basis: Option<&Path>) -> Result<f64> {
        let target = self.delivered(image);
        let _ = fs::remove_file(&target);
        if let (Mode::Delta, Some(basis)) = (self.mode, basis) {
            // The delta algorithm takes the file of the same name as its basis.
            shell::run(
                Command::new("cp")
                    .arg("--sparse=always")
                    .arg(basis)
                    .arg(&target),
            )?;
            let old = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
            fs::File::options()
                .append(true)
                .open(&target)?
                .set_times(old)?;
        }
        let url = format!("rsync://{}:{}/lab/", self.place.far_address(), self.port);
        let mut command = self.place.near(Path::new("rsync"));
        command.args(self.options()).arg(image).arg(url);
        let started = Instant::now();
        shell::run(&mut command)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.store.join(image.file_name().unwrap_or_default())
    }
}

impl Drop for Rsync<'_> {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn wait_for_port(place: Where<'_>, port: u16, daemon: &mut Child) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if let Some(status) = daemon.try_wait()? {
            bail!("the rsync daemon ended: {status}");
        }
        let up = match place {
            Where::Loopback => TcpStream::connect(("127.0.0.1", port)).is_ok(),
            // The far end's sockets are in another namespace: ask its own rsync.
            Where::Over(_) => place
                .near(Path::new("rsync"))
                .arg(format!("rsync://{}:{port}/", place.far_address()))
                .output()
                .is_ok_and(|output| output.status.success()),
        };
        if up {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("the rsync daemon does not listen");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::same::identical;

    #[test]
    fn every_mode_of_rsync_delivers_the_same_bytes() {
        if !shell::have("rsync") {
            eprintln!("SKIP every_mode_of_rsync_delivers_the_same_bytes: no rsync");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (image, basis) = (dir.path().join("image"), dir.path().join("basis"));
        let mut rng = fastrand::Rng::with_seed(1);
        let mut content: Vec<u8> = (0..300_000).map(|_| rng.u8(..)).collect();
        fs::write(&basis, &content).unwrap();
        content[150_000..150_100].fill(7);
        fs::write(&image, &content).unwrap();
        for mode in [
            Mode::Whole,
            Mode::WholeSynced,
            Mode::Delta,
            Mode::Compressed,
        ] {
            let mut rsync = Rsync::start(mode, &dir.path().join("far"), Where::Loopback).unwrap();
            let seconds = rsync.carry(&image, Some(&basis)).unwrap();
            assert!(seconds > 0.0);
            assert!(
                identical(&image, &rsync.delivered(&image)).unwrap(),
                "{mode:?}"
            );
        }
    }
}
