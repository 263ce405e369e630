//! Opening an overlay, with recovery after a crash.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drover_core::{BlockDevice, Digest};
use parking_lot::{Mutex, RwLock};

use super::redo::{OpenedRedo, Redo, RedoOf, epoch_of};
use super::states::Logged;
use super::{
    DATA, Identity, LOCK, MAX_NAME, MAX_SIZE, Options, Overlay, OverlayError, Ranges, STATES,
    Saving, Settling, Staging,
};
use drover_storage::chunk_log::{ChunkLog, ChunkLogError};
use drover_storage::{Access, Directory, Lock};

impl Overlay {
    /// Opens the overlay in `directory`, or creates one. A sealed epoch is committed, and is copied now if possible;
    /// what survives of a staged one stays staged.
    ///
    /// # Errors
    /// [`OverlayError`]. Nothing was changed then; files damaged beyond a torn tail are left as they are.
    pub fn open(
        directory: Arc<dyn Directory>,
        base: Arc<dyn BlockDevice>,
        identity: Identity,
        options: Options,
    ) -> Result<Self, OverlayError> {
        let identity = fit(base.as_ref(), identity)?;
        let lock = match options.read_only {
            true => Lock::Shared,
            false => Lock::Exclusive,
        };
        let lock = directory
            .lock(LOCK, lock)
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => OverlayError::Busy {
                    directory: directory.describe(""),
                },
                _ => OverlayError::io("lock", &directory.describe(LOCK))(error),
            })?;
        if !options.read_only {
            // Epochs of a discarded overlay must not be adopted by this one.
            super::aside::forget(directory.as_ref())?;
        }
        let opened = match ChunkLog::open(Arc::clone(&directory), STATES) {
            Err(error) if error.is_missing() => match options.read_only {
                true => Err(OverlayError::Missing {
                    directory: directory.describe(""),
                }),
                false => Ok(None),
            },
            Err(error) => Err(error.into()),
            Ok(opened) => Ok(Some(opened)),
        }?;
        let (log, logged, identity) = match opened {
            None => (
                Some(create(&directory, &identity)?),
                Logged::default(),
                identity,
            ),
            Some(opened) => {
                let identity = same(directory.as_ref(), opened.header(), identity)?;
                let mut logged = Logged::default();
                let each = |record| logged.take(record, identity.size);
                let log = match options.read_only {
                    true => opened.read(each).map(|()| None)?,
                    false => Some(opened.replay(each)?),
                };
                (log, logged, identity)
            }
        };
        let access = match options.read_only {
            true => Access::Read,
            false => Access::Write,
        };
        let said = directory.describe(DATA);
        let data = match directory.open(DATA, access) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(OverlayError::Damaged {
                    file: said,
                    what: "it is not there",
                });
            }
            result => result.map_err(OverlayError::io("open", &said))?,
        };
        if data.len().map_err(OverlayError::io("read", &said))? != identity.size {
            return Err(OverlayError::Damaged {
                file: said,
                what: "it has not the length of the device",
            });
        }
        let overlay = Self {
            base,
            data,
            size: identity.size,
            identity,
            options,
            staging: Mutex::new(Staging::default()),
            settling: Mutex::new(Settling::default()),
            plain: RwLock::new(()),
            saving: Mutex::new(Saving { log }),
            ranges: Ranges::default(),
            sealed: RwLock::new(None),
            states: RwLock::new(logged.states),
            committed: AtomicU64::new(logged.epoch),
            staged: AtomicBool::new(false),
            unsettled: AtomicBool::new(false),
            unflushed: AtomicBool::new(false),
            marked: AtomicBool::new(logged.marked),
            broken: RwLock::new(None),
            directory,
            _lock: lock,
        };
        overlay.find_redo()?;
        if !options.read_only {
            overlay.go_on(logged.marked)?;
        }
        Ok(overlay)
    }

    /// Loads the sealed and the staged redo file, if they exist; removes the others.
    fn find_redo(&self) -> Result<(), OverlayError> {
        let names = self
            .directory
            .list()
            .map_err(self.io("list the files of", ""))?;
        let committed = self.committed();
        let mut sealed_epoch = committed;
        let mut staged: Option<Redo> = None;
        let mut useless = Vec::new();
        for name in names {
            let Some(epoch) = epoch_of(&name) else {
                continue;
            };
            if epoch <= committed {
                // Committed and copied already.
                useless.push(name);
                continue;
            }
            let access = match self.options.read_only {
                true => Access::Read,
                false => Access::Write,
            };
            match Redo::open(self.directory.as_ref(), epoch, self.redo_of(), access)? {
                OpenedRedo::Sealed(redo) => {
                    // An epoch is copied before another can be sealed.
                    if sealed_epoch > committed {
                        return Err(OverlayError::Damaged {
                            file: self.directory.describe(STATES),
                            what: "two epochs were committed and neither was copied",
                        });
                    }
                    sealed_epoch = epoch;
                    *self.sealed.write() = Some(Arc::new(redo));
                    self.unsettled.store(true, Ordering::Release);
                }
                OpenedRedo::Staged(redo) => {
                    let earlier = match &staged {
                        Some(other) if other.epoch > epoch => Some(redo),
                        _ => staged.replace(redo),
                    };
                    useless.extend(earlier.map(|redo| redo.name));
                }
                OpenedRedo::Nothing => useless.push(name),
            }
        }
        if let Some(redo) = staged.take_if(|redo| redo.epoch <= sealed_epoch) {
            useless.push(redo.name);
        }
        if !self.options.read_only {
            for name in useless {
                self.directory
                    .remove(&name)
                    .map_err(self.io("remove", &name))?;
            }
        }
        if self.unsettled.load(Ordering::Acquire) {
            self.committed.store(sealed_epoch.0, Ordering::Release);
        }
        self.staged.store(staged.is_some(), Ordering::Release);
        self.staging.lock().redo = staged;
        Ok(())
    }

    pub(super) fn redo_of(&self) -> RedoOf<'_> {
        RedoOf {
            base: &self.identity.base,
            size: self.size,
            boot: self.options.boot,
        }
    }

    /// Completes what the last run left unfinished.
    fn go_on(&self, marked: bool) -> Result<(), OverlayError> {
        // Unflushed changes may or may not have survived, so the contents are not those of the last epoch.
        self.unflushed.store(marked, Ordering::Release);
        if self.unsettled.load(Ordering::Acquire)
            && let Err(error) = self.settle()
        {
            // It is committed, and is read from the redo file.
            tracing::warn!(%error, "a committed epoch is not copied into its overlay yet");
        }
        match self.unsettled.load(Ordering::Acquire) {
            true => Ok(()),
            false => self.save().and_then(|()| self.unmark()),
        }
    }
}

/// The identity, if the base matches it and is suitable.
fn fit(base: &dyn BlockDevice, mut identity: Identity) -> Result<Identity, OverlayError> {
    let unfit = |why: String| OverlayError::UnfitBase {
        name: identity.name.clone(),
        why,
    };
    if base.size() != identity.size {
        return Err(unfit(format!(
            "it has {} bytes, not {}",
            base.size(),
            identity.size
        )));
    }
    if identity.size > MAX_SIZE {
        return Err(unfit(format!("it has more than {MAX_SIZE} bytes")));
    }
    if base.capabilities().alignment != 1 {
        return Err(unfit("it takes only aligned requests".into()));
    }
    let mut end = identity.name.len().min(MAX_NAME);
    while !identity.name.is_char_boundary(end) {
        end -= 1;
    }
    identity.name.truncate(end);
    Ok(identity)
}

impl Identity {
    /// The header that the log stores for its caller.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.base.0.to_vec();
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(self.name.as_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (digest, rest) = bytes.split_first_chunk()?;
        let (size, name) = rest.split_first_chunk()?;
        Some(Self {
            base: Digest(*digest),
            size: u64::from_le_bytes(*size),
            name: String::from_utf8_lossy(name).into_owned(),
        })
    }
}

/// Creates the files. The log comes last: without it there is no overlay.
fn create(directory: &Arc<dyn Directory>, identity: &Identity) -> Result<ChunkLog, OverlayError> {
    let failed = OverlayError::io("create", &directory.describe(DATA));
    let data = directory.create(DATA).map_err(&failed)?;
    data.set_len(identity.size).map_err(&failed)?;
    data.sync().map_err(&failed)?;
    directory.sync().map_err(&failed)?;
    Ok(ChunkLog::create(
        Arc::clone(directory),
        STATES,
        &identity.encode(),
    )?)
}

/// The identity recorded at creation, if it is of the same image.
fn same(
    directory: &dyn Directory,
    header: &[u8],
    wanted: Identity,
) -> Result<Identity, OverlayError> {
    let Some(found) = Identity::decode(header) else {
        return Err(ChunkLogError::NotALog {
            file: directory.describe(STATES),
        }
        .into());
    };
    match found.base == wanted.base && found.size == wanted.size {
        true => Ok(found),
        false => Err(OverlayError::another_base(
            directory.describe(""),
            (&found.name, &found.base),
            (&wanted.name, &wanted.base),
        )),
    }
}
