//! `transfers` on the command line.

use clap::{Args, Subcommand};

/// List the transfers that are not finished, at this site or at a peer; remove what is left of them
///
/// A transfer that was stopped waits for its source: sending the image again, under the same name, goes on where it was. What nothing
/// comes to for a week is removed by the site itself (`keep-unfinished` in config.toml). One whose log is damaged is shown by its key.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover transfers                    images on their way to this site
  drover transfers lyon               images on their way to lyon
  drover transfers --json
  drover transfers rm web.qcow2       give its room back"
)]
pub struct TransfersArgs {
    #[command(subcommand)]
    pub action: Option<TransfersAction>,
    /// The peer; this site when left out
    pub peer: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// What to do with transfers.
#[derive(Debug, Subcommand)]
pub enum TransfersAction {
    /// List them
    #[command(after_help = "\
Examples:
  drover transfers list
  drover transfers list lyon --json")]
    List {
        /// The peer; this site when left out
        peer: Option<String>,
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    Rm(TransfersRmArgs),
}

/// Remove what is left of transfers that were stopped: sent again, the images begin anew
///
/// Refused for a transfer that is under way. At a peer only transfers that this site began can be removed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover transfers rm web.qcow2
  drover transfers rm web.qcow2 db.raw --dry-run
  drover transfers rm 5f1c0a8e6b2d4c7f9e3a1b5d7c9e0f24    by its key, as --json shows it
  drover transfers rm web.qcow2 --at lyon --yes

Exit codes: 0 done; 1 failed; 2 usage; 3 refused, or there is no such transfer.")]
pub struct TransfersRmArgs {
    /// Keys of transfers, or names of images
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Of transfers from this site to that peer
    #[arg(long, value_name = "PEER")]
    pub at: Option<String>,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Only say what would go
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}
