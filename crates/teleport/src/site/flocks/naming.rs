//! The end of an atomic flock: its images get their names, all or none, also after a crash.
//!
//! Its images arrive as any others, but stay transfers when they are complete: verified, synced, without a closing record.
//! Until the decision a crash leaves unfinished transfers, which are resumed as ever.
//! The decision is that the flock's record says *naming*, with the digests: one file, replaced atomically. From then on each
//! log gets its closing record and each file its name; both are done again for the rest when the site opens after a crash.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_net::{Code, PeerKey};
use drover_storage::Disk;

use crate::TeleportError;
use crate::active::{Hold, Taken};
use crate::flock::live::Flock;
use crate::flock::record::{FlockImage, FlockRecord, FlockState, ImageState, read_all};
use crate::protocol::Delivered;
use crate::site::arrived::{Arrived, unix_now};
use crate::site::{SendEvent, SendStep, Site};
use crate::transfer::{Closing, close, inspect, transfer_key};

/// How long the end of a flock waits for a session that still has one of its images.
const TAKE: Duration = Duration::from_secs(20);

impl Site {
    /// Gives the images of an atomic flock, all of which have arrived, their names. Before each step it asks whether to `go_on`,
    /// so that tests can stop there.
    pub(super) fn name_all(
        &self,
        flock: &Flock,
        record: &mut FlockRecord,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<(), TeleportError> {
        let mut step = || match go_on() {
            true => Ok(()),
            false => Err(TeleportError::Stopped),
        };
        let mut holds = Vec::new();
        if record.state != FlockState::Naming {
            for image in &record.images {
                let held = self
                    .check_arrived(&record.peer, image)
                    .map_err(|e| of_image(&image.name, e))?;
                holds.extend(held);
            }
            step()?;
            record.state = FlockState::Naming;
            let decided = record.clone();
            self.change_flock(flock, |known| *known = decided)?;
        }
        // From here on it is finished, now or when the site opens next.
        for image in record
            .images
            .iter()
            .filter(|i| i.state == ImageState::Arrived)
        {
            step()?;
            close_image(
                &self.config.work_dir,
                &record.peer,
                image,
                &self.config.disk,
            )?;
        }
        let mut late = None;
        for image in record
            .images
            .iter_mut()
            .filter(|i| i.state == ImageState::Arrived)
        {
            step()?;
            match self.name_image(&record.peer, image) {
                Ok(()) => image.state = ImageState::Delivered,
                Err(e) => {
                    tracing::warn!(image = %image.name, error = %e, "an image of a flock waits for its name");
                    late = Some(format!(
                        "{} is complete and gets its name when the site is started next: {}",
                        image.name,
                        e.for_peer().message
                    ));
                }
            }
        }
        match late {
            Some(why) => record.fail(&why),
            None => record.state = FlockState::Delivered,
        }
        step()?;
        drop(holds);
        Ok(())
    }

    /// Fails unless a complete image of a flock can get its name now; holds the name until the result is dropped.
    fn check_arrived(
        &self,
        peer: &PeerKey,
        image: &FlockImage,
    ) -> Result<Option<Hold>, TeleportError> {
        let name = &image.name;
        let here = self.images.by_name(name);
        if image.state == ImageState::Unchanged {
            return match here.is_some_and(|here| here.digest == image.digest) {
                true => Ok(None),
                false => Err(TeleportError::refused(
                    Code::OutOfOrder,
                    "it was replaced or removed meanwhile; send the flock again",
                )),
            };
        }
        let key = transfer_key(peer, name);
        let number = self.active.number();
        let hold = self.active.take(name, &key, number, TAKE);
        let hold = hold.map_err(|taken| match taken {
            Taken::ByAnother => {
                TeleportError::refused(Code::Denied, "another transfer to that name is in progress")
            }
            Taken::ByNewer | Taken::Still => {
                TeleportError::refused(Code::Busy, "it is being sent; try again")
            }
            Taken::Refused(refusal) => TeleportError::Refused(refusal),
        })?;
        let left = inspect(&self.transfer_dir(&key))?;
        let there = left.is_some_and(|left| {
            let mut blocks = drover_store::BlockMap::default();
            left.data.iter().for_each(|data| blocks.push(data));
            left.opening.image == image.image
                && left.closing.is_none()
                && blocks.walk_blocks() == left.layout.walk_blocks()
        });
        if !there {
            let text = "what had arrived of it is gone; send the flock again";
            return Err(TeleportError::refused(Code::OutOfOrder, text));
        }
        self.check_held(name, "it")?;
        self.check_sender(peer, here.as_ref())?;
        self.check_unknown_file(name)?;
        Ok(Some(hold))
    }

    /// Names one image whose log is closed.
    fn name_image(&self, peer: &PeerKey, image: &FlockImage) -> Result<(), TeleportError> {
        let gone = || TeleportError::Failed("its transfer is gone".into());
        let dir = self.transfer_dir(&transfer_key(peer, &image.name));
        let left = inspect(&dir)?.ok_or_else(gone)?;
        let arrived = Arrived::of(left).map_err(|_| gone())?;
        if !self.settle(&arrived, None)? {
            return Err(gone());
        }
        self.totals.delivered(&Delivered {
            matched_blocks: image.blocks.own + image.blocks.flock + image.blocks.site,
            sent_blocks: image.blocks.sent,
            ..Delivered::default()
        });
        self.watched(&SendEvent {
            peer: arrived.opening.peer,
            peer_name: arrived.opening.peer_name.clone(),
            from: String::new(),
            image: image.name.clone(),
            bytes: image.size_bytes,
            time: Duration::ZERO,
            what: SendStep::Delivered,
        });
        Ok(())
    }

    /// Says in the records how the flocks ended that were decided when the site stopped, and whose images have been named.
    pub(in crate::site) fn recover_flocks(&self, repairs: &mut Vec<String>) {
        let mut known = self.flocks.known.lock();
        for (key, record) in known.iter_mut() {
            if record.state != FlockState::Naming {
                continue;
            }
            let mut late = None;
            let arrived = |image: &&mut FlockImage| image.state == ImageState::Arrived;
            for image in record.images.iter_mut().filter(arrived) {
                let here = self.images.by_name(&image.name);
                let key = transfer_key(&record.peer, &image.name);
                match here {
                    Some(here) if here.id.0 == image.image => image.state = ImageState::Delivered,
                    _ if self.transfer_dir(&key).exists() => late = Some(image.name.clone()),
                    // It was delivered, and replaced or removed since.
                    _ => image.state = ImageState::Delivered,
                }
            }
            match late {
                Some(name) => record.fail(&format!("{name} is complete, but waits for its name")),
                None => record.state = FlockState::Delivered,
            }
            record.touched_unix = unix_now();
            let said = match self.save_flock(key, record) {
                Ok(()) => format!("flock {}: had arrived when the site stopped", record.name),
                Err(e) => format!("flock {}: {e}", record.name),
            };
            repairs.push(said);
        }
    }
}

/// Reads the flocks that an earlier run has left, before its transfers are looked at: of those that were decided, every complete
/// file is marked as such. Damaged records are removed.
pub(in crate::site) fn flocks_found(
    work_dir: &Path,
    disk: &Arc<dyn Disk>,
    repairs: &mut Vec<String>,
) -> Result<Vec<(PathBuf, FlockRecord)>, TeleportError> {
    let (good, bad) = read_all(work_dir)?;
    for path in bad {
        repairs.push(format!(
            "{}: the record of a flock is damaged; removed. If its images were getting their names, those that lack one are unfinished transfers",
            path.display()
        ));
        std::fs::remove_file(&path).map_err(TeleportError::file("remove", &path))?;
    }
    for (_, record) in good.iter().filter(|(_, r)| r.state == FlockState::Naming) {
        for image in record
            .images
            .iter()
            .filter(|i| i.state == ImageState::Arrived)
        {
            close_image(work_dir, &record.peer, image, disk)?;
        }
    }
    Ok(good)
}

/// Logs that an image of a decided flock is complete, if its transfer is still there.
fn close_image(
    work_dir: &Path,
    peer: &PeerKey,
    image: &FlockImage,
    disk: &Arc<dyn Disk>,
) -> Result<(), TeleportError> {
    let dir = work_dir
        .join("transfers")
        .join(transfer_key(peer, &image.name));
    let closing = Closing {
        digest: image.digest,
        added_unix: image.added_unix,
    };
    close(&dir, image.image, &closing, disk)
}

/// Adds the name of the image to a refusal.
pub(super) fn of_image(name: &ImageName, error: TeleportError) -> TeleportError {
    match error {
        TeleportError::Refused(refusal) => {
            TeleportError::refused(refusal.code, format!("{name}: {}", refusal.message))
        }
        error => error,
    }
}
