//! The domains of a site: images, matchers and leases that peers of another domain never meet.
//!
//! A domain is a site within the site, with a catalog of images, a matcher and a directory of images of its own, below
//! `domains/NAME` in the home. The default domain is the home itself. The others are opened on use and closed when they
//! have been idle for [`IDLE`]; at most [`MAX_OPEN`] are open at once, which bounds the memory of their matchers.

use std::collections::HashMap;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, ReadAt};
use drover_mount::server::{Absences, Server as DeviceServer};
use drover_net::{Code, Identity, PeerKey, Refusal};
use drover_store::SiteCatalog;
use drover_teleport::{OldCopy, Site, Supplies};
use parking_lot::Mutex;

use super::recovery::Recovery;
use crate::changes::Here;
use crate::disks::Disks;
use crate::error::{Error, Result, one_line, refusal_of};
use crate::home::{Home, HomeLock};
use crate::mounts::{Receiving, is_launched, leased_on_disk, limited_server, why_held};
use crate::quota::Quotas;
use crate::replicas::may_be_changed;
use crate::site;

/// Upper bound on domains that are open at once, beside the default one.
pub const MAX_OPEN: usize = 16;

/// How long an unused domain stays open.
pub const IDLE: Duration = Duration::from_secs(300);

/// One domain that is open.
pub struct Domain {
    /// Its directory.
    pub home: Home,
    /// Its images.
    pub catalog: Arc<SiteCatalog>,
    /// Receives images.
    pub site: Arc<Site>,
    /// Serves them to mounts.
    pub devices: Arc<DeviceServer>,
    /// What its peers may take.
    pub quotas: Arc<Quotas>,
    /// Disks in stores that it serves; only the default one has some.
    pub stores: Arc<Disks>,
    _lock: HomeLock,
}

impl Domain {
    /// Opens the domain in this home.
    ///
    /// # Errors
    /// When another process uses it, or its files cannot be used.
    pub async fn open(
        home: Home,
        lock: HomeLock,
        catalog: Arc<SiteCatalog>,
        identity: &Identity,
        supplies: Supplies,
        absences: Arc<Absences>,
        stores: Arc<Disks>,
    ) -> Result<Arc<Domain>> {
        let (its, images) = (home.clone(), Arc::clone(&catalog));
        let receives = Receiving::default();
        let (receiver, served) = (Arc::clone(&receives), Arc::clone(&stores));
        let parts = move || {
            let quotas = Arc::new(Quotas::new(&its, &images)?);
            let devices = limited_server(&its, &images, &quotas, absences, receiver, served)?;
            Ok::<_, Error>((devices, quotas))
        };
        let (devices, quotas) = tokio::task::spawn_blocking(parts).await??;
        // Last, because it begins work in the background.
        let site = site::open(&home, &catalog, identity, supplies).await?;
        let _ = receives.set(Arc::downgrade(&site));
        hold_leased(&site, &devices, &home, &catalog, &stores);
        let limit = Arc::clone(&quotas);
        site.limit_by(Arc::new(move |peer, name, bytes| {
            limit.check(peer, name, bytes)
        }));
        let copies = Arc::downgrade(&devices);
        site.reuse_old_copies(Arc::new(move |_, generations| {
            let copy = copies.upgrade()?.old_copy(generations)?;
            Some(OldCopy {
                content: Arc::new(DeviceContent(copy.device)),
                differs: copy.differs,
            })
        }));
        Ok(Arc::new(Domain {
            home,
            catalog,
            site,
            devices,
            quotas,
            stores,
            _lock: lock,
        }))
    }

    /// Where its changes are merged.
    pub fn here(&self, key: PeerKey) -> Here {
        Here {
            site: Arc::clone(&self.site),
            server: Arc::clone(&self.devices),
            state: self.home.mounted_dir(),
            key,
        }
    }

    /// Closes it.
    ///
    /// # Errors
    /// When its caches cannot be saved; a full disk only slows down the next opening, and is logged.
    pub async fn close(&self) -> Result<()> {
        let site = Arc::clone(&self.site);
        match tokio::task::spawn_blocking(move || site.close()).await? {
            Err(e) if e.is_full() => {
                tracing::warn!("the matcher's caches are rebuilt at the next start: {e}");
                Ok(())
            }
            closed => Ok(closed?),
        }
    }
}

/// A device as the content of an image.
struct DeviceContent(Arc<dyn BlockDevice>);

impl ReadAt for DeviceContent {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.0.size().saturating_sub(offset);
        let n = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = self.0.read(offset, &mut buffer[..n]);
        read.map_err(|e| io::Error::other(e.to_string()))?;
        Ok(n)
    }
}

/// Prevents images from being replaced or removed while they are mounted, or a mount can still push to them.
fn hold_leased(
    site: &Arc<Site>,
    devices: &Arc<DeviceServer>,
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    stores: &Arc<Disks>,
) {
    let (catalog, stores) = (Arc::clone(catalog), Arc::clone(stores));
    let (devices, state) = (Arc::downgrade(devices), home.mounted_dir());
    let replicas = home.replicas();
    site.hold_by(Arc::new(move |name| {
        if let Some(why) = stores.why_held(name) {
            return Some(why);
        }
        if let Err(refusal) = may_be_changed(&replicas, name) {
            return Some(refusal.message);
        }
        if is_launched(name, &state, catalog.as_ref()) {
            return None;
        }
        // A delivery may outlive the server.
        let leased = match devices.upgrade() {
            Some(devices) => devices.leased(name),
            None => leased_on_disk(&state, name),
        };
        why_held(name, leased)
    }));
}

/// The domains of a site that are open, beside the default one.
pub struct Domains {
    supplies: Supplies,
    /// Of mounts of all domains, also while they are closed.
    absences: Arc<Absences>,
    /// Held while one is opened or closed.
    changing: tokio::sync::Mutex<()>,
    open: Open,
}

/// Those that are open, by name.
type Open = Arc<Mutex<HashMap<String, Opened>>>;

struct Opened {
    domain: Arc<Domain>,
    /// Finishes merges that a crash interrupted.
    recovery: Recovery,
    users: usize,
    /// When the last user left.
    since: Instant,
}

impl Opened {
    async fn close(self, name: &str) {
        self.recovery.end().await;
        match self.domain.close().await {
            Ok(()) => tracing::info!(domain = name, "domain closed"),
            Err(e) => tracing::warn!(domain = name, "{}", one_line(&e)),
        }
    }
}

/// A domain that stays open until this is dropped: whatever works in it holds one.
pub struct InUse {
    domain: Arc<Domain>,
    /// Where it is counted; the default domain is always open.
    counted: Option<(Open, String)>,
}

impl InUse {
    /// The default domain.
    pub fn default(domain: Arc<Domain>) -> InUse {
        let counted = None;
        InUse { domain, counted }
    }
}

impl Deref for InUse {
    type Target = Domain;

    fn deref(&self) -> &Domain {
        &self.domain
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some((open, name)) = &self.counted
            && let Some(opened) = open.lock().get_mut(name)
        {
            opened.users -= 1;
            opened.since = Instant::now();
        }
    }
}

impl Domains {
    /// None are open yet.
    pub fn new(supplies: Supplies, absences: Arc<Absences>) -> Domains {
        Domains {
            supplies,
            absences,
            changing: tokio::sync::Mutex::default(),
            open: Open::default(),
        }
    }

    /// The domain of that name of the site in `home`, whose catalog has `peers`.
    ///
    /// # Errors
    /// When there is none, too many are in use, or its files cannot be used.
    pub async fn of(
        &self,
        home: &Home,
        identity: &Identity,
        peers: &Arc<SiteCatalog>,
        name: &str,
    ) -> Result<InUse, Refusal> {
        if let Some(found) = self.take(name) {
            return Ok(found);
        }
        let _changing = self.changing.lock().await;
        if let Some(found) = self.take(name) {
            return Ok(found);
        }
        let home = home.domain(name).map_err(refusal_of)?;
        if self.open.lock().len() >= MAX_OPEN && !self.close_idle(Duration::ZERO, 1).await {
            let text = format!("{MAX_OPEN} domains of this site are in use; try again later");
            return Err(Refusal::new(Code::Busy, text));
        }
        let opened = async {
            let its = home.clone();
            let begun = move || {
                let lock = its.lock()?;
                Ok::<_, Error>((lock, Arc::new(site::open_catalog(&its)?)))
            };
            let (lock, catalog) = tokio::task::spawn_blocking(begun).await??;
            let (supplies, absences) = (self.supplies.clone(), Arc::clone(&self.absences));
            let stores = Arc::default();
            Domain::open(home, lock, catalog, identity, supplies, absences, stores).await
        };
        let domain = opened.await.map_err(|e| {
            tracing::error!(domain = name, "cannot open the domain: {}", one_line(&e));
            // It may name peers of other domains, and files.
            let text =
                format!("the domain {name} cannot be opened: the reason is in the log of its site");
            Refusal::new(Code::Unavailable, text)
        })?;
        let opened = Opened {
            recovery: Recovery::begin(domain.here(identity.key())),
            domain: Arc::clone(&domain),
            users: 0,
            since: Instant::now(),
        };
        self.open.lock().insert(name.to_owned(), opened);
        tracing::info!(domain = name, "domain opened");
        let found = self.take(name);
        // While it was closed; from now on it is noticed.
        if let Err(e) = domain.take_away(peers, identity.key()).await {
            tracing::warn!(domain = name, "{}", one_line(&e));
        }
        found.ok_or_else(|| Refusal::new(Code::Unavailable, "the domain was closed; try again"))
    }

    fn take(&self, name: &str) -> Option<InUse> {
        let mut open = self.open.lock();
        let opened = open.get_mut(name)?;
        opened.users += 1;
        Some(InUse {
            domain: Arc::clone(&opened.domain),
            counted: Some((Arc::clone(&self.open), name.to_owned())),
        })
    }

    /// Closes up to `most` domains that nobody has used for `idle`, the longest unused first; returns whether any was
    /// closed. The caller holds `changing`.
    async fn close_idle(&self, idle: Duration, most: usize) -> bool {
        let closed = {
            let mut open = self.open.lock();
            let unused = open
                .iter()
                .filter(|(_, o)| o.users == 0 && o.since.elapsed() >= idle);
            let mut unused: Vec<_> = unused.map(|(name, o)| (o.since, name.clone())).collect();
            unused.sort();
            unused.truncate(most);
            let taken = unused
                .into_iter()
                .filter_map(|(_, name)| open.remove_entry(&name));
            Vec::from_iter(taken)
        };
        let any = !closed.is_empty();
        for (name, opened) in closed {
            opened.close(&name).await;
        }
        any
    }

    /// Closes a domain, if it is open; whether it is closed now.
    pub async fn close_unused(&self, name: &str) -> bool {
        let _changing = self.changing.lock().await;
        let closed = {
            let mut open = self.open.lock();
            match open.get(name).map(|opened| opened.users) {
                None => return true,
                Some(0) => open.remove(name),
                Some(_) => None,
            }
        };
        match closed {
            Some(closed) => closed.close(name).await,
            None => return false,
        }
        true
    }

    /// Closes those that have been idle for [`IDLE`].
    pub async fn tidy(&self) {
        // One by one: others may be waiting for theirs.
        while {
            let _changing = self.changing.lock().await;
            self.close_idle(IDLE, 1).await
        } {}
    }

    /// Closes all; nobody may be using any.
    pub async fn close(&self) {
        let _changing = self.changing.lock().await;
        self.close_idle(Duration::ZERO, usize::MAX).await;
    }

    /// A domain, if it is open. It may be closed meanwhile: not to be kept.
    pub fn glance(&self, name: &str) -> Option<Arc<Domain>> {
        let open = self.open.lock();
        open.get(name).map(|opened| Arc::clone(&opened.domain))
    }

    /// Those that are open.
    pub fn open(&self) -> Vec<(String, Arc<Domain>)> {
        let open = self.open.lock();
        open.iter()
            .map(|(name, o)| (name.clone(), Arc::clone(&o.domain)))
            .collect()
    }
}
