//! The domains of a site: listing, adding, removing, and moving an image from one to another.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_net::request;
use drover_storage::make_private_dir;
use drover_store::{Catalog, ImageRecord, TicketInfo};
use drover_teleport::services::Progress;
use drover_teleport::{Origin, Site};
use serde::{Deserialize, Serialize};

use crate::audit::{Audited, Event, Record};
use crate::changes::{self, Here};
use crate::error::{Context, Error, Result};
use crate::home::Home;
use crate::own::Own;
use crate::remote::Call;
use crate::site;
use crate::text::now_unix;

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

impl Audited for AddDomain {
    fn told(&self, _: Option<&()>) -> Option<Record> {
        Some(Record::new(Event::DomainAdded).in_domain(&self.name))
    }
}

impl Audited for RemoveDomain {
    fn told(&self, _: Option<&()>) -> Option<Record> {
        Some(Record::new(Event::DomainRemoved).in_domain(&self.name))
    }
}

impl Audited for MoveImage {
    fn told(&self, _: Option<&()>) -> Option<Record> {
        let record = Record::new(Event::ImageMoved).image(&self.name);
        Some(record.detail(format!("to {}", self.to)))
    }
}

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
    let request = AddDomain { name: name.into() };
    match Call::local(home).await? {
        Some(call) => call.ask(&request, |()| {}).await,
        None => {
            make(home, name)?;
            home.audit().done(home.domain_name(), &request, &());
            Ok(())
        }
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
    let request = RemoveDomain { name: name.into() };
    match Call::local(home).await? {
        Some(call) => call.ask(&request, |()| {}).await,
        None => {
            unmake(home, name)?;
            home.audit().done(home.domain_name(), &request, &());
            Ok(())
        }
    }
}

/// Fails if peers see a domain, or tickets let them in.
fn check_unused(home: &Home, name: &str) -> Result<()> {
    let catalog = site::look_at_catalog(home)?;
    let mut peers = catalog.peers()?.into_iter();
    if let Some(peer) = peers.find(|peer| peer.grant.domain == name) {
        return Err(Error::refused(format!(
            "the peer {} is in the domain {name}; move it with `drover peers set {0} --domain NAME`, or forget it",
            peer.name
        )));
    }
    let valid = |ticket: &TicketInfo| ticket.used_by.is_none() && ticket.expires_unix > now_unix();
    let mut tickets = catalog.tickets()?.into_iter().filter(valid);
    if let Some(ticket) = tickets.find(|ticket| ticket.grant.domain == name) {
        return Err(Error::refused(format!(
            "the ticket {} is for the domain {name}; `drover ticket --revoke {0}` makes it invalid",
            ticket.id
        )));
    }
    Ok(())
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
    let (images, base) = (domain.images_dir(), domain.work_base());
    if let Some(other) = entry_but(&images, &[&base])? {
        return Err(Error::refused(format!(
            "the domain {name} is not empty: {} is not an image that it knows; move it away, or index it with `drover index --domain {name}`",
            other.display()
        )));
    }
    let work = domain.work_dir();
    let shared = base.join("shared");
    let has_others = work != base && entry_but(&base, &[&work, &shared])?.is_some();
    if has_others {
        // Other nodes of the site have it still.
        removed(&work, fs::remove_dir_all(&work))?;
        return removed(domain.dir(), fs::remove_dir_all(domain.dir()));
    }
    removed(&base, fs::remove_dir_all(&base))?;
    removed(&images, fs::remove_dir(&images))?;
    removed(domain.dir(), fs::remove_dir_all(domain.dir()))
}

/// Something in a directory other than `but`.
fn entry_but(dir: &Path, but: &[&Path]) -> Result<Option<PathBuf>> {
    let failed = || format!("cannot list {}", dir.display());
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        entries => entries.with_context(failed)?,
    };
    for entry in entries {
        let path = entry.with_context(failed)?.path();
        if !but.contains(&path.as_path()) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Fails if a directory was not removed; one that was not there is no failure.
fn removed(dir: &Path, result: io::Result<()>) -> Result<()> {
    match result {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        result => result.with_context(|| format!("cannot remove {}", dir.display())),
    }
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
    let request = MoveImage {
        name: name.clone(),
        to: to.to_owned(),
    };
    if let Some(call) = Call::local(home).await? {
        return call.ask(&request, |at| progress(at.done, at.total)).await;
    }
    let catalogs = [home, &there].map(site::open_catalog);
    let [from, into] = catalogs;
    let catalog = Arc::new(from?);
    let from = Own::open(home, &catalog).await?;
    let into = Own::open(&there, &Arc::new(into?)).await?;
    let here = Here::of(home, &catalog, from.site())?;
    let (target, name) = (Arc::clone(into.site()), name.clone());
    let moved = from.run(move |_| Ok(move_between(&here, &target, &name, &mut progress)));
    let moved = moved.await;
    into.close().await?;
    moved??;
    home.audit().done(home.domain_name(), &request, &());
    Ok(())
}

/// Moves an image: it is read and matched in the other domain, gets its name there, and then leaves the first. A crash
/// leaves it in the first, or in both.
///
/// # Errors
/// When there is no such image, it was indexed in place, is in use or has changes, it is being replaced, the other domain
/// has one of that name, or its file cannot be read.
pub(crate) fn move_between(
    from: &Here,
    to: &Arc<Site>,
    name: &ImageName,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    // What is being sent in its place would be lost with it, and there it would be in the way.
    let _here = from.site.reserve_name(name)?;
    let _there = to.reserve_name(name)?;
    let Some(record) = from.site.by_name(name) else {
        return Err(Error::refused(format!("there is no image called {name}")));
    };
    if record.external {
        let text =
            format!("{name} was indexed in place: remove it, and index it in the other domain");
        return Err(Error::refused(text));
    }
    from.server.while_unchanged(name, || ())?;
    let dir = to.links_dir().join(record.id.0.to_string());
    let linked = dir.join("image.part");
    let link = || {
        format!(
            "cannot link {} to {}",
            record.path.display(),
            linked.display()
        )
    };
    let _ = fs::remove_dir_all(&dir);
    make_private_dir(&dir)
        .and_then(|()| fs::hard_link(&record.path, &linked))
        .with_context(link)?;
    let moved = move_linked(from, to, &record, &linked, progress);
    let _ = fs::remove_dir_all(&dir);
    moved
}

/// Moves an image whose file is also in the other domain, at `linked`.
fn move_linked(
    from: &Here,
    to: &Arc<Site>,
    record: &ImageRecord,
    linked: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let mut read = |done, total| {
        progress(done * BLOCK_SIZE_U64, total * BLOCK_SIZE_U64);
        Ok(())
    };
    // Its sender is no peer of that domain, where even the name of it would say something about the first one.
    let origin = Origin {
        from: "",
        owner: None,
    };
    let name = &record.name;
    let check_there = || match from.site.by_name(name) {
        Some(now) if now.id == record.id => Ok(()),
        _ => Err(Error::refused(format!(
            "{name} was replaced or removed meanwhile; nothing was moved"
        ))),
    };
    let prepared = to.prepare(linked, name, origin, &mut read);
    let prepared = prepared.or_else(|e| check_there().and(Err(e.into())))?;
    let mut entered = false;
    // Reading may have taken long.
    let moved = from.server.while_unchanged(name, || -> Result<()> {
        check_there()?;
        let adopted = to.adopt(Some(linked), &prepared, true)?;
        entered = true;
        if let Err(e) = from.site.remove_this(record) {
            to.remove_this(&adopted)?;
            return Err(e.into());
        }
        Ok(())
    });
    if !entered {
        to.forget_prepared(&prepared);
    }
    moved?
}

#[cfg(test)]
mod tests;
