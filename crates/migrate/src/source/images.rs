//! Sends the images of what moves.

use std::sync::Arc;

use drover_core::BLOCK_SIZE_U64;
use drover_teleport::progress::ImageReport;
use drover_teleport::{SendItem, send};
use tokio::sync::watch;

use super::proof::Delivered;
use super::report::{MoveEvent, MoveOptions, OnMove};
use crate::error::MigrateError;

/// What sending the images took.
#[derive(Default)]
pub(super) struct ImagesSent {
    pub wire_bytes: u64,
    pub unread_bytes: u64,
    /// Those that were not read completely.
    pub unread: Vec<Delivered>,
}

/// Sends the images of the disks.
pub(super) async fn send_images(
    items: Vec<SendItem>,
    options: &MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<ImagesSent, MigrateError> {
    if items.is_empty() {
        return Ok(ImagesSent::default());
    }
    let states: Vec<_> = items
        .iter()
        .map(|item| (item.name.clone(), item.snapshot.clone()))
        .collect();
    let reports = send(
        items,
        options.send.clone(),
        Arc::new(move |event| on_event(MoveEvent::Send(event))),
        Arc::clone(&options.counters),
        Arc::clone(&options.wire),
        stop,
    );
    let reports = reports.await?;
    let unread = |report: &&ImageReport| report.unread_blocks > 0;
    let delivered = reports.iter().filter(unread).filter_map(|report| {
        let state = states.iter().find(|(name, _)| name.as_str() == report.name);
        let (name, state) = state?;
        Some(Delivered {
            name: name.clone(),
            image: state.as_ref()?.image.clone(),
            digest: report.digest,
        })
    });
    let blocks: u64 = reports.iter().map(|report| report.unread_blocks).sum();
    Ok(ImagesSent {
        wire_bytes: reports.iter().map(|report| report.wire_sent_bytes).sum(),
        unread_bytes: blocks * BLOCK_SIZE_U64,
        unread: delivered.collect(),
    })
}
