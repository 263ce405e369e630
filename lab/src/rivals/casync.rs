//! casync: makes a chunk index, sends the chunks that the far store lacks, and assembles the file there.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::Running;
use super::tool;
use crate::site::Where;

/// casync pushing with its own protocol, over a TCP connection in place of ssh.
///
/// The far end requests the missing chunks of the index, many at a time. The alternative, extraction over HTTP by the
/// far end, needs a round trip per chunk. SHA-256 is faster than casync's default where the CPU accelerates it. Chunks
/// are 64 KiB on average and compressed by zstd, as by default; smaller ones save bytes but lose more time to their
/// files. casync is single-threaded.
pub struct Casync {
    pub(super) program: &'static str,
    pub(super) limit: Limit,
}

impl Casync {
    /// The best settings, as described above.
    pub const BEST: Self = Self {
        program: "casync",
        limit: Limit::USUAL,
    };
}

const INDEX: &str = "image.caibx";
const STORE: &str = "store.castr";

impl Rival for Casync {
    fn name(&self) -> &'static str {
        "casync"
    }

    fn settings(&self) -> String {
        format!(
            "casync make --digest=sha256 --store=FAR:{STORE} FAR:{INDEX} IMAGE; \
             casync extract --store={STORE} {INDEX} FILE; sync FILE"
        )
    }

    fn version(&self) -> Result<String, String> {
        tool::needs(&["socat"])?;
        tool::version(self.program, &["--version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        let push = format!("exec {} push - - {INDEX} {STORE}", self.program);
        ends.script(ends.far_dir().join("push"), &push)?;
        let (server, port) = ends.serve("casync push", "./push", &[])?;
        // casync passes a host and a command, which the far end ignores.
        let shell = ends.script(
            ends.near_dir().join("ssh"),
            &format!("exec {}", ends.pipe(port)),
        )?;
        Ok(Box::new(Store {
            program: self.program,
            ends,
            shell,
            _server: server,
        }))
    }
}

struct Store<'a> {
    program: &'static str,
    ends: Ends<'a>,
    shell: PathBuf,
    _server: Running,
}

impl Carrier for Store<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let delivered = self.delivered(image);
        let _ = fs::remove_file(&delivered);
        let mut make = self.ends.near(self.program);
        make.env("CASYNC_SSH_PATH", &self.shell)
            .args(["make", "--digest=sha256", &format!("--store=far:/{STORE}")])
            .arg(format!("far:/{INDEX}"))
            .arg(image);
        let mut extract = self.ends.far(self.program);
        extract
            .args(["extract", &format!("--store={STORE}"), INDEX])
            .arg(&delivered)
            .current_dir(self.ends.far_dir());
        let started = Instant::now();
        self.ends.run("casync make", &mut make, deadline)?;
        self.ends.run("casync extract", &mut extract, deadline)?;
        self.ends.sync_far(&delivered, deadline)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
