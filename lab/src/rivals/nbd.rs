//! `qemu-img convert` over NBD: how a hypervisor's own tools copy a disk.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::tool;
use crate::site::Where;

/// `qemu-img convert`, pushing to a `qemu-nbd` at the far end that serves a sparse file.
///
/// The near end skips zeros (`-S 4k`, `--target-is-zero`), so only data is sent; sixteen requests are in flight, in any
/// order (`-m 16 -W`), the maximum for qemu's single NBD connection. The far end writes to the page cache, and the
/// final flush goes to disk. NBD has no compression.
pub struct QemuNbd {
    pub(super) program: &'static str,
    pub(super) limit: Limit,
}

impl QemuNbd {
    /// The best settings, as described above.
    pub const BEST: Self = Self {
        program: "qemu-img",
        limit: Limit::USUAL,
    };
}

const SERVE: &[&str] = &[
    "--persistent",
    "--shared=16",
    "--format=raw",
    "--cache=writeback",
    "--aio=threads",
    "--discard=unmap",
    "--detect-zeroes=unmap",
];

const CONVERT: &[&str] = &[
    "convert",
    "-n",
    "--target-is-zero",
    "-W",
    "-m",
    "16",
    "-S",
    "4k",
    "-t",
    "writeback",
    "-f",
    "raw",
    "-O",
    "raw",
];

impl Rival for QemuNbd {
    fn name(&self) -> &'static str {
        "qemu-nbd"
    }

    fn settings(&self) -> String {
        format!(
            "qemu-nbd {} FILE; qemu-img {} IMAGE nbd://FAR; sync FILE",
            SERVE.join(" "),
            CONVERT.join(" ")
        )
    }

    fn version(&self) -> Result<String, String> {
        tool::needs(&["qemu-nbd"])?;
        tool::version(self.program, &["--version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        let program = self.program;
        Ok(Box::new(Nbd { program, ends }))
    }
}

struct Nbd<'a> {
    program: &'static str,
    ends: Ends<'a>,
}

impl Carrier for Nbd<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let delivered = self.delivered(image);
        let _ = fs::remove_file(&delivered);
        let started = Instant::now();
        // A server serves one file, so starting it is part of the transfer.
        File::create(&delivered)?.set_len(fs::metadata(image)?.len())?;
        let address = self.ends.far_address();
        let (_server, port) = self.ends.listen("qemu-nbd", |port| {
            let mut command = self.ends.far("qemu-nbd");
            command
                .args(SERVE)
                .args(["--bind", address, "--port", &port.to_string()])
                .arg(&delivered);
            command
        })?;
        let mut command = self.ends.near(self.program);
        command
            .args(CONVERT)
            .arg(image)
            .arg(format!("nbd://{address}:{port}"));
        self.ends.run("qemu-img", &mut command, deadline)?;
        self.ends.sync_far(&delivered, deadline)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
