//! The lanes of a session at the source: opened as they are of use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_image::Outgoing;
use drover_net::{
    ConnectOptions, Frame, FrameReader, KeepAlive, Role, connect_any, decode, encode, hear_hello,
    say_hello,
};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::{SendOptions, Sender, refusal};
use crate::TeleportError;
use crate::codec::Runs;
use crate::progress::{Counters, WireTotals};
use crate::protocol::{MAX_LANES, MAX_SESSION_FRAME, Reply, Request, kind};
use crate::session::lane_out::{LaneOut, LaneTimes, NeedQueue, socket_queue, write_lane};

/// How often it is judged whether another lane would help.
const JUDGE_EVERY: Duration = Duration::from_millis(1500);

/// Lanes that are opened without being told to.
const MAX_OWN_LANES: u16 = 4;

/// Batches between the walk and the first lane.
const BATCH_QUEUE: usize = 4;

/// Blocks of a dry run that are kept to sample how they compress.
const MAX_SAMPLE_BLOCKS: usize = 1 << 16;

/// See the module.
pub struct Lanes {
    needs: Arc<NeedQueue>,
    sample: Mutex<Vec<u64>>,
    failure: tokio::sync::Mutex<mpsc::Receiver<TeleportError>>,
    opener: JoinHandle<()>,
    stop: watch::Sender<bool>,
    /// Frames that go over the first lane, ahead of its literals.
    pub first: mpsc::Sender<Frame>,
}

/// What a lane is opened with.
#[derive(Clone)]
struct Plan {
    options: SendOptions,
    session: [u8; 16],
    needs: Arc<NeedQueue>,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    failures: mpsc::Sender<TeleportError>,
    times: Arc<LaneTimes>,
}

impl Lanes {
    /// Opens the first lane, and more when they help.
    pub fn start(sender: &Sender, session: [u8; 16]) -> Self {
        let needs = Arc::new(NeedQueue::default());
        let (failures, failure) = mpsc::channel(1);
        let plan = Plan {
            options: sender.options.clone(),
            session,
            needs: needs.clone(),
            counters: sender.counters.clone(),
            wire: sender.wire.clone(),
            failures,
            times: Arc::default(),
        };
        let (stop, stopped) = watch::channel(false);
        let (first, batches) = mpsc::channel(BATCH_QUEUE);
        let opener = tokio::spawn(open_lanes(plan, batches, stopped));
        Lanes {
            needs,
            sample: Mutex::default(),
            failure: tokio::sync::Mutex::new(failure),
            opener,
            stop,
            first,
        }
    }

    /// The image that needs are about from now on.
    pub fn set_image(&self, slot: u32, image: Arc<Outgoing>) {
        self.sample.lock().clear();
        self.needs.set_image(slot, image);
    }

    /// Has blocks sent.
    pub fn need(&self, runs: &Runs) {
        self.needs.add(runs);
    }

    /// Waits until there is little enough left to send. Cancel safe.
    pub async fn room(&self) {
        self.needs.room().await;
    }

    /// Remembers some of the blocks that a dry run would send.
    pub fn sample(&self, runs: &Runs) {
        let mut sample = self.sample.lock();
        let room = MAX_SAMPLE_BLOCKS.saturating_sub(sample.len());
        sample.extend(runs.blocks().take(room));
    }

    /// Those blocks.
    pub fn sampled(&self) -> Vec<u64> {
        self.sample.lock().clone()
    }

    /// Waits until a lane fails.
    pub async fn failed(&self) -> TeleportError {
        match self.failure.lock().await.recv().await {
            Some(error) => error,
            None => std::future::pending().await,
        }
    }

    /// Ends the lanes.
    pub async fn close(self) {
        self.needs.close();
        self.stop.send_replace(true);
        let _ = self.opener.await;
    }
}

/// Opens lanes one by one, for as long as each new one makes the whole faster.
async fn open_lanes(plan: Plan, batches: mpsc::Receiver<Frame>, mut stop: watch::Receiver<bool>) {
    let fixed = plan.options.lanes.map(|n| n.clamp(1, MAX_LANES));
    let most = fixed.unwrap_or(if plan.options.limit.is_some() {
        1
    } else {
        MAX_OWN_LANES
    });
    let mut batches = Some(batches);
    let mut lanes = Vec::new();
    let mut judge = Judge::default();
    while !*stop.borrow() && lanes.len() < usize::from(most) {
        let opened = tokio::select! {
            opened = open(&plan, lanes.len() as u16, &mut batches) => opened,
            _ = stop.wait_for(|s| *s) => break,
        };
        match opened {
            Ok(lane) => lanes.push(lane),
            Err(e) if lanes.is_empty() => {
                let _ = plan.failures.send(e).await;
                break;
            }
            Err(e) => {
                tracing::debug!(error = %e, "no further lane");
                break;
            }
        }
        while fixed.is_none() && !*stop.borrow() {
            let open = lanes.len() as u16;
            let stopped = tokio::time::timeout(JUDGE_EVERY, stop.wait_for(|s| *s)).await;
            if stopped.is_ok() || judge.wants_more(&plan, open) {
                break;
            }
        }
    }
    let _ = stop.wait_for(|s| *s).await;
    for lane in lanes {
        let _ = tokio::time::timeout(super::CLOSE_LIMIT, lane).await;
    }
}

/// Judges whether the lanes wait for their sockets, and whether the last new one helped.
#[derive(Default)]
struct Judge {
    sent: u64,
    busy: u64,
    waited: u64,
    /// The rate before the last lane was opened, in bytes an interval.
    before: u64,
    settled: bool,
}

impl Judge {
    fn wants_more(&mut self, plan: &Plan, open: u16) -> bool {
        let sent = plan.wire.sent();
        let rate = sent - std::mem::replace(&mut self.sent, sent);
        let busy = plan.times.busy_ns.load(Ordering::Relaxed);
        let waited = plan.times.waited_ns.load(Ordering::Relaxed);
        let (busy, waited) = (
            busy - std::mem::replace(&mut self.busy, busy),
            waited - std::mem::replace(&mut self.waited, waited),
        );
        // Mostly waiting for the socket: either the link is full, which the next lane will show,
        // or one connection cannot fill it.
        if self.settled || waited < busy {
            return false;
        }
        if self.before > 0 && rate < self.before + self.before / 10 {
            self.settled = true;
            plan.needs.rest_from(open - 1);
            return false;
        }
        self.before = rate;
        true
    }
}

/// Opens one lane and sets its threads to work.
async fn open(
    plan: &Plan,
    number: u16,
    batches: &mut Option<mpsc::Receiver<Frame>>,
) -> Result<JoinHandle<()>, TeleportError> {
    let SendOptions {
        identity,
        peer,
        peer_name,
        addresses,
        limit,
        ..
    } = &plan.options;
    let connection =
        connect_any(addresses, identity, peer, &ConnectOptions::named(peer_name)).await?;
    plan.wire.add(connection.wire());
    let (mut reader, mut writer) = connection.split();
    writer.set_rate(limit.clone());
    reader.set_max_frame(MAX_SESSION_FRAME);
    say_hello(&mut writer, Role::Client).await?;
    let request = Request::Lane {
        session: plan.session,
    };
    writer.send(kind::REQUEST, &encode(&request)).await?;
    writer.flush().await?;
    let asked = Instant::now();
    hear_hello(&mut reader, Role::Client).await?;
    // A limit makes a slow link of any.
    let round_trip = if limit.is_some() {
        Duration::MAX
    } else {
        asked.elapsed()
    };
    let reply = reader.next().await?.ok_or_else(super::broken)?;
    match decode::<Reply>(&reply.payload) {
        Ok(Reply::Ready) if reply.kind == kind::REPLY => {}
        Ok(Reply::Refused(r)) => return Err(refusal(r)),
        _ => {
            let wrong = "the destination gave a wrong answer to a lane".into();
            return Err(TeleportError::Protocol(wrong));
        }
    }
    KeepAlive::default().apply(&mut reader, &mut writer);
    let (to, from) = socket_queue();
    let first = batches.take().unwrap_or_else(|| mpsc::channel(1).1);
    let receiver_busy = Arc::new(AtomicU64::new(0));
    let lane = LaneOut {
        needs: plan.needs.clone(),
        counters: plan.counters.clone(),
        times: plan.times.clone(),
        number,
        round_trip,
        receiver_busy: receiver_busy.clone(),
    };
    let counters = plan.counters.clone();
    let failures = plan.failures.clone();
    let thread_failures = failures.clone();
    tokio::task::spawn_blocking(move || {
        if let Err(e) = lane.run(&to) {
            let _ = thread_failures.blocking_send(e);
        }
    });
    tracing::debug!(number, "lane open");
    Ok(tokio::spawn(async move {
        let written = write_lane(writer, from, first, &counters.stages);
        let result = tokio::select! {
            result = written => result,
            error = listen(&mut reader, &receiver_busy) => Err(error),
        };
        if let Err(e) = result {
            let _ = failures.try_send(e);
        }
        // Reading to the end lets the peer take what was written last.
        while let Ok(Some(_)) = reader.next().await {}
    }))
}

/// Hears how busy the destination is until the lane breaks. The destination only ends a lane after
/// it has refused the image on the control connection, which says why: no error of its own.
async fn listen(reader: &mut FrameReader, receiver_busy: &AtomicU64) -> TeleportError {
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
