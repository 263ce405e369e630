//! The command line of mounts: `mount`, `export`, `attach`, `unmount`, `mounts`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use drover_agent::error::{Error, Result};
use drover_agent::mounts::{self, Driver, Listen, LocalDisk, Prefetch, StoreAddress, Target};
use drover_agent::text;
use drover_core::ImageName;
use drover_store::domain;

use super::values::{DomainArg, image_name};
use super::vault::VaultOption;

/// The size of a disk is a multiple of this, as front ends count in sectors.
const SECTOR: u64 = 512;

/// Mount a disk image, usually of another site, as a local disk
///
/// PATH becomes a file with the contents of the disk: raw, whatever the image format. With --device, a block device is attached to it
/// and its path is printed. The disk can be used at once: data is fetched when it is read, and the rest in the background, into a cache
/// in the site directory. Writes go to the cache and are pushed to the other site in the background; flushed writes survive a crash of
/// this host. The other site stores them beside the image, whose file is not modified (see `drover changes`); later mounts see a state
/// that the disk had here at one moment, perhaps a few seconds old.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover mount lyon:web.qcow2 /mnt/web                 /mnt/web is a raw disk for QEMU
  drover mount lyon:web.qcow2 /mnt/web --device        prints /dev/loop0
  drover mount lyon:web.qcow2 /mnt/web --device --partitions      then mount /dev/loop0p1 /srv
  drover mount lyon:web.qcow2 /mnt/web --read-only --prefetch none
  drover mount lyon:web.qcow2 /mnt/web --profile --for 2m          record a boot
  drover mount lyon:db.raw /mnt/db --sync remote       a flush waits for lyon's disk
  drover mount web.qcow2 /mnt/web --domain acme        an image of this site
  drover mount nbd://storage/sda /mnt/sda              an export of any NBD server
  drover mount s3://bucket/disk /mnt/disk --size 100G  a disk in an object store, made if it is not there
  drover mount 'redis://host/3?prefix=vm1' /mnt/vm1    a disk in Redis or Valkey
  drover mount web@2026-11-20 /mnt/old --read-only     a snapshot (see `drover snapshots`)
  drover mount lyon:web.qcow2 /mnt/web --wait-local 20%           returns when a fifth of it is here
  drover mount lyon:db.raw /mnt/db --standby           waits until another mount of it hands over
  drover mount lyon:db.raw /mnt/db --lease 1h          another mount may take over after an hour without contact
  drover unmount /mnt/web

Sizes are in bytes: K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB powers of 1000.")]
pub struct MountArgs {
    /// Disk to mount: PEER:IMAGE or an IMAGE of this site; NAME@TIME, a snapshot in a vault; file:PATH or dir:PATH on this host;
    /// nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH of an NBD server; s3://BUCKET/DISK, gs:// or az:// in an object store,
    /// redis://HOST/DATABASE?prefix=DISK in Redis, cassandra://HOST/KEYSPACE/DISK in Cassandra
    #[arg(value_name = "DISK")]
    pub image: Target,
    /// File to mount on, created if it does not exist; if it is a directory, a file in it named after the image
    #[arg(value_hint = ValueHint::AnyPath)]
    pub path: PathBuf,
    /// Also attach a loop device, and print its path (needs root)
    #[arg(long)]
    pub device: bool,
    /// Let the kernel look for partitions (/dev/loop0p1, ...); only for an image whose source you trust
    #[arg(long, requires = "device")]
    pub partitions: bool,
    #[command(flatten)]
    pub options: OptionArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Export images over NBD, to QEMU, qemu-img, nbdcopy, nbdfuse or the kernel
///
/// Unlike mount and attach, runs in the foreground until SIGTERM or Ctrl-C, unless --background is given. Each image is exported
/// under its own name; a single image is also the default export. A signal ends it after pushing for up to 20 s; the rest stays in the cache for the next export there.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover export lyon:web.qcow2 --nbd unix:/run/web.sock
  qemu-system-x86_64 -drive file=nbd:unix:/run/web.sock,if=virtio,format=raw
  drover export lyon:web.qcow2 lyon:db.qcow2 --nbd unix:/run/lyon.sock --read-only
  drover export web.qcow2 --nbd unix:/run/web.sock     an image of this site
  drover export web@latest --nbd unix:/run/old.sock    a snapshot, writable over it
  drover export file:/srv/disk.raw --nbd unix:/run/disk.sock
  drover export dir:/srv/disk --size 20G --nbd unix:/run/disk.sock
  drover export s3://bucket/disk --size 100G --nbd unix:/run/disk.sock
  drover export lyon:web.qcow2 --nbd 0.0.0.0:10809 --tls-certificates /etc/pki/nbd
  drover export lyon:web.qcow2 --nbd 127.0.0.1:10809 --allow-local-users

Sizes are in bytes: K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB powers of 1000.")]
pub struct ExportArgs {
    /// Disks to export: PEER:IMAGE or an IMAGE of this site; NAME@TIME, a snapshot in a vault; file:PATH or dir:PATH on this host;
    /// nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH of an NBD server; s3://BUCKET/DISK, gs:// or az:// in an object store,
    /// redis://HOST/DATABASE?prefix=DISK in Redis, cassandra://HOST/KEYSPACE/DISK in Cassandra
    #[arg(required = true, value_name = "DISK")]
    pub images: Vec<Target>,
    /// Address to listen on: unix:PATH, a socket that only this user can open (mode 0600), or ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS", value_parser = Listen::parse)]
    pub nbd: Listen,
    /// Directory with server-cert.pem and server-key.pem, and ca-cert.pem to accept only clients whose certificate it
    /// signed; all three are required for an address that other hosts can reach
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub tls_certificates: Option<PathBuf>,
    /// Let every user of this host use the disks; required for a loopback address without client certificates
    #[arg(long)]
    pub allow_local_users: bool,
    /// Return as soon as clients can connect, and keep running in the background
    #[arg(long)]
    pub background: bool,
    #[command(flatten)]
    pub options: OptionArgs,
    /// Print one JSON object when ready
    #[arg(long)]
    pub json: bool,
}

/// Use an image of this site while it is still being sent here, or a snapshot
///
/// A machine can boot from the image at once: what is here is read, what is missing is asked for ahead of everything else that is
/// sent, and waited for. Writes are kept beside the image as those of mounts are (see `drover changes`): in the end the image is
/// delivered as it was sent, and they lie over it. If the connection to the source is lost, reads of what is not here are
/// held until the image is sent again; `drover mounts` tells. An image that is complete, or a snapshot in a vault, is mounted or exported as by `drover mount` and
/// `drover export`. An image that is being used cannot be replaced, nor its transfer be removed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover launch web.qcow2 --nbd unix:/run/web.sock     while lyon is still sending it
  qemu-system-x86_64 -drive file=nbd:unix:/run/web.sock,if=virtio,format=raw
  drover launch web.qcow2 --nbd unix:/run/web.sock --background
  drover launch web.qcow2 /mnt/web                     /mnt/web is a raw disk
  drover launch web.qcow2 /mnt/web --device            prints /dev/loop0
  drover launch web.qcow2 /mnt/web --wait 5m           wait until its transfer begins
  drover launch web.qcow2 --nbd unix:/run/web.sock --profile --for 2m      record the boot
  drover launch web@latest --nbd unix:/run/web.sock    a machine boots from a snapshot, writable over it
  drover mounts                                        how much is here, what is waited for
  drover unmount /mnt/web")]
pub struct LaunchArgs {
    /// Image that is being sent to this site, or has been; or NAME@TIME, a snapshot in a vault
    #[arg(value_name = "IMAGE|NAME@TIME", value_parser = image_name)]
    pub image: ImageName,
    /// File to mount on, created if it does not exist; if it is a directory, a file in it named after the image
    #[arg(value_hint = ValueHint::AnyPath, required_unless_present = "nbd", conflicts_with = "nbd")]
    pub path: Option<PathBuf>,
    /// Export it over NBD: unix:PATH, a socket that only this user can open (mode 0600), or ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS", value_parser = Listen::parse)]
    pub nbd: Option<Listen>,
    /// Directory with server-cert.pem and server-key.pem, and ca-cert.pem to accept only clients whose certificate it
    /// signed; all three are required for an address that other hosts can reach
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "nbd")]
    pub tls_certificates: Option<PathBuf>,
    /// Let every user of this host use the disk; required for a loopback address without client certificates
    #[arg(long, requires = "nbd")]
    pub allow_local_users: bool,
    /// Also attach a loop device, and print its path (needs root)
    #[arg(long, conflicts_with = "nbd")]
    pub device: bool,
    /// Let the kernel look for partitions (/dev/loop0p1, ...); only for an image whose source you trust
    #[arg(long, requires = "device")]
    pub partitions: bool,
    /// Reject writes
    #[arg(long)]
    pub read_only: bool,
    /// Record what is read first, and merge it into the profile of the image (see `drover profile`), also while it is being sent
    #[arg(long)]
    pub profile: bool,
    /// With --profile, how long it is recorded [default: until `drover profile stop`, or the end of the mount]
    #[arg(long = "for", value_name = "DURATION", value_parser = text::parse_duration)]
    pub record_for: Option<Duration>,
    /// Wait up to this long for the transfer of the image to begin
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub wait: Option<Duration>,
    /// With --nbd: return as soon as clients can connect, and keep running in the background
    #[arg(long, requires = "nbd", conflicts_with = "foreground")]
    pub background: bool,
    /// With PATH: run in the foreground; SIGTERM or Ctrl-C unmounts
    #[arg(long)]
    pub foreground: bool,
    /// Domain of the image [default: default]
    #[arg(long, value_name = "NAME", value_parser = domain::check)]
    pub domain: Option<String>,
    #[command(flatten)]
    pub vault: VaultOption,
    /// Print one JSON object when ready
    #[arg(long)]
    pub json: bool,
}

impl LaunchArgs {
    /// The options of the mount, as without any others.
    #[must_use]
    pub fn options(&self) -> OptionArgs {
        OptionArgs {
            read_only: self.read_only,
            profile: self.profile,
            record_for: self.record_for,
            domain: self.domain.clone(),
            vault: self.vault.clone(),
            ..OptionArgs::default()
        }
    }
}

/// Attach an image as a kernel block device, by ublk or NBD
///
/// Prints the path of the device. Needs root and the kernel module ublk_drv or nbd, which is loaded if it is installed;
/// `drover mount --device` needs neither module. These drivers always look for partitions: attach only images whose source
/// you trust.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover attach lyon:web.qcow2                         prints /dev/ublkb0 or /dev/nbd0
  drover attach lyon:web.qcow2 --as nbd
  drover attach lyon:web.qcow2 --device /dev/nbd3
  drover attach s3://bucket/disk --size 100G           a disk in an object store
  drover unmount /dev/nbd3

Sizes are in bytes: K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB powers of 1000.")]
pub struct AttachArgs {
    /// Disk to attach: PEER:IMAGE or an IMAGE of this site; NAME@TIME, a snapshot in a vault; file:PATH or dir:PATH on this host;
    /// nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH of an NBD server; s3://BUCKET/DISK, gs:// or az:// in an object store,
    /// redis://HOST/DATABASE?prefix=DISK in Redis, cassandra://HOST/KEYSPACE/DISK in Cassandra
    #[arg(value_name = "DISK")]
    pub image: Target,
    /// Kernel driver to use
    #[arg(long = "as", value_enum, default_value = "auto")]
    pub driver: DriverChoice,
    /// Device to use, /dev/ublkbN or /dev/nbdN [default: the first free one]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub device: Option<PathBuf>,
    #[command(flatten)]
    pub options: OptionArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// The kernel driver to attach by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DriverChoice {
    /// ublk if the kernel supports it, else NBD
    Auto,
    /// The kernel's NBD client
    Nbd,
    /// The kernel's ublk driver
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

/// The options of a mount; the same for `mount`, `export` and `attach`.
#[derive(Debug, Default, Args)]
pub struct OptionArgs {
    /// Reject writes; any number of read-only mounts can use an image at once, but not while another mount writes to it
    #[arg(long)]
    pub read_only: bool,
    /// Do not cache: send every read and write to the other site (for fast, low-latency networks)
    #[arg(long, conflicts_with_all = ["sync", "cache_size", "prefetch", "push_interval", "window"])]
    pub direct: bool,
    /// What a flush waits for [default: local]
    #[arg(long, value_enum)]
    pub sync: Option<SyncMode>,
    /// Size of a chunk, the unit of fetching: a power of two from 4K to 4M [default: 64K]
    #[arg(long, value_name = "SIZE", value_parser = chunk)]
    pub chunk: Option<u32>,
    /// Maximum size of the cache, at least 16 chunks (1 MiB by default); a smaller value is raised [default: the whole image]
    #[arg(long, value_name = "SIZE", value_parser = cache_size)]
    pub cache_size: Option<u64>,
    /// What to fetch in the background: none; profile, what the image's profile names, if it has one, then the rest in order;
    /// sequential, all in order; or by the profile in FILE, from --record or `drover profile export` [default: profile]
    #[arg(long, value_name = "none|profile|sequential|FILE", value_parser = Prefetch::parse)]
    pub prefetch: Option<Prefetch>,
    /// Record what is read first, and merge it into the profile of the image (see `drover profile`)
    #[arg(long, conflicts_with = "record")]
    pub profile: bool,
    /// Record what is read first, and write it to FILE, a profile
    #[arg(long, value_name = "FILE", value_parser = absolute, value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// With --profile or --record, how long it is recorded [default: until `drover profile stop`, or the end of the mount]
    #[arg(long = "for", value_name = "DURATION", value_parser = text::parse_duration)]
    pub record_for: Option<Duration>,
    /// Interval between pushes of written data; 0s pushes continuously [default: 5s]
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub push_interval: Option<Duration>,
    /// Maximum amount of background data in flight, 48K to 256M; a value outside is raised or lowered to fit [default:
    /// adapts to the link]
    #[arg(long, value_name = "SIZE", value_parser = window)]
    pub window: Option<u64>,
    /// How long a read or write that needs the other site waits, while the link is down, before it fails [default: 10m]
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration)]
    pub give_up_after: Option<Duration>,
    /// Share of the disk, such as 20%, that has to be here before it can be used; the command waits for it
    #[arg(long, value_name = "PERCENT", value_parser = percent, conflicts_with = "direct")]
    pub wait_local: Option<u8>,
    /// Stand by: fill the cache while another mount writes the image, and wait until that hands its write lease over (`drover
    /// mounts hand-over`); the disk can be used then
    #[arg(long, conflicts_with_all = ["direct", "read_only", "wait_local", "cache_size"])]
    pub standby: bool,
    /// Domain of the images of this site [default: default]
    #[arg(long, value_name = "NAME", value_parser = domain::check)]
    pub domain: Option<String>,
    /// Term of the write lease: when this mount has been out of contact with the other site for so long, another mount may take
    /// the lease, and data that was not pushed can no longer be pushed [default: for ever; the other site may have a limit]
    #[arg(long, value_name = "DURATION", value_parser = text::parse_term, conflicts_with = "read_only")]
    pub lease: Option<Duration>,
    /// Create the disk with this size if it does not exist: dir:PATH in files of --chunk bytes, or a disk in a store
    #[arg(long, value_name = "SIZE", value_parser = text::parse_size)]
    pub size: Option<u64>,
    #[command(flatten)]
    pub vault: VaultOption,
}

impl OptionArgs {
    /// The disks, those of this site in the domain that was named.
    ///
    /// # Errors
    /// Usage: none of them is an image of this site.
    pub fn in_domain(&self, mut images: Vec<Target>) -> Result<Vec<Target>> {
        let Some(domain) = &self.domain else {
            return Ok(images);
        };
        let mut own: Vec<_> = images.iter_mut().filter(|image| image.is_own()).collect();
        if own.is_empty() {
            return Err(Error::usage(
                "--domain is for images of this site: at a peer, this site is in one domain",
            ));
        }
        for image in &mut own {
            image.domain = Some(domain.clone()).filter(|domain| domain != domain::DEFAULT);
        }
        Ok(images)
    }

    /// The options of a mount of `images`.
    ///
    /// # Errors
    /// Usage: an option means nothing for any of them, or contradicts one.
    pub fn of(self, images: &[Target]) -> Result<mounts::How> {
        if self.wait_local.is_some() && matches!(self.prefetch, Some(Prefetch::None)) {
            return Err(Error::usage(
                "--wait-local cannot be used with --prefetch none, which fetches only what is read",
            ));
        }
        if self.record_for.is_some() && !self.profile && self.record.is_none() {
            return Err(Error::usage("--for is for --profile or --record"));
        }
        if self.record.is_some() && images.len() > 1 {
            return Err(Error::usage(
                "--record is for one disk: --profile records each into the profile of its image",
            ));
        }
        if self.standby && matches!(self.prefetch, Some(Prefetch::None)) {
            return Err(Error::usage(
                "--standby cannot be used with --prefetch none: nothing reads the disk before the lease is here",
            ));
        }
        if self.standby && !matches!(images, [Target { peer: Some(_), .. }]) {
            return Err(Error::usage("--standby is for one image of a peer"));
        }
        let local = images.iter().all(|image| image.local.is_some());
        for image in images {
            self.check(image, local).map_err(Error::usage)?;
        }
        Ok(mounts::How {
            read_only: self.read_only,
            direct: self.direct,
            sync: match self.sync {
                None | Some(SyncMode::Local) => mounts::SyncMode::Local,
                Some(SyncMode::Remote) => mounts::SyncMode::Remote,
            },
            chunk: self.chunk.unwrap_or(64 << 10),
            is_chunk_chosen: self.chunk.is_some() && images.iter().any(|i| i.local.is_some()),
            cache_size: self.cache_size,
            prefetch: self.prefetch.unwrap_or(Prefetch::Profile),
            record: self.record,
            profile: self.profile,
            profile_for: self.record_for,
            push_interval: self.push_interval.unwrap_or(Duration::from_secs(5)),
            window: self.window,
            give_up_after: self.give_up_after.unwrap_or(Duration::from_secs(600)),
            lease: self.lease,
            wait_local: self.wait_local,
            standby: self.standby,
            heir_of: None,
            size: self.size,
            launch: false,
        })
    }

    /// Checks the options for one disk. `local`: all disks are local.
    fn check(&self, image: &Target, local: bool) -> Result<(), String> {
        let Some(disk) = &image.local else {
            return match self {
                Self { size: Some(_), .. } => Err(format!(
                    "--size cannot be used with the image {image}: only a dir:PATH target or a disk in a store is created"
                )),
                Self { direct: true, .. } if image.peer.is_none() => Err(format!(
                    "--direct cannot be used with a local image ({image})"
                )),
                _ => Ok(()),
            };
        };
        if self.profile {
            return Err(format!(
                "--profile cannot be used with {disk}, which is no image: --record writes its profile to a file"
            ));
        }
        if let LocalDisk::Store(_) = disk {
            return self.check_stored(disk);
        }
        let is_cached = disk.is_cached();
        let given = [
            (self.direct && !is_cached, "--direct"),
            (self.sync.is_some(), "--sync"),
            (self.cache_size.is_some() && !is_cached, "--cache-size"),
            (self.prefetch.is_some() && !is_cached, "--prefetch"),
            (self.push_interval.is_some(), "--push-interval"),
            (self.window.is_some(), "--window"),
            (self.give_up_after.is_some(), "--give-up-after"),
            (self.lease.is_some(), "--lease"),
            (self.wait_local.is_some() && !is_cached, "--wait-local"),
        ];
        if let Some((_, option)) = given.iter().find(|(given, _)| *given && local) {
            return Err(format!(
                "{option} cannot be used with {disk}, {}",
                match is_cached {
                    true => "whose changes stay here",
                    false => "which is read and written directly",
                }
            ));
        }
        match (disk, self.chunk, self.size) {
            (LocalDisk::File(path), _, Some(_)) => Err(format!(
                "--size cannot be used with {disk}; `truncate -s SIZE {}` makes a file of that size",
                path.display()
            )),
            (LocalDisk::Nbd(_), _, Some(_)) => Err(format!(
                "--size cannot be used with {disk}, which has the size that its server says"
            )),
            (LocalDisk::Snapshot { .. }, _, Some(_)) => Err(format!(
                "--size cannot be used with {disk}, which has the size that it was made with"
            )),
            (LocalDisk::File(_) | LocalDisk::Nbd(_) | LocalDisk::Snapshot { .. }, Some(_), _)
                if local && !is_cached =>
            {
                Err(format!(
                    "--chunk cannot be used with {disk}, which has no chunks"
                ))
            }
            (LocalDisk::Dir(_), _, Some(size)) => self.check_new(disk, size),
            _ => Ok(()),
        }
    }

    /// Checks the options for a disk in a store, which has a cache and a lease as images of other sites have.
    fn check_stored(&self, disk: &LocalDisk) -> Result<(), String> {
        let given = [
            (self.window.is_some(), "--window"),
            (self.lease.is_some(), "--lease"),
        ];
        match (given.iter().find(|(given, _)| *given), self.size) {
            (Some((_, option)), _) => Err(format!(
                "{option} cannot be used with {disk}: it is for images of other sites"
            )),
            (None, Some(size)) => self.check_new(disk, size),
            (None, None) => Ok(()),
        }
    }

    /// Checks the size of a disk that may be made.
    fn check_new(&self, disk: &LocalDisk, size: u64) -> Result<(), String> {
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(format!(
                "--size {size}: must be a multiple of {SECTOR} bytes greater than 0"
            ));
        }
        match self.read_only {
            true => Err(format!(
                "--size cannot be used with --read-only: it creates {disk}"
            )),
            false => Ok(()),
        }
    }
}

/// A share in percent.
fn percent(text: &str) -> Result<u8, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse();
    let percent = number.ok().filter(|percent| (1..=100).contains(percent));
    percent.ok_or_else(|| format!("{:?} is not a share from 1% to 100%", text::clean(text)))
}

/// What a flush waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SyncMode {
    /// The cache on the local disk
    Local,
    /// The disk of the other site
    Remote,
}

/// How the mount daemon runs.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// Run in the foreground; SIGTERM or Ctrl-C unmounts after pushing for up to 20 s, and keeps the rest in the cache
    #[arg(long)]
    pub foreground: bool,
    /// Print one JSON object when ready
    #[arg(long)]
    pub json: bool,
}

/// Unmount a disk, stop an export, or detach a device
///
/// Pushes all written data to the other site first; fails after 30 s without progress, and nothing is lost. Refused while the
/// disk is in use.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover unmount /mnt/web
  drover unmount /dev/nbd0
  drover unmount web.qcow2-1f3a9c02 --keep-cache
  drover unmount /mnt/web --offline        other site unreachable: push at the next mount")]
pub struct UnmountArgs {
    /// Path, device, socket or address of the mount, or its name as shown by `drover mounts`
    #[arg(value_name = "MOUNT", value_hint = ValueHint::AnyPath)]
    pub what: String,
    /// Do not push: keep the cache and the write lease, and push at the next mount at the same path, device or socket
    #[arg(long, conflicts_with = "discard")]
    pub offline: bool,
    /// Discard written data that has not been pushed
    #[arg(long)]
    pub discard: bool,
    /// Push, then keep the cache for the next mount at the same path, device or socket
    #[arg(long, conflicts_with_all = ["discard", "offline"])]
    pub keep_cache: bool,
    /// Unmount even if it is in use; programs that have it open get I/O errors
    #[arg(long)]
    pub lazy: bool,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    /// Show what would be pushed or lost
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// List mounts and their sync progress, or list and revoke leases
///
/// A mount is a disk in use on this host, by mount, export or attach. MODE is managed (with a cache), direct, own (an image of this
/// site), launched (one that is still being sent here), snapshot, file or directory. STATE is up, standing by, ending, dead (its process was killed: mount it again), unmounted (the cache is kept), not
/// responding, or damaged; STATUS is the sync progress, or what is wrong. A lease is the right of a mount, on any host, to use an image of this site: one write
/// lease, or any number of read leases.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover mounts
  drover mounts --json
  drover mounts --metrics                  for Prometheus, when no site is running here
  drover mounts leases                     who reads and writes the images of this site
  drover mounts hand-over /mnt/web lyon    end this mount, and let one that stands by at lyon write
  drover mounts break web.qcow2            revoke the write lease of a lost mount"
)]
pub struct MountsArgs {
    #[command(subcommand)]
    pub action: Option<MountsAction>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Print Prometheus metrics
    #[arg(long, conflicts_with = "json")]
    pub metrics: bool,
}

/// The commands of `mounts`.
#[derive(Debug, Subcommand)]
pub enum MountsAction {
    /// List the leases and connections of mounts to images of this site, in all domains
    #[command(after_help = "\
Examples:
  drover mounts leases
  drover mounts leases --json")]
    Leases {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// End a mount of this host, and hand its write lease over to a mount of the same image that stands by
    ///
    /// All that was written is pushed first. At no time can two mounts write.
    #[command(after_help = "\
Examples:
  drover mount paris:db.raw /mnt/db --standby      at lyon: fills its cache, and waits
  drover mounts hand-over /mnt/db lyon             here: from then on lyon writes
  drover mounts hand-over /mnt/db                  to the only one that stands by")]
    HandOver {
        /// The mount: its path, device, socket, or name in `drover mounts`
        #[arg(value_name = "MOUNT")]
        what: String,
        /// Name of the peer whose mount stands by [default: the only one that does]
        peer: Option<String>,
        /// End the mount even if it is in use; programs that have it open get I/O errors
        #[arg(long)]
        lazy: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Revoke the write lease of an image of this site, or thaw it, or that of a disk in a store; data that its holder has
    /// not pushed is lost
    #[command(after_help = "\
Examples:
  drover mounts leases                     who holds it, and whether it is connected
  drover mounts break web.qcow2
  drover mounts break s3://bucket/disk     of a mount that is gone for good, on whichever host
  drover mounts break web.qcow2 --yes      in a script
  drover mounts break web.qcow2 --domain acme

An image is frozen when its machine has moved to another site, or when its file was
marked as the copy of a disk (drover index --mark). Thaw the first only if the other
copy is lost: else there can be two of the machine.")]
    Break {
        /// Name of the image, or URL of the disk
        #[arg(value_name = "IMAGE|URL", value_parser = leased)]
        what: Leased,
        /// Do not ask for confirmation
        #[arg(short, long)]
        yes: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        of: DomainArg,
    },
}

/// What has a write lease.
#[derive(Debug, Clone)]
pub enum Leased {
    /// An image of this site.
    Image(ImageName),
    /// A disk in a store.
    Store(StoreAddress),
}

fn leased(text: &str) -> Result<Leased, String> {
    match StoreAddress::is_one(text) {
        true => text.parse().map(Leased::Store).map_err(|e| format!("{e}")),
        false => image_name(text).map(Leased::Image),
    }
}

/// An absolute path: the mount daemon runs in another directory.
fn absolute(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|e| e.to_string())
}

/// The size of a cache, which is not 0.
fn cache_size(text: &str) -> Result<u64, String> {
    match text::parse_size(text)? {
        0 => Err("must be greater than 0; --direct disables the cache".into()),
        size => Ok(size),
    }
}

/// The bytes in flight in the background, which are not 0.
fn window(text: &str) -> Result<u64, String> {
    match text::parse_size(text)? {
        0 => Err("must be greater than 0; --prefetch none disables background fetching".into()),
        size => Ok(size),
    }
}

/// The size of a chunk.
fn chunk(text: &str) -> Result<u32, String> {
    u32::try_from(text::parse_size(text)?)
        .ok()
        .filter(|n| n.is_power_of_two() && (4 << 10..=4 << 20).contains(n))
        .ok_or_else(|| "must be a power of two from 4K to 4M".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_powers_of_two_within_bounds() {
        assert_eq!(chunk("64K"), Ok(65536));
        assert_eq!(chunk("4KiB"), Ok(4096));
        for bad in ["0", "3K", "1K", "8M", "96K", "64KB", "4G", "x"] {
            assert!(chunk(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_cache_or_a_window_of_nothing_is_refused() {
        assert_eq!((cache_size("1"), window("8M")), (Ok(1), Ok(8 << 20)));
        for nothing in ["0", "0K"] {
            assert!(cache_size(nothing).unwrap_err().contains("--direct"));
            assert!(window(nothing).unwrap_err().contains("--prefetch none"));
        }
    }
}
