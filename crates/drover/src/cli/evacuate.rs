//! `evacuate` on the command line.

use std::time::Duration;

use clap::Args;
use drover_agent::text;

/// Move all machines of this host to a peer
///
/// The machines are those that config.toml names (`[machines.NAME]`) or that have moved from here before, if they
/// are running. Each moves as with `drover migrate`. Those that cannot move keep running here; the others move all the same, and the command then fails.
/// It ends when all disks of those that moved are at the peer, also of those that moved before: until then they need this host.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover evacuate lyon --dry-run
  drover evacuate lyon --parallel 4
  systemctl enable --now drover-evacuate@lyon    before every shutdown (packaging/drover-evacuate@.service)")]
pub struct EvacuateArgs {
    /// Name of the peer
    pub peer: String,
    /// How many move at the same time
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub parallel: u16,
    /// How long each may be paused; without it, QEMU's default of 300ms
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub max_pause: Option<Duration>,
    /// Maximum network rate of all together in bytes per second, such as 20M or 512KiB [default: config.toml, else unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// List the machines that would move
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object per line: progress events, then the results
    #[arg(long)]
    pub json: bool,
}
