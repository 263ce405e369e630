//! The command line of `space`.

use clap::Args;

/// Say what takes room at this site, and how it can be given back
///
/// Works whether the site is running or not, and on a full disk. SIZE is what the files say they hold, ON DISK what they take:
/// holes take nothing. On xfs and btrfs files can share room, which counts for each of them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover space
  drover space --json")]
pub struct SpaceArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
