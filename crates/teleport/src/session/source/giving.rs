//! Blocks that go ahead of everything: because a machine waits for them at the destination, or a profile names them. They
//! have the control connection, where nothing waits before them; the data connections are held back meanwhile. Which comes next is
//! decided when there is room for it, so that one that a machine waits for overtakes the others ([`Gives`]).

use std::sync::Arc;
use std::time::Duration;

use drover_core::BLOCK_SIZE;
use drover_image::Outgoing;
use drover_net::Frame;
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc;

use crate::TeleportError;
use crate::codec::{LiteralHeader, Runs, Want};
use crate::compress::{Effort, Packer};
use crate::frames::frame_bytes;
use crate::progress::Counters;
use crate::protocol::{GIVEN_BLOCKS, kind};
use crate::session::literals_out::NeedQueue;
use crate::source::{Gives, Violation};
use crate::walk::read_image;

/// How they are compressed: each frame is short, and somebody waits for it.
const EFFORT: Effort = Effort::Zstd(2);

/// The largest window of the stream, as a power of two.
const WINDOW_LOG: u32 = 20;

/// Frames that may wait for the control connection's socket.
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
    gives: Gives,
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
    pub fn give(&self, want: &Want) -> Result<(), Violation> {
        self.change(|gives| gives.give(want))
    }

    /// Sends those of these blocks sooner that it is to send, and `back`, which were to be sent otherwise. Must be called within a
    /// runtime.
    pub fn hurry(&self, want: &Want, back: Runs) -> Result<(), Violation> {
        self.change(|gives| gives.hurry(want, back))
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Gives) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let mut state = self.queue.state.lock();
        change(&mut state.gives)?;
        if state.gives.is_empty() {
            return Ok(());
        }
        drop(state);
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
        Ok(())
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
    /// Waits until there are blocks; `false` at the end.
    fn wait(&self, needs: &NeedQueue) -> bool {
        let mut state = self.state.lock();
        if state.gives.is_empty() {
            needs.hold(false);
        }
        while state.gives.is_empty() && !state.closed {
            self.more.wait(&mut state);
        }
        if !state.closed {
            needs.hold(true);
        }
        !state.closed
    }

    /// The blocks of the next frame.
    fn next(&self) -> Runs {
        self.state.lock().gives.next().unwrap_or_default()
    }
}

impl Thread {
    fn run(&self) -> Result<(), TeleportError> {
        let mut packer = Packer::new(WINDOW_LOG);
        let mut buffer = vec![0u8; GIVEN_BLOCKS * BLOCK_SIZE];
        while self.queue.wait(&self.needs) {
            // What is asked for while the socket is busy may be more urgent.
            while self.out.max_capacity() - self.out.capacity() >= MAX_OUT && !self.out.is_closed()
            {
                std::thread::sleep(OUT_PAUSE);
            }
            let runs = self.queue.next();
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
            let frame = Frame::new(kind::GIVEN, payload);
            if self.out.blocking_send(frame).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}
