//! The two ends between which a rival carries: its commands, its directories, its deadline.

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

/// How often a daemon is started when another program was faster to take its port.
const TRIES: usize = 3;

/// How long carrying an image may take: far longer than it should, so that only what hangs is ended.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// For the smallest.
    pub floor: Duration,
    /// More for each so many bytes of its size, a second.
    pub bytes_per_second: u64,
}

impl Limit {
    /// Copies the slowest link of the matrix, 20 Mbit/s, in twice the time it needs for every byte, zeros too.
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
    /// Makes their directories below `dir`.
    ///
    /// # Errors
    /// When they cannot be made.
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

    /// The near end's own files, beside the images.
    pub fn near_dir(&self) -> PathBuf {
        self.dir.join("near")
    }

    /// The far end's own files.
    pub fn far_dir(&self) -> PathBuf {
        self.dir.join("far")
    }

    /// The far end's images.
    pub fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    /// Where an image is delivered.
    pub fn delivered(&self, image: &Path) -> PathBuf {
        self.images().join(image.file_name().unwrap_or_default())
    }

    /// The address of the far end.
    pub fn far_address(&self) -> &'static str {
        self.place.far_address()
    }

    /// The address of the near end.
    pub fn near_address(&self) -> &'static str {
        match self.place {
            Where::Loopback => "127.0.0.1",
            Where::Over(_) => Side::A.address(),
        }
    }

    /// A command at the near end.
    pub fn near(&self, program: &str) -> Command {
        self.place.near(Path::new(program))
    }

    /// A command at the far end.
    pub fn far(&self, program: &str) -> Command {
        self.place.far(Path::new(program))
    }

    /// When carrying `image` must be done that starts now.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn deadline(&self, image: &Path) -> Result<Deadline> {
        let size = fs::metadata(image)
            .with_context(|| format!("no image {}", image.display()))?
            .len();
        Ok(Deadline::after(self.limit.of(size)))
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// When it fails or is killed at the deadline; what it said is in the error.
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

    /// Starts a daemon at an end, by a command that `make` makes for a port that is free; returns it with its port
    /// once it listens.
    ///
    /// # Errors
    /// When it does not come up.
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

    /// Waits until a file at the far end is on its disk. What tools do that have no option for it, so that all end
    /// in the same state. It crosses no link: a shell at the far end would do it after the tool.
    ///
    /// # Errors
    /// When it fails or is killed at the deadline.
    pub fn sync_far(&self, file: &Path, deadline: Deadline) -> Result<()> {
        self.run("sync", self.far("sync").arg(file), deadline)
    }

    /// Writes a script that tools can call.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn script(&self, path: PathBuf, text: &str) -> Result<PathBuf> {
        fs::write(&path, format!("#!/bin/bash\n{text}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// A TCP server at the far end: for each connection it becomes `program`, which has the socket as its standard
    /// input and output and the far end's directory as its own. socat is gone by then, so it costs nothing.
    ///
    /// # Errors
    /// When it does not come up.
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

    /// A command for the near end that is a pipe to [`Ends::serve`]. What has closed one way may take long to answer
    /// the other.
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
