//! The records of images, as peers may change them: who may replace an image, with whom it is shared, and its removal.

use std::sync::atomic::Ordering;

use drover_core::ImageName;
use drover_net::{Code, PeerKey, Right, Rights};
use drover_store::{ImageRecord, MAX_SHARED};

use super::Site;
use super::nodes::Changing;
use crate::TeleportError;
use crate::teleporter::ImageEvent;

impl Site {
    /// Fails unless a peer may, as things are now, deliver an image in the place of `old`.
    pub(crate) fn check_sender(
        &self,
        peer: &PeerKey,
        old: Option<&ImageRecord>,
    ) -> Result<(), TeleportError> {
        let rights = match &self.rights {
            Some(rights) => rights(peer)
                .map_err(|refusal| TeleportError::refused(refusal.code, refusal.message))?,
            None => Rights::DEFAULT,
        };
        let why = match old {
            _ if !rights.has(Right::Send) => "your site may no longer send images there",
            Some(old) if old.external => {
                "an image indexed in place there has that name; send it under another name, or remove that image there"
            }
            Some(old) if !old.may_be_changed_by(peer, rights) => {
                "an image of that name belongs to another peer; send it under another name"
            }
            _ => return Ok(()),
        };
        Err(TeleportError::refused(Code::Denied, why))
    }

    /// Fails if an image of that name belongs to another peer, to whom so many bytes in its place are too many.
    pub(crate) fn check_owners_quota(
        &self,
        peer: &PeerKey,
        name: &ImageName,
        bytes: u64,
    ) -> Result<(), TeleportError> {
        let owner = self.images.by_name(name).and_then(|record| record.owner);
        let Some(owner) = owner.filter(|owner| owner != peer) else {
            return Ok(());
        };
        self.check_quota(&owner, name, bytes).map_err(|_| {
            let text = "it would take more space there than the peer may that the image belongs to";
            TeleportError::refused(Code::NoSpace, text)
        })
    }

    /// Locks the records of images until the guard is dropped, and returns the one of that name, which no other node changes either. If that image `goes`, the
    /// sequences that it shares with others are copied first, mostly before the lock is taken: it may take long.
    pub(super) fn change(
        &self,
        name: &ImageName,
        goes: bool,
    ) -> Result<(Changing<'_>, Option<ImageRecord>), TeleportError> {
        let copy = |record: &ImageRecord| self.copy_sequences_of(record.id);
        if goes {
            self.images.by_name(name).iter().for_each(copy);
        }
        let changing = self.lock_record(name, goes)?;
        let record = self.images.by_name(name);
        if goes {
            record.iter().for_each(copy);
        }
        Ok((changing, record))
    }

    /// Removes an image, and its file unless it was indexed in place. Sequences that it shares with other images are
    /// kept.
    ///
    /// # Errors
    /// When there is no such image, it is held, or its file cannot be removed.
    pub fn remove(&self, name: &ImageName) -> Result<ImageRecord, TeleportError> {
        let record = self.find(name)?;
        self.remove_this(&record)?;
        Ok(record)
    }

    /// Removes an image as [`Site::remove`] does, but none that has taken its name since.
    ///
    /// # Errors
    /// As [`Site::remove`]; when it was replaced or removed.
    pub fn remove_this(&self, record: &ImageRecord) -> Result<(), TeleportError> {
        let name = &record.name;
        self.check_held(name, name.as_str())?;
        let (changing, now) = self.change(name, true)?;
        if now.map(|now| now.id) != Some(record.id) {
            return Err(gone(name));
        }
        if !record.external {
            match self.remove_file_of(&record.path, record.id.0) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(TeleportError::file("remove", &record.path)(e));
                }
                _ => {}
            }
        }
        self.images.remove(name)?;
        drop(changing);
        self.forget_known(&record.path);
        self.sequences.drop_image(record.id);
        self.tell(record.id, ImageEvent::Forget);
        self.images_went.store(true, Ordering::Relaxed);
        self.wake_copier();
        Ok(())
    }

    /// Lets a peer replace an image and write to it, or no longer; also one that has replaced it since, if it has the same
    /// owner.
    ///
    /// # Errors
    /// When there is no such image, it is shared with too many, or the catalog fails.
    pub fn share(
        &self,
        image: &ImageRecord,
        peer: PeerKey,
        share: bool,
    ) -> Result<(), TeleportError> {
        let name = &image.name;
        let _changing = self.lock_record(name, false)?;
        let mut record = self.find(name)?;
        if record.owner != image.owner {
            return Err(gone(name));
        }
        record.shared.retain(|key| *key != peer);
        if share {
            record.shared.push(peer);
        }
        if record.shared.len() > MAX_SHARED {
            let text = format!("{name} is shared with {MAX_SHARED} peers already");
            return Err(TeleportError::refused(Code::Denied, text));
        }
        self.images.put(&record)?;
        Ok(())
    }

    /// Makes an image belong to another peer, or to the site itself; it is shared with nobody then.
    ///
    /// # Errors
    /// When there is no such image, or the catalog fails.
    pub fn give(&self, name: &ImageName, owner: Option<PeerKey>) -> Result<(), TeleportError> {
        let _changing = self.lock_record(name, false)?;
        let mut record = self.find(name)?;
        record.owner = owner;
        record.shared.clear();
        self.images.put(&record)?;
        Ok(())
    }

    /// Takes away what was shared with peers for which `keep` is false; returns from how many images.
    ///
    /// # Errors
    /// When the catalog fails.
    pub fn share_only(&self, keep: &dyn Fn(&PeerKey) -> bool) -> Result<usize, TeleportError> {
        let mut changed = 0;
        for listed in self.images.list() {
            if listed.shared.iter().all(keep) {
                continue;
            }
            let _changing = self.lock_record(&listed.name, false)?;
            let Some(mut record) = self.images.by_name(&listed.name) else {
                continue;
            };
            let before = record.shared.len();
            record.shared.retain(keep);
            if record.shared.len() < before {
                self.images.put(&record)?;
                changed += 1;
            }
        }
        Ok(changed)
    }
}

fn gone(name: &ImageName) -> TeleportError {
    let text = format!("{name} was replaced or removed meanwhile");
    TeleportError::refused(Code::Denied, text)
}
