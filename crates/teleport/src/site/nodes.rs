//! Nodes of a site that share its catalog and the directory of its images: what one must not do while another does, and what
//! one takes over from another.
//!
//! Each node assembles images in a directory of its own, named by its token, below [`Shared::work_dirs`](crate::Shared::work_dirs). A transfer is taken over
//! by moving it from there; whatever the node that had it still does by name fails then. What a node that was taken for dead may
//! still write through open files goes to files that nobody uses any more, because what is not complete is copied first.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::Code;
use drover_storage::{make_private_dir, sync_parent};
use drover_store::naming::REPLACED;
use parking_lot::{Mutex, MutexGuard};

use super::Site;
use super::arrived::Arrived;
use crate::TeleportError;
use crate::files::{copy_spans, data_spans, remove_dir};
use crate::log::is_closed;
use crate::others::{ASK_EVERY, FENCED, NotHeld, Others};
use crate::teleporter::ImageEvent;
use crate::transfer::{BOOTS, PROFILE, inspect};
use crate::transfers::{TransferState, Unfinished, is_key, is_removed, look};

/// Directory of transfers in a work directory.
const TRANSFERS: &str = "transfers";

/// Where a transfer is copied to before it is this node's; removed when the site is opened.
pub(super) const TAKING: &str = "taking";

/// Where what is removed from beside other nodes is moved before it is deleted.
const REMOVED: &str = "removed";

/// How long a change of an image waits until another node has ended its own.
const CHANGE_WAIT: Duration = Duration::from_secs(10);

/// The records of images, locked here and among the nodes.
pub(crate) struct Changing<'a> {
    here: Option<MutexGuard<'a, ()>>,
    among: Option<(Arc<dyn Others>, ImageName)>,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if let Some((others, name)) = &self.among {
            others.unlock(name);
        }
        // Last: whoever is next here holds it among the nodes again.
        drop(self.here.take());
    }
}

/// The refusal for what another node keeps.
fn refused(name: &ImageName, why: NotHeld) -> TeleportError {
    match why {
        NotHeld::Wait(node) | NotHeld::Taken(node) => TeleportError::refused(
            Code::Unavailable,
            format!("{name} is being changed by the node {node}; try again"),
        ),
        NotHeld::Refused(refusal) => TeleportError::Refused(refusal),
    }
}

impl Site {
    fn others(&self) -> Option<&Arc<dyn Others>> {
        self.config.shared.as_ref().map(|shared| &shared.others)
    }

    /// Whether sessions may begin.
    pub(crate) fn may_begin(&self) -> bool {
        self.others().is_none_or(|others| others.may_begin())
    }

    /// Ends all sessions, as if their connections had broken: their sources come again, here or at another node.
    pub fn end_sessions(&self) {
        for session in self.sessions.lock().values() {
            session.halt.send_replace(true);
        }
    }

    /// Locks the records of images, here and, that of this name, among the nodes; reads that one again then.
    pub(super) fn lock_record(
        &self,
        name: &ImageName,
        goes: bool,
    ) -> Result<Changing<'_>, TeleportError> {
        let changing = self.lock_among(&self.changing, name, goes)?;
        if self.others().is_some() {
            self.images.reread(name)?;
        }
        Ok(changing)
    }

    /// Locks `lock` here, and this name among the nodes, if there may be others.
    pub(super) fn lock_among<'a>(
        &'a self,
        lock: &'a Mutex<()>,
        name: &ImageName,
        goes: bool,
    ) -> Result<Changing<'a>, TeleportError> {
        let Some(others) = self.others() else {
            let here = Some(lock.lock());
            return Ok(Changing { here, among: None });
        };
        let until = Instant::now() + CHANGE_WAIT;
        // Not held meanwhile: another may wait for what is locked here.
        loop {
            let here = lock.lock();
            match others.lock(name, goes) {
                Ok(()) => {
                    let among = Some((Arc::clone(others), name.clone()));
                    let here = Some(here);
                    return Ok(Changing { here, among });
                }
                Err(NotHeld::Wait(_)) if Instant::now() < until => drop(here),
                Err(why) => return Err(refused(name, why)),
            }
            std::thread::sleep(ASK_EVERY);
        }
    }

    /// Removes the file of an image. Among nodes it is first moved away to this node's own directory: one that was taken for dead
    /// has none, and so removes no later image of that name.
    pub(super) fn remove_file_of(&self, path: &Path, image: u64) -> io::Result<()> {
        if self.config.shared.is_none() {
            return fs::remove_file(path);
        }
        let aside = self.config.work_dir.join(REMOVED).join(image.to_string());
        fs::rename(path, &aside)?;
        fs::remove_file(aside)
    }

    /// Creates the directories that only a start creates, and clears them.
    pub(super) fn prepare_shared(config: &super::SiteConfig) -> Result<(), TeleportError> {
        if config.shared.is_none() {
            return Ok(());
        }
        for name in [TAKING, REMOVED] {
            let dir = config.work_dir.join(name);
            remove_dir(&dir);
            make_private_dir(&dir).map_err(TeleportError::file("create", &dir))?;
        }
        Ok(())
    }

    /// Learns what other nodes have changed in the catalog. Blocks.
    ///
    /// # Errors
    /// When the catalog cannot be read.
    pub fn refresh(&self) -> Result<(), TeleportError> {
        let (gone, new) = self.images.refresh()?;
        for id in &gone {
            self.sequences.drop_image(*id);
            self.tell(*id, ImageEvent::Forget);
        }
        if !gone.is_empty() {
            self.images_went.store(true, Ordering::Relaxed);
            self.wake_copier();
        }
        for id in &new {
            // What this node had of it before another delivered it.
            self.partials.remove(*id);
        }
        if !new.is_empty() {
            self.matcher_is_behind();
        }
        Ok(())
    }

    /// Takes over a transfer that another node has stopped working at, if there is one. The caller holds its name.
    pub(crate) fn fetch_transfer(&self, key: &str) -> Result<(), TeleportError> {
        let Some(shared) = &self.config.shared else {
            return Ok(());
        };
        if self.transfer_dir(key).exists() {
            return Ok(());
        }
        for node in fs::read_dir(&shared.work_dirs)
            .into_iter()
            .flatten()
            .flatten()
        {
            let there = node.path().join(TRANSFERS).join(key);
            if node.path() == self.config.work_dir || !there.is_dir() {
                continue;
            }
            match self.take(&there, key) {
                Ok(()) => {
                    tracing::info!(from = %there.display(), "a transfer goes on at this node");
                    return Ok(());
                }
                // Somebody else has it, or its node removes it.
                Err(e) => tracing::warn!(from = %there.display(), "cannot be taken over: {e}"),
            }
        }
        Ok(())
    }

    /// Makes the transfer in the directory `from` this node's own.
    fn take(&self, from: &Path, key: &str) -> io::Result<()> {
        let own = self.transfer_dir(key);
        if let Some(transfers) = own.parent() {
            make_private_dir(transfers)?;
        }
        let node = from.ancestors().nth(2).and_then(Path::extension);
        if node.is_none_or(|extension| extension != FENCED) {
            // Its node let go of it.
            fs::rename(from, &own)?;
            return sync_parent(&own);
        }
        let new = self.config.work_dir.join(TAKING).join(key);
        remove_dir(&new);
        make_private_dir(&new)?;
        copy_files(from, &new, copy)?;
        fs::rename(&new, &own)?;
        sync_parent(&own)?;
        // If this fails, it is done before the image gets its name.
        if let Err(e) = self.remove_copied(from) {
            tracing::warn!(path = %from.display(), error = %e, "cannot remove");
        }
        Ok(())
    }

    /// Removes what the transfer in `own` was copied from, if that was cut off: somebody would deliver it again. It is gone by
    /// its name when this returns, also after a crash.
    pub(super) fn remove_taken(&self, own: &Path) -> Result<(), TeleportError> {
        let (Some(shared), Some(key)) = (&self.config.shared, own.file_name()) else {
            return Ok(());
        };
        for node in fenced(&shared.work_dirs) {
            let from = node.join(TRANSFERS).join(key);
            if from.is_dir() {
                let failed = TeleportError::file("remove", &from);
                self.remove_copied(&from).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Removes the directory of a transfer at another node. It is first moved to this node's own, which fails if this one was taken
    /// for dead: then it may be a later transfer.
    fn remove_copied(&self, from: &Path) -> io::Result<()> {
        let Some(key) = from.file_name() else {
            return Ok(());
        };
        let aside = self.config.work_dir.join(REMOVED).join(key);
        remove_dir(&aside);
        if let Err(e) = fs::rename(from, &aside) {
            // Unless somebody else has done it.
            return if from.exists() { Err(e) } else { Ok(()) };
        }
        sync_parent(from)?;
        remove_dir(&aside);
        Ok(())
    }

    /// Takes over what was complete, or had its name already, at nodes that were taken for dead: it is delivered. Returns what was
    /// done, one line each. Blocks.
    ///
    /// # Errors
    /// When a directory cannot be listed.
    pub fn take_over(&self) -> Result<Vec<String>, TeleportError> {
        let mut done = Vec::new();
        let Some(shared) = &self.config.shared else {
            return Ok(done);
        };
        for node in fenced(&shared.work_dirs) {
            let transfers = node.join(TRANSFERS);
            for entry in fs::read_dir(&transfers).into_iter().flatten().flatten() {
                let from = entry.path();
                let key = entry.file_name();
                let Some(key) = key.to_str().filter(|key| is_key(key)) else {
                    if is_removed(&from) {
                        remove_dir(&from);
                    }
                    continue;
                };
                if is_closed(&from.join("log"))
                    && let Err(e) = self.take_whole(&from, key, &mut done)
                {
                    tracing::warn!(from = %from.display(), "cannot be delivered now: {e}");
                }
            }
        }
        Ok(done)
    }

    /// Removes transfers of nodes that were taken for dead, and the directories of those that have none left; returns them.
    pub(super) fn expire_of_others(
        &self,
        expired: impl Fn(&Unfinished) -> bool,
    ) -> Vec<Unfinished> {
        let mut out = Vec::new();
        let Some(shared) = &self.config.shared else {
            return out;
        };
        for node in fenced(&shared.work_dirs) {
            let transfers = node.join(TRANSFERS);
            for entry in fs::read_dir(&transfers).into_iter().flatten().flatten() {
                let Some(old) = look(&entry.path()).filter(|old| expired(old)) else {
                    continue;
                };
                let Ok(name) = ImageName::new(old.name.as_str()) else {
                    continue;
                };
                let number = self.active.number();
                // Its source may be at another node already.
                if old.state == TransferState::Stopped
                    && let Ok(_hold) = self.active.take(&name, &old.key, number, ASK_EVERY)
                {
                    remove_dir(&entry.path());
                    out.push(old);
                }
            }
            // What else is there belongs to the node, if it comes back.
            if fs::remove_dir(&transfers).is_ok() {
                remove_dir(&node.join("flocks"));
            }
            let _ = fs::remove_dir(&node);
        }
        out
    }

    fn take_whole(
        &self,
        from: &Path,
        key: &str,
        done: &mut Vec<String>,
    ) -> Result<(), TeleportError> {
        let Some(Ok(there)) = inspect(from)?.map(Arrived::of) else {
            return Ok(());
        };
        let name = &there.opening.offer.name;
        let number = self.active.number();
        // Its source may be at another node already.
        let Ok(_hold) = self.active.take(name, key, number, ASK_EVERY) else {
            return Ok(());
        };
        if self.transfer_dir(key).exists() || !from.exists() {
            return Ok(());
        }
        let failed = TeleportError::file("take over", from);
        self.take(from, key).map_err(failed)?;
        if let Some(Ok(arrived)) = inspect(&self.transfer_dir(key))?.map(Arrived::of) {
            self.recover(vec![arrived], done);
        }
        Ok(())
    }
}

/// The work directories of nodes that were taken for dead.
fn fenced(work_dirs: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let nodes = fs::read_dir(work_dirs).into_iter().flatten().flatten();
    let paths = nodes.map(|node| node.path());
    paths.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == FENCED)
    })
}

/// Copies the transfer of a node that was taken for dead, and may still write to files that it has open. Durable on return, except
/// for the name of `new`.
pub(super) fn copy_files(
    from: &Path,
    new: &Path,
    copy: impl Fn(&Path, &Path) -> io::Result<()>,
) -> io::Result<()> {
    // The log first: a node writes to the partial file before it logs that this is complete.
    let log = new.join("log");
    copy(&from.join("log"), &log)?;
    let part = from.join("image.part");
    if part.exists() {
        let to = new.join("image.part");
        // A log that is closed says that the file is not written any more.
        match is_closed(&log) {
            true => fs::hard_link(&part, &to)?,
            false => copy(&part, &to)?,
        }
    }
    // None is ever written to: the file that gets its name back if a rename is undone, and the profiles.
    for name in [REPLACED, PROFILE, BOOTS] {
        match fs::hard_link(from.join(name), new.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    sync_parent(&log)
}

/// Copies a file, holes left out; durable on return.
pub(super) fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (File::open(from)?, File::create_new(to)?);
    let len = from.metadata()?.len();
    to.set_len(len)?;
    let spans = data_spans(&from, len)?;
    copy_spans(&from, &spans, &to, &spans)?;
    to.sync_all()
}
