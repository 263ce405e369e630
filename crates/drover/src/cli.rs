//! The command line, as clap sees it; help, completions and man pages are made from it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use drover_agent::text;
use drover_core::ImageName;
use drover_store::peer_name;

mod changes;
mod mounts;
mod space;
mod transfers;
mod values;

pub use changes::{ChangesAction, ChangesArgs, DropArgs, MergeArgs};
pub use mounts::{
    AttachArgs, DaemonArgs, ExportArgs, HowArgs, MountArgs, MountsAction, MountsArgs, UnmountArgs,
};
pub use space::SpaceArgs;
pub use transfers::{TransfersAction, TransfersArgs, TransfersRmArgs};
pub use values::Target;
use values::image_name;

/// Moves disk images of virtual machines between sites, sending only what the far side lacks; and shows them where they are not.
#[derive(Debug, Parser)]
#[command(
    name = "drover",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  drover serve                          on the far machine: listen, and print a ticket
  drover pair TICKET --name lyon        here: trust each other
  drover send web.qcow2 lyon            send an image
  drover images lyon                    what is there
  drover mount lyon:web.qcow2 /mnt/web  use a disk before it is here

Exit codes: 0 done, 1 failed, 2 usage, 3 refused (trust, space, policy) or no image of that name."
)]
pub struct Cli {
    /// The site's directory [default: /var/lib/drover for root, else drover in the XDG data directory]
    #[arg(long, global = true, env = "DROVER_HOME", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub home: Option<PathBuf>,

    /// Say more on stderr: -v what happens, -vv details (DROVER_LOG=FILTER chooses finely)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    Init(InitArgs),
    Serve(ServeArgs),
    Ticket(TicketArgs),
    Pair(PairArgs),
    Send(SendArgs),
    Mount(MountArgs),
    Export(ExportArgs),
    Attach(AttachArgs),
    Unmount(UnmountArgs),
    Mounts(MountsArgs),
    Changes(ChangesArgs),
    Space(SpaceArgs),
    Images(ImagesArgs),
    Transfers(TransfersArgs),
    Index(IndexArgs),
    Verify(VerifyArgs),
    Rm(RmArgs),
    Status(StatusArgs),
    Teleporter(TeleporterArgs),
    Peers(PeersArgs),
    Digest(DigestArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    /// The mount daemon; started by mount, export and attach
    #[command(
        hide = true,
        after_help = "drover mount-daemon NAME is for drover itself."
    )]
    MountDaemon {
        /// The mount's name
        name: String,
    },
    /// The process that detaches a kernel device whose mount daemon has died; started by attach
    #[command(hide = true, after_help = "drover guard NAME is for drover itself.")]
    Guard {
        /// By which the device is known
        identifier: String,
    },
}

/// Make a site's directory: identity, catalog and a commented config.toml
///
/// Not needed before other commands: serve, pair and ticket make what they lack.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover init
  drover init --name lyon --images /srv/images --listen 0.0.0.0:7377")]
pub struct InitArgs {
    /// What this site calls itself to others [default: the host's name]
    #[arg(long, value_parser = peer_name::check)]
    pub name: Option<String>,
    /// Where delivered images go [default: images in the site's directory]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub images: Option<PathBuf>,
    /// Where serve listens [default: 0.0.0.0:7377]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Where to listen, and what to call it; the same for every kind of server.
#[derive(Debug, Args)]
pub struct ListenArgs {
    /// Where to listen; port 0 lets the system choose [default: 0.0.0.0:7377, or config.toml]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// An address for tickets, when others reach this site by another one than it sees; repeatable
    #[arg(long, value_name = "HOST[:PORT]")]
    pub advertise: Vec<String>,
    /// Where Prometheus can fetch metrics by HTTP; they are always on the site's own socket
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics_listen: Option<SocketAddr>,
}

/// Run a site: take images, until SIGTERM or Ctrl-C
///
/// Makes an identity on first use. When it is ready it prints one line on stdout: a fresh ticket.
/// Transfers that a stop interrupts are resumed when they are sent again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover serve
  drover serve --listen 0.0.0.0:7377 --advertise lyon.example.net
  drover serve --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:9377")]
pub struct ServeArgs {
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Match for other sites, without holding any image's data
///
/// A site whose config.toml says `teleporter = "NAME"` (a paired peer) asks this one what it has.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover teleporter --listen 0.0.0.0:7378      here; prints a ticket
  drover pair TICKET --name matcher            at the site that is to use it
  (then teleporter = \"matcher\" in that site's config.toml)")]
pub struct TeleporterArgs {
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Print a ticket that lets one other site pair with this one
///
/// Works whether the site is running or not. Hand it over like a password: who uses it first is trusted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover ticket
  drover ticket --expires 10m --advertise lyon.example.net:7377")]
pub struct TicketArgs {
    /// How long it is good
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "24h")]
    pub expires: Duration,
    /// An address to put into it, in place of those the site listens on; repeatable
    #[arg(long, value_name = "HOST[:PORT]")]
    pub advertise: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Trust another site, and be trusted by it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover pair drover1... --name lyon")]
pub struct PairArgs {
    /// The word that `drover serve` or `drover ticket` printed there
    pub ticket: String,
    /// What to call it here [default: what it calls itself]
    #[arg(long, value_parser = peer_name::check)]
    pub name: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Send images to a peer
///
/// The file there is byte for byte the file here, unless --to asks for a conversion. A name that
/// exists there is replaced in one step at the end. Sending again resumes what was interrupted.
#[derive(Debug, Args)]
#[command(
    override_usage = "drover send [OPTIONS] <IMAGE>... <PEER>",
    after_help = "\
Examples:
  drover send web.qcow2 lyon
  drover send web.qcow2 lyon --as web-2026.qcow2
  drover send *.vmdk lyon --limit 20M
  drover send *.vmdk lyon --compress 9
  drover send big.vhdx lyon --dry-run
  drover send old.vmdk lyon --to qcow2 --as old.qcow2"
)]
pub struct SendArgs {
    /// Image files, then the name of the peer
    #[arg(required = true, num_args = 2.., value_name = "IMAGE... PEER", value_hint = ValueHint::FilePath)]
    pub images_and_peer: Vec<PathBuf>,
    /// The name it gets there; for one image only [default: its file name]
    #[arg(long = "as", value_name = "NAME", value_parser = image_name)]
    pub rename: Option<ImageName>,
    /// The most bytes a second on the wire, as in 20M or 512KiB [default: config.toml, else none]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// Convert on the way
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with = "opaque")]
    pub to: Option<Target>,
    /// Do not look into the image: send its bytes in file order
    #[arg(long)]
    pub opaque: bool,
    /// Only say what would cross the link
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object a line on stdout: progress, and a last one with the result
    #[arg(long)]
    pub json: bool,
    /// Fail after trying this long to reach the peer again without progress
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// Connections for the data, 1 to 8 [default: as many as the link needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8))]
    pub lanes: Option<u16>,
    /// How hard to compress: auto, none, lz4, or a level of zstd from 1 to 15
    ///
    /// Left to itself, it follows the link and what both machines have time for. A level that stays
    /// is for measurements, and for leaving the processor to others (`none`, `lz4`, 1).
    #[arg(long, value_name = "LEVEL", value_parser = text::parse_compress, default_value = "auto")]
    pub compress: text::Compress,
}

/// List the images of this site, or of a peer
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover images
  drover images lyon --json")]
pub struct ImagesArgs {
    /// The peer; this site when left out
    pub peer: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Let image files that are here already serve as sources of blocks
///
/// The files stay where they are; drover never changes or deletes them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover index /srv/images/*.qcow2
  drover index /var/lib/libvirt/images")]
pub struct IndexArgs {
    /// Image files, or directories of them
    #[arg(required = true, value_hint = ValueHint::AnyPath)]
    pub paths: Vec<PathBuf>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Check an image against the digest both sides agreed on when it was sent
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover verify web.qcow2
  drover verify web.qcow2 lyon")]
pub struct VerifyArgs {
    /// The image
    #[arg(value_parser = image_name)]
    pub name: ImageName,
    /// The peer that has it; this site when left out
    pub peer: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Remove an image from this site
///
/// An image that was indexed where it is is only forgotten; its file stays.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover rm web.qcow2
  drover rm web.qcow2 --yes
  drover rm web.qcow2 --dry-run")]
pub struct RmArgs {
    /// The image
    #[arg(value_parser = image_name)]
    pub name: ImageName,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Only say what would go
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Say what the running site does
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover status
  drover status --metrics")]
pub struct StatusArgs {
    /// Print one JSON object
    #[arg(long, conflicts_with = "metrics")]
    pub json: bool,
    /// Print the metrics as Prometheus reads them
    #[arg(long)]
    pub metrics: bool,
}

/// List the peers, or stop trusting one
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover peers
  drover peers forget lyon"
)]
pub struct PeersArgs {
    #[command(subcommand)]
    pub action: Option<PeersAction>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// What to do with peers.
#[derive(Debug, Subcommand)]
pub enum PeersAction {
    /// List them
    List {
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Stop trusting a peer; it must pair again
    Forget {
        /// Its name
        name: String,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
}

/// Print the digest of image files, as `send` and `images` show it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover digest web.qcow2")]
pub struct DigestArgs {
    /// Any files
    #[arg(required = true, value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover completions bash > /etc/bash_completion.d/drover
  drover completions zsh > ~/.zfunc/_drover")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
}

/// Write the man pages into a directory
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// The directory; made when it is not there
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_and_a_description() {
        for command in Cli::command().get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(
                help.contains(&format!("drover {}", command.get_name())),
                "{}",
                command.get_name()
            );
        }
    }

    #[test]
    fn names_that_are_paths_are_usage_errors() {
        for bad in ["../x", "a/b", ".hidden", "a\nb", ""] {
            let args = ["drover", "send", "x.img", "lyon", "--as", bad];
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?}");
        }
        assert!(Cli::try_parse_from(["drover", "send", "x.img", "lyon", "--as", "y.img"]).is_ok());
        assert!(Cli::try_parse_from(["drover", "send", "x.img"]).is_err());
        assert!(
            Cli::try_parse_from(["drover", "send", "x", "l", "--to", "raw", "--opaque"]).is_err()
        );
    }
}
