//! A data connection at the source: requested blocks are read, compressed and sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::BLOCK_SIZE;
use drover_image::Outgoing;
use drover_net::{Frame, FrameWriter, until};
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, mpsc};

use crate::TeleportError;
use crate::codec::{LiteralHeader, Runs};
use crate::compress::{Effort, MAX_WINDOW_LOG, Pace, Packer, Passed};
use crate::frames::frame_bytes;
use crate::progress::Counters;
use crate::protocol::{FRAME_BLOCKS, kind};
use crate::source::take_out;
use crate::stages::{Lap, SourceStages, Stage};
use crate::walk::read_image;

/// Frames queued between a data connection's thread and its socket.
const SOCKET_QUEUE: usize = 1;

/// Blocks to be sent by the data connections, in the order in which they were requested. Bounded by the window: only
/// blocks of incomplete batches are requested.
#[derive(Default)]
pub struct NeedQueue {
    state: Mutex<NeedState>,
    more: Condvar,
    less: Notify,
}

/// Backlog, in blocks, that never stops digests from being sent.
const MIN_BACKLOG: u64 = 1 << 16;

/// Limit of the backlog in seconds at the current pace.
const BACKLOG_SECONDS: u64 = 10;

/// Interval at which the data connections' pace is measured.
const PACE_EVERY: Duration = Duration::from_millis(250);

#[derive(Default)]
struct NeedState {
    image: Option<(u32, Arc<Outgoing>)>,
    runs: VecDeque<(u64, u64)>,
    closed: bool,
    /// Data connections with this number or higher are idle.
    working: Option<u16>,
    /// Number of blocks in `runs`.
    backlog: u64,
    /// Whether more urgent blocks are being sent on another connection: these wait.
    held: bool,
    pace: BlockPace,
}

/// Measures how many blocks per second the data connections take.
struct BlockPace {
    since: Instant,
    taken: u64,
    per_second: u64,
}

impl Default for BlockPace {
    fn default() -> Self {
        BlockPace {
            since: Instant::now(),
            taken: 0,
            per_second: 0,
        }
    }
}

impl BlockPace {
    fn take(&mut self, blocks: u64) {
        self.taken += blocks;
        let elapsed = self.since.elapsed();
        if elapsed >= PACE_EVERY {
            let per_second = (self.taken as f64 / elapsed.as_secs_f64()) as u64;
            *self = BlockPace {
                since: Instant::now(),
                taken: 0,
                per_second,
            };
        }
    }
}

impl NeedState {
    /// Whether the data connections have enough backlog. Sending digests sooner would only displace the blocks on the
    /// link.
    fn is_full(&self) -> bool {
        self.backlog > (BACKLOG_SECONDS * self.pace.per_second).max(MIN_BACKLOG)
    }
}

impl NeedQueue {
    /// Sets the image that requests refer to from now on.
    pub fn set_image(&self, slot: u32, image: Arc<Outgoing>) {
        let mut state = self.state.lock();
        state.image = Some((slot, image));
        state.runs.clear();
        state.backlog = 0;
        state.held = false;
    }

    /// Adds blocks to the backlog.
    pub fn add(&self, runs: &Runs) {
        let mut state = self.state.lock();
        state.runs.extend(runs.iter());
        state.backlog += runs.count();
        self.more.notify_all();
    }

    /// Waits until the backlog has room. Cancel safe.
    pub async fn room(&self) {
        until(&self.less, || (!self.state.lock().is_full()).then_some(())).await;
    }

    /// Estimated seconds to send the backlog at the current pace; infinite while the pace is unknown.
    pub fn seconds_left(&self) -> f64 {
        let state = self.state.lock();
        match (state.backlog, state.pace.per_second) {
            (0, _) => 0.0,
            (_, 0) => f64::INFINITY,
            (backlog, pace) => backlog as f64 / pace as f64,
        }
    }

    /// Uses only the first `working` data connections: a single stream compresses better than several.
    pub fn only(&self, working: u16) {
        self.state.lock().working = Some(working);
        self.more.notify_all();
    }

    /// Takes back those of some blocks that wait to be sent; returns them.
    pub fn take_back(&self, wanted: &Runs) -> Runs {
        let mut state = self.state.lock();
        let taken = take_out(&mut state.runs, wanted);
        // A block may have been requested more than once.
        state.backlog = state.runs.iter().map(|(_, count)| count).sum();
        taken.into_iter().collect()
    }

    /// Holds the data connections back while more urgent blocks are sent.
    pub fn hold(&self, held: bool) {
        let mut state = self.state.lock();
        state.held = held;
        if !held {
            self.more.notify_all();
        }
    }

    /// Ends the data connections. Blocks still queued belong to an image that is complete or given up.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.held = false;
        state.runs.clear();
        self.more.notify_all();
    }

    /// Takes the blocks of one frame for a data connection, in ascending order as frames require; waits for some if
    /// there are none.
    fn take(&self, number: u16) -> Option<(u32, Arc<Outgoing>, Runs)> {
        let mut state = self.state.lock();
        loop {
            if let Some((slot, image)) = state.image.clone()
                && !state.runs.is_empty()
                && state.working.is_none_or(|working| number < working)
                && !state.held
            {
                let runs = next_frame(&mut state.runs);
                let was_full = state.is_full();
                state.backlog -= runs.count();
                state.pace.take(runs.count());
                if was_full && !state.is_full() {
                    self.less.notify_waiters();
                }
                return Some((slot, image, runs));
            }
            if state.closed {
                return None;
            }
            self.more.wait(&mut state);
        }
    }
}

fn next_frame(queue: &mut VecDeque<(u64, u64)>) -> Runs {
    let mut out = Runs::default();
    let mut left = FRAME_BLOCKS as u64;
    let mut end = 0;
    while left > 0
        && let Some((first, count)) = queue.front_mut()
        && *first >= end
    {
        let n = (*count).min(left);
        out.push(*first, n);
        (end, left) = (*first + n, left - n);
        (*first, *count) = (*first + n, *count - n);
        if *count == 0 {
            queue.pop_front();
        }
    }
    out
}

/// How a data connection's time was spent, to judge whether another data connection would help.
#[derive(Debug, Default)]
pub struct PoolTimes {
    /// Nanoseconds spent reading and compressing.
    pub busy_ns: AtomicU64,
    /// Nanoseconds spent waiting for the socket.
    pub waited_ns: AtomicU64,
    /// Round-trip time of the first data connection in nanoseconds.
    pub round_trip_ns: AtomicU64,
}

/// State of a data connection's thread.
pub struct LiteralSender {
    /// The queue of blocks to send.
    pub needs: Arc<NeedQueue>,
    /// The image's counters.
    pub counters: Arc<Counters>,
    /// Time counters.
    pub times: Arc<PoolTimes>,
    /// Its number in the session.
    pub number: u16,
    /// Compression controller, with its initial level.
    pub pace: Pace,
    /// Fraction of time the destination is busy with this connection, in thousandths, as last reported.
    pub receiver_busy: Arc<AtomicU64>,
}

/// An encoded literal frame for the socket.
pub struct Packed {
    header: Vec<u8>,
    packed: Vec<u8>,
}

impl LiteralSender {
    /// Reads, compresses and sends until the queue is closed or the socket is gone. Blocks the thread.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn run(mut self, socket: &mpsc::Sender<Packed>) -> Result<(), TeleportError> {
        let mut packer = Packer::new(MAX_WINDOW_LOG);
        let mut buffer = vec![0u8; FRAME_BLOCKS * BLOCK_SIZE];
        let mut effort: Option<Effort> = None;
        let stages = &self.counters.stages;
        let mut lap = Lap::start();
        let mut free = Instant::now();
        while let Some((slot, image, runs)) = self.needs.take(self.number) {
            lap.wait(&stages.fetch);
            let start = Instant::now();
            let mut at = 0;
            for (first, count) in runs.iter() {
                let end = at + count as usize * BLOCK_SIZE;
                read_image(&image, first, &mut buffer[at..end])?;
                at = end;
            }
            let read = start.elapsed();
            lap.busy(&stages.fetch);
            stages.fetch.add_bytes(at as u64);
            if effort != Some(self.pace.effort()) {
                effort = Some(self.pace.effort());
                tracing::debug!(connection = self.number, effort = %self.pace.effort(), "compression");
            }
            let mut packed = Vec::with_capacity(at / 2);
            let on_core = time_on_core();
            let packing = packer
                .pack(&buffer[..at], self.pace.effort(), &mut packed)
                .map_err(|e| TeleportError::Failed(format!("cannot compress: {e}")))?;
            let on_core = time_on_core().saturating_sub(on_core);
            let header = LiteralHeader {
                slot,
                packing,
                runs: runs.clone(),
            }
            .encode();
            Counters::add(&self.counters.sent_blocks, runs.count());
            Counters::add(
                &self.counters.data_bytes,
                frame_bytes(header.len() + packed.len()),
            );
            let (busy, bytes) = (start.elapsed(), packed.len());
            lap.busy(&stages.compress);
            stages.compress.add_bytes(at as u64);
            if socket.blocking_send(Packed { header, packed }).is_err() {
                return Ok(());
            }
            let waited = start.elapsed() - busy;
            lap.wait(&stages.compress);
            self.note(busy, waited);
            let receiver_busy = self.receiver_busy.load(Ordering::Relaxed) as f64 / 1000.0;
            let passed = Passed {
                idle: start - free,
                read,
                pack: busy - read,
                stolen: (busy - read).saturating_sub(on_core),
                waited,
                bytes: at,
                packed: bytes,
            };
            self.pace.note(&passed, receiver_busy);
            free = Instant::now();
        }
        Ok(())
    }

    fn note(&self, busy: Duration, waited: Duration) {
        self.times
            .busy_ns
            .fetch_add(busy.as_nanos() as u64, Ordering::Relaxed);
        self.times
            .waited_ns
            .fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// CPU time that this thread has used.
fn time_on_core() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.try_into().unwrap_or_default()
}

/// Sends a data connection's frames until there are no more, then closes the connection. Frames from `first` have
/// priority over literals: digests share the connection, and so its share of the link, with the blocks. The time is
/// added to `send`.
///
/// # Errors
/// When the connection breaks.
pub async fn write_data(
    mut writer: FrameWriter,
    mut literals: mpsc::Receiver<Packed>,
    mut first: mpsc::Receiver<Frame>,
    stages: &SourceStages,
) -> Result<(), TeleportError> {
    let every = drover_net::KeepAlive::default().ping_every;
    let stage = &stages.send;
    loop {
        if let Ok(frame) = first.try_recv() {
            send_timed(&mut writer, frame.kind, &[&frame.payload], stage).await?;
            continue;
        }
        let literal = match literals.try_recv() {
            Ok(literal) => literal,
            Err(mpsc::error::TryRecvError::Disconnected) => break,
            Err(mpsc::error::TryRecvError::Empty) => {
                stage.at_socket(writer.flush()).await?;
                let mut lap = Lap::start();
                let next = tokio::select! {
                    biased;
                    Some(frame) = first.recv() => Next::First(frame),
                    literal = literals.recv() => match literal {
                        Some(literal) => Next::Literal(literal),
                        None => break,
                    },
                    e = writer.ping_when_idle(every) => return Err(e.into()),
                };
                lap.wait(stage);
                match next {
                    Next::Literal(literal) => literal,
                    Next::First(frame) => {
                        send_timed(&mut writer, frame.kind, &[&frame.payload], stage).await?;
                        continue;
                    }
                }
            }
        };
        let parts = [literal.header.as_slice(), literal.packed.as_slice()];
        send_timed(&mut writer, kind::LITERAL, &parts, stage).await?;
    }
    Ok(writer.finish().await?)
}

/// What a data connection's socket sends next.
enum Next {
    First(Frame),
    Literal(Packed),
}

async fn send_timed(
    writer: &mut FrameWriter,
    kind: u8,
    parts: &[&[u8]],
    stage: &Stage,
) -> Result<(), TeleportError> {
    stage.at_socket(writer.send_vectored(kind, parts)).await?;
    stage.add_bytes(frame_bytes(parts.iter().map(|p| p.len()).sum()));
    Ok(())
}

/// Creates the channel between a data connection's thread and its socket.
#[must_use]
pub fn socket_queue() -> (mpsc::Sender<Packed>, mpsc::Receiver<Packed>) {
    mpsc::channel(SOCKET_QUEUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_back_is_not_sent() {
        let queue = NeedQueue::default();
        queue.add(&(10..30).collect());
        queue.add(&(40..50).collect());
        let taken = queue.take_back(&[5, 10, 11, 20, 29, 30, 45, 60].into_iter().collect());
        assert!(taken.blocks().eq([10, 11, 20, 29, 45]));
        let state = queue.state.lock();
        let left: Vec<_> = state.runs.iter().copied().collect();
        assert_eq!(left, [(12, 8), (21, 8), (40, 5), (46, 4)]);
        assert_eq!(state.backlog, 25);
    }

    #[test]
    fn frames_are_full_and_ascending() {
        let mut queue: VecDeque<(u64, u64)> = [(10, 100), (200, 300), (5, 1), (6, 2)].into();
        let first = next_frame(&mut queue);
        assert!(first.iter().eq([(10, 100), (200, 156)]));
        let second = next_frame(&mut queue);
        assert!(second.iter().eq([(356, 144)]), "{second:?}");
        assert!(next_frame(&mut queue).iter().eq([(5, 3)]));
        assert!(queue.is_empty());
    }
}
