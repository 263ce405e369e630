//! The command line of trust: `ticket`, `pair`, `peers`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueHint};
use drover_agent::{addresses, text};
use drover_net::Rights;
use drover_store::{domain, peer_name};

use super::values::Quota;

/// Print a one-time ticket for another site to pair with this one, or list or revoke tickets
///
/// Works whether or not the site is running. The first site to use the ticket becomes a peer with the rights of the ticket:
/// treat it like a password. It is not printed to a file that other users can read.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover ticket                                gives the rights send,read,write
  drover ticket --out lyon.ticket              in a file that only you can read
  drover ticket --name vm --can send --quota 500G --expires 1h
  drover ticket --name offsite --can read      for a host that only copies from here
  drover ticket --advertise lyon.example.net:7377
  ssh lyon drover ticket | drover pair - --name lyon
  drover ticket --list
  drover ticket --revoke 5f3a9c02

Rights:
  send    send images, and replace and remove those that it sent
  read    verify images, and mount them read-only
  write   with read: mount images for writing that it sent, or that belong to no peer;
          merge or drop the changes to those that it sent
  match   have digests matched, and nothing else: for sites that use a teleporter
  admin   remove and share every image; with send or write: replace or write every image
  host    with send: bring machines that config.toml expects, and disks that programs use
  backup  make snapshots in the vault of this site, and read its own; delete nothing
  sync, swap and node have no use yet.
  Several are separated by commas; none is none of them.")]
pub struct TicketArgs {
    /// What the peer may do here
    #[arg(long, value_name = "RIGHTS", default_value_t = Rights::DEFAULT)]
    pub can: Rights,
    /// Name that the peer gets here [default: the one it proposes]
    #[arg(long, value_parser = peer_name::check)]
    pub name: Option<String>,
    /// Domain of the peer: it sees the images of this domain only
    #[arg(long, value_parser = domain::check, default_value = domain::DEFAULT)]
    pub domain: String,
    /// Disk space that the peer may take here, or none for no limit
    #[arg(long, value_name = "SIZE", default_value = "none")]
    pub quota: Quota,
    /// Time until the ticket expires
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "24h")]
    pub expires: Duration,
    /// Address to put into the ticket instead of those the site listens on; repeatable
    #[arg(long, value_name = "HOST[:PORT]", value_parser = addresses::check)]
    pub advertise: Vec<String>,
    /// Write the ticket to FILE, which only this user can read (mode 0600)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "json")]
    pub out: Option<PathBuf>,
    /// Replace FILE if it exists
    #[arg(long, requires = "out")]
    pub force: bool,
    /// List the tickets of this site, without what makes them valid
    #[arg(long, conflicts_with_all = MAKING, conflicts_with = "revoke")]
    pub list: bool,
    /// Make the ticket with this ID invalid; a peer that has used it stays (see `drover peers forget`)
    #[arg(long, value_name = "ID", conflicts_with_all = MAKING)]
    pub revoke: Option<String>,
    /// Print one JSON object, or with --list one per line
    #[arg(long)]
    pub json: bool,
}

/// The options of a new ticket.
const MAKING: [&str; 8] = [
    "can",
    "name",
    "domain",
    "quota",
    "expires",
    "advertise",
    "out",
    "force",
];

/// Pair with another site: each side then knows the other's key
///
/// What this site may do there, the ticket says; what that site may do here, --can, and it is nothing unless given.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover pair --name lyon                      asks for the ticket
  drover pair - --name lyon < lyon.ticket
  ssh lyon drover ticket | drover pair - --name lyon
  drover pair --name lyon --can read           lyon may also read the images of this site

`drover ticket --help` lists the rights.")]
pub struct PairArgs {
    /// Ticket printed by `drover serve` or `drover ticket` at the other site, or - to read it from stdin, which at a terminal
    /// asks for it [default: -]. Prefer stdin: every user of this host can read the arguments of a running command
    pub ticket: Option<String>,
    /// Local name for the peer [default: the name it proposes]
    #[arg(long, value_parser = peer_name::check)]
    pub name: Option<String>,
    /// What the peer may do here; none leaves a known peer what it has. It keeps its domain and its quota
    #[arg(long, value_name = "RIGHTS", default_value_t = Rights::NONE)]
    pub can: Rights,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// List peers, change what one may do, or stop trusting one
///
/// CAN is what the peer may do here; what this site may do there is not known here.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover peers
  drover peers --json
  drover peers set vm --can send,read
  drover peers forget lyon"
)]
pub struct PeersArgs {
    #[command(subcommand)]
    pub action: Option<PeersAction>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// The commands of `peers`.
#[derive(Debug, Subcommand)]
pub enum PeersAction {
    /// List peers
    #[command(after_help = "\
Examples:
  drover peers list
  drover peers list --json")]
    List {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Change what a peer may do here
    ///
    /// What it no longer may do ends at once, also what is under way. What is not given stays as it is.
    #[command(
        after_help = "\
Examples:
  drover peers set vm --can send,read
  drover peers set vm --can none               it stays a peer, and may do nothing
  drover peers set vm --quota 500G

`drover ticket --help` lists the rights.",
        group = ArgGroup::new("what").args(["can", "domain", "quota"]).multiple(true).required(true)
    )]
    Set {
        /// Name of the peer
        #[arg(value_name = "PEER")]
        name: String,
        /// What it may do here: all its rights, separated by commas, or none
        #[arg(long, value_name = "RIGHTS")]
        can: Option<Rights>,
        /// Domain of the peer: it sees the images of this domain only
        #[arg(long, value_parser = domain::check)]
        domain: Option<String>,
        /// Disk space that the peer may take here, or none for no limit
        #[arg(long, value_name = "SIZE")]
        quota: Option<Quota>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Stop trusting a peer, until it pairs again
    ///
    /// Its connections, mounts and leases end at once. A peer to which a machine or a disk was handed over, and that has not said
    /// whether it has it, is not forgotten; `drover peers set lyon --can none` takes its rights.
    #[command(after_help = "\
Examples:
  drover peers forget lyon
  drover peers forget lyon --yes      in a script")]
    Forget {
        /// Name of the peer
        #[arg(value_name = "PEER")]
        name: String,
        /// Do not ask for confirmation
        #[arg(short, long)]
        yes: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}
