//! What a snapshot is made of, as it is named on the command line.

use std::path::PathBuf;
use std::str::FromStr;

use super::migrate::Hypervisor;

/// What a snapshot is made of.
#[derive(Debug, Clone)]
pub enum SnapshotOf {
    /// The disks of a machine.
    Machine(Hypervisor),
    /// A file, a mount, or an image.
    Named(PathBuf),
}

impl FromStr for SnapshotOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("qmp" | "libvirt", _)) => text.parse().map(SnapshotOf::Machine),
            _ => Ok(SnapshotOf::Named(text.into())),
        }
    }
}
