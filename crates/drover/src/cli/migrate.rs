//! `migrate` on the command line.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use drover_agent::text;
use drover_core::ImageName;

use super::values::image_name;

/// Move a running machine to a peer: its disks, its memory and the state of its devices
///
/// The disks are read while the machine runs: their data is sent as `drover send` sends it, except what the peer has already;
/// what the machine writes meanwhile follows in rounds, then its memory. At the end it is paused for as long as the last of it takes, and
/// runs on at the peer; if it writes faster to its disks than the link carries, the last of that follows then. Until then it runs here whatever happens; an interrupted migration continues when the same command is run
/// again. At no time can it run at both sites.
///
/// The peer must expect the machine: its config.toml names the QMP socket of a QEMU that waits for it, or its libvirt, and
/// it gives this site the rights send and host. The QEMU here is ended when the machine runs there.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  drover migrate qmp:/run/web.qmp lyon
  drover migrate libvirt:web lyon
  drover migrate qmp:/run/web.qmp lyon --dry-run
  drover migrate qmp:/run/web.qmp lyon --as web-2 --max-pause 100ms
  drover migrate qmp:/run/web.qmp lyon --post-copy never
  drover migrate qmp:/run/web.qmp --start-script > start-web
  drover migrate --list
  drover migrate --list --all               those that have ended, with their pauses
  drover migrate --abort web
  drover migrate --break web                lyon is lost for good, and may have had it, or still has some of its disks

In config.toml at lyon:
  [machines.web]
  incoming = \"/run/web.qmp\"
  start = [\"/usr/local/bin/start-web\"]    starts QEMU with -S -incoming defer

or, for a machine that is defined and off in libvirt there:
  [machines.web]
  libvirt = \"qemu:///system\"")]
pub struct MigrateArgs {
    /// The machine: qmp: and the QMP socket of its QEMU, or libvirt: and its name
    #[arg(value_name = "MACHINE", value_hint = ValueHint::FilePath, required_unless_present_any = ["list", "abort", "broken", "start"])]
    pub machine: Option<Hypervisor>,
    /// Name of the peer
    #[arg(required_unless_present_any = ["list", "abort", "broken", "start", "start_script"])]
    pub peer: Option<String>,
    /// Name of the machine at the peer [default: its name here: in config.toml, else that of QEMU's -name, else that of the socket]
    #[arg(long = "as", value_name = "NAME", value_parser = image_name)]
    pub rename: Option<ImageName>,
    /// Longest pause to aim for [default: 300ms]
    ///
    /// The machine is paused only when what is left can be sent within this time, by estimate
    ///
    /// A shorter pause, from 30ms on, is tried first. The pause may still be longer than estimated.
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub max_pause: Option<Duration>,
    /// Whether what the machine wrote last to its disks may follow when it runs at the peer already
    ///
    /// Then the pause is short however fast it writes. Until all has followed, the machine depends on both sites: what it reads
    /// that is still here waits for it, also when this command or the link breaks, until the same command is run again.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = PostCopy::WhenNeeded)]
    pub post_copy: PostCopy,
    /// Copy also disks that are mounts of a third site's images
    ///
    /// Without this, such a disk does not move: the peer mounts the image, too, and gets the write lease when it has the machine.
    /// It has to be paired with that site, and may write the image.
    #[arg(long)]
    pub copy_mounts: bool,
    /// Read what is still here of a machine that was handed over from the files of its disks, also if they were written since
    ///
    /// That is only right if they were put back as they were: what the machine gets of them is not checked.
    #[arg(long)]
    pub trust_files: bool,
    /// Maximum network rate in bytes per second, such as 20M or 512KiB [default: config.toml, else unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// Compression: auto, none, lz4, or a zstd level from 1 to 15
    #[arg(long, value_name = "LEVEL", value_parser = text::parse_compress, default_value = "auto")]
    pub compress: text::Compress,
    /// Directory for old contents of blocks that the machine overwrites while its disks are sent (libvirt: for what it writes); up to the size of the disks [default: in the site directory]
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// How long to retry a lost connection before the machine stays here
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// Leave QEMU here, paused, when the machine runs at the peer
    #[arg(long)]
    pub keep_source: bool,
    /// Do not index the disk files that the machine leaves here. If they are indexed, only what changed is sent when it comes back
    #[arg(long)]
    pub no_index: bool,
    /// Write into the qcow2 files that the machine leaves here which state of its disks they have [default: config.toml, else not]
    ///
    /// A copy of such a file at any site, after `drover index` there, is then as good as what the machine left there itself: only
    /// what changed is read and sent when the machine comes to that site. The note is void as soon as QEMU or qemu-img writes to the file.
    /// QEMU does not return to internal snapshots of a marked file (`drover index --unmark` removes the mark): one that has some is not
    /// marked. Needs qemu-img.
    #[arg(long, conflicts_with = "keep_source")]
    pub mark_files: bool,
    /// Check whether the machine can move, and estimate the bytes to transfer, the pause, and with --limit the time
    ///
    /// What the machine writes meanwhile comes on top. All of its memory counts, though zeros do not cross.
    #[arg(long)]
    pub dry_run: bool,
    /// Print a script that starts the QEMU which waits for this machine: review it, and install it at the peer
    ///
    /// It is the command line of the QEMU here with empty disks, for `start` in config.toml.
    #[arg(long, conflicts_with_all = ["peer", "list", "abort"])]
    pub start_script: bool,
    /// At the peer: start the QEMU that is built there for a machine (config.toml: `build`), and look after it until it ends; with --dry-run: print its command
    ///
    /// The site does that by itself when a machine comes. For a service manager, which `start` in config.toml can ask to do it; in a terminal
    /// put `setsid -w` before it.
    #[arg(long, value_name = "NAME", value_parser = image_name, conflicts_with_all = ["machine", "peer", "list", "abort", "start_script"])]
    pub start: Option<ImageName>,
    /// List the machines that have moved to this site or from it, or are about to
    #[arg(long, conflicts_with_all = ["machine", "peer", "abort"])]
    pub list: bool,
    /// With --list: the migrations that have ended, from the audit log
    #[arg(long, requires = "list")]
    pub all: bool,
    /// Give up the migration of a machine, which keeps running here; at the peer: reject one that is coming
    #[arg(long, value_name = "NAME", value_parser = image_name, conflicts_with_all = ["machine", "peer"])]
    pub abort: Option<ImageName>,
    /// Let a machine run here that was handed over to a peer which is lost for good, or has come from one
    ///
    /// Handed over: only that peer knows whether it took the machine, and is asked once more; it must not run there, now or later, or
    /// there are two. What still was to follow is here. If its QEMU here has ended, boot the machine from its disks. Arriving: it
    /// runs here, and what of its disks had not come from the peer is lost: reading it fails, until it is written over.
    #[arg(long = "break", value_name = "NAME", value_parser = image_name, conflicts_with_all = ["machine", "peer", "list", "abort", "start", "start_script", "dry_run"])]
    pub broken: Option<ImageName>,
    /// With --break: also if the peer has said that it runs the machine, while its disks were still to follow; what it wrote there
    /// is lost
    #[arg(long, requires = "broken")]
    pub taken: bool,
    /// With --break: do not ask for confirmation
    #[arg(short, long, requires = "broken")]
    pub yes: bool,
    /// Print one JSON object per line: progress events, then the result
    #[arg(long)]
    pub json: bool,
}

/// When what was written to the disks last may follow later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PostCopy {
    /// All is there before the machine runs there, however long the pause
    Never,
    /// If it does not fit into the pause
    WhenNeeded,
    /// Everything written since the copy began: no rounds
    AtOnce,
}

impl From<PostCopy> for drover_migrate::PostCopy {
    fn from(of: PostCopy) -> Self {
        match of {
            PostCopy::Never => Self::Never,
            PostCopy::WhenNeeded => Self::WhenNeeded,
            PostCopy::AtOnce => Self::AtOnce,
        }
    }
}

/// A machine's hypervisor, as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hypervisor {
    /// A QEMU, by its QMP socket.
    Qmp(PathBuf),
    /// libvirt, by the machine's name there.
    Libvirt(String),
}

impl FromStr for Hypervisor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':').filter(|(_, rest)| !rest.is_empty()) {
            Some(("qmp", socket)) => {
                let socket = std::path::absolute(Path::new(socket)).map_err(|e| e.to_string())?;
                Ok(Hypervisor::Qmp(socket))
            }
            Some(("libvirt", name)) => Ok(Hypervisor::Libvirt(name.to_owned())),
            _ => Err("a machine is named by the QMP socket of its QEMU, as in qmp:/run/web.qmp, or by its name in libvirt, as in libvirt:web".into()),
        }
    }
}

impl std::fmt::Display for Hypervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Hypervisor::Qmp(socket) => write!(f, "qmp:{}", socket.display()),
            Hypervisor::Libvirt(name) => write!(f, "libvirt:{name}"),
        }
    }
}
