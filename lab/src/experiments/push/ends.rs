//! Both ends: a site that can be killed and comes back where it was, and a mount of its one image.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::experiments::lines::Net;
use crate::experiments::shows::{NAME, Shown};
use crate::shell;
use crate::site::{Sender, Site};

/// Where the site is, so that it can come back there: the far end's namespace is its own.
const PORT: u16 = 7377;
/// Seconds that an unmount and a merge may take.
const LIMIT: &str = "900";
/// The home of a copy of the site.
const COPY: &str = "copy";

/// The two ends.
pub struct Ends<'a> {
    net: &'a Net,
    drover: PathBuf,
    dir: PathBuf,
    site: Option<Site>,
    peak: u64,
}

impl<'a> Ends<'a> {
    /// A site with an empty image of `size` bytes, and a home that is paired with it.
    pub fn start(net: &'a Net, drover: &Path, dir: &Path, size: u64) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let mut ends = Self {
            net,
            drover: drover.to_owned(),
            dir: dir.canonicalize()?,
            site: None,
            peak: 0,
        };
        File::create(ends.dir.join(NAME))?.set_len(size)?;
        ends.back()?;
        let image = ends.dir.join(NAME);
        ends.far("far", &["index", &*image.to_string_lossy()])?;
        let site = ends.site.as_ref().context("no site")?;
        Sender::pair(drover, &ends.dir.join("near"), net.place(), site)?;
        Ok(ends)
    }

    /// The site, where it was.
    pub fn back(&mut self) -> Result<()> {
        let home = self.dir.join("far");
        let site = Site::start_on(&self.drover, &home, self.net.place(), PORT);
        self.site = Some(site.context("the site does not come up")?);
        Ok(())
    }

    /// Ends the site as a power cut of its program would: SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.peak = self.site_peak();
        self.site.take().context("no site to kill")?.kill()
    }

    /// The greatest resident set of the site so far, in bytes.
    pub fn site_peak(&self) -> u64 {
        let now = self.site.as_ref().map(|site| site.cost().peak_rss_bytes);
        self.peak.max(now.unwrap_or(0))
    }

    /// A mount of its image.
    pub fn mount(&self) -> Result<Shown> {
        let socket = self.dir.join("near.sock");
        let said = self.dir.join("near.log");
        let child = self
            .near("export")
            .arg(format!("far:{NAME}"))
            .arg("--nbd")
            .arg(format!("unix:{}", socket.display()))
            .args(["--push-interval", "1s"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&said)?)
            .spawn()
            .context("drover export")?;
        Ok(Shown::new(child, socket, said))
    }

    /// How the mount says that its disk is.
    pub fn disk(&self) -> Result<Value> {
        let said = shell::run(self.near("mounts").arg("--json"))?.stdout;
        let mount: Value = serde_json::from_slice(&said).context("drover mounts --json")?;
        Ok(mount["disks"][0].clone())
    }

    /// Ends the mount in good order: what was written is at the site.
    pub fn unmount(&self, shown: Shown) -> Result<()> {
        shell::run(self.near("unmount").arg(shown.socket()))?;
        drop(shown);
        Ok(())
    }

    /// What the site makes of its image with what was written over it.
    pub fn merged(&self) -> Result<PathBuf> {
        self.merge("far")
    }

    /// The same of a copy of a site that does not run, whose image another has the right to write.
    pub fn merged_copy(&self) -> Result<PathBuf> {
        shell::run(
            Command::new("cp")
                .args(["-a", "--sparse=always", "--reflink=auto"])
                .arg(self.dir.join("far"))
                .arg(self.dir.join(COPY)),
        )?;
        self.far(COPY, &["mounts", "break", NAME, "--yes"])?;
        self.merge(COPY)
    }

    /// Gives back its room.
    pub fn remove_copy(&self) -> Result<()> {
        Ok(std::fs::remove_dir_all(self.dir.join(COPY))?)
    }

    fn merge(&self, home: &str) -> Result<PathBuf> {
        let whole = "whole.raw";
        self.far(home, &["changes", "merge", NAME, "--as", whole])?;
        Ok(self.dir.join(home).join("images").join(whole))
    }

    /// A command of the near home; all but a mount end in time.
    fn near(&self, command: &str) -> Command {
        let place = self.net.place();
        let mut near = match command {
            "export" => place.near(&self.drover),
            _ => place.near(Path::new("timeout")),
        };
        if command != "export" {
            near.arg(LIMIT).arg(&self.drover);
        }
        near.arg(command).env("DROVER_HOME", self.dir.join("near"));
        near
    }

    /// Runs a command in a home at the far end.
    fn far(&self, home: &str, args: &[&str]) -> Result<()> {
        let mut far = self.net.place().far(Path::new("timeout"));
        far.arg(LIMIT).arg(&self.drover).args(args);
        shell::run(far.env("DROVER_HOME", self.dir.join(home)))?;
        Ok(())
    }
}
