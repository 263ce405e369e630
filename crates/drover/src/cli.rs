//! The command line, as clap sees it; help, completions and man pages are made from it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use drover_agent::images::new_name;
use drover_agent::mounts::StoreAddress;
use drover_agent::{addresses, text};
use drover_core::ImageName;
use drover_store::{CatalogUrl, peer_name};

mod audit;
mod changes;
mod domains;
mod evacuate;
mod flock;
mod migrate;
mod mounts;
mod moves;
mod nodes;
mod peers;
mod profile;
mod replicate;
mod snapshot;
mod snapshot_of;
mod space;
mod transfers;
mod values;
mod vault;

pub use audit::AuditArgs;
pub use changes::{ChangesAction, ChangesArgs, DropArgs, MergeArgs};
pub use domains::{DomainsAction, DomainsArgs};
pub use evacuate::EvacuateArgs;
pub use flock::{FlockArgs, FlockOptions, MAX_AT_ONCE};
pub use migrate::{Hypervisor, MigrateArgs, PostCopy};
pub use mounts::{
    AttachArgs, DaemonArgs, ExportArgs, LaunchArgs, Leased, MountArgs, MountsAction, MountsArgs,
    OptionArgs, UnmountArgs,
};
pub use moves::MoveArgs;
pub use nodes::{NodesAction, NodesArgs};
pub use peers::{PairArgs, PeersAction, PeersArgs, TicketArgs};
pub use profile::{ProfileAction, ProfileArgs};
pub use replicate::{FailoverArgs, ReplicateArgs, Replicated};
pub use snapshot::{Freeze, SnapshotArgs};
pub use snapshot_of::SnapshotOf;
pub use space::SpaceArgs;
pub use transfers::{TransfersAction, TransfersArgs, TransfersRmArgs};
pub use values::DomainArg;
pub use values::Format;
pub use values::ImageAt;
use values::image_name;
pub use vault::{
    ForgetArgs, OfVault, RestoreArgs, SnapshotsArgs, SnapshotsOf, VaultAction, VaultArgs,
    VaultCopyArgs, VaultDrillArgs, VaultInitArgs, VaultKeyAction, VaultKeyArgs, VaultScheduleArgs,
};

/// Copy disk images of virtual machines between sites, sending only the blocks that the other side lacks, or use images of another site without copying them.
///
/// A site is a directory with images and an identity, and the process that serves it (`drover serve`). Sites that have paired are
/// peers; commands refer to a peer by its local name, such as lyon below.
#[derive(Debug, Parser)]
#[command(
    name = "drover",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  drover serve                          on the remote host: run a site, print a pairing ticket
  drover pair --name lyon               here: enter the ticket, to pair with it under the name lyon
  drover send web.qcow2 lyon            send an image
  drover migrate qmp:/run/web.qmp lyon  move a running machine, its disks and its memory
  drover replicate qmp:/run/web.qmp lyon --every 15m
                                        keep a copy of a machine's disks at lyon
  drover images lyon                    list the images at lyon
  drover mount lyon:web.qcow2 /mnt/web  use a remote disk without copying it first
  drover snapshot web.qcow2             keep the state of an image in a vault

Units:
  sizes      in bytes: K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024,
             KB, MB, GB, TB are powers of 1000
  rates      in bytes (not bits) per second: K, M, G, T and KB, MB, GB, TB are powers of 1000,
             KiB, MiB, GiB, TiB are powers of 1024
  durations  a number with s, m, h or d, such as 90s, 1h30m or 7d
  config.toml is read by the same rules. Sizes and rates are printed in KiB, MiB, GiB, TiB.

Exit codes:
  0  done
  1  failed
  2  usage error
  3  refused by a site (not trusted, no space, name or size not accepted, image in use),
     or no such image, snapshot, transfer, peer or mount
  4  replicate: the replica has taken over at the peer"
)]
pub struct Cli {
    /// Site directory [default: /var/lib/drover for root, else $XDG_DATA_HOME/drover (~/.local/share/drover)]
    #[arg(long, global = true, help_heading = "Global options", env = "DROVER_HOME", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub home: Option<PathBuf>,

    /// Log more to stderr: -v info, -vv debug, -vvv trace [default: warnings; serve and teleporter: info]; DROVER_LOG selects modules, as in drover_net=debug
    #[arg(short, long, global = true, help_heading = "Global options", action = clap::ArgAction::Count)]
    pub verbose: u8,

    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Init(InitArgs),
    Serve(ServeArgs),
    Ticket(TicketArgs),
    Pair(PairArgs),
    Send(SendArgs),
    Migrate(MigrateArgs),
    Evacuate(EvacuateArgs),
    Move(MoveArgs),
    Replicate(ReplicateArgs),
    Failover(FailoverArgs),
    Mount(MountArgs),
    Export(ExportArgs),
    Attach(AttachArgs),
    Launch(LaunchArgs),
    Unmount(UnmountArgs),
    Mounts(MountsArgs),
    Changes(ChangesArgs),
    Profile(ProfileArgs),
    Vault(VaultArgs),
    Snapshot(SnapshotArgs),
    Snapshots(SnapshotsArgs),
    Restore(RestoreArgs),
    Space(SpaceArgs),
    Images(ImagesArgs),
    Transfers(TransfersArgs),
    Flock(FlockArgs),
    Index(IndexArgs),
    Verify(VerifyArgs),
    Rm(RmArgs),
    Share(ShareArgs),
    Status(StatusArgs),
    Teleporter(TeleporterArgs),
    Peers(PeersArgs),
    Domains(DomainsArgs),
    Nodes(NodesArgs),
    Audit(AuditArgs),
    Digest(DigestArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    /// Run the mount daemon; started by mount, export and attach
    #[command(
        hide = true,
        after_help = "`drover mount-daemon NAME` is internal to drover."
    )]
    MountDaemon {
        /// Name of the mount
        name: String,
    },
    /// Detach a kernel device whose mount daemon has died; started by attach
    #[command(
        hide = true,
        after_help = "`drover guard IDENTIFIER` is internal to drover."
    )]
    Guard {
        /// Identifier of the device
        identifier: String,
    },
}

/// Create a site directory: key pair, catalog of images and peers, and a commented config.toml
///
/// Optional: serve, teleporter, pair, ticket and index create the directory if it does not exist.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover init
  drover init --name lyon --images /srv/images --listen 0.0.0.0:7377")]
pub struct InitArgs {
    /// Name proposed to peers when pairing [default: the host name]
    #[arg(long, value_parser = peer_name::check)]
    pub name: Option<String>,
    /// Directory for received images [default: images in the site directory]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub images: Option<PathBuf>,
    /// Address that serve listens on [default: 0.0.0.0:7377]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::parse_address)]
    pub listen: Option<SocketAddr>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The addresses of a server; the same for sites and teleporters.
#[derive(Debug, Args)]
pub struct ListenArgs {
    /// Address to listen on; port 0 picks a free port [default: config.toml, else 0.0.0.0:7377]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::parse_address)]
    pub listen: Option<SocketAddr>,
    /// Address to put into tickets instead of the local ones, for example behind NAT; repeatable [default port: that of --listen]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = addresses::check)]
    pub advertise: Vec<String>,
    /// Address on which to serve Prometheus metrics over HTTP at /metrics [default: config.toml, else none]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::parse_address)]
    pub metrics_listen: Option<SocketAddr>,
}

/// Run a site: receive images and serve them to mounts
///
/// Creates the site directory if it does not exist. Once the site accepts connections, it prints a pairing ticket to
/// stdout, that of its last start if it is still good; everything else goes to stderr. Runs until SIGTERM or Ctrl-C. Interrupted transfers resume when the image is sent again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover serve
  drover serve --listen 0.0.0.0:7377 --advertise lyon.example.net
  drover serve --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:9377
  drover serve --catalog 'postgres://drover@/drover?host=/run/postgresql'
  drover serve --disk big=s3://bucket/big      peers: drover mount lyon:big /mnt/big")]
pub struct ServeArgs {
    /// PostgreSQL database for the catalog, in the place of a file in the site directory; remembered for the other commands and later starts [default: config.toml]
    #[arg(long, value_name = "URL")]
    pub catalog: Option<CatalogUrl>,
    /// Serve a disk in a store (s3://BUCKET/DISK, redis://HOST/DATABASE?prefix=DISK, cassandra://HOST/KEYSPACE/DISK) to peers under this name among the images; the site has its write lease while it runs; repeatable [default: config.toml]
    #[arg(long, value_name = "NAME=URL", value_parser = values::parse_served_disk)]
    pub disk: Vec<(ImageName, StoreAddress)>,
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Run a teleporter, a host that finds matching blocks for other sites
///
/// It keeps block digests, never image data, in a site directory of its own. A site uses it when its config.toml says
/// `teleporter = "NAME"`, NAME being a paired peer. The ticket that it prints gives the right match only;
/// `drover ticket --can match` makes another.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover teleporter --listen 0.0.0.0:7378      on the teleporter; prints a ticket
  drover pair --name matcher                   at the site that is to use it: enter the ticket;
                                               then set teleporter = \"matcher\" in its config.toml")]
pub struct TeleporterArgs {
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Send images to a peer
///
/// An image is a file or a block device. The delivered file is byte for byte the local one unless --to converts it. An existing image of the same name is
/// replaced atomically at the end. An interrupted transfer resumes when the same command is run again. An image that needs other files, such as a backing
/// file, is sent only with --with-parts or --opaque.
#[derive(Debug, Args)]
#[command(
    override_usage = "drover send [OPTIONS] <IMAGE>... <PEER>",
    after_help = "\
Examples:
  drover send web.qcow2 lyon
  drover send web.qcow2 lyon --as web-2026.qcow2
  drover send web.qcow2 db.qcow2 lyon --limit 20M
  drover send web.qcow2 lyon --compress 9
  drover send big.vhdx lyon --dry-run
  drover send old.vmdk lyon --to qcow2 --as old.qcow2
  drover send overlay.qcow2 lyon --with-parts
  drover send web.qcow2 db.qcow2 nfs.qcow2 lyon --flock shop
  drover send --flock-file shop.toml lyon --atomic

Rates are in bytes per second: 20M is 20,000,000, 20MiB is 20,971,520."
)]
pub struct SendArgs {
    /// Image files to send; the last argument is the name of the peer
    // A single list, so that options may precede the peer.
    #[arg(required = true, num_args = 1.., value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    pub images_and_peer: Vec<PathBuf>,
    /// Name of the image at the peer; for a single image [default: its file name]
    #[arg(long = "as", value_name = "NAME", value_parser = new_name)]
    pub rename: Option<ImageName>,
    /// Maximum network rate in bytes per second, such as 20M or 512KiB [default: config.toml, else unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// Convert the image to another format [default: send the file as it is]
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with = "opaque")]
    pub to: Option<Format>,
    /// Send the bytes of the file in order, without interpreting the format; for a damaged or unknown format
    #[arg(long)]
    pub opaque: bool,
    /// Send also the other files that the images need: extents, external data files, backing files. They are listed
    ///
    /// Each must be in the directory of the image that names it or below, and be an image, or a flat part of the size that its image says. With --to they are read, not sent.
    #[arg(long, conflicts_with = "opaque")]
    pub with_parts: bool,
    /// Estimate the bytes to transfer without sending data
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object per line: progress events, then the result
    #[arg(long)]
    pub json: bool,
    /// How long to retry a lost connection without progress before failing; the first connection is not retried
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// Number of TCP connections for block data, 1 to 8 [default: chosen to fill the link]
    #[arg(long, value_name = "N", value_parser = connections)]
    pub connections: Option<u16>,
    /// Compression: auto, none, lz4, or a zstd level from 1 to 15
    ///
    /// auto uses none, lz4 or a zstd level up to 12, whichever is fastest on the link with the free CPU time of both hosts.
    /// Choose none, lz4 or 1 to save CPU time.
    #[arg(long, value_name = "LEVEL", value_parser = text::parse_compress, default_value = "auto")]
    pub compress: text::Compress,
    #[command(flatten)]
    pub together: FlockOptions,
}

/// List the images of this site or of a peer
///
/// SIZE is the length of the file. Digests are shortened to 12 digits; --json prints them in full.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover images
  drover images lyon --json")]
pub struct ImagesArgs {
    /// Name of a peer [default: this site]
    #[arg(conflicts_with = "domain")]
    pub peer: Option<String>,
    /// List the files that are known, but not indexed
    #[arg(long, conflicts_with_all = ["peer", "similar", "packages"])]
    pub known: bool,
    /// List the images and known files that are similar to this image, the most similar first
    #[arg(long, value_name = "IMAGE", value_parser = image_name, conflicts_with_all = ["peer", "packages"])]
    pub similar: Option<ImageName>,
    /// List the packages that are installed in this image, with their versions (of dpkg and apk)
    #[arg(long, value_name = "IMAGE", value_parser = image_name, conflicts_with = "peer")]
    pub packages: Option<ImageName>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// Use existing local image files as a source of blocks
///
/// Blocks of indexed files are not sent to this site again. The files stay where they are; drover never deletes them, and modifies
/// them only with --mark or --unmark. If the site is running, it reads the files, so its user needs permission to read them.
///
/// The files of a directory are only looked at, which reads little of each. They are known then, and a file is indexed when an image is
/// sent to this site that is probably similar: that has the same blocks at the same places of the disk, the same packages, or the same
/// operating system. --now indexes all at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover index /srv/images/debian.qcow2
  drover index /var/lib/libvirt/images           # known, and indexed when needed
  drover index --now /var/lib/libvirt/images     # read all of them")]
pub struct IndexArgs {
    /// Image files to index, or directories whose files become known (not recursive)
    #[arg(required = true, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub paths: Vec<PathBuf>,
    /// Index the files of directories at once; so do --with-parts, --mark and --unmark
    #[arg(long)]
    pub now: bool,
    /// Index also images that are read from other files, such as backing files, and list those: who may read the image can read them
    #[arg(long)]
    pub with_parts: bool,
    /// Note in each file, a qcow2 that no program has open, which state of its disk it has (needs qemu-img)
    ///
    /// Copies of the file that are indexed at other sites are then old copies of the disk. QEMU records in the file what a machine writes that
    /// is started from it: when that machine moves to such a site, only this is read and sent. The image is frozen, here and where copies
    /// are indexed: drover does not mount it for writing (`drover mounts break` thaws it, --unmark too). QEMU does not return to internal
    /// snapshots of a marked file: such a file is not marked, and before you use those that you make later, --unmark the file.
    #[arg(long)]
    pub mark: bool,
    /// Remove from each file what --mark, or `drover migrate --mark-files`, has noted in it (needs qemu-img)
    ///
    /// The image is no longer frozen here. If a machine has left the file, that is only right if the newer copy is lost. Other copies of
    /// the file stay as they are.
    #[arg(long, conflicts_with = "mark")]
    pub unmark: bool,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// Verify an image against the digest recorded when it was received or indexed
///
/// Reads the whole file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover verify web.qcow2
  drover verify web.qcow2 lyon")]
pub struct VerifyArgs {
    /// Name of the image
    #[arg(value_name = "IMAGE", value_parser = image_name)]
    pub name: ImageName,
    /// Peer that has the image [default: this site]
    #[arg(conflicts_with = "domain")]
    pub peer: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// Let another peer replace an image and write to it
///
/// An image belongs to the peer that sent it: others of its domain can read it, and neither replace it nor mount it for writing. Its
/// owner shares it here with the site's name for the other peer; the site's own user can share every image.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover share lyon:web.img --with nice         an image that this site sent to lyon
  drover share web.img --with nice              at lyon
  drover share lyon:web.img --with nice --stop")]
pub struct ShareArgs {
    /// Name of the image, at PEER or here
    #[arg(value_name = "[PEER:]IMAGE")]
    pub image: ImageAt,
    /// The other peer, by its name at the site that has the image
    #[arg(long, value_name = "PEER")]
    pub with: String,
    /// No longer share it; a write lease that the other peer holds is broken
    #[arg(long)]
    pub stop: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// Remove an image from this site, or from a peer
///
/// An indexed image is only removed from the catalog; its file stays. At a peer, this site can remove the images that it sent
/// there and that are still its own, or, with the right admin there, all of its domain.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover rm web.qcow2
  drover rm web.qcow2 --yes
  drover rm web.qcow2 --dry-run
  drover rm lyon:web.qcow2             an image that this site sent to lyon")]
pub struct RmArgs {
    /// Name of the image, at PEER or here
    #[arg(value_name = "[PEER:]IMAGE")]
    pub image: ImageAt,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    /// Show what would be removed
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub of: DomainArg,
}

/// Show the status of the running site
///
/// There is a line for each domain. MOUNTS are those connected to its images, LEASES also those of mounts that are not connected. DELIVERED, MATCHED and
/// RECEIVED are images, reused blocks and blocks over the link since the domain was opened, MATCHER the memory of its matcher; a closed domain has none of them, and is opened
/// when it is used. While the matcher is catching up with the images of the domain, fewer blocks of images that arrive are matched.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover status
  drover status --metrics")]
pub struct StatusArgs {
    /// Print one JSON object
    #[arg(long, conflicts_with = "metrics")]
    pub json: bool,
    /// Print Prometheus metrics
    #[arg(long)]
    pub metrics: bool,
}

/// Print the digest of image files, as shown by `send` and `images`
///
/// The digest is computed from the BLAKE3 digests of the blocks, so b3sum prints another value.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover digest web.qcow2")]
pub struct DigestArgs {
    /// Files to read
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// Print a shell completion script
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover completions bash > /etc/bash_completion.d/drover
  drover completions zsh > ~/.zfunc/_drover")]
pub struct CompletionsArgs {
    /// Shell to generate the script for
    pub shell: Shell,
}

/// Write the man pages to a directory
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Directory to write to; created if it does not exist
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

/// The number of data connections.
fn connections(text: &str) -> Result<u16, String> {
    let number = text.parse().ok().filter(|n| (1..=8).contains(n));
    number.ok_or_else(|| "must be from 1 to 8".into())
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
    fn names_that_are_paths_or_targets_are_usage_errors() {
        for bad in ["../x", "a/b", ".hidden", "a\nb", "", "file:x"] {
            let args = ["drover", "send", "x.img", "lyon", "--as", bad];
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?}");
        }
        assert!(Cli::try_parse_from(["drover", "send", "x.img", "lyon", "--as", "y.img"]).is_ok());
        assert!(Cli::try_parse_from(["drover", "send", "x.img", "--as", "y", "lyon"]).is_ok());
        // One that an older version made can still be named.
        assert!(Cli::try_parse_from(["drover", "verify", "file:x"]).is_ok());
        assert!(
            Cli::try_parse_from(["drover", "send", "x", "l", "--to", "raw", "--opaque"]).is_err()
        );
    }
}
