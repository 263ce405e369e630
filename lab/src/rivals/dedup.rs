//! Deduplication of each image for itself (`vmflock` §4.1.3); the program is [`crate::dedup`].

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::Running;
use crate::site::Where;

/// With blocks of this size.
pub struct DedupSeparate {
    block: usize,
}

impl DedupSeparate {
    /// The block size with which the paper compares itself over the link, which is drover's too. Smaller ones find little more
    /// where files are aligned to 4 KiB, and cost as many more digests.
    pub const BEST: Self = Self { block: 4096 };
}

impl Rival for DedupSeparate {
    fn name(&self) -> &'static str {
        "dedup-separate"
    }

    fn settings(&self) -> String {
        format!(
            "lab dedup: blocks of {} bytes, 20 bytes of digest each, zlib each; all images at once",
            self.block
        )
    }

    fn version(&self) -> Result<String, String> {
        program().map(|_| env!("CARGO_PKG_VERSION").to_owned())
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let lab = program().map_err(anyhow::Error::msg)?;
        let ends = Ends::new(place, dir, Limit::USUAL)?;
        let block = self.block.to_string();
        let (daemon, port) = ends.listen("dedup at the far end", |port| {
            let mut command = ends.far(&lab);
            command
                .args(["dedup", "serve"])
                .arg(format!("{}:{port}", ends.far_address()))
                .arg(ends.images())
                .arg(&block);
            command
        })?;
        Ok(Box::new(Sender {
            lab,
            block,
            address: format!("{}:{port}", ends.far_address()),
            ends,
            _daemon: daemon,
        }))
    }
}

/// The program of this process, if it is the lab: a test of it is not.
fn program() -> Result<String, String> {
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    match exe.file_name().is_some_and(|name| name == "lab") {
        true => Ok(exe.to_string_lossy().into_owned()),
        false => Err("this is not the lab itself".to_owned()),
    }
}

struct Sender<'a> {
    lab: String,
    block: String,
    address: String,
    ends: Ends<'a>,
    _daemon: Running,
}

impl Carrier for Sender<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        self.carry_all(&[image.to_owned()], &[])
    }

    fn carry_all(&mut self, images: &[PathBuf], _there: &[PathBuf]) -> Result<f64> {
        let largest = images
            .iter()
            .max_by_key(|image| fs::metadata(image).map_or(0, |m| m.len()));
        let one = self.ends.deadline(largest.context("no image")?)?;
        let deadline = one.times(images.len() as u32);
        let started = Instant::now();
        let running = images
            .iter()
            .enumerate()
            .map(|(nth, image)| {
                let mut command = self.ends.near(&self.lab);
                command
                    .args(["dedup", "send", &self.address])
                    .arg(image)
                    .arg(&self.block);
                self.ends.begin(&format!("dedup {nth}"), &mut command)
            })
            .collect::<Result<Vec<_>>>()?;
        running
            .into_iter()
            .try_for_each(|one| one.finish(deadline))?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
