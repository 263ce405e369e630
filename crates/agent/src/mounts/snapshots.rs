//! Snapshots of vaults as disks. Reads go to the vault. What is written goes to an overlay beside those of this site's
//! images, under the name of the snapshot, and is there again at the next mount (`drover changes` lists it). The
//! snapshot is held meanwhile: nobody can forget it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::overlay::{Identity, Options, OverlayError};
use drover_device::backend::{ImageDevice, Overlay};
use drover_image::VirtualDisk;
use drover_net::DEFAULT_DOMAIN;
use drover_storage::HostDirectory;
use drover_store::lease::MountId;
use drover_store::{Catalog, changes};
use drover_teleport::unfinished;
use drover_vault::{Hold, Location, Reference, SessionId, SnapshotFile, SnapshotId, Vault};

use super::cached::{self, Cached};
use super::record::How;
use super::target::{LocalDisk, Target};
use crate::error::{Context, Error, Result};
use crate::home::Home;
use crate::vaults::{Chosen, Key, Known};
use crate::{site, vaults};

/// How long the overlay may still be locked: by an unmount in progress.
const LOCK_LIMIT: Duration = Duration::from_secs(1);

/// How a mount holds snapshots.
#[derive(Debug, Clone)]
pub struct Holder {
    /// As people know it.
    text: String,
    session: SessionId,
}

impl Holder {
    /// The mount of this name; `id` is its own, and of the disk.
    pub fn new(mount: &str, id: MountId) -> Holder {
        Holder {
            text: format!("{mount} on {}", vaults::host()),
            session: session(id),
        }
    }
}

/// The mount's identifier, cut to what a vault tells holders apart by. A mount that comes again after a crash has the same.
fn session(id: MountId) -> SessionId {
    let number = id.0.iter().fold(0u64, |n, b| (n << 8) | u64::from(*b));
    SessionId((number & ((1 << 40) - 1)).max(1))
}

/// The snapshot that a target of this site means by `NAME@TIME`, if there is no image of that very name. With `vault`, it
/// is always a snapshot, of that one.
///
/// # Errors
/// When there is no such snapshot, or several; when a vault or the catalog cannot be read.
pub fn resolve(home: &Home, image: Target, vault: &Chosen) -> Result<Target> {
    let Some(reference) = Reference::parse(&image.image).filter(|_| image.is_own()) else {
        return Ok(image);
    };
    if image.domain.is_some() || (vault.location.is_none() && is_image(home, &image)?) {
        return Ok(image);
    }
    let place = vaults::find(vault, Ok(home.dir().to_path_buf()), || Ok(home.clone()))
        .with_context(|| format!("{} is no image of this site", image.image))?;
    let opened = open_vault(home, &place)?;
    vaults::remember(home, &place.location, &opened)?;
    let entry = opened.find(&reference)?;
    Ok(Target {
        image: entry.id.to_string(),
        local: Some(LocalDisk::Snapshot {
            vault: place.location.clone(),
            id: entry.id,
            key_file: place.key_file().map(ToOwned::to_owned),
        }),
        ..image
    })
}

/// Opens a vault for a mount, whose process cannot ask for a passphrase.
fn open_vault(home: &Home, known: &Known) -> Result<Vault> {
    known.open(|| Ok(home.clone()), &mut || {
        Err(Error::refused(format!(
            "the vault {} is encrypted, and the process of a mount cannot ask for a passphrase: name a file with it by --key-file",
            known.location
        )))
    })
}

/// The vault of a snapshot.
fn vault_of(home: &Home, vault: &Location, key_file: Option<&PathBuf>) -> Result<Vault> {
    let known = Known {
        location: vault.clone(),
        key: key_file.map_or(Key::None, |path| Key::File(path.clone())),
    };
    open_vault(home, &known)
}

/// Whether the site has an image of that name, or is being sent one.
fn is_image(home: &Home, image: &Target) -> Result<bool> {
    let home = home.domain(DEFAULT_DOMAIN)?;
    let name = ImageName::new(&image.image)?;
    if site::look_at_catalog(&home)?.by_name(&name)?.is_some() {
        return Ok(true);
    }
    let transfers = unfinished(&home.work_dir())?;
    Ok(transfers.iter().any(|t| t.name == name.as_str()))
}

/// The disk of a snapshot, what holds it, and its cache, in the directory `cache`, if its vault is in an object store, or at a peer.
///
/// # Errors
/// When the snapshot was forgotten or is damaged, its image needs other files, or its changes cannot be opened.
pub fn open(
    home: &Home,
    disk: (&Location, Option<&PathBuf>, &SnapshotId),
    how: &How,
    mount: &Holder,
    cache: &Path,
) -> Result<(Arc<dyn BlockDevice>, Hold, Option<Cached>)> {
    let (location, key_file, id) = disk;
    let vault = vault_of(home, location, key_file)?;
    let hold = vault.hold(id, mount.session, &mount.text)?;
    let snapshot = vault.open_snapshot(id)?;
    let base = snapshot.record().root;
    let disk = VirtualDisk::from_content(Arc::new(SnapshotFile::new(snapshot)));
    let disk = disk.map_err(|e| Error::refused(format!("{id}: {e}")))?;
    let mut device: Arc<dyn BlockDevice> = Arc::new(ImageDevice::new(disk));
    let mut cached = None;
    if location.is_remote() && !how.direct {
        let identity = format!("{location}\n{id}");
        let (front, behind) = cached::open(home, device, how, cache, &identity, base)?;
        (device, cached) = (front, Some(behind));
    }
    if how.read_only {
        return Ok((device, hold, cached));
    }
    let name = ImageName::new(id.to_string())?;
    let path = changes::directory(&home.mounted_dir(), &name);
    let directory = HostDirectory::open_or_create(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let directory = Arc::new(directory);
    let identity = Identity {
        base,
        size: device.size(),
        name: id.to_string(),
    };
    let began = Instant::now();
    loop {
        let options = Options::default();
        match Overlay::open(directory.clone(), device.clone(), identity.clone(), options) {
            Ok(overlay) => return Ok((Arc::new(overlay), hold, cached)),
            Err(OverlayError::Busy { .. }) if began.elapsed() < LOCK_LIMIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(OverlayError::Busy { .. }) => {
                return Err(Error::refused(format!(
                    "{id} is mounted for writing already (`drover mounts` tells where); a read-only mount is possible"
                )));
            }
            Err(OverlayError::AnotherBase { .. }) => {
                return Err(Error::refused(format!(
                    "there are changes to another snapshot {id}, perhaps of another vault; `drover changes drop {id}` drops them"
                )));
            }
            Err(e) => return Err(Error::msg(e)),
        }
    }
}

/// Tells the vault that a mount whose process was killed does not hold a snapshot any more.
pub async fn let_go(home: &Home, disk: &LocalDisk, mount: MountId) {
    let LocalDisk::Snapshot {
        vault,
        id,
        key_file,
    } = disk.clone()
    else {
        return;
    };
    let home = home.clone();
    let told = tokio::task::spawn_blocking(move || {
        let told = vault_of(&home, &vault, key_file.as_ref())
            .and_then(|vault| Ok(vault.let_go(&id, session(mount))?));
        if let Err(e) = told {
            // It is void a day after the mount's last word.
            tracing::warn!("{e:#}");
        }
    });
    let _ = told.await;
}
