//! Two of drover's sites at the ends of a link, which may bring machines to each other.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::machine::NAMES;
use crate::link::Side;
use crate::shell;
use crate::site::{Where, terminate};

/// Timeout for a site to end.
const END: Duration = Duration::from_secs(20);
/// Timeout of a migration, in seconds.
const LIMIT: &str = "1800";
/// Timeout for what a machine wrote to become part of its images.
const MERGE: Duration = Duration::from_secs(120);
/// How often to look.
const LOOK: Duration = Duration::from_millis(100);
/// The port of both sites.
const PORT: u16 = 7077;

/// The pause in its parts, in the last line of `drover migrate --json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Pause {
    pub disks_ms: f64,
    pub memory_ms: f64,
    pub hand_over_ms: f64,
    pub total_ms: f64,
}

/// The last line of `drover migrate --json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Done {
    pub pause: Pause,
    pub image_wire_bytes: f64,
    pub disk_wire_bytes: f64,
    pub memory_bytes: f64,
    pub unread_bytes: f64,
    pub rounds: f64,
}

/// The two sites, near and far; they end when this is dropped.
pub struct Sites<'a> {
    drover: PathBuf,
    place: Where<'a>,
    dir: PathBuf,
    serving: Vec<(Child, BufReader<ChildStdout>)>,
}

impl<'a> Sites<'a> {
    /// Starts and pairs them. `dir/near/qemu` and `dir/far/qemu` are where their machines' sockets are.
    pub fn start(drover: &Path, place: Where<'a>, dir: &Path) -> Result<Self> {
        let mut sites = Self {
            drover: drover.to_owned(),
            place,
            dir: dir.to_owned(),
            serving: Vec::new(),
        };
        for side in [0, 1] {
            let (home, socket) = (sites.home(side), sites.qemu(side).join("web.qmp"));
            fs::create_dir_all(sites.qemu(side))?;
            sites.run(side, &["init"])?;
            let config = format!("[machines.web]\nincoming = {socket:?}\n");
            fs::write(home.join("config.toml"), config)?;
            let address = [Side::A, Side::B][side].address();
            let said = File::create(home.with_extension("log"))?;
            let serve = ["serve", "--listen", &format!("{address}:{PORT}")];
            let mut serving = sites
                .command(side, &sites.drover, &serve)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(said)
                .spawn()
                .context("cannot start a site")?;
            let output = serving.stdout.take().context("no output")?;
            sites.serving.push((serving, BufReader::new(output)));
            // Its ticket: now it can be reached. It says more later.
            sites.serving[side].1.read_line(&mut String::new())?;
        }
        for side in [0, 1] {
            let ticket = sites.run(1 - side, &["ticket", "--can", "send,host"])?;
            let pair = ["pair", ticket.trim(), "--name", NAMES[1 - side]];
            sites.run(side, &pair)?;
        }
        for side in [0, 1] {
            let set = ["peers", "set", NAMES[1 - side], "--can", "send,host"];
            sites.run(side, &set)?;
        }
        Ok(sites)
    }

    /// The directory of a site's machine.
    pub fn qemu(&self, side: usize) -> PathBuf {
        self.dir.join(NAMES[side]).join("qemu")
    }

    /// An image of a site.
    pub fn image(&self, side: usize, name: &str) -> PathBuf {
        self.home(side).join("images").join(name)
    }

    /// Has a site forget in which generation its images were written: digests decide.
    pub fn forget_generations(&self, side: usize) -> Result<()> {
        for image in fs::read_dir(self.home(side).join("mounted/overlays"))? {
            match fs::remove_file(image?.path().join("generations")) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until what the machine wrote is part of the images that it has left.
    pub fn merged(&self, side: usize) -> Result<()> {
        let deadline = Instant::now() + MERGE;
        while !self.run(side, &["changes", "--json"])?.trim().is_empty() {
            if Instant::now() > deadline {
                bail!("the changes are not merged");
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Moves the machine that runs at `side` to the other one.
    pub fn migrate(&self, side: usize) -> Result<Done> {
        let machine = format!("qmp:{}", self.qemu(side).join("web.qmp").display());
        let output = self.run(side, &["migrate", &machine, NAMES[1 - side], "--json"])?;
        let last = output.lines().last().context("drover printed nothing")?;
        serde_json::from_str(last).with_context(|| format!("not the last line promised: {last}"))
    }

    /// Runs a command of drover at a site; its output.
    pub fn run(&self, side: usize, args: &[&str]) -> Result<String> {
        let drover = self.drover.to_string_lossy();
        let args = [&[LIMIT, &drover], args].concat();
        let output = shell::run(&mut self.command(side, Path::new("timeout"), &args))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn command(&self, side: usize, program: &Path, args: &[&str]) -> Command {
        let mut command = match side {
            0 => self.place.near(program),
            _ => self.place.far(program),
        };
        command.args(args).env("DROVER_HOME", self.home(side));
        command
    }

    fn home(&self, side: usize) -> PathBuf {
        self.dir.join(NAMES[side]).join("home")
    }
}

impl Drop for Sites<'_> {
    fn drop(&mut self) {
        for (child, _) in &mut self.serving {
            terminate(child, END);
        }
    }
}
