//! The disks of a machine as of one moment, while it writes on: between each disk and its block node comes a filter that
//! copies aside what is about to be overwritten.
//!
//! QEMU's backup job does that too, but fails the machine's writes when a copy fails, as when the disk with the copies is
//! full. Here the held state ends then: reads of it are refused.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use drover_storage::make_private_dir;

use super::names::Names;
use crate::error::{HypervisorError, plain};
use crate::machine::{Action, Disk, Machine, Medium, Node, RunState};
use crate::qmp::Version;

/// The oldest QEMU in which such a copy that fails spares the machine.
pub const MIN_HELD_VERSION: Version = Version {
    major: 7,
    minor: 1,
    micro: 0,
};

/// How long a write of the machine may wait for its copy; after that, the held state ends.
pub const COPY_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes the filters for these disks, with files for the copies, which go with the last process that has them open.
pub async fn prepare(
    machine: &Machine,
    names: &Names,
    media: &[Medium],
    scratch: &Path,
) -> Result<(), HypervisorError> {
    if machine.version() < MIN_HELD_VERSION {
        let reason = format!(
            "has version {}: the state of disks can be held from {MIN_HELD_VERSION} on",
            machine.version()
        );
        return Err(machine.qmp().unsupported(&reason));
    }
    if machine.has_iothreads().await? {
        // Seen with 10.0: after a few changes of a disk's node its requests stay unanswered.
        let reason =
            "has iothreads, with which the state of disks cannot be held: begin without it";
        return Err(machine.qmp().unsupported(reason));
    }
    for (index, medium) in media.iter().enumerate() {
        let target = names.scratch(index);
        let file = nameless(scratch, &target, medium.size).map_err(|e| HypervisorError::Local {
            path: scratch.display().to_string(),
            reason: plain(&e),
        })?;
        machine.add_file_node(&target, file).await?;
        let filter = Node::CopyBeforeWrite {
            name: names.filter(index),
            file: medium.node.clone(),
            target,
            within: COPY_TIMEOUT,
        };
        machine.add_node(&filter).await?;
    }
    Ok(())
}

/// A sparse file of a size, without a name.
fn nameless(directory: &Path, name: &str, size: u64) -> io::Result<fs::File> {
    make_private_dir(directory)?;
    let path = directory.join(name);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(&path)?;
    fs::remove_file(&path)?;
    file.set_len(size)?;
    Ok(file)
}

/// What happens at the moment that is held.
pub struct Moment {
    pub machine: Machine,
    pub names: Names,
    /// The disks' nodes.
    pub nodes: Vec<String>,
    /// The disks' devices.
    pub devices: Vec<String>,
    /// The bitmap that begins to record.
    pub bitmap: String,
    /// The bitmap that has recorded so far, if any, and stops.
    pub ends: Option<String>,
    pub granularity: u32,
}

impl Moment {
    /// Begins to record, and to hold. Several disks, and bitmaps that end, share the moment by a pause of the machine, of
    /// milliseconds.
    pub async fn take(self) -> Result<(), HypervisorError> {
        let machine = &self.machine;
        let shares = self.nodes.len() > 1 || self.ends.is_some();
        let Some(first) = self.nodes.first().filter(|_| shares) else {
            return self.switch().await;
        };
        if machine.status().await? != RunState::Running {
            return self.switch().await;
        }
        let mark = self.names.paused();
        let paused = Action::AddMark {
            node: first,
            name: &mark,
        };
        machine.transaction(&[paused]).await?;
        let stopped = machine.stop().await;
        let switched = match &stopped {
            Ok(()) => self.switch().await,
            Err(_) => Ok(()),
        };
        // Also after a stop that was not answered: it may happen yet.
        let resumed = machine.cont().await;
        stopped.and(switched).and(resumed)?;
        machine.remove_bitmap(first, &mark, Duration::ZERO).await
    }

    async fn switch(&self) -> Result<(), HypervisorError> {
        let filters: Vec<String> = (0..self.nodes.len())
            .map(|index| self.names.filter(index))
            .collect();
        let actions = self.nodes.iter().zip(&filters).flat_map(|(node, filter)| {
            let record = Action::AddBitmap {
                node,
                name: &self.bitmap,
                granularity: self.granularity,
            };
            let mark = Action::AddMark { node, name: filter };
            let end = self.ends.as_ref();
            let end = end.map(|name| Action::DisableBitmap { node, name });
            [record, mark].into_iter().chain(end)
        });
        self.machine
            .transaction(&actions.collect::<Vec<_>>())
            .await?;
        for (device, filter) in self.devices.iter().zip(&filters) {
            self.machine.set_disk_node(device, filter).await?;
        }
        Ok(())
    }
}

/// Makes the nodes that have the held state.
pub async fn show(machine: &Machine, names: &Names, disks: usize) -> Result<(), HypervisorError> {
    for index in 0..disks {
        let held = Node::Snapshot {
            name: names.held(index),
            file: names.filter(index),
        };
        machine.add_node(&held).await?;
    }
    Ok(())
}

/// Whether the state of all these disks is held, in this order.
pub async fn is_held(
    machine: &Machine,
    names: &Names,
    media: &[Medium],
) -> Result<bool, HypervisorError> {
    let used = used(&machine.disks().await?);
    let nodes = machine.nodes().await?;
    let held = media.iter().enumerate().all(|(index, medium)| {
        let (filter, held) = (names.filter(index), names.held(index));
        let marked = medium.bitmaps.iter().any(|bitmap| bitmap.name == filter);
        marked && used.contains(&filter) && nodes.iter().any(|node| node.node == held)
    });
    Ok(held)
}

/// The nodes that disks use.
pub fn used(disks: &[Disk]) -> Vec<String> {
    let media = disks.iter().filter_map(|disk| disk.medium.as_ref());
    media.map(|medium| medium.node.clone()).collect()
}

/// Ends what holds the disks' state, or what is there of it, when its exports have gone.
pub async fn remove(machine: &Machine, names: &Names) -> Result<(), HypervisorError> {
    let nodes = machine.nodes().await?;
    delete(machine, &nodes, |name| names.is_held(name)).await?;
    for disk in machine.disks().await? {
        let (Some(path), Some(medium)) = (disk.path, disk.medium) else {
            continue;
        };
        if !names.is_filter(&medium.node) {
            continue;
        }
        let below = nodes
            .iter()
            .find(|node| node.bitmaps.iter().any(|mark| mark.name == medium.node));
        if let Some(below) = below {
            machine.set_disk_node(&path, &below.node).await?;
        }
    }
    delete(machine, &nodes, |name| names.is_filter(name)).await?;
    for medium in nodes.iter().filter(|one| names.is_scratch(&one.node)) {
        // While the machine is paused, QEMU keeps the file open.
        machine.resize_node(&medium.node, 0).await?;
        machine.delete_node(&medium.node).await?;
    }
    for medium in nodes {
        for mark in medium.bitmaps {
            if names.is_filter(&mark.name) {
                machine
                    .remove_bitmap(&medium.node, &mark.name, Duration::ZERO)
                    .await?;
            }
        }
    }
    Ok(())
}

async fn delete(
    machine: &Machine,
    nodes: &[Medium],
    which: impl Fn(&str) -> bool,
) -> Result<(), HypervisorError> {
    for medium in nodes.iter().filter(|medium| which(&medium.node)) {
        machine.delete_node(&medium.node).await?;
    }
    Ok(())
}

/// Lets a machine go on whose pause of [`Moment::take`] nobody ended.
pub async fn unpause(machine: &Machine, names: &Names) -> Result<(), HypervisorError> {
    // One that is being taken ends its pause itself.
    drop(machine.alone.lock().await);
    let mark = names.paused();
    for medium in machine.nodes().await? {
        if medium.bitmaps.iter().any(|bitmap| bitmap.name == mark) {
            if machine.status().await? == RunState::Paused {
                machine.cont().await?;
            }
            machine
                .remove_bitmap(&medium.node, &mark, Duration::ZERO)
                .await?;
        }
    }
    Ok(())
}
