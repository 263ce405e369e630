//! The command line of what shows an image that is elsewhere: `mount`, `export`, `attach`, `unmount`, `mounts`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use drover_agent::mounts::{self, Driver, Listen, Prefetch, Target};
use drover_agent::text;
use drover_core::ImageName;

use super::values::image_name;

/// Show an image of another site as a disk of this one, at once
///
/// PATH becomes a file that is the disk: raw, whatever the image's format is there. With --device the disk is a block
/// device, whose path is printed. What is read is fetched first; all else follows in the background and stays in a
/// cache in the site's directory, which a crash does not harm. What is written goes back: in order, so that the far
/// side is at all times a state that the disk had here.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover mount lyon:web.qcow2 /mnt/web                 /mnt/web is the disk; qemu-system can use it
  drover mount lyon:web.qcow2 /mnt/web --device        prints /dev/loop0; mount /dev/loop0p1 /srv
  drover mount lyon:web.qcow2 /mnt/web --read-only --prefetch none
  drover mount lyon:db.raw /mnt/db --sync remote       a flush waits until lyon has it
  drover unmount /mnt/web")]
pub struct MountArgs {
    /// The image: PEER:NAME, or NAME for one of this site's own; or a local disk: file:PATH, dir:PATH
    #[arg(value_name = "[PEER:]IMAGE")]
    pub image: Target,
    /// Where: a file (made when it is not there), or a directory that gets a file of the image's name
    #[arg(value_hint = ValueHint::AnyPath)]
    pub path: PathBuf,
    /// Attach a loop device to it as well, and print its path
    #[arg(long)]
    pub device: bool,
    #[command(flatten)]
    pub how: HowArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Serve images to NBD clients: QEMU, qemu-img, nbdcopy, nbdfuse, the kernel
///
/// Runs until SIGTERM or Ctrl-C, or in the background with --background. Each image is an export of its name; with one
/// image, clients that name none get it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover export lyon:web.qcow2 --nbd unix:/run/web.sock
  qemu-system-x86_64 -drive file=nbd:unix:/run/web.sock,if=virtio,format=raw
  drover export lyon:web.qcow2 lyon:db.qcow2 --nbd 127.0.0.1:10809 --read-only
  drover export web.qcow2 --nbd unix:/run/web.sock     one of this site's own images
  drover export file:/srv/disk.raw --nbd unix:/run/disk.sock
  drover export dir:/srv/disk --size 20GiB --nbd unix:/run/disk.sock
  drover export lyon:web.qcow2 --nbd 0.0.0.0:10809 --tls-certificates /etc/pki/nbd")]
pub struct ExportArgs {
    /// The images: PEER:NAME, or NAME for one of this site's own; or local disks: file:PATH, dir:PATH
    #[arg(required = true, value_name = "[PEER:]IMAGE")]
    pub images: Vec<Target>,
    /// Where to listen: unix:PATH, or ADDRESS:PORT
    #[arg(long, value_name = "WHERE", value_parser = Listen::parse)]
    pub nbd: Listen,
    /// Directory with server-cert.pem, server-key.pem and, to ask clients for certificates, ca-cert.pem; all three are
    /// needed to listen on other addresses than this machine's own
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub tls_certificates: Option<PathBuf>,
    /// Go to the background when clients can connect
    #[arg(long)]
    pub background: bool,
    #[command(flatten)]
    pub how: HowArgs,
    /// Print JSON objects
    #[arg(long)]
    pub json: bool,
}

/// Attach an image as a kernel block device, by ublk or NBD
///
/// Prints the path of the device. Needs root, and the kernel's ublk_drv or nbd module, which is loaded when it is there;
/// `drover mount --device` needs neither module.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover attach lyon:web.qcow2                         prints /dev/ublkb0, or /dev/nbd0
  drover attach lyon:web.qcow2 --as nbd
  drover attach lyon:web.qcow2 --device /dev/nbd3
  drover unmount /dev/nbd3")]
pub struct AttachArgs {
    /// The image: PEER:NAME, or NAME for one of this site's own; or a local disk: file:PATH, dir:PATH
    #[arg(value_name = "[PEER:]IMAGE")]
    pub image: Target,
    /// By which of the kernel's drivers: by ublk where the kernel has it, else by NBD, when nothing is said
    #[arg(long = "as", value_enum, default_value = "auto")]
    pub driver: DriverChoice,
    /// The device to use, /dev/ublkbN or /dev/nbdN [default: the first that is free]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub device: Option<PathBuf>,
    #[command(flatten)]
    pub how: HowArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Which kernel driver is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DriverChoice {
    /// The first that the kernel has, ublk before NBD
    Auto,
    /// The kernel's NBD client
    Nbd,
    /// A ublk device
    Ublk,
}

impl From<DriverChoice> for Option<Driver> {
    fn from(choice: DriverChoice) -> Self {
        match choice {
            DriverChoice::Auto => None,
            DriverChoice::Nbd => Some(Driver::Nbd),
            DriverChoice::Ublk => Some(Driver::Ublk),
        }
    }
}

/// How an image is shown; the same for every front end.
#[derive(Debug, Args)]
pub struct HowArgs {
    /// Take no writes
    #[arg(long)]
    pub read_only: bool,
    /// Keep nothing here: every read and write goes to the other site (for a near one)
    #[arg(long, conflicts_with_all = ["sync", "cache_size", "prefetch", "record", "push_interval", "window"])]
    pub direct: bool,
    /// What a flush waits for: this machine's disk, or the other site's
    #[arg(long, value_enum, default_value = "local")]
    pub sync: SyncMode,
    /// The unit of fetching, a power of two from 4K to 4M
    #[arg(long, value_name = "SIZE", value_parser = chunk, default_value = "64K")]
    pub chunk: u32,
    /// The most bytes of the image to keep here; less than 16 chunks counts as 16 chunks [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = cache_size)]
    pub cache_size: Option<u64>,
    /// What is fetched before anybody asks: none, sequential, or a FILE that --record wrote
    #[arg(long, value_name = "none|sequential|FILE", value_parser = Prefetch::parse, default_value = "sequential")]
    pub prefetch: Prefetch,
    /// Write the order in which parts were first read into a FILE for --prefetch, at the end
    #[arg(long, value_name = "FILE", value_parser = absolute, value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// How often what was written goes back; 0s: at once, and again whenever that is done
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "5s")]
    pub push_interval: Duration,
    /// Bytes under way at once in the background, from 48 KiB to 256 MiB; less or more counts as those [default: what the
    /// link takes]
    #[arg(long, value_name = "SIZE", value_parser = window)]
    pub window: Option<u64>,
    /// How long a read of what is not here, or a write to a cache full of what was not pushed, waits for the link before it fails
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "10m")]
    pub give_up_after: Duration,
    /// Create the disk of a dir:PATH target, of this many bytes, when it does not exist; --chunk is the size of its files
    #[arg(long, value_name = "SIZE", value_parser = text::parse_size)]
    pub size: Option<u64>,
}

impl From<HowArgs> for mounts::How {
    fn from(args: HowArgs) -> Self {
        mounts::How {
            read_only: args.read_only,
            direct: args.direct,
            sync: match args.sync {
                SyncMode::Local => mounts::SyncMode::Local,
                SyncMode::Remote => mounts::SyncMode::Remote,
            },
            chunk: args.chunk,
            cache_size: args.cache_size,
            prefetch: args.prefetch,
            record: args.record,
            push_interval: args.push_interval,
            window: args.window,
            give_up_after: args.give_up_after,
            size: args.size,
        }
    }
}

/// What a flush waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SyncMode {
    /// The cache on this machine's disk
    Local,
    /// The other site's disk
    Remote,
}

/// How the mount daemon runs.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// Stay in the foreground until SIGTERM or Ctrl-C, and unmount then
    #[arg(long)]
    pub foreground: bool,
    /// Print JSON objects
    #[arg(long)]
    pub json: bool,
}

/// End a mount, an export or an attached device, after all that was written is at the other site
///
/// Refused while somebody uses it. With --offline the cache stays and is pushed when it is mounted there again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover unmount /mnt/web
  drover unmount /dev/nbd0
  drover unmount web.qcow2-1f3a9c02 --keep-cache
  drover unmount /mnt/web --offline        the other site cannot be reached: push later")]
pub struct UnmountArgs {
    /// Its path, device or socket, or its name in `drover mounts`
    #[arg(value_hint = ValueHint::AnyPath)]
    pub what: String,
    /// Do not push; keep the cache, and the right to write, for the next mount
    #[arg(long, conflicts_with = "discard")]
    pub offline: bool,
    /// Throw away what was written and is not at the other site
    #[arg(long)]
    pub discard: bool,
    /// Keep the cache, so that mounting there again fetches nothing twice
    #[arg(long, conflicts_with = "discard")]
    pub keep_cache: bool,
    /// Take it from the file system's tree even while it is used
    #[arg(long)]
    pub lazy: bool,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Only say what would happen
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// List mounts, exports and attached devices with how far they are; or who holds this site's images
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover mounts
  drover mounts --json
  drover mounts --metrics                  for Prometheus; a running site has it among its own
  drover mounts leases                     who reads and writes this site's images
  drover mounts break web.qcow2            end the right to write of a mount that is lost"
)]
pub struct MountsArgs {
    #[command(subcommand)]
    pub action: Option<MountsAction>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
    /// Print how far they are as Prometheus reads it
    #[arg(long, conflicts_with = "json")]
    pub metrics: bool,
}

/// What to do with mounts.
#[derive(Debug, Subcommand)]
pub enum MountsAction {
    /// Say who holds images of this site: who may write, and who is connected
    #[command(after_help = "\
Examples:
  drover mounts leases
  drover mounts leases --json")]
    Leases {
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Take the right to write from whoever holds it; what it has not pushed is then lost there
    #[command(after_help = "\
Examples:
  drover mounts leases                     who holds it, and whether it is connected
  drover mounts break web.qcow2
  drover mounts break web.qcow2 --yes      in a script")]
    Break {
        /// The image
        #[arg(value_parser = image_name)]
        name: ImageName,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

/// A path from the root: the mount daemon is somewhere else.
fn absolute(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|e| e.to_string())
}

/// The most that a cache keeps: something.
fn cache_size(text: &str) -> Result<u64, String> {
    match text::parse_size(text)? {
        0 => Err("a cache cannot be of nothing; --direct keeps nothing here".into()),
        size => Ok(size),
    }
}

/// What is under way in the background: something.
fn window(text: &str) -> Result<u64, String> {
    match text::parse_size(text)? {
        0 => Err(
            "nothing would ever be under way; --prefetch none fetches nothing that nobody asked for"
                .into(),
        ),
        size => Ok(size),
    }
}

/// A chunk's size; `K` and `M` are binary here, since nothing else is a power of two.
fn chunk(text: &str) -> Result<u32, String> {
    let upper = text.to_ascii_uppercase();
    let number = upper.trim_end_matches("IB").trim_end_matches('B');
    let (number, shift) = match number.strip_suffix('K') {
        Some(n) => (n, 10),
        None => match number.strip_suffix('M') {
            Some(n) => (n, 20),
            None => (number, 0),
        },
    };
    number
        .parse::<u32>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .filter(|n| n.is_power_of_two() && (4 << 10..=4 << 20).contains(n))
        .ok_or_else(|| "a chunk is a power of two from 4K to 4M".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_powers_of_two_within_bounds() {
        assert_eq!(chunk("64K"), Ok(65536));
        assert_eq!(chunk("4KiB"), Ok(4096));
        for bad in ["0", "3K", "1K", "8M", "96K", "x"] {
            assert!(chunk(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_cache_or_a_window_of_nothing_is_refused() {
        assert_eq!((cache_size("1"), window("8M")), (Ok(1), Ok(8_000_000)));
        for nothing in ["0", "0K"] {
            assert!(cache_size(nothing).unwrap_err().contains("--direct"));
            assert!(window(nothing).unwrap_err().contains("--prefetch none"));
        }
    }
}
