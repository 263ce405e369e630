//! Arguments of `audit`.

use clap::Args;
use drover_agent::audit::{self, Timestamp};
use drover_core::ImageName;

use super::values::image_name;

/// Show the audit log: who was let in, what they did to which image, and what they were refused
///
/// Of all domains, the oldest event first. Events that a peer can cause at will, such as connections and refusals, are ten a minute
/// for each peer; a line says how many more there were. The log is in audit.log in the site directory, 40 MiB in all; older events
/// are dropped. PEER is the peer that did it or that it was done to, (user) the site's own user, (site) the site by itself.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover audit
  drover audit --since 1h --refused
  drover audit --since 2026-11-23T18:00:00Z
  drover audit --peer acme --image web.qcow2
  drover audit --follow --json | logger -t drover")]
pub struct AuditArgs {
    /// Only events since then: a time before now such as 90s, 1h30m or 7d, or a moment such as 2026-11-23T18:00:00Z
    #[arg(long, value_name = "TIME", value_parser = audit::since)]
    pub since: Option<Timestamp>,
    /// Only events of this peer, by its name here or the beginning of its key (8 or more characters); also one that was forgotten
    #[arg(long)]
    pub peer: Option<String>,
    /// Only events about this image
    #[arg(long, value_parser = image_name)]
    pub image: Option<ImageName>,
    /// Only what was refused
    #[arg(long)]
    pub refused: bool,
    /// Go on as events are added, until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
    /// Print one JSON object per line, as in the file
    #[arg(long)]
    pub json: bool,
}
