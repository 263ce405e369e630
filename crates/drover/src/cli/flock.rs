//! `flock`, and the options of `send` for flocks, on the command line.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use drover_core::ImageName;

use super::values::DomainArg;
use drover_agent::images::new_name;

/// How many images of a flock may be sent at once.
pub const MAX_AT_ONCE: usize = 4;

/// The options of `send` for images that are sent together.
#[derive(Debug, Args)]
pub struct FlockOptions {
    /// Send the images as one job of this name, a flock: `drover flock` lists it, and sending it again sends what changed
    ///
    /// The report says for each image how much of it was zeros, repeated within it, came from the other images, was at the peer before, and was sent.
    #[arg(long = "flock", value_name = "NAME", value_parser = new_name)]
    pub flock: Option<ImageName>,
    /// Send the flock that this TOML file describes: images, their names at the peer, the order in which they start, limits
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["flock", "rename", "to", "opaque"])]
    pub flock_file: Option<PathBuf>,
    /// Deliver all images of the flock, or none: they get their names together once all have arrived
    #[arg(long)]
    pub atomic: bool,
    /// Number of images of the flock that are sent at once, 1 to 4 [default: 1]
    #[arg(long, value_name = "N", value_parser = at_once)]
    pub at_once: Option<usize>,
}

/// Whether that many images may be sent at once.
///
/// # Errors
/// A message for the user.
pub fn at_once(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=MAX_AT_ONCE).contains(n));
    number.ok_or_else(|| format!("must be from 1 to {MAX_AT_ONCE}"))
}

/// List flocks: groups of images that are sent together
///
/// Without PEER, those that this site receives and those that it sends, with PEER those at PEER. ZERO is zeros, OWN is repeated
/// within the image, FLOCK came from the other images of the flock (it first came to the peer with it), SITE was there before,
/// and SENT crossed the link, before compression. An image that has arrived is complete, and gets its name with the rest of its
/// flock. An image is LAUNCHABLE if `drover launch` can use it at the site that receives it now, be it complete or not. Flocks that nothing has happened to for a week (`keep-unfinished` in config.toml) are no longer listed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover send web.qcow2 db.qcow2 nfs.qcow2 lyon --flock shop
  drover flock                        flocks that this site receives or sends
  drover flock lyon                   what lyon knows of those that this site sends there
  drover flock --json")]
pub struct FlockArgs {
    /// Name of a peer [default: this site]
    #[arg(conflicts_with = "domain")]
    pub peer: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}
