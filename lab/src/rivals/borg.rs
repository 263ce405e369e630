//! Borg: a backup to a repository at the far end, extracted there.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::{Deadline, Running};
use super::tool;
use crate::site::Where;

/// Borg over a TCP connection in place of ssh.
///
/// Compression is zstd at its default level. Encryption uses BLAKE2 keys, borg's fastest mode, since restic and drover
/// encrypt, too. Borg is single-threaded. Chunks of 64 KiB on average need a tenth more bytes for the first image than
/// borg's default of 2 MiB, or than its fixed blocks for disks, and half as many for a similar image.
pub struct Borg {
    pub(super) program: &'static str,
    pub(super) limit: Limit,
}

impl Borg {
    /// The best settings, as described above.
    pub const BEST: Self = Self {
        program: "borg",
        limit: Limit::USUAL,
    };
}

const CREATE: &[&str] = &[
    "create",
    "--compression",
    "zstd,3",
    "--chunker-params",
    CHUNKER,
    "--files-cache",
    "disabled",
];
const CHUNKER: &str = "buzhash,10,23,16,4095";
const PASSWORD: &str = "thrown away";
const SETUP: Duration = Duration::from_secs(60);

impl Rival for Borg {
    fn name(&self) -> &'static str {
        "borg"
    }

    fn settings(&self) -> String {
        format!(
            "borg init --encryption repokey-blake2; borg {} ssh://FAR/./repo::N IMAGE; \
             borg extract --sparse REPO::N; sync FILE",
            CREATE.join(" ")
        )
    }

    fn version(&self) -> Result<String, String> {
        tool::needs(&["socat"])?;
        tool::version(self.program, &["--version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        let repository = ends.far_dir().join("repo");
        if !repository.exists() {
            let mut command = borg(ends.far(self.program), &ends.far_dir());
            command
                .args(["init", "--encryption", "repokey-blake2"])
                .arg(&repository);
            ends.run("borg init", &mut command, Deadline::after(SETUP))?;
        }
        ends.script(
            ends.far_dir().join("serve"),
            &format!("exec {} serve", self.program),
        )?;
        let (server, port) = ends.serve("borg serve", "./serve", &environment(&ends.far_dir()))?;
        // Borg passes a host and a command, which the far end ignores.
        let shell = ends.script(
            ends.near_dir().join("rsh"),
            &format!("exec {}", ends.pipe(port)),
        )?;
        Ok(Box::new(Repository {
            program: self.program,
            ends,
            repository,
            shell,
            carried: 0,
            _server: server,
        }))
    }
}

struct Repository<'a> {
    program: &'static str,
    ends: Ends<'a>,
    repository: PathBuf,
    shell: PathBuf,
    carried: u32,
    _server: Running,
}

/// A borg command with its state below `home` that never prompts.
fn borg(mut command: Command, home: &Path) -> Command {
    command.envs(environment(home));
    command
}

fn environment(home: &Path) -> Vec<(&'static str, OsString)> {
    vec![
        ("BORG_BASE_DIR", home.join("borg").into_os_string()),
        ("HOME", home.to_owned().into_os_string()),
        ("BORG_PASSPHRASE", PASSWORD.into()),
        ("BORG_RELOCATED_REPO_ACCESS_IS_OK", "yes".into()),
    ]
}

impl Carrier for Repository<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let image = image.canonicalize()?;
        let delivered = self.delivered(&image);
        let _ = fs::remove_file(&delivered);
        self.carried += 1;
        // The repository may have been created by an earlier run, at another path.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let archive = format!("{}-{}", now.as_nanos(), self.carried);
        let mut create = borg(self.ends.near(self.program), &self.ends.near_dir());
        create
            .env("BORG_RSH", &self.shell)
            .args(CREATE)
            .arg(format!("ssh://far/./repo::{archive}"))
            .arg(image.file_name().unwrap_or_default())
            .current_dir(image.parent().context("no directory")?);
        let mut extract = borg(self.ends.far(self.program), &self.ends.far_dir());
        extract
            .args(["extract", "--sparse"])
            .arg(format!("{}::{archive}", self.repository.display()))
            .current_dir(self.ends.images());
        let started = Instant::now();
        self.ends.run("borg create", &mut create, deadline)?;
        self.ends.run("borg extract", &mut extract, deadline)?;
        self.ends.sync_far(&delivered, deadline)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
