//! `changes` on the command line.

use clap::{Args, Subcommand};
use drover_core::ImageName;

use super::values::{Target, image_name};

/// List what mounts wrote over this site's images, make it part of them, or drop it
///
/// What a mount writes lies beside the image, which stays as it was delivered; mounts see both together.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover changes
  drover changes --json
  drover changes merge web.qcow2           what mounts wrote becomes part of the image
  drover changes merge web.qcow2 --as web-2026.qcow2
  drover changes drop web.qcow2            the image is again as it was delivered"
)]
pub struct ChangesArgs {
    #[command(subcommand)]
    pub action: Option<ChangesAction>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// What to do with changes.
#[derive(Debug, Subcommand)]
pub enum ChangesAction {
    /// List them
    #[command(after_help = "\
Examples:
  drover changes list
  drover changes list --json")]
    List {
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    Merge(MergeArgs),
    Drop(DropArgs),
}

/// Make what mounts wrote over an image part of it, or of a new image
///
/// The image gets a new digest, and what was delivered is gone; with --as it stays, and a new image is made. A raw or
/// qcow2 image is written anew beside the old one and takes its place when it is whole, so that this needs room. Mounts
/// are kept away until it is done. A merge that is interrupted leaves the image as it was, or is finished when the site
/// starts or the command is run again. An image that was indexed where it is is never changed: use --as.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover changes merge web.qcow2
  drover changes merge web.qcow2 --dry-run                          what it would take
  drover changes merge web.qcow2 --as web-2026.qcow2                web.qcow2 keeps its changes
  drover changes merge web.qcow2 --as web-2026.qcow2 --drop         and this drops them there
  drover changes merge old.vmdk --as old.qcow2 --to qcow2

Exit codes: 0 done, or there was nothing to merge; 1 failed; 2 usage; 3 refused, no room, or there is no such image.")]
pub struct MergeArgs {
    /// The image
    #[arg(value_parser = image_name)]
    pub name: ImageName,
    /// Make a new image of this name, and leave this one with its changes as it is
    #[arg(long = "as", value_name = "NAME", value_parser = image_name)]
    pub rename: Option<ImageName>,
    /// The format of the new image [default: as it is]
    #[arg(long, value_enum, value_name = "FORMAT", requires = "rename")]
    pub to: Option<Target>,
    /// Drop the changes of the old image once the new one is made
    #[arg(long, requires = "rename")]
    pub drop: bool,
    /// Only say what would happen, and what room it takes
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Drop what mounts wrote over an image: it is again as it was delivered
///
/// Refused while somebody has the image mounted or may still write it. It cannot be undone.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover changes drop web.qcow2
  drover changes drop web.qcow2 --dry-run
  drover changes drop web.qcow2 --yes      in a script
  drover changes drop web.qcow2 --earlier  what was written over images that were replaced since

Exit codes: 0 done, or nothing was there; 1 failed; 2 usage; 3 refused, or there is no such image.")]
pub struct DropArgs {
    /// The image
    #[arg(value_parser = image_name)]
    pub name: ImageName,
    /// What was written over earlier images of that name, and set aside when they were replaced
    #[arg(long)]
    pub earlier: bool,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Only say what would go
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
