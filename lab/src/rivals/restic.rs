//! restic: a backup to a repository at the far end, restored there.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::{Deadline, Running};
use super::tool;
use crate::shell;
use crate::site::Where;

/// restic with a `rest-server` if available, else with an SFTP server.
///
/// Repository version 2, whose chunks are compressed by zstd. Sixteen requests in flight, since each takes a round
/// trip. Encryption cannot be disabled. Versions before 0.15 restore zeros by writing them, which takes longer than
/// everything else; with these, `dump` to a sparse file is five times as fast.
pub struct Restic {
    pub(super) program: &'static str,
    pub(super) limit: Limit,
}

impl Restic {
    /// The best settings, as described above.
    pub const BEST: Self = Self {
        program: "restic",
        limit: Limit::USUAL,
    };
}

/// Usual paths of the SFTP server.
const SFTP: &[&str] = &[
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/lib/ssh/sftp-server",
    "/usr/libexec/sftp-server",
];
const DUMP: &str = r#"
set -o pipefail
"$1" --quiet dump latest "$3" --repo "$2" | dd of="$4" conv=sparse bs=64k iflag=fullblock status=none
"#;
const PASSWORD: &str = "thrown away";
const SETUP: Duration = Duration::from_secs(60);

fn restores_sparse(program: &str) -> bool {
    tool::ask(program, &["restore", "--help"]).is_ok_and(|help| help.contains("--sparse"))
}

fn sftp_server() -> Result<&'static str, String> {
    let found = SFTP.iter().find(|path| Path::new(path).is_file());
    found
        .copied()
        .ok_or_else(|| "there is neither rest-server nor sftp-server".to_owned())
}

impl Rival for Restic {
    fn name(&self) -> &'static str {
        "restic"
    }

    fn settings(&self) -> String {
        let restore = if restores_sparse(self.program) {
            "restic restore latest --sparse -r REPO"
        } else {
            "restic dump latest IMAGE -r REPO | dd conv=sparse bs=64k of=FILE"
        };
        let server = if shell::have("rest-server") {
            "rest:http://FAR/ -o rest.connections=16"
        } else {
            "sftp:FAR:repo -o sftp.connections=16"
        };
        format!(
            "restic backup -r {server} --compression auto IMAGE; {restore}; sync FILE (repository version 2)"
        )
    }

    fn version(&self) -> Result<String, String> {
        if !shell::have("rest-server") {
            tool::needs(&["socat"])?;
            sftp_server()?;
        }
        tool::version(self.program, &["version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        let repository = ends.far_dir().join("repo");
        if !repository.exists() {
            let mut command = restic(ends.far(self.program), &ends.far_dir());
            command
                .args(["--quiet", "init", "--repository-version", "2", "--repo"])
                .arg(&repository);
            ends.run("restic init", &mut command, Deadline::after(SETUP))?;
        }
        let (server, remote) = if shell::have("rest-server") {
            let (server, port) = ends.listen("rest-server", |port| {
                let mut command = ends.far("rest-server");
                command
                    .args(["--no-auth", "--listen"])
                    .arg(format!("{}:{port}", ends.far_address()))
                    .arg("--path")
                    .arg(ends.far_dir());
                command
            })?;
            let url = format!("rest:http://{}:{port}/repo/", ends.far_address());
            (server, vec![url, "rest.connections=16".to_owned()])
        } else {
            let program = sftp_server().map_err(|missing| anyhow!(missing))?;
            let (server, port) = ends.serve("sftp-server", program, &[])?;
            let pipe = format!("sftp.command={}", ends.pipe(port));
            let connections = "sftp.connections=16".to_owned();
            (server, vec!["sftp:far:repo".to_owned(), connections, pipe])
        };
        Ok(Box::new(Repository {
            program: self.program,
            ends,
            repository,
            remote,
            sparse: restores_sparse(self.program),
            _server: server,
        }))
    }
}

struct Repository<'a> {
    program: &'static str,
    ends: Ends<'a>,
    repository: PathBuf,
    /// The repository's location from the near end, with options.
    remote: Vec<String>,
    sparse: bool,
    _server: Running,
}

/// A restic command with its state below `home`.
fn restic(mut command: Command, home: &Path) -> Command {
    command
        .env("RESTIC_PASSWORD", PASSWORD)
        .env("RESTIC_CACHE_DIR", home.join("cache"))
        .env("RESTIC_COMPRESSION", "auto")
        .env("HOME", home);
    command
}

impl Carrier for Repository<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let image = image.canonicalize()?;
        let name = image.file_name().unwrap_or_default();
        let delivered = self.delivered(&image);
        let _ = fs::remove_file(&delivered);
        let mut backup = restic(self.ends.near(self.program), &self.ends.near_dir());
        backup.args(["--quiet", "backup", "--repo", &self.remote[0]]);
        for option in &self.remote[1..] {
            backup.args(["-o", option]);
        }
        // Store the file without its directories in the snapshot.
        backup
            .arg(name)
            .current_dir(image.parent().context("no directory")?);
        let mut restore = if self.sparse {
            let mut command = restic(self.ends.far(self.program), &self.ends.far_dir());
            command
                .args(["--quiet", "restore", "latest", "--sparse", "--repo"])
                .arg(&self.repository)
                .args([OsStr::new("--target"), self.ends.images().as_os_str()]);
            command
        } else {
            let mut command = restic(self.ends.far("bash"), &self.ends.far_dir());
            command.args(["-c", DUMP, "dump", self.program]).args([
                self.repository.as_os_str(),
                name,
                delivered.as_os_str(),
            ]);
            command
        };
        let started = Instant::now();
        self.ends.run("restic backup", &mut backup, deadline)?;
        self.ends.run("restic restore", &mut restore, deadline)?;
        self.ends.sync_far(&delivered, deadline)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
