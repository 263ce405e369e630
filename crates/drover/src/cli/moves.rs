//! `move` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use drover_agent::images::new_name;
use drover_agent::text;
use drover_core::ImageName;

use super::values::{DomainArg, image_name};

/// Move a disk that a program uses to a peer, while it is used
///
/// The disk is an image of this site that a local export, mount or attach serves for writing. Its state at the beginning is sent as
/// `drover send` sends images; what the program writes meanwhile follows in rounds. At the end the disk is frozen: requests
/// wait. The last round follows, the peer takes the disk, and the mount here ends. Until then it is here whatever happens. At the
/// peer it is an image in raw format, which `drover export`, `mount` or `attach` there serves for writing. At no time can it be written at both sites.
///
/// The peer gives this site the rights send and host. The copy here is kept for the way back, which then sends only what changed, and cannot be written.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover move web.qcow2 lyon
  drover move web.qcow2 lyon --pause 'systemctl stop web' --resume 'systemctl start web'
  drover move web.qcow2 lyon --max-pause 100ms
  drover move web.qcow2 lyon --dry-run
  drover move --list
  drover move --abort web.qcow2")]
pub struct MoveArgs {
    /// The image, as `drover images` lists it
    #[arg(value_name = "IMAGE", value_parser = image_name, required_unless_present_any = ["list", "abort"])]
    pub image: Option<ImageName>,
    /// Name of the peer
    #[arg(required_unless_present_any = ["list", "abort"])]
    pub peer: Option<String>,
    /// Name of the image at the peer [default: its name here, ending in .raw]
    #[arg(long = "as", value_name = "NAME", value_parser = new_name)]
    pub rename: Option<ImageName>,
    /// Command that pauses the program before the last round; run by /bin/sh, in the process that serves the disk. Or
    /// unix:PATH, a socket of the program: it reads the line `pause`, and answers `ok`
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub pause: Option<String>,
    /// Command that lets the program go on if the disk stays here after all; or unix:PATH, which reads `resume`
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub resume: Option<String>,
    /// Begin the last round only when a round takes no longer than this; the pause may still be longer
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub max_pause: Option<Duration>,
    /// Maximum network rate in bytes per second, such as 20M or 512KiB [default: config.toml, else unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// Directory for old contents of blocks that the program overwrites while its disk is sent; up to the size of the disk [default: in the site directory]
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// How long to retry a lost connection before the disk stays here
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// Estimate the bytes to transfer
    #[arg(long)]
    pub dry_run: bool,
    /// List the disks that have moved to this site or from it, or are about to
    #[arg(long, conflicts_with_all = ["image", "peer", "abort"])]
    pub list: bool,
    /// Give up the move of a disk, which stays here; at the peer: reject one that is coming
    #[arg(long, value_name = "IMAGE", value_parser = image_name, conflicts_with_all = ["image", "peer"])]
    pub abort: Option<ImageName>,
    /// Print one JSON object per line: progress events, then the result
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}
