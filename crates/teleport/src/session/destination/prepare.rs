//! Checks before an image is accepted: permission, free space, and a transfer to resume.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use drover_core::BLOCK_SIZE_U64;
use drover_image::{Format, Layout};
use drover_index::{ImageId, Plan};
use drover_net::{Code, PeerKey};
use drover_store::{DataBits, layout_limits};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{mpsc, watch};

use super::event::DriverEvent;
use super::flow::Flow;
use super::matching::MatchThread;
use crate::TeleportError;
use crate::active::{Hold, Taken};
use crate::codec::Batch;
use crate::destination::Destination;
use crate::files::{OrderedDigest, remove_dir};
use crate::flock::live::Flock;
use crate::partials::{Contents, Transit};
use crate::protocol::Offer;
use crate::session::SessionShared;
use crate::session::literals_in::{Incoming, OpenBatch};
use crate::site::Site;
use crate::stages::Lap;
use crate::transfer::{Opening, Restored, Transfer, opening_of, read_ahead, transfer_key};

/// How long the session that had the transfer may take to release it.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(20);

/// A transfer that is ready to start.
pub struct Prepared {
    pub transfer: Transfer,
    pub machine: Destination,
    pub incoming: Arc<Incoming>,
    pub matcher: MatchThread,
    /// Makes its blocks available to other transfers.
    pub transit: Transit,
    /// Running digest of the file, where the walk order allows it.
    pub digest: Option<OrderedDigest>,
    /// The flock that the image is of.
    pub flock: Option<Arc<Flock>>,
    /// Restored batches with missing blocks, and their plans.
    pub replan: Vec<(u64, Plan)>,
    pub done_blocks: Arc<AtomicU64>,
    /// Dropped last: a session that takes the transfer over must find no work in progress, in particular at the
    /// teleporter.
    pub hold: Hold,
}

impl Prepared {
    /// Name of the image.
    pub fn name(&self) -> String {
        self.transfer.opening.offer.name.to_string()
    }

    /// Discards the transfer and its data.
    pub fn discard(self, site: &Site) {
        let (dir, image) = (self.transfer.dir.clone(), self.transfer.image());
        self.matcher.abort();
        drop((self.transit, self.transfer));
        site.discard(&dir, image);
        drop(self.hold);
    }

    /// Marks the announced digests as invalid: the partial file is kept for comparison with the next offer, but its
    /// blocks are not offered for reuse, and the log is not trusted.
    pub fn distrust(self, site: &Site) -> Result<(), TeleportError> {
        let mut transfer = self.transfer;
        self.matcher.abort();
        drop(self.transit);
        site.forget_partial(transfer.image());
        transfer.distrust()?;
        transfer.rest()?;
        drop(self.hold);
        Ok(())
    }
}

/// Walk positions, within the batch, of the given data blocks.
fn places_of(batch: &Batch, nth: &DataBits) -> DataBits {
    let mut out = DataBits::new(batch.data.blocks());
    let places = batch.data.iter().enumerate();
    places
        .filter(|(i, _)| nth.get(*i as u64))
        .for_each(|(_, place)| out.set(place));
    out
}

/// The error of a session whose transfer was taken over by a newer session.
pub fn taken_over() -> TeleportError {
    TeleportError::Failed("a newer session took the transfer over".into())
}

/// Checks an offer and opens its transfer, resuming that of an earlier session if there is one, or going on after what the
/// image of that name was `compared` with.
pub fn prepare(
    site: &Arc<Site>,
    shared: &SessionShared,
    offer: Offer,
    encoded_layout: &[u8],
    events: mpsc::Sender<DriverEvent>,
    compared: bool,
    stop: &watch::Receiver<bool>,
) -> Result<Prepared, TeleportError> {
    let layout = decode_layout(&offer, encoded_layout)?;
    check(site, &offer)?;
    let SessionShared {
        peer,
        peer_name,
        number,
        stages,
        activity,
        ..
    } = shared;
    let key = transfer_key(peer, &offer.name);
    site.check_launch(&offer.name, &key)?;
    let hold = site
        .active
        .take(&offer.name, &key, *number, TAKEOVER_TIMEOUT)
        .map_err(|taken| match taken {
            Taken::ByAnother => {
                TeleportError::refused(Code::Denied, "another transfer to that name is in progress")
            }
            Taken::ByNewer => taken_over(),
            // Retryable: the source reconnects.
            Taken::Still => TeleportError::Stopped,
            Taken::Refused(refusal) => TeleportError::Refused(refusal),
        })?;
    site.fetch_transfer(&key)?;
    let flock = shared.flock().cloned();
    site.flock_transfer_begins(flock.as_deref(), peer, &offer)?;
    let dir = site.transfer_dir(&key);
    site.settle_renamed(&dir, &offer.name)?;
    site.check_unknown_file(&offer.name)?;
    let mut machine = Destination::new(offer.walk_blocks);
    let mut digest = OrderedDigest::new(&layout);
    let mut open: HashMap<u64, Arc<OpenBatch>> = HashMap::new();
    let mut replan = Vec::new();
    let mut absent = HashMap::new();
    let mut matcher: Option<MatchThread> = None;
    let flow = Arc::new(Flow::default());
    let start = |image| {
        let of = flock.clone().map(|flock| (flock, compared));
        if let Some(flock) = &flock {
            site.flock_image_begins(flock, &offer, image)?;
        }
        MatchThread::start(site, image, events.clone(), stages.clone(), of, &flow)
            .map_err(TeleportError::file("start a thread for", &dir))
    };
    let layout = Arc::new(layout);
    let admit = || admit(site, peer, &offer, &dir, &key);
    let older = opening_of(&dir);
    if older.is_some() {
        // Before its data is read again: a quota may be smaller and a disk fuller by now.
        admit()?;
    }
    let mut lap = Lap::start();
    let resumed = Transfer::resume(
        &dir,
        &offer,
        &layout,
        encoded_layout,
        &site.config.disk,
        |opening, restored| {
            let Restored {
                batch,
                missing,
                plan,
                full,
            } = restored;
            if *hold.stop.borrow() {
                return Err(taken_over());
            }
            if *stop.borrow() {
                return Err(TeleportError::Stopped);
            }
            let matcher = match &mut matcher {
                Some(matcher) => matcher,
                none => none.insert(start(ImageId(opening.image))?),
            };
            if !batch.digests.is_empty() {
                matcher.record(batch.clone());
            }
            if let Some(plan) = plan {
                absent.insert(batch.index, places_of(&batch, &missing));
                let entry = OpenBatch {
                    batch: batch.clone(),
                    full: Mutex::new(full),
                };
                open.insert(batch.index, Arc::new(entry));
                replan.push((batch.index, plan));
            } else if let Some(digest) = &mut digest {
                digest.batch(&layout, batch.clone(), full);
            }
            Ok(machine.restore(batch, missing)?)
        },
    )?;
    lap.busy(&stages.check);
    let transfer = match resumed {
        Some(transfer) => transfer,
        None => {
            if older.is_some() {
                // A machine may run from what came so far.
                site.check_not_launched(&offer.name)?;
            }
            // Until its log says what it was promised, no other is admitted.
            let _admitting = site.admitting.lock();
            admit()?;
            let image = site
                .catalog
                .new_image_id()
                .map_err(drover_store::StoreError::from)?;
            let opening = Opening {
                peer: *peer,
                peer_name: peer_name.clone(),
                offer: offer.clone(),
                image: image.0,
            };
            if let Some(older) = older {
                site.forget_partial(ImageId(older.image));
            }
            if dir.join("image.part").exists() {
                Transfer::replace(&dir, opening, layout, encoded_layout, &site.config.disk)?
            } else {
                remove_dir(&dir);
                Transfer::create(&dir, opening, layout, encoded_layout, &site.config.disk)?
            }
        }
    };
    let image = transfer.image();
    let matcher = match matcher {
        Some(matcher) => matcher,
        None => start(image)?,
    };
    let [data, zero] = match transfer.compare {
        true => read_ahead(&dir, &transfer.part, &transfer.layout, machine.next_batch())?,
        false => Default::default(),
    };
    let mut ahead = data.clone();
    for (index, bits) in &zero {
        let all = ahead.entry(*index);
        let all = all.or_insert_with(|| DataBits::new(bits.blocks()));
        bits.iter().for_each(|place| all.set(place));
    }
    machine.restore_ahead(data, zero);
    let contents = Contents {
        blocks: machine.map().clone(),
        missing: absent,
        ahead,
    };
    let transit = site.partials.begin(
        image,
        *peer,
        &transfer.part_path(),
        transfer.layout.clone(),
        contents,
    )?;
    let incoming = Arc::new(Incoming {
        slot: transfer.opening.offer.slot,
        layout: transfer.layout.clone(),
        part: transfer.part.clone(),
        part_path: transfer.part_path(),
        open: RwLock::new(open),
        events,
        stages: stages.clone(),
        activity: activity.clone(),
        flow,
    });
    let done_blocks = Arc::new(AtomicU64::new(machine.counts().in_place()));
    Ok(Prepared {
        transfer,
        machine,
        incoming,
        hold,
        transit,
        matcher,
        digest,
        flock,
        replan,
        done_blocks,
    })
}

/// Decodes the layout of an offer.
pub fn decode_layout(offer: &Offer, encoded: &[u8]) -> Result<Layout, TeleportError> {
    let layout = Layout::decode(encoded, layout_limits())
        .map_err(|e| TeleportError::Protocol(format!("the offered layout: {e}")))?;
    if layout.file_len() != offer.file_bytes || layout.walk_blocks() != offer.walk_blocks {
        return Err(TeleportError::Protocol(
            "the offer and its layout differ".into(),
        ));
    }
    Ok(layout)
}

fn check(site: &Site, offer: &Offer) -> Result<(), TeleportError> {
    if offer.format.parse::<Format>().is_err() {
        return Err(TeleportError::Protocol(
            "the offer has an unknown image format".into(),
        ));
    }
    site.check_held(&offer.name, "it")
}

/// The bytes that an image takes once it is there: a byte takes a block.
fn takes(offer: &Offer) -> u64 {
    offer.walk_blocks.saturating_mul(BLOCK_SIZE_U64)
}

/// Fails unless the image fits into the quotas of its sender and of the peer that it will belong to.
pub fn check_quotas(site: &Site, peer: &PeerKey, offer: &Offer) -> Result<(), TeleportError> {
    site.check_quota(peer, &offer.name, takes(offer))?;
    site.check_owners_quota(peer, &offer.name, takes(offer))
}

/// Fails unless there is space for the image: of the peer's quota, of the owner's that the image will belong to, and of the
/// disk.
fn admit(
    site: &Site,
    peer: &PeerKey,
    offer: &Offer,
    dir: &Path,
    key: &str,
) -> Result<(), TeleportError> {
    check_quotas(site, peer, offer)?;
    let size = takes(offer);
    let part = std::fs::metadata(dir.join("image.part"));
    let there = part.map_or(0, |part| part.blocks() * 512);
    check_room(site, size.saturating_sub(there), site.promised_bytes(key))
}

/// As [`check_room`] for bytes that are about to be written; quick where there is plenty.
///
/// # Errors
/// When there is no room for them.
pub fn ensure_room(site: &Site, bytes: u64) -> Result<(), TeleportError> {
    match bytes == 0 || site.has_room(bytes) {
        true => Ok(()),
        false => check_room(site, bytes, 0),
    }
}

/// Fails unless the disk has so much space beside what it keeps free and what was promised to others.
pub fn check_room(site: &Site, bytes: u64, promised: u64) -> Result<(), TeleportError> {
    // Cached data gives way to the incoming image.
    site.make_room(bytes.saturating_add(promised));
    let free = site.free_bytes();
    match free.map(|free| free.saturating_sub(promised)) {
        Some(free) if free < bytes => Err(TeleportError::refused(
            Code::NoSpace,
            format!(
                "needs {} MiB at the destination, which has {} MiB to spare",
                bytes >> 20,
                free >> 20
            ),
        )),
        _ => Ok(()),
    }
}
