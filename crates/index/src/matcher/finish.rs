//! Finishing an image in steps, so that the lock of a shared matcher need not be held during disk syncs.

use std::sync::Arc;

use drover_storage::Access;

use super::{Cursor, ImageId, IndexError, Matcher, Result, names};
use crate::hash_file::DeferredSync;
use crate::hash_file::unlink_files;
use crate::recent::Slot;

/// An image that is being finished, from [`Matcher::begin_finish`].
#[must_use = "the image is not finished"]
pub struct Finishing {
    cursor: Cursor,
    syncs: Vec<DeferredSync>,
    failed: Option<std::io::Error>,
}

impl Finishing {
    /// Syncs the output of the previous step. Needs no access to the matcher, and may take long. The next step
    /// returns any error.
    pub fn sync(&mut self) {
        for sync in self.syncs.drain(..) {
            if self.failed.is_none() {
                self.failed = sync().err();
            }
        }
    }

    fn check(&mut self) -> Result<()> {
        // In case the caller skipped the sync.
        self.sync();
        match self.failed.take() {
            Some(e) => Err(finishing(self.cursor.image)(e)),
            None => Ok(()),
        }
    }
}

fn finishing(image: ImageId) -> impl FnOnce(std::io::Error) -> IndexError {
    IndexError::io("finishing", names(image.0).0)
}

impl Matcher {
    /// Completes the image and makes its hash file durable.
    ///
    /// # Errors
    /// Storage errors; then the image is not in the index.
    pub fn finish(&mut self, cursor: Cursor) -> Result<()> {
        let mut finishing = self.begin_finish(cursor)?;
        finishing.sync();
        self.mark_complete(&mut finishing)?;
        finishing.sync();
        self.end_finish(finishing)
    }

    /// The first step of [`finish`](Self::finish): writes what is still in memory. [`Finishing::sync`],
    /// [`mark_complete`](Self::mark_complete), [`Finishing::sync`] and [`end_finish`](Self::end_finish) must follow.
    /// The matcher may be used in between.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn begin_finish(&mut self, cursor: Cursor) -> Result<Finishing> {
        let names = self.names_sync();
        match self.open_slot(&cursor)?.file.write_out() {
            Ok([hash, side]) => Ok(Finishing {
                cursor,
                syncs: vec![names, hash, side],
                failed: None,
            }),
            Err(e) => {
                let failed = finishing(cursor.image)(e);
                self.abort(cursor);
                Err(failed)
            }
        }
    }

    /// The second step: marks the hash file as complete.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn mark_complete(&mut self, ending: &mut Finishing) -> Result<()> {
        let slot = self.open_slot(&ending.cursor)?;
        let marked = ending.check().and_then(|()| {
            let marked = slot.file.mark_complete();
            marked.map_err(finishing(ending.cursor.image))
        });
        slot.open = false;
        match marked {
            Ok(sync) => {
                ending.syncs.push(sync);
                Ok(())
            }
            Err(e) => {
                let _ = self.forget(ending.cursor.image);
                Err(e)
            }
        }
    }

    /// The last step.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn end_finish(&mut self, mut ending: Finishing) -> Result<()> {
        let synced = ending.check();
        let (image, serial) = (ending.cursor.image, ending.cursor.serial);
        let slot = self.recent.slot_of(image).and_then(|s| self.recent.slot(s));
        // The image may have been forgotten and begun again in the meantime.
        if synced.is_err() && slot.is_some_and(|s| s.file.header().serial == serial) {
            let _ = self.forget(image);
        }
        synced
    }

    /// Like [`abort`](Self::abort), but the disk space is freed when the returned value is dropped, which needs no
    /// access to the matcher.
    pub fn begin_abort(&mut self, cursor: Cursor) -> Option<DeferredSync> {
        // Files that cannot be removed now are incomplete, and are deleted when the index is next opened.
        self.begin_forget(cursor.image).ok().flatten()
    }

    /// Syncs the directory.
    fn names_sync(&self) -> DeferredSync {
        let storage = Arc::clone(&self.storage);
        Box::new(move || storage.sync())
    }

    /// The slot of an image that is still open.
    fn open_slot(&mut self, cursor: &Cursor) -> Result<&mut Slot> {
        self.recent
            .slot_mut(cursor.slot)
            .filter(|s| s.open && s.image == cursor.image)
            .filter(|s| s.file.header().serial == cursor.serial)
            .ok_or(IndexError::BadBatch("the cursor's image was forgotten"))
    }

    /// Like [`forget`](Self::forget), but the removal is durable only after the returned sync has run. The sync needs
    /// no access to the matcher and holds the hash file open: its disk space is freed when the sync is run or
    /// dropped.
    ///
    /// # Errors
    /// As [`forget`](Self::forget).
    pub fn begin_forget(&mut self, image: ImageId) -> Result<Option<DeferredSync>> {
        let slot = self.recent.slot_of(image);
        let was_older = self.older.remove(&image).is_some();
        let open = slot.and_then(|slot| self.release(slot));
        let unused = match open.is_none() && was_older {
            true => self.storage.open(&names(image.0).0, Access::Write).ok(),
            false => None,
        };
        if open.is_none() && !was_older {
            return Ok(None);
        }
        unlink_files(self.storage.as_ref(), image.0)
            .map_err(IndexError::io("removing", names(image.0).0))?;
        let removed = self.names_sync();
        Ok(Some(Box::new(move || {
            drop((open, unused));
            removed()
        })))
    }
}
