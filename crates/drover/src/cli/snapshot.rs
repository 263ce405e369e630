//! The command line of `snapshot`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use drover_vault::{Location, Machine};

use super::snapshot_of::SnapshotOf;
use super::values::DomainArg;
use super::vault::{OfVault, machine, peer};

/// Make a snapshot in a vault: of an image file, of a running machine, or of a disk that a program uses
///
/// Blocks that the vault has already, of whatever machine, are not stored again. A file must not be in use by a program that writes to it; it can be restored byte for byte,
/// container format included. Other files that it names, such as a backing file, are not part of it. A peer must have given this site the right `backup`; only what its vault lacks is sent.
///
/// All disks of a machine are as of one moment, and the machine writes on meanwhile: QEMU copies aside what it overwrites. If a guest agent runs in it, its file systems are frozen
/// for that moment (milliseconds; `--freeze`). QEMU then records what is written, so that the next snapshot into the same vault reads only that. One disk is kept as NAME, several as
/// NAME.DEVICE, of the same time; each is a raw disk. The same holds for an image of this site that a mount, attach or export serves for writing, named as it is, or by the path of its mount.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  drover snapshot web.qcow2
  drover snapshot /srv/images/web.qcow2 --as web
  drover snapshot web.qcow2 --vault /mnt/vault
  drover snapshot web.qcow2 lyon                       into a peer's vault
  drover snapshot qmp:/run/web.qmp                     a running machine
  drover snapshot libvirt:web --pause 'virsh domfsfreeze web' --resume 'virsh domfsthaw web'
  drover snapshot qmp:/run/db.qmp --freeze always --as db
  drover snapshot qmp:/run/web.qmp --once              QEMU records nothing afterwards
  drover snapshot web.raw                              an image that is mounted or exported here")]
pub struct SnapshotArgs {
    /// Image file, or block device; a machine: qmp: and the QMP socket of its QEMU, or libvirt: and its name there; an image of this site that is mounted for writing, or the path of its mount
    #[arg(value_name = "IMAGE|MACHINE", value_hint = ValueHint::FilePath)]
    pub of_what: SnapshotOf,
    /// The peer in whose vault it is kept; as --vault PEER:
    #[arg(value_name = "PEER", conflicts_with = "vault", value_parser = peer)]
    pub peer: Option<Location>,
    /// Name in the vault [default: the name of the file, without its extension, or of the machine]
    #[arg(long = "as", value_name = "NAME", value_parser = machine)]
    pub name: Option<Machine>,
    /// Whether the file systems of a machine are frozen for the moment, by its guest agent
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Freeze::Auto)]
    pub freeze: Freeze,
    /// Command that brings the programs into a state that is good to begin from, before the moment; run by /bin/sh
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub pause: Option<String>,
    /// Command that lets the programs go on, as soon as the moment is held
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub resume: Option<String>,
    /// Directory for what is overwritten while the snapshot is made, at most all of the disks [default: in the site directory]
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// Read all of a machine's disks, also what was not written since the snapshot before
    #[arg(long)]
    pub read_all: bool,
    /// Have QEMU record nothing afterwards, and forget what it has recorded: the next snapshot reads all
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub domain: DomainArg,
    #[command(flatten)]
    pub of: OfVault,
}

/// Whether a guest's file systems are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Freeze {
    /// If a guest agent can do it
    Auto,
    /// Fail if it cannot be done
    Always,
    /// Do not ask the agent
    Never,
}

impl From<Freeze> for drover_migrate::moment::Freeze {
    fn from(of: Freeze) -> Self {
        match of {
            Freeze::Auto => Self::IfPossible,
            Freeze::Always => Self::Always,
            Freeze::Never => Self::Never,
        }
    }
}
