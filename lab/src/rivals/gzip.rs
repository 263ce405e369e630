//! gzip through a socket, each image for itself or all of them as one stream (`vmflock` §4.1.3).

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::Running;
use super::tool;
use crate::site::Where;

/// gzip at its default level.
pub struct Gzip {
    /// Whether a flock is one tar file; else each image is compressed by a process of its own, all at once.
    all: bool,
}

impl Gzip {
    /// Each image for itself.
    pub const SEPARATE: Self = Self { all: false };
    /// All images as one tar file.
    pub const ALL: Self = Self { all: true };
}

// The near end: $1 is the pipe, $2 the directory of the images, and then their names.
const SEND: &str = r#"
set -o pipefail
pipe=$1 dir=$2; shift 2
answer=$(tar -cSf - -C "$dir" --dereference -- "$@" | gzip -c | $pipe) || { echo "$answer"; exit 1; }
[ "$answer" = ok ] || { echo "the far end: ${answer:-no answer}"; exit 1; }
"#;

const RECEIVE: &str = r#"part=$(mktemp -d ../images/.part.XXXXXX) || exit 1
if gzip -dc 2>words | tar -xSf - -C "$part" 2>words && sync "$part"/* 2>words && mv "$part"/* ../images/ 2>words
then rmdir "$part"; echo ok
else tail -n 1 words; cat >/dev/null
fi"#;

impl Rival for Gzip {
    fn name(&self) -> &'static str {
        if self.all {
            "gzip-all"
        } else {
            "gzip-separate"
        }
    }

    fn settings(&self) -> String {
        let what = if self.all { "IMAGES" } else { "IMAGE" };
        let also = if self.all {
            ""
        } else {
            ", for each image at once"
        };
        format!("tar -cS {what} | gzip | TCP | gzip -d | tar -xS && sync{also}")
    }

    fn version(&self) -> Result<String, String> {
        tool::needs(&["socat", "bash", "tar"])?;
        tool::version("gzip", &["--version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, Limit::USUAL)?;
        ends.script(ends.far_dir().join("receive"), RECEIVE)?;
        let (daemon, port) = ends.serve("gzip at the far end", "./receive", &[])?;
        Ok(Box::new(Pipe {
            all: self.all,
            pipe: ends.pipe(port),
            ends,
            _daemon: daemon,
        }))
    }
}

struct Pipe<'a> {
    all: bool,
    ends: Ends<'a>,
    pipe: String,
    _daemon: Running,
}

impl Pipe<'_> {
    fn begin(&self, what: &str, images: &[PathBuf]) -> Result<Running> {
        let dir = images.first().and_then(|image| image.parent());
        let names: Vec<&OsStr> = images
            .iter()
            .filter_map(|image| image.file_name())
            .collect();
        let mut command = self.ends.near("bash");
        command
            .args(["-c", SEND, "send", &self.pipe])
            .arg(dir.context("no directory")?)
            .args(names);
        self.ends.begin(what, &mut command)
    }
}

impl Carrier for Pipe<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        self.carry_all(&[image.to_owned()], &[])
    }

    fn carry_all(&mut self, images: &[PathBuf], _there: &[PathBuf]) -> Result<f64> {
        for image in images {
            let _ = fs::remove_file(self.delivered(image));
        }
        let largest = images
            .iter()
            .max_by_key(|image| fs::metadata(image).map_or(0, |m| m.len()));
        let one = self.ends.deadline(largest.context("no image")?)?;
        let deadline = one.times(images.len() as u32);
        let started = Instant::now();
        let running = match self.all {
            true => vec![self.begin("gzip", images)?],
            false => images
                .iter()
                .enumerate()
                .map(|(nth, image)| self.begin(&format!("gzip {nth}"), std::slice::from_ref(image)))
                .collect::<Result<_>>()?,
        };
        running
            .into_iter()
            .try_for_each(|one| one.finish(deadline))?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
