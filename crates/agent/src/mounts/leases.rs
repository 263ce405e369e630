//! Who holds this site's images.

use std::sync::Arc;

use drover_core::ImageName;
use drover_mount::server::{Server, lease_on_disk};
use drover_net::request;
use drover_store::Catalog;
use drover_store::lease::Holder;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::home::Home;
use crate::remote::Call;
use crate::site;

/// An image that is mounted or leased, as it is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Held {
    /// The image.
    pub image: String,
    /// Who may write it.
    pub writer: Option<Writer>,
    /// Mounts that are connected now.
    pub connected: Vec<String>,
    /// Why it cannot be said who may write it.
    pub problem: Option<String>,
}

/// A mount that may write, or wrote.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Writer {
    /// The peer whose mount it is.
    pub peer: String,
    /// What the mount says of itself.
    pub note: String,
    /// Its number.
    pub mount: String,
    /// Since when, seconds since 1970.
    pub since_unix: u64,
}

/// What a broken lease was.
#[derive(Debug, Serialize, Deserialize)]
pub struct Broken {
    /// The image.
    pub image: String,
    /// Who might write it.
    pub writer: Option<Writer>,
    /// The lease was damaged, and another is in its place.
    pub damaged: bool,
}

impl From<Holder> for Writer {
    fn from(holder: Holder) -> Writer {
        Writer {
            peer: holder.peer_name,
            note: holder.note,
            mount: holder.mount.to_string(),
            since_unix: holder.since_unix,
        }
    }
}

/// Who holds this site's images?
#[derive(Debug, Serialize, Deserialize)]
pub struct ListLeases;
request!(ListLeases: "lease.list", Manage, () => Vec<Held>);

/// Take the right to write an image from whoever has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BreakLease {
    /// Which.
    pub name: ImageName,
}
request!(BreakLease: "lease.break", Manage, () => Broken);

/// The leases of a server.
///
/// # Errors
/// When the site's state cannot be read.
pub fn leases_of(server: &Server) -> Result<Vec<Held>> {
    let held = server.leases()?.into_iter().map(|leased| Held {
        image: leased.image,
        writer: leased.holder.map(Writer::from),
        connected: leased.connected,
        problem: leased.problem,
    });
    Ok(held.collect())
}

/// Breaks a lease; what it was.
///
/// # Errors
/// When the site's state cannot be changed.
pub async fn break_at(server: &Arc<Server>, name: &ImageName) -> Result<Broken> {
    let (on_disk, image) = (Arc::clone(server), name.clone());
    let damaged = tokio::task::spawn_blocking(move || on_disk.replace_damaged_lease(&image));
    let damaged = damaged.await??;
    let holder = server.break_lease(name).await?;
    Ok(Broken {
        image: name.to_string(),
        writer: holder.map(Writer::from),
        damaged,
    })
}

/// Who holds images of this site.
///
/// # Errors
/// When the site does not answer, or its state cannot be read.
pub async fn held(home: &Home) -> Result<Vec<Held>> {
    if let Some(call) = Call::local(home).await? {
        return call.ask(&ListLeases, |()| {}).await;
    }
    let catalog = Arc::new(site::look_at_catalog(home)?);
    leases_of(super::site_server(home, &catalog)?.as_ref())
}

/// Takes the right to write an image from whoever has it.
///
/// # Errors
/// When the site does not answer, or its state cannot be changed.
pub async fn break_lease(home: &Home, name: &ImageName) -> Result<Broken> {
    if let Some(call) = Call::local(home).await? {
        let name = name.clone();
        return call.ask(&BreakLease { name }, |()| {}).await;
    }
    let catalog = Arc::new(site::open_catalog(home)?);
    break_at(&super::site_server(home, &catalog)?, name).await
}

/// Whether there is an image of that name, or a lease of one that is gone.
///
/// # Errors
/// When the catalog cannot be read.
pub fn is_known(home: &Home, name: &ImageName) -> Result<bool> {
    let image = site::open_catalog(home)?.by_name(name);
    if image?.is_some() {
        return Ok(true);
    }
    // One that cannot be read is one.
    Ok(!matches!(
        lease_on_disk(&home.mounted_dir(), name),
        Ok(None)
    ))
}
