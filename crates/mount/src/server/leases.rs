//! Writers' leases: listed, replaced when damaged, broken.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use drover_core::ImageName;
use drover_net::{Code, PeerKey, Refusal};

use super::Server;
use super::blocking::blocking;
use super::image::{Happened, WhyBroken};
use crate::MountError;
use drover_store::changes;
use drover_store::lease::{Holder, LeaseTable, Loss, Who};

/// An image that is mounted or leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// Which image.
    pub image: String,
    /// The holder of the writer's lease.
    pub holder: Option<Holder>,
    /// Connected mounts, by the names of their sites.
    pub connected: Vec<String>,
    /// Why the lease cannot be read.
    pub problem: Option<String>,
}

impl Server {
    /// The writers' leases of all images that were ever mounted, and the connected mounts. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Store`] when the site's state cannot be read.
    pub fn leases(&self) -> Result<Vec<Leased>, MountError> {
        let mut names = BTreeSet::from_iter(changes::names(&self.config.state)?);
        names.extend(
            self.state
                .lock()
                .mounts
                .values()
                .map(|m| m.image.name().clone()),
        );
        let mut out = Vec::new();
        for name in names {
            match self.leased(&name) {
                Ok(leased) => out.extend(leased),
                // An unreadable one does not hide the others.
                Err(error) => out.push(Leased {
                    image: name.to_string(),
                    holder: None,
                    connected: self.connected(&name),
                    problem: Some(error.to_string()),
                }),
            }
        }
        Ok(out)
    }

    /// The mounts of an image and the holder of its lease; `None` when there are neither. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`] when the lease is damaged, [`MountError::StateFile`] when it cannot be read.
    pub fn leased(&self, name: &ImageName) -> Result<Option<Leased>, MountError> {
        let holder = lease_on_disk(&self.config.state, name)?;
        let leased = Leased {
            connected: self.connected(name),
            holder,
            image: name.as_str().to_owned(),
            problem: None,
        };
        Ok(Some(leased).filter(|l| l.holder.is_some() || !l.connected.is_empty()))
    }

    /// The connected mounts of an image, by the names of their sites.
    fn connected(&self, name: &ImageName) -> Vec<String> {
        let state = self.state.lock();
        let here = state.mounts.values().filter(|m| m.image.name() == name);
        here.map(|m| m.peer.name.clone()).collect()
    }

    /// Replaces a lease whose file is damaged; the old file is kept beside it. No mount holds the lease then, and the
    /// next one gets it. Returns whether a damaged one was replaced. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: a disk error.
    pub fn replace_damaged_lease(&self, name: &ImageName) -> Result<bool, MountError> {
        // Prevents it from being opened meanwhile.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let directory = changes::directory(&self.config.state, name);
        let open = self.state.lock().open.get(name).cloned();
        let Some(image) = open else {
            return Ok(LeaseTable::replace_damaged(&directory)?);
        };
        let is_damaged = lease_on_disk(&self.config.state, name).is_err();
        if is_damaged {
            // An open image still has the contents in memory.
            image.store_lease()?;
        }
        Ok(is_damaged)
    }

    /// Breaks the writer's lease of an image; `None` if there is none. The mount that held it is notified; what it has
    /// not written back stays in its cache.
    ///
    /// # Errors
    /// [`MountError::Refused`]: no such image, or a disk error.
    pub async fn break_lease(
        self: &Arc<Self>,
        name: &ImageName,
        why: WhyBroken,
    ) -> Result<Option<Holder>, MountError> {
        let revoked = |_: &Holder| Some(Loss::Revoked);
        Ok(self.end_lease(name, why, revoked).await?)
    }

    /// Breaks the writer's lease of an image for a mount that wants it, if its holder has had no connection for longer than
    /// the lease's term; whether it did.
    pub(super) async fn end_overdue(
        self: &Arc<Self>,
        name: &ImageName,
        by: &Who,
    ) -> Result<bool, Refusal> {
        let (server, by) = (self.clone(), by.clone());
        let overdue = move |holder: &Holder| {
            let key = (PeerKey(holder.peer), holder.mount);
            let is_here = server.state.lock().mounts.contains_key(&key);
            let gone = server.config.absences.time(&key, Instant::now());
            holder.loss(gone, &by).filter(|_| !is_here)
        };
        let ended = self.end_lease(name, WhyBroken::TermOver, overdue).await?;
        Ok(ended.is_some())
    }

    /// Ends all connections of the mounts of an image, which nobody can use any more.
    pub async fn refuse_mounts(&self, name: &ImageName, refusal: &Refusal) {
        let connections: Vec<_> = {
            let state = self.state.lock();
            let mounts = state.mounts.values();
            let its = mounts.filter(|mount| mount.image.name() == name);
            its.flat_map(|mount| mount.connections.clone()).collect()
        };
        let mut ended = tokio::task::JoinSet::new();
        for connection in connections {
            let refusal = refusal.clone();
            ended.spawn(async move { connection.end(refusal).await });
        }
        while ended.join_next().await.is_some() {}
    }

    /// Breaks the writer's lease of an image if `how` says how its holder loses it; returns the holder.
    pub(super) async fn end_lease(
        self: &Arc<Self>,
        name: &ImageName,
        why: WhyBroken,
        how: impl Fn(&Holder) -> Option<Loss> + Send + 'static,
    ) -> Result<Option<Holder>, Refusal> {
        let (server, name) = (self.clone(), name.clone());
        let broken = blocking(move || {
            // Prevents it from being opened meanwhile.
            let image_lock = server.image_lock(&name);
            let _opening = image_lock.lock();
            let open = server.state.lock().open.get(&name).cloned();
            let broken = match &open {
                Some(image) => image.break_lease(&how),
                // Opening it may be impossible, which may be why the lease is stuck.
                None => {
                    let directory = changes::directory(&server.config.state, &name);
                    LeaseTable::open(name.clone(), directory)?.break_lease(&how)
                }
            }?;
            if let Some((holder, _)) = broken.clone() {
                let broken = Happened::LeaseBroken { holder, why };
                server.config.images.happened(&name, &broken);
            }
            Ok((broken, open))
        });
        let (broken, image) = broken.await?;
        let Some((holder, loss)) = broken else {
            return Ok(None);
        };
        self.counters.lease_broken();
        let key = (PeerKey(holder.peer), holder.mount);
        self.config.absences.forget(&key);
        let connections = {
            let state = self.state.lock();
            state
                .mounts
                .get(&key)
                .map(|m| m.connections.clone())
                .unwrap_or_default()
        };
        for connection in connections {
            let message = loss.message(connection.image.name().as_str());
            let refusal = Refusal::new(Code::Lost, message);
            connection.end(refusal).await;
        }
        // An image that is not open drops what was staged when it is opened for the next writer.
        if let Some(image) = image {
            blocking(move || image.abandon_unheld()).await?;
        }
        Ok(Some(holder))
    }
}

/// The lease holder of an image as recorded in a site's state (see [`super::Config::state`]): works without a running
/// server.
///
/// # Errors
/// [`MountError::Refused`] when it is damaged, [`MountError::StateFile`] when it cannot be read.
pub fn lease_on_disk(state: &Path, name: &ImageName) -> Result<Option<Holder>, MountError> {
    let directory = changes::directory(state, name);
    match LeaseTable::open(name.clone(), directory.clone()) {
        Ok(leases) => Ok(leases.holder().cloned()),
        // The refusal names the way out.
        Err(refusal) if refusal.code == Code::Corrupt => Err(MountError::Refused(refusal)),
        Err(refusal) => Err(MountError::state(&directory, refusal.message)),
    }
}
