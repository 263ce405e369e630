//! `changes` on the command line.

use clap::{Args, Subcommand};
use drover_agent::images::new_name;
use drover_core::ImageName;

use super::values::{DomainArg, Format, ImageAt};

/// List the changes that mounts wrote to images of this site or of a peer; merge or drop them
///
/// Writes of a mount are stored beside the image, which stays as it was received. Later mounts see the image with its changes.
/// At a peer, this site sees the changes to images that it sent there and those that its mounts wrote, and can merge and drop the former.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover changes
  drover changes --json
  drover changes merge web.qcow2           make the changes part of the image
  drover changes merge web.qcow2 --as web-2026.qcow2
  drover changes drop web.qcow2            return to the image as it was received
  drover changes lyon                      at lyon
  drover changes merge lyon:web.qcow2"
)]
pub struct ChangesArgs {
    #[command(subcommand)]
    pub action: Option<ChangesAction>,
    /// Name of a peer [default: this site]
    #[arg(conflicts_with = "domain")]
    pub peer: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// The commands of `changes`.
#[derive(Debug, Subcommand)]
pub enum ChangesAction {
    /// List changes
    #[command(after_help = "\
Examples:
  drover changes list
  drover changes list lyon --json")]
    List {
        /// Name of a peer [default: this site]
        #[arg(conflicts_with = "domain")]
        peer: Option<String>,
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    Merge(MergeArgs),
    Drop(DropArgs),
}

/// Merge the changes of an image into it, or into a new image
///
/// Without --as, the image is replaced: it gets a new digest, and the received version is gone. Only raw and qcow2 images that are
/// stored at this site can be replaced; for other formats and for indexed images, use --as. The merged image is written beside
/// the old file, so the file system needs space for both. The image cannot be mounted during the merge. An interrupted merge
/// either leaves the image unchanged, or is completed when the site starts or the command is run again. Succeeds if there is nothing to merge.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover changes merge web.qcow2
  drover changes merge web.qcow2 --dry-run                    show the space needed
  drover changes merge web.qcow2 --as web-2026.qcow2          web.qcow2 keeps its changes
  drover changes merge web.qcow2 --as web-2026.qcow2 --drop   drop them from web.qcow2
  drover changes merge old.vmdk --as old.qcow2 --to qcow2
  drover changes merge lyon:web.qcow2                         an image that this site sent to lyon")]
pub struct MergeArgs {
    /// Name of the image, at PEER or here
    #[arg(value_name = "[PEER:]IMAGE")]
    pub image: ImageAt,
    /// Write a new image of this name; keep the old one and its changes
    #[arg(long = "as", value_name = "NAME", value_parser = new_name)]
    pub rename: Option<ImageName>,
    /// Format of the new image [default: that of the old one, which must be raw or qcow2]
    #[arg(long, value_enum, value_name = "FORMAT", requires = "rename")]
    pub to: Option<Format>,
    /// Drop the changes of the old image once the new image is complete
    #[arg(long, requires = "rename")]
    pub drop: bool,
    /// Show what would be merged and the space needed
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Drop the changes of an image: it is then as it was received
///
/// Cannot be undone. Refused while the image is mounted or a mount still holds its write lease. Succeeds if there is nothing to drop.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover changes drop web.qcow2
  drover changes drop web.qcow2 --dry-run
  drover changes drop web.qcow2 --yes      in a script
  drover changes drop web.qcow2 --earlier  changes of replaced images of that name
  drover changes drop lyon:web.qcow2       at lyon")]
pub struct DropArgs {
    /// Name of the image, at PEER or here
    #[arg(value_name = "[PEER:]IMAGE")]
    pub image: ImageAt,
    /// Drop the changes of earlier images of that name, which have been replaced
    #[arg(long)]
    pub earlier: bool,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    /// Show what would be dropped
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
