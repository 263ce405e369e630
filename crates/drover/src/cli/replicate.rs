//! `replicate` and `failover` on the command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueHint};
use drover_agent::text;
use drover_core::ImageName;

use super::migrate::Hypervisor;
use super::values::{DomainArg, image_name};

/// Keep a copy of the disks of a running machine, or of a disk that a program uses, at a peer, as of one moment after another
///
/// Each round holds the state of all disks of one moment, while the machine writes on, and sends it: the first as `drover send` sends
/// images, later ones only what was written since. When all of it has been delivered and verified it is the replica, and the state before
/// is removed; an interrupted round leaves the state before as it is. Nobody can write the replica until `drover failover` at the
/// peer makes it usable. The machine is paused for milliseconds a round, and never stopped.
///
/// The peer gives this site the right send. What is lost if this host is lost is what was written since the newest complete
/// state: --list says how old that is, at both sites.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover replicate qmp:/run/web.qmp lyon --every 15m
  drover replicate qmp:/run/web.qmp lyon --as web --once        for timers
  drover replicate qmp:/run/web.qmp lyon --every 1h --pause 'fsfreeze-web -f' --resume 'fsfreeze-web -u'
  drover replicate web.raw lyon --every 5m                      a disk that a program uses by an export or mount
  drover replicate --list
  drover replicate --forget web

Then, at lyon:
  drover failover web --dry-run
  drover failover web

Exit code 4: the replica has taken over; what runs here is the old copy.")]
pub struct ReplicateArgs {
    /// The machine: qmp: and the QMP socket of its QEMU; or an image of this site that a mount, attach or export serves for writing
    #[arg(value_name = "MACHINE|IMAGE", value_hint = ValueHint::FilePath, required_unless_present_any = ["list", "forget"])]
    pub of_what: Option<Replicated>,
    /// Name of the peer
    #[arg(required_unless_present_any = ["list", "forget"])]
    pub peer: Option<String>,
    /// Name of the replica at the peer [default: its name here]
    #[arg(long = "as", value_name = "NAME", value_parser = image_name)]
    pub rename: Option<ImageName>,
    /// Begin a round this often, until the command is stopped; only what was written in between is read
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, required_unless_present_any = ["list", "forget", "once"])]
    pub every: Option<Duration>,
    /// Make one round; all disks are read, and what the peer has does not cross
    #[arg(long, conflicts_with = "every")]
    pub once: bool,
    /// Command that brings the programs into a state that is good to begin from, before the state of the disks is held; run by /bin/sh
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub pause: Option<String>,
    /// Command that lets the programs go on, as soon as it is held
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub resume: Option<String>,
    /// Maximum network rate in bytes per second, such as 20M or 512KiB [default: config.toml, else unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// Compression: auto, none, lz4, or a zstd level from 1 to 15
    #[arg(long, value_name = "LEVEL", value_parser = text::parse_compress, default_value = "auto")]
    pub compress: text::Compress,
    /// Directory for what the machine overwrites while a round is sent, at most all of its disks [default: in the site directory]
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// How long to retry a lost connection before the round is given up
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// List the replicas that this site keeps, and those that it sends
    #[arg(long, conflicts_with_all = ["of_what", "peer", "forget"])]
    pub list: bool,
    /// Forget a replica. Its images here stay; also allows the source of one that has taken over to begin anew
    #[arg(long, value_name = "NAME", value_parser = image_name, conflicts_with_all = ["of_what", "peer"])]
    pub forget: Option<ImageName>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// What is replicated, as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replicated {
    /// The disks of a machine.
    Machine(Hypervisor),
    /// An image of this site.
    Image(ImageName),
}

impl FromStr for Replicated {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("qmp" | "libvirt", _)) => text.parse().map(Replicated::Machine),
            _ => image_name(text).map(Replicated::Image),
        }
    }
}

impl fmt::Display for Replicated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Replicated::Machine(machine) => machine.fmt(f),
            Replicated::Image(image) => image.fmt(f),
        }
    }
}

/// Make a replica that this site keeps usable: the machine is here from now on
///
/// Its disks become images of this site that can be mounted for writing or exported, as of the newest complete state; if config.toml
/// says how the machine is started, it is started with them. No later round of the
/// source is accepted. The source is not stopped: if it still runs there are two machines. This site cannot know that, however long
/// it has not heard of it: you are asked, and told when that was.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover failover web --dry-run
  drover failover web
  drover export web-0.a.raw --nbd unix:/run/web-0.sock

In config.toml, to have it started:
  [machines.web]
  incoming = \"/run/web.qmp\"
  start = [\"/usr/local/bin/start-web\"]    as `drover migrate --start-script` prints it")]
pub struct FailoverArgs {
    /// The replica, as `drover replicate --list` lists it
    #[arg(value_name = "NAME", value_parser = image_name)]
    pub name: ImageName,
    /// Only say what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// Do not start the machine, even if config.toml says how
    #[arg(long)]
    pub no_start: bool,
    /// Do not ask: you know that its source does not run any more
    #[arg(short, long)]
    pub yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}
