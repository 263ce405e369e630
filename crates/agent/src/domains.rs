//! The domains of a site: listing, adding, removing, and moving an image from one to another.

use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_net::request;
use drover_store::Catalog;
use drover_teleport::services::Progress;
use drover_teleport::{Origin, Site, TeleportError};
use serde::{Deserialize, Serialize};

use crate::changes;
use crate::error::{Context, Error, Result};
use crate::home::Home;
use crate::own::Own;
use crate::remote::Call;
use crate::site;

/// A domain, as reported to users.
#[derive(Debug, Clone, Serialize)]
pub struct DomainInfo {
    /// Its name.
    pub name: String,
    /// Number of its images.
    pub images: usize,
    /// Bytes of data in its images.
    pub data_bytes: u64,
    /// The peers that see it.
    pub peers: Vec<String>,
}

/// Request: make a domain.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AddDomain {
    /// Its name.
    pub name: String,
}
request!(AddDomain: "domain.add", Manage, () => ());

/// Request: remove an empty domain.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RemoveDomain {
    /// Its name.
    pub name: String,
}
request!(RemoveDomain: "domain.remove", Manage, () => ());

/// Request: move an image of the domain in which this is asked to another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MoveImage {
    /// Its name, in both.
    pub name: ImageName,
    /// The domain that gets it.
    pub to: String,
}
request!(MoveImage: "domain.move-image", Manage, Progress => ());

/// The domains of a site, the default one first.
///
/// # Errors
/// When a catalog cannot be read.
pub fn list(home: &Home) -> Result<Vec<DomainInfo>> {
    let peers = site::look_at_catalog(home)?.peers()?;
    let mut names = vec![home.domain_name().to_owned()];
    names.extend(home.domains()?);
    let info = |name: String| {
        let images = site::look_at_catalog(&home.domain(&name)?)?.images()?;
        let here = peers.iter().filter(|peer| peer.grant.domain == name);
        Ok(DomainInfo {
            images: images.len(),
            data_bytes: images.iter().map(|image| image.data_bytes).sum(),
            peers: here.map(|peer| peer.name.clone()).collect(),
            name,
        })
    };
    names.into_iter().map(info).collect()
}

/// Makes a domain, through the running site or in this process.
///
/// # Errors
/// When there is one of that name, or it cannot be made.
pub async fn add(home: &Home, name: &str) -> Result<()> {
    match Call::local(home).await? {
        Some(call) => {
            let name = name.to_owned();
            call.ask(&AddDomain { name }, |()| {}).await
        }
        None => make(home, name).map(drop),
    }
}

/// Makes the files of a domain.
pub(crate) fn make(home: &Home, name: &str) -> Result<Home> {
    let domain = home.domain_to_be(name)?;
    if domain.dir().exists() {
        let text = format!("there is a domain called {name} already");
        return Err(Error::refused(text));
    }
    domain.make_domain()?;
    site::open_catalog(&domain)?;
    Ok(domain)
}

/// Removes a domain, through the running site or in this process.
///
/// # Errors
/// When it is not empty, or peers see it.
pub async fn remove(home: &Home, name: &str) -> Result<()> {
    check_unused(home, name)?;
    match Call::local(home).await? {
        Some(call) => {
            let name = name.to_owned();
            call.ask(&RemoveDomain { name }, |()| {}).await
        }
        None => unmake(home, name),
    }
}

/// Fails if peers see a domain.
fn check_unused(home: &Home, name: &str) -> Result<()> {
    let catalog = site::look_at_catalog(home)?;
    let peers = catalog.peers()?.into_iter();
    let peers: Vec<_> = peers.filter(|peer| peer.grant.domain == name).collect();
    match peers.first() {
        Some(peer) => Err(Error::refused(format!(
            "the peer {} is in the domain {name}; move it with `drover peers set {0} --domain NAME`, or forget it",
            peer.name
        ))),
        None => Ok(()),
    }
}

/// Removes the files of an empty domain that no process has open.
pub(crate) fn unmake(home: &Home, name: &str) -> Result<()> {
    check_unused(home, name)?;
    let domain = home.domain(name)?;
    if domain.of_site().is_none() {
        return Err(Error::usage(format!("the domain {name} cannot be removed")));
    }
    let _lock = domain.lock()?;
    let images = site::open_catalog(&domain)?.images()?.len();
    let changes = changes::on_disk(&domain)?.len();
    let transfers = drover_teleport::unfinished(&domain.work_dir())?.len();
    for (count, what) in [
        (images, "image"),
        (changes, "set of changes"),
        (transfers, "unfinished transfer"),
    ] {
        if count > 0 {
            let text = format!(
                "the domain {name} is not empty: {} left",
                crate::text::count(count, what)
            );
            return Err(Error::refused(text));
        }
    }
    for dir in [domain.images_dir(), domain.dir().to_owned()] {
        match std::fs::remove_dir_all(&dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            removed => removed.with_context(|| format!("cannot remove {}", dir.display()))?,
        }
    }
    Ok(())
}

/// Moves an image from the domain of `home` to another one of the site, through the running site or in this process.
/// `progress` is called with bytes done and the total.
///
/// # Errors
/// When there is no such image, it was indexed in place, is in use or has changes, the other domain has one of that
/// name, or its file cannot be read.
pub async fn move_image(
    home: &Home,
    name: &ImageName,
    to: &str,
    mut progress: impl FnMut(u64, u64) + Send + 'static,
) -> Result<()> {
    let there = home.domain(to)?;
    if let Some(call) = Call::local(home).await? {
        let request = MoveImage {
            name: name.clone(),
            to: to.to_owned(),
        };
        return call.ask(&request, |at| progress(at.done, at.total)).await;
    }
    let catalogs = [home, &there].map(site::open_catalog);
    let [from, into] = catalogs;
    let from = Own::open(home, &Arc::new(from?)).await?;
    let into = Own::open(&there, &Arc::new(into?)).await?;
    let (target, name, home) = (Arc::clone(into.site()), name.clone(), home.clone());
    let moved = from.run(move |site| Ok(move_between(&home, site, &target, &name, &mut progress)));
    let moved = moved.await;
    into.close().await?;
    moved?
}

/// Moves an image: it is read and matched in the other domain, gets its name there, and then leaves the first. A crash
/// leaves it in the first, or in both.
///
/// # Errors
/// When there is no such image, it was indexed in place, is in use or has changes, the other domain has one of that
/// name, or its file cannot be read.
pub(crate) fn move_between(
    home: &Home,
    from: &Arc<Site>,
    to: &Arc<Site>,
    name: &ImageName,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let Some(record) = from.by_name(name) else {
        return Err(Error::refused(format!("there is no image called {name}")));
    };
    if record.external {
        let text =
            format!("{name} was indexed in place: remove it, and index it in the other domain");
        return Err(Error::refused(text));
    }
    if changes::of_image(home, name).is_some() {
        let text = format!("{name} has changes by mounts: merge or drop them first");
        return Err(Error::refused(text));
    }
    let linked = to.work_dir().join(format!("moved-{}", record.id.0));
    let _ = std::fs::remove_file(&linked);
    let link = || {
        format!(
            "cannot link {} to {}",
            record.path.display(),
            linked.display()
        )
    };
    std::fs::hard_link(&record.path, &linked).with_context(link)?;
    let moved = adopt(to, &linked, name, &record.from, progress);
    let _ = std::fs::remove_file(&linked);
    moved?;
    if let Err(e) = from.remove(name) {
        // Mounted meanwhile, or the like: it stays where it was.
        to.remove(name)?;
        return Err(e.into());
    }
    Ok(())
}

fn adopt(
    to: &Arc<Site>,
    file: &std::path::Path,
    name: &ImageName,
    sent_by: &str,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), TeleportError> {
    let mut read = |done, total| {
        progress(done * BLOCK_SIZE_U64, total * BLOCK_SIZE_U64);
        Ok(())
    };
    // Its owner is no peer of this domain: it is the site's own now.
    let origin = Origin {
        from: sent_by,
        owner: None,
    };
    let record = to.prepare(file, name, origin, &mut read)?;
    let adopted = to.adopt(Some(file), &record, true);
    if adopted.is_err() {
        to.forget_prepared(&record);
    }
    adopted.map(drop)
}
