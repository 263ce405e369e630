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
//! [`Rounds::begin_held`] offers the disks as of the first moment too, while the machine writes on: what reads them for
//! long, or more than once, as a teleport, sees one state. [`Rounds::hold_next`] does so again later.
//!
//! A drover that dies leaves it all in QEMU; the next one goes on with [`Rounds::resume`], or cleans up with [`clear`].
//! Whoever reads needs an NBD client: nothing here does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use drover_device::backend::nbd::{NbdAddress, NbdSocket};

use crate::error::HypervisorError;
use crate::machine::{Action, Export, Machine, Medium};

mod held;
mod left;
mod moments;
mod names;
mod notes;
mod server;

pub use held::{COPY_TIMEOUT, MIN_HELD_VERSION};
pub use left::{clear, let_go};
pub use names::MAX_NAME;

use held::Moment;
use left::BUSY;
use names::Names;
use server::{delete_exports, socket_in, start_serving, stop_serving};

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
    /// Whether the state of the disks when it began is held.
    held: bool,
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
        Self::start(machine, name, nodes, directory, granularity, None).await
    }

    /// As [`Self::begin`], and holds the disks as of the moment from which on is recorded: see [`Self::held`].
    ///
    /// What the machine overwrites is copied to files without a name in the directory `scratch`, up to all of the disks,
    /// which slows each first write to 64 KiB down. QEMU needs no right to the directory. When a copy fails, since there is no
    /// space or it takes longer than [`COPY_TIMEOUT`], the held state ends, and the machine goes on. With several disks a
    /// running machine is paused for milliseconds.
    ///
    /// # Errors
    /// Those of [`Self::begin`]; [`HypervisorError::Unsupported`] for a QEMU older than [`MIN_HELD_VERSION`], and for a
    /// machine with iothreads.
    pub async fn begin_held(
        machine: &Machine,
        name: &str,
        nodes: &[&str],
        directory: &Path,
        granularity: u32,
        scratch: &Path,
    ) -> Result<Rounds, HypervisorError> {
        Self::start(machine, name, nodes, directory, granularity, Some(scratch)).await
    }

    async fn start(
        machine: &Machine,
        name: &str,
        nodes: &[&str],
        directory: &Path,
        granularity: u32,
        scratch: Option<&Path>,
    ) -> Result<Rounds, HypervisorError> {
        clear(machine, name, directory).await?;
        let mut rounds = Rounds::new(machine, name, nodes, directory, granularity, 1)?;
        match rounds.set_up(scratch).await {
            Ok(()) => Ok(rounds),
            Err(e) => {
                let _ = clear(machine, name, directory).await;
                Err(e)
            }
        }
    }

    async fn set_up(&mut self, scratch: Option<&Path>) -> Result<(), HypervisorError> {
        let media = self.media().await?;
        let bitmap = self.names.bitmap(self.current);
        let Some(scratch) = scratch else {
            let add = self.nodes.iter().map(|node| self.add(node, &bitmap));
            self.machine.transaction(&add.collect::<Vec<_>>()).await?;
            return self.serve().await;
        };
        held::prepare(&self.machine, &self.names, &media, scratch).await?;
        self.take_moment(bitmap, None).await?;
        held::show(&self.machine, &self.names, self.nodes.len()).await?;
        self.held = true;
        self.serve().await
    }

    /// Holds the state of now, and records into this bitmap from now on, in the place of the one that `ends`.
    async fn take_moment(
        &self,
        bitmap: String,
        ends: Option<String>,
    ) -> Result<(), HypervisorError> {
        let moment = Moment {
            machine: self.machine.clone(),
            names: self.names.clone(),
            nodes: self.nodes.clone(),
            devices: self.devices().await?,
            bitmap,
            ends,
            granularity: self.granularity,
        };
        // It has its end also when this future is dropped: the machine is paused meanwhile.
        let alone = self.machine.alone.clone().lock_owned().await;
        let taken = tokio::spawn(async move {
            let _alone = alone;
            moment.take().await
        });
        let taken = taken.await;
        taken.map_err(|_| HypervisorError::Closed {
            socket: self.machine.socket().to_owned(),
            reason: "this program is ending".into(),
        })?
    }

    /// Goes on with the series of this name that another drover began on these nodes, or `None` when it cannot: since then
    /// something was written that was not recorded. What was not confirmed is in the next round. Disks whose state was held
    /// still are. Whether all of the disks was copied before, is for the caller to know.
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
        held::unpause(machine, &rounds.names).await?;
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
        let media = rounds.media().await?;
        rounds.held = held::is_held(machine, &rounds.names, &media).await?;
        if !rounds.held {
            held::remove(machine, &rounds.names).await?;
        }
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
        Ok(Rounds {
            machine: machine.clone(),
            names: Names::new(machine, name)?,
            nodes: nodes.iter().map(|&node| node.to_owned()).collect(),
            socket: socket_in(directory),
            granularity,
            current,
            open: false,
            unsure: false,
            held: false,
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

    /// The disks as they were when this began, in the order of the nodes; `None` when that is not held (any more). Reads
    /// are refused when it ended by itself: what was read before is good.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn held(&self) -> Result<Option<Vec<View>>, HypervisorError> {
        if !self.held {
            return Ok(None);
        }
        let media = self.media().await?;
        let views = media.iter().enumerate().map(|(index, medium)| View {
            address: self.address(self.names.held(index)),
            context: None,
            bytes: medium.size,
        });
        Ok(Some(views.collect()))
    }

    /// Ends what [`Self::begin_held`] holds, when it has been read, or could not be: writes are no longer slowed down. The
    /// rounds go on.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run): call it again.
    pub async fn release_held(&mut self) -> Result<(), HypervisorError> {
        let names = &self.names;
        delete_exports(&self.machine, |id| names.is_held(id)).await?;
        held::remove(&self.machine, names).await?;
        self.held = false;
        Ok(())
    }

    /// What a bitmap of others has recorded of a disk, by its place among the nodes. It records on. [`Self::forget_past`] has to
    /// follow.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run), as when there is no such bitmap.
    pub async fn past(&self, index: usize, bitmap: &str) -> Result<View, HypervisorError> {
        let Some(node) = self.nodes.get(index) else {
            return Err(self.machine.qmp().unsupported("has no such disk"));
        };
        let name = self.names.past(index);
        // One that records is not exported for reading.
        let copy = [
            Action::AddMark { node, name: &name },
            Action::MergeBitmap {
                node,
                into: &name,
                from: bitmap,
            },
        ];
        self.machine.transaction(&copy).await?;
        self.export(&name, node, &[&name]).await?;
        let media = self.media().await?;
        let known = media[index].bitmaps.iter().find(|of| of.name == name);
        Ok(View {
            context: Some(format!("qemu:dirty-bitmap:{name}")),
            bytes: known.map_or(0, |known| known.count),
            address: self.address(name),
        })
    }

    /// Removes what [`Self::past`] has made.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn forget_past(&self) -> Result<(), HypervisorError> {
        delete_exports(&self.machine, |id| self.names.is_past(id)).await?;
        for medium in self.media().await? {
            for bitmap in medium.bitmaps {
                if self.names.is_past(&bitmap.name) {
                    let removed = self.machine.remove_bitmap(&medium.node, &bitmap.name, BUSY);
                    removed.await?;
                }
            }
        }
        Ok(())
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
        self.delete_rounds().await?;
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
        self.delete_rounds().await?;
        let nodes: Vec<&String> = self.nodes.iter().collect();
        self.fold(&nodes, self.current - 1).await?;
        self.open = false;
        Ok(())
    }

    /// Merges an old bitmap of these nodes into the current one, and removes it.
    async fn fold(&self, nodes: &[&String], number: u64) -> Result<(), HypervisorError> {
        let (old, new) = (self.names.bitmap(number), self.names.bitmap(self.current));
        // Where this was cut short, the first ones are done.
        let left = self.media().await?;
        let left = left
            .iter()
            .filter(|medium| nodes.contains(&&medium.node))
            .filter(|medium| medium.bitmaps.iter().any(|bitmap| bitmap.name == old))
            .map(|medium| &medium.node);
        for node in left {
            let merge = Action::MergeBitmap {
                node,
                into: &new,
                from: &old,
            };
            self.machine.transaction(&[merge]).await?;
            self.machine.remove_bitmap(node, &old, BUSY).await?;
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
        let used = held::used(&self.machine.disks().await?);
        let nodes = self.machine.nodes().await?;
        let mut nodes: BTreeMap<String, Medium> = nodes
            .into_iter()
            .map(|medium| (medium.node.clone(), medium))
            .collect();
        let find = |(index, node): (usize, &String)| {
            // One that no disk uses any more may miss what is written.
            let in_use = used.contains(node) || used.contains(&self.names.filter(index));
            let missing = || format!("has no disk on block node {node}");
            nodes
                .remove(node)
                .filter(|_| in_use)
                .ok_or_else(|| self.machine.qmp().unsupported(&missing()))
        };
        self.nodes.iter().enumerate().map(find).collect()
    }

    /// The devices that use the nodes, in their order.
    async fn devices(&self) -> Result<Vec<String>, HypervisorError> {
        let disks = self.machine.disks().await?;
        let find = |node: &String| {
            let uses = |medium: &Medium| medium.node == *node;
            let disk = disks
                .iter()
                .find(|disk| disk.medium.as_ref().is_some_and(uses));
            let path = disk.and_then(|disk| disk.path.clone());
            let missing = || format!("has no device on block node {node}");
            path.ok_or_else(|| self.machine.qmp().unsupported(&missing()))
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
        start_serving(&self.machine, &self.socket).await?;
        for (index, node) in self.nodes.iter().enumerate() {
            self.export(&self.names.export(0, index), node, &[]).await?;
            if self.held {
                let held = self.names.held(index);
                self.export(&held, &held, &[]).await?;
            }
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

    /// Ends the exports of rounds; those of whole disks stay.
    async fn delete_rounds(&self) -> Result<(), HypervisorError> {
        let of_round = |id: &str| self.names.number_of_export(id).is_some_and(|n| n != 0);
        delete_exports(&self.machine, of_round).await.map(|_| ())
    }

    async fn stop_serving(&self) -> Result<(), HypervisorError> {
        stop_serving(&self.machine, &self.names, &self.socket).await
    }
}
