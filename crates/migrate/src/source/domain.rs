//! A machine of libvirt that leaves. libvirt's own migration drives: its QEMU copies what was written meanwhile, and memory,
//! to sockets of ours; each step of it is a call, and who may run the machine is decided in between.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_device::backend::NbdDevice;
use drover_device::backend::nbd::{NbdAddress, NbdOptions, NbdSocket};
use drover_hypervisor::HypervisorError;
use drover_hypervisor::libvirt::{Disk, Domain, DomainState, Medium, Performed};
use drover_image::{Conversion, Format, Outgoing, Trust, open_for_sending_with};
use drover_store::machine::MAX_DISKS;
use drover_teleport::SendItem;
use tokio::task::JoinHandle;

use super::disks::{Disks, item, whole};
use super::report::LeftFile;
use crate::error::MigrateError;
use crate::protocol::DiskOffer;

/// How long a migration that is aborted may take to end.
const ABORT_LIMIT: Duration = Duration::from_secs(60);

/// How often it is looked at whether the machine is paused by an error of a disk.
const STALL_POLL: Duration = Duration::from_millis(500);

/// How the files of layers are called.
const LAYER: &str = "drover-layer-";

/// The definition of the machine before a move: its next start, here, is with the disks that it had.
const DEFINITION: &str = "definition.xml";

/// A file that is there when libvirt started the machine with the host before a move.
const AUTOSTART: &str = "autostart";

/// The socket to which libvirt's QEMU copies its disks.
pub const DISKS: &str = "disks.sock";

/// That to which libvirt sends the machine's memory.
pub const MEMORY: &str = "memory.sock";

/// A migration that libvirt performs, or has performed: it has to be ended either way.
#[derive(Debug)]
pub struct Performing(Option<JoinHandle<Result<Performed, HypervisorError>>>);

impl Performing {
    /// Lets it begin.
    pub fn begin(
        migrating: impl Future<Output = Result<Performed, HypervisorError>> + Send + 'static,
    ) -> Self {
        Performing(Some(tokio::spawn(migrating)))
    }

    /// Waits until libvirt has sent all of the machine.
    ///
    /// # Errors
    /// When that failed, or was waited for before.
    pub async fn performed(&mut self) -> Result<Performed, MigrateError> {
        let Some(task) = &mut self.0 else {
            return Err(MigrateError::Stopped);
        };
        let performed = task.await;
        self.0 = None;
        Ok(performed.map_err(|_| MigrateError::Stopped)??)
    }
}

/// The writable disks of a machine that can move.
///
/// # Errors
/// When it cannot, and why.
pub async fn disks(domain: &Domain, name: &ImageName) -> Result<Disks, MigrateError> {
    let wrong = |text: String| Err(MigrateError::Unsupported(text));
    let state = domain.state().await?;
    if state != DomainState::Running {
        return wrong(
            "the machine does not run: only one that runs moves live; send its images instead"
                .into(),
        );
    }
    let live = domain.describe(false).await?;
    if live.emulated {
        // libvirt migrates it, whatever its QEMU loses of its memory.
        domain.machine().await?.check_migratable().await?;
    }
    let writable: Vec<Disk> = live
        .disks
        .into_iter()
        .filter(|disk| disk.writable)
        .collect();
    if writable.len() > MAX_DISKS {
        return wrong("it has too many disks".into());
    }
    let mut found = Disks::default();
    found.memory_bytes = live.memory;
    for (n, disk) in writable.iter().enumerate() {
        match &disk.medium {
            Medium::Other(kind) => {
                return wrong(format!(
                    "the disk {} is of type {kind}: only files, block devices and drover's own can move",
                    disk.target
                ));
            }
            Medium::File(path) => found.files.push(LeftFile {
                disk: n as u32,
                path: path.clone(),
                format: disk.format.clone(),
            }),
            Medium::Nbd { .. } => {}
        }
        if !matches!(disk.format.as_str(), "raw" | "qcow2") {
            return wrong(format!(
                "the disk {} is in the format {}: only raw and qcow2 can move",
                disk.target, disk.format
            ));
        }
        let image = ImageName::new(format!("{name}-{n}.raw"));
        let image = image.map_err(|e| MigrateError::Unsupported(e.to_string()))?;
        found.offers.push(DiskOffer {
            image,
            device: disk.target.clone(),
            size: domain.size(&disk.target).await?,
            read_only: false,
        });
    }
    found.domain = writable;
    Ok(found)
}

/// Puts a layer over each disk, so that what is below does not change any more: images to be sent.
pub async fn hold(
    disks: &Disks,
    domain: &Domain,
    work: &Path,
    scratch: &Path,
) -> Result<Vec<SendItem>, MigrateError> {
    check_unchanged(disks, domain).await?;
    for directory in [work, scratch] {
        let made = std::fs::create_dir_all(directory);
        made.map_err(|error| file("make", directory, error))?;
    }
    let definition = domain.definition().await?;
    let path = work.join(DEFINITION);
    let kept = std::fs::write(&path, definition);
    kept.map_err(|error| file("write", &path, error))?;
    let layers = disks.domain.iter().enumerate().map(|(n, disk)| {
        let layer = unused(scratch, &format!("{LAYER}{}-{n}", domain.name()));
        (disk.target.clone(), layer)
    });
    domain.add_layers(&layers.collect::<Vec<_>>()).await?;
    images(disks).await
}

/// A file that does not exist: what is in an old layer may be nowhere else.
fn unused(scratch: &Path, name: &str) -> PathBuf {
    let named = (1..).map(|n: u64| match n {
        1 => scratch.join(format!("{name}.qcow2")),
        n => scratch.join(format!("{name}.{n}.qcow2")),
    });
    let mut free = named.skip_while(|path| path.symlink_metadata().is_ok());
    free.next().unwrap_or_default()
}

/// Checks that the machine has the disks that were found, and that none is a layer of an earlier move: the machine needs that.
async fn check_unchanged(disks: &Disks, domain: &Domain) -> Result<(), MigrateError> {
    let wrong = |text: String| Err(MigrateError::Unsupported(text));
    if let Some((disk, layer)) = domain.layers(LAYER).await?.first() {
        return wrong(format!(
            "the disk {disk} is still the layer {}: give the migration up first",
            layer.display()
        ));
    }
    let live = domain.describe(false).await?;
    let now = live.disks.iter().filter(|disk| disk.writable);
    let is_same = |(now, found): (&Disk, &Disk)| {
        (&now.target, &now.medium, &now.format) == (&found.target, &found.medium, &found.format)
    };
    match now.clone().count() == disks.domain.len() && now.zip(&disks.domain).all(is_same) {
        true => Ok(()),
        false => wrong("its disks were changed meanwhile".into()),
    }
}

/// The disks as images to be sent; as they are now, unless there is a layer over them.
///
/// # Errors
/// When one cannot be read.
pub async fn images(disks: &Disks) -> Result<Vec<SendItem>, MigrateError> {
    let mut items = Vec::new();
    for (disk, offer) in disks.domain.iter().zip(&disks.offers) {
        items.push(open(disk, &offer.image).await?);
    }
    Ok(items)
}

/// Opens what a disk is, or was before there was a layer over it.
async fn open(disk: &Disk, name: &ImageName) -> Result<SendItem, MigrateError> {
    let (disk, name) = (disk.clone(), name.clone());
    let opened = tokio::task::spawn_blocking(move || {
        let image = match &disk.medium {
            Medium::File(path) if disk.format == "raw" => {
                // A guest may have written what looks like another format.
                let file = open_for_sending_with(path, Conversion::Opaque, Trust::Anywhere);
                file.map(|file| Outgoing {
                    format: Format::Raw,
                    ..file
                })
            }
            Medium::File(path) => open_for_sending_with(path, Conversion::Raw, Trust::Anywhere),
            Medium::Nbd { socket, export } => {
                let address = NbdAddress {
                    socket: NbdSocket::Unix(socket.clone()),
                    export: export.clone(),
                };
                let options = NbdOptions {
                    read_only: true,
                    ..NbdOptions::default()
                };
                let device = Arc::new(NbdDevice::connect(&address, &options)?);
                return whole(device, &disk.target).map(|image| item(name, image));
            }
            Medium::Other(kind) => return Err(MigrateError::Unsupported(kind.clone())),
        };
        let image = image.map_err(|e| MigrateError::Unsupported(e.to_string()))?;
        Ok(item(
            name,
            Outgoing {
                // libvirt may give the file to another user meanwhile; nobody writes to it.
                stamps: Vec::new(),
                ..image
            },
        ))
    });
    opened.await.map_err(|_| MigrateError::Stopped)?
}

/// Ends what moves have begun, in this process or an earlier one, and lets the machine run: its disks are as they were.
///
/// # Errors
/// When libvirt does not do it, or the machine is off: then its disks still have the layers, and the same is to be tried again.
pub async fn restore(
    domain: &Domain,
    performing: Option<Performing>,
    work: &Path,
) -> Result<(), MigrateError> {
    if let Some(mut performing) = performing {
        if performing.0.is_some() {
            // It may have ended by itself.
            domain.abort_migration().await.ok();
            tokio::time::timeout(ABORT_LIMIT, performing.performed())
                .await
                .ok();
        }
        domain.end_migration(false).await.ok();
    }
    if domain.state().await? == DomainState::Paused {
        domain.resume().await?;
    }
    let layers = domain.layers(LAYER).await?;
    if let (DomainState::Off, Some((disk, layer))) = (domain.state().await?, layers.first()) {
        return Err(MigrateError::Unsupported(format!(
            "the machine is off, and what it wrote to {disk} is in {}: `virsh start {}`",
            layer.display(),
            domain.name()
        )));
    }
    for (disk, layer) in layers {
        domain.commit_layer(&disk).await?;
        remove(&layer);
    }
    // A layer may have been full.
    if domain.state().await? == DomainState::Stalled {
        domain.resume().await?;
    }
    if work.join(AUTOSTART).exists() {
        domain.set_autostart(true).await?;
    }
    tidy(work);
    Ok(())
}

/// From now on libvirt does not start the machine with the host: it may be another's then.
///
/// # Errors
/// When libvirt does not take it, or that cannot be remembered.
pub async fn keep_from_starting(domain: &Domain, work: &Path) -> Result<(), MigrateError> {
    // One that is not defined is not started.
    if !domain.autostart().await.unwrap_or(false) {
        return Ok(());
    }
    let path = work.join(AUTOSTART);
    std::fs::write(&path, "").map_err(|error| file("write", &path, error))?;
    Ok(domain.set_autostart(false).await?)
}

/// Fails when the machine cannot write to a disk any more.
pub async fn stalled(domain: &Domain) -> MigrateError {
    loop {
        tokio::time::sleep(STALL_POLL).await;
        if domain.state().await.ok() == Some(DomainState::Stalled) {
            let text = "libvirt has paused the machine, since a disk of it has failed or the directory of its layers is full";
            return MigrateError::Unsupported(text.into());
        }
    }
}

/// The same for a machine of which no move is known, where one has left something.
///
/// # Errors
/// As for [`restore`].
pub async fn restore_unknown(domain: &Domain, work: &Path) -> Result<(), MigrateError> {
    match domain.layers(LAYER).await?.is_empty() {
        true => Ok(()),
        false => restore(domain, None, work).await,
    }
}

/// Ends the machine, which has left, and makes its next start here as it was; the layers have nothing that the other site does
/// not have.
pub async fn leave(domain: &Domain, work: &Path) {
    let layers = domain.layers(LAYER).await.unwrap_or_default();
    let mut ended = domain.end_migration(true).await;
    if ended.is_err() {
        // Of an earlier process, which was killed after it had committed; somebody may have started it since then.
        ended = match domain.state().await {
            Ok(DomainState::Off) => Ok(()),
            Ok(_) => domain.destroy().await,
            Err(e) => Err(e),
        };
    }
    if let Err(e) = ended {
        tracing::warn!("{e}");
        return;
    }
    if let Ok(definition) = std::fs::read_to_string(work.join(DEFINITION)) {
        // One that was not defined is gone.
        if let Ok(now) = domain.definition().await
            && now != definition
            && let Err(e) = domain.define(&definition).await
        {
            tracing::warn!("the machine's definition here names files of the move: {e}");
        }
    }
    layers.iter().for_each(|(_, layer)| remove(layer));
    tidy(work);
}

/// Removes a layer that nothing uses any more, and the directory that was made for it.
fn remove(layer: &Path) {
    let _ = std::fs::remove_file(layer);
    if let Some(directory) = layer.parent() {
        // Not if something is in it.
        let _ = std::fs::remove_dir(directory);
    }
}

/// Removes what else a move has left here.
fn tidy(work: &Path) {
    for name in [DEFINITION, AUTOSTART, DISKS, MEMORY] {
        let _ = std::fs::remove_file(work.join(name));
    }
    let _ = std::fs::remove_dir(work);
}

/// An error about a file of ours.
pub fn file(what: &str, path: &Path, error: io::Error) -> MigrateError {
    MigrateError::File {
        what: format!("cannot {what} {}", path.display()),
        error,
    }
}
