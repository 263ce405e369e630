//! The disks of a machine that runs: an unchanging state of all of them, and then, round by round, what was written since.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, Digest, ImageName, ReadAt};
use drover_device::backend::NbdDevice;
use drover_device::backend::nbd::NbdOptions;
use drover_hypervisor::libvirt::Disk;
use drover_hypervisor::machine::{Bitmap, Data, Machine, Medium, RunState};
use drover_hypervisor::rounds::View;
use drover_hypervisor::{HypervisorError, Rounds, writers_of};
use drover_image::{Conversion, Format, Layout, Outgoing};
use drover_net::PeerKey;
use drover_store::generations::Summary;
use drover_store::machine::MAX_DISKS;
use drover_teleport::{SendItem, Snapshot};
use tokio::sync::RwLock;

use super::left::{LeftDisk, Round, bytes_of};
use super::report::{LeftFile, Mounted, Mounts, MoveOptions};
use crate::disks::DiskWriter;
use crate::error::MigrateError;
use crate::protocol::{DiskOffer, MountedDisk};

/// When it is looked again who writes a disk.
const LOOK_AGAIN: Duration = Duration::from_millis(300);

/// The name of our series of rounds in a hypervisor: there is one move of a machine at a time.
const SERIES: &str = "move";

/// The same of a machine that is replicated.
pub(crate) const REPLICA: &str = "replica";

/// Bytes for each bit of a bitmap: what the file systems of guests write at least.
pub(crate) const GRANULARITY: u32 = 4096;

/// Longest range that is asked for its extents at once.
const EXTENTS_AT_ONCE: u64 = 1 << 30;

/// Upper bound on the runs of data of a disk: beyond it the shortest gaps are sent as zeros.
const MAX_RUNS: usize = 1 << 20;

/// The writable disks of a machine.
#[derive(Default)]
pub struct Disks {
    /// As they are offered to the other site.
    pub offers: Vec<DiskOffer>,
    /// The machine's memory.
    pub memory_bytes: u64,
    /// The files that they are, as far as they are files.
    pub files: Vec<LeftFile>,
    /// Those that are mounts, and are handed over instead.
    pub mounted: Vec<MountedDisk>,
    /// What they are at this site, in the same order.
    pub mounts: Vec<Mounted>,
    /// The disks of a machine of libvirt.
    pub domain: Vec<Disk>,
    /// Their block nodes.
    nodes: Vec<String>,
    /// What the nodes are.
    media: Vec<Medium>,
    /// What is written to them.
    rounds: Option<Rounds>,
    opening: Opening,
}

/// Shared by those who open a connection to the hypervisor's NBD server, also after whoever wanted it has given up: until it
/// is open, a QEMU that is to end its server waits for it forever, and its machine with it.
pub(crate) type Opening = Arc<RwLock<()>>;

impl Disks {
    /// The disks of a machine that can move, whose images there are called after the machine.
    ///
    /// # Errors
    /// When it cannot, and why.
    pub async fn of(machine: &Machine, options: &MoveOptions) -> Result<Disks, MigrateError> {
        machine.check_migratable().await?;
        let status = machine.status().await?;
        if status != RunState::Running {
            return Err(MigrateError::Unsupported(format!(
                "the machine is {status}: only one that runs moves live; send its images instead"
            )));
        }
        let migration = machine.migration().await?.status;
        if !migration.is_idle() {
            return Err(MigrateError::Unsupported(format!(
                "another program migrates the machine: its migration is {migration}"
            )));
        }
        let mounts = options.mounts.as_deref().filter(|_| !options.copy_mounts);
        let mounts = mounts.map(|mounts| (mounts, options.send.peer));
        writable(machine, &options.name_there, mounts).await
    }

    /// Those that are handed over, for a person.
    pub(crate) fn handed_over(&self) -> Vec<String> {
        self.mounts.iter().map(ToString::to_string).collect()
    }

    /// What a person should know of them before they move.
    pub(crate) fn notes(&self) -> Vec<String> {
        let disks = self.offers.iter().zip(&self.media);
        let with_snapshots = disks.filter(|(_, medium)| medium.snapshots > 0);
        let note = |(offer, medium): (&DiskOffer, &Medium)| {
            let snapshots = match medium.snapshots {
                1 => "1 snapshot".to_owned(),
                n => format!("{n} snapshots"),
            };
            format!(
                "the disk {} has {snapshots} in its file, which a live move leaves here: only its present state moves",
                offer.device
            )
        };
        with_snapshots.map(note).collect()
    }

    /// The disks' block nodes.
    pub(crate) fn nodes(&self) -> &[String] {
        &self.nodes
    }

    /// Holds the state of all disks as of now in exports of the hypervisor, and begins to record what is written: images
    /// to be sent. `work` gets the socket of those exports, `scratch` what the machine overwrites in the meantime.
    pub async fn hold(
        &mut self,
        machine: &Machine,
        work: &Path,
        scratch: &Path,
    ) -> Result<Vec<SendItem>, MigrateError> {
        let nodes: Vec<&str> = self.nodes.iter().map(String::as_str).collect();
        // Of a replication that was killed; one that waits for its next round begins anew.
        clear_replica(machine, work).await;
        if nodes.is_empty() {
            return Ok(Vec::new());
        }
        let rounds =
            Rounds::begin_held(machine, SERIES, &nodes, work, GRANULARITY, scratch).await?;
        let views = rounds.held().await?.unwrap_or_default();
        self.rounds = Some(rounds);
        let mut items = Vec::new();
        for (offer, view) in self.offers.iter().zip(views) {
            let name = offer.image.to_string();
            let opened = open(&self.opening, view, move |device, _| {
                Ok(whole(device, &name))
            });
            items.push(item(offer.image.clone(), opened.await??));
        }
        Ok(items)
    }

    /// The generations of a disk, as a peer is told them, whose file has a persistent bitmap that is named after one which was over
    /// when it was made. None if there is no such bitmap, or it may not have all that changed.
    pub async fn recorded(&self, index: usize) -> Result<Option<Vec<u8>>, MigrateError> {
        let (Some(rounds), Some(medium)) = (&self.rounds, self.media.get(index)) else {
            return Ok(None);
        };
        let Some(bitmap) = recorder(medium) else {
            return Ok(None);
        };
        let read = async {
            let view = rounds.past(index, &bitmap.name).await?;
            let dirty = open(&self.opening, view, |device, context| {
                let ranges = device.dirty(context, 0, device.size());
                ranges.collect::<Result<Vec<Range<u64>>, _>>()
            });
            dirty.await
        };
        let read = read.await;
        rounds.forget_past().await?;
        let summary = Summary::since(&bitmap.name, medium.size, &read?);
        Ok(summary.map(|summary| summary.encode()))
    }

    /// Removes bitmaps that are named after generations, and that QEMU has not written back since it was killed: they say nothing any
    /// more, and as long as they are there QEMU does not change the size of the disk.
    pub async fn forget_inconsistent(&self, machine: &Machine) {
        for medium in &self.media {
            for bitmap in ours(medium).filter(|bitmap| bitmap.inconsistent) {
                let removed = machine.remove_bitmap(&medium.node, &bitmap.name, Duration::ZERO);
                if let Err(error) = removed.await {
                    tracing::warn!(node = medium.node, %error, "an inconsistent bitmap stays");
                }
            }
        }
    }

    /// Ends the states that [`Disks::hold`] held.
    pub async fn release(&mut self) -> Result<(), MigrateError> {
        match &mut self.rounds {
            Some(rounds) => Ok(rounds.release_held().await?),
            None => Ok(()),
        }
    }

    /// Removes everything that moves have made in the hypervisor, see [`clear`].
    pub async fn clear(&self, machine: &Machine, work: &Path) {
        let _none_opens = self.opening.write().await;
        clear(machine, work).await;
    }

    /// The round that was sent is durable there: it is not sent again.
    pub async fn confirm(&mut self) -> Result<(), MigrateError> {
        match &mut self.rounds {
            Some(rounds) => Ok(rounds.confirm().await?),
            None => Ok(()),
        }
    }

    /// The disks as they are at each moment, also when the machine is paused for good; where they can be read later.
    pub async fn whole(&self) -> Result<(Vec<LeftDisk>, Vec<Arc<dyn BlockDevice>>), MigrateError> {
        let (mut disks, mut devices) = (Vec::new(), Vec::new());
        if self.nodes.is_empty() {
            return Ok((disks, devices));
        }
        let Some(rounds) = &self.rounds else {
            return Err(MigrateError::Stopped);
        };
        for (medium, view) in self.media.iter().zip(rounds.whole().await?) {
            disks.push(LeftDisk::new(medium, view.address.clone()));
            let opened = open(&self.opening, view, |device, _| Ok(device));
            devices.push(opened.await? as Arc<dyn BlockDevice>);
        }
        Ok((disks, devices))
    }

    /// What was written since the last round that was confirmed, or since the disks were held.
    pub async fn next_round(&mut self) -> Result<Round, MigrateError> {
        if self.nodes.is_empty() {
            return Ok(Round::new());
        }
        let Some(rounds) = &mut self.rounds else {
            return Err(MigrateError::Stopped);
        };
        let mut round = Round::new();
        for (index, view) in rounds.next().await?.into_iter().enumerate() {
            if view.bytes == 0 {
                continue;
            }
            let opened = open(&self.opening, view, |device, context| {
                let ranges = device.dirty(context, 0, device.size());
                let ranges: Vec<Range<u64>> = ranges.collect::<Result<_, _>>()?;
                Ok((device, ranges))
            });
            let (device, ranges) = opened.await?;
            round.push((index as u32, device, ranges));
        }
        Ok(round)
    }

    /// Sends what [`Disks::next_round`] found; bytes. [`DiskWriter::flushed`] has to follow, then [`Disks::confirm`] if there
    /// are more rounds.
    pub async fn send_round(&mut self, writer: &mut DiskWriter) -> Result<u64, MigrateError> {
        let round = self.next_round().await?;
        let total = bytes_of(&round);
        send(round, writer).await?;
        Ok(total)
    }
}

/// The bitmaps of a disk that are named after generations.
fn ours(medium: &Medium) -> impl Iterator<Item = &Bitmap> {
    let is_ours = |bitmap: &&Bitmap| Summary::since(&bitmap.name, medium.size, &[]).is_some();
    medium.bitmaps.iter().filter(is_ours)
}

/// The bitmap that has all that changed of a disk since the generation that it is named after.
fn recorder(medium: &Medium) -> Option<&Bitmap> {
    let mut ours = ours(medium);
    // With several, nobody knows which of them this disk goes on from. Another backing file changes the disk without a write.
    match (ours.next(), ours.next(), &medium.backing) {
        (Some(bitmap), None, None) if bitmap.is_complete() => Some(bitmap),
        _ => None,
    }
}

/// The writable disks of a machine, whose images there are called after `name`; apart from them those that are `mounts` of sites other
/// than the one that it goes to.
///
/// # Errors
/// When they cannot be read as they are.
pub(crate) async fn writable(
    machine: &Machine,
    name: &ImageName,
    mounts: Option<(&dyn Mounts, PeerKey)>,
) -> Result<Disks, MigrateError> {
    let mut disks = Disks {
        memory_bytes: machine.description().await?.memory,
        ..Disks::default()
    };
    let writable = machine.disks().await?.into_iter();
    let writable: Vec<_> = writable
        .filter_map(|disk| Some((disk.name, disk.medium?)))
        .filter(|(_, medium)| !medium.read_only)
        .collect();
    if writable.len() > MAX_DISKS {
        return Err(MigrateError::Unsupported("it has too many disks".into()));
    }
    for (device, medium) in &writable {
        let mounted = match mounts {
            // A format inside of it would be read at both ends.
            Some((mounts, to)) if medium.format == "raw" => {
                let found = mounts.find(&medium.data).await?;
                found.filter(|mounted| mounted.site != to)
            }
            _ => None,
        };
        if let Some(mounted) = mounted {
            disks.mounted.push(MountedDisk {
                device: device.clone(),
                size: medium.size,
                site: mounted.site,
                image: mounted.image.clone(),
            });
            disks.mounts.push(mounted);
            continue;
        }
        let n = disks.offers.len();
        if medium.encrypted {
            return Err(MigrateError::Unsupported(format!(
                "disk {n} is encrypted by QEMU: its key does not move"
            )));
        }
        let image = format!("{name}-{n}.raw");
        let image = ImageName::new(image).map_err(|e| MigrateError::Unsupported(e.to_string()))?;
        disks.offers.push(DiskOffer {
            image,
            device: device.clone(),
            size: medium.size,
            read_only: false,
        });
        disks.nodes.push(medium.node.clone());
        if let Data::File(path) = &medium.data
            && path.is_absolute()
        {
            used_once(n, path).await?;
            disks.files.push(LeftFile {
                disk: n as u32,
                path: path.clone(),
                format: medium.format.clone(),
            });
        }
        disks.media.push(medium.clone());
    }
    Ok(disks)
}

/// Fails if more than one process writes a disk: what another one writes would be lost.
async fn used_once(disk: usize, path: &Path) -> Result<(), MigrateError> {
    let look = async || {
        let file = path.to_owned();
        let writers = tokio::task::spawn_blocking(move || writers_of(&file)).await;
        writers.unwrap_or_default()
    };
    let mut writers = look().await;
    if writers.len() > 1 {
        // A child that is about to run another program has all that its parent has, for a moment.
        tokio::time::sleep(LOOK_AGAIN).await;
        writers = look().await;
    }
    if writers.len() < 2 {
        return Ok(());
    }
    let named = writers
        .iter()
        .map(|w| format!("{} ({})", w.process, w.name));
    let named: Vec<String> = named.collect();
    Err(MigrateError::Unsupported(format!(
        "disk {disk}, {}, is open for writing in the processes {}: what only one of them writes can move",
        path.display(),
        named.join(" and ")
    )))
}

/// Sends a round, and asks for it to be flushed.
pub async fn send(round: Round, writer: &mut DiskWriter) -> Result<(), MigrateError> {
    for (index, device, ranges) in round {
        writer.send(index, device, ranges).await?;
    }
    writer.flush().await
}

/// An image that does not change while it is sent.
pub fn item(name: ImageName, image: Outgoing) -> SendItem {
    SendItem {
        path: PathBuf::from(name.as_str()),
        name,
        conversion: Conversion::AsIs,
        snapshot: Some(Snapshot {
            image: Arc::new(image),
            stamp: Digest(blake3::hash(&drover_net::random_id()).into()),
            generations: None,
        }),
        profile: None,
    }
}

/// All of a device that does not change, as a raw image.
pub fn whole(device: Arc<dyn BlockDevice>, disk: &str) -> Result<Outgoing, MigrateError> {
    let layout = layout(device.as_ref()).map_err(|error| MigrateError::Disk {
        disk: disk.to_owned(),
        error,
    })?;
    Ok(Outgoing {
        virtual_size: device.size(),
        content: Arc::new(Content(device)),
        layout,
        format: Format::Raw,
        notes: Vec::new(),
        stamps: Vec::new(),
    })
}

/// Opens a view, and does something with it, and its metadata context, that waits for the server.
pub(crate) async fn open<T: Send + 'static>(
    opening: &Opening,
    view: View,
    then: impl FnOnce(Arc<NbdDevice>, &str) -> Result<T, drover_core::DeviceError> + Send + 'static,
) -> Result<T, MigrateError> {
    let options = NbdOptions {
        read_only: true,
        contexts: view.context.iter().cloned().collect(),
        ..NbdOptions::default()
    };
    let opening = Arc::clone(opening).read_owned().await;
    let opened = tokio::task::spawn_blocking(move || {
        let _opening = opening;
        let device = Arc::new(NbdDevice::connect(&view.address, &options)?);
        let context = view.context.as_deref().unwrap_or_default();
        then(device, context).map_err(|error| MigrateError::Disk {
            disk: view.address.export.clone(),
            error,
        })
    });
    opened.await.map_err(|_| MigrateError::Stopped)?
}

/// Removes everything that moves have made in a hypervisor, in this process or an earlier one. What cannot be removed is left:
/// it does no harm but slow writes, and the next move removes it.
pub async fn clear(machine: &Machine, work: &Path) {
    match drover_hypervisor::rounds::clear(machine, SERIES, work).await {
        // It has ended, and all of that with it.
        Ok(()) | Err(HypervisorError::Closed { .. }) => {}
        Err(e) => tracing::warn!("what recorded the machine's writes is left: {e}"),
    }
}

/// Removes what replications of a machine have made in its hypervisor, also in a process that was killed.
pub(crate) async fn clear_replica(machine: &Machine, work: &Path) {
    if let Err(e) = drover_hypervisor::rounds::clear(machine, REPLICA, work).await {
        tracing::debug!("what recorded the machine's writes is left: {e}");
    }
}

/// A device that does not change, as the content of an image.
struct Content(Arc<dyn BlockDevice>);

impl ReadAt for Content {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.0.size().saturating_sub(offset);
        let n = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.0.read(offset, &mut buffer[..n]);
        read.map_err(|e| io::Error::other(e.to_string()))?;
        Ok(n)
    }
}

/// The walk over a disk's data, in its order.
fn layout(device: &dyn BlockDevice) -> Result<Layout, drover_core::DeviceError> {
    Ok(Layout::in_file_order(device.size(), &data_runs(device)?))
}

/// Where a disk has data; the rest is zero.
pub(crate) fn data_runs(
    device: &dyn BlockDevice,
) -> Result<Vec<Range<u64>>, drover_core::DeviceError> {
    let size = device.size();
    if !device.capabilities().extents {
        return Ok(std::iter::once(0..size).collect());
    }
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < size {
        let length = (size - at).min(EXTENTS_AT_ONCE);
        for extent in device.extents(at, length)? {
            at = extent.offset + extent.length;
            if extent.kind != drover_core::ExtentKind::Data {
                continue;
            }
            let is_full = runs.len() >= MAX_RUNS;
            match runs.last_mut() {
                Some(last) if last.end == extent.offset || is_full => last.end = at,
                _ => runs.push(extent.offset..at),
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests;
