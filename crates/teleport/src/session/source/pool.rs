//! The pool of data connections of a session at the source: a fixed number, or adapted by measuring whether more
//! help.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_image::Outgoing;
use drover_net::group::{ConnectionTrials, TrialSample};
use drover_net::service::{self, read_reply};
use drover_net::{Frame, FrameReader, KeepAlive};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::TeleportError;
use crate::codec::Runs;
use crate::compress::Pace;
use crate::frames::CLOSE_LIMIT;
use crate::progress::{Counters, WireTotals};
use crate::protocol::{MAX_DATA_CONNECTIONS, MAX_SESSION_FRAME, kind};
use crate::services::JoinSession;
use crate::session::SendOptions;
use crate::session::literals_out::{LiteralSender, NeedQueue, PoolTimes, socket_queue, write_data};

/// Batches queued between the walk and the first data connection.
const BATCH_QUEUE: usize = 4;

/// Blocks of a dry run that are kept as a sample for estimating compression.
const MAX_SAMPLE_BLOCKS: usize = 1 << 16;

/// See the module documentation.
pub struct DataPool {
    needs: Arc<NeedQueue>,
    sample: Mutex<Vec<u64>>,
    failure: tokio::sync::Mutex<mpsc::Receiver<TeleportError>>,
    opener: JoinHandle<()>,
    stop: watch::Sender<Option<Wait>>,
    /// Frames that go over the first data connection, ahead of its literals.
    pub first: mpsc::Sender<Frame>,
}

/// Parameters for opening a data connection.
#[derive(Clone)]
struct Plan {
    options: SendOptions,
    session: [u8; 16],
    needs: Arc<NeedQueue>,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    failures: mpsc::Sender<TeleportError>,
    times: Arc<PoolTimes>,
}

impl Plan {
    /// A snapshot of the data connections' counters, for the trials.
    fn look(&self) -> TrialSample {
        let spent = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        TrialSample {
            at: Instant::now(),
            sent: self.wire.sent(),
            busy: spent(&self.times.busy_ns),
            waited: spent(&self.times.waited_ns),
            left: self.needs.seconds_left(),
            round_trip: spent(&self.times.round_trip_ns),
        }
    }
}

impl DataPool {
    /// Opens the first data connection, and more if they help.
    pub fn start(
        session: [u8; 16],
        options: SendOptions,
        counters: Arc<Counters>,
        wire: Arc<WireTotals>,
    ) -> Self {
        let needs = Arc::new(NeedQueue::default());
        let (failures, failure) = mpsc::channel(1);
        let plan = Plan {
            options,
            session,
            needs: needs.clone(),
            counters,
            wire,
            failures,
            times: Arc::default(),
        };
        let (stop, stopped) = watch::channel(None);
        let (first, batches) = mpsc::channel(BATCH_QUEUE);
        let opener = tokio::spawn(open_connections(plan, batches, stopped));
        DataPool {
            needs,
            sample: Mutex::default(),
            failure: tokio::sync::Mutex::new(failure),
            opener,
            stop,
            first,
        }
    }

    /// Sets the image that requests refer to from now on.
    pub fn set_image(&self, slot: u32, image: Arc<Outgoing>) {
        self.sample.lock().clear();
        self.needs.set_image(slot, image);
    }

    /// Queues blocks to be sent.
    pub fn need(&self, runs: &Runs) {
        self.needs.add(runs);
    }

    /// Takes blocks back that wait to be sent; returns which did.
    pub fn take_back(&self, runs: &Runs) -> Runs {
        self.needs.take_back(runs)
    }

    /// The queue of blocks to be sent.
    pub fn needs(&self) -> Arc<NeedQueue> {
        self.needs.clone()
    }

    /// Waits until the backlog has room. Cancel safe.
    pub async fn room(&self) {
        self.needs.room().await;
    }

    /// Samples blocks that a dry run would send.
    pub fn sample(&self, runs: &Runs) {
        let mut sample = self.sample.lock();
        let room = MAX_SAMPLE_BLOCKS.saturating_sub(sample.len());
        sample.extend(runs.blocks().take(room));
    }

    /// The sampled blocks.
    pub fn sampled(&self) -> Vec<u64> {
        self.sample.lock().clone()
    }

    /// Waits until a data connection fails.
    pub async fn failed(&self) -> TeleportError {
        match self.failure.lock().await.recv().await {
            Some(error) => error,
            None => std::future::pending().await,
        }
    }

    /// Closes the data connections.
    pub async fn close(mut self, wait: Wait) {
        self.needs.close();
        self.stop.send_replace(Some(wait));
        let _ = (&mut self.opener).await;
    }
}

impl Drop for DataPool {
    /// Dropping the pool to cancel a send must not leave threads waiting for blocks.
    fn drop(&mut self) {
        self.needs.close();
    }
}

/// What closing the data connections waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The peer has read everything and closed its side.
    ForPeer,
    /// Everything was written to the sockets.
    ForSocket,
}

/// Opens data connections: the requested number, otherwise one, then as many as trials show to help.
async fn open_connections(
    plan: Plan,
    batches: mpsc::Receiver<Frame>,
    mut stop: watch::Receiver<Option<Wait>>,
) {
    let fixed = plan
        .options
        .connections
        .map(|n| n.clamp(1, MAX_DATA_CONNECTIONS));
    let limited = plan.options.limit.is_some();
    let mut trials = ConnectionTrials::new(if limited { 1 } else { MAX_DATA_CONNECTIONS });
    let mut batches = Some(batches);
    let mut connections = Vec::new();
    loop {
        let wanted = usize::from(fixed.unwrap_or(trials.working()));
        while connections.len() < wanted && stop.borrow().is_none() {
            let opened = tokio::select! {
                opened = open(&plan, connections.len() as u16, &mut batches) => opened,
                _ = stop.wait_for(Option::is_some) => break,
            };
            match opened {
                Ok(opened) => connections.push(opened),
                Err(e) if connections.is_empty() => {
                    let _ = plan.failures.send(e).await;
                    break;
                }
                Err(e) => {
                    tracing::debug!(error = %e, "no further data connection");
                    break;
                }
            }
        }
        // If the connections could not be opened, there is nothing to try.
        if fixed.is_some() || limited || connections.len() < wanted {
            break;
        }
        plan.needs.only(trials.working());
        let mut changed = false;
        while !changed {
            let pause = trials.pause(plan.times.round_trip_ns.load(Ordering::Relaxed));
            let stopped = tokio::time::timeout(pause, stop.wait_for(Option::is_some)).await;
            if stopped.is_ok() {
                break;
            }
            changed = trials.observe(&plan.look());
        }
        if !changed {
            break;
        }
        tracing::debug!(connections = trials.working(), "data connections in use");
    }
    let wait = stop.wait_for(Option::is_some).await.map_or(None, |w| *w);
    for connection in connections {
        let ended = async {
            let _ = connection.written.await;
            if wait != Some(Wait::ForSocket) {
                let _ = connection.ended.await;
            }
        };
        let _ = tokio::time::timeout(CLOSE_LIMIT, ended).await;
    }
}

/// A running data connection.
struct DataConnection {
    /// Completes when everything was written to the socket.
    written: oneshot::Receiver<()>,
    /// Completes when the peer has closed its side too.
    ended: JoinHandle<()>,
}

/// Opens one data connection and starts its threads.
async fn open(
    plan: &Plan,
    number: u16,
    batches: &mut Option<mpsc::Receiver<Frame>>,
) -> Result<DataConnection, TeleportError> {
    let limit = &plan.options.limit;
    let connection = plan.options.connect(&plan.wire).await?;
    // A rate limit makes any link slow, so treat it like a distant one.
    let round_trip = match (limit, connection.round_trip()) {
        (None, Some(time)) => time,
        _ => Duration::MAX,
    };
    let (mut reader, mut writer) = connection.split();
    if number == 0 {
        let nanos = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
        plan.times.round_trip_ns.store(nanos, Ordering::Relaxed);
    }
    writer.set_rate(limit.clone());
    reader.set_max_frame(MAX_SESSION_FRAME);
    let session = plan.session;
    service::open(&mut writer, &JoinSession { session }).await?;
    // The session fails anyway without its first data connection, so that one starts before the reply arrives.
    let answered = number > 0;
    if answered {
        writer.flush().await?;
        read_reply::<JoinSession>(&mut reader).await?;
    }
    KeepAlive::default().apply(&mut reader, &mut writer);
    let (to, from) = socket_queue();
    let first = batches.take().unwrap_or_else(|| mpsc::channel(1).1);
    let receiver_busy = Arc::new(AtomicU64::new(0));
    let pace = match plan.options.compress {
        Some(effort) => Pace::fixed(effort),
        None => Pace::of_link(
            round_trip,
            limit.as_ref().map(|limit| limit.bytes_per_second()),
        ),
    };
    let sender = LiteralSender {
        needs: plan.needs.clone(),
        counters: plan.counters.clone(),
        times: plan.times.clone(),
        number,
        pace,
        receiver_busy: receiver_busy.clone(),
    };
    let counters = plan.counters.clone();
    let failures = plan.failures.clone();
    let thread_failures = failures.clone();
    tokio::task::spawn_blocking(move || {
        if let Err(e) = sender.run(&to) {
            let _ = thread_failures.blocking_send(e);
        }
    });
    tracing::debug!(number, "data connection open");
    let (tell, written) = oneshot::channel();
    let ended = tokio::spawn(async move {
        let written = write_data(writer, from, first, &counters.stages);
        let result = tokio::select! {
            result = written => result,
            error = listen(&mut reader, answered, &receiver_busy) => Err(error),
        };
        if let Err(e) = result {
            let _ = failures.try_send(e);
        }
        let _ = tell.send(());
        // Read to the end, so that the peer can receive the last frames.
        while let Ok(Some(_)) = reader.next().await {}
    });
    Ok(DataConnection { written, ended })
}

/// Reads the destination's busy reports until the data connection breaks. That is no error of its own: the
/// destination ends a data connection only after refusing the image on the control connection, with the reason.
async fn listen(
    reader: &mut FrameReader,
    answered: bool,
    receiver_busy: &AtomicU64,
) -> TeleportError {
    if !answered && let Err(e) = read_reply::<JoinSession>(reader).await {
        return e.into();
    }
    loop {
        match reader.next().await {
            Ok(Some(frame)) if frame.kind == kind::BUSY => {
                let share = frame
                    .payload
                    .as_ref()
                    .try_into()
                    .map_or(0, u16::from_le_bytes);
                receiver_busy.store(u64::from(share), Ordering::Relaxed);
            }
            Ok(Some(_)) => {}
            Ok(None) => std::future::pending().await,
            Err(e) => return e.into(),
        }
    }
}
