//! Writers' leases: listed, replaced when damaged, broken.

use std::path::Path;
use std::sync::Arc;

use drover_core::ImageName;
use drover_net::{Code, PeerKey, Refusal};

use super::Server;
use super::blocking::blocking;
use crate::MountError;
use drover_store::lease::{self, Holder, LeaseTable};

/// An image that is mounted, or leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// Which image.
    pub image: String,
    /// Who may write it.
    pub holder: Option<Holder>,
    /// Mounts that are connected, by what their sites are called.
    pub connected: Vec<String>,
    /// Why the lease cannot be read.
    pub problem: Option<String>,
}

impl Server {
    /// The writers' leases of all images that were ever mounted, and who is connected. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::StateFile`] when the site's state cannot be read.
    pub fn leases(&self) -> Result<Vec<Leased>, MountError> {
        let directory = self.config.state.join("overlays");
        let mut names = std::collections::BTreeSet::new();
        names.extend(
            self.state
                .lock()
                .mounts
                .values()
                .map(|m| m.image.name().clone()),
        );
        match std::fs::read_dir(&directory) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(MountError::state(&directory, e.to_string())),
            Ok(entries) => {
                for entry in entries.flatten() {
                    let name = entry.file_name().into_string().ok();
                    names.extend(name.and_then(|name| ImageName::new(name).ok()));
                }
            }
        }
        let mut out = Vec::new();
        for name in names {
            match self.leased(&name) {
                Ok(leased) => out.extend(leased),
                // One that cannot be read hides none of the others.
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

    /// The mounts of an image that are connected, by what their sites are called.
    fn connected(&self, name: &ImageName) -> Vec<String> {
        let state = self.state.lock();
        let here = state.mounts.values().filter(|m| m.image.name() == name);
        here.map(|m| m.peer_name.clone()).collect()
    }

    /// Puts a new lease in the place of one whose file is damaged, which is kept beside it: no mount has the
    /// lease then, and the next one gets it. Says whether there was one. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: a disk that does not take it.
    pub fn replace_damaged_lease(&self, name: &ImageName) -> Result<bool, MountError> {
        // Keeps it from being opened meanwhile.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let directory = self.config.state.join("overlays").join(name.as_str());
        let open = self.state.lock().open.get(name).cloned();
        let Some(image) = open else {
            return LeaseTable::replace_damaged(&directory).map_err(MountError::Refused);
        };
        let is_damaged = lease_on_disk(&self.config.state, name).is_err();
        if is_damaged {
            // Who has it open knows what was in it.
            image.store_lease().map_err(MountError::Refused)?;
        }
        Ok(is_damaged)
    }

    /// Breaks the writer's lease of an image; `None` when there is none. The mount that held it is notified; what it has not
    /// written back stays in its cache.
    ///
    /// # Errors
    /// [`MountError::Refused`]: no such image, or a disk that does not take it.
    pub async fn break_lease(
        self: &Arc<Self>,
        name: &ImageName,
    ) -> Result<Option<Holder>, MountError> {
        let (server, name) = (self.clone(), name.clone());
        let broken = blocking(move || {
            // Keeps it from being opened meanwhile.
            let image_lock = server.image_lock(&name);
            let _opening = image_lock.lock();
            let open = server.state.lock().open.get(&name).cloned();
            let holder = match &open {
                Some(image) => image.break_lease(),
                // It need not be possible to open it: that may be why the lease is stuck.
                None => {
                    let directory = server.config.state.join("overlays").join(name.as_str());
                    LeaseTable::open(name, directory)?.break_lease()
                }
            };
            Ok((holder?, open))
        });
        let (holder, image) = broken.await.map_err(MountError::Refused)?;
        let Some(holder) = holder else {
            return Ok(None);
        };
        self.counters.lease_broken();
        let key = (PeerKey(holder.peer), holder.mount);
        let connections = {
            let state = self.state.lock();
            state
                .mounts
                .get(&key)
                .map(|m| m.connections.clone())
                .unwrap_or_default()
        };
        for connection in connections {
            let refusal = Refusal::new(Code::Lost, lease::broken(connection.image.name().as_str()));
            connection.end(refusal).await;
        }
        // An image that is not open forgets what was staged when it is opened for the next writer.
        if let Some(image) = image {
            blocking(move || image.abandon_unheld())
                .await
                .map_err(MountError::Refused)?;
        }
        Ok(Some(holder))
    }
}

/// Who may write an image, by what is written down in a site's state (see [`super::Config::state`]): also when no server runs.
///
/// # Errors
/// [`MountError::Refused`] when it is damaged, [`MountError::StateFile`] when it cannot be read.
pub fn lease_on_disk(state: &Path, name: &ImageName) -> Result<Option<Holder>, MountError> {
    let directory = state.join("overlays").join(name.as_str());
    match LeaseTable::open(name.clone(), directory.clone()) {
        Ok(leases) => Ok(leases.holder().cloned()),
        // It says how to go on.
        Err(refusal) if refusal.code == Code::Corrupt => Err(MountError::Refused(refusal)),
        Err(refusal) => Err(MountError::state(&directory, refusal.message)),
    }
}
