//! The sessions that drive the roles over real connections: threads for disk and CPU work, tasks
//! for sockets, bounded queues between them.

mod destination;
mod lane_in;
mod lane_out;
mod source;
pub mod teleporter;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_image::Conversion;
use drover_net::{
    Backoff, Frame, FrameReader, FrameWriter, Identity, KeepAlive, PeerKey, RateLimit, Role,
    read_hello,
};
use tokio::sync::{mpsc, watch};

use crate::TeleportError;
use crate::compress::Effort;
use crate::progress::{Counters, ImageReport, SendEvent, WireTotals};

pub(crate) use destination::SessionShared;
pub use destination::{SessionLanes, Sessions};
pub use teleporter::serve_teleporter;

/// Frames between a socket and what handles them.
const FRAME_QUEUE: usize = 16;

/// One image to send.
#[derive(Debug, Clone)]
pub struct SendItem {
    /// Its file here.
    pub path: PathBuf,
    /// Its name there.
    pub name: ImageName,
    /// In which form.
    pub conversion: Conversion,
}

/// Where to and how.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// Who sends.
    pub identity: Identity,
    /// To whom.
    pub peer: PeerKey,
    /// What the user calls them.
    pub peer_name: String,
    /// Where they listen; tried in order.
    pub addresses: Vec<String>,
    /// At most so fast, all connections together.
    pub limit: Option<Arc<RateLimit>>,
    /// Only find out what would cross the link.
    pub dry_run: bool,
    /// Connections for literals: a fixed number, or as many as help.
    pub lanes: Option<u16>,
    /// How hard literals are compressed; by itself as suits the link and the machines.
    pub compress: Option<Effort>,
    /// How long to go on reconnecting without any progress.
    pub give_up_after: Duration,
}

/// Told of what happens during a send.
pub type OnEvent = Arc<dyn Fn(SendEvent) + Send + Sync>;

/// Sends images, one after the other in one session; reconnects and resumes when the link breaks.
/// Must run on a tokio runtime. `counters` are those of the image being sent; `wire` counts the
/// sockets. Setting `stop` ends it in a state that can be resumed.
///
/// An image that is refused or cannot be read does not keep the others back.
///
/// # Errors
/// The first thing that went wrong and cannot be helped by reconnecting.
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
    let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(20));
    let mut progress_at = std::time::Instant::now();
    loop {
        let before = sender.progress();
        let error = match sender.run().await {
            Ok(()) => return sender.into_reports(),
            Err(e) => e,
        };
        if *stop.borrow() {
            return Err(TeleportError::Stopped);
        }
        if sender.skips(&error) {
            sender.skip(error);
            if sender.is_over() {
                return sender.into_reports();
            }
            // The next session begins clean.
            progress_at = std::time::Instant::now();
            backoff.reset();
            continue;
        }
        if !error.retryable() {
            return Err(error);
        }
        if sender.progress() > before {
            progress_at = std::time::Instant::now();
            backoff.reset();
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

/// Frames from a connection, read by a task of their own so that waiting for them can be given up
/// without losing part of one. The channel ends after `Ok(None)`-like ends of the stream.
fn read_frames(reader: FrameReader) -> mpsc::Receiver<Result<Frame, TeleportError>> {
    read_frames_after(reader, None)
}

/// The same, when the peer's hello has to be heard before.
fn read_frames_after(
    mut reader: FrameReader,
    hello: Option<Role>,
) -> mpsc::Receiver<Result<Frame, TeleportError>> {
    let (to, from) = mpsc::channel(FRAME_QUEUE);
    tokio::spawn(async move {
        if let Some(role) = hello
            && let Err(e) = read_hello(&mut reader, role).await
        {
            let _ = to.send(Err(e.into())).await;
            return;
        }
        loop {
            let next = match reader.next().await {
                Ok(Some(frame)) => Ok(frame),
                Ok(None) => return,
                Err(e) => Err(e.into()),
            };
            let last = next.is_err();
            // The receiver may go first: what still comes is then of no interest, but reading on
            // keeps the socket from being reset under what we wrote last.
            let _ = to.send(next).await;
            if last {
                return;
            }
        }
    });
    from
}

/// Writes frames to a connection until the channel is closed, then ends it in order.
fn write_frames(
    mut writer: FrameWriter,
) -> (
    mpsc::Sender<Frame>,
    tokio::task::JoinHandle<Result<(), TeleportError>>,
) {
    let (to, mut from) = mpsc::channel::<Frame>(FRAME_QUEUE);
    let task = tokio::spawn(async move {
        let every = KeepAlive::default().ping_every;
        loop {
            let frame = match from.try_recv() {
                Ok(frame) => frame,
                Err(mpsc::error::TryRecvError::Disconnected) => break,
                Err(mpsc::error::TryRecvError::Empty) => {
                    writer.flush().await?;
                    let next = tokio::select! {
                        frame = from.recv() => frame,
                        e = writer.ping_when_idle(every) => return Err(e.into()),
                    };
                    match next {
                        Some(frame) => frame,
                        None => break,
                    }
                }
            };
            writer.send(frame.kind, &frame.payload).await?;
        }
        writer.finish().await?;
        Ok(())
    });
    (to, task)
}

/// The bytes a frame takes before encryption.
fn frame_bytes(payload: usize) -> u64 {
    (drover_net::HEADER_LEN + payload) as u64
}
