//! The command line of `space`.

use clap::Args;

use super::values::DomainArg;

/// Show the disk space used by this site, and how to free it
///
/// Works whether or not the site is running, and on a full disk. SIZE is the length of the files, ON DISK the space allocated to
/// them: holes take none. The emergency space, 8 MiB, is used by commands that free space on a full disk. On xfs and btrfs, space shared between files is counted for each of them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover space
  drover space --json")]
pub struct SpaceArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}
