//! Mounts that machines have as disks: found where a machine leaves, and made where it comes.

use std::os::unix::fs::lchown;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_hypervisor::machine::Data;
use drover_migrate::protocol::{MountedDisk, heir};
use drover_migrate::{Heir, Mounted, Pending};
use drover_mount::client::Connector;
use drover_net::service::Peer;
use drover_net::{Code, NetError, Refusal};
use drover_store::Peer as StoredPeer;
use drover_store::machine::Token;

use super::connector::PeerConnector;
use super::control::{self, PrepareHandOver};
use super::disk::mount_id;
use super::lease::Lease;
use super::record::{Front, HeirOf, How, Place, Record, SyncMode};
use super::status::MountState;
use super::target::{Listen, Prefetch, Target};
use super::{
    ANSWER_LIMIT, HandTo, Process, StopHow, Written, begin, end, on_disk, start, status_of,
};
use crate::error::{Error, Result, bail, failed, one_line, refusal_of};
use crate::home::Home;
use crate::site;
use crate::text::bytes;

/// How long the push before a machine is paused may take.
const PUSH_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// The mounts of a home, for machines that leave it.
pub struct Leaving(pub Home);

impl drover_migrate::Mounts for Leaving {
    fn find<'a>(&'a self, data: &'a Data) -> Pending<'a, Result<Option<Mounted>, Refusal>> {
        let (home, data) = (self.0.clone(), data.clone());
        Box::pin(async move {
            let found = tokio::task::spawn_blocking(move || find(&home, &data)).await;
            found.map_err(failed)?.map_err(refusal_of)
        })
    }

    fn prepare<'a>(&'a self, mounted: &'a Mounted, to: Heir) -> Pending<'a, Result<u64, Refusal>> {
        Box::pin(async move { prepare(&self.0, mounted, to).await.map_err(refusal_of) })
    }

    fn hand_over<'a>(&'a self, mounted: &'a Mounted, to: Heir) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move { hand_over(&self.0, mounted, to).await.map_err(refusal_of) })
    }
}

/// The mount that these bytes are, if it is one of a peer's image for writing, and is up.
fn find(home: &Home, data: &Data) -> Result<Option<Mounted>> {
    let what = match data {
        Data::File(path) if path.is_absolute() => path,
        Data::Nbd(NbdAddress {
            socket: NbdSocket::Unix(path),
            ..
        }) if path.is_absolute() => path,
        _ => return Ok(None),
    };
    let Some(what) = what.to_str() else {
        return Ok(None);
    };
    let is_it = |(_, record): &Written| record.is_meant_by(what);
    // Of several at one path, only one has a process.
    let found: Vec<_> = Place::list(home)?.into_iter().filter(is_it).collect();
    let up = found.iter().find(|(place, _)| place.is_kept());
    let Some((place, record)) = up.or(found.first()) else {
        return Ok(None);
    };
    // What is in the page cache of a block device is not flushed when that goes.
    let is_plain = matches!(
        record.front,
        Front::Nbd { .. } | Front::File { device: false, .. }
    );
    if record.how.read_only || !is_plain {
        return Ok(None);
    }
    let [
        Target {
            peer: Some(peer),
            image,
            ..
        },
    ] = record.images.as_slice()
    else {
        return Ok(None);
    };
    if record.how.standby || record.unmounted || !place.is_kept() {
        let text = format!(
            "the disk {} is not all here: {} waits for its write lease, or is not served; see `drover mounts`, or add --copy-mounts",
            record.images[0],
            place.name()
        );
        return Err(Error::coded(Code::Unavailable, text));
    }
    Ok(Some(Mounted {
        mount: place.name(),
        id: mount_id(record, 0),
        site: site::find_peer(&site::open_catalog(home)?, peer)?.key,
        site_name: peer.clone(),
        image: ImageName::new(image)?,
    }))
}

/// A connector to the site that has the image of a mount.
pub(super) fn connector(home: &Home, image: &Target) -> Result<Arc<dyn Connector>> {
    let Some(peer) = &image.peer else {
        bail!("{image} is no image of a peer");
    };
    let peer = site::find_peer(&site::open_catalog(home)?, peer)?;
    Ok(Arc::new(PeerConnector::new(home.identity()?, peer)))
}

fn to(heir: Heir) -> HandTo {
    HandTo::Heir(super::Heir {
        site: heir.site.0,
        mount: heir.mount.0,
        token: heir.token,
    })
}

/// The mount, if it is there: not another one at its place.
async fn named(home: &Home, mounted: &Mounted) -> Result<Option<Written>> {
    let theirs = home.clone();
    let (listed, damaged) = on_disk(move || Place::list_all(&theirs)).await?;
    let is_it = |(place, _): &(Place, _)| place.name() == mounted.mount;
    if let Some((_, why)) = damaged.into_iter().find(is_it) {
        return Err(why);
    }
    let is_it =
        |(_, record): &Written| record.name == mounted.mount && mount_id(record, 0) == mounted.id;
    Ok(listed.into_iter().find(is_it))
}

/// Checks that the lease of a mount can be handed over, and pushes what was written to it.
async fn prepare(home: &Home, mounted: &Mounted, heir: Heir) -> Result<u64> {
    let Some((place, _)) = named(home, mounted).await? else {
        bail!("the mount of {mounted} has ended");
    };
    let prepare = PrepareHandOver { to: to(heir) };
    // As long as the push gets somewhere.
    let prepared = control::ask(&place.socket(), &prepare, PUSH_LIMIT, |()| {}).await;
    prepared.map_err(|e| match e {
        Error::Net(NetError::Refused(refusal)) => Error::Refused(refusal),
        e => e.context(format!("{mounted}")),
    })
}

/// Hands the lease of a mount over to the one that stands by as the disk of the machine.
async fn hand_over(home: &Home, mounted: &Mounted, heir: Heir) -> Result<()> {
    let Some(written) = named(home, mounted).await? else {
        return was_handed_over(home, mounted, heir).await;
    };
    // The machine may not run here any more: nothing that it is in use by has a right to it.
    let how = StopHow {
        lazy: true,
        hand_over: Some(to(heir)),
        ..StopHow::default()
    };
    let ended = end(home, &written, how, Arc::new(|_, _| {})).await;
    let left = match ended {
        Err(e) if e.code() == Some(Code::Lost) => return Err(lost(e, &written).await),
        ended => ended?,
    };
    for line in left.lines() {
        tracing::info!("{}: {line}", mounted.mount);
    }
    Ok(())
}

/// Adds to the loss of a lease what is lost with it.
async fn lost(e: Error, (place, record): &Written) -> Error {
    let status = status_of(place, record, ANSWER_LIMIT).await;
    match status.disks.iter().map(|disk| disk.dirty).sum::<u64>() {
        0 => e,
        n => {
            let text = format!(
                "{}; {} that the machine has written are only in the cache of {} here: end the machine there before you export the image",
                one_line(&e),
                bytes(n),
                place.name()
            );
            Error::Refused(Refusal::new(Code::Lost, text))
        }
    }
}

/// A mount is not there any more: whether that is because it was handed over, the site that has the image knows.
async fn was_handed_over(home: &Home, mounted: &Mounted, heir: Heir) -> Result<()> {
    let image = Target {
        peer: Some(mounted.site_name.clone()),
        image: mounted.image.to_string(),
        local: None,
        domain: None,
    };
    let lease = Lease::new(&connector(home, &image)?, &image, mounted.id)?;
    let asked = move || lease.hand_over(to(heir), false, &|| u64::MAX);
    match tokio::task::spawn_blocking(asked).await?? {
        who if who.is_empty() => Ok(()),
        _ => bail!(
            "the record of the mount {} is gone, and it has the write lease",
            mounted.mount
        ),
    }
}

/// Where the disks of a machine that comes are served which are images of other sites: an NBD socket for each, and who may connect
/// besides this user.
pub struct Coming<'a> {
    /// The home of the site.
    pub home: &'a Home,
    /// The domain of the machine.
    pub domain: &'a str,
    /// A path beside which the sockets are.
    pub beside: PathBuf,
    /// The machine.
    pub machine: &'a ImageName,
    /// Another user.
    pub user: Option<u32>,
}

impl Coming<'_> {
    fn socket(&self, index: usize) -> PathBuf {
        let name = format!(".{}-{index}.mount", self.machine);
        self.beside.with_file_name(name)
    }

    /// Whether a mount was made for this machine.
    fn is_its(&self, record: &Record) -> bool {
        let Some(path) = socket_of(record) else {
            return false;
        };
        let rest = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix('.')?.strip_suffix(".mount"))
            .and_then(|name| name.strip_prefix(self.machine.as_str())?.strip_prefix('-'));
        path.parent() == self.beside.parent()
            && rest.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
    }

    /// Those that were made for this machine.
    async fn all(&self) -> Result<Vec<Written>> {
        let home = self.home.clone();
        let listed = on_disk(move || Place::list(&home)).await?;
        Ok(listed
            .into_iter()
            .filter(|(_, record)| self.is_its(record))
            .collect())
    }

    /// Mounts these images, standing by for the write leases of the peer that brings the machine by the move `token`; what stands by
    /// for others ends.
    ///
    /// # Errors
    /// When one cannot be mounted, with the way out.
    pub async fn stand_by(&self, from: &Peer, token: Token, disks: &[MountedDisk]) -> Result<()> {
        let mut wanted = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let heir = HeirOf {
                site: from.key.0,
                mount: heir(token, index).0.0,
            };
            wanted.push((self.target(disk)?, self.socket(index), heir));
        }
        let is_wanted = |record: &Record| {
            wanted.iter().any(|(target, socket, heir)| {
                record.images == [target.clone()]
                    && socket_of(record) == Some(socket)
                    && record.how.heir_of == Some(*heir)
            })
        };
        let mut there = Vec::new();
        for (place, record) in self.all().await? {
            match is_wanted(&record) && is_standing(&place, &record).await {
                true => there.push(record.images),
                false => self.end_one(&(place, record)).await?,
            }
        }
        for (target, socket, heir) in wanted {
            if there.contains(&vec![target.clone()]) {
                continue;
            }
            let front = Front::Nbd {
                listen: Listen::Unix(socket),
                tls: None,
            };
            let (ready, by) = (|_: &str, _: &[String]| Ok(()), Process::Daemon(0));
            let how = how(heir);
            begin(self.home, vec![target], front, how, by, |_, _| {}, ready).await?;
        }
        self.admit(&self.all().await?)
    }

    /// The image, as this site names it.
    fn target(&self, disk: &MountedDisk) -> Result<Target> {
        let image = &disk.image;
        if disk.site == self.home.identity()?.key() {
            bail!(
                "{image} is an image of this site, mounted where the machine is: unmount it there first, or add --copy-mounts"
            );
        }
        let peers = site::open_catalog(self.home)?.peers()?;
        // What is between tenants is none of the machine's.
        let is_it = |peer: &StoredPeer| peer.key == disk.site && peer.grant.domain == self.domain;
        let Some(peer) = peers.into_iter().find(is_it) else {
            let text = format!(
                "{} does not know the site that has {image}, with key {}: pair them (`drover pair`), or add --copy-mounts",
                self.home.name(),
                disk.site
            );
            return Err(Error::refused(text));
        };
        Ok(Target {
            peer: Some(peer.name),
            image: image.to_string(),
            local: None,
            domain: None,
        })
    }

    /// Lets the other user connect.
    fn admit(&self, mounts: &[Written]) -> Result<()> {
        for socket in mounts.iter().filter_map(|(_, record)| socket_of(record)) {
            // One that is not served now is admitted when it is.
            if self.user.is_some() && socket.exists() {
                lchown(socket, self.user, None)?;
            }
        }
        Ok(())
    }

    /// Where these are served; they stand by.
    ///
    /// # Errors
    /// When one does not, or has another size than was said.
    pub async fn standing(&self, disks: &[MountedDisk]) -> Result<Vec<NbdAddress>> {
        let all = self.all().await?;
        let mut addresses = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let socket = self.socket(index);
            let found = all
                .iter()
                .find(|(_, record)| socket_of(record) == Some(&socket));
            let status = match found {
                Some((place, record)) => Some(status_of(place, record, ANSWER_LIMIT).await),
                None => None,
            };
            let status = status.filter(|status| status.state == MountState::Standby);
            let disk_status = status.and_then(|status| status.disks.into_iter().next());
            // Without a link it cannot get the lease.
            let Some(disk_status) = disk_status.filter(|disk| disk.link == "up") else {
                bail!(
                    "the mount of {} at {} does not stand by any more: see `drover mounts` there",
                    disk.image,
                    self.home.name()
                );
            };
            if disk_status.size != disk.size {
                bail!(
                    "{} has {} bytes, and the disk of the machine {}",
                    disk.image,
                    disk_status.size,
                    disk.size
                );
            }
            addresses.push(NbdAddress {
                socket: NbdSocket::Unix(socket),
                export: disk.image.to_string(),
            });
        }
        Ok(addresses)
    }

    /// Ends those that stand by: the machine does not come.
    ///
    /// # Errors
    /// When one cannot be ended.
    pub async fn end_standing(&self) -> Result<()> {
        for written in self.all().await? {
            if written.1.how.standby {
                self.end_one(&written).await?;
            }
        }
        Ok(())
    }

    async fn end_one(&self, written: &Written) -> Result<()> {
        if !written.1.how.standby {
            bail!(
                "{} is served for {} already: `drover unmount {}` ends that",
                written.1.images[0],
                self.machine,
                written.1.name
            );
        }
        let lazy = StopHow {
            lazy: true,
            ..StopHow::default()
        };
        end(self.home, written, lazy, Arc::new(|_, _| {})).await?;
        Ok(())
    }

    /// Goes on with those whose process has ended, of a machine that is here.
    ///
    /// # Errors
    /// When one cannot be started; then the others are.
    pub async fn restart(&self) -> Result<()> {
        let mut done = Ok(());
        let all = self.all().await?;
        for (place, record) in &all {
            if place.is_kept() || record.unmounted {
                continue;
            }
            let (home, theirs) = (self.home.clone(), place.clone());
            let start = move || start::start(&home, &theirs, 0, |_, _| {});
            let started = tokio::task::spawn_blocking(start).await?;
            done = done.and(started.map(drop));
        }
        // Also what a person has exported in their place.
        self.admit(&all)?;
        done
    }
}

/// How the disk of a machine that comes is mounted: as by `drover export` without options.
fn how(heir: HeirOf) -> How {
    How {
        read_only: false,
        direct: false,
        sync: SyncMode::Local,
        chunk: 64 << 10,
        is_chunk_chosen: false,
        cache_size: None,
        prefetch: Prefetch::Profile,
        record: None,
        profile: false,
        profile_for: None,
        push_interval: Duration::from_secs(5),
        window: None,
        give_up_after: Duration::from_secs(600),
        lease: None,
        wait_local: None,
        standby: true,
        heir_of: Some(heir),
        size: None,
        launch: false,
    }
}

fn socket_of(record: &Record) -> Option<&PathBuf> {
    match &record.front {
        Front::Nbd {
            listen: Listen::Unix(path),
            ..
        } => Some(path),
        _ => None,
    }
}

async fn is_standing(place: &Place, record: &Record) -> bool {
    status_of(place, record, ANSWER_LIMIT).await.state == MountState::Standby
}
