//! zstd through a socket: the simplest reasonable transfer.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;

use super::carrier::{Carrier, Rival};
use super::ends::{Ends, Limit};
use super::process::Running;
use super::tool;
use crate::site::Where;

/// `zstd -3 --long=27 -T0` to `zstd -d` at the far end.
///
/// Level and window are those of the lab's limit; all cores compress. Higher levels gain a few percent and cannot keep
/// up with a link of 100 Mbit/s on two cores; `--adapt` would use them at 20 Mbit/s and make the size depend on the
/// load.
pub struct Zstd {
    pub(super) program: &'static str,
    pub(super) limit: Limit,
}

impl Zstd {
    /// The best settings, as described above.
    pub const BEST: Self = Self {
        program: "zstd",
        limit: Limit::USUAL,
    };
}

// The near end: a line with the name, the stream, and a reply of one word when the file is on the far disk.
const SEND: &str = r#"
set -o pipefail
answer=$({ printf '%s\n' "$3" && "$1" -3 --long=27 -T0 -q -c -- "$2"; } | $4) || { echo "$answer"; exit 1; }
[ "$answer" = ok ] || { echo "the far end: ${answer:-no answer}"; exit 1; }
"#;

fn receive(program: &str) -> String {
    format!(
        r#"IFS= read -r name || exit 1
part=../images/.part
if {program} -d --long=27 --sparse -q -f -o "$part" 2>words && sync "$part" 2>words && mv "$part" "../images/$name" 2>words
then echo ok
else tail -n 1 words; cat >/dev/null # what comes after it would reset the connection, and the words be lost
fi"#
    )
}

impl Rival for Zstd {
    fn name(&self) -> &'static str {
        "zstd"
    }

    fn settings(&self) -> String {
        "zstd -3 --long=27 -T0 -c IMAGE | TCP | zstd -d --long=27 --sparse -o FILE && sync FILE"
            .to_owned()
    }

    fn version(&self) -> Result<String, String> {
        tool::needs(&["socat", "bash"])?;
        tool::version(self.program, &["--version"])
    }

    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        let ends = Ends::new(place, dir, self.limit)?;
        ends.script(ends.far_dir().join("receive"), &receive(self.program))?;
        let (daemon, port) = ends.serve("zstd at the far end", "./receive", &[])?;
        Ok(Box::new(Pipe {
            program: self.program,
            pipe: ends.pipe(port),
            ends,
            _daemon: daemon,
        }))
    }
}

struct Pipe<'a> {
    program: &'static str,
    ends: Ends<'a>,
    pipe: String,
    _daemon: Running,
}

impl Carrier for Pipe<'_> {
    fn carry(&mut self, image: &Path, _basis: Option<&Path>) -> Result<f64> {
        let deadline = self.ends.deadline(image)?;
        let _ = fs::remove_file(self.delivered(image));
        let mut command = self.ends.near("bash");
        command
            .args(["-c", SEND, "send", self.program])
            .arg(image)
            .arg(image.file_name().unwrap_or_default())
            .arg(&self.pipe);
        let started = Instant::now();
        self.ends.run("zstd", &mut command, deadline)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.ends.delivered(image)
    }
}
