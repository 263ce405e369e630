//! desync, a reimplementation of casync in Go: chunks and their index are served over HTTP, and assembled at the far
//! end.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::Running;
use super::tool;
use crate::site::Where;

/// desync, if it is in `PATH`: Debian has no package of it.
///
/// The far end pulls, because it knows which chunks it has: its cache has those of earlier images. Each request takes a
/// round trip, so 64 are in flight. Chunks of 64 KiB on average, compressed by zstd, are the default.
pub struct Desync {
    pub(super) program: &'static str,
    pub(super) limit: Limit,
}

impl Desync {
    /// The best settings, as described above.
    pub const BEST: Self = Self {
        program: "desync",
        limit: Limit::USUAL,
    };
}

const INDEX: &str = "image.caibx";
const REQUESTS: &str = "64";

impl Rival for Desync {
    fn name(&self) -> &'static str {
        "desync"
    }

    fn settings(&self) -> String {
        format!(
            "desync make -s STORE {INDEX} IMAGE; desync chunk-server, index-server; \
             desync extract -n {REQUESTS} -s http://NEAR/ -c CACHE http://NEAR/{INDEX} FILE; sync FILE"
        )
    }

    fn version(&self) -> Result<String, String> {
        tool::needs(&[self.program])?;
        // Old versions do not report it.
        let version = tool::version(self.program, &["--version"]);
        Ok(version.unwrap_or_else(|_| "of unknown version".to_owned()))
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        let serve = |what: &str, dir: PathBuf| {
            fs::create_dir_all(&dir)?;
            ends.listen(what, |port| {
                let mut command = ends.near(self.program);
                command
                    .args([what, "--store"])
                    .arg(&dir)
                    .arg("--listen")
                    .arg(format!("{}:{port}", ends.near_address()));
                command
            })
        };
        let store = ends.near_dir().join("store");
        let index = ends.near_dir().join("index");
        fs::create_dir_all(ends.far_dir().join("cache"))?;
        let (chunks, chunk_port) = serve("chunk-server", store)?;
        let (indexes, index_port) = serve("index-server", index)?;
        Ok(Box::new(Served {
            program: self.program,
            chunks: format!("http://{}:{chunk_port}/", ends.near_address()),
            index: format!("http://{}:{index_port}/{INDEX}", ends.near_address()),
            ends,
            _servers: [chunks, indexes],
        }))
    }
}

struct Served<'a> {
    program: &'static str,
    ends: Ends<'a>,
    chunks: String,
    index: String,
    _servers: [Running; 2],
}

impl Carrier for Served<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let delivered = self.delivered(image);
        let _ = fs::remove_file(&delivered);
        let mut make = self.ends.near(self.program);
        make.args(["make", "--store"])
            .arg(self.ends.near_dir().join("store"))
            .arg(self.ends.near_dir().join("index").join(INDEX))
            .arg(image);
        let mut extract = self.ends.far(self.program);
        extract
            .args(["extract", "--concurrency", REQUESTS])
            .args(["--store", &self.chunks, "--cache"])
            .arg(self.ends.far_dir().join("cache"))
            .arg(&self.index)
            .arg(&delivered);
        let started = Instant::now();
        self.ends.run("desync make", &mut make, deadline)?;
        self.ends.run("desync extract", &mut extract, deadline)?;
        self.ends.sync_far(&delivered, deadline)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
