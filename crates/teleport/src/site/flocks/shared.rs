//! Flocks that several nodes of a site receive: one record for all of them, in a directory beside the work directories of the nodes.
//! It is read again and changed while its name is locked among the nodes. A new version is written in the node's own directory, and
//! moved from there: one that was taken for dead has none, and so changes no record.
//!
//! An atomic flock is received by one node, whose work directory has its record.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::ImageName;
use drover_index::ImageId;
use drover_storage::{make_private_dir, sync_parent};

use crate::TeleportError;
use crate::flock::live::Flock;
use crate::flock::record::{FlockRecord, FlockState, ImageState, flocks_dir, read_all, read_one};
use crate::site::Site;
use crate::site::nodes::{Changing, TAKING};

/// The directory of what all nodes share, beside their work directories.
const SHARED: &str = "shared";

impl Site {
    /// The directory of the records of flocks that all nodes receive, if there may be other nodes.
    fn shared_flocks(&self) -> Option<PathBuf> {
        let shared = self.config.shared.as_ref()?;
        Some(flocks_dir(&shared.work_dirs.join(SHARED)))
    }

    /// Where the record of a flock is.
    pub(super) fn flock_path(&self, key: &str, atomic: bool) -> PathBuf {
        let own = || flocks_dir(&self.config.work_dir);
        let dir = match atomic {
            true => own(),
            false => self.shared_flocks().unwrap_or_else(own),
        };
        dir.join(key)
    }

    /// Writes the record of a flock, durably.
    pub(super) fn save_flock(&self, key: &str, record: &FlockRecord) -> Result<(), TeleportError> {
        let path = self.flock_path(key, record.atomic);
        let dir = path.parent().unwrap_or(Path::new("."));
        make_private_dir(dir).map_err(TeleportError::file("create", dir))?;
        let Some(shared) = self.shared_flocks() else {
            return record.save(&path);
        };
        match record.atomic {
            true => record.save(&path)?,
            false => {
                let new = self
                    .config
                    .work_dir
                    .join(TAKING)
                    .join(format!("flock-{key}"));
                record.save(&new)?;
                let failed = TeleportError::file("rename", &new);
                std::fs::rename(&new, &path).map_err(failed)?;
                sync_parent(&path).map_err(TeleportError::file("sync", &shared))?;
            }
        }
        // It may have been sent the other way before.
        let _ = std::fs::remove_file(self.flock_path(key, !record.atomic));
        Ok(())
    }

    /// Locks the record of a flock among the nodes, if they share it, and reads it again.
    pub(super) fn lock_flock(
        &self,
        key: &str,
        atomic: bool,
    ) -> Result<Option<Changing<'_>>, TeleportError> {
        if atomic || self.config.shared.is_none() {
            return Ok(None);
        }
        let name = ImageName::new(format!("flock {key}"));
        let name = name.map_err(|e| TeleportError::Failed(e.to_string()))?;
        let changing = self.lock_among(&self.flocks.changing, &name, false)?;
        if let Some(record) = read_one(&self.flock_path(key, false))? {
            self.learn_flock(&mut self.flocks.known.lock(), key, record);
        }
        Ok(Some(changing))
    }

    /// Reads the records that other nodes may have changed.
    pub(in crate::site) fn reread_flocks(&self) -> Result<(), TeleportError> {
        let Some(dir) = self.shared_flocks() else {
            return Ok(());
        };
        // Until all are learned: what another thread writes meanwhile is not put back.
        let mut known = self.flocks.known.lock();
        let (found, _) = read_all(dir.parent().unwrap_or(&dir))?;
        let mut there = HashSet::new();
        for (path, record) in found {
            if let Some(key) = path.file_name().and_then(|name| name.to_str()) {
                there.insert(key.to_owned());
                self.learn_flock(&mut known, key, record);
            }
        }
        let mut live = self.flocks.live.write();
        known.retain(|key, record| {
            let stays = record.atomic || there.contains(key);
            if !stays {
                live.retain(|flock| flock.key != *key);
            }
            stays
        });
        Ok(())
    }

    /// What the record of a flock says that another node may have changed.
    fn learn_flock(
        &self,
        known: &mut HashMap<String, FlockRecord>,
        key: &str,
        record: FlockRecord,
    ) {
        let mut live = self.flocks.live.write();
        let flock = live.iter().find(|f| f.key == key && f.id == record.id);
        match (flock, record.state) {
            (Some(flock), FlockState::Open) => {
                let came = record.images.iter().map(|image| ImageId(image.image));
                let new = came.filter(|id| id.0 != 0 && !flock.has(*id));
                new.for_each(|id| flock.begin(id));
            }
            (None, FlockState::Open) => {
                live.retain(|flock| flock.key != key);
                live.push(Flock::new(key, &record));
            }
            _ => {
                live.retain(|flock| flock.key != key);
                self.elsewhere.hints.lock().forget(&record.id);
            }
        }
        known.insert(key.into(), record);
    }

    /// The name of this node, if there may be others.
    pub(super) fn node_name(&self) -> Option<String> {
        Some(self.config.shared.as_ref()?.others.name())
    }

    /// How many images of a flock other nodes receive now.
    pub(super) fn received_elsewhere(&self, record: &FlockRecord) -> u32 {
        let Some(shared) = self.config.shared.as_ref().filter(|_| !record.atomic) else {
            return 0;
        };
        let own = shared.others.name();
        let waiting = record.images.iter().zip(0u32..).filter(|(image, nth)| {
            let node = record.nodes.get(nth);
            image.state == ImageState::Waiting && node.is_some_and(|node| *node != own)
        });
        let waiting: Vec<_> = waiting.map(|(image, _)| image.name.as_str()).collect();
        if waiting.is_empty() || record.state != FlockState::Open {
            return 0;
        }
        let receiving = shared.others.receiving();
        let is_received = |name: &&&str| receiving.iter().any(|r| r == **name);
        u32::try_from(waiting.iter().filter(is_received).count()).unwrap_or(u32::MAX)
    }

    /// The flock of that number, which another node may have begun to receive.
    pub(super) fn flock_from_others(
        &self,
        peer: &drover_net::PeerKey,
        id: &[u8; 16],
    ) -> Option<Arc<Flock>> {
        self.shared_flocks()?;
        if let Err(e) = self.reread_flocks() {
            tracing::warn!("the flocks of other nodes are not known: {e}");
        }
        self.flocks.find(peer, id)
    }
}
