//! What a running machine writes to disks that drover does not serve, in rounds: QEMU records it in dirty bitmaps and
//! offers both, bytes and bitmaps, by its own NBD server. The guest and its configuration stay as they are.
//!
//! ```text
//! begin    a bitmap for each disk, at one moment; export all      -> copy everything from `whole`
//! next     the bitmap stops, a new one begins, at one moment;
//!          export the old one                                     -> copy what it says is dirty
//! confirm  export and old bitmap go                               (until then they count: `next` offers them again)
//! ...      the last `next` in `pre-switchover`, where nothing is written any more
//! end      nothing of it is left in QEMU
//! ```
//!
//! A drover that dies leaves it all in QEMU; the next one goes on with [`Rounds::resume`], or cleans up with [`clear`].
//! Whoever reads needs an NBD client: nothing here does.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_storage::make_private_dir;
use rustix::process::geteuid;

use crate::error::{HypervisorError, plain};
use crate::machine::{Action, Export, Machine, Medium};

mod left;
mod names;

pub use left::clear;
pub use names::MAX_NAME;

use left::{BUSY, delete_exports, socket_in, stop_serving};
use names::Names;

/// Disks of one machine at most.
pub const MAX_DISKS: usize = 64;

/// A disk as it can be read now, by NBD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// QEMU's server, at a Unix socket, and the export.
    pub address: NbdAddress,
    /// The metadata context with what is dirty, `qemu:dirty-bitmap:NAME`; `None`: all of it.
    pub context: Option<String>,
    /// Bytes that are dirty, or that the disk has.
    pub bytes: u64,
}

/// The recording of what a machine writes to some of its disks.
///
/// Dropping it leaves QEMU as it is: call [`Self::end`].
#[derive(Debug)]
pub struct Rounds {
    machine: Machine,
    names: Names,
    nodes: Vec<String>,
    socket: PathBuf,
    granularity: u32,
    /// The bitmaps that record have this number.
    current: u64,
    /// Whether the ones before are not confirmed.
    open: bool,
    /// Whether the next ones may record already: QEMU was asked, and has not said.
    unsure: bool,
}

impl Rounds {
    /// Begins to record what is written to the disks on these block nodes, from one moment on.
    ///
    /// `name` (letters, digits, `-`, `.`, `_`) tells this series from others; what an older one of that name has left is
    /// removed. `directory` gets the server's socket; it is made, or must be its owner's only. `granularity` is the
    /// bytes of a bit: a power of two, at least 512; the coarser, the more is sent again.
    ///
    /// # Errors
    /// [`HypervisorError::Unsupported`] when a node is no disk's or a name is not allowed, [`HypervisorError::Local`] for
    /// the directory, and those of [`Qmp::run`](crate::qmp::Qmp::run), as when QEMU's NBD server is in use already.
    pub async fn begin(
        machine: &Machine,
        name: &str,
        nodes: &[&str],
        directory: &Path,
        granularity: u32,
    ) -> Result<Rounds, HypervisorError> {
        clear(machine, name, directory).await?;
        let rounds = Rounds::new(machine, name, nodes, directory, granularity, 1)?;
        match rounds.set_up().await {
            Ok(()) => Ok(rounds),
            Err(e) => {
                let _ = clear(machine, name, directory).await;
                Err(e)
            }
        }
    }

    async fn set_up(&self) -> Result<(), HypervisorError> {
        self.media().await?;
        let bitmap = self.names.bitmap(self.current);
        let add: Vec<Action<'_>> = self
            .nodes
            .iter()
            .map(|node| self.add(node, &bitmap))
            .collect();
        self.machine.transaction(&add).await?;
        self.serve().await
    }

    /// Goes on with the series of this name that another drover began on these nodes, or `None` when it cannot: since then
    /// something was written that was not recorded. What was not confirmed is in the next round.
    ///
    /// # Errors
    /// Those of [`Self::begin`].
    pub async fn resume(
        machine: &Machine,
        name: &str,
        nodes: &[&str],
        directory: &Path,
        granularity: u32,
    ) -> Result<Option<Rounds>, HypervisorError> {
        let mut rounds = Rounds::new(machine, name, nodes, directory, granularity, 0)?;
        let mut known: Vec<BTreeMap<u64, bool>> = Vec::new();
        for medium in rounds.media().await? {
            let numbered = medium.bitmaps.iter().filter_map(|bitmap| {
                Some((rounds.names.number_of(&bitmap.name)?, bitmap.recording))
            });
            known.push(numbered.collect());
        }
        let newest = |of: &BTreeMap<u64, bool>| of.last_key_value().map(|(n, on)| (*n, *on));
        let Some(Some((current, true))) = known.first().map(newest) else {
            return Ok(None);
        };
        if known.iter().any(|of| newest(of) != Some((current, true))) {
            return Ok(None);
        }
        rounds.current = current;
        rounds.stop_serving().await?;
        for (node, of) in rounds.nodes.iter().zip(&known) {
            for number in of.keys().filter(|number| **number != current) {
                rounds.fold(&[node], *number).await?;
            }
        }
        rounds.serve().await?;
        Ok(Some(rounds))
    }

    fn new(
        machine: &Machine,
        name: &str,
        nodes: &[&str],
        directory: &Path,
        granularity: u32,
        current: u64,
    ) -> Result<Rounds, HypervisorError> {
        if nodes.len() > MAX_DISKS {
            let reason = format!("has more disks than the {MAX_DISKS} that can move together");
            return Err(machine.qmp().unsupported(&reason));
        }
        Ok(Rounds {
            machine: machine.clone(),
            names: Names::new(machine, name)?,
            nodes: nodes.iter().map(|&node| node.to_owned()).collect(),
            socket: socket_in(directory),
            granularity,
            current,
            open: false,
            unsure: false,
        })
    }

    /// The disks as a whole, in the order of the nodes. They can be read until [`Self::end`], also after a switch.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn whole(&self) -> Result<Vec<View>, HypervisorError> {
        let media = self.media().await?;
        let views = media.iter().enumerate().map(|(index, medium)| View {
            address: self.address(self.names.export(0, index)),
            context: None,
            bytes: medium.size,
        });
        Ok(views.collect())
    }

    /// Bytes that a round would have now, of each disk.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn dirty(&self) -> Result<Vec<u64>, HypervisorError> {
        self.counts(self.current).await
    }

    /// A round: what was written since the one before, and what of that one was not confirmed. The disks are as of one
    /// moment for what is dirty; their bytes go on to change, and what changes is in the next round.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run). Nothing is lost by one: call it again.
    pub async fn next(&mut self) -> Result<Vec<View>, HypervisorError> {
        if self.unsure {
            self.find_out().await?;
        }
        if self.open {
            self.take_back().await?;
        }
        let number = self.current;
        let (old, new) = (self.names.bitmap(number), self.names.bitmap(number + 1));
        let turn = self.nodes.iter().flat_map(|node| {
            let disable = Action::DisableBitmap { node, name: &old };
            [self.add(node, &new), disable]
        });
        let turn: Vec<_> = turn.collect();
        // Also when this future is dropped.
        self.unsure = true;
        let turned = self.machine.transaction(&turn).await;
        self.unsure = turned.as_ref().is_err_and(HypervisorError::undecided);
        turned?;
        self.current += 1;
        self.open = true;
        let counts = self.counts(number).await?;
        let mut views = Vec::new();
        for (index, (node, bytes)) in self.nodes.iter().zip(counts).enumerate() {
            let export = self.names.export(number, index);
            self.export(&export, node, &[&old]).await?;
            views.push(View {
                address: self.address(export),
                context: Some(format!("qemu:dirty-bitmap:{old}")),
                bytes,
            });
        }
        Ok(views)
    }

    /// All of the newest round is safe at the other side: it is not offered again.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn confirm(&mut self) -> Result<(), HypervisorError> {
        if !self.open {
            return Ok(());
        }
        self.delete_exports(|number| number != 0).await?;
        // From here on what is left of it is only removed.
        self.open = false;
        let old = self.names.bitmap(self.current - 1);
        for node in &self.nodes {
            self.machine.remove_bitmap(node, &old, BUSY).await?;
        }
        Ok(())
    }

    /// Removes all of it from QEMU: nothing is recorded any more, nothing can be read.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run), and [`HypervisorError::Local`] for the directory.
    pub async fn end(self) -> Result<(), HypervisorError> {
        let directory = self.socket.parent().unwrap_or(&self.socket);
        clear(&self.machine, self.names.series(), directory).await
    }

    /// Whether the turn to a new round happened that QEMU did not confirm.
    async fn find_out(&mut self) -> Result<(), HypervisorError> {
        let new = self.names.bitmap(self.current + 1);
        let media = self.media().await?;
        if media
            .iter()
            .any(|medium| medium.bitmaps.iter().any(|bitmap| bitmap.name == new))
        {
            self.current += 1;
            self.open = true;
        }
        self.unsure = false;
        Ok(())
    }

    /// What the newest round has goes back into what is recorded.
    async fn take_back(&mut self) -> Result<(), HypervisorError> {
        self.delete_exports(|number| number != 0).await?;
        let nodes: Vec<&String> = self.nodes.iter().collect();
        self.fold(&nodes, self.current - 1).await?;
        self.open = false;
        Ok(())
    }

    /// Merges an old bitmap of these nodes into the current one, and removes it.
    async fn fold(&self, nodes: &[&String], number: u64) -> Result<(), HypervisorError> {
        let (old, new) = (self.names.bitmap(number), self.names.bitmap(self.current));
        let media = self
            .machine
            .disks()
            .await?
            .into_iter()
            .filter_map(|disk| disk.medium);
        // Where this was cut short, the first ones are done.
        let left: Vec<String> = media
            .filter(|medium| nodes.contains(&&medium.node))
            .filter(|medium| medium.bitmaps.iter().any(|bitmap| bitmap.name == old))
            .map(|medium| medium.node)
            .collect();
        for node in left {
            let merge = Action::MergeBitmap {
                node: &node,
                into: &new,
                from: &old,
            };
            self.machine.transaction(&[merge]).await?;
            self.machine.remove_bitmap(&node, &old, BUSY).await?;
        }
        Ok(())
    }

    fn address(&self, export: String) -> NbdAddress {
        NbdAddress {
            socket: NbdSocket::Unix(self.socket.clone()),
            export,
        }
    }

    fn add<'a>(&self, node: &'a str, name: &'a str) -> Action<'a> {
        Action::AddBitmap {
            node,
            name,
            granularity: self.granularity,
        }
    }

    /// What is on the nodes, in their order.
    async fn media(&self) -> Result<Vec<Medium>, HypervisorError> {
        let disks = self.machine.disks().await?;
        let mut media: BTreeMap<String, Medium> = disks
            .into_iter()
            .filter_map(|disk| disk.medium)
            .map(|medium| (medium.node.clone(), medium))
            .collect();
        let find = |node: &String| {
            let missing = || format!("has no disk on block node {node}");
            media
                .remove(node)
                .ok_or_else(|| self.machine.qmp().unsupported(&missing()))
        };
        self.nodes.iter().map(find).collect()
    }

    /// How many bytes are dirty in the bitmaps of a number.
    async fn counts(&self, number: u64) -> Result<Vec<u64>, HypervisorError> {
        let name = self.names.bitmap(number);
        let count = |medium: &Medium| {
            let found = medium.bitmaps.iter().find(|bitmap| bitmap.name == name);
            let gone = || format!("no longer has the dirty bitmap {name}: begin anew");
            found
                .map(|bitmap| bitmap.count)
                .ok_or_else(|| self.machine.qmp().unsupported(&gone()))
        };
        self.media().await?.iter().map(count).collect()
    }

    /// Starts the server, on a socket that only the owner of the directory can reach, and exports the whole disks.
    async fn serve(&self) -> Result<(), HypervisorError> {
        let local = |e: io::Error| HypervisorError::Local {
            path: self.socket.display().to_string(),
            reason: plain(&e),
        };
        let directory = self.socket.parent().unwrap_or(&self.socket);
        make_private_dir(directory).map_err(local)?;
        let found = fs::metadata(directory).map_err(local)?;
        if found.uid() != geteuid().as_raw() || found.mode() & 0o077 != 0 {
            return Err(HypervisorError::Local {
                path: directory.display().to_string(),
                reason: "other users can enter this directory: name one of your own, of mode 0700"
                    .into(),
            });
        }
        let listener = UnixListener::bind(&self.socket).map_err(local)?;
        let started = self.machine.start_nbd_server(listener).await;
        if let Err(e) = started {
            let _ = fs::remove_file(&self.socket);
            return Err(e);
        }
        for (index, node) in self.nodes.iter().enumerate() {
            self.export(&self.names.export(0, index), node, &[]).await?;
        }
        Ok(())
    }

    async fn export(&self, id: &str, node: &str, bitmaps: &[&str]) -> Result<(), HypervisorError> {
        let export = Export {
            id,
            node,
            writable: false,
            bitmaps,
        };
        self.machine.add_export(&export).await
    }

    async fn delete_exports(&self, which: impl Fn(u64) -> bool) -> Result<(), HypervisorError> {
        delete_exports(&self.machine, &self.names, which)
            .await
            .map(|_| ())
    }

    async fn stop_serving(&self) -> Result<(), HypervisorError> {
        stop_serving(&self.machine, &self.names, &self.socket).await
    }
}
