//! Image formats, detected from the content.

use std::fmt;
use std::str::FromStr;

/// A disk image format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// The disk's bytes without any metadata.
    Raw,
    /// QEMU copy-on-write, versions 2 and 3.
    Qcow2,
    /// VMware: sparse files, and descriptors with several extents.
    Vmdk,
    /// Hyper-V, the newer format.
    Vhdx,
    /// VirtualBox.
    Vdi,
    /// Virtual PC and Hyper-V, the older format ("vpc" in QEMU).
    Vhd,
}

impl Format {
    /// The format's name in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
            Format::Vhdx => "vhdx",
            Format::Vdi => "vdi",
            Format::Vhd => "vhd",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The text is no format name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a disk image format (raw, qcow2, vmdk, vhdx, vdi, vhd)")]
pub struct ParseFormatError(String);

impl FromStr for Format {
    type Err = ParseFormatError;

    fn from_str(s: &str) -> Result<Self, ParseFormatError> {
        match s.to_ascii_lowercase().as_str() {
            "raw" => Ok(Format::Raw),
            "qcow2" => Ok(Format::Qcow2),
            "vmdk" => Ok(Format::Vmdk),
            "vhdx" => Ok(Format::Vhdx),
            "vdi" => Ok(Format::Vdi),
            "vhd" | "vpc" => Ok(Format::Vhd),
            _ => Err(ParseFormatError(s.to_owned())),
        }
    }
}
