//! The command line of vaults and snapshots.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use drover_agent::text;
use drover_agent::vaults::Chosen;
use drover_vault::{Keep, Location, Machine, Reference, SessionId, Share};

use super::snapshot_of::SnapshotOf;

/// Which vault.
#[derive(Debug, Clone, Default, Args)]
pub struct VaultOption {
    /// Directory of the vault, s3://BUCKET/PREFIX, gs://... or az://..., or PEER: for that of a peer [default: the only one that was created from this site]
    #[arg(long, value_name = "VAULT", value_hint = ValueHint::DirPath)]
    pub vault: Option<Location>,
    /// If the vault is encrypted: file with its passphrase [default: the one it was created with, else it is asked for]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub key_file: Option<PathBuf>,
}

impl VaultOption {
    /// The vault that is named.
    #[must_use]
    pub fn chosen(&self) -> Chosen {
        Chosen {
            location: self.vault.clone(),
            key_file: self.key_file.clone(),
        }
    }
}

/// Which vault, and how results are printed.
#[derive(Debug, Clone, Default, Args)]
pub struct OfVault {
    #[command(flatten)]
    pub vault: VaultOption,
    /// Print JSON, one object per line: progress events if there are any, then the result
    #[arg(long)]
    pub json: bool,
}

/// Which snapshots of a machine are kept, of those that are deleted else.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct KeepOptions {
    /// Keep the newest N snapshots of each machine, and delete others that no --keep option keeps
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    keep_last: u32,
    /// Keep the last snapshot of each of the newest N days that have one
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    keep_daily: u32,
    /// Keep the last snapshot of each of the newest N weeks that have one
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    keep_weekly: u32,
    /// Keep the last snapshot of each of the newest N months that have one
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    keep_monthly: u32,
}

impl KeepOptions {
    /// What they say.
    #[must_use]
    pub fn keep(&self) -> Keep {
        Keep {
            last: self.keep_last,
            daily: self.keep_daily,
            weekly: self.keep_weekly,
            monthly: self.keep_monthly,
        }
    }

    /// The options of a command line that says the same.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let all = [
            ("--keep-last", self.keep_last),
            ("--keep-daily", self.keep_daily),
            ("--keep-weekly", self.keep_weekly),
            ("--keep-monthly", self.keep_monthly),
        ];
        let given = all.into_iter().filter(|(_, n)| *n > 0);
        given
            .flat_map(|(option, n)| [option.to_owned(), n.to_string()])
            .collect()
    }
}

/// Create a vault, a deduplicated store of snapshots; show and verify it, delete snapshots
///
/// A vault is a directory, or in an object store (`drover vault init --help`). It stores every block of 4 KiB once, whatever machine and snapshot it is of, compressed. Several commands, also of several
/// hosts that share it, may use it at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault init /srv/vault
  drover vault init s3://backups/drover
  drover vault stats
  drover vault forget --keep-last 7 --keep-weekly 4 --keep-monthly 6 --dry-run
  drover vault compact
  drover vault copy s3://backups/drover
  drover vault check --full
  drover vault schedule web.qcow2 --keep-last 7
  drover vault drill --boot")]
pub struct VaultArgs {
    #[command(subcommand)]
    pub action: VaultAction,
}

/// The commands of `vault`.
#[derive(Debug, Subcommand)]
pub enum VaultAction {
    Init(VaultInitArgs),
    Key(VaultKeyArgs),
    Forget(ForgetArgs),
    /// Free what only forgotten snapshots used, and what interrupted backups left
    ///
    /// Containers without any block in use are removed, those that are at least half garbage are written again. Backups and restores may go on
    /// meanwhile. A restore of a snapshot that was forgotten less than --grace ago still works.
    #[command(after_help = "\
Examples:
  drover vault compact
  drover vault compact --grace 0s
  drover vault compact --limit 50M")]
    Compact {
        /// Keep what was forgotten less than this ago
        #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "1h")]
        grace: Duration,
        /// Maximum rate at which containers are rewritten, in bytes per second, such as 50M [default: unlimited]
        #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
        limit: Option<u64>,
        #[command(flatten)]
        of: OfVault,
    },
    Copy(VaultCopyArgs),
    Schedule(VaultScheduleArgs),
    Drill(VaultDrillArgs),
    /// Store the blocks that most machines have once for all of them, in a vault with --share popular
    ///
    /// Backups find these blocks, and those of their own machine. Blocks are added, those that were chosen before stay; what nothing uses for 30 days is removed by `drover vault compact`.
    /// What machines have stored already is not changed: it goes when the snapshots that use it do. Run it by a timer, once a week.
    #[command(after_help = "\
Examples:
  drover vault popular
  drover vault popular --top 5 --limit 50M")]
    Popular {
        /// How many of all different blocks are popular, in percent, by the number of machines that have them
        #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=100))]
        top: u8,
        /// Maximum rate at which containers are read, in bytes per second, such as 50M [default: unlimited]
        #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
        limit: Option<u64>,
        #[command(flatten)]
        of: OfVault,
    },
    /// Verify a vault
    ///
    /// Every snapshot must have its objects, and every container in use its blocks. One container in 16 is read and verified as a whole; with --full, all are.
    /// Damage is listed with the snapshots that it affects; then the exit code is 1.
    ///
    /// With --repair, what is damaged or lost is replaced from a copy that `drover vault copy` made, as far as the copy has it: every block is verified by its digest before it is
    /// written. What could be repaired is listed as well. Snapshots that are not listed any more are brought back by `drover vault copy` from the copy.
    #[command(after_help = "\
Examples:
  drover vault check
  drover vault check --full
  drover vault check --full --repair --from /mnt/usb/vault")]
    Check {
        /// Read and verify every block
        #[arg(long)]
        full: bool,
        /// Replace what is damaged or lost by what the copy has
        #[arg(long, requires = "from")]
        repair: bool,
        /// The copy: a directory, or s3://BUCKET/PREFIX, gs://... or az://...
        #[arg(long, value_name = "VAULT", value_hint = ValueHint::DirPath, requires = "repair")]
        from: Option<Location>,
        #[command(flatten)]
        of: OfVault,
    },
    /// Show how much a vault holds, and how much space that takes
    #[command(after_help = "\
Examples:
  drover vault stats
  drover vault stats --json")]
    Stats {
        #[command(flatten)]
        of: OfVault,
    },
}

/// What machines share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shared {
    All,
    Popular,
    None,
}

impl From<Shared> for Share {
    fn from(shared: Shared) -> Share {
        match shared {
            Shared::All => Share::All,
            Shared::Popular => Share::Popular,
            Shared::None => Share::Nothing,
        }
    }
}

/// Create a vault in an empty directory, or in an object store
///
/// Creates the directory, and this site's, if they do not exist. A bucket has to exist. Credentials come from the environment, here and whenever the vault is
/// used: for s3://, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION, or the role of the machine; AWS_ENDPOINT_URL for another server than
/// Amazon's, and AWS_ALLOW_HTTP=true if that speaks plain HTTP. For gs://, GOOGLE_APPLICATION_CREDENTIALS; for az://, AZURE_STORAGE_ACCOUNT_NAME and
/// AZURE_STORAGE_ACCOUNT_KEY. A store that overwrites objects although it is told not to is refused.
///
/// With --share none or popular, a container that is lost is one machine's, or one of the popular blocks, which `drover vault popular` chooses; the vault takes more space. It cannot be
/// changed later.
///
/// With --encrypt, everything in the vault is encrypted before it is written, names of machines included: anyone who has the store and no passphrase sees how
/// much there is, and when it was written. If all passphrases and key files are lost, nobody can read the vault again: there is no way to recover it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault init /srv/vault
  drover vault init s3://backups/drover
  drover vault init /srv/vault --share popular
  drover vault init s3://backups/drover --encrypt --key-file /etc/drover/vault.key
  AWS_ENDPOINT_URL=https://minio.example:9000 drover vault init s3://backups/drover")]
pub struct VaultInitArgs {
    /// Directory, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX
    #[arg(value_name = "VAULT", value_hint = ValueHint::DirPath)]
    pub vault: Location,
    /// Where a block is looked for before it is stored: in all machines (all), in the same machine and among popular blocks (popular), in the same machine only (none)
    #[arg(long, value_name = "WHAT", value_enum, default_value = "all")]
    pub share: Shared,
    /// Encrypt everything; asks for a passphrase, or takes that in --key-file
    #[arg(long)]
    pub encrypt: bool,
    /// File with the passphrase, created with a random one if it does not exist; this site uses it from now on
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "encrypt")]
    pub key_file: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Copy a vault to another place, or bring a copy up to date
///
/// Every snapshot that the copy lacks is copied, with those blocks that the copy lacks; what moves is verified. Nothing is deleted there: `drover vault forget` and `drover vault compact`
/// with --vault delete in each place by itself, and what was deleted in one is not copied to it again, but with --all. If it is interrupted, repeat it: it goes on with what is missing. Backups and deletions may go on in both places.
///
/// The copy is a vault of its own, opened by the keys that the vault had when the copy was created. It is not this site's vault: name it by --vault. A snapshot has the same name in both, and another ID.
/// Snapshots that are damaged are listed and left out; then the exit code is 1.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault copy /mnt/usb/vault
  drover vault copy s3://backups/drover --limit 20M
  drover vault copy /srv/vault --vault s3://backups/drover      back again
  drover vault copy /srv/vault --vault /mnt/usb/vault --all     also what was deleted in /srv/vault
  drover snapshots --vault /mnt/usb/vault")]
pub struct VaultCopyArgs {
    /// Where the copy is: a directory, empty at first, or s3://BUCKET/PREFIX, gs://... or az://...
    #[arg(value_name = "VAULT", value_hint = ValueHint::DirPath)]
    pub to: Location,
    /// Copy also what was deleted there
    #[arg(long)]
    pub all: bool,
    /// Maximum rate at which is written, in bytes per second, such as 50M [default: unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub limit: Option<u64>,
    #[command(flatten)]
    pub of: OfVault,
}

/// Make snapshots of images and machines regularly, by timers of systemd
///
/// Writes a service and a timer for each, and says how to start them; a snapshot that fails leaves its service failed (`systemctl --failed`). With --keep options, the older snapshots of the
/// machine are then deleted, and space is freed. The units name this program, this site, the vault and its key file by their paths.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault schedule web.qcow2 db.qcow2 --dry-run
  drover vault schedule web.qcow2 --at hourly --keep-last 24 --keep-daily 14
  drover vault schedule /srv/images/web.qcow2 --as web --io-limit 50M
  drover vault schedule web.qcow2 --vault s3://backups/drover --environment /etc/drover/s3.env
  drover vault schedule qmp:/run/web.qmp --keep-last 7          a machine that runs then
  drover vault schedule web.qcow2 --remove")]
pub struct VaultScheduleArgs {
    /// What `drover snapshot` takes: image files; machines; images of this site that are mounted for writing, or the paths of their mounts
    #[arg(value_name = "IMAGE|MACHINE", required = true, value_hint = ValueHint::FilePath)]
    pub images: Vec<SnapshotOf>,
    /// Name in the vault, for one [default: the name of the file or socket, without its extension]
    #[arg(long = "as", value_name = "NAME", value_parser = machine)]
    pub name: Option<Machine>,
    /// When, as systemd says it (man systemd.time): hourly, daily, "Mon 03:00"
    #[arg(long, value_name = "TIME", default_value = "daily")]
    pub at: String,
    /// Maximum rate at which the device of an image file is read, in bytes per second, such as 50M, kept by systemd [default: unlimited]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    pub io_limit: Option<u64>,
    /// File with environment variables, such as the credentials of an object store
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub environment: Option<PathBuf>,
    #[command(flatten)]
    pub keep: KeepOptions,
    /// Directory of the units [default: /etc/systemd/system, or ~/.config/systemd/user of a user other than root]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub unit_dir: Option<PathBuf>,
    /// Show the units, or with --remove their names, and write or remove nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Remove the units of these images; snapshots stay
    #[arg(long)]
    pub remove: bool,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    #[command(flatten)]
    pub of: OfVault,
}

/// How a disk is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrillDisk {
    Virtio,
    Ide,
}

impl DrillDisk {
    /// As QEMU calls it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            DrillDisk::Virtio => "virtio",
            DrillDisk::Ide => "ide",
        }
    }
}

/// Restore snapshots to see that it works: the newest of each machine
///
/// Each is restored to a temporary file, which is read again and compared. With --boot, a QEMU starts from it, without network, and its serial console must show a text within a time: that of a login
/// prompt, if nothing else is said. Nothing of the vault or of machines is changed. If one fails, the others are tried all the same, and the exit code is 1.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault drill
  drover vault drill web db --dir /srv/scratch
  drover vault drill --sample 3 --boot --wait 10m
  drover vault drill web --boot --expect 'web login:' --disk ide")]
pub struct VaultDrillArgs {
    /// Machines [default: all]
    #[arg(value_name = "NAME", value_parser = machine)]
    pub names: Vec<Machine>,
    /// Only so many, chosen at random
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub sample: Option<u16>,
    /// Where there is room for the largest disk [default: the directory of temporary files]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Start a machine from each
    #[arg(long)]
    pub boot: bool,
    /// With --boot: text that its serial console has to show
    #[arg(long, value_name = "TEXT", default_value = "login:", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub expect: String,
    /// With --boot: how long that may take
    #[arg(long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "5m")]
    pub wait: Duration,
    /// With --boot: the machine's memory
    #[arg(long, value_name = "SIZE", value_parser = text::parse_size, default_value = "1G")]
    pub memory: u64,
    /// With --boot: how the disk is attached
    #[arg(long, value_name = "BUS", value_enum, default_value = "virtio")]
    pub disk: DrillDisk,
    /// With --boot: the program
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    #[command(flatten)]
    pub of: OfVault,
}

/// Change the passphrases and key files of an encrypted vault
///
/// Each opens the vault by itself; nothing that is stored is written again. A key that is removed no longer opens the vault, but does not shut out somebody who knew it: they
/// may have kept the vault's master key, and can then read everything in the store, also what is written later. To shut them out, make a new vault. The key that has opened the
/// vault cannot be removed: open it with another one.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault key add                                 a second passphrase
  drover vault key add --new-key-file backup.key --label backup
  drover vault key list
  drover vault key remove 0f3a9c02d1")]
pub struct VaultKeyArgs {
    #[command(subcommand)]
    pub action: VaultKeyAction,
}

/// The commands of `vault key`.
#[derive(Debug, Subcommand)]
pub enum VaultKeyAction {
    /// Add a passphrase or a key file
    #[command(after_help = "\
Examples:
  drover vault key add
  drover vault key add --new-key-file /etc/drover/vault.key")]
    Add {
        /// File with the new passphrase, created with a random one if it does not exist [default: it is asked for]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        new_key_file: Option<PathBuf>,
        /// What the key is called in lists, for everybody to read
        #[arg(
            long,
            value_name = "TEXT",
            default_value = "",
            hide_default_value = true
        )]
        label: String,
        #[command(flatten)]
        of: OfVault,
    },
    /// Remove a passphrase or key file; not the one that opens the vault for it, nor the last one
    #[command(after_help = "\
Examples:
  drover vault key remove 0f3a9c02d1
  drover vault key remove 0f3a9c02d1 --key-file other.key")]
    Remove {
        /// The key, as in `drover vault key list`
        #[arg(value_name = "KEY", value_parser = key)]
        key: SessionId,
        #[command(flatten)]
        of: OfVault,
    },
    /// List the keys, and which one has opened the vault
    #[command(after_help = "\
Examples:
  drover vault key list
  drover vault key list --json")]
    List {
        #[command(flatten)]
        of: OfVault,
    },
}

/// Delete snapshots: those named, or of each machine those that --keep-... does not keep
///
/// They are not listed any more at once; `drover vault compact` frees their space. What is freed is exact: blocks that other
/// snapshots use stay. Of a day, a week (from Monday) or a month, the last snapshot is kept; all times are UTC.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover vault forget --keep-last 7 --keep-weekly 4 --keep-monthly 6 --dry-run
  drover vault forget web --keep-daily 14
  drover vault forget web@2026-11-20T10:00:00Z
  drover vault forget web              all of them, after a question")]
pub struct ForgetArgs {
    /// Machines, or single snapshots [default: every machine]
    #[arg(value_name = "NAME[@TIME]")]
    pub names: Vec<String>,
    #[command(flatten)]
    pub keep: KeepOptions,
    /// For NAME, also NAME.DEVICE: the disks of a machine that has several
    #[arg(long)]
    pub disks: bool,
    /// Show what would be deleted
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    #[command(flatten)]
    pub of: OfVault,
}

/// List snapshots
///
/// In the vault of a peer, those of the machines whose snapshots this site has made there; with the right `admin`, all.
///
/// TIME is UTC. SIZE is the length of the file, DATA that of its blocks that are not zero, NEW that of blocks that the vault did not have, STORED what those took.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover snapshots
  drover snapshots web --json
  drover snapshots web lyon:                 in the vault of a peer")]
pub struct SnapshotsArgs {
    /// Name of a machine [default: all], and the peer in whose vault they are
    #[arg(value_name = "NAME|PEER:", num_args = 0..=2)]
    pub of_what: Vec<SnapshotsOf>,
    #[command(flatten)]
    pub of: OfVault,
}

/// Which snapshots are listed.
#[derive(Debug, Clone)]
pub enum SnapshotsOf {
    /// Those of a machine.
    Machine(Machine),
    /// Those in the vault of a peer.
    Peer(Location),
}

impl std::str::FromStr for SnapshotsOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(peer @ Location::Peer(_)) => Ok(SnapshotsOf::Peer(peer)),
            _ => machine(text).map(SnapshotsOf::Machine),
        }
    }
}

/// The vault of a peer, by the peer's name.
pub(super) fn peer(text: &str) -> Result<Location, String> {
    let name = text.trim_end_matches(':');
    match format!("{name}:").parse() {
        Ok(peer @ Location::Peer(_)) => Ok(peer),
        _ => Err("the second operand is the name of a peer; --vault names another vault".into()),
    }
}

/// Write a snapshot to a file, byte for byte as it was; or a single file out of its file system
///
/// A new file gets its name when it is complete. In a file that exists, only what differs is overwritten, in place: if that is interrupted, the file is
/// damaged until the command is repeated. A single file, NAME@TIME:/PATH, is read from the first ext2, ext3 or ext4 file system of the disk that has it; only its blocks are read from the vault.
/// That needs a file system that was not in use, or whose machine was frozen (`drover snapshot --freeze`): its journal is not replayed. Otherwise mount the snapshot.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover restore web@latest web.qcow2
  drover restore web@2026-11-20 /srv/images/web.qcow2 --yes
  drover restore web@latest:/etc/fstab fstab              a single file")]
pub struct RestoreArgs {
    /// The snapshot: a name and a time (UTC) or the beginning of one, or latest; and the path of a file in it
    #[arg(value_name = "NAME@TIME[:/PATH]")]
    pub what: RestoreOf,
    /// The file to write
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Overwrite an existing file without asking
    #[arg(short, long)]
    pub yes: bool,
    #[command(flatten)]
    pub of: OfVault,
}

/// What is restored.
#[derive(Debug, Clone)]
pub struct RestoreOf {
    /// The snapshot.
    pub snapshot: Reference,
    /// The absolute path of a file in it.
    pub path: Option<String>,
}

impl std::str::FromStr for RestoreOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (of, path) = match text.find(":/") {
            Some(at) => (&text[..at], Some(text[at + 1..].to_owned())),
            None => (text, None),
        };
        let snapshot = reference(of)?;
        Ok(RestoreOf { snapshot, path })
    }
}

fn key(text: &str) -> Result<SessionId, String> {
    SessionId::parse(text).ok_or_else(|| "use the ten digits of `drover vault key list`".into())
}

pub(super) fn machine(text: &str) -> Result<Machine, String> {
    Machine::new(text).map_err(|e| e.to_string())
}

fn reference(text: &str) -> Result<Reference, String> {
    Reference::parse(text).ok_or_else(|| {
        "use NAME@latest, NAME@2026-11-20 or NAME@2026-11-20T10:00:00Z; `drover snapshots` lists them".into()
    })
}
