//! What is remembered of a move from one command to the next: the files that the machine leaves here, and that a copy at the other
//! site was not what it was said to be.

use std::path::{Path, PathBuf};

use drover_core::ImageName;
use drover_net::{Code, Refusal, decode, encode};
use drover_storage::Envelope;
use drover_store::machine::{MachineRecord, Machines, Move, Token};
use serde::{Deserialize, Serialize};

use super::report::{LeftFile, MoveOptions};
use crate::error::MigrateError;

/// In `machines/.NAME.files`: the files of its disks.
const LEFT: Envelope = Envelope {
    magic: *b"DRVRFILE",
    version: 1,
    max_bytes: 1 << 20,
};

/// In `machines/.NAME.compare`: the sites to which it moves without generations.
const COMPARE: Envelope = Envelope {
    magic: *b"DRVRCOMP",
    version: 1,
    max_bytes: 1 << 16,
};

/// The latest such sites that are remembered.
const MAX_SITES: usize = 64;

#[derive(Serialize, Deserialize)]
struct Files {
    token: Token,
    files: Vec<LeftFile>,
}

/// These files of a machine. All is done at once, on the disk.
pub(super) struct Leaving {
    left: PathBuf,
    compare: PathBuf,
    peer: [u8; 32],
    /// The disk of which this command has found such a copy.
    found: Option<ImageName>,
}

impl Leaving {
    pub fn of(machines: &Machines, options: &MoveOptions) -> Self {
        let path = |kind| {
            let name = format!(".{}.{kind}", options.machine);
            machines.directory().join(name)
        };
        Self {
            left: path("files"),
            compare: path("compare"),
            peer: options.send.peer.0,
            found: None,
        }
    }

    /// Records the files that the machine leaves, before it may be handed over. Durable when it returns.
    pub fn record(&self, token: Token, files: &[LeftFile]) -> Result<(), MigrateError> {
        if files.is_empty() {
            return Ok(());
        }
        let files = files.to_vec();
        let written = LEFT.write(&self.left, &encode(&Files { token, files }));
        written.map_err(|error| MigrateError::File {
            what: format!("cannot write {}", self.left.display()),
            error,
        })
    }

    /// What an earlier command has recorded of this move.
    pub fn recorded(&self, token: Token) -> Vec<LeftFile> {
        let known: Option<Files> = self.read(&LEFT, &self.left);
        let known = known.filter(|known| known.token == token);
        known.map(|known| known.files).unwrap_or_default()
    }

    /// The move is over.
    pub fn forget(&self) {
        // A stale one is ignored by its token.
        let _ = std::fs::remove_file(&self.left);
    }

    /// Whether the site was found to have a copy of a disk that is not what its generations say.
    pub fn compares(&self) -> bool {
        self.sites().contains(&self.peer)
    }

    /// It has one: until the machine has moved there, nothing is taken from copies without comparing them.
    pub fn compare(&mut self, disk: &ImageName) {
        self.found = Some(disk.clone());
        let mut sites = self.sites();
        sites.retain(|site| *site != self.peer);
        sites.push(self.peer);
        sites.drain(..sites.len().saturating_sub(MAX_SITES));
        self.write_sites(&sites);
    }

    /// What a person is told of that when the machine stays.
    pub fn found(&self, peer: &str) -> String {
        let Some(disk) = &self.found else {
            return String::new();
        };
        format!(
            "; {peer} has an old copy of {disk} that is not what it was noted to be (its log names it): the same command, run again when \
             the QEMU there waits anew, compares by digests"
        )
    }

    /// The machine has moved there: what it left and finds there is newer than that copy.
    pub fn compared(&self) {
        let mut sites = self.sites();
        if sites.contains(&self.peer) {
            sites.retain(|site| *site != self.peer);
            self.write_sites(&sites);
        }
    }

    fn sites(&self) -> Vec<[u8; 32]> {
        self.read(&COMPARE, &self.compare).unwrap_or_default()
    }

    fn write_sites(&self, sites: &Vec<[u8; 32]>) {
        let written = match sites.is_empty() {
            true => std::fs::remove_file(&self.compare),
            false => COMPARE.write(&self.compare, &encode(sites)),
        };
        if let Err(e) = written {
            tracing::warn!("cannot write {}: {e}", self.compare.display());
        }
    }

    /// What cannot be read says nothing.
    fn read<T: for<'de> Deserialize<'de>>(&self, format: &Envelope, path: &Path) -> Option<T> {
        let unread = |e: &dyn std::fmt::Display| tracing::warn!("{}: {e}", path.display());
        let bytes = format.read(path).inspect_err(|e| unread(e)).ok()??;
        let body = format.open(&bytes).inspect_err(|e| unread(e)).ok()?;
        decode(body).inspect_err(|e| unread(e)).ok()
    }
}

/// A move that is under way goes on as it began: another hypervisor runs another machine, and under another name the other
/// site would know of another move.
pub(super) fn check_same(known: &MachineRecord, options: &MoveOptions) -> Result<(), MigrateError> {
    let Some(Move::Leaving(_, to) | Move::Committed(_, to)) = &known.under_way else {
        return Ok(());
    };
    let (machine, to) = (&options.machine, &to.name);
    let hypervisor = known.hypervisor.as_ref();
    if let Some(other) = hypervisor.filter(|other| **other != options.hypervisor) {
        let text =
            format!("{machine} is being moved to {to} from {other}: name that, or give it up");
        return Err(Refusal::new(Code::Held, text).into());
    }
    let name = known.name_there.as_ref();
    if let Some(other) = name.filter(|other| **other != options.name_there) {
        let text =
            format!("{machine} is being moved to {to} as {other}: use that name, or give it up");
        return Err(Refusal::new(Code::Held, text).into());
    }
    Ok(())
}
