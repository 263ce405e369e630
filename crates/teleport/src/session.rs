//! The sessions that drive the roles over real connections: threads for disk and CPU work, tasks for sockets, bounded
//! queues between them.

mod activity;
mod destination;
mod flock;
mod literals_in;
mod literals_out;
mod options;
mod shared;
mod source;

use std::sync::Arc;
use std::time::Duration;

use drover_net::Backoff;
use tokio::sync::watch;

use crate::TeleportError;
use crate::progress::{Counters, ImageReport, SendEvent, WireTotals};

pub use destination::{DataConnections, FlockSessions, Sessions};
pub use flock::{
    FlockOrder, FlockSent, SendLane, end_flock, nodes_of, open_flock, send_flock, send_of_flock,
};
pub use options::{FindProfile, OnEvent, SendItem, SendOptions, Snapshot};
pub(crate) use shared::SessionShared;
pub use source::source_stamp;

/// Sends images one after the other in one session; reconnects and resumes when the connection breaks. Must run on a
/// tokio runtime. `counters` are those of the image being sent; `wire` counts bytes on the sockets. Setting `stop`
/// ends the send in a resumable state.
///
/// An image that is refused or cannot be read does not stop the others.
///
/// # Errors
/// The first error that reconnecting cannot fix.
pub async fn send(
    items: Vec<SendItem>,
    options: SendOptions,
    on_event: OnEvent,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    stop: watch::Receiver<bool>,
) -> Result<Vec<ImageReport>, TeleportError> {
    let mut sender = source::Sender::new(
        items,
        options.clone(),
        on_event.clone(),
        counters.clone(),
        wire,
        stop.clone(),
    );
    run(&mut sender, &options, &on_event, &stop).await?;
    sender.into_reports()
}

/// Runs a sender until all of its images are delivered or given up.
async fn run(
    sender: &mut source::Sender,
    options: &SendOptions,
    on_event: &OnEvent,
    stop: &watch::Receiver<bool>,
) -> Result<(), TeleportError> {
    let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(20));
    let mut progress_at = std::time::Instant::now();
    loop {
        let before = sender.progress();
        let error = match sender.run().await {
            Ok(()) => return Ok(()),
            Err(e) => e,
        };
        if *stop.borrow() {
            return Err(TeleportError::Stopped);
        }
        if sender.skips(&error) {
            sender.skip(error);
            if sender.is_over() {
                return Ok(());
            }
            // The image is skipped; the next session starts with a fresh timeout and backoff.
            progress_at = std::time::Instant::now();
            backoff.reset();
            continue;
        }
        if !error.retryable() {
            return Err(sender.final_error(error));
        }
        if sender.progress() > before {
            progress_at = std::time::Instant::now();
            backoff.reset();
        } else {
            // Another node of the site may do better.
            options.route.leave().await;
        }
        if !sender.was_connected() || progress_at.elapsed() > options.give_up_after {
            return Err(error);
        }
        let delay = backoff.next_delay();
        on_event(SendEvent::Reconnecting {
            error: error.to_string(),
            delay_ms: delay.as_millis() as u64,
        });
        let mut stop = stop.clone();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            _ = stop.wait_for(|s| *s) => return Err(TeleportError::Stopped),
        }
    }
}
