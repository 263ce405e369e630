//! Which format a file has, told by its content.

use std::fmt;
use std::str::FromStr;

use drover_core::ReadAt;

use crate::{ImageError, vhd};

/// A disk image format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// The disk's bytes and nothing else.
    Raw,
    /// QEMU copy-on-write, versions 2 and 3.
    Qcow2,
    /// VMware: sparse files, and descriptors of several files.
    Vmdk,
    /// Hyper-V, the newer.
    Vhdx,
    /// VirtualBox.
    Vdi,
    /// Virtual PC and Hyper-V, the older ("vpc" in QEMU).
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

/// The text names no format.
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

/// What a file's content says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) format: Format,
    /// A container that is not read here and is therefore taken as raw: its name.
    pub(crate) foreign: Option<&'static str>,
    /// A raw disk that is one encrypted volume.
    pub(crate) luks: bool,
}

/// Looks at the first sectors of `file`, and at the last for a fixed vhd.
pub(crate) fn probe(file: &dyn ReadAt) -> Result<Probe, ImageError> {
    let mut start = [0u8; 512];
    let len = file.len();
    let n = usize::try_from(len).unwrap_or(usize::MAX).min(start.len());
    file.read_exact_at(&mut start[..n], 0)
        .map_err(|e| ImageError::io("read the first sector", e))?;
    let start = &start[..n];
    let known = |format| {
        Ok(Probe {
            format,
            foreign: None,
            luks: false,
        })
    };
    if let Some(name) = foreign(start) {
        return Ok(Probe {
            format: Format::Raw,
            foreign: Some(name),
            luks: false,
        });
    }
    if start.starts_with(b"QFI\xfb") {
        return known(Format::Qcow2);
    }
    if start.starts_with(b"KDMV") || is_descriptor(start) {
        return known(Format::Vmdk);
    }
    if start.starts_with(b"vhdxfile") {
        return known(Format::Vhdx);
    }
    if start.get(0x40..0x44) == Some(&[0x7f, 0x10, 0xda, 0xbe]) {
        return known(Format::Vdi);
    }
    if start.starts_with(b"conectix") || vhd::has_fixed_footer(file)? {
        return known(Format::Vhd);
    }
    Ok(Probe {
        format: Format::Raw,
        foreign: None,
        luks: start.starts_with(b"LUKS\xba\xbe"),
    })
}

/// Whether a vmdk text descriptor begins here.
pub(crate) fn is_descriptor(start: &[u8]) -> bool {
    const FIRST_LINE: &[u8] = b"# Disk DescriptorFile";
    start
        .get(..FIRST_LINE.len())
        .is_some_and(|s| s.eq_ignore_ascii_case(FIRST_LINE))
}

fn foreign(start: &[u8]) -> Option<&'static str> {
    const KNOWN: &[(&[u8], &str)] = &[
        (b"QFI\xfb\0\0\0\x01", "qcow version 1"),
        (b"QED\0", "qed"),
        (b"COWD", "vmdk (VMFS sparse)"),
        (b"\xbe\xba\xfe\xca\0\0\0\0", "vmdk (SEsparse)"),
        (b"WithoutFreeSpace", "parallels"),
        (b"WithouFreSpacExt", "parallels"),
        (b"Bochs Virtual HD Image", "bochs"),
        (b"EVF\x09\x0d\x0a\xff\x00", "expert witness"),
    ];
    KNOWN
        .iter()
        .find(|(magic, _)| start.starts_with(magic))
        .map(|&(_, name)| name)
}
