//! Format detection from a file's content, and dispatch to the parsers.

use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::Container;
use crate::{Format, ImageError, qcow2, vdi, vhd, vhdx, vmdk};

impl Container {
    /// Parses `file` in its detected format.
    pub(crate) fn open(file: &Arc<dyn ReadAt>) -> Result<Self, ImageError> {
        let Probe {
            format,
            foreign,
            luks,
        } = probe(file)?;
        let mut container = match format {
            Format::Raw => Container::raw(file.len()),
            Format::Qcow2 => qcow2::open(file)?,
            Format::Vmdk => vmdk::open(file)?,
            Format::Vhdx => vhdx::open(file)?,
            Format::Vdi => vdi::open(file)?,
            Format::Vhd => vhd::open(file)?,
        };
        if let Some(name) = foreign {
            container.notes.push(format!(
                "a {name} image is not understood: sent as raw bytes"
            ));
            container.sealed = Some(format!("{name} is not a format that drover reads"));
        }
        if luks {
            container
                .notes
                .push("it is encrypted (LUKS): its blocks cannot match other images".into());
        }
        Ok(container)
    }
}

/// The result of format detection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) format: Format,
    /// Name of an unsupported container format, which is treated as raw.
    pub(crate) foreign: Option<&'static str>,
    /// The raw disk is an encrypted LUKS volume.
    pub(crate) luks: bool,
}

/// Examines the first sectors of `file`, and the last for a fixed vhd.
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
    if start.starts_with(b"KDMV") || vmdk::is_descriptor(start) {
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
