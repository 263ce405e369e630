//! `changes` on the command line.

use clap::{Args, Subcommand};
use drover_core::ImageName;

use super::image_name;

/// List what mounts wrote over this site's images, or drop it
///
/// What a mount writes lies beside the image, which stays as it was delivered; mounts see both together.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover changes
  drover changes --json
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
    Drop(DropArgs),
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
