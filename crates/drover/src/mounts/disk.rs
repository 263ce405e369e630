//! From the name of an image to a device: over the network with or without a cache, or this site's own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drover_core::{BlockDevice, ImageName};
use drover_device::remote::{Link, Remote};
use drover_device::storage::HostDirectory;
use drover_device::synced::{Order, Sync, Synced, SyncedOptions};
use drover_mount::client::{self, Client};
use drover_mount::direct::RemoteDevice;
use drover_mount::protocol::{Access, MountId};
use tokio::runtime::Handle;

use super::connector::PeerConnector;
use super::control::StopHow;
use super::record::{Place, Record};
use super::status::DiskStatus;
use super::target::{Prefetch, Target};
use crate::cli::{HowArgs, SyncMode};
use crate::failure::usage;
use crate::home::Home;
use crate::remote::find_peer;
use crate::site;

/// How long the other site may take to be there at the start.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

/// How long saying goodbye may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// A disk that is open.
pub struct Disk {
    image: String,
    device: Arc<dyn BlockDevice>,
    kind: Kind,
}

enum Kind {
    /// Everything goes to the other site.
    Direct(Arc<Client>),
    /// A cache is in front of the other site.
    Managed {
        synced: Arc<Synced>,
        client: Arc<Client>,
        record: Option<PathBuf>,
    },
}

/// Which of the ways it is, in a word.
pub fn mode(image: &Target, how: &HowArgs) -> &'static str {
    match (&image.peer, how.direct) {
        (None, _) => "own",
        (Some(_), true) => "direct",
        (Some(_), false) => "managed",
    }
}

/// Finds out early what cannot be.
///
/// # Errors
/// A peer that is not known, an order that cannot be read.
pub fn check(home: &Home, images: &[Target], how: &HowArgs) -> Result<()> {
    let catalog = site::open_catalog(home)?;
    for image in images {
        if let Some(peer) = &image.peer {
            find_peer(&catalog, peer)?;
        } else if how.direct {
            return Err(usage(format!(
                "{image} is this site's own: there is nothing to be direct about"
            )));
        }
    }
    Ok(())
}

impl Disk {
    /// Opens the image with number `index` of a mount.
    ///
    /// # Errors
    /// What stands in the way, for a person.
    pub async fn open(
        home: &Home,
        place: &Place,
        record: &Record,
        index: usize,
        image: &Target,
    ) -> Result<Disk> {
        let Some(peer) = &image.peer else {
            bail!("this site's own images cannot be shown yet");
        };
        let catalog = site::open_catalog(home)?;
        let peer = find_peer(&catalog, peer)?;
        let peer_key = peer.key.0;
        let connector = Arc::new(PeerConnector::new(home.identity()?, peer));
        let how = &record.how;
        let access = match how.read_only {
            true => Access::ReadOnly,
            false => Access::ReadWrite,
        };
        let mut options = client::Options::new(ImageName::new(&image.image)?, access);
        options.chunk = how.chunk;
        options.mount = mount_id(record, index);
        options.note = format!("{} at {}", place.name(), home.name());
        options.window = how.window;
        options.give_up = CONNECT_LIMIT;
        if !how.direct {
            options.give_up = how.give_up_after;
        }
        let runtime = Handle::current();
        let identity = [peer_key.as_slice(), b"\n", image.image.as_bytes()].concat();
        let client = Arc::new(Client::open(&runtime, connector, options).await?);
        if how.direct {
            return Ok(Disk {
                image: image.to_string(),
                device: Arc::new(RemoteDevice::new(Arc::clone(&client))),
                kind: Kind::Direct(client),
            });
        }
        let (how, cache) = (how.clone(), place.cache(index));
        let opened = tokio::task::spawn_blocking(move || -> Result<_> {
            let synced = open_cache(&client, &how, &cache, identity)?;
            Ok((client, synced, how.record))
        })
        .await?;
        let (client, synced, record) = opened?;
        Ok(Disk {
            image: image.to_string(),
            device: Arc::clone(&synced) as Arc<dyn BlockDevice>,
            kind: Kind::Managed {
                synced,
                client,
                record,
            },
        })
    }

    /// The device to show.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.device)
    }

    /// How it is.
    pub fn status(&self) -> DiskStatus {
        let mut status = DiskStatus {
            image: self.image.clone(),
            read_only: self.device.capabilities().read_only,
            size: self.device.size(),
            ..DiskStatus::default()
        };
        match &self.kind {
            Kind::Direct(client) => {
                status.mode = "direct".into();
                fill_traffic(&mut status, client.as_ref());
            }
            Kind::Managed { synced, client, .. } => {
                status.mode = "managed".into();
                fill_traffic(&mut status, client.as_ref());
                let progress = synced.progress();
                let chunk = u64::from(client.shape().chunk);
                status.local = (progress.local * chunk).min(status.size);
                status.dirty = progress.dirty_bytes;
                status.seconds_left = progress.seconds_left;
                status.epoch = progress.epoch.count();
                status.trouble = progress.trouble.map(|e| e.to_string());
            }
        }
        status
    }

    /// Bytes that the other site does not have.
    pub fn dirty(&self) -> u64 {
        match &self.kind {
            Kind::Direct(_) => 0,
            Kind::Managed { synced, .. } => synced.pusher().pending(),
        }
    }

    /// Waits until the other site has everything that was written.
    ///
    /// # Errors
    /// Why it has not, at the latest after `limit`.
    pub fn push(&self, limit: Option<Duration>) -> Result<()> {
        match &self.kind {
            Kind::Direct(_) => Ok(self.device.flush()?),
            Kind::Managed { synced, .. } if synced.capabilities().read_only => Ok(()),
            Kind::Managed { synced, .. } => {
                let pusher = synced.pusher();
                let (say, hear) = std::sync::mpsc::channel();
                std::thread::Builder::new()
                    .name("push".into())
                    .spawn(move || say.send(pusher.sync()))?;
                match limit {
                    None => Ok(hear.recv()??),
                    Some(limit) => match hear.recv_timeout(limit) {
                        Ok(done) => Ok(done?),
                        Err(_) => bail!("not done within {} s", limit.as_secs()),
                    },
                }
            }
        }
    }

    /// Closes it; `release` gives the right to write back.
    ///
    /// # Errors
    /// When what is here cannot be kept.
    pub fn close(&self, release: bool) -> Result<()> {
        match &self.kind {
            Kind::Direct(client) => close_client(client, release),
            Kind::Managed { synced, record, .. } => {
                if let Some(path) = record {
                    write_order(synced, path)?;
                }
                Ok(synced.close(false)?)
            }
        }
    }

    /// Closes it without keeping what was written and not pushed.
    ///
    /// # Errors
    /// When the site cannot be told in time.
    pub fn discard(&self) -> Result<()> {
        match &self.kind {
            Kind::Direct(_) => self.close(true),
            Kind::Managed { synced, client, .. } => {
                let closed = synced.close(false);
                close_client(client, true)?;
                Ok(closed?)
            }
        }
    }
}

/// Opens the cache of an image, and begins to pull.
fn open_cache(
    client: &Arc<Client>,
    how: &HowArgs,
    cache: &Path,
    identity: Vec<u8>,
) -> Result<Arc<Synced>> {
    let shape = client.shape();
    let prefetch = match &how.prefetch {
        Prefetch::None => Order::None,
        Prefetch::Sequential => Order::Sequential,
        Prefetch::File(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            Order::parse(&text, shape).with_context(|| format!("{}", path.display()))?
        }
    };
    let directory = HostDirectory::open_or_create(cache)
        .with_context(|| format!("cannot open {}", cache.display()))?;
    let remote = Arc::clone(client) as Arc<dyn Remote>;
    let mut options = SyncedOptions::new(Arc::new(directory), remote, &identity);
    options.sync = match how.sync {
        SyncMode::Local => Sync::Local,
        SyncMode::Remote => Sync::Remote,
    };
    options.cache_size = how.cache_size;
    options.prefetch = prefetch;
    options.push_interval = how.push_interval;
    options.give_up_after = how.give_up_after;
    options.record_order = how.record.is_some();
    Ok(Synced::open(options)?)
}

/// Writes the order in which chunks were first read.
fn write_order(synced: &Synced, path: &Path) -> Result<()> {
    let text = synced.puller().recorded_text().unwrap_or_default();
    crate::home::write_atomically(path, text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The mount's number for one of its images.
fn mount_id(record: &Record, index: usize) -> MountId {
    let mut id = record.id;
    // Leases are of images: two images of one mount need no two secrets, only two numbers.
    id[15] ^= u8::try_from(index).unwrap_or(u8::MAX);
    MountId(id)
}

fn fill_traffic(status: &mut DiskStatus, remote: &dyn Remote) {
    let traffic = remote.traffic();
    status.in_flight = traffic.in_flight;
    status.received = traffic.received;
    status.sent = traffic.sent;
    status.rate = traffic.rate;
    status.link = match remote.link() {
        Link::Up(_) => "up".into(),
        Link::Down(why) => why,
        Link::Gone(error) => error.to_string(),
    };
}

/// Says goodbye to the site, for as long as that may take.
fn close_client(client: &Client, _release: bool) -> Result<()> {
    let (say, hear) = std::sync::mpsc::channel();
    client.close(Box::new(move |result| {
        let _ = say.send(result);
    }));
    match hear.recv_timeout(CLOSE_LIMIT) {
        Ok(Ok(())) => Ok(()),
        // The site finds out by itself.
        Ok(Err(e)) => {
            tracing::warn!("the site was not told that the mount has ended: {e}");
            Ok(())
        }
        Err(_) => {
            tracing::warn!("the site was not told that the mount has ended: no answer");
            Ok(())
        }
    }
}

/// Takes the directory of a mount that never came to be away, if nothing is in it.
pub fn forget_if_empty(place: &Place, record: &Record) {
    let cached = (0..record.images.len()).any(|i| place.cache(i).join("data").exists());
    if !cached && let Err(e) = place.remove() {
        tracing::warn!("{e:#}");
    }
}

/// Ends a mount whose process is gone: pushes what it left, unless told otherwise.
///
/// # Errors
/// When that cannot be done now.
pub async fn end_dead(
    _home: &Home,
    place: &Place,
    record: &Record,
    _how: StopHow,
) -> Result<String> {
    super::end::clear_leftovers(record)?;
    place.remove()?;
    Ok(String::new())
}
