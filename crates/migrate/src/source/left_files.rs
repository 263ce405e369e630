//! The files from which disks of machines still follow.

use std::path::PathBuf;

use drover_core::ImageName;
use drover_net::decode;
use drover_store::machine::{Machines, Move};

use super::left::{FORMAT, LeftDisk, LeftDisks};
use super::report::Mounted;
use crate::error::MigrateError;

/// A file from which a disk of a machine that was handed over still follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowedFile {
    /// The machine.
    pub machine: ImageName,
    /// The file.
    pub path: PathBuf,
}

/// The files from which disks of machines that were handed over still follow, also while no process sends them: they must stay as
/// they are. Blocks.
///
/// # Errors
/// When what is recorded of a machine cannot be read.
pub fn left_files(machines: &Machines) -> Result<Vec<FollowedFile>, MigrateError> {
    let mut files = Vec::new();
    for (machine, left) in all_left(machines)? {
        let of_disks = left.disks.iter().filter_map(LeftDisk::file);
        files.extend(of_disks.map(|path| FollowedFile {
            machine: machine.clone(),
            path: path.to_owned(),
        }));
    }
    Ok(files)
}

/// The mounts of this site whose write leases are still to be handed over with machines that have left. Blocks.
///
/// # Errors
/// When what is recorded of a machine cannot be read.
pub fn left_mounts(machines: &Machines) -> Result<Vec<Mounted>, MigrateError> {
    let all = all_left(machines)?.into_iter();
    Ok(all.flat_map(|(_, left)| left.mounts).collect())
}

/// What is left of machines that were handed over.
fn all_left(machines: &Machines) -> Result<Vec<(ImageName, LeftDisks)>, MigrateError> {
    let mut all = Vec::new();
    let failed = |what: &str, error: std::io::Error| {
        let what = what.to_owned();
        MigrateError::File { what, error }
    };
    let names = machines.names();
    for machine in names.map_err(|e| failed("cannot list the machines of this site", e))? {
        let known = machines.load(&machine)?.and_then(|known| known.under_way);
        let Some(Move::Committed(token, _)) = known else {
            continue;
        };
        let path = machines.directory().join(format!(".{machine}.rest"));
        let what = format!("cannot read {}", path.display());
        let failed = |error| failed(&what, error);
        let Some(bytes) = FORMAT.read(&path).map_err(failed)? else {
            continue;
        };
        let damaged = |e: &dyn std::fmt::Display| failed(std::io::Error::other(e.to_string()));
        let body = FORMAT.open(&bytes).map_err(|e| damaged(&e))?;
        let left: LeftDisks = decode(body).map_err(|e| damaged(&e))?;
        if left.token == token {
            all.push((machine, left));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use drover_device::backend::nbd::NbdAddress;
    use drover_hypervisor::machine::{Data, Medium};
    use drover_net::encode;
    use drover_store::machine::{MachineRecord, Other, Seed, Token};

    use super::*;

    #[test]
    fn files_are_followed_while_their_move_is_committed() {
        let directory = tempfile::tempdir().unwrap();
        let machines = Machines::new(directory.path().join("machines"));
        let file = directory.path().join("web.qcow2");
        std::fs::write(&file, "x").unwrap();
        let name = ImageName::new("web").unwrap();
        let (token, other) = (Token([1; 16]), Token([2; 16]));
        let to = Other {
            key: [7; 32],
            name: "lyon".into(),
        };
        let medium = Medium {
            node: "disk".into(),
            format: "qcow2".into(),
            size: 8192,
            read_only: false,
            data: Data::File(file.clone()),
            backing: None,
            snapshots: 0,
            encrypted: false,
            bitmaps: Vec::new(),
        };
        let export: NbdAddress = "nbd+unix:///x?socket=/none".parse().unwrap();
        let leave = |token| {
            let mut record = LeftDisks {
                token,
                disks: vec![LeftDisk::new(&medium, export.clone())],
                mounts: Vec::new(),
            };
            record.disks.iter_mut().for_each(LeftDisk::stamp);
            let path = machines.directory().join(".web.rest");
            FORMAT.write(&path, &encode(&record)).unwrap();
        };
        assert_eq!(left_files(&machines).unwrap(), []);
        let stays = MachineRecord::new(Seed([3; 16]), Vec::new());
        let leaving = stays.leave(token, to).unwrap();
        machines.store(&name, &leaving).unwrap();
        leave(token);
        assert_eq!(left_files(&machines).unwrap(), [], "it is not handed over");
        let committed = leaving.commit(token).unwrap();
        machines.store(&name, &committed).unwrap();
        let followed = FollowedFile {
            machine: name.clone(),
            path: file.clone(),
        };
        assert_eq!(left_files(&machines).unwrap(), [followed]);
        leave(other);
        assert_eq!(left_files(&machines).unwrap(), [], "of an earlier move");
        std::fs::write(machines.directory().join(".web.rest"), "x").unwrap();
        let damaged = left_files(&machines).unwrap_err().to_string();
        assert!(damaged.contains(".web.rest"), "{damaged}");
        machines
            .store(&name, &committed.gone(token).unwrap())
            .unwrap();
        assert_eq!(left_files(&machines).unwrap(), []);
    }
}
