//! The disk of a program that moves: its state, what is written to it, and when it does not change any more.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use drover_core::{DeviceError, ImageName};
use drover_teleport::SendItem;
use tokio::sync::Mutex;

use super::disks::{item, whole};
use super::report::MoveOptions;
use crate::disks::DiskWriter;
use crate::error::MigrateError;
use crate::hooks::Hooks;
use crate::movable::{Frozen, Movable};
use crate::protocol::DiskOffer;

/// A device that moves.
pub struct Device {
    /// None where no process serves it any more.
    movable: Option<Arc<Movable>>,
    hooks: Arc<dyn Hooks>,
    image: ImageName,
    scratch: PathBuf,
    /// Whether the hooks have paused its program.
    paused: bool,
    work: Work,
}

/// Held by what waits for the disk or for a hook, also after whoever wanted it has given up: nothing is undone before that
/// has ended, and then all of it is.
type Work = Arc<Mutex<Option<Frozen>>>;

impl Device {
    pub(super) fn new(
        movable: Option<Arc<Movable>>,
        hooks: Arc<dyn Hooks>,
        options: &MoveOptions,
    ) -> Device {
        Device {
            movable,
            hooks,
            image: options.name_there.clone(),
            scratch: options.scratch.clone(),
            paused: false,
            work: Work::default(),
        }
    }

    fn movable(&self) -> Result<Arc<Movable>, MigrateError> {
        self.movable.clone().ok_or(MigrateError::Stopped)
    }

    pub(super) fn offers(&self) -> Vec<DiskOffer> {
        let offer = |movable: &Arc<Movable>| DiskOffer {
            image: self.image.clone(),
            device: String::new(),
            size: movable.size(),
            read_only: false,
        };
        self.movable.iter().map(offer).collect()
    }

    /// Holds its state as of now: an image to be sent.
    pub(super) async fn hold(&mut self) -> Result<Vec<SendItem>, MigrateError> {
        let (movable, scratch) = (self.movable()?, self.scratch.clone());
        let name = self.image.clone();
        let image = self.blocking(move |_, is_given_up| {
            let held = movable.begin(&scratch, is_given_up);
            let held = held.map_err(|error| of_disk(&name, error))?;
            whole(Arc::new(held), name.as_str())
        });
        Ok(vec![item(self.image.clone(), image.await?)])
    }

    pub(super) fn release(&self) {
        self.movable.iter().for_each(|movable| movable.release());
    }

    /// Sends what was written since the last round; bytes.
    pub(super) async fn send_round(
        &mut self,
        writer: &mut DiskWriter,
    ) -> Result<u64, MigrateError> {
        let movable = self.movable()?;
        let dirty = movable.written();
        let ranges: Vec<Range<u64>> = dirty.runs().collect();
        if !ranges.is_empty() {
            writer.send(0, movable.below(), ranges).await?;
        }
        writer.flush().await?;
        Ok(dirty.bytes())
    }

    pub(super) async fn pause(&mut self) -> Result<(), MigrateError> {
        self.paused = true;
        let hooks = Arc::clone(&self.hooks);
        let paused = self.blocking(move |_, is_given_up| {
            let paused = hooks.pause(is_given_up);
            paused.map_err(|why| MigrateError::Hook {
                what: "paused",
                why,
            })
        });
        paused.await
    }

    /// From when this returns it does not change any more.
    pub(super) async fn freeze(&mut self) -> Result<(), MigrateError> {
        let movable = self.movable()?;
        let name = self.image.clone();
        let froze = self.blocking(move |frozen, is_given_up| {
            let froze = movable.freeze(is_given_up);
            *frozen = Some(froze.map_err(|error| of_disk(&name, error))?);
            Ok(())
        });
        froze.await
    }

    /// It stays: it can be used as before. Why its program does not go on, if it does not.
    pub(super) async fn stay(&mut self, was_committed: bool) -> Option<String> {
        // What still reads the held state fails soon.
        self.release();
        let frozen = self.work.lock().await.take();
        self.movable.iter().for_each(|movable| movable.end());
        if let Some(frozen) = frozen {
            frozen.thaw();
        }
        if !std::mem::take(&mut self.paused) && !was_committed {
            return None;
        }
        let hooks = Arc::clone(&self.hooks);
        let resumed = self.blocking(move |_, _| Ok(hooks.resume()));
        resumed.await.ok()?.err()
    }

    /// Whether its requests wait. Only asked when nothing is under way.
    pub(super) fn is_frozen(&self) -> bool {
        self.work.try_lock().is_ok_and(|frozen| frozen.is_some())
    }

    /// It has gone: nothing answers here any more.
    pub(super) async fn gone(&mut self) {
        let frozen = self.work.lock().await.take();
        self.movable.iter().for_each(|movable| movable.end());
        drop(frozen);
    }

    /// Does something that waits, and that is told whether it was given up.
    async fn blocking<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut Option<Frozen>, &dyn Fn() -> bool) -> Result<T, MigrateError>
        + Send
        + 'static,
    ) -> Result<T, MigrateError> {
        let mut work = Arc::clone(&self.work).lock_owned().await;
        let wanted = Arc::new(());
        let known = Arc::downgrade(&wanted);
        let done =
            tokio::task::spawn_blocking(move || what(&mut work, &|| known.strong_count() == 0));
        let done = done.await.map_err(|_| MigrateError::Stopped)?;
        drop(wanted);
        done
    }
}

fn of_disk(name: &ImageName, error: DeviceError) -> MigrateError {
    MigrateError::Disk {
        disk: name.to_string(),
        error,
    }
}

#[cfg(test)]
mod tests;
