//! `migrate` on the command line.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueHint};
use drover_agent::text;
use drover_core::ImageName;

use super::values::image_name;

/// Move a running machine to a peer: its disks, its memory and the state of its devices
///
/// The disks are read while the machine runs: their data is sent as `drover send` sends it, except what the peer has already;
/// what the machine writes meanwhile follows in rounds, then its memory. At the end it is paused for as long as the last of it takes, and
/// runs on at the peer. Until then it runs here whatever happens; an interrupted migration continues when the same command is run
/// again. At no time can it run at both sites.
///
/// The peer must expect the machine: its config.toml names the QMP socket of a QEMU that waits for it, and gives
/// this site the rights send and host. The QEMU here is ended when the machine runs there.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  drover migrate qmp:/run/web.qmp lyon
  drover migrate qmp:/run/web.qmp lyon --dry-run
  drover migrate qmp:/run/web.qmp lyon --as web-2 --max-pause 100ms
  drover migrate --list
  drover migrate --abort web

In config.toml at lyon:
  [machines.web]
  incoming = \"/run/web.qmp\"
  start = [\"/usr/local/bin/start-web\"]    starts QEMU with -S -incoming defer")]
pub struct MigrateArgs {
    /// The machine: qmp: and the QMP socket of its QEMU
    #[arg(value_name = "qmp:SOCKET", value_hint = ValueHint::FilePath, required_unless_present_any = ["list", "abort"])]
    pub machine: Option<Hypervisor>,
    /// Name of the peer
    #[arg(required_unless_present_any = ["list", "abort"])]
    pub peer: Option<String>,
    /// Name of the machine at the peer [default: its name here: in config.toml, else that of QEMU's -name, else that of the socket]
    #[arg(long = "as", value_name = "NAME", value_parser = image_name)]
    pub rename: Option<ImageName>,
    /// How long the machine may be paused; without it, QEMU's default of 300ms
    ///
    /// The migration waits for a moment when what is left fits; it is no guarantee.
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub max_pause: Option<Duration>,
    /// Maximum network rate in bytes per second, such as 20M or 512KiB [default: config.toml, else unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    /// Compression: auto, none, lz4, or a zstd level from 1 to 15
    #[arg(long, value_name = "LEVEL", value_parser = text::parse_compress, default_value = "auto")]
    pub compress: text::Compress,
    /// Directory for what the machine overwrites while its disks are sent, at most all of them [default: in the site directory]
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// How long to retry a lost connection before the machine stays here
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// Leave QEMU here, paused, when the machine runs at the peer
    #[arg(long)]
    pub keep_source: bool,
    /// Do not index the files of the disks that are left here. Indexed, what has not changed since does not cross when the machine comes back
    #[arg(long)]
    pub no_index: bool,
    /// Check whether the machine can move, and estimate the bytes to transfer
    #[arg(long)]
    pub dry_run: bool,
    /// List the machines that have moved to this site or from it, or are about to
    #[arg(long, conflicts_with_all = ["machine", "peer", "abort"])]
    pub list: bool,
    /// Give up the migration of a machine: it runs on here
    #[arg(long, value_name = "NAME", value_parser = image_name, conflicts_with_all = ["machine", "peer"])]
    pub abort: Option<ImageName>,
    /// Print one JSON object per line: progress events, then the result
    #[arg(long)]
    pub json: bool,
}

/// A hypervisor, as named on the command line.
#[derive(Debug, Clone)]
pub struct Hypervisor {
    /// Its QMP socket.
    pub socket: PathBuf,
}

impl FromStr for Hypervisor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let socket = text.strip_prefix("qmp:").filter(|path| !path.is_empty());
        let socket = socket
            .ok_or("a machine is named by the QMP socket of its QEMU, as in qmp:/run/web.qmp")?;
        let socket = std::path::absolute(Path::new(socket)).map_err(|e| e.to_string())?;
        Ok(Hypervisor { socket })
    }
}

impl std::fmt::Display for Hypervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "qmp:{}", self.socket.display())
    }
}
