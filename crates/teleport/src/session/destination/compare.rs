//! Resending an image that the site already has: as long as every batch equals the data at the same position in the
//! image of that name, nothing is copied, and only the log is written. At the first difference, the data compared so
//! far is copied at once and the transfer continues normally.

use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, CompactIndex};
use drover_image::{Layout, Stamp};
use drover_index::{Origin, Plan, PlanRun, Via};
use drover_net::{decode, encode};
use drover_store::{BlockMap, ImageRecord, OpenImage};
use tokio::sync::watch;

use super::control::{Frames, Session, stopped};
use super::prepare::taken_over;
use crate::TeleportError;
use crate::active::Hold;
use crate::codec::{Batch, Runs, proofs_of};
use crate::destination::Event;
use crate::files::{copy_spans, digest_in_place, remove_dir, spans_of};
use crate::frames::wait_true;
use crate::protocol::{Accept, BATCH_BLOCKS, Delivered, End, GiveUp, Matched, Offer, kind};
use crate::session::SessionShared;
use crate::site::Site;
use crate::stages::{DestinationStages, Lap};
use crate::transfer::{Opening, Transfer, transfer_key};

/// Result of a comparison.
pub enum Compared {
    /// There is nothing to compare with; the offer has not been answered.
    Not,
    /// The site already has the image.
    Same(Box<Delivered>),
    /// The source gave up.
    GivenUp,
    /// The first event that belongs to a real transfer; everything before is in the transfer's log.
    Differs(Event),
}

/// A comparison with an image, and the transfer that starts if they differ.
struct Comparison {
    record: ImageRecord,
    base: Arc<OpenImage>,
    stamp: Stamp,
    transfer: Transfer,
    blocks: BlockMap,
    stages: Arc<DestinationStages>,
    hold: Hold,
}

impl Session {
    /// Compares the offered image with the image of that name, if there is one with the same layout and no transfer
    /// to resume.
    pub(super) async fn compare(
        &self,
        offer: &Offer,
        layout: &[u8],
        frames: &mut Frames,
    ) -> Result<Compared, TeleportError> {
        let (site, shared) = (self.site.clone(), self.shared.clone());
        let (wanted, encoded) = (offer.clone(), layout.to_vec());
        let begun = tokio::task::spawn_blocking(move || begin(&site, &shared, wanted, &encoded));
        let Some(mut comparison) = begun.await.map_err(|_| stopped())?? else {
            return Ok(Compared::Not);
        };
        self.send(kind::ACCEPT, encode(&Accept::default())).await?;
        let newer = comparison.hold.stop.clone();
        loop {
            let mut lap = Lap::start();
            let frame = tokio::select! {
                frame = frames.next() => frame?,
                _ = wait_true(self.stop.clone()) => return Err(TeleportError::Stopped),
                _ = wait_true(newer.clone()) => return Err(taken_over()),
                e = self.idle_while_others_wait() => return Err(e),
            };
            self.shared.activity.touch();
            lap.wait(&self.shared.stages.check);
            let event = match frame.kind {
                kind::BATCH => Event::Batch(Arc::new(Batch::decode(&frame.payload)?)),
                kind::END => Event::End(Some(decode::<End>(&frame.payload)?.digest)),
                kind::GIVE_UP => {
                    let _: GiveUp = decode(&frame.payload)?;
                    remove_dir(&comparison.transfer.dir);
                    return Ok(Compared::GivenUp);
                }
                other => {
                    return Err(TeleportError::Protocol(format!(
                        "frame {other:#04x} in an image"
                    )));
                }
            };
            let step = tokio::task::spawn_blocking(move || {
                let same = comparison.step(&event);
                (comparison, event, same)
            });
            let (returned, event, same) = step.await.map_err(|_| stopped())?;
            comparison = returned;
            match (same?, &event) {
                (true, Event::Batch(batch)) => {
                    self.send(kind::ACK, batch.index.to_le_bytes().to_vec())
                        .await?;
                }
                (true, _) => {
                    let site = self.site.clone();
                    let kept = tokio::task::spawn_blocking(move || comparison.keep(&site));
                    return kept
                        .await
                        .map_err(|_| stopped())?
                        .map(Box::new)
                        .map(Compared::Same);
                }
                (false, _) => {
                    tracing::debug!(
                        at = comparison.blocks.batches(),
                        "differs from the image here"
                    );
                    let stop = self.stop.clone();
                    let moved = tokio::task::spawn_blocking(move || comparison.bring_over(&stop));
                    moved.await.map_err(|_| stopped())??;
                    return Ok(Compared::Differs(event));
                }
            }
        }
    }
}

fn begin(
    site: &Arc<Site>,
    shared: &SessionShared,
    offer: Offer,
    encoded: &[u8],
) -> Result<Option<Comparison>, TeleportError> {
    let SessionShared {
        peer,
        peer_name,
        number,
        stages,
        ..
    } = shared;
    let Some(record) = site.images.by_name(&offer.name).filter(|r| !r.external) else {
        return Ok(None);
    };
    let dir = site.transfer_dir(&transfer_key(peer, &offer.name));
    if dir.exists() || record.size_bytes != offer.file_bytes || record.format != offer.format {
        return Ok(None);
    }
    let Ok(layout) = Layout::decode(encoded, drover_store::layout_limits()) else {
        return Ok(None); // The transfer refuses it with a reason.
    };
    let Some(base) = site.images.open_image(record.id) else {
        return Ok(None);
    };
    let same = *base.map.layout == layout && layout.walk_blocks() == offer.walk_blocks;
    // Only data blocks are compared: the zeros are unchanged because the file still has the stamp from when it was
    // digested.
    let stamp = Stamp::of(&base.file)
        .ok()
        .filter(|s| record.stamp == Some(*s) && Stamp::of_path(&record.path).ok() == Some(*s));
    let (true, Some(stamp)) = (same, stamp) else {
        return Ok(None);
    };
    let key = transfer_key(peer, &offer.name);
    let Ok(hold) = site
        .active
        .take(&offer.name, &key, *number, std::time::Duration::ZERO)
    else {
        return Ok(None);
    };
    let image = site
        .catalog
        .new_image_id()
        .map_err(drover_store::StoreError::from)?;
    let opening = Opening {
        peer: *peer,
        peer_name: peer_name.clone(),
        offer,
        image: image.0,
    };
    let transfer = Transfer::create(
        &dir,
        opening,
        base.map.layout.clone(),
        encoded,
        &site.config.disk,
    )?;
    let blocks = BlockMap::default();
    Ok(Some(Comparison {
        record,
        base,
        stamp,
        transfer,
        blocks,
        stages: stages.clone(),
        hold,
    }))
}

impl Comparison {
    /// Whether everything up to and including this event is identical.
    fn step(&mut self, event: &Event) -> Result<bool, TeleportError> {
        match event {
            Event::Batch(batch) => {
                let mut lap = Lap::start();
                let same = self.has(batch)?;
                lap.busy(&self.stages.check);
                let bytes = batch.digests.len() as u64 * BLOCK_SIZE_U64;
                self.stages.check.add_bytes(bytes);
                if same {
                    let first = CompactIndex(self.blocks.data_blocks());
                    self.blocks.push(&batch.data);
                    self.transfer.log_batch(batch, &self.plan(batch, first))?;
                    lap.busy(&self.stages.log);
                }
                Ok(same)
            }
            Event::End(digest) => {
                let whole = self.blocks.walk_blocks() == self.base.map.layout.walk_blocks();
                let untouched = Stamp::of_path(&self.record.path).ok() == Some(self.stamp);
                Ok(whole && untouched && *digest == Some(self.record.digest))
            }
            _ => Ok(false),
        }
    }

    /// Whether the local image has the batch at the same position.
    fn has(&self, batch: &Batch) -> Result<bool, TeleportError> {
        let next = batch.index == self.blocks.batches();
        if !next || self.base.map.blocks.batch(batch.index).as_ref() != Some(&batch.data) {
            return Ok(false);
        }
        let runs: Runs = batch.data.iter().map(|i| batch.first_block() + i).collect();
        let runs = runs.to_vec();
        let mut full = Vec::with_capacity(batch.digests.len());
        digest_in_place(&self.base.file, &self.base.map.layout, &runs, &mut full)
            .map_err(TeleportError::file("read", &self.record.path))?;
        // The proofs cover the full digests, which imply the short ones.
        Ok(proofs_of(&full) == batch.proofs)
    }

    fn plan(&self, batch: &Batch, first: CompactIndex) -> Plan {
        let count = batch.digests.len() as u32;
        let origin = Origin::Image {
            image: self.record.id,
            first,
        };
        let runs = if count == 0 {
            vec![]
        } else {
            vec![PlanRun {
                count,
                origin,
                via: Via::C2,
            }]
        };
        Plan {
            runs,
            stores: Vec::new(),
        }
    }

    /// Everything is identical: keeps the image unchanged.
    fn keep(self, site: &Site) -> Result<Delivered, TeleportError> {
        let mut lap = Lap::start();
        remove_dir(&self.transfer.dir);
        lap.busy(&self.stages.deliver);
        let matched_blocks = self.blocks.data_blocks();
        let delivered = Delivered {
            digest: self.record.digest,
            matched_blocks,
            zero_blocks: self.blocks.walk_blocks() - matched_blocks,
            matched: Matched {
                in_place: matched_blocks,
                ..Matched::default()
            },
            stages: Box::new(self.stages.times()),
            ..Delivered::default()
        };
        site.totals.delivered(&delivered);
        Ok(delivered)
    }

    /// Copies the identical data into the partial file, where resuming verifies it again.
    fn bring_over(self, stop: &watch::Receiver<bool>) -> Result<(), TeleportError> {
        for index in 0..self.blocks.batches() {
            // Whatever is not copied is found missing when the transfer is resumed.
            if *self.hold.stop.borrow() {
                return Err(taken_over());
            }
            if *stop.borrow() {
                return Err(TeleportError::Stopped);
            }
            let Some(data) = self.blocks.batch(index) else {
                continue;
            };
            let runs: Runs = data.iter().map(|i| index * BATCH_BLOCKS + i).collect();
            let runs = runs.to_vec();
            let spans = spans_of(&self.base.map.layout, &runs);
            copy_spans(&self.base.file, &spans, &self.transfer.part, &spans)
                .map_err(TeleportError::file("write", self.transfer.part_path()))?;
        }
        // Data copied just now may be verified from the page cache; it need not come from the disk.
        self.transfer.mark_rested()
    }
}
