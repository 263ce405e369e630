//! The files of QEMUs that are built for machines of other sites.

use std::fs;
use std::path::{Path, PathBuf};

use crate::text::clean;

/// How much of its end is looked at.
const TAIL: usize = 4096;

/// The files of a machine that is built.
#[derive(Debug, Clone)]
pub struct Files {
    directory: PathBuf,
    name: String,
}

impl Files {
    /// Those in the site directory.
    #[must_use]
    pub fn of(site: &Path, name: &str) -> Files {
        Files {
            directory: site.join("qemu"),
            name: name.to_owned(),
        }
    }

    /// The directory that they are in.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn file(&self, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", self.name))
    }

    /// QEMU's QMP socket.
    #[must_use]
    pub fn monitor(&self) -> PathBuf {
        self.file("qmp")
    }

    /// The socket of the machine's first console.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.file("console")
    }

    /// What QEMU has said.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.file("log")
    }

    pub(crate) fn spec(&self) -> PathBuf {
        self.file("spec")
    }

    pub(crate) fn last(&self) -> PathBuf {
        self.file("last")
    }

    /// The process of QEMU, and when it began.
    pub(crate) fn pid(&self) -> PathBuf {
        self.file("pid")
    }

    /// What the command that started QEMU has said.
    pub(crate) fn start(&self) -> PathBuf {
        self.file("start")
    }

    /// How QEMU ended, for who has started it: in no file that QEMU writes to.
    pub(crate) fn ended(&self) -> PathBuf {
        self.file("ended")
    }

    /// How QEMU ended, for a message, if it has.
    pub(crate) fn end(&self) -> Option<String> {
        let text = fs::read_to_string(self.ended()).ok()?;
        (!text.is_empty()).then(|| clean(&text))
    }

    /// The last that the command which started QEMU has said.
    pub(crate) fn start_said(&self) -> String {
        let tail = tail(&self.start());
        let mut lines = tail.lines().rev().filter(|line| !line.trim().is_empty());
        lines.next().map(clean).unwrap_or_default()
    }

    /// The last that QEMU has said since it was started.
    pub(crate) fn last_said(&self) -> String {
        let tail = tail(&self.log());
        let lines = tail
            .lines()
            .rev()
            .take_while(|line| !line.starts_with(OURS));
        let mut lines = lines.filter(|line| !line.trim().is_empty());
        lines.next().map(clean).unwrap_or_default()
    }
}

fn tail(path: &Path) -> String {
    let said = fs::read(path).unwrap_or_default();
    let tail = &said[said.len().saturating_sub(TAIL)..];
    String::from_utf8_lossy(tail).into_owned()
}

/// How lines begin that QEMU has not said.
pub(crate) const OURS: &str = "drover: ";
