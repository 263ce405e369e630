//! Flocks at the site that receives them: which there are, how far each is, and their end.

mod naming;
mod shared;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_index::ImageId;
use drover_net::{Code, PeerKey};

use super::Site;
use super::arrived::unix_now;
use crate::TeleportError;
use crate::flock::live::Flock;
use crate::flock::record::{
    FlockImage, FlockInfo, FlockRecord, FlockState, ImageBlocks, ImageState, MAX_FLOCK_IMAGES,
    MAX_FLOCKS, MAX_PEER_FLOCKS, flock_key, sort,
};
use crate::protocol::{Delivered, Offer};
use crate::services::{EndFlock, OpenFlock};

pub(super) use naming::flocks_found;
use naming::of_image;

impl Site {
    /// Begins to receive a flock: its record is durable on return.
    ///
    /// # Errors
    /// A refusal, or when the record cannot be written.
    pub fn open_flock(
        &self,
        peer: &PeerKey,
        peer_name: &str,
        order: OpenFlock,
    ) -> Result<(), TeleportError> {
        let OpenFlock {
            name,
            id,
            atomic,
            images,
        } = order;
        let denied = |text: String| Err(TeleportError::refused(Code::Denied, text));
        let mut names: Vec<&ImageName> = images.iter().map(|image| &image.name).collect();
        names.sort_unstable();
        if images.is_empty() || images.len() > MAX_FLOCK_IMAGES {
            return denied(format!("a flock has 1 to {MAX_FLOCK_IMAGES} images"));
        }
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return denied(format!("the flock has two images of the name {}", twice[0]));
        }
        for image in &images {
            let here = self.images.by_name(&image.name);
            match image.unchanged {
                Some(digest) if here.as_ref().is_none_or(|here| here.digest != digest) => {
                    let text = format!(
                        "{} has changed at the destination; send the flock again",
                        image.name
                    );
                    return Err(TeleportError::refused(Code::OutOfOrder, text));
                }
                // Of an atomic one nothing is sent in vain.
                None if atomic => self
                    .check_sender(peer, here.as_ref())
                    .and_then(|()| self.check_held(&image.name, "it"))
                    .map_err(|e| of_image(&image.name, e))?,
                _ => {}
            }
        }
        let now = unix_now();
        let images = images.into_iter().map(|item| {
            let mut image = FlockImage::waiting(item.name);
            if let Some(digest) = item.unchanged {
                (image.state, image.digest) = (ImageState::Unchanged, digest);
            }
            image
        });
        let record = FlockRecord {
            name,
            id,
            peer: *peer,
            peer_name: peer_name.into(),
            atomic,
            state: FlockState::Open,
            begun_unix: now,
            touched_unix: now,
            images: images.collect(),
            why: String::new(),
            nodes: BTreeMap::new(),
        };
        let key = flock_key(peer, &record.name);
        let _among = self.lock_flock(&key, atomic)?;
        let mut known = self.flocks.known.lock();
        match known.get(&key) {
            // Its reply was lost.
            Some(same) if same.id == id => return Ok(()),
            Some(other) if other.state == FlockState::Naming => {
                let text = format!("the images of flock {} are getting their names", other.name);
                return Err(TeleportError::refused(Code::Busy, text));
            }
            Some(_) => {}
            None => self.make_room_for_flock(peer, &mut known)?,
        }
        self.save_flock(&key, &record)?;
        let mut live = self.flocks.live.write();
        live.retain(|flock| flock.key != key);
        live.push(Flock::new(&key, &record));
        known.insert(key, record);
        Ok(())
    }

    /// Forgets flocks so that the peer may have another one.
    fn make_room_for_flock(
        &self,
        peer: &PeerKey,
        known: &mut HashMap<String, FlockRecord>,
    ) -> Result<(), TeleportError> {
        loop {
            let of_peer = known.values().filter(|r| r.peer == *peer).count();
            if of_peer < MAX_PEER_FLOCKS && known.len() < MAX_FLOCKS {
                return Ok(());
            }
            let live = self.flocks.live.read();
            let used = |key: &str| {
                live.iter()
                    .any(|f| f.key == key && f.sessions.load(Ordering::Relaxed) > 0)
            };
            let may_go = |key: &str, record: &FlockRecord| match record.state {
                FlockState::Delivered | FlockState::Failed => {
                    record.peer == *peer || of_peer < MAX_PEER_FLOCKS
                }
                FlockState::Open => record.peer == *peer && !used(key),
                FlockState::Naming => false,
            };
            let oldest = known
                .iter()
                .filter(|(key, record)| may_go(key, record))
                .min_by_key(|(_, record)| (!record.is_over(), record.touched_unix))
                .map(|(key, _)| key.clone());
            drop(live);
            let Some(oldest) = oldest else {
                let text = "too many flocks are under way there; send it again later";
                return Err(TeleportError::refused(Code::Busy, text));
            };
            self.forget_flock(known, &oldest)?;
        }
    }

    fn forget_flock(
        &self,
        known: &mut HashMap<String, FlockRecord>,
        key: &str,
    ) -> Result<(), TeleportError> {
        let atomic = known.get(key).is_some_and(|record| record.atomic);
        let path = self.flock_path(key, atomic);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(TeleportError::file("remove", path)(e));
            }
            _ => {}
        }
        known.remove(key);
        self.flocks.live.write().retain(|flock| flock.key != key);
        Ok(())
    }

    /// Forgets flocks of which nothing has changed for `after`, and that nobody sends.
    ///
    /// # Errors
    /// When a record cannot be removed.
    pub fn expire_flocks(&self, after: Duration) -> Result<(), TeleportError> {
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        let oldest = unix_now().saturating_sub(after);
        self.reread_flocks()?;
        let mut known = self.flocks.known.lock();
        let live = self.flocks.live.read().clone();
        let used = |key: &str| {
            live.iter()
                .any(|f| f.key == key && f.sessions.load(Ordering::Relaxed) > 0)
        };
        let expired: Vec<String> = known
            .iter()
            .filter(|(key, r)| {
                r.touched_unix < oldest && r.state != FlockState::Naming && !used(key)
            })
            .map(|(key, _)| key.clone())
            .collect();
        expired
            .iter()
            .try_for_each(|key| self.forget_flock(&mut known, key))
    }

    /// The flock of that number that a peer sends.
    pub(crate) fn flock_of(&self, peer: &PeerKey, id: &[u8; 16]) -> Option<Arc<Flock>> {
        let found = self.flocks.find(peer, id);
        found.or_else(|| self.flock_from_others(peer, id))
    }

    /// Changes what is known of a flock, durably.
    fn change_flock(
        &self,
        flock: &Flock,
        change: impl FnOnce(&mut FlockRecord),
    ) -> Result<(), TeleportError> {
        let _among = self.lock_flock(&flock.key, flock.atomic)?;
        let mut known = self.flocks.known.lock();
        let Some(record) = known.get_mut(&flock.key).filter(|r| r.id == flock.id) else {
            // A newer sending of the flock has taken its place.
            let text = "the flock was sent again meanwhile";
            return Err(TeleportError::refused(Code::Lost, text));
        };
        let mut changed = record.clone();
        change(&mut changed);
        changed.touched_unix = unix_now();
        self.save_flock(&flock.key, &changed)?;
        *record = changed;
        if record.is_over() {
            self.flocks.live.write().retain(|f| f.key != flock.key);
            self.elsewhere.hints.lock().forget(&flock.id);
        }
        Ok(())
    }

    /// A transfer of an image begins or goes on: if it was complete in a flock, it no longer counts as that. A transfer of
    /// `flock` becomes its source of blocks.
    pub(crate) fn flock_transfer_begins(
        &self,
        flock: Option<&Flock>,
        peer: &PeerKey,
        offer: &Offer,
    ) -> Result<(), TeleportError> {
        let arrived: Vec<Arc<Flock>> = {
            let (known, live) = (self.flocks.known.lock(), self.flocks.live.read());
            let has = |flock: &&Arc<Flock>| {
                let record = known.get(&flock.key).filter(|_| flock.peer == *peer);
                record.is_some_and(|record| {
                    let mut images = record.images.iter();
                    images.any(|i| i.name == offer.name && i.state == ImageState::Arrived)
                })
            };
            live.iter().filter(has).cloned().collect()
        };
        for of in arrived {
            self.change_flock(&of, |record| {
                if let Some(image) = record.image(&offer.name) {
                    *image = FlockImage::waiting(offer.name.clone());
                }
            })?;
        }
        match flock {
            Some(flock) if !self.flock_has_name(flock, &offer.name) => {
                let text = format!("{} is not an image of the flock that is sent", offer.name);
                Err(TeleportError::Protocol(text))
            }
            _ => Ok(()),
        }
    }

    fn flock_has_name(&self, flock: &Flock, name: &ImageName) -> bool {
        let record = self.flocks.record(flock);
        record.is_some_and(|mut record| record.image(name).is_some())
    }

    /// The transfer of an image of a flock has its number.
    pub(crate) fn flock_image_begins(
        &self,
        flock: &Flock,
        offer: &Offer,
        id: ImageId,
    ) -> Result<(), TeleportError> {
        flock.begin(id);
        let node = self.node_name();
        self.change_flock(flock, |record| {
            let nth = record.images.iter().position(|i| i.name == offer.name);
            if let (Some(nth), Some(node)) = (nth, node) {
                record.nodes.insert(nth as u32, node);
            }
            if let Some(image) = record.image(&offer.name) {
                *image = FlockImage {
                    image: id.0,
                    size_bytes: offer.file_bytes,
                    ..FlockImage::waiting(offer.name.clone())
                };
            }
        })
    }

    /// The source has given an image of a flock up, perhaps to offer it anew: the others need not wait for its blocks.
    pub(crate) fn flock_image_given_up(&self, flock: &Flock, name: &ImageName) {
        let changed = self.change_flock(flock, |record| {
            let image = record.image(name);
            if let Some(image) = image.filter(|image| image.state == ImageState::Waiting) {
                image.state = ImageState::Failed;
            }
        });
        if let Err(e) = changed {
            tracing::debug!(image = %name, "that it was given up is not noted: {e}");
        }
    }

    /// An image of a flock is complete.
    pub(crate) fn flock_image_done(
        &self,
        flock: &Flock,
        name: &ImageName,
        size_bytes: u64,
        state: ImageState,
        delivered: &Delivered,
    ) -> Result<(), TeleportError> {
        self.change_flock(flock, |record| {
            if let Some(image) = record.image(name) {
                image.state = state;
                image.size_bytes = size_bytes;
                image.digest = delivered.digest;
                image.added_unix = unix_now();
                image.blocks = ImageBlocks::of(delivered);
            }
        })
    }

    /// The flocks that were received or are, those that changed last first.
    #[must_use]
    pub fn flocks(&self) -> Vec<FlockInfo> {
        if let Err(e) = self.reread_flocks() {
            tracing::warn!("the flocks of other nodes are not known: {e}");
        }
        let records: Vec<(String, FlockRecord)> = {
            let known = self.flocks.known.lock();
            known.iter().map(|(k, r)| (k.clone(), r.clone())).collect()
        };
        let mut all: Vec<FlockInfo> = records
            .into_iter()
            .map(|(key, record)| self.flock_info(&key, record))
            .collect();
        sort(&mut all);
        self.add_launchable(&mut all);
        all
    }

    fn flock_info(&self, key: &str, record: FlockRecord) -> FlockInfo {
        let live = self.flocks.live.read();
        let flock = live.iter().find(|f| f.key == key);
        let sessions = flock.map_or(0, |f| f.sessions.load(Ordering::Relaxed));
        let sending = self.sessions.lock();
        let of_peer = sending.values().filter(|s| s.is_of(&record.peer));
        let under_way = of_peer.filter_map(|session| {
            let transfer = session.status()?;
            let named = |image: &&FlockImage| image.name.as_str() == transfer.name;
            let image = record.images.iter().find(named)?;
            let of = |blocks: u64| blocks.saturating_mul(BLOCK_SIZE_U64);
            let name = image.name.clone();
            Some((name, of(transfer.done_blocks), of(transfer.total_blocks)))
        });
        let under_way = match sessions {
            0 => Vec::new(),
            _ => under_way.collect(),
        };
        FlockInfo {
            sessions: sessions.saturating_add(self.received_elsewhere(&record)),
            record,
            under_way,
            launchable: Vec::new(),
        }
    }

    /// Adds to flocks which of their images a machine can run from.
    fn add_launchable(&self, flocks: &mut [FlockInfo]) {
        let arriving = self.arriving();
        for flock in flocks {
            let FlockRecord { peer, images, .. } = &flock.record;
            let can = |image: &&FlockImage| match image.state {
                ImageState::Waiting | ImageState::Arrived => arriving
                    .iter()
                    .any(|(sender, name)| sender == peer && *name == image.name),
                _ => self.images.by_name(&image.name).is_some(),
            };
            let names = images.iter().filter(can).map(|image| image.name.clone());
            flock.launchable = names.collect();
        }
    }

    /// Ends the sending of a flock; see [`EndFlock`]. Blocks the thread.
    ///
    /// # Errors
    /// A refusal that says why an atomic flock is not delivered, or when the record cannot be written.
    pub fn end_flock(&self, peer: &PeerKey, end: &EndFlock) -> Result<FlockInfo, TeleportError> {
        let _ending = self.flocks.ending.lock();
        self.reread_flocks()?;
        let key = {
            let known = self.flocks.known.lock();
            let named = known
                .iter()
                .find(|(_, r)| r.peer == *peer && r.id == end.id);
            let (key, record) = named.ok_or_else(unknown)?;
            // The reply was lost.
            if record.is_over() {
                let (key, record) = (key.clone(), record.clone());
                drop(known);
                return Ok(self.flock_info(&key, record));
            }
            key.clone()
        };
        let flock = self.flocks.find(peer, &end.id).ok_or_else(unknown)?;
        let mut record = self.flocks.record(&flock).ok_or_else(unknown)?;
        if flock.atomic {
            if fail_missing(&mut record, end) {
                self.name_all(&flock, &mut record, || true)?;
            }
            let ended = record.clone();
            self.change_flock(&flock, |known| *known = ended)?;
        } else {
            // Another node may have changed it since, or ended it.
            self.change_flock(&flock, |known| {
                if !known.is_over() && fail_missing(known, end) {
                    known.state = FlockState::Delivered;
                }
                record = known.clone();
            })?;
        }
        Ok(self.flock_info(&key, record))
    }
}

/// Notes which images could not be sent. Without one that has not arrived it is true; else the flock has failed.
fn fail_missing(record: &mut FlockRecord, end: &EndFlock) -> bool {
    for nth in &end.failed {
        let image = usize::try_from(*nth)
            .ok()
            .and_then(|nth| record.images.get_mut(nth));
        if let Some(image) = image {
            image.state = ImageState::Failed;
        }
    }
    let missing = record.images.iter().find(|image| {
        !matches!(
            image.state,
            ImageState::Arrived | ImageState::Delivered | ImageState::Unchanged
        )
    });
    let Some(image) = missing else { return true };
    let why = match end.why.is_empty() {
        true => format!("{} has not arrived", image.name),
        false => end.why.clone(),
    };
    record.fail(&why);
    false
}

fn unknown() -> TeleportError {
    let text = "the site knows of no such flock from you; send it again";
    TeleportError::refused(Code::NotFound, text)
}

#[cfg(test)]
mod tests;
