//! `profile` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};
use drover_agent::text;
use drover_core::ImageName;

use super::values::{DomainArg, ImageAt, image_name};

/// Show and record what a machine reads of an image from its start until it serves
///
/// The profile of an image is recorded while a mount of it is used, and several boots are merged: what one boot in five or fewer
/// reads goes last. It is sent along with the image (`drover send`), and mounts fetch what it names before the rest (`--prefetch
/// profile`, the default). Blocks of the image that have changed are removed from it when it is used. Without a command, shows a
/// map of the disk: the denser a character, the more is read there.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  drover export web.qcow2 --nbd unix:/run/web.sock --profile --for 2m
                                             then start the machine: its boot is recorded
  drover profile record /run/web.sock --for 2m       the same for what is mounted already
  drover profile web.qcow2                   show it
  drover profile web.qcow2 --svg web.svg     as a picture
  drover profile lyon:web.qcow2              that of an image at lyon
  drover profile export web.qcow2 web.profile
  drover profile import vm7.qcow2 web.profile        for an image with the same files
  drover profile forget web.qcow2"
)]
pub struct ProfileArgs {
    #[command(subcommand)]
    pub action: Option<ProfileAction>,
    /// Name of the image, at PEER or here
    #[arg(value_name = "[PEER:]IMAGE", required = true)]
    pub image: Option<ImageAt>,
    /// Write the map to FILE as a picture; the colour says when a place is read
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub svg: Option<PathBuf>,
    /// Print one JSON object, with every region
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// The commands of `profile`.
#[derive(Debug, Subcommand)]
pub enum ProfileAction {
    /// Begin to record what is read of a mount, for the profile of its image
    ///
    /// Begin before the machine is started. The recording ends after --for, by `drover profile stop` or with the mount, and is
    /// then merged into the profile of the image at the site that has the image. Reads that the machine's own cache answers are not seen.
    #[command(after_help = "\
Examples:
  drover profile record /mnt/web --for 120s
  drover profile record /dev/nbd0")]
    Record {
        /// Path, device, socket or name of the mount
        #[arg(value_name = "MOUNT", value_hint = ValueHint::AnyPath)]
        what: String,
        /// How long [default: until `drover profile stop`, or the end of the mount]
        #[arg(long = "for", value_name = "DURATION", value_parser = text::parse_duration)]
        limit: Option<Duration>,
    },
    /// End the recording of a mount, and merge it into the profile of its image
    #[command(after_help = "\
Examples:
  drover profile stop /mnt/web")]
    Stop {
        /// Path, device, socket or name of the mount
        #[arg(value_name = "MOUNT", value_hint = ValueHint::AnyPath)]
        what: String,
        /// Print one JSON object per disk
        #[arg(long)]
        json: bool,
    },
    /// Write the profile of an image to a file
    #[command(after_help = "\
Examples:
  drover profile export web.qcow2 web.profile
  drover profile export lyon:web.qcow2 web.profile")]
    Export {
        /// Name of the image, at PEER or here
        #[arg(value_name = "[PEER:]IMAGE")]
        image: ImageAt,
        /// File to write; replaced if it exists
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Make the profile in a file that of an image
    ///
    /// It may be of another image. What the image has of it is found by content: in the same places, or, as in an image derived from
    /// it or after a defragmentation, anywhere, for which the whole image is read. A profile that the image has is replaced.
    #[command(after_help = "\
Examples:
  drover profile import vm7.qcow2 web.profile")]
    Import {
        /// Name of the image
        #[arg(value_name = "IMAGE", value_parser = image_name)]
        image: ImageName,
        /// File to read
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Forget the profile of an image
    #[command(after_help = "\
Examples:
  drover profile forget web.qcow2
  drover profile forget web.qcow2 --yes")]
    Forget {
        /// Name of the image
        #[arg(value_name = "IMAGE", value_parser = image_name)]
        image: ImageName,
        /// Do not ask for confirmation
        #[arg(short, long)]
        yes: bool,
    },
}
