//! `transfers` on the command line.

use clap::{Args, Subcommand};

use super::values::DomainArg;

/// List unfinished transfers to this site or to a peer, or remove them
///
/// An interrupted transfer resumes when the same image is sent again under the same name. The receiving site removes a
/// transfer that received nothing for a week (`keep-unfinished` in config.toml). If the record of a
/// transfer is damaged, its name is unknown, and it is listed by its key of 32 hexadecimal digits (`--json` shows all keys).
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover transfers                    transfers to this site
  drover transfers lyon               transfers to lyon
  drover transfers --json
  drover transfers rm web.qcow2       remove one and free its space"
)]
pub struct TransfersArgs {
    #[command(subcommand)]
    pub action: Option<TransfersAction>,
    /// Name of a peer [default: this site]
    #[arg(conflicts_with = "domain")]
    pub peer: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// The commands of `transfers`.
#[derive(Debug, Subcommand)]
pub enum TransfersAction {
    /// List unfinished transfers
    #[command(after_help = "\
Examples:
  drover transfers list
  drover transfers list lyon --json")]
    List {
        /// Name of a peer [default: this site]
        #[arg(conflicts_with = "domain")]
        peer: Option<String>,
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    Rm(TransfersRmArgs),
}

/// Remove interrupted transfers; sending the image again then starts from the beginning
///
/// Refused for a transfer in progress. At a peer, only transfers sent by this site can be removed, or, with the right admin
/// there, all of its domain.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover transfers rm web.qcow2
  drover transfers rm web.qcow2 db.raw --dry-run
  drover transfers rm 5f1c0a8e6b2d4c7f9e3a1b5d7c9e0f24    by key, as shown by --json
  drover transfers rm web.qcow2 --at lyon --yes")]
pub struct TransfersRmArgs {
    /// Names of images, or keys of transfers
    #[arg(required = true, value_name = "NAME|KEY")]
    pub names: Vec<String>,
    /// Remove transfers from this site to PEER [default: transfers to this site]
    #[arg(long, value_name = "PEER", conflicts_with = "domain")]
    pub at: Option<String>,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    /// Show what would be removed
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}
