//! Blocks that go ahead of everything: because a machine waits for them at the destination, or a profile names them. They
//! have the control connection, where nothing waits before them; the data connections are held back meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use drover_core::BLOCK_SIZE;
use drover_image::Outgoing;
use drover_net::Frame;
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc;

use crate::TeleportError;
use crate::codec::{LiteralHeader, Runs};
use crate::compress::{Effort, Packer};
use crate::frames::frame_bytes;
use crate::progress::Counters;
use crate::protocol::{GIVEN_BLOCKS, kind};
use crate::session::literals_out::NeedQueue;
use crate::walk::read_image;

/// How they are compressed: each frame is short, and somebody waits for it.
const EFFORT: Effort = Effort::Zstd(2);

/// The largest window of the stream, as a power of two.
const WINDOW_LOG: u32 = 20;

/// Frames that may wait for the control connection's socket: what is asked for later may be more urgent.
const MAX_OUT: usize = 2;

/// Interval at which that is looked at.
const OUT_PAUSE: Duration = Duration::from_millis(1);

/// The thread that sends the blocks of one image; it ends when this is dropped.
pub struct Giver {
    queue: Arc<Queue>,
    failure: tokio::sync::Mutex<mpsc::Receiver<TeleportError>>,
    /// Until the first blocks are asked for.
    thread: Mutex<Option<(Thread, mpsc::Sender<TeleportError>)>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    runs: VecDeque<(u64, u64)>,
    closed: bool,
}

/// What the thread needs.
struct Thread {
    slot: u32,
    image: Arc<Outgoing>,
    out: mpsc::Sender<Frame>,
    needs: Arc<NeedQueue>,
    counters: Arc<Counters>,
    queue: Arc<Queue>,
}

impl Giver {
    /// For the blocks of one image. The thread begins with the first of them.
    pub fn start(
        slot: u32,
        image: Arc<Outgoing>,
        out: mpsc::Sender<Frame>,
        needs: Arc<NeedQueue>,
        counters: Arc<Counters>,
    ) -> Self {
        let queue = Arc::<Queue>::default();
        let (failed, failure) = mpsc::channel(1);
        let thread = Thread {
            slot,
            image,
            out,
            needs,
            counters,
            queue: queue.clone(),
        };
        Giver {
            queue,
            failure: tokio::sync::Mutex::new(failure),
            thread: Mutex::new(Some((thread, failed))),
        }
    }

    /// Sends these blocks. Must be called within a runtime.
    pub fn give(&self, runs: &Runs) {
        if runs.is_empty() {
            return;
        }
        self.queue.state.lock().runs.extend(runs.iter());
        self.queue.more.notify_one();
        if let Some((thread, failed)) = self.thread.lock().take() {
            tokio::task::spawn_blocking(move || {
                let done = thread.run();
                thread.needs.hold(false);
                if let Err(e) = done {
                    let _ = failed.blocking_send(e);
                }
            });
        }
    }

    /// Waits until it fails.
    pub async fn failed(&self) -> TeleportError {
        match self.failure.lock().await.recv().await {
            Some(error) => error,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Giver {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.more.notify_one();
    }
}

impl Queue {
    /// The blocks of the next frame, in ascending order; `None` at the end.
    fn next(&self, needs: &NeedQueue) -> Option<Runs> {
        let mut state = self.state.lock();
        if state.runs.is_empty() {
            needs.hold(false);
        }
        while state.runs.is_empty() && !state.closed {
            self.more.wait(&mut state);
        }
        if state.closed {
            return None;
        }
        needs.hold(true);
        let mut out = Runs::default();
        let (mut left, mut end) = (GIVEN_BLOCKS as u64, 0);
        while left > 0
            && let Some((first, count)) = state.runs.front_mut()
            && *first >= end
        {
            let n = (*count).min(left);
            out.push(*first, n);
            (end, left) = (*first + n, left - n);
            (*first, *count) = (*first + n, *count - n);
            if *count == 0 {
                state.runs.pop_front();
            }
        }
        Some(out)
    }
}

impl Thread {
    fn run(&self) -> Result<(), TeleportError> {
        let mut packer = Packer::new(WINDOW_LOG);
        let mut buffer = vec![0u8; GIVEN_BLOCKS * BLOCK_SIZE];
        while let Some(runs) = self.queue.next(&self.needs) {
            let mut at = 0;
            for (first, count) in runs.iter() {
                let end = at + count as usize * BLOCK_SIZE;
                read_image(&self.image, first, &mut buffer[at..end])?;
                at = end;
            }
            let mut packed = Vec::with_capacity(at / 2);
            let packing = packer
                .pack(&buffer[..at], EFFORT, &mut packed)
                .map_err(|e| TeleportError::Failed(format!("cannot compress: {e}")))?;
            let header = LiteralHeader {
                slot: self.slot,
                packing,
                runs: runs.clone(),
            };
            let mut payload = header.encode();
            payload.extend_from_slice(&packed);
            Counters::add(&self.counters.sent_blocks, runs.count());
            Counters::add(&self.counters.data_bytes, frame_bytes(payload.len()));
            while self.out.max_capacity() - self.out.capacity() >= MAX_OUT && !self.out.is_closed()
            {
                std::thread::sleep(OUT_PAUSE);
            }
            let frame = Frame::new(kind::GIVEN, payload);
            if self.out.blocking_send(frame).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}
