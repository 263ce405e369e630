//! An image in another format, by `qemu-img`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use super::jail;
use super::table::Format;
use crate::shell;

const LIMIT: Duration = Duration::from_secs(1200);

/// Converts a raw image; returns how, for the manifest.
///
/// # Errors
/// When `qemu-img` is not there or fails.
pub fn make(name: &str, base: &Path, format: Format, out: &Path) -> Result<String> {
    if !shell::have("qemu-img") {
        bail!("qemu-img is not installed (qemu-utils)");
    }
    let options: &[&str] = match format {
        Format::Raw | Format::Qcow2 => &[],
        Format::Vmdk => &["-o", "subformat=monolithicSparse"],
        Format::Vhdx => &["-o", "subformat=dynamic"],
    };
    let mut command = jail::command(LIMIT, "qemu-img");
    command
        .args(["convert", "-f", "raw", "-O", format.name()])
        .args(options)
        .args([base, out]);
    jail::run(&format!("{name}: qemu-img"), &mut command, None)?;
    Ok(
        format!("qemu-img convert -O {format} {}", options.join(" "))
            .trim()
            .to_owned(),
    )
}
