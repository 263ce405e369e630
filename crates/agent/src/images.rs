//! Images of this site and of peers: listing, verifying, indexing, removing.

mod mark;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_image::named_files;
use drover_net::{Code, DEFAULT_DOMAIN};
use drover_store::{Catalog, ImageRecord, KnownFile, KnownFiles, SiteCatalog};
use drover_teleport::services::{
    GuestInfo, ImageInfo, IndexImage, KnowFiles, ListImages, Progress, Removal, RemoveImage,
    ShareImage, Taken, Verified, VerifyImage,
};

use crate::audit::{Audited, Event, Outcome, Record};
use crate::changes;
use crate::error::{Context, Error, Result};
use crate::home::Home;
use crate::machines::forget_disk;
use crate::mounts::refuse_written;
use crate::own::Own;
use crate::remote::Call;
use crate::site::{self, find_peer};
use crate::text::{bytes, some};

pub use mark::{mark, unmark};

/// How long a hypervisor may take to end after its machine has left.
pub const HYPERVISOR_ENDS: Duration = Duration::from_secs(30);

/// Upper bound on the images that a peer may list.
const MAX_LISTED: usize = 1_000_000;

/// Converts a catalog record, and what is known of its file, to the form that peers see.
pub fn info(r: ImageRecord, known: Option<&KnownFile>) -> ImageInfo {
    ImageInfo {
        guest: known.map_or_else(GuestInfo::default, |known| (&known.likeness).into()),
        name: r.name.to_string(),
        digest: r.digest,
        size_bytes: r.size_bytes,
        data_bytes: r.data_bytes,
        virtual_bytes: r.virtual_bytes,
        format: r.format,
        added_unix: r.added_unix,
        from: r.from,
    }
}

/// The image files that this site knows, by their paths.
///
/// # Errors
/// When what it knows cannot be read.
pub fn known_files(home: &Home) -> Result<BTreeMap<PathBuf, Arc<KnownFile>>> {
    let files = KnownFiles::of_site(&home.index_dir())?;
    Ok(files
        .into_iter()
        .map(|file| (file.path.clone(), file))
        .collect())
}

/// The images of this site.
///
/// # Errors
/// When the catalog, or what the site knows of its files, cannot be read.
pub fn list(home: &Home, catalog: &SiteCatalog) -> Result<Vec<ImageInfo>> {
    let known = known_files(home)?;
    let about = |r: ImageRecord| {
        let known = known.get(&r.path).map(|known| &**known);
        info(r, known)
    };
    Ok(catalog.images()?.into_iter().map(about).collect())
}

/// A name that a new image can have: `:` separates a peer from an image. Older versions allowed it.
///
/// # Errors
/// A message for the user.
pub fn new_name(text: &str) -> Result<ImageName, String> {
    let name = ImageName::new(text).map_err(|e| e.to_string())?;
    match text.contains(':') {
        true => Err("an image name cannot contain ':'".into()),
        false => Ok(name),
    }
}

/// A line that reports what a removal did.
pub fn removal(home: &Home, r: &ImageRecord) -> String {
    let done = if r.external {
        format!(
            "removed {} from the catalog; its file {} stays",
            r.name,
            r.path.display()
        )
    } else {
        format!("removed {} ({})", r.name, bytes(r.data_bytes))
    };
    done + &written(home, r).map_or_else(String::new, |(text, _)| text)
}

/// The changes that mounts made to an image, which survive its removal: a text for the user, and their directory.
pub fn written(home: &Home, r: &ImageRecord) -> Option<(String, PathBuf)> {
    let changes = changes::of_image(home, &r.name)?;
    let text = format!(
        "; its changes ({}) stay in {}, and apply again to the same image under that name (`drover changes drop {}` drops them)",
        bytes(changes.changed_bytes),
        changes.directory,
        r.name
    );
    Some((text, changes.directory.into()))
}

/// Bytes of an image of this site that mounts changed.
pub fn changed_bytes(home: &Home, image: &ImageInfo) -> u64 {
    let name = ImageName::new(&image.name).ok();
    let changes = name.and_then(|name| changes::of_image(home, &name));
    let changes = changes.filter(|c| c.is_over(&image.digest));
    changes.map_or(0, |c| c.changed_bytes)
}

impl Audited for VerifyImage {
    fn told(&self, reply: Option<&Verified>) -> Option<Record> {
        let record = Record::new(Event::Verified).image(&self.name);
        Some(match reply {
            Some(verified) if verified.expected != verified.found => Record {
                outcome: Outcome::Failed,
                ..record.detail("its file is not what was delivered")
            },
            _ => record,
        })
    }
}

impl Audited for IndexImage {
    fn told(&self, reply: Option<&ImageName>) -> Option<Record> {
        let record = Record::new(Event::Indexed).detail(self.path.as_str());
        Some(match reply {
            Some(name) => record.image(name),
            None => record,
        })
    }
}

impl Audited for KnowFiles {
    fn told(&self, reply: Option<&Taken>) -> Option<Record> {
        let record = Record::new(Event::Indexed);
        Some(match reply {
            Some(taken) => record.detail(format!(
                "{}: {} files are known, and indexed when they are needed",
                self.directory, taken.looked
            )),
            None => record.detail(self.directory.as_str()),
        })
    }
}

impl Audited for RemoveImage {
    fn told(&self, reply: Option<&Removal>) -> Option<Record> {
        let record = Record::new(Event::Removed).image(&self.name);
        match reply {
            Some(_) if self.dry_run => None,
            Some(removal) => Some(record.bytes(removal.data_bytes)),
            None => Some(record),
        }
    }
}

impl Audited for ShareImage {
    fn told(&self, _: Option<&()>) -> Option<Record> {
        let event = match self.share {
            true => Event::Shared,
            false => Event::Unshared,
        };
        let record = Record::new(event).image(&self.name);
        Some(record.detail(format!("with {}", self.with)))
    }
}

/// Lists the images of a peer.
///
/// # Errors
/// When the request fails.
pub async fn list_of_peer(
    home: &Home,
    catalog: &SiteCatalog,
    name: &str,
) -> Result<Vec<ImageInfo>> {
    let peer = find_peer(catalog, name)?;
    let call = Call::peer(&home.identity()?, &peer).await?;
    let list = call.list(&ListImages, MAX_LISTED).await?;
    list.with_context(|| format!("{name} lists more than {MAX_LISTED} images"))
}

/// Removes an image through the running site, or in this process when none runs. Idempotent: a call after an incomplete
/// removal completes it.
///
/// # Errors
/// When the site refuses, or the image cannot be removed.
pub async fn remove(home: &Home, catalog: &Arc<SiteCatalog>, name: &ImageName) -> Result<()> {
    let request = RemoveImage {
        name: name.clone(),
        dry_run: false,
    };
    if let Some(call) = Call::local(home).await? {
        return call.ask(&request, |()| {}).await.map(drop);
    }
    let site = Own::open(home, catalog).await?;
    let name = name.clone();
    let removed = name.clone();
    let record = site.run(move |site| site.remove(&name)).await?;
    forget_disk(&home.disks(), &removed);
    let removal = Removal {
        external: record.external,
        data_bytes: record.data_bytes,
        changed_bytes: 0,
        held: None,
    };
    home.audit().done(home.domain_name(), &request, &removal);
    Ok(())
}

/// Removes an image at a peer, or only reports what that would do.
///
/// # Errors
/// When the peer cannot be reached or refuses.
pub async fn remove_at(
    home: &Home,
    peer: &str,
    name: &ImageName,
    dry_run: bool,
) -> Result<Removal> {
    let request = RemoveImage {
        name: name.clone(),
        dry_run,
    };
    let call = Call::at(home, Some(peer)).await?.context("no peer")?;
    let removed = call.ask(&request, |()| {}).await;
    removed.map_err(|e| e.about_image(Some(peer), name))
}

/// Lets a peer of the site that has an image, here or at a peer, replace it and write to it, or no longer.
///
/// # Errors
/// When no site runs here, it cannot be reached, or it refuses.
pub async fn share(home: &Home, at: Option<&str>, request: &ShareImage) -> Result<()> {
    let call = Call::at(home, at).await?;
    let call = call.context("no site runs here: start it with `drover serve`")?;
    call.ask(request, |()| {}).await
}

/// Reads an image and compares its digest, here or at a peer. `progress` is called with bytes done and the total.
///
/// # Errors
/// When there is no such image, the site cannot be reached, or the image cannot be read.
pub async fn verify(
    home: &Home,
    name: &ImageName,
    peer: Option<&str>,
    mut progress: impl FnMut(u64, u64) + Send + 'static,
) -> Result<Verified> {
    let catalog = Arc::new(site::open_catalog(home)?);
    let (name, request) = (name.clone(), VerifyImage { name: name.clone() });
    let call = match peer {
        Some(peer) => Some(Call::peer(&home.identity()?, &find_peer(&catalog, peer)?).await?),
        None => Call::local(home).await?,
    };
    if let Some(call) = call {
        if peer.is_none() && catalog.by_name(&name)?.is_none() {
            return Err(Error::no_image(None, &name));
        }
        let progress = |p: Progress| progress(p.done, p.total);
        let verified = call.ask(&request, progress).await;
        return verified.map_err(|e| e.about_image(peer, &name));
    }
    let own = Own::open(home, &catalog).await?;
    let verified = own.run(move |site| site.verify(&name, &mut progress));
    let (expected, found) = verified.await?;
    let verified = Verified { expected, found };
    home.audit().done(home.domain_name(), &request, &verified);
    Ok(verified)
}

/// Indexes image files in place: through the running site, or in this process when none runs.
pub struct Indexer {
    home: Home,
    catalog: Arc<SiteCatalog>,
    /// Opened for the first file when no site runs, and reused for the next.
    own: Option<Own>,
}

impl Indexer {
    /// Creates an indexer for files of this machine.
    ///
    /// # Errors
    /// When the catalog cannot be opened.
    pub fn new(home: &Home) -> Result<Indexer> {
        Ok(Indexer {
            home: home.clone(),
            catalog: Arc::new(site::open_catalog(home)?),
            own: None,
        })
    }

    /// Indexes the file at the absolute path `path`, which must not have symbolic links. An image outside the images
    /// directory that is read from other files, too, is indexed only `with_parts`: whoever may read the image can then
    /// read them. `progress` is called with bytes done and the total.
    ///
    /// # Errors
    /// When the site cannot be reached or refuses, or the file is no image or cannot be read. [`Code::Unsupported`] when
    /// the image has parts and they were not asked for.
    pub async fn index(
        &mut self,
        path: &Path,
        with_parts: bool,
        mut progress: impl FnMut(u64, u64) + Send + 'static,
    ) -> Result<ImageRecord> {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let known = match ImageName::new(name) {
            Ok(name) => self.catalog.by_name(&name)?,
            Err(_) => None,
        };
        if let Err(e) = new_name(name)
            && known.is_none()
        {
            let path = path.display();
            return Err(Error::usage(format!("cannot index {path}: {e}: rename it")));
        }
        refuse_written(&self.home, path)?;
        if !with_parts {
            self.refuse_parts(path)?;
        }
        let call = match self.own {
            Some(_) => None,
            None => Call::local(&self.home).await?,
        };
        let name = match call {
            Some(call) => {
                let text = path.to_str().with_context(|| {
                    format!(
                        "cannot index {}: its path is not UTF-8, which the running site needs",
                        path.display()
                    )
                })?;
                let request = IndexImage { path: text.into() };
                let progress = |p: Progress| progress(p.done, p.total);
                call.ask(&request, progress).await?
            }
            None => {
                let own = match self.own.take() {
                    Some(own) => own,
                    None => Own::open(&self.home, &self.catalog).await?,
                };
                let file = path.to_owned();
                let job = own.keep(move |site| site.index_image(&file, &mut progress));
                let (own, record) = job.await?;
                self.own = Some(own);
                let path = path.display().to_string();
                let (home, request) = (&self.home, IndexImage { path });
                home.audit()
                    .done(home.domain_name(), &request, &record.name);
                record.name
            }
        };
        let record = self.catalog.by_name(&name)?;
        let record = record.with_context(|| {
            format!("{} was removed again while it was indexed", path.display())
        })?;
        if let Err(e) = mark::take_up(&self.home, &record) {
            tracing::warn!(image = %record.name, "its generations are not taken up: {e}");
        }
        Ok(record)
    }

    /// Makes the image files of a directory known, without indexing them.
    ///
    /// # Errors
    /// When the directory cannot be listed, or the site refuses.
    pub async fn know(
        &mut self,
        directory: &Path,
        mut progress: impl FnMut(u64, u64) + Send + 'static,
    ) -> Result<Taken> {
        let text = directory.to_str().with_context(|| {
            format!(
                "cannot index {}: its path is not UTF-8, which the site needs",
                directory.display()
            )
        })?;
        let request = KnowFiles {
            directory: text.into(),
        };
        let call = match self.own {
            Some(_) => None,
            None => Call::local(&self.home).await?,
        };
        if let Some(call) = call {
            let progress = |p: Progress| progress(p.done, p.total);
            return call.ask(&request, progress).await;
        }
        let own = match self.own.take() {
            Some(own) => own,
            None => Own::open(&self.home, &self.catalog).await?,
        };
        let directory = directory.to_owned();
        let job = own.keep(move |site| site.know_files(&directory, &mut progress));
        let (own, taken) = job.await?;
        self.own = Some(own);
        let home = &self.home;
        home.audit().done(home.domain_name(), &request, &taken);
        Ok(taken)
    }

    /// Refuses an image that is read from other files. In the images directory, those must be images of the site.
    fn refuse_parts(&self, path: &Path) -> Result<()> {
        let images = self.home.images_dir().canonicalize()?;
        // A file that cannot be read is reported when it is indexed.
        let names = named_files(path).unwrap_or_default();
        if names.is_empty() || path.parent() == Some(&images) {
            return Ok(());
        }
        let message = format!(
            "cannot index {}: it is read from other files, too, which all who may read the image could then read: {}",
            path.display(),
            some(&names)
        );
        Err(Error::coded(Code::Unsupported, message))
    }

    /// Closes the site, if this process opened one.
    ///
    /// # Errors
    /// When the site's files cannot be saved.
    pub async fn close(self) -> Result<()> {
        match self.own {
            Some(own) => own.close().await,
            None => Ok(()),
        }
    }
}

/// Freezes the image of a disk that a machine has left here, a file of its own, and begins its generations; they are returned
/// as a peer is told them.
///
/// # Errors
/// When they cannot be written.
pub fn freeze_left(
    home: &Home,
    machine: &ImageName,
    image: &ImageRecord,
) -> Result<Option<Vec<u8>>> {
    let domain = home.config.machines.get(machine.as_str());
    let domain = domain.map_or(DEFAULT_DOMAIN, |config| &config.domain);
    let state = home.domain(domain)?.mounted_dir();
    let (name, size) = (&image.name, image.virtual_bytes);
    let frozen = drover_mount::server::freeze_on_disk(&state, name, size, image.digest)?;
    Ok(frozen.map(|generations| generations.encode()))
}
