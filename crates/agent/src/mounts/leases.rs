//! Leases of this site's images.

use std::sync::Arc;

use drover_core::{Digest, ImageName};
use drover_device::backend::chunk_store::{self, OpenError, StoreAddress};
use drover_mount::server::{Server, WhyBroken, generations_on_disk, lease_on_disk};
use drover_net::request;
use drover_store::generations::About;
use drover_store::lease::{Holder, MountId};
use drover_store::machine::MachineRecord;
use drover_store::{Catalog, changes};
use serde::{Deserialize, Serialize};

use super::record::Place;
use super::target::Target;
use crate::error::{Error, Result};
use crate::home::Home;
use crate::machines::forget_move;
use crate::remote::Call;
use crate::site;

/// A mounted or leased image, as reported to users.
#[derive(Debug, Serialize, Deserialize)]
pub struct Held {
    /// The domain of the image.
    pub domain: String,
    /// The image's name.
    pub image: String,
    /// The holder of the write lease.
    pub writer: Option<Writer>,
    /// The peers of connected mounts.
    pub connected: Vec<String>,
    /// Why the lease cannot be read.
    pub problem: Option<String>,
}

/// A mount that holds, or held, a write lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Writer {
    /// The peer that mounts the image.
    pub peer: String,
    /// The mount's description of itself.
    pub note: String,
    /// The mount's identifier.
    pub mount: String,
    /// When the lease was taken, seconds since 1970.
    pub since_unix: u64,
    /// The term of the lease, in seconds: when the mount has been out of contact for so long, another may take it. `None`
    /// for never.
    pub term_seconds: Option<u64>,
}

/// The write lease that was revoked.
#[derive(Debug, Serialize, Deserialize)]
pub struct Broken {
    /// The image's name.
    pub image: String,
    /// The former holder.
    pub writer: Option<Writer>,
    /// The lease file was damaged and was replaced.
    pub damaged: bool,
    /// The image was frozen and was thawed, or its generations were damaged and were removed.
    pub thawed: bool,
}

impl Broken {
    /// Of a disk in a store.
    pub fn of(disk: &str, holder: Option<chunk_store::Holder>) -> Broken {
        Broken {
            image: disk.to_owned(),
            writer: holder.map(Writer::from),
            damaged: false,
            thawed: false,
        }
    }
}

impl From<chunk_store::Holder> for Writer {
    fn from(holder: chunk_store::Holder) -> Writer {
        Writer {
            peer: String::new(),
            mount: MountId(holder.token).to_string(),
            note: holder.text,
            since_unix: holder.since_unix,
            term_seconds: None,
        }
    }
}

impl From<Holder> for Writer {
    fn from(holder: Holder) -> Writer {
        Writer {
            peer: holder.peer_name,
            note: holder.note,
            mount: holder.mount.to_string(),
            since_unix: holder.since_unix,
            term_seconds: holder.term,
        }
    }
}

/// Request: list the leases of this site's images, in all domains.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListLeases;
request!(ListLeases: "lease.list", Manage, () => Vec<Held>);

/// Request: revoke the write lease of an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BreakLease {
    /// The image.
    pub name: ImageName,
}
request!(BreakLease: "lease.break", Manage, () => Broken);

/// The leases of the server of a domain.
///
/// # Errors
/// When the site's state cannot be read.
pub fn leases_of(server: &Server, domain: &str) -> Result<Vec<Held>> {
    let held = server.leases()?.into_iter().map(|leased| Held {
        domain: domain.to_owned(),
        image: leased.image,
        writer: leased.holder.map(Writer::from),
        connected: leased.connected,
        problem: leased.problem,
    });
    Ok(held.collect())
}

/// The write leases of a domain that no process serves.
///
/// # Errors
/// When the site's state cannot be read.
pub fn leases_on_disk(home: &Home) -> Result<Vec<Held>> {
    let state = home.mounted_dir();
    let mut all = Vec::new();
    for name in changes::names(&state)? {
        let (holder, problem) = match lease_on_disk(&state, &name) {
            Ok(None) => continue,
            Ok(holder) => (holder, None),
            // An unreadable one does not hide the others.
            Err(e) => (None, Some(e.to_string())),
        };
        all.push(Held {
            domain: home.domain_name().to_owned(),
            image: name.to_string(),
            writer: holder.map(Writer::from),
            connected: Vec::new(),
            problem,
        });
    }
    all.sort_by(|a, b| a.image.cmp(&b.image));
    Ok(all)
}

/// Revokes the write lease of an image; returns its former holder.
///
/// # Errors
/// When the site's state cannot be changed.
pub async fn break_at(
    home: &Home,
    server: &Arc<Server>,
    name: &ImageName,
    why: WhyBroken,
) -> Result<Broken> {
    let (on_disk, image, disks) = (Arc::clone(server), name.clone(), home.disks());
    let repair = move || -> Result<(bool, bool)> {
        let damaged = on_disk.replace_damaged_lease(&image)?;
        if why != WhyBroken::ByUser {
            return Ok((damaged, false));
        }
        // Only a person knows that a machine does not run elsewhere.
        let was_away = forget_move(&disks, &image).map_err(Error::Refused)?;
        Ok((damaged, on_disk.thaw(&image)? || was_away))
    };
    let (damaged, thawed) = tokio::task::spawn_blocking(repair).await??;
    let holder = server.break_lease(name, why).await?;
    Ok(Broken {
        image: name.to_string(),
        writer: holder.map(Writer::from),
        damaged,
        thawed,
    })
}

/// What is known of the generations of an image of this home's domain; none if it was not mounted for writing since it was made.
///
/// # Errors
/// When they cannot be read.
pub fn generations(home: &Home, name: &ImageName, digest: Digest) -> Result<Option<About>> {
    Ok(generations_on_disk(&home.mounted_dir(), name, digest)?)
}

/// Whether an image of this home's domain is frozen, or may be, since that cannot be read.
///
/// # Errors
/// When the catalog cannot be read.
pub fn is_frozen(home: &Home, name: &ImageName) -> Result<bool> {
    let Some(image) = site::look_at_catalog(home)?.by_name(name)? else {
        return Ok(false);
    };
    let has_moved = |record: Option<MachineRecord>| record.is_some_and(|disk| !disk.may_run());
    if home.disks().load(name).map_or(true, has_moved) {
        return Ok(true);
    }
    let about = generations(home, name, image.digest);
    Ok(about.map_or(true, |about| about.is_some_and(|about| about.frozen)))
}

/// The leases of this site's images in all domains, from the running site or, when none runs, from disk.
///
/// # Errors
/// When the site does not reply, or its state cannot be read.
pub async fn held(home: &Home) -> Result<Vec<Held>> {
    if let Some(call) = Call::local(home).await? {
        return call.ask(&ListLeases, |()| {}).await;
    }
    let mut all = Vec::new();
    for domain in home.all_domains()? {
        all.extend(leases_on_disk(&domain)?);
    }
    Ok(all)
}

/// Revokes the write lease of an image, through the running site or, when none runs, in this process.
///
/// # Errors
/// When the site does not reply, or its state cannot be changed.
pub async fn break_lease(home: &Home, name: &ImageName) -> Result<Broken> {
    if let Some(call) = Call::local(home).await? {
        let name = name.clone();
        return call.ask(&BreakLease { name }, |()| {}).await;
    }
    let catalog = Arc::new(site::open_catalog(home)?);
    break_at(
        home,
        &super::site_server(home, &catalog)?,
        name,
        WhyBroken::ByUser,
    )
    .await
}

/// Who holds the write lease of a disk in a store.
///
/// # Errors
/// When a mount of this home that runs has it, there is no such disk, or the store does not respond.
pub fn stored_lease(home: &Home, address: &StoreAddress) -> Result<Option<Writer>> {
    for (place, record) in Place::list(home)? {
        let is_it = |image: &Target| image.store() == Some(address);
        if record.images.iter().any(is_it) && !record.how.read_only && place.is_kept() {
            return Err(Error::refused(format!(
                "{address} is mounted here; `drover unmount {}` ends that",
                record.name
            )));
        }
    }
    let store = address.store()?;
    let holder = chunk_store::holder(&*store).map_err(refused)?;
    Ok(holder.map(Writer::from))
}

/// Revokes the write lease that this mount has of a disk in a store.
///
/// # Errors
/// When there is no such disk, another has its lease by now, or the store does not respond.
pub fn break_stored(address: &StoreAddress, writer: &Writer) -> Result<Broken> {
    let store = address.store()?;
    let now = chunk_store::holder(&*store).map_err(refused)?;
    if let Some(now) = now.map(Writer::from)
        && now.mount != writer.mount
    {
        return Err(Error::refused(format!(
            "another mount has the write lease of {address} by now: {}",
            now.note
        )));
    }
    let holder = chunk_store::break_lease(&*store).map_err(refused)?;
    Ok(Broken::of(&address.to_string(), holder))
}

fn refused(error: OpenError) -> Error {
    match error {
        OpenError::Store(error) => error.into(),
        error => Error::refused(error.to_string()),
    }
}

/// Whether there is an image of that name, or a lease that remains of a removed one.
///
/// # Errors
/// When the catalog cannot be read.
pub fn is_known(home: &Home, name: &ImageName) -> Result<bool> {
    let image = site::open_catalog(home)?.by_name(name);
    if image?.is_some() {
        return Ok(true);
    }
    // A lease that cannot be read counts as one.
    Ok(!matches!(
        lease_on_disk(&home.mounted_dir(), name),
        Ok(None)
    ))
}
