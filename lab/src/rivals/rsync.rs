//! rsync to a daemon at the far end, with settings that suit disk images.
//!
//! One process at each end does all the work: rsync has no threads except zstd's, and a single connection.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::Running;
use super::tool;
use crate::site::Where;

/// The daemon's module.
const MODULE: &str = "lab";
/// Where the daemon finds the basis, under the name of the incoming image.
const BASIS: &str = ".basis";
// `--block-size=8192`, two blocks of most file systems: between images of the library, 4 KiB saves 1 to 3 MB of data
// but costs 2 MB of checksums, which the far end sends before any data moves; rsync's default, 46 KiB for 2 GiB, needs
// up to twice the bytes.
/// rsync's mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `--whole-file`: plain copying.
    Whole,
    /// The same, synced to disk.
    WholeSynced,
    /// The delta algorithm against the basis, compressed by zstd.
    Delta,
    /// No delta, compressed by zstd.
    Compressed,
}

impl Mode {
    // All but the first: `--sparse`, because otherwise the far end waits for writing an image's zeros to disk, and
    // `--fsync`, because delivered data must survive a power cut. zstd uses its default level; higher ones save a few
    // percent, but take longer than the link from 100 Mbit/s on.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Whole => &["--whole-file"],
            Self::WholeSynced => &["--whole-file", "--sparse", "--fsync"],
            Self::Delta => &[
                "--no-whole-file",
                "--block-size=8192",
                "-z",
                "--zc=zstd",
                "--zl=3",
                "--sparse",
                "--fsync",
            ],
            Self::Compressed => &[
                "--whole-file",
                "-z",
                "--zc=zstd",
                "--zl=3",
                "--sparse",
                "--fsync",
            ],
        }
    }
}

/// rsync with the settings of a rival.
pub struct Tuned {
    name: &'static str,
    mode: Mode,
    program: &'static str,
    limit: Limit,
}

impl Tuned {
    /// Plain copying.
    pub const WHOLE: Self = Self::new("rsync-whole", Mode::WholeSynced);
    /// The delta algorithm.
    pub const DELTA: Self = Self::new("rsync-delta", Mode::Delta);
    /// Only compression.
    pub const ZSTD: Self = Self::new("rsync-zstd", Mode::Compressed);

    const fn new(name: &'static str, mode: Mode) -> Self {
        Self {
            name,
            mode,
            program: "rsync",
            limit: Limit::USUAL,
        }
    }

    /// The same with another program and another limit.
    #[cfg(test)]
    pub fn with(self, program: &'static str, limit: Limit) -> Self {
        Self {
            program,
            limit,
            ..self
        }
    }
}

impl Rival for Tuned {
    fn name(&self) -> &'static str {
        self.name
    }

    fn settings(&self) -> String {
        let mut options = self.mode.options().join(" ");
        match threads(self.mode, self.program) {
            1 => {}
            threads => options.push_str(&format!(" --compress-threads={threads}")),
        }
        match self.mode {
            Mode::Delta => format!(
                "rsync {options} --ignore-times --compare-dest={BASIS} IMAGE rsync://FAR/{MODULE}/ \
                 (the most similar image is linked there under the new one's name)"
            ),
            _ => format!("rsync {options} IMAGE rsync://FAR/{MODULE}/"),
        }
    }

    fn version(&self) -> Result<String, String> {
        let said = tool::ask(self.program, &["--version"])?;
        let compresses = matches!(self.mode, Mode::Delta | Mode::Compressed);
        if compresses && !said.split_whitespace().any(|word| word == "zstd") {
            return Err("rsync is built without zstd".to_owned());
        }
        tool::version(self.program, &["--version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        Ok(Box::new(Rsync::with(self.mode, self.program, ends)?))
    }
}

/// rsync to a daemon that runs until this is dropped.
pub struct Rsync<'a> {
    mode: Mode,
    program: &'static str,
    ends: Ends<'a>,
    port: u16,
    /// Number of zstd threads, if rsync supports the option and compresses.
    threads: usize,
    _daemon: Running,
}

/// Number of cores, for zstd; rsync has the option since 3.3.
fn threads(mode: Mode, program: &str) -> usize {
    let compresses = mode.options().contains(&"-z");
    let can =
        || tool::ask(program, &["--help"]).is_ok_and(|help| help.contains("--compress-threads"));
    match std::thread::available_parallelism() {
        Ok(cores) if compresses && can() => cores.get(),
        _ => 1,
    }
}

impl<'a> Rsync<'a> {
    /// Starts a daemon that stores below `dir`.
    ///
    /// # Errors
    /// When rsync is missing or its daemon does not start.
    pub fn start(mode: Mode, dir: &Path, place: Where<'a>) -> Result<Self> {
        tool::needs(&["rsync"]).map_err(|missing| anyhow!(missing))?;
        Self::with(mode, "rsync", Ends::new(place, dir, Limit::USUAL)?)
    }

    fn with(mode: Mode, program: &'static str, ends: Ends<'a>) -> Result<Self> {
        let config = ends.far_dir().join("rsyncd.conf");
        // Without changing its user, the daemon also works in a test without root.
        let ids = if rustix::process::geteuid().is_root() {
            "uid = 0\ngid = 0\n"
        } else {
            ""
        };
        fs::write(
            &config,
            format!(
                "use chroot = no\nmax verbosity = 0\n[{MODULE}]\npath = {}\nread only = no\n{ids}",
                ends.images().display()
            ),
        )?;
        fs::create_dir_all(ends.images().join(BASIS))?;
        let (daemon, port) = ends.listen("rsync daemon", |port| {
            let mut command = ends.far(program);
            command
                .args(["--daemon", "--no-detach", "--port", &port.to_string()])
                .args(["--address", ends.far_address(), "--log-file=/dev/null"])
                .arg("--config")
                .arg(&config);
            command
        })?;
        Ok(Self {
            mode,
            program,
            threads: threads(mode, program),
            ends,
            port,
            _daemon: daemon,
        })
    }

    /// Links the basis to where the daemon looks for a similar file, which is found by name.
    fn offer(&self, image: &Path, basis: &Path) -> Result<PathBuf> {
        let link = self
            .ends
            .images()
            .join(BASIS)
            .join(image.file_name().unwrap_or_default());
        let _ = fs::remove_file(&link);
        fs::hard_link(basis, &link)
            .or_else(|_| std::os::unix::fs::symlink(basis, &link))
            .with_context(|| format!("cannot link {}", basis.display()))?;
        Ok(link)
    }
}

impl Carrier for Rsync<'_> {
    fn carry(&mut self, image: &Path, basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let _ = fs::remove_file(self.delivered(image));
        let mut command = self.ends.near(self.program);
        command.args(self.mode.options());
        if self.threads > 1 {
            command.arg(format!("--compress-threads={}", self.threads));
        }
        let link = match basis {
            Some(basis) if self.mode == Mode::Delta => {
                // Otherwise a file of equal size and time would be taken for the image itself.
                command.args(["--ignore-times", &format!("--compare-dest={BASIS}")]);
                Some(self.offer(image, basis)?)
            }
            _ => None,
        };
        let url = format!(
            "rsync://{}:{}/{MODULE}/",
            self.ends.far_address(),
            self.port
        );
        command.arg(image).arg(url);
        let started = Instant::now();
        self.ends.run(self.program, &mut command, deadline)?;
        let seconds = started.elapsed().as_secs_f64();
        if let Some(link) = link {
            fs::remove_file(link)?;
        }
        Ok(seconds)
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
