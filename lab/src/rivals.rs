//! Rivals: other tools that transfer images, each with its best settings, behind one trait.

mod borg;
mod carrier;
mod casync;
mod dedup;
mod desync;
mod ends;
mod gzip;
mod nbd;
mod process;
mod restic;
mod rsync;
mod tool;
mod zstd;

pub use carrier::{Carrier, Rival};
pub use rsync::{Mode, Rsync};

/// The version that a program prints with `--version`.
///
/// # Errors
/// Why it cannot be used.
pub fn tool_version(program: &str) -> Result<String, String> {
    tool::version(program, &["--version"])
}

/// Rivals that are measured with flocks only.
pub const OF_FLOCKS: &[&dyn Rival] = &[
    &gzip::Gzip::ALL,
    &gzip::Gzip::SEPARATE,
    &dedup::DedupSeparate::BEST,
];

/// Every rival of single images, in the order of the document.
pub const ALL: &[&dyn Rival] = &[
    &zstd::Zstd::BEST,
    &rsync::Tuned::WHOLE,
    &rsync::Tuned::DELTA,
    &rsync::Tuned::ZSTD,
    &casync::Casync::BEST,
    &desync::Desync::BEST,
    &nbd::QemuNbd::BEST,
    &restic::Restic::BEST,
    &borg::Borg::BEST,
];

#[cfg(test)]
mod tests;
