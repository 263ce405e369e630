//! The two ends of a rival's transfer: commands, directories, deadline.

use std::ffi::OsString;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::process::{Deadline, Running};
use crate::link::Side;
use crate::site::Where;

/// Attempts to start a daemon when another program takes its port first.
const TRIES: usize = 3;

/// The time limit for transferring an image: generous, so that only a hang is killed.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The minimum, for a small image.
    pub floor: Duration,
    /// Plus a second for each so many bytes of the image.
    pub bytes_per_second: u64,
}

impl Limit {
    /// Twice the time that the slowest link, 20 Mbit/s, needs for every byte, zeros included.
    pub const USUAL: Self = Self {
        floor: Duration::from_secs(180),
        bytes_per_second: 1 << 20,
    };

    fn of(&self, size_bytes: u64) -> Duration {
        self.floor + Duration::from_secs(size_bytes / self.bytes_per_second.max(1))
    }
}

/// Both ends of a carrier.
pub struct Ends<'a> {
    place: Where<'a>,
    limit: Limit,
    dir: PathBuf,
}

impl<'a> Ends<'a> {
    /// Creates their directories below `dir`.
    ///
    /// # Errors
    /// When they cannot be created.
    pub fn new(place: Where<'a>, dir: &Path, limit: Limit) -> Result<Self> {
        for part in ["near", "far", "said", "images"] {
            let part = dir.join(part);
            fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
        }
        Ok(Self {
            place,
            limit,
            dir: dir.canonicalize()?,
        })
    }

    /// Directory for the near end's own files, except the images.
    pub fn near_dir(&self) -> PathBuf {
        self.dir.join("near")
    }

    /// Directory for the far end's own files.
    pub fn far_dir(&self) -> PathBuf {
        self.dir.join("far")
    }

    /// Directory for the far end's images.
    pub fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    /// The path under which an image is delivered.
    pub fn delivered(&self, image: &Path) -> PathBuf {
        self.images().join(image.file_name().unwrap_or_default())
    }

    /// The far end's address.
    pub fn far_address(&self) -> &'static str {
        self.place.far_address()
    }

    /// The near end's address.
    pub fn near_address(&self) -> &'static str {
        match self.place {
            Where::Loopback => "127.0.0.1",
            Where::Over(_) => Side::A.address(),
        }
    }

    /// A command that runs at the near end.
    pub fn near(&self, program: &str) -> Command {
        self.place.near(Path::new(program))
    }

    /// A command that runs at the far end.
    pub fn far(&self, program: &str) -> Command {
        self.place.far(Path::new(program))
    }

    /// The deadline for transferring `image`, starting now.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn deadline(&self, image: &Path) -> Result<Deadline> {
        let size = fs::metadata(image)
            .with_context(|| format!("no image {}", image.display()))?
            .len();
        Ok(Deadline::after(self.limit.of(size)))
    }

    /// Runs a command and waits for it.
    ///
    /// # Errors
    /// When it fails or is killed at the deadline; includes its output.
    pub fn run(&self, what: &str, command: &mut Command, deadline: Deadline) -> Result<()> {
        self.begin(what, command)?.finish(deadline)
    }

    /// Starts a command.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn begin(&self, what: &str, command: &mut Command) -> Result<Running> {
        Running::start(what, command, &self.said(what))
    }

    /// Starts a daemon at an end, with the command that `make` returns for a free port; returns the process and its
    /// port once it listens.
    ///
    /// # Errors
    /// When it does not start.
    pub fn listen(
        &self,
        what: &str,
        mut make: impl FnMut(u16) -> Command,
    ) -> Result<(Running, u16)> {
        let mut tries = 0;
        loop {
            tries += 1;
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let mut daemon = self.begin(what, &mut make(port))?;
            match daemon.listens(port) {
                Ok(()) => return Ok((daemon, port)),
                Err(error) if tries == TRIES => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Syncs a file at the far end to disk, for tools without an option for it, so that all of them end in the same
    /// state. Uses no network: a shell at the far end would do it after the tool.
    ///
    /// # Errors
    /// When it fails or is killed at the deadline.
    pub fn sync_far(&self, file: &Path, deadline: Deadline) -> Result<()> {
        self.run("sync", self.far("sync").arg(file), deadline)
    }

    /// Writes an executable script.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn script(&self, path: PathBuf, text: &str) -> Result<PathBuf> {
        fs::write(&path, format!("#!/bin/bash\n{text}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Starts a TCP server at the far end that runs `program` for each connection, with the socket as stdin and stdout,
    /// and the far end's directory as its working directory. socat execs it, so it adds no overhead.
    ///
    /// # Errors
    /// When it does not start.
    pub fn serve(
        &self,
        what: &str,
        program: &str,
        env: &[(&str, OsString)],
    ) -> Result<(Running, u16)> {
        self.listen(what, |port| {
            let address = self.far_address();
            let mut command = self.far("socat");
            command
                .arg(format!("TCP-LISTEN:{port},bind={address},reuseaddr,fork"))
                .arg(format!("EXEC:{program},nofork"))
                .current_dir(self.far_dir())
                .envs(env.iter().map(|(key, value)| (key, value)));
            command
        })
    }

    /// A command for the near end that is a pipe to [`Ends::serve`]. It allows for a long delay between the end of
    /// input and the end of output.
    pub fn pipe(&self, port: u16) -> String {
        format!(
            "socat -b 262144 -t 86400 - TCP:{}:{port}",
            self.far_address()
        )
    }

    fn said(&self, what: &str) -> PathBuf {
        self.dir.join("said").join(what.replace([' ', '/'], "-"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_grows_with_the_image() {
        assert_eq!(Limit::USUAL.of(0), Duration::from_secs(180));
        assert_eq!(Limit::USUAL.of(2 << 30), Duration::from_secs(2228));
    }

    #[test]
    fn a_daemon_that_does_not_come_up_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let ends = Ends::new(Where::Loopback, dir.path(), Limit::USUAL).unwrap();
        let make = |_| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo no such option >&2; exit 2"]);
            command
        };
        let error = ends.listen("a daemon", make).err().unwrap().to_string();
        assert_eq!(error, "a daemon: exit status: 2: no such option");
    }
}
